"""Horovod's functions on variables, for Keras 3's variables too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.functions import allgather_object, broadcast_object, broadcast_object_fn  # noqa: F401
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set

from hvd_quant.exchange import refuse_join
from hvd_quant.tensorflow.state import COLLECTION, compresses
from hvd_quant.tensorflow.variables import plain


def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> tf.Operation | None:
    """Give all workers the values that one has.

    Variables are told apart by their places. (Horovod goes by their names, and waits for ever where these differ between workers,
    as when one of them has loaded its model.)

    Arguments:
        variables: TensorFlow's or Keras's, in the same order on all workers: ``model.variables``, ``optimizer.variables``.
        root_rank: the worker whose values are taken.
        process_set: the workers that take part.
        inplace: without temporary memory.

    Returns:
        In a graph, the operation that does it; eagerly it is done.
    """
    variables = [plain(v) for v in variables]

    def assigned(place: int, variable: tf.Variable) -> tf.Tensor:
        value = mpi_ops.broadcast(variable, root_rank, name=unused_label(f"HorovodBroadcast_{place}"), ignore_name_scope=True,
                                  process_set=process_set)
        return variable.assign(value)

    def in_place(places: list[int]) -> tf.Operation:
        return mpi_ops.MPI_LIB.horovod_broadcast_inplace_resource(
            [variables[i].handle for i in places], variable_names=[f"variable_{i}" for i in places], root_rank=root_rank,
            name=unused_label("HorovodBroadcastInplace"), process_set_id=process_set.process_set_id)

    def broadcast() -> tf.Operation:
        if not inplace:
            return tf.group(*(assigned(i, v) for i, v in enumerate(variables)))
        devices = dict.fromkeys(v.device for v in variables)
        return tf.group(*(in_place([i for i, v in enumerate(variables) if v.device == device]) for device in devices))

    if not tf.executing_eagerly():
        return broadcast()
    tf.function(lambda: broadcast() and None, autograph=False)()
    return None


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """In a graph of TensorFlow 1, give all workers the global variables of one, but for the compression state.

    Raises:
        RuntimeError: where TensorFlow executes eagerly, as in Horovod.
    """
    if tf.executing_eagerly():
        raise RuntimeError("broadcast_global_variables() is for graphs of TensorFlow 1; here use broadcast_variables(model.variables, "
                           "root_rank)")
    own = {id(v) for v in tf.compat.v1.get_collection(COLLECTION)}
    return broadcast_variables([v for v in tf.compat.v1.global_variables() if id(v) not in own], root_rank)


def join() -> Any:
    """Wait for workers that have more batches than this one, as ``horovod.tensorflow.join`` does.

    Raises:
        ValueError: where this process compresses gradients.
    """
    if compresses():
        refuse_join()
    return mpi_ops.join()


_uses: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def unused_label(label: str) -> str:
    """``label``, or ``label_1``... if it is in use in the outermost graph that is being made: collectives of one graph that may be
    under way together need different names, the same on all workers."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    uses = _uses.setdefault(graph, {})
    uses[label] = uses.get(label, -1) + 1
    return f"{label}_{uses[label]}" if uses[label] else label
