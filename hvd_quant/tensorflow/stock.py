"""Compressors inside Horovod's stock tape, optimizer and collectives.

Horovod calls ``compress(gradient)`` while it makes a graph, sums or averages what it returns, and hands the result to
``decompress``. A bound compressor puts the whole exchange into the graph itself and returns a 1-element tensor of ones: what
comes back (1 for Average, the number of workers for Sum) is the factor for the mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set, size

from hvd_quant.compressors import Compressor
from hvd_quant.exchange.checkpoint import averaged
from hvd_quant.ops import tensorflow as ops
from hvd_quant.tensorflow.reducer import Reducer
from hvd_quant.tensorflow.state import Slot, State, untracked
from hvd_quant.tensorflow.variables import plain


def bind(compressor: Compressor, variables: list[Any], process_set: ProcessSet | None = None) -> Bound:
    """See :meth:`hvd_quant.Compressor.bind`; (name, variable) pairs are accepted too."""
    variables = [v[1] if isinstance(v, tuple) and len(v) == 2 else v for v in variables]
    for v in variables:
        if not isinstance(plain(v), tf.Variable):
            raise ValueError("bind takes variables such as model.trainable_variables, the ones that the optimizer or tape "
                             f"gets; it was given a {type(v).__name__}")
    return Bound(compressor, variables, process_set or global_process_set)


class Bound(State):
    """A compressor with state for variables, to be passed as ``compression=`` to a distributed tape, stock or ours.

    Horovod doesn't tell a compressor which gradient it gets, but hands them over in the order of the tape's sources: that must
    be the order in which the variables were bound. Track it in a ``tf.train.Checkpoint`` to save the state, or use
    ``state_dict()`` and ``load_state_dict()``; ``stats()`` tells what the exchanges cost.
    """

    def __init__(self, compressor: Compressor, variables: Iterable[Any], process_set: ProcessSet) -> None:
        super().__init__(compressor, variables, process_set, "bound")
        self.compressor = compressor
        untracked(self, _reducer=Reducer(self, [], process_set=process_set), _next=weakref.WeakKeyDictionary())

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], op: int | None = None) -> None:
        """See :meth:`State.load_state_dict`.

        Arguments:
            op: that of the tape, Average or Sum, which a bound compressor doesn't know: needed for the states of another number of
                workers, whose shares depend on it.
        """
        super().load_state_dict(state, averaged(op))

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Put the exchange of the next variable's gradient into the graph.

        Raises:
            ValueError: if ``tensor`` is the gradient of no bound variable, and for what Horovod's tape has no place for.
        """
        self.compressor.require_no_place()
        slot = self._take(tensor)
        if all(way.kind == "dense" for way in slot.ways):
            return tensor, None
        return ops.now(tf.ones([1]))[0], self._reducer.exchange(slot, tensor)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, mean: tf.Tensor | None) -> tf.Tensor:
        """The reduced gradient."""
        if mean is None:
            return tensor
        factor = tf.round(100 * tensor[0]) / 100  # gradient_predivide_factor leaves rounding errors
        return mean * tf.cast(factor, mean.dtype)

    def _take(self, tensor: tf.Tensor) -> Slot:
        """That of the next variable, in the graph that is being made, whose gradient ``tensor`` can be."""
        graph = getattr(tensor, "graph", None) if not tf.executing_eagerly() else None
        if graph is None:
            raise ValueError("a bound compressor is for gradients of Horovod's tape or optimizer; for collectives of your "
                             "own pass none or fp16")
        while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
            graph = graph.outer_graph
        slots = self.by_place
        for at in range(self._next.get(graph, 0), len(slots)):
            # Variables without a gradient are left out.
            if tensor.shape.is_compatible_with(slots[at].info.shape):
                self._next[graph] = at + 1
                return slots[at]
        raise ValueError(
            f"a tensor of shape {tensor.shape} is not the gradient of a variable that {self.compressor.spec} was bound to "
            "and that comes next: bind the sources of the tape, all of them and in their order")


def compress_half(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """fp16 for Horovod's own functions: g / n, so that the sum can't overflow where the mean doesn't."""
    if not tensor.dtype.is_floating:
        return tensor, None
    return tf.cast(tensor / tf.cast(size(), tensor.dtype), tf.float16), tensor.dtype


def decompress_half(tensor: tf.Tensor, dtype: Any) -> tf.Tensor:
    return tensor if dtype is None else tf.cast(tensor, dtype) * tf.cast(size(), dtype)
