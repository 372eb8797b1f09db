"""Gradients on their way: memory, encode, exchange and decode, as operations of a graph."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from horovod.common.util import split_list
from horovod.tensorflow import allreduce, mpi_ops
from horovod.tensorflow.mpi_ops import Adasum, Average, ProcessSet, Sum, global_process_set
from tensorflow.python.ops import control_flow_util

from hvd_quant import wire
from hvd_quant.compressors import TensorInfo
from hvd_quant.exchange import sent_bytes
from hvd_quant.ops import tensorflow as ops
from hvd_quant.registry import get_compressor
from hvd_quant.tensorflow.codes import Hosted, Traced
from hvd_quant.tensorflow.state import COSTS, TIMES, Slot, State, untracked

_NONE, _FP16 = get_compressor("none"), get_compressor("fp16")
Gradient = tf.Tensor | tf.IndexedSlices


class Reducer(tf.Module):
    """Reduces the gradients of variables over the workers.

    A ``tf.train.Checkpoint`` of what tracks it holds the compression state; each worker has to save and restore its own.

    Arguments:
        compression: a compressor, a spec string such as ``"topk:ratio=0.01"``, a mapping from patterns of variable paths to
            these (first match wins, no match goes dense), any class with Horovod's ``compress``/``decompress``, or a
            :class:`State`, whose state is then used.
        variables: TensorFlow's or Keras's, in the same order on all workers.
        name: starts the names of the collectives; a :class:`State` has its own.
        op: Average or Sum; Adasum for uncompressed and fp16 gradients.
        predivide: Horovod's gradient_predivide_factor, for dense gradients; a compressed mean is the same whatever it is.
        groups: lists of variables, or a number of groups, whose exchanges start together.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense gradients; otherwise they are not compressed.
        process_set: the workers to reduce over.

    Raises:
        TypeError, ValueError: for a compression, variable or combination that can't work, saying why.
    """

    def __init__(self, compression: Any, variables: Iterable[Any], *, name: str = "Distributed", op: int = Average,
                 predivide: float = 1.0, groups: int | list[list[Any]] | None = None, sparse_as_dense: bool = False,
                 process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.state = compression if isinstance(compression, State) else State(compression, variables, process_set, name)
        for slot in self.state.slots.values():
            if op not in (Average, Sum) and slot.compressor not in ((_NONE, _FP16) if op == Adasum else (_NONE,)):
                raise ValueError(f"op={op!r} can't be combined with compression={slot.compressor.spec}: it needs the "
                                 "gradients themselves; use 'none', or op=Average")
        self._op, self._predivide, self._sparse_as_dense = op, predivide, sparse_as_dense
        self._process_set = process_set
        if groups is not None and not isinstance(groups, int):
            groups = [{self.state.place(v) for v in group} for group in groups]
        in_graph = tf.function(self._exchange_all, autograph=False, reduce_retracing=True)
        # In a function, since models that are saved would take a tf.function that they find along.
        untracked(self, _groups=groups, _warned=set(), _in_graph=lambda: in_graph)

    def stats(self) -> dict[str, Any]:
        """See :meth:`State.stats`."""
        return self.state.stats()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`State.state_dict`."""
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`State.load_state_dict`."""
        self.state.load_state_dict(state)

    @tf.autograph.experimental.do_not_convert
    def reduce(self, grads: Iterable[Gradient | None], variables: Iterable[Any]) -> list[Gradient | None]:
        """The reduced gradients, eagerly or in the graph that is being traced; None stays None.

        Arguments:
            grads: of real floating point, each of its variable's shape; ``tf.IndexedSlices`` too.
            variables: whose they are.

        Raises:
            ValueError: for a variable without state here, and where XLA would compile the collectives.
            tf.errors.DataLossError: when run, on every worker, for a payload that is damaged, foreign, or says that its
                worker failed.
        """
        grads, variables = list(grads), list(variables)
        if not _ELASTIC and (not self._process_set.included() or self._process_set.size() == 1):
            return grads
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError("gradients can't be exchanged inside a function that XLA compiles, since XLA can't contain "
                             "Horovod's collectives: pass jit_compile=False (or 'auto' to model.compile)")
        given: dict[int, Gradient] = {}  # by place: a variable may be among the variables twice
        for grad, variable in zip(grads, variables):
            if grad is not None:
                given[self.state.place(variable)] = tf.convert_to_tensor(grad) if self._sparse_as_dense else grad
        exchange_all = self._in_graph() if tf.executing_eagerly() else self._exchange_all
        reduced = dict(zip(given, exchange_all(list(given.values()), tuple(given))))
        return [None if grad is None else reduced[self.state.place(v)] for grad, v in zip(grads, variables)]

    def _exchange_all(self, grads: list[Gradient], places: tuple[int, ...]) -> list[Gradient]:
        grads, reduced = self._started_together(grads, places), [None] * len(grads)
        # The last first: backward makes the last layers' gradients first, and stateful operations run in program order.
        for i in reversed(range(len(grads))):
            reduced[i] = self.exchange(self.state.by_place[places[i]], grads[i])
        return reduced

    def _started_together(self, grads: list[Gradient], places: tuple[int, ...]) -> list[Gradient]:
        """The gradients, those of a group available once all of the group are."""
        if self._groups is None:
            return grads
        if isinstance(self._groups, int):
            groups = split_list(list(range(len(grads))), self._groups)
        else:
            groups = [[i for i, place in enumerate(places) if place in group] for group in self._groups]
        grads = list(grads)
        for group in groups:
            with tf.control_dependencies([_tensor(grads[i]) for i in group]):
                for i in group:
                    grads[i] = tf.identity(grads[i])
        return grads

    def exchange(self, slot: Slot, grad: Gradient) -> Gradient:
        """One gradient's exchange in the graph that is being made, chosen now or, for warm-ups and elastic jobs, when it runs.

        Collectives are named after the slot. Its exchanges follow each other, whatever graphs they are in, since each begins
        with reading its step and ends with counting it: so no two of a name are ever under way.
        """
        slot.sparse = isinstance(grad, tf.IndexedSlices)
        at = {"rank": self._process_set.rank(), "world": self._process_set.size()}
        if _ELASTIC:
            at = {"rank": mpi_ops.rank_op(), "world": mpi_ops.size_op(self._process_set.process_set_id)}
        info = dataclasses.replace(slot.info, step=slot.step.read_value(), **at)
        during, after = slot.kinds(max(2, self._process_set.size()))
        if self._op not in (Average, Sum):
            during = after = "dense"

        def travel(kind: str) -> Callable[[], tf.Tensor]:
            return lambda: getattr(self, f"_{kind}")(slot, info, grad)

        def exchanged() -> Gradient:
            if slot.sparse:
                return self._sparse(slot, info, grad)
            if during == after:
                return travel(after)()
            return tf.cond(info.step < slot.compressor.warmup, travel(during), travel(after))

        if _ELASTIC:
            included = mpi_ops.process_set_included_op(self._process_set.process_set_id)
            reduced = tf.cond((included == 1) & (info.world > 1), exchanged, lambda: grad)
        else:
            reduced = exchanged()
        with tf.control_dependencies([_tensor(reduced)]):
            counted = slot.step.assign_add(1)
        with tf.control_dependencies([counted]):
            return tf.identity(reduced)

    def _dense(self, slot: Slot, info: TensorInfo, grad: tf.Tensor) -> tf.Tensor:
        """Horovod's allreduce of the gradient as it is, or as a class in Horovod's style makes it."""
        given, started = _begun(grad, info)
        # Horovod can't reduce bf16, and sums of fp16 overflow where the mean doesn't; fp32 holds both.
        wide = tf.cast(given, tf.float32) if grad.dtype.size == 2 else given
        # Adasum reduces fp16 as Horovod does: what compress() returns.
        style = _HorovodStyle(self.state.horovod_style or (slot.compressor if self._op == Adasum else _NONE))
        factors = {}
        if self._op == Average:
            factors = {"prescale_factor": 1 / self._predivide, "postscale_factor": self._predivide}
        reduced = allreduce(wide, op=self._op, compression=style, name=f"HorovodAllreduce_{slot.label}",
                            ignore_name_scope=True, process_set=self._process_set, **factors)
        reduced, decoded = ops.now(reduced)
        times = [started, style.encoded, style.arrived, decoded]
        return self._counted(slot, info, "dense", style.bytes_sent, times, tf.cast(reduced, grad.dtype))

    def _allreduce(self, slot: Slot, info: TensorInfo, grad: tf.Tensor) -> tf.Tensor:
        """A linear code: what it yields is summed by Horovod's allreduce, round by round."""
        flat, started = _begun(_flat(grad), info)
        rounds = slot.compressor.rounds(ops, flat, slot.state, info, flat)
        total, bytes_sent, encoded = None, 0, []
        while True:
            try:
                tensor, moment = ops.now(rounds.send(total))
            except StopIteration as end:
                mean, decoded = ops.now(end.value)
                break
            total = mpi_ops._allreduce(tensor, op=Sum, name=f"HorovodAllreduce_{slot.label}_{len(encoded)}",
                                       ignore_name_scope=True, process_set=self._process_set)
            total, arrived = ops.now(total)
            bytes_sent += _bytes_of(tensor)
            encoded.append(moment)
        mean = self._as(grad, mean, info, factor=self._op == Sum)
        return self._counted(slot, info, "allreduce", bytes_sent, [started, encoded[0], arrived, decoded], mean)

    def _allgather(self, slot: Slot, info: TensorInfo, grad: tf.Tensor) -> tf.Tensor:
        """Every worker gets every payload and adds them up in rank order, so that all have the same bits."""
        code = (Traced if slot.compressor.native else Hosted)(slot.compressor)
        flat, started = _begun(_flat(grad), info)
        payload, encoded = ops.now(code.encode(flat, slot.state, info))
        gathered, arrived = ops.now(self._gather(payload, slot.label))
        payloads = ops.Payloads(gathered, info.world, info.name)
        flags = ops.flags(payloads, slot.compressor.name, info.numel)

        def undo() -> tf.Tensor:
            with tf.control_dependencies([code.undo(flat, slot.state, payload, info)]):
                return tf.constant(True)

        # With a value that is not finite, a worker that failed, or a damaged payload, this tensor's step is void: nothing was
        # received, so nothing may leave the residual. In the last two cases decode then says what is wrong.
        void = flags > 0
        own = ops.flags([payload], slot.compressor.name, info.numel)
        undone = tf.cond(void & (own < wire.FAILED), undo, lambda: tf.constant(True)) if slot.state else void
        with tf.control_dependencies([undone]):
            total, decoded = ops.now(code.decode(payloads, info, self._op == Average, flat))
        times = [started, encoded, arrived, decoded]
        return self._counted(slot, info, "allgather", _bytes_of(payload), times, self._as(grad, total, info), void)

    def _sparse(self, slot: Slot, info: TensorInfo, grad: tf.IndexedSlices) -> tf.IndexedSlices:
        """A sparse gradient: an allgather of its indices and one of its values."""
        if slot.compressor.name != "none" and info.name not in self._warned:
            self._warned.add(info.name)
            warnings.warn(f"the gradient of {info.name} is sparse and is exchanged uncompressed; pass sparse_as_dense=True "
                          "to compress it as a dense one", stacklevel=2)
        if self._op not in (Average, Sum):
            raise ValueError(f"the gradient of {info.name} is sparse, which op={self._op!r} can't reduce: pass "
                             "sparse_as_dense=True")
        (values, started), (indices, _) = _begun(grad.values, info), _begun(grad.indices, info)
        bytes_sent = _bytes_of(values) + _bytes_of(indices)
        if grad.dtype == tf.bfloat16:  # which Horovod doesn't know; its bits it can send
            values = tf.bitcast(self._gather(tf.bitcast(values, tf.uint16), f"{slot.label}_values"), tf.bfloat16)
        else:
            values = self._gather(values, f"{slot.label}_values")
        indices = self._gather(indices, f"{slot.label}_indices")
        values, arrived = ops.now(values)
        if self._op == Average:
            values = values / tf.cast(info.world, values.dtype)
        values = self._counted(slot, info, "sparse", bytes_sent, [started, started, arrived, arrived], values)
        return tf.IndexedSlices(values, indices, grad.dense_shape)

    def _gather(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        return mpi_ops.allgather(tensor, name=f"HorovodAllgather_{label}", ignore_name_scope=True,
                                 process_set=self._process_set)

    def _as(self, grad: tf.Tensor, flat: tf.Tensor, info: TensorInfo, factor: bool = False) -> tf.Tensor:
        """A flat fp32 result, times the number of workers if ``factor``, in the shape and type of ``grad``."""
        if factor:
            flat = flat * tf.cast(info.world, tf.float32)
        return tf.cast(tf.reshape(flat, info.shape), grad.dtype)

    def _counted(self, slot: Slot, info: TensorInfo, kind: str, bytes_sent: Any, times: list[tf.Tensor], result: tf.Tensor,
                 void: Any = False) -> tf.Tensor:
        """``result``, once the costs of its exchange are added to the slot's."""
        world = tf.cast(info.world, tf.float64) if _ELASTIC else info.world
        costs = {"dense_bytes": sent_bytes("allreduce", 4.0 * info.numel, world),
                 "wire_bytes": sent_bytes(kind, bytes_sent, world), **dict(zip(TIMES, times)), "void_tensors": void}
        added = slot.costs.assign_add(tf.stack([tf.cast(costs[what], tf.float64) for what in COSTS]))
        with tf.control_dependencies([added]):
            return tf.identity(result)


def local_gradient(grad: Gradient | None, process_set: ProcessSet) -> Gradient | None:
    """A local variable's gradient, divided by the number of workers: then it has the weight it would have in an average."""
    if grad is None:
        return None
    world = mpi_ops.size_op(process_set.process_set_id) if _ELASTIC else process_set.size()
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / tf.cast(world, grad.dtype), grad.indices, grad.dense_shape)
    return grad / tf.cast(world, grad.dtype)


class _HorovodStyle:
    """A compressor in Horovod's sense that notes when it has worked on what."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        sent, context = self._inner.compress(tensor)
        sent, self.encoded = ops.now(sent)
        self.bytes_sent = _bytes_of(sent)
        return sent, context

    def decompress(self, tensor: tf.Tensor, context: Any) -> tf.Tensor:
        tensor, self.arrived = ops.now(tensor)
        return self._inner.decompress(tensor, context)


_ELASTIC = bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))


def _begun(tensor: tf.Tensor, info: TensorInfo) -> tuple[tf.Tensor, tf.Tensor]:
    """A tensor that waits for its slot's exchange before, and when it was there."""
    with tf.control_dependencies([info.step]):
        return ops.now(tensor)


def _flat(grad: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(grad, tf.float32), [-1])


def _bytes_of(tensor: tf.Tensor) -> float | tf.Tensor:
    """A tensor's bytes, as float64 where they are known only when the graph runs."""
    numel, size = tensor.shape.num_elements(), tensor.dtype.size
    return float(size * numel) if numel is not None else tf.cast(size * tf.size(tensor, tf.int64), tf.float64)


def _tensor(grad: Gradient) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad
