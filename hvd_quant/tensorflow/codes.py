"""A compressor's code in a graph: traced where it is made of native operations, else called on the host.

Both classes have the same methods, on flat fp32 tensors: ``encode`` returns the payload, ``undo`` takes it back, ``decode``
returns the sum or the mean of what was gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_quant import wire
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.ops import generic
from hvd_quant.ops import tensorflow as ops

State = Mapping[str, tf.Variable]


class Traced:
    """A native code: its methods are run once, while a graph is made, and leave operations there."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def encode(self, flat: tf.Tensor, state: State, info: TensorInfo) -> tf.Tensor:
        params = self._compressor.measure(ops, flat, state, info)
        return self._compressor.encode(ops, flat, state, params, info)

    def undo(self, flat: tf.Tensor, state: State, payload: tf.Tensor, info: TensorInfo) -> Any:
        return self._compressor.undo(ops, flat, state, payload, info)

    def decode(self, payloads: ops.Payloads, info: TensorInfo, mean: bool, out: tf.Tensor) -> tf.Tensor:
        decode = self._compressor.decode_mean if mean else self._compressor.decode_sum
        return decode(ops, payloads, info, out)


class Hosted:
    """A code in array operations: calls of Python with NumPy arrays each time the graph runs. Those that change state are
    stateful, so they run one after another; decoding is not."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def encode(self, flat: tf.Tensor, state: State, info: TensorInfo) -> tf.Tensor:
        compressor = self._compressor

        def encode(grad: np.ndarray, arrays: dict[str, np.ndarray], at: TensorInfo) -> np.ndarray:
            params = compressor.measure(generic, grad, arrays, at)
            payload = compressor.encode(generic, grad, arrays, params, at)
            if not (isinstance(payload, np.ndarray) and payload.dtype == np.uint8 and payload.ndim == 1):
                raise TypeError(f"{compressor.name}.encode returned {_kind(payload)}, expected a 1-D uint8 array")
            return payload

        def with_failures(grad: np.ndarray, arrays: dict[str, np.ndarray], at: TensorInfo) -> np.ndarray:
            # A worker that can't make a payload sends the reason, so that the others don't wait for it.
            before = {key: value.copy() for key, value in arrays.items()}
            try:
                return encode(grad, arrays, at)
            except Exception as error:
                arrays.update(before)
                return wire.failure(compressor.name, at.numel, at.rank, f"{type(error).__name__}: {error}")

        return self._call(with_failures, [flat], state, info)

    def undo(self, flat: tf.Tensor, state: State, payload: tf.Tensor, info: TensorInfo) -> Any:
        def undo(grad: np.ndarray, payload: np.ndarray, arrays: dict[str, np.ndarray], at: TensorInfo) -> np.ndarray:
            self._compressor.undo(generic, grad, arrays, payload, at)
            return payload[:0]

        return self._call(undo, [flat, payload], state, info)

    def decode(self, payloads: ops.Payloads, info: TensorInfo, mean: bool, out: tf.Tensor) -> tf.Tensor:
        compressor = self._compressor
        decode_in = compressor.decode_mean if mean else compressor.decode_sum

        def decode(gathered: np.ndarray, step: Any, rank: Any, world: Any) -> tuple[np.ndarray, bytes]:
            at = dataclasses.replace(info, step=int(step), rank=int(rank), world=int(world))
            try:
                each = wire.split(gathered, at.world)
                for payload in each:
                    if wire.parse_header(payload[:wire.HEADER_BYTES].tobytes(), len(payload), compressor.name, info.numel
                                         ).flags & wire.FAILED:
                        wire.check(payload, compressor.name, info.numel, 0)  # raises the reason
                return np.asarray(decode_in(generic, each, at), np.float32), b""
            except wire.PayloadError as error:
                return np.empty(0, np.float32), f"{info.name}: {error}".encode()

        inputs = [payloads.data, info.step, info.rank, info.world]
        total, error = tf.numpy_function(decode, inputs, [tf.float32, tf.string], stateful=False)
        return tf.ensure_shape(ops.require(total, error), [info.numel])

    def _call(self, function: Callable[..., np.ndarray], tensors: list[tf.Tensor], state: State, info: TensorInfo) -> tf.Tensor:
        """``function(*tensors, arrays, info)`` on the host, which may change the state's arrays and returns bytes."""
        keys = list(state)

        def call(step: Any, rank: Any, world: Any, *arrays: np.ndarray) -> list[np.ndarray]:
            given, values = arrays[:len(tensors)], arrays[len(tensors):]
            kept = {key: value.copy() for key, value in zip(keys, values)}
            at = dataclasses.replace(info, step=int(step), rank=int(rank), world=int(world))
            return [function(*given, kept, at), *(kept[key] for key in keys)]

        inputs = [info.step, info.rank, info.world, *tensors, *(state[key].read_value() for key in keys)]
        payload, *values = tf.numpy_function(call, inputs, [tf.uint8] + [tf.float32] * len(keys))
        kept = [state[key].assign(tf.ensure_shape(value, state[key].shape)) for key, value in zip(keys, values)]
        with tf.control_dependencies(kept):
            return tf.ensure_shape(tf.identity(payload), [None])


def _kind(x: Any) -> str:
    return f"a {x.ndim}-D {x.dtype} array" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
