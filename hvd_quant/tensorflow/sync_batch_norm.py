"""Batch normalization over the batches of all workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import Sum, _allreduce, size
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization as _ForLegacyKeras

from hvd_quant.tensorflow.functions import unused_label

__all__ = ["SyncBatchNormalization"]


@tf.custom_gradient
def _summed(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """The sum over the workers. Its gradient is the sum of theirs, and is named here: Horovod would name both after
    layers, whose names may differ between workers."""
    name = unused_label("SyncBatchNormalization")

    def total(x: tf.Tensor, suffix: str = "") -> tf.Tensor:
        return _allreduce(x, op=Sum, name=f"HorovodAllreduce_{name}{suffix}", ignore_name_scope=True)

    return total(tensor), lambda upstream: total(upstream, "_gradient")


if not tf.keras.layers.BatchNormalization.__module__.startswith("keras."):
    SyncBatchNormalization = _ForLegacyKeras
else:
    @tf.keras.utils.register_keras_serializable("hvd_quant")
    class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
        """Batch normalization with the mean and variance of all workers' batches, each weighted by its size.

        The moving averages, and what the layer computes of an input, are the same on all workers.

        Arguments:
            fused: False, the only value that is accepted, as in Horovod.
            kwargs: those of ``keras.layers.BatchNormalization``.

        Raises:
            ValueError: for another value of ``fused``.
        """

        def __init__(self, fused: bool = False, **kwargs: Any) -> None:
            if fused is not False:
                raise ValueError(f"fused={fused!r} is not supported by SyncBatchNormalization; leave it out")
            super().__init__(**kwargs)

        def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
            mean, variance = super()._moments(inputs, mask)
            if size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1":
                return mean, variance
            if mask is None:
                count = tf.cast(tf.size(inputs) / tf.size(mean), mean.dtype)
            else:
                # Entries a channel: the mask lacks that axis, and may be of length 1 in others.
                count = tf.reduce_sum(tf.cast(tf.broadcast_to(mask, tf.shape(inputs)[:-1]), mean.dtype))
            # First the mean, then the variance around it: E[x^2] - E[x]^2 would lose digits.
            totals = _summed(tf.concat([tf.reshape(mean * count, [-1]), [count]], 0))
            total = totals[-1]
            shared_mean = tf.math.divide_no_nan(tf.reshape(totals[:-1], tf.shape(mean)), total)
            around = _summed(count * (variance + tf.square(mean - shared_mean)))
            return shared_mean, tf.math.divide_no_nan(around, total)
