"""A compressor's code in a graph: traced where it is made of native operations, else called on the host.

Both classes have the same methods, on flat fp32 tensors that are encoded in ranges: ``encode`` makes the payloads, ``reduce`` is
what the owner of a range does with those of all workers, ``undo`` takes an encode back, and ``decode`` puts together what was
gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvd_quant import wire
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.ops import generic
from hvd_quant.ops import tensorflow as ops

State = Mapping[str, tf.Variable]


class Encoded(NamedTuple):
    """What was encoded of a vector.

    Attributes:
        vector, state, info, cuts: what was given.
        payload: the payloads of the ranges, one after another.
        sizes: the bytes of each, int64.
    """

    vector: tf.Tensor
    state: State
    info: TensorInfo
    cuts: list[tuple[int, int]]
    payload: tf.Tensor
    sizes: tf.Tensor


class Traced:
    """A native code: its methods are run once, while a graph is made, and leave operations there."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def encode(self, vector: tf.Tensor, state: State, info: TensorInfo, cuts: list[tuple[int, int]]) -> Encoded:
        """Encode ranges of the vector, which holds the entries ``info.range`` of a tensor. A worker that can't make payloads sends
        the reason, so that the others don't wait for it."""
        params = self._compressor.measure(ops, vector, state, info)
        asked = [self._compressor.encode(ops, _part(vector, cut, info), state, params, info.part(*cut)) for cut in cuts]
        encoded = ops.encode_parts(asked, info.rank)
        return Encoded(vector, state, info, cuts, encoded.payload, encoded.sizes)

    def reduce(self, payloads: ops.Payloads, state: State, info: TensorInfo) -> tuple[Encoded, tf.Tensor]:
        """Encode the mean of all workers' payloads of one range; and what is sent, which after an error is a failure payload."""
        asked = self._compressor.decode_mean(ops, ops.Part(payloads, 0, info.numel), info)
        decoded = ops.decode_as_owner(asked, info.numel, info.rank)
        encoded = self.encode(decoded.sum, state, info.at(phase=1), [info.range])
        return encoded, ops.instead(encoded.payload, decoded.failure)

    def undo(self, encoded: Encoded, flags: tf.Tensor) -> Any:
        """Take an encode back if ``flags`` aren't 0; what it returns is done when the state is back."""
        _, state, info, cuts, payload, _ = encoded
        asked = [self._compressor.undo(ops, _part(encoded.vector, cut, info), state, _part(payload, cut, info), info.part(*cut))
                 for cut in cuts]
        return None if asked[0] is None else ops.undo_parts(asked, flags, payload)

    def flags(self, payloads: ops.Payloads, info: TensorInfo, cuts: list[tuple[int, int]]) -> tf.Tensor:
        """The flags of all payloads of a tensor together, as :func:`hvd_quant.ops.tensorflow.flags` tells."""
        asked = self._compressor.decode_sum(ops, _part(payloads, cuts[0], info), info.part(*cuts[0]))
        return _flags(payloads, asked.codec, info, cuts)

    def decode(self, payloads: ops.Payloads, info: TensorInfo, cuts: list[tuple[int, int]], mean: bool,
               out: tf.Tensor | None = None) -> tf.Tensor:
        """The tensor, each range the sum or the mean of its rows of payloads, in turn."""
        decode = self._compressor.decode_mean if mean else self._compressor.decode_sum
        return ops.decode_parts([decode(ops, _part(payloads, cut, info), info.part(*cut)) for cut in cuts], info.numel, out)

    def between_steps(self, slots: list[tuple[TensorInfo, State]]) -> Any:
        """What is decided for several tensors together; what it returns is done when their state is written."""
        return self._compressor.between_steps(ops, slots)


def _flags(payloads: ops.Payloads, codec: str, info: TensorInfo, cuts: list[tuple[int, int]]) -> tf.Tensor:
    return ops.flags(payloads, codec, info.numel, [bound for cut in cuts for bound in cut])


def _part(whole: Any, cut: tuple[int, int], info: TensorInfo) -> ops.Part:
    return ops.Part(whole, cut[0] - info.range[0], cut[1] - info.range[0])


