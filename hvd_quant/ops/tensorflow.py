"""The codes of :mod:`hvd_quant.ops.generic` in native code, for TensorFlow tensors on the CPU.

Same names, arguments and bytes, eagerly and in a ``tf.function``. What differs from the other backends:

- ``residual`` is a ``tf.Variable`` on the CPU, updated in place, or None; ``step`` and ``scale`` may be scalar tensors.
- ``payloads`` is a list of tensors, or what an allgather returned, as :class:`Payloads`.
- ``out`` is only memory that the result may take; the result is what is returned.
- A range of a vector may be a :class:`Part` of it. What a compressor asks of parts is only noted (:class:`Asked`), and
  becomes one operation for all the ranges of a tensor: :func:`encode_parts`, :func:`decode_parts`, :func:`undo_parts`.
- A payload that is damaged, foreign, or says that its worker failed raises ``tf.errors.DataLossError`` with the
  sentence that :class:`hvd_quant.wire.PayloadError` has elsewhere.
- A user's own code in array operations runs over :mod:`hvd_quant.ops.generic`, so what that would use is not here.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_quant.ops.layout import (  # noqa: F401
    BLOCK, GROUP, UNIT, dynamic_code, fields_body_bytes, onebit_body_bytes, sample_size, slots_for, sparse_body_bytes, units_of)
from hvd_quant.ops.linear import APART, EXPONENT, normal

_spec = importlib.util.find_spec("hvd_quant._tensorflow_ops")
_BUILD = ("with tensorflow installed, run `pip install --no-build-isolation --force-reinstall --no-deps .` in "
          "hvd_quant's source")
if _spec is None or _spec.origin is None:
    raise ImportError(f"hvd_quant was built without its kernels for TensorFlow: {_BUILD}")
try:
    _native = tf.load_op_library(_spec.origin)
except (tf.errors.OpError, RuntimeError) as error:
    raise ImportError(f"hvd_quant's kernels were built for another TensorFlow than {tf.__version__}: {_BUILD} ({error})"
                      ) from error


DAMAGED = 4
"""Flag that :func:`flags` adds to those of :mod:`hvd_quant.wire`."""


class Payloads(NamedTuple):
    """Payloads of one tensor among what a collective returned.

    Attributes:
        data: uint8, 1-D, payloads one after another.
        world: rows of payloads, one a worker: an int or a scalar int32 tensor.
        name: the parameter's, with which errors begin.
        table: where they are, as :func:`locate` tells; found out where None.
        column: the tensor's in the table.
        teller: the column of the tensor whose error is raised, a scalar int32 tensor; each its own where -1.
    """

    data: tf.Tensor
    world: Any
    name: str = ""
    table: tf.Tensor | None = None
    column: int = 0
    teller: Any = -1

    @classmethod
    def of(cls, payloads: Payloads | list[tf.Tensor]) -> Payloads:
        payloads = payloads if isinstance(payloads, cls) else cls(tf.concat(payloads, 0), len(payloads))
        return payloads if payloads.table is not None else payloads._replace(table=locate(payloads.data, payloads.world))


class Part(NamedTuple):
    """A range of a vector, or of what belongs to it: its payload, or its payloads."""

    whole: Any
    start: int
    stop: int


class Asked(NamedTuple):
    """What a compressor asked of a part: the operation, its arguments, and those that differ between ranges."""

    op: str
    part: Part
    arguments: dict[str, Any]
    slots: int | None = None

    @property
    def codec(self) -> str:
        """The compressor's name in the payload's header."""
        return self.arguments.get("codec", self.op)

    def __mul__(self, factor: float) -> Asked:
        return self._replace(arguments={**self.arguments, "scale": self.arguments.get("scale", 1.0) * factor})


def simd_level() -> str:
    """The instructions that the kernels choose on this machine."""
    return _native.hvd_quant_simd_level().numpy().decode()


def locate(data: tf.Tensor, rows: Any, columns: int = 1, sizes: Sequence[int] = ()) -> tf.Tensor:
    """Where the payloads in ``data`` are: int64, shape [rows, columns, 2], first byte and size of each.

    Arguments:
        sizes: bytes that are expected, of each payload or of those of each row; 0 where there is none. Where they don't make up
            the whole, headers tell.
    """
    return _native.hvd_quant_locate(gathered=data, rows=rows, columns=columns, sizes=list(sizes))


# -------------------------------------------------------------------------------------------------------------- encode

def _measure(op: str, grad: tf.Tensor, residual: tf.Variable | None, **arguments: Any) -> tf.Tensor:
    if residual is None:
        return getattr(_native, op)(grad=grad, **arguments)
    return getattr(_native, f"{op}_with_residual")(grad=grad, residual=residual.handle, **arguments)


def _encode(op: str, grad: tf.Tensor | Part, residual: tf.Variable | None, slots: int | None = None,
            **arguments: Any) -> Any:
    arguments["residual"] = residual
    if isinstance(grad, Part):
        return Asked(op, grad, arguments, slots)
    return _encode_all([Asked(op, Part(grad, 0, 0), arguments, slots)], []).payload


def _encode_all(asked: list[Asked], bounds: list[int], worker: Any = -1) -> Any:
    """The operation: its output ``payload`` has the payloads one after another, ``sizes`` their bytes."""
    arguments = {**asked[0].arguments, "worker": worker}
    residual = arguments.pop("residual")
    op = f"hvd_quant_{asked[0].op}_encode"
    if residual is not None:
        op, arguments["residual"] = f"{op}_with_residual", residual.handle
    return getattr(_native, op)(grad=asked[0].part.whole, bounds=bounds, **_slots(asked), **arguments)


def _slots(asked: list[Asked]) -> dict[str, list[int]]:
    return {} if asked[0].slots is None else {"slots": [one.slots for one in asked]}


def encode_parts(asked: list[Asked], worker: Any = -1) -> Any:
    """One operation that encodes ranges of a vector, all in the same way: its output ``payload`` has their payloads one after
    another, ``sizes`` their bytes, 0 for a range without entries.

    Arguments:
        worker: this one's rank, with which failure payloads tell of an error, which isn't raised then.
    """
    return _encode_all(_alike(asked), _bounds(asked), worker)


def _bounds(asked: list[Asked]) -> list[int]:
    return [bound for one in asked for bound in (one.part.start, one.part.stop)]


def _alike(asked: list[Asked]) -> list[Asked]:
    """Check that ranges differ in nothing but their lengths."""
    def key(one: Any) -> Any:
        return isinstance(one, Asked) and (one.op, {k: v if isinstance(v, str | int | float) else id(v) for k, v in
                                                    one.arguments.items()})

    if not all(key(one) and key(one) == key(asked[0]) for one in asked):
        raise TypeError("a compressor with native = True has to encode and decode each range of a tensor with the same code of "
                        "ops, and to return what that returns: leave native = True out")
    return asked


def onebit_encode(grad: tf.Tensor, residual: tf.Variable | None, block_size: int, zeros: bool = False) -> tf.Tensor:
    return _encode("onebit", grad, residual, block_size=block_size, zeros=zeros)


def signsgd_encode(grad: tf.Tensor, residual: tf.Variable | None, block_size: int, zeros: bool) -> tf.Tensor:
    return _encode("signsgd", grad, residual, block_size=block_size, zeros=zeros)


def _encode_at_random(op: str, grad: tf.Tensor | Part, residual: tf.Variable | None, stream: int, first: int, step: Any, rank: Any,
                      phase: int, **arguments: Any) -> Any:
    """``first`` is the range's place in the tensor; what the ranges of a vector have in common is the place of the vector."""
    first -= grad.start if isinstance(grad, Part) else 0
    return _encode(op, grad, residual, stream=stream, first=first, step=step, rank=rank, phase=phase, **arguments)


