"""Elastic training: horovod.tensorflow.elastic, for Keras 3 too, and with compression state.

Compression state is each worker's own. After a failure it goes back to the last commit like everything else; when
workers come and go, those that stay keep theirs and newcomers start at zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.elastic import TensorFlowState
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import init, rank, shutdown

from hvd_quant.tensorflow.functions import broadcast_variables
from hvd_quant.tensorflow.state import slots_of
from hvd_quant.tensorflow.variables import make_variables, plain, sums_of, variables_of

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable) -> Callable:
    """Decorator for a function that trains: when workers come, go or fail, its state is brought to where all agree, and
    it is called again.

    Arguments:
        func: takes a ``State`` first.
    """
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.UnknownError as error:
            if "Horovod" in error.message:  # the name of the operation that failed
                raise HorovodInternalError(error) from error
            raise

    return run_fn(wrapper, _reset)


def _reset() -> None:
    shutdown()
    init()


class TensorFlowKerasState(ObjectState):
    """What workers of an elastic job agree on: a Keras model, its optimizer, and what else is given by keyword.

    Arguments:
        model: of Keras 3 or tf_keras, built.
        optimizer: that of the compiled model where None.
        backend: accepted as in Horovod, and not needed.
        kwargs: attributes of this object, to be kept the same on all workers.

    Raises:
        ValueError: if the model isn't built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("the model has no weights yet that can be kept the same on all workers: call "
                             "model.build(input_shape) first")
        self.model, self.optimizer, self.backend = model, optimizer or model.optimizer, backend
        # So that newcomers have as many variables as those who have trained before.
        make_variables(self.optimizer, model.trainable_variables)
        self._saved: list[tuple[Any, tf.Tensor]] = []
        self._save_variables()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def save(self) -> None:
        """Note all values, to be returned to by :meth:`restore`."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Return to what was saved last, this worker's compression state included."""
        for variable, value in self._saved:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take the values of worker 0, but for the compression state and for gradients that are being added up."""
        # Not the states of random generators, which are among the model's variables in Keras 3.
        broadcast_variables(self.model.weights, 0)
        own = {id(plain(v)) for v in sums_of(self.optimizer)}
        broadcast_variables([v for v in variables_of(self.optimizer) if id(plain(v)) not in own], 0)
        # When something is exchanged, and how, depends on the numbers of exchanges and passes before.
        broadcast_variables(self._kept()[0], 0)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        counts, own = self._kept()
        variables = [*self.model.variables, *variables_of(self.optimizer), *counts, *own]
        self._saved = [(variable, tf.identity(variable)) for variable in variables]

    def _kept(self) -> tuple[list[tf.Variable], list[tf.Variable]]:
        """What is kept in addition: counts of a distributed optimizer, the same on all workers, and what is this worker's own."""
        from hvd_quant.keras.reducing import reducing  # which needs hvd_quant.tensorflow itself

        optimizer = reducing(self.optimizer)
        slots = [] if optimizer is None else optimizer._hvd_reducer.state.by_place
        counts = [count for slot in slots for count in slot.counts]
        own = [value for slot in slots for value in slot.state.values()]
        for slot in slots_of(self.model.variables):
            if slot not in slots:  # a tape's, or bind()'s, which newcomers may not have yet; nothing common depends on its counts
                own += [*slot.counts, *slot.state.values()]
        window = None if optimizer is None else optimizer._hvd_window
        return (counts, own) if window is None else ([*counts, window.count], [*own, *window.sums])