class Hosted:
    """A code in array operations: calls of Python with NumPy arrays each time the graph runs. Those that change state are
    stateful, so they run one after another; decoding is not."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def encode(self, vector: tf.Tensor, state: State, info: TensorInfo, cuts: list[tuple[int, int]]) -> Encoded:
        """As :meth:`Traced.encode`."""
        def encode(at: TensorInfo, arrays: dict[str, np.ndarray], grad: np.ndarray) -> list[np.ndarray]:
            try:
                payloads = self._payloads(grad, arrays, at, cuts)
            except Exception as error:
                payloads = [self._failure(at.part(*cut), error) for cut in cuts]
            return [np.concatenate(payloads), np.array([len(payload) for payload in payloads])]

        payload, sizes = self._call(encode, [vector], [tf.uint8, tf.int64], state, info)
        return Encoded(vector, state, info, cuts, tf.ensure_shape(payload, [None]), tf.ensure_shape(sizes, [len(cuts)]))

    def reduce(self, payloads: ops.Payloads, state: State, info: TensorInfo) -> tuple[Encoded, tf.Tensor]:
        """As :meth:`Traced.reduce`."""
        def reduce(at: TensorInfo, arrays: dict[str, np.ndarray], data: np.ndarray, table: np.ndarray) -> list[np.ndarray]:
            try:
                each = _cut(data, table, slice(None), payloads.column)
                for payload in each:
                    if self._header_flags(payload, at) & wire.FAILED:
                        return [wire.failure(name, at.numel, *wire.failure_of(payload)), *nothing]
                mean = np.asarray(self._compressor.decode_mean(generic, each, at), np.float32)
                (payload,) = self._payloads(mean, arrays, at.at(phase=1), [at.range])
                return [payload, payload, mean]
            except Exception as error:
                return [self._failure(at, error), *nothing]

        name, nothing = self._compressor.name, [np.empty(0, np.uint8), np.zeros(info.numel, np.float32)]
        types = [tf.uint8, tf.uint8, tf.float32]
        sent, payload, mean = self._call(reduce, [payloads.data, payloads.table], types, state, info)
        encoded = Encoded(tf.ensure_shape(mean, [info.numel]), state, info, [info.range], payload,
                          tf.expand_dims(tf.size(payload, tf.int64), 0))
        return encoded, tf.ensure_shape(sent, [None])

    def undo(self, encoded: Encoded, flags: tf.Tensor) -> Any:
        """As :meth:`Traced.undo`."""
        vector, state, info, cuts, payload, sizes = encoded

        def undo(at: TensorInfo, arrays: dict[str, np.ndarray], grad: np.ndarray, payload: np.ndarray, sizes: np.ndarray
                 ) -> list[np.ndarray]:
            for cut, own in zip(cuts, np.split(payload, np.cumsum(sizes))):
                part, kept = at.part(*cut), _state_of(cut, arrays, at)
                try:
                    if len(own):
                        wire.check(own, self._compressor.name, part.numel, len(own) - wire.HEADER_BYTES)
                        self._compressor.undo(generic, _slice(grad, cut, at), kept, own, part)
                except wire.PayloadError:
                    pass  # nothing was encoded, or the payload tells no more what
            return [sizes]

        def undone() -> tf.Tensor:
            with tf.control_dependencies(self._call(undo, [vector, payload, sizes], [tf.int64], state, info)):
                return tf.constant(True)

        return tf.cond(flags > 0, undone, lambda: tf.constant(True)) if state else None

    def flags(self, payloads: ops.Payloads, info: TensorInfo, cuts: list[tuple[int, int]]) -> tf.Tensor:
        """As :meth:`Traced.flags`."""
        return _flags(payloads, self._compressor.name, info, cuts)

    def decode(self, payloads: ops.Payloads, info: TensorInfo, cuts: list[tuple[int, int]], mean: bool,
               out: tf.Tensor | None = None) -> tf.Tensor:
        """As :meth:`Traced.decode`."""
        decode_in = self._compressor.decode_mean if mean else self._compressor.decode_sum

        def decode(data: np.ndarray, table: np.ndarray, teller: Any, step: Any, rank: Any, world: Any
                   ) -> tuple[np.ndarray, bytes]:
            at = dataclasses.replace(info, step=int(step), rank=int(rank), world=int(world))
            vector, finite = np.empty(info.numel, np.float32), True
            try:
                for i, cut in enumerate(cuts):
                    part, rows = at.part(*cut), len(table) // len(cuts)
                    if not part.numel:
                        continue
                    each = _cut(data, table, slice(i * rows, (i + 1) * rows), payloads.column)
                    for payload in each:
                        flags = self._header_flags(payload, part)
                        if flags & wire.FAILED:
                            wire.check(payload, self._compressor.name, part.numel, 0)  # raises the reason
                        finite &= not flags & wire.NONFINITE
                    vector[slice(*cut)] = decode_in(generic, each, part)
            except wire.PayloadError as error:
                if teller < 0 or teller == payloads.column:
                    return np.empty(0, np.float32), f"{info.name}: {error}".encode()
            return vector if finite else np.full_like(vector, np.nan), b""

        inputs = [payloads.data, payloads.table, payloads.teller, info.step, info.rank, info.world]
        total, error = tf.numpy_function(decode, inputs, [tf.float32, tf.string], stateful=False)
        return tf.ensure_shape(ops.require(total, error), [info.numel])

    def between_steps(self, slots: list[tuple[TensorInfo, State]]) -> Any:
        """As :meth:`Traced.between_steps`."""
        def decide(at: TensorInfo, arrays: dict[tuple[int, str], np.ndarray]) -> list[np.ndarray]:
            self._compressor.between_steps(generic, [
                (dataclasses.replace(info, step=at.step, rank=at.rank, world=at.world), {key: arrays[i, key] for key in state})
                for i, (info, state) in enumerate(slots)])
            return [np.empty(0, np.uint8)]

        state = {(i, key): value for i, (_, state) in enumerate(slots) for key, value in state.items()}
        return tf.group(*self._call(decide, [], [tf.uint8], state, slots[0][0]))

    def _payloads(self, grad: np.ndarray, arrays: dict[str, np.ndarray], at: TensorInfo, cuts: list[tuple[int, int]]
                  ) -> list[np.ndarray]:
        """What is encoded of each range; the state is as before if there is an exception."""
        compressor, before = self._compressor, {key: value.copy() for key, value in arrays.items()}
        try:
            params = compressor.measure(generic, grad, arrays, at)
            payloads = []
            for cut in cuts:
                if cut[0] == cut[1]:
                    payloads.append(np.empty(0, np.uint8))
                    continue
                state = _state_of(cut, arrays, at)
                payload = compressor.encode(generic, _slice(grad, cut, at), state, params, at.part(*cut))
                if not (isinstance(payload, np.ndarray) and payload.dtype == np.uint8 and payload.ndim == 1):
                    raise TypeError(f"{compressor.name}.encode returned {_kind(payload)}, expected a 1-D uint8 array")
                payloads.append(payload)
            return payloads
        except Exception:
            for key, value in before.items():
                arrays[key][:] = value
            raise

    def _failure(self, at: TensorInfo, error: Exception) -> np.ndarray:
        """What is sent in the place of the payload of a range."""
        reason = str(error) if isinstance(error, wire.PayloadError) else f"{type(error).__name__}: {error}"
        return wire.failure(self._compressor.name, at.numel, at.rank, reason) if at.numel else np.empty(0, np.uint8)

    def _header_flags(self, payload: np.ndarray, at: TensorInfo) -> int:
        head = payload[:wire.HEADER_BYTES].tobytes()
        return wire.parse_header(head, len(payload), self._compressor.name, at.numel).flags

    def _call(self, function: Callable[..., list[np.ndarray]], tensors: list[tf.Tensor], types: list[tf.DType],
              state: Mapping[Any, tf.Variable], info: TensorInfo) -> list[tf.Tensor]:
        """``function(info, arrays, *tensors)`` on the host, which may change the state's arrays and returns arrays of ``types``,
        once the state is written."""
        keys = list(state)

        def call(step: Any, rank: Any, world: Any, *arrays: np.ndarray) -> list[np.ndarray]:
            given, values = arrays[:len(tensors)], arrays[len(tensors):]
            kept = {key: value.copy() for key, value in zip(keys, values)}
            at = dataclasses.replace(info, step=int(step), rank=int(rank), world=int(world))
            return [*function(at, kept, *given), *(kept[key] for key in keys)]

        inputs = [info.step, info.rank, info.world, *tensors, *(state[key].read_value() for key in keys)]
        results = tf.numpy_function(call, inputs, types + [tf.float32] * len(keys))
        results, values = results[:len(types)], results[len(types):]
        kept = [state[key].assign(tf.ensure_shape(value, state[key].shape)) for key, value in zip(keys, values)]
        with tf.control_dependencies(kept):
            return [tf.identity(result) for result in results]


def _slice(vector: np.ndarray, cut: tuple[int, int], info: TensorInfo) -> np.ndarray:
    return vector[cut[0] - info.range[0]:cut[1] - info.range[0]]


def _state_of(cut: tuple[int, int], arrays: dict[str, np.ndarray], info: TensorInfo) -> dict[str, np.ndarray]:
    """A range's part of the state, in the same memory."""
    return {key: _slice(value, cut, info) if value.shape == (info.numel,) else value for key, value in arrays.items()}


def _cut(data: np.ndarray, table: np.ndarray, rows: slice, column: int) -> list[np.ndarray]:
    """Payloads of one tensor."""
    if table.size and table.flat[0] < 0:
        raise wire.PayloadError(f"{table.shape[0] * table.shape[1]} payloads came as {len(data)} bytes whose headers tell other "
                                "lengths: a payload is damaged, or compression settings differ between workers")
    return [data[first:first + size] for first, size in table[rows, column].tolist()]


def _kind(x: Any) -> str:
    return f"a {x.ndim}-D {x.dtype} array" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