def qsgd_encode(grad: tf.Tensor, residual: tf.Variable | None, bits: int, norm: str, block_size: int, *draw: Any) -> tf.Tensor:
    return _encode_at_random("qsgd", grad, residual, *draw, bits=bits, norm=norm, block_size=block_size)


def terngrad_measure(grad: tf.Tensor, residual: tf.Variable | None, clip: float) -> tf.Tensor:
    return _measure("hvd_quant_terngrad_measure", grad, residual, clip=clip)


def terngrad_encode(grad: tf.Tensor, residual: tf.Variable | None, largest: tf.Tensor, *draw: Any) -> tf.Tensor:
    return _encode_at_random("terngrad", grad, residual, *draw, largest=largest)


def natural_encode(grad: tf.Tensor, residual: tf.Variable | None, *draw: Any) -> tf.Tensor:
    return _encode_at_random("natural", grad, residual, *draw)


def blockwise8_encode(grad: tf.Tensor, residual: tf.Variable | None, code: str, block_size: int) -> tf.Tensor:
    return _encode("blockwise8", grad, residual, code=code, block_size=block_size)


def threshold_encode(grad: tf.Tensor, residual: tf.Variable | None, tau: float, slots: int, step: Any) -> tf.Tensor:
    return _encode("threshold", grad, residual, tau=tau, slots=slots, step=step)


