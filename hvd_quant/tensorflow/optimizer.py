"""DistributedOptimizer for every optimizer that TensorFlow users have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow.mpi_ops import Average, ProcessSet, global_process_set

from hvd_quant.compressors import Compressor
from hvd_quant.exchange import buckets
from hvd_quant.registry import get_compressor, resolve
from hvd_quant.tensorflow.arguments import advice_on, checked_bucket_bytes, checked_groups, warn_if_never_averaged
from hvd_quant.tensorflow.reducer import Gradient, Reducer


def DistributedOptimizer(
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = get_compressor("none"),  # noqa: B008 - it is frozen
        sparse_as_dense: bool = False,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        average_aggregated_gradients: bool = False,
        num_groups: int = 0,
        groups: int | list[list[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        bucket_bytes: int = buckets.BUCKET_BYTES,
        verify_every: int | None = None) -> Any:
    """Wrap an optimizer so that gradients are reduced over the workers, compressed, before they are applied.

    A Keras optimizer gets what :func:`hvd_quant.keras.DistributedOptimizer` makes of it; one of ``tf.compat.v1.train`` reduces
    in ``compute_gradients``.

    Arguments:
        optimizer: of Keras 3, of tf_keras, or of ``tf.compat.v1.train``.
        name: starts the names of the collectives.
        use_locking: for ``tf.compat.v1.train``, as in Horovod.
        compression, bucket_bytes, verify_every: as for :func:`hvd_quant.tensorflow.DistributedGradientTape`.
        others: as in ``horovod.tensorflow.DistributedOptimizer``.

    Raises:
        ValueError, TypeError: for a combination that can't work, as Horovod does and as :class:`Reducer` does.
    """
    groups = checked_groups(gradient_predivide_factor, op, num_groups, groups)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        import hvd_quant.keras as keras
        return keras.DistributedOptimizer(
            optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            backward_passes_per_step, average_aggregated_gradients, groups=groups, process_set=process_set,
            scale_local_gradients=scale_local_gradients, bucket_bytes=bucket_bytes, verify_every=verify_every)
    checked_bucket_bytes(bucket_bytes)
    for sentence in advice_on(optimizer, compression):
        warnings.warn(sentence, stacklevel=2)
    if op == horovod.Adasum:
        compression = resolve(compression)
        if isinstance(compression, Mapping) or isinstance(compression, Compressor) and compression.name not in ("none", "fp16"):
            raise ValueError(f"op=Adasum can't be combined with compression={compression!r}: give 'none' or 'fp16', or op=Average")
        if verify_every is not None:
            raise ValueError(f"op=Adasum can't be combined with verify_every={verify_every!r} here: leave it out, or give op=Average")
        return horovod.DistributedOptimizer(
            optimizer, name, use_locking, device_dense, device_sparse, compression, sparse_as_dense, backward_passes_per_step, op,
            gradient_predivide_factor, average_aggregated_gradients, groups=groups, process_set=process_set)
    wrapped = horovod.DistributedOptimizer(
        optimizer, name, use_locking, device_dense, device_sparse, horovod.Compression.none, sparse_as_dense,
        backward_passes_per_step, op, gradient_predivide_factor, average_aggregated_gradients, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients)

    reducers: dict[Any, Reducer] = {}

    def reduce(grads: Any, variables: Any, use_generic_names: bool = False) -> list[Gradient | None]:
        # The variables are known when gradients are computed, and may be others the next time.
        key = tuple(map(id, variables))
        if key not in reducers:
            reducers[key] = Reducer(compression, variables, name=name or f"Distributed{type(optimizer).__name__}", op=op,
                                    predivide=gradient_predivide_factor, groups=groups, sparse_as_dense=sparse_as_dense,
                                    process_set=process_set, bucket_bytes=bucket_bytes, verify_every=verify_every,
                                    agree_on={"backward_passes_per_step": backward_passes_per_step})
            warn_if_never_averaged(reducers[key].state)
        with tf.device(device_dense):
            return reducers[key].reduce(grads, variables)

    wrapped._allreduce_grads = reduce
    if wrapped._agg_helper:
        wrapped._agg_helper._allreduce_grads = reduce
    return wrapped


def ModelAveragingOptimizer(optimizer: Any, **arguments: Any) -> Any:
    """Wrap a Keras optimizer so that the workers average their variables and not their gradients: see
    :func:`hvd_quant.keras.ModelAveragingOptimizer`."""
    import hvd_quant.keras as keras
    return keras.ModelAveragingOptimizer(optimizer, **arguments)
