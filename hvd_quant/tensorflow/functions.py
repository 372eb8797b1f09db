"""Horovod's functions on variables, for Keras 3's variables too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod.tensorflow import functions
from horovod.tensorflow.functions import allgather_object, broadcast_object, broadcast_object_fn  # noqa: F401
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set

from hvd_quant.tensorflow.state import plain


def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> Any:
    """Give all workers the values that one has.

    Arguments:
        variables: TensorFlow's or Keras's, in the same order on all workers: ``model.variables``, ``optimizer.variables``.
        root_rank: the worker whose values are taken.
        process_set: the workers that take part.
        inplace: without temporary memory.
    """
    return functions.broadcast_variables([plain(v) for v in variables], root_rank, process_set, inplace)