def adaptive_measure(grad: tf.Tensor, residual: tf.Variable | None, ratio: float, step: Any) -> tf.Tensor:
    return _measure("hvd_quant_adaptive_measure", grad, residual, ratio=ratio, step=step)


def adaptive_encode(grad: tf.Tensor, residual: tf.Variable | None, thresholds: tf.Tensor, slots: int,
                    step: Any) -> tf.Tensor:
    return _encode("adaptive", grad, residual, thresholds=thresholds, slots=slots, step=step)


def topk_measure(grad: tf.Tensor, residual: tf.Variable | None, ratio: float, step: Any) -> tf.Tensor:
    return _measure("hvd_quant_topk_measure", grad, residual, ratio=ratio, step=step)


def model_measure(grad: tf.Tensor, residual: tf.Variable | None, ratio: float, step: Any, magnitudes: tf.Variable,
                  threshold: tf.Variable) -> tf.Tensor:
    measured = _measure("hvd_quant_model_measure", grad, residual, ratio=ratio, step=step, threshold=threshold)
    with tf.control_dependencies([magnitudes.assign(measured.magnitudes), threshold.assign(tf.stack([threshold[0], 1.0]))]):
        return tf.identity(measured.thresholds)


def model_threshold(samples: list[tuple[tf.Variable, tf.Variable, int]], ratio: float) -> tf.Operation:
    """As ``generic.model_threshold``; in a graph, the operation that does it."""
    with tf.device("CPU:0"):
        # Magnitudes order like their bits, which TensorFlow's threads don't flush where they are denormal.
        bits = tf.concat([tf.bitcast(magnitudes.read_value(), tf.int32) for magnitudes, _, _ in samples], 0)
        held = [threshold.read_value() for _, threshold, _ in samples]
        weights = tf.concat([tf.fill(magnitudes.shape, tf.cast(own[1] > 0, tf.int64) * ((numel << 20) // max(1, magnitudes.shape[0])))
                             for (magnitudes, _, numel), own in zip(samples, held)], 0)
        order, total = tf.argsort(bits, direction="DESCENDING"), tf.reduce_sum(weights)
        limit = tf.cast(tf.floor(tf.cast(total, tf.float64) * ratio), tf.int64)
        at_or_above = tf.cumsum(tf.gather(weights, order))
        place = tf.math.count_nonzero(at_or_above <= limit)
        tau = tf.bitcast(tf.concat([tf.gather(bits, order), [0]], 0)[place] + 1, tf.float32)
        return tf.group(*(threshold.assign(tf.where(total > 0, tf.stack([tau, own[1]]), own))
                          for (_, threshold, _), own in zip(samples, held)))


def topk_encode(grad: tf.Tensor, residual: tf.Variable | None, thresholds: tf.Tensor, slots: int, values: str,
                step: Any) -> tf.Tensor:
    return _encode("topk", grad, residual, thresholds=thresholds, slots=slots, values=values, step=step)


def cast_encode(grad: tf.Tensor, dtype: str, codec: str) -> tf.Tensor:
    return _encode("cast", grad, None, dtype=dtype, codec=codec)


# -------------------------------------------------------------------------------------------------------------- decode

def _sum(op: str, payloads: Payloads | list[tf.Tensor] | Part, numel: int, out: tf.Tensor | None, scale: Any,
         slots: int | None = None, **settings: Any) -> Any:
    part = payloads[0] if isinstance(payloads, list) and len(payloads) == 1 else payloads
    if isinstance(part, Part):
        return Asked(op, part, {"scale": scale, **settings}, slots)
    asked = [Asked(op, Part(Payloads.of(payloads), 0, 0), {"scale": scale, **settings}, slots)]
    return _sum_all(asked, [], numel, out).sum


def _sum_all(asked: list[Asked], bounds: list[int], numel: int, out: tf.Tensor | None, owner: int = -1) -> Any:
    """The operation: its output ``sum``, and ``failure`` for an owner."""
    payloads, arguments = asked[0].part.whole, dict(asked[0].arguments)
    scale = tf.cast(arguments.pop("scale"), tf.float32)
    return getattr(_native, f"hvd_quant_{asked[0].op}_decode_sum")(
        gathered=payloads.data, table=payloads.table, scale=scale, teller=payloads.teller, out=[] if out is None else [out],
        numel=numel, bounds=bounds, column=payloads.column, name_of=payloads.name, owner=owner, **_slots(asked), **arguments)


def decode_parts(asked: list[Asked], numel: int, out: tf.Tensor | None = None) -> tf.Tensor:
    """One operation that decodes all ranges of a vector, each from as many rows of the payloads' table, in turn; NaN throughout
    where anything was not finite."""
    return _sum_all(_alike(asked), _bounds(asked), numel, out).sum


def decode_as_owner(asked: Asked, numel: int, rank: int) -> Any:
    """One operation that decodes a vector for all and raises nothing: ``sum``, and ``failure``, which is empty, or in the place
    of an error the failure payload that the others have to get."""
    return _sum_all(_alike([asked]), [], numel, None, owner=rank)


def undo_parts(asked: list[Asked], flags: tf.Tensor, payload: tf.Tensor) -> tf.Operation:
    """One operation that takes the encode of all ranges of a vector back if ``flags`` are not 0.

    Arguments:
        asked: what :func:`restore` noted.
        payload: what was encoded.
    """
    arguments = dict(_alike(asked)[0].arguments)
    arguments.pop("scale")
    return getattr(_native, f"hvd_quant_{asked[0].op}_undo")(
        grad=asked[0].part.whole, flags=flags, payload=payload, residual=arguments.pop("residual").handle, bounds=_bounds(asked),
        **_slots(asked), **arguments)


def onebit_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, block_size: int, zeros: bool = False, *,
                      out: tf.Tensor | None = None, scale: Any = 1.0) -> tf.Tensor:
    return _sum("onebit", payloads, numel, out, scale, block_size=block_size, zeros=zeros)


def signsgd_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, block_size: int, zeros: bool, *,
                       out: tf.Tensor | None = None, scale: Any = 1.0) -> tf.Tensor:
    return _sum("signsgd", payloads, numel, out, scale, block_size=block_size, zeros=zeros)


