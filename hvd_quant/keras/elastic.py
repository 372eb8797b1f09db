"""Elastic training with Keras: horovod.tensorflow.keras.elastic, with a state that Keras 3 and compression need."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow.keras.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

from hvd_quant.tensorflow.elastic import TensorFlowKerasState, run

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(TensorFlowKerasState):
    """What workers of an elastic job agree on: a model, its optimizer, and what else is given by keyword.

    Arguments:
        model: built.
        optimizer: that of the compiled model where None.
        kwargs: attributes of this object, to be kept the same on all workers.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer=optimizer, **kwargs)
