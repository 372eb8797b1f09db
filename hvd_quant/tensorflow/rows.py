"""The codes of a sparse gradient's rows in a graph: calls of Python each time it runs, since there are other rows in each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_quant import wire
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange.rows import Table
from hvd_quant.ops import generic
from hvd_quant.ops import tensorflow as ops


class Merged:
    """The rows that a gradient touches, ascending, and the sum of what it has of each.

    Attributes:
        rows: int64.
        values: fp32, one row each.
        counted: how many they are, int64; -1 if one is none of the tensor's.
    """

    def __init__(self, grad: tf.IndexedSlices, table: Table) -> None:
        index = tf.cast(grad.indices, tf.int64)
        self.rows = tf.sort(tf.unique(index).y)
        place, count = tf.searchsorted(self.rows, index), tf.size(self.rows)
        values = tf.cast(tf.reshape(grad.values, [-1, table.width]), tf.float32)
        self.values = tf.math.unsorted_segment_sum(values, place, count)
        inside = tf.reduce_all((index >= 0) & (index < table.count))
        self.counted = tf.where(inside, tf.cast(count, tf.int64), -1)

    def entries(self, table: Table) -> tf.Tensor:
        """The places of the values in the flattened tensor; none if a row isn't the tensor's."""
        rows = self.rows[:tf.cast(tf.maximum(self.counted, 0), tf.int32)]
        return tf.reshape(rows[:, None] * table.width + tf.range(table.width, dtype=tf.int64), [-1])


class Rows:
    """A code for rows. A native one runs eagerly; none changes state."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def is_smaller_dense(self, told: tf.Tensor, exchange: str, compressor: Compressor) -> tf.Tensor:
        """See :meth:`hvd_quant.exchange.rows.Table.is_smaller_dense`."""
        def decide(table: Table, told: np.ndarray) -> list[Any]:
            return [table.is_smaller_dense(told.tolist(), exchange, compressor)]

        return tf.ensure_shape(self._call(decide, [told], [tf.bool])[0], [])

    def encode(self, merged: Merged, residual: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor | None]:
        """What is sent, and what is kept of the rows. A worker that can't make payloads sends the reason.

        Arguments:
            residual: of these rows, flat.
        """
        def encode(table: Table, counted: np.ndarray, rows: np.ndarray, values: np.ndarray, *kept: np.ndarray) -> list[Any]:
            if not counted:
                return [np.empty(0, np.uint8), *kept]
            try:
                table.require(rows)
                return [np.concatenate([table.pack(rows), part]) if i == 0 else part
                        for i, part in enumerate(_encoded(table.compressor, values.ravel(), kept, table.part(len(rows))))]
            except Exception as error:
                return [table.failure(int(counted), error), *kept]

        kept = [] if residual is None else [residual]
        payload, *kept = self._call(encode, [merged.counted, merged.rows, merged.values, *kept], [tf.uint8] + [tf.float32] * len(kept))
        return tf.ensure_shape(payload, [None]), tf.ensure_shape(kept[0], [None]) if kept else None

    def decode(self, gathered: tf.Tensor, told: tf.Tensor, mean: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The rows that any worker touches, their sums or means, one row each, and whether anything was not finite."""
        def decode(table: Table, gathered: np.ndarray, told: np.ndarray) -> list[Any]:
            try:
                flags, parts = table.parts(gathered, told.tolist())
                terms = [(part.rows, _decoded(table.compressor, part.payload, part.info)) for part in parts]
                return [*table.add_up(terms, flags, mean, gathered), bool(flags & wire.NONFINITE), ""]
            except wire.PayloadError as error:
                return [np.zeros(0, np.int64), np.zeros((0, table.width), np.float32), True, f"{table.info.name}: {error}"]

        rows, values, void, error = self._call(decode, [gathered, told], [tf.int64, tf.float32, tf.bool, tf.string])
        values = tf.ensure_shape(ops.require(values, error), [None, self._table.width])
        return tf.ensure_shape(rows, [None]), values, tf.ensure_shape(void, [])

    def _call(self, function: Callable[..., list[Any]], tensors: list[tf.Tensor], types: list[tf.DType]) -> list[tf.Tensor]:
        """``function(table, *arrays)`` on the host, which returns what becomes tensors of ``types``."""
        info = self._table.info

        def call(step: tf.Tensor, rank: tf.Tensor, world: tf.Tensor, *given: tf.Tensor) -> list[Any]:
            at = dataclasses.replace(info, step=int(step), rank=int(rank), world=int(world))
            with tf.device("CPU:0"):
                return function(self._table._replace(info=at), *(x.numpy() for x in given))

        with tf.device("CPU:0"):
            return tf.py_function(call, [info.step, info.rank, info.world, *tensors], types)


def _encoded(compressor: Compressor, vector: np.ndarray, kept: tuple[np.ndarray, ...], info: TensorInfo) -> list[np.ndarray]:
    """The payload of a vector, and what is kept afterwards where something is."""
    if kept and compressor.memory == "none":  # another code has kept it
        (payload,) = _encoded(compressor, vector + kept[0], (), info)
        return [payload, np.zeros_like(kept[0])]
    if not compressor.native:
        state = dict(zip(["residual"], map(np.copy, kept)))
        params = compressor.measure(generic, vector, state, info)
        payload = compressor.encode(generic, vector, state, params, info)
    else:
        state = {key: ResourceVariable(array, trainable=False) for key, array in zip(["residual"], kept)}
        grad = tf.constant(vector)
        payload = compressor.encode(ops, grad, state, compressor.measure(ops, grad, state, info), info).numpy()
    if not (isinstance(payload, np.ndarray) and payload.dtype == np.uint8 and payload.ndim == 1):
        raise TypeError(f"{compressor.name}.encode returned a {type(payload).__name__}, expected a 1-D uint8 array")
    return [payload, *map(np.asarray, state.values())]


def _decoded(compressor: Compressor, payload: np.ndarray, info: TensorInfo) -> np.ndarray:
    if compressor.native:
        try:
            return compressor.decode_sum(ops, [tf.constant(payload)], info).numpy()
        except tf.errors.DataLossError:
            pass  # the other backend says the same without TensorFlow's words around it
    return compressor.decode_sum(generic, [payload], info)