def qsgd_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, bits: int, block_size: int, *, out: tf.Tensor | None = None,
                    scale: Any = 1.0) -> tf.Tensor:
    return _sum("qsgd", payloads, numel, out, scale, bits=bits, block_size=block_size)


def terngrad_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, *, out: tf.Tensor | None = None,
                        scale: Any = 1.0) -> tf.Tensor:
    return _sum("terngrad", payloads, numel, out, scale)


def natural_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, *, out: tf.Tensor | None = None,
                       scale: Any = 1.0) -> tf.Tensor:
    return _sum("natural", payloads, numel, out, scale)


def blockwise8_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, code: str, block_size: int, *,
                          out: tf.Tensor | None = None, scale: Any = 1.0) -> tf.Tensor:
    return _sum("blockwise8", payloads, numel, out, scale, code=code, block_size=block_size)


def threshold_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, slots: int, *, out: tf.Tensor | None = None,
                         scale: Any = 1.0) -> tf.Tensor:
    return _sum("threshold", payloads, numel, out, scale, slots=slots)


def adaptive_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, slots: int, *, out: tf.Tensor | None = None,
                        scale: Any = 1.0) -> tf.Tensor:
    return _sum("adaptive", payloads, numel, out, scale, slots=slots)


def topk_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, slots: int, values: str, *,
                    out: tf.Tensor | None = None, scale: Any = 1.0) -> tf.Tensor:
    return _sum("topk", payloads, numel, out, scale, slots=slots, values=values)


def cast_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, dtype: str, codec: str, *,
                    out: tf.Tensor | None = None, scale: Any = 1.0) -> tf.Tensor:
    return _sum("cast", payloads, numel, out, scale, dtype=dtype, codec=codec)


# --------------------------------------------------------------------------------------------- around encode and decode

def flags(payloads: Payloads | list[tf.Tensor], codec: str, numel: int, bounds: Sequence[int] = ()) -> tf.Tensor:
    """The flags of all payloads (``wire.NONFINITE``, ``wire.FAILED``) in one int32, shape []; ``DAMAGED`` is among them where
    one has a wrong header or checksum, of which a decoder will tell more.

    Arguments:
        bounds: first and one past last entry of each range, in which case the ranges have the payloads in turn.
    """
    payloads = Payloads.of(payloads)
    return _native.hvd_quant_flags(gathered=payloads.data, table=payloads.table, codec=codec, numel=numel, bounds=list(bounds),
                                   column=payloads.column)


def without_flags(payload: tf.Tensor | Part) -> tf.Tensor | Part:
    """A copy of a payload that decodes as if everything had been finite (it leaves non-finite gradients out)."""
    return payload if isinstance(payload, Part) else _native.hvd_quant_without_flags(payload)


def restore(residual: tf.Variable, decoded: tf.Tensor | Asked, grad: tf.Tensor | Part) -> Any:
    """Take an encode back, as ``generic.restore`` does; in a graph, the operation that does it."""
    if isinstance(grad, Part):
        return Asked(decoded.op, grad, {**decoded.arguments, "residual": residual}, decoded.slots)
    return _native.hvd_quant_restore(grad=grad, decoded=decoded, residual=residual.handle)


def give_back(grad: tf.Tensor, residual: tf.Variable, first: int = 0, factor: float = 1.0) -> tf.Tensor:
    """The gradient with ``factor`` times the residual, which is 0 then, added from the entry ``first`` on; the gradient as it is,
    and the residual too, where that isn't finite."""
    return _native.hvd_quant_give_back(grad=grad, residual=residual.handle, first=first, factor=factor)


def by_owner(payloads: list[tf.Tensor], sizes: list[tf.Tensor]) -> Any:
    """The payloads of several tensors, each tensor's in the order of owners, put together owner by owner: ``sent``, and each
    owner's bytes, ``splits``, int32."""
    return _native.hvd_quant_by_owner(payloads=payloads, sizes=sizes)


def instead(payload: tf.Tensor, failure: tf.Tensor) -> tf.Tensor:
    """The payload, or the failure unless that is empty."""
    return _native.hvd_quant_instead(payload, failure)


def now(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """x, and the seconds of ``time.perf_counter()`` at which it became available, float64, shape [].

    The graph optimiser can't compute this in advance, nor what depends on it: a collective needs it before its input. Where that
    is a constant, its result would become one too, on this worker alone.
    """
    return _native.hvd_quant_now(x)


def require(x: tf.Tensor, error: tf.Tensor | str) -> tf.Tensor:
    """x, or a ``DataLossError`` that says ``error`` unless that is empty."""
    return _native.hvd_quant_require(x, error)


# -------------------------------------------------------------------------------------------------------- linear codes

def divide(total: tf.Tensor, world: Any, out: tf.Tensor | None = None) -> tf.Tensor:
    """total / world."""
    return total / tf.cast(world, total.dtype)


def divide_to_half(grad: tf.Tensor, world: Any) -> tf.Tensor:
    """grad / world as fp16, for an allreduce that must not overflow where the mean doesn't."""
    return tf.cast(grad / tf.cast(world, grad.dtype), tf.float16)


def widen(half: tf.Tensor, out: tf.Tensor | None = None) -> tf.Tensor:
    """half, as fp32."""
    return tf.cast(half, tf.float32)


# -------------------------------------------------------------------------------------------------------------- memory

def copy(x: tf.Tensor) -> tf.Tensor:
    """x; tensors don't change."""
    return x


def clip_norm(grad: tf.Tensor, limit: float, world: Any) -> tf.Tensor:
    """The gradient, scaled down where its 2-norm is above ``limit`` / sqrt(``world``)."""
    if grad.shape.num_elements() == 0:
        return grad
    largest = tf.reduce_max(tf.abs(grad))
    largest = tf.where(largest > 0, largest, tf.ones_like(largest))
    norm = largest * tf.sqrt(tf.reduce_sum((grad / largest) ** 2))  # squares of what is at most 1 don't overflow
    return grad * tf.minimum(tf.cast(limit / tf.sqrt(tf.cast(world, tf.float64)), tf.float32) / norm, 1.0)


def moving_average(average: tf.Tensor, x: tf.Tensor, eta: float) -> tf.Tensor:
    """(1 - eta) average + eta x, or x while there is no average but zeros."""
    return tf.where(tf.reduce_any(average != 0), (1 - eta) * average + eta * x, x)


def zero_where(sent: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """x, and 0 where ``sent`` isn't."""
    return tf.where(sent != 0, tf.zeros_like(x), x)


# --------------------------------------------------------------------------------------------------- randomk, powersgd

def noise(numel: int, stream: int, step: Any, rank: int, phase: int) -> tf.Tensor:
    """As ``generic.noise`` of a tensor's first ``numel`` entries."""
    word, xor, shift = 0xFFFFFFFF, tf.bitwise.bitwise_xor, tf.bitwise.right_shift
    key = tf.constant(stream % 2**64, tf.uint64)
    for part in (step, rank, phase):
        key = _mix(xor(key, tf.cast(part, tf.uint64)))
    low, high = (tf.cast(tf.bitwise.bitwise_and(half, word), tf.int64) for half in (key, shift(key, tf.constant(32, tf.uint64))))
    x = xor(tf.range(numel, dtype=tf.int64), low)
    x = tf.bitwise.bitwise_and(xor(x, shift(x, 17)) * 0xED5AD4BB, word)
    x = tf.bitwise.bitwise_and((xor(x, shift(x, 11)) + high) * 0xAC4C1B51, word)
    x = tf.bitwise.bitwise_and(xor(x, shift(x, 15)) * 0x31848BAB, word)
    return xor(x, shift(x, 14))


def _mix(x: tf.Tensor) -> tf.Tensor:
    """splitmix64."""
    def folded(x: tf.Tensor, bits: int) -> tf.Tensor:
        return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(bits, tf.uint64)))

    x = folded(x + tf.constant(0x9E3779B97F4A7C15, tf.uint64), 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    return folded(folded(x, 27) * tf.constant(0x94D049BB133111EB, tf.uint64), 31)


def strata(grad: tf.Tensor, count: int, key: int, step: Any) -> tf.Tensor:
    """Places of ``count`` different entries, int64, of which each entry is one with the probability count / N."""
    numel, random = grad.shape.num_elements(), noise(count + 2, key, step, 0, phase=2)
    bounds = tf.range(count + 1, dtype=tf.int64) * numel // count
    place = bounds[:-1] + tf.bitwise.right_shift(random[2:] * (bounds[1:] - bounds[:-1]), 32)
    turn = tf.bitwise.right_shift(random[0] * numel + tf.bitwise.right_shift(random[1] * numel, 32), 32)
    return (place + turn) % numel


def randomk_encode(grad: tf.Tensor, residual: tf.Variable | None, index: tf.Tensor, scale: float = 1.0) -> tf.Tensor:
    """The entries of v at ``index`` times ``scale``, NaN if any entry of v is not finite, so that all workers see it; then a
    small number m that ``index`` decides and m * m, by which they see whether they all have the same."""
    v, mark = _with(grad, residual), tf.cast(index[:1] % 64, tf.float32)
    value = tf.gather(v, index) if scale == 1.0 else tf.gather(v, index) * scale
    return tf.concat([tf.where(tf.reduce_all(tf.math.is_finite(v)), value, float("nan")), mark, mark * mark], 0)


def randomk_decode(total: tf.Tensor, grad: tf.Tensor, residual: tf.Variable | None, index: tf.Tensor, world: Any, name: str,
                   out: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean of what :func:`randomk_encode` made, and whether it was finite; if so, e = v but 0 at ``index``; a
    ``DataLossError`` if workers don't have the same ``index``."""
    mark, square = tf.unstack(tf.cast(total[-2:], tf.float64))
    alike = tf.equal(mark * mark, tf.cast(world, tf.float64) * square)  # == is another thing in graphs of TensorFlow 1
    total, place = require(total[:-2], tf.where(alike, "", APART.format(name=name))), index[:, None]

    def landed() -> tf.Tensor:
        kept = [] if residual is None else [
            residual.assign(tf.tensor_scatter_nd_update(_with(grad, residual), place, tf.zeros_like(total)))]
        with tf.control_dependencies(kept):
            return tf.scatter_nd(place, divide(total, world), tf.shape(grad, tf.int64))

    return _if_finite(total, landed, grad)


def _with(grad: tf.Tensor, residual: tf.Variable | None) -> tf.Tensor:
    """v, read after what ``grad`` waits for."""
    if residual is None:
        return grad
    with tf.control_dependencies([grad]):
        return grad + residual.read_value()


def _if_finite(total: tf.Tensor, landed: Callable[[], tf.Tensor], grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What ``landed`` makes, NaN in its place where the total is not finite, and whether it is."""
    finite = tf.reduce_all(tf.math.is_finite(total))
    made = tf.cond(finite, landed, lambda: tf.fill(tf.shape(grad), float("nan")))
    return tf.ensure_shape(made, grad.shape), finite


class Matrix(NamedTuple):
    """M = G + E, and the variable that E was read from."""

    sum: tf.Tensor
    residual: tf.Variable | None


def powersgd_matrix(grad: tf.Tensor, residual: tf.Variable | None, columns: int) -> Matrix:
    """v as a matrix with so many columns."""
    return Matrix(tf.reshape(_with(grad, residual), [-1, columns]), residual)


def powersgd_start(matrix: Matrix, kept: tf.Variable, key: int) -> tf.Tensor:
    """Q transposed, from what was kept of it: each of its columns with a largest entry of 1, which the space that they span
    doesn't depend on; random where it is zero, as before the first step."""
    with tf.control_dependencies([matrix.sum]):
        q = tf.reshape(kept.read_value(), [-1, matrix.sum.shape[1]])
    peak = tf.reduce_max(tf.abs(q), 1, keepdims=True)
    return tf.where(peak > 0, tf.math.divide_no_nan(q, peak), normal(tuple(q.shape), key))


def powersgd_left(matrix: Matrix, q: tf.Tensor) -> tf.Tensor:
    """P = M Q, of Q transposed."""
    return tf.matmul(matrix.sum, q, transpose_b=True)


def powersgd_right(matrix: Matrix, p: tf.Tensor) -> tf.Tensor:
    """Q = transposed M P, transposed."""
    return tf.matmul(p, matrix.sum, transpose_a=True)


def orthonormal(p: tf.Tensor) -> tf.Tensor:
    """An orthonormal basis of what the columns span, as ``generic.orthonormal`` makes it, to the bit."""
    length, count = p.shape
    finite = tf.reduce_all(tf.math.is_finite(p))
    rest, columns = _scaled(tf.cast(tf.where(finite, p, 0.0), tf.float64), 0.0), []
    for _ in range(count):
        column = _scaled(rest[:, :1], 1e-8)
        column = tf.math.divide_no_nan(column, tf.sqrt(_dot(column, column, length)))
        rest = rest[:, 1:] - column * _dot(column, rest[:, 1:], math.isqrt(length) + 1)
        columns.append(column)
    return tf.where(finite, tf.cast(tf.concat(columns, 1), tf.float32), float("nan"))


def _scaled(columns: tf.Tensor, least: float) -> tf.Tensor:
    peak = tf.reduce_max(tf.abs(columns), 0, keepdims=True)
    return tf.where(peak > least, tf.math.divide_no_nan(columns, peak), 0.0)


def _dot(a: tf.Tensor, b: tf.Tensor, limit: int) -> tf.Tensor:
    unit = 2.0 ** (62 - limit.bit_length())
    return tf.cast(tf.reduce_sum(tf.cast(tf.round(a * b * unit), tf.int64), 0, keepdims=True), tf.float64) / unit


def powersgd_decode(total: tf.Tensor, own: tf.Tensor, p: tf.Tensor, matrix: Matrix, kept: tf.Variable, world: Any,
                    out: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean P Q', and whether it was finite; if so, e = v - P Q' of this worker's own Q, and the mean Q is kept."""
    def landed() -> tf.Tensor:
        mean = divide(total, world)
        updates = [kept.assign(tf.reshape(mean, [-1]))]
        if matrix.residual is not None:
            updates.append(matrix.residual.assign(tf.reshape(matrix.sum - tf.matmul(p, own), [-1])))
        with tf.control_dependencies(updates):
            return tf.reshape(tf.cast(tf.matmul(*exact_factors(p, mean)), tf.float32), [-1])

    return _if_finite(total, landed, out)


def exact_factors(p: tf.Tensor, q: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Both in fp64, rounded so that their product is exact: workers of all kinds get the same bits, in whatever order they add."""
    bits = 51 - q.shape[0].bit_length()
    return _rounded(p, bits - 23), _rounded(q, 23)


def _rounded(x: tf.Tensor, bits: int) -> tf.Tensor:
    x = tf.cast(x, tf.float64)
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(tf.reduce_max(tf.abs(x)), tf.int64), EXPONENT), tf.float64)
    unit = tf.where(power > 0, power, 1.0) * 2.0**-bits
    return tf.round(x / unit) * unit
