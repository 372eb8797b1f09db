"""The specification of every code, in array operations: NumPy arrays, and PyTorch tensors of any device.

Vectors are flat fp32. ``residual`` is the error-feedback state, updated in place, or None. Encoders have no step that
depends on the data on the host, so on a GPU they never wait; decoders read back what they check. ``docs/payloads.md``
says what the bytes mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, size

from hvd_quant import wire
from hvd_quant.ops.arrays import Array, copy, noise, quiet, stretches  # noqa: F401
from hvd_quant.ops.layout import (  # noqa: F401
    BLOCK, GROUP, TOPK_BITS, UNIT, dynamic_code, fields_body_bytes, onebit_body_bytes, sample_size, slots_for, sparse_body_bytes,
    topk_levels, units_of)
from hvd_quant.ops.linear import (  # noqa: F401
    exact_factors, normal, orthonormal, powersgd_decode, powersgd_left, powersgd_matrix, powersgd_right, powersgd_start,
    randomk_decode, randomk_encode, strata)

TINY = 2.0**-149
FP16_MAX = 65504.0
BF16_MAX = 3.3895313892515355e38


# ---------------------------------------------------------------------------------------- pieces that every codec uses

def accumulate(grad: Array, residual: Array | None) -> tuple[Array, Array]:
    """v = g + e, and whether all of it is finite; where it isn't, v = e, so that nothing poisons the residual."""
    xp = array_namespace(grad)
    with quiet():
        v = grad if residual is None else grad + residual
    ok = xp.isfinite(v)
    return xp.where(ok, v, xp.zeros_like(v) if residual is None else residual), xp.all(ok)


def restore(residual: Array, decoded: Array, grad: Array) -> None:
    """Take an encode back: e + decoded - g, with g left out where it was not finite.

    The result is right to fp32 rounding of the largest of g, decoded and their difference; where that rounding is all
    there is, as beside a gradient of 1e30, it is 0, so that no noise is left behind.
    """
    xp = array_namespace(residual)
    g = xp.where(xp.isfinite(grad), grad, xp.zeros_like(grad))
    v = residual + decoded
    before = v - g
    noise = 2.0**-22 * xp.maximum(xp.maximum(xp.abs(v), xp.abs(decoded)), xp.abs(g))
    residual[:] = xp.where(xp.abs(before) > noise, before, xp.zeros_like(before))


def pack(codec: str, numel: int, finite: Array, *parts: Array) -> Array:
    """A sealed payload: the header of ``codec``, then the bytes of ``parts``, then padding.

    Arguments:
        codec: the compressor's name.
        numel: entries encoded.
        finite: 0-d bool; False sets the non-finite flag.
        parts: 1-D arrays of one framework and device; their bytes follow each other.
    """
    xp = array_namespace(*parts)
    body = [part.view(xp.uint8) for part in parts]
    nbytes = sum(size(part) for part in body)
    padding = xp.zeros(wire.padded(nbytes) - nbytes, dtype=xp.uint8, device=device(parts[0]))
    header = _header(xp, device(parts[0]), codec, numel, wire.padded(nbytes))
    payload = xp.concat([header, *body, padding])
    payload[3] = xp.where(finite, 0, wire.NONFINITE)
    payload[24:32] = xp.reshape(wire.checksum(payload), (1,)).view(xp.uint8)
    return payload


@functools.lru_cache(maxsize=4096)
def _header(xp: Any, where: Any, codec: str, numel: int, body_bytes: int) -> Array:
    return xp.asarray(wire.pack_header(codec, numel, body_bytes), device=where)


def unpack(payload: Array, codec: str, numel: int, body_bytes: int) -> tuple[Array, bool]:
    """Check a payload and return its body (uint8, ``body_bytes`` without the padding) and whether it is all finite.

    Raises:
        hvd_quant.wire.PayloadError: if a field, a length, the checksum or the padding is off.
    """
    if hasattr(payload, "storage_offset") and payload.storage_offset() % 8:
        payload = payload.clone()  # torch's view() wants aligned bytes
    flags = wire.check(payload, codec, numel, wire.padded(body_bytes))
    body = payload[wire.HEADER_BYTES:]
    xp = array_namespace(payload)
    _require((xp.all(body[body_bytes:] == 0), "padding is not zero"))
    return body[:body_bytes], not flags & wire.NONFINITE


def without_flags(payload: Array) -> Array:
    """A copy of a payload that decodes as if everything had been finite (it leaves non-finite gradients out)."""
    xp = array_namespace(payload)
    payload = xp.asarray(payload, copy=True)
    payload[3] = 0
    payload[24:32] = xp.reshape(wire.checksum(payload), (1,)).view(xp.uint8)
    return payload


def pack_bits(bits: Array) -> Array:
    """Bools to bytes, the first in the least significant bit; the last byte is filled with zeros."""
    xp = array_namespace(bits)
    shifts = xp.arange(8, dtype=xp.uint8, device=device(bits))
    return xp.sum(_rows(xp.astype(bits, xp.uint8), 8) << shifts, axis=1, dtype=xp.uint8)


def unpack_bits(data: Array, count: int) -> Array:
    """The first ``count`` bits of ``data`` as bools; the others must be zero."""
    xp = array_namespace(data)
    shifts = xp.arange(8, dtype=xp.uint8, device=device(data))
    bits = xp.reshape((data[:, None] >> shifts) & 1, (-1,)) != 0
    _require((~xp.any(bits[count:]), "unused bits are not zero"))
    return bits[:count]


def _require(*checks: tuple[Array, str]) -> None:
    for ok, what in checks:
        if not bool(ok):
            raise wire.PayloadError(f"payload is damaged: {what}")


def _rows(x: Array, length: int) -> Array:
    """x as a matrix with rows of ``length``, the last one filled up with zeros."""
    xp = array_namespace(x)
    padding = xp.zeros(-size(x) % length, dtype=x.dtype, device=device(x))
    return xp.reshape(xp.concat([x, padding]), (-(-size(x) // length), length))


def as_floats(data: Array) -> Array:
    """Bytes of a payload's body read as fp32."""
    if hasattr(data, "storage_offset") and data.storage_offset() % 4:
        data = data.clone()  # torch's view() wants aligned bytes
    return data.view(array_namespace(data).float32)


def add_up(terms: Iterable[tuple[Array, bool]], out: Array, scale: float = 1.0) -> Array:
    """Add decoded vectors in order, starting at +0, into ``out``; NaN throughout if one of them was not finite.

    Arguments:
        terms: pairs of a vector of the length of ``out`` and whether it was finite when it was encoded.
        out: fp32, 1-D; what it holds is overwritten.
        scale: the sum is multiplied by its fp32 value.
    """
    out[:] = 0.0
    finite = True
    for term, ok in terms:
        finite &= ok
        with quiet():
            out += term
    return _finish_sum(out, finite, scale)


def _finish_sum(out: Array, finite: bool, scale: float) -> Array:
    if not finite:
        out[:] = math.nan
    elif scale != 1.0:
        out *= float(np.float32(scale))
    return out


def clip_norm(grad: Array, limit: float, world: int) -> Array:
    """The gradient, scaled down where its 2-norm is above ``limit`` / sqrt(``world``)."""
    xp = array_namespace(grad)
    if not size(grad):
        return grad
    largest = xp.max(xp.abs(grad))
    largest = xp.where(largest > 0, largest, xp.ones_like(largest))
    with quiet():  # squares of what is at most 1 don't overflow
        norm = largest * xp.sqrt(xp.sum((grad / largest) ** 2))
        return grad * xp.clip(limit / math.sqrt(world) / norm, None, 1.0)


def moving_average(average: Array, x: Array, eta: float) -> Array:
    """(1 - eta) average + eta x, or x while there is no average but zeros; in memory of its own."""
    xp = array_namespace(x)
    begun, out = xp.any(average != 0), xp.empty_like(x)
    for part in stretches(x):
        out[part] = xp.where(begun, (1 - eta) * average[part] + eta * x[part], x[part])
    return out


def zero_where(sent: Array, x: Array) -> Array:
    """x, and 0 where ``sent`` isn't, in memory of ``sent``."""
    xp = array_namespace(x)
    for part in stretches(x):
        sent[part] = xp.where(sent[part] != 0, xp.zeros_like(x[part]), x[part])
    return sent


def new_vector(numel: int, like: Array) -> Array:
    """An fp32 vector with undefined values, of the framework and device of ``like``."""
    return array_namespace(like).empty(numel, dtype=array_namespace(like).float32, device=device(like))


# ------------------------------------------------------------------------------------------------- none, fp16 and bf16

def cast_encode(grad: Array, dtype: str, codec: str) -> Array:
    """The values themselves as "float32", "float16" or "bfloat16", rounded to nearest even."""
    xp = array_namespace(grad)
    v, finite = accumulate(grad, None)
    if dtype == "float32":
        return pack(codec, size(v), finite, v)
    if dtype == "float16":
        half, largest = _to_half(v)
        return pack(codec, size(v), finite & ~largest, half)
    bits = v.view(xp.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    over = (bits & 0x7FFF) == 0x7F80
    bits = xp.where(over, bits - 1, bits)
    half = xp.astype(xp.stack([bits & 0xFF, (bits >> 8) & 0xFF], axis=1), xp.uint8)
    return pack(codec, size(v), finite & ~xp.any(over), xp.reshape(half, (-1,)))


def _to_half(v: Array) -> tuple[Array, Array]:
    """v as fp16, clamped to the largest finite values, and whether any value would have rounded beyond them."""
    xp = array_namespace(v)
    return xp.astype(xp.clip(v, -FP16_MAX, FP16_MAX), xp.float16), xp.any(xp.abs(v) >= FP16_MAX + 16)


def divide(total: Array, world: int, out: Array) -> Array:
    """out = total / world, in place where they are the same vector."""
    out[:] = total / world
    return out


def divide_to_half(grad: Array, world: int) -> Array:
    """grad / world as fp16, for an allreduce that must not overflow where the mean doesn't."""
    xp = array_namespace(grad)
    with quiet():
        return xp.astype(grad / world, xp.float16)


def widen(half: Array, out: Array) -> Array:
    """out = half, as fp32."""
    out[:] = array_namespace(half).astype(half, out.dtype)
    return out


def cast_decode_sum(payloads: list[Array], numel: int, dtype: str, codec: str, *, out: Array | None = None,
                    scale: float = 1.0) -> Array:
    """The sum of what :func:`cast_encode` made, times ``scale``."""
    out = new_vector(numel, payloads[0]) if out is None else out
    return add_up((_cast_decode(payload, numel, dtype, codec) for payload in payloads), out, scale)


def _cast_decode(payload: Array, numel: int, dtype: str, codec: str) -> tuple[Array, bool]:
    xp = array_namespace(payload)
    body, finite = unpack(payload, codec, numel, numel * (4 if dtype == "float32" else 2))
    if dtype == "bfloat16":
        wide = xp.zeros((numel, 4), dtype=xp.uint8, device=device(body))
        wide[:, 2:] = xp.reshape(body, (numel, 2))
        value = as_floats(xp.reshape(wide, (-1,)))
    else:
        value = xp.astype(body.view(getattr(xp, dtype)), xp.float32)
    _require((xp.all(xp.isfinite(value)), "a value is not finite"))
    return value, finite


# -------------------------------------------------------------------------------------------------- onebit and signsgd

def onebit_encode(grad: Array, residual: Array | None, block_size: int, zeros: bool = False) -> Array:
    """One bit an entry and the two means of each block; see :class:`hvd_quant.compressors.OneBit`."""
    return _signs_encode("onebit", grad, residual, block_size, zeros)


def signsgd_encode(grad: Array, residual: Array | None, block_size: int, zeros: bool) -> Array:
    """One bit an entry and the mean magnitude of each block; see :class:`hvd_quant.compressors.SignSGD`."""
    return _signs_encode("signsgd", grad, residual, block_size, zeros)


def _signs_encode(codec: str, grad: Array, residual: Array | None, block_size: int, zeros: bool) -> Array:
    xp = array_namespace(grad)
    v, finite = accumulate(grad, residual)
    numel = size(v)
    blocks = _rows(v, block_size)
    real = _rows(xp.ones_like(v, dtype=xp.bool), block_size)
    up = real & ((blocks > 0) if zeros else (blocks >= 0))
    down = blocks < 0
    if codec == "onebit":
        means = [_masked_mean(blocks, up), _masked_mean(blocks, down)]
    else:
        means = [_masked_mean(xp.abs(blocks), up | down)]
    levels, ok = _finite_levels(xp.stack(means, axis=1))
    lower = levels[:, 1:] if codec == "onebit" else -levels
    decoded = xp.where(up, levels[:, :1], xp.where(down, lower, xp.zeros_like(blocks)))
    if residual is not None:
        residual[:] = v - xp.reshape(decoded, (-1,))[:numel]
    parts = [xp.reshape(levels, (-1,)), pack_bits(xp.reshape(up, (-1,))[:numel])]
    if zeros:
        parts.append(pack_bits(xp.reshape(up | down, (-1,))[:numel]))
    return pack(codec, numel, finite & ok, *parts)


def _masked_mean(rows: Array, mask: Array) -> Array:
    """The mean of each row's masked entries, 0 where there is none."""
    xp = array_namespace(rows)
    count = xp.sum(xp.astype(mask, xp.float32), axis=1)
    with quiet():
        return xp.sum(xp.where(mask, rows, xp.zeros_like(rows)), axis=1) / xp.clip(count, 1.0, None)


def _finite_levels(levels: Array) -> tuple[Array, Array]:
    """Levels with both of a pair set to 0 where one overflowed, and whether none did."""
    xp = array_namespace(levels)
    ok = xp.all(xp.isfinite(levels), axis=1)
    return xp.where(ok[:, None], levels, xp.zeros_like(levels)), xp.all(ok)


def onebit_decode_sum(payloads: list[Array], numel: int, block_size: int, zeros: bool = False, *,
                      out: Array | None = None, scale: float = 1.0) -> Array:
    """The sum of what :func:`onebit_encode` made, times ``scale``."""
    out = new_vector(numel, payloads[0]) if out is None else out
    return add_up((_signs_decode("onebit", payload, numel, block_size, zeros, 2) for payload in payloads), out, scale)


def signsgd_decode_sum(payloads: list[Array], numel: int, block_size: int, zeros: bool, *, out: Array | None = None,
                       scale: float = 1.0) -> Array:
    """The sum of what :func:`signsgd_encode` made, times ``scale``."""
    out = new_vector(numel, payloads[0]) if out is None else out
    return add_up((_signs_decode("signsgd", payload, numel, block_size, zeros, 1) for payload in payloads), out, scale)


def _signs_decode(codec: str, payload: Array, numel: int, block_size: int, zeros: bool, nlevels: int) -> tuple[Array, bool]:
    xp = array_namespace(payload)
    nblocks, nbytes = -(-numel // block_size), -(-numel // 8)
    body, finite = unpack(payload, codec, numel, onebit_body_bytes(numel, block_size, zeros, nlevels))
    levels, bits = xp.reshape(as_floats(body[:4 * nlevels * nblocks]), (nblocks, nlevels)), body[4 * nlevels * nblocks:]
    _require((xp.all(xp.isfinite(levels)), "a level is not finite"))
    upper, lower = levels[:, 0], levels[:, 1] if nlevels == 2 else -levels[:, 0]
    block = xp.arange(numel, dtype=xp.int64, device=device(body)) // block_size
    up = unpack_bits(bits[:nbytes], numel)
    value = xp.where(up, upper[block], lower[block])
    if zeros:
        nonzero = unpack_bits(bits[nbytes:], numel)
        _require((~xp.any(up & ~nonzero), "a zero has a sign"))
        value = xp.where(nonzero, value, xp.zeros_like(value))
    return value, finite


# ------------------------------------------------------------------ qsgd, terngrad, natural, blockwise8: a few bits an entry

def _uniform(random: Array) -> Array:
    """:func:`noise` in (0, 1): odd multiples of 2^-24, each as likely, so that a multiple of 2^-23 exceeds its own share."""
    xp = array_namespace(random)
    return xp.astype((random >> 8) | 1, xp.float32) * 2.0**-24


def qsgd_encode(grad: Array, residual: Array | None, bits: int, norm: str, block_size: int, *draw: int) -> Array:
    """Each entry at random to one of the two nearest levels; see :class:`hvd_quant.compressors.QSGD`.

    Arguments:
        draw: what :func:`noise` takes: stream, first, step, rank, phase.
    """
    xp = array_namespace(grad)
    v, finite = accumulate(grad, residual)
    blocks = _rows(v, block_size)
    if norm == "max":
        norms = xp.max(xp.abs(blocks), axis=1)
    else:
        wide = xp.astype(blocks, xp.float64)
        with quiet():
            norms = xp.astype(xp.sqrt(xp.sum(wide * wide, axis=1)), xp.float32)
    ok = xp.isfinite(norms)
    norms = xp.where(ok, norms, xp.zeros_like(norms))
    return _levels_encode("qsgd", v, finite & xp.all(ok), norms, block_size, bits, _uniform(noise(size(v), v, *draw)), residual)


def terngrad_measure(grad: Array, residual: Array | None, clip: float) -> Array:
    """The largest magnitude of the clipped tensor, fp32[1]; see :class:`hvd_quant.compressors.TernGrad`."""
    xp = array_namespace(grad)
    v = accumulate(grad, residual)[0]
    if not size(v):
        return xp.zeros(1, dtype=xp.float32, device=device(v))
    largest = xp.max(xp.abs(v), keepdims=True)
    if not clip:
        return largest
    wide = xp.astype(v, xp.float64)
    mean = xp.sum(wide, keepdims=True) / size(v)
    variance = xp.sum(wide * wide, keepdims=True) / size(v) - mean * mean
    bound = xp.maximum(clip * xp.sqrt(xp.clip(variance, 0.0, None)), xp.abs(mean))
    return xp.astype(xp.minimum(xp.astype(largest, xp.float64), bound), xp.float32)


def terngrad_encode(grad: Array, residual: Array | None, largest: Array, *draw: int) -> Array:
    """Minus, zero or plus the largest magnitude, at random; ``draw`` as for :func:`qsgd_encode`."""
    v, finite = accumulate(grad, residual)
    return _levels_encode("terngrad", v, finite, largest, max(size(v), 1), 2, _uniform(noise(size(v), v, *draw)), residual)


def natural_encode(grad: Array, residual: Array | None, *draw: int) -> Array:
    """Each entry at random to one of the two nearest powers of two; ``draw`` as for :func:`qsgd_encode`."""
    xp = array_namespace(grad)
    v, finite = accumulate(grad, residual)
    a, random = xp.clip(xp.abs(v), None, 2.0**64), noise(size(v), v, *draw)
    # What is added to the mantissa carries into the exponent with the right chance.
    power = (xp.astype(a.view(xp.int32), xp.int64) + (random >> 9) >> 23) - 64
    smallest = xp.astype(a * 2.0**62 > _uniform(random), xp.int64)
    k = xp.where(a >= 2.0**-62, power, smallest)
    fields = xp.where((v < 0) & (k > 0), k + 128, k)
    return _fields_finish("natural", v, finite & ~xp.any(xp.abs(v) > 2.0**64), v[:0], fields, _power(fields), 8, residual)


def _power(fields: Array) -> Array:
    """What fields of natural compression stand for."""
    xp = array_namespace(fields)
    k = fields & 127
    bits = xp.where(k > 0, k + 64 << 23, xp.zeros_like(k))
    value = xp.astype(bits, xp.int32).view(xp.float32)
    return xp.where(fields > 127, -value, value)


def blockwise8_encode(grad: Array, residual: Array | None, code: str, block_size: int) -> Array:
    """Each entry to the nearest of 256 parts of its block's largest; see :class:`hvd_quant.compressors.Blockwise8`."""
    xp = array_namespace(grad)
    v, finite = accumulate(grad, residual)
    largest = xp.max(xp.abs(_rows(v, block_size)), axis=1)
    if code == "linear":
        return _levels_encode("blockwise8", v, finite, largest, block_size, 8, 0.5, residual)
    scales, inverse = _usable(largest)
    part = xp.clip(xp.abs(v) * _spread(inverse, size(v), block_size), None, 1.0)
    values, marks = _dynamic(xp, device(v))
    k = xp.searchsorted(marks, part)
    k = xp.where(v < 0, xp.clip(k, None, 127), k)  # there is no -1
    fields = xp.where(v < 0, -k, k) & 255
    return _fields_finish("blockwise8", v, finite, scales, fields, values[fields] * _spread(scales, size(v), block_size), 8,
                          residual)


@functools.lru_cache
def _dynamic(xp: Any, where: Any) -> tuple[Array, Array]:
    """What the fields of the dynamic code stand for, and the marks half-way between magnitudes."""
    values = np.array(dynamic_code(), np.float32)
    return xp.asarray(values, device=where), xp.asarray((values[:128] + values[1:129]) * np.float32(0.5), device=where)


def _levels_encode(codec: str, v: Array, finite: Array, largest: Array, block_size: int, bits: int, u: Array | float,
                   residual: Array | None) -> Array:
    """Each entry to one of the two nearest multiples of ``largest`` / s, s = 2^(bits - 1) - 1: away from zero where its
    distance to the smaller, in such steps, is more than ``u``."""
    xp = array_namespace(v)
    most = 2 ** (bits - 1) - 1
    scales, inverse = _usable(largest / most)
    x = xp.clip(xp.abs(v) * _spread(inverse, size(v), block_size), None, float(most))
    level = xp.floor(x)
    level = xp.astype(level, xp.int32) + xp.astype(x - level > u, xp.int32)
    level = xp.where(v < 0, -level, level)
    decoded = xp.astype(level, xp.float32) * _spread(scales, size(v), block_size)
    return _fields_finish(codec, v, finite, scales, level & 2**bits - 1, decoded, bits, residual)


def _usable(scales: Array) -> tuple[Array, Array]:
    """Scales and their inverses, both 0 where the inverse is not finite: of blocks of nothing but zeros, and of such as are
    below what fp32 holds with all its digits."""
    xp = array_namespace(scales)
    with quiet():
        inverse = 1.0 / scales
    ok = xp.isfinite(inverse)
    return xp.where(ok, scales, xp.zeros_like(scales)), xp.where(ok, inverse, xp.zeros_like(scales))


def _spread(scales: Array, numel: int, block_size: int) -> Array:
    """Each entry's scale."""
    xp = array_namespace(scales)
    return scales[xp.arange(numel, dtype=xp.int64, device=device(scales)) // block_size]


def _fields_finish(codec: str, v: Array, finite: Array, scales: Array, fields: Array, decoded: Array, bits: int,
                   residual: Array | None) -> Array:
    """Update the residual and pack the fields: 64 entries in 8 ``bits`` bytes, each with those that are so far apart."""
    xp = array_namespace(v)
    if residual is not None:
        residual[:] = v - decoded
    groups = xp.reshape(_rows(xp.astype(fields, xp.uint8), GROUP), (-1, 8 // bits, 8 * bits))
    return pack(codec, size(v), finite, scales, xp.reshape(xp.sum(groups << _places(xp, bits, v), axis=1, dtype=xp.uint8), (-1,)))


def _places(xp: Any, bits: int, like: Array) -> Array:
    return xp.arange(8 // bits, dtype=xp.uint8, device=device(like))[:, None] * bits


def _fields_decode_sum(codec: str, payloads: list[Array], numel: int, bits: int, block_size: int, code: str, out: Array | None,
                       scale: float) -> Array:
    out = new_vector(numel, payloads[0]) if out is None else out
    return add_up((_fields_decode(codec, payload, numel, bits, block_size, code) for payload in payloads), out, scale)


def _fields_decode(codec: str, payload: Array, numel: int, bits: int, block_size: int, code: str) -> tuple[Array, bool]:
    xp = array_namespace(payload)
    nscales = {"terngrad": 1, "natural": 0}.get(codec, -(-numel // block_size))
    body, finite = unpack(payload, codec, numel, fields_body_bytes(numel, bits, nscales))
    scales = as_floats(body[:4 * nscales])
    groups = xp.reshape(body[4 * nscales:], (-1, 1, 8 * bits)) >> _places(xp, bits, body) & 2**bits - 1
    fields = xp.astype(xp.reshape(groups, (-1,)), xp.int64)
    _require((xp.all(xp.isfinite(scales) & (scales.view(xp.int32) >= 0)), "a scale is negative or not finite"))
    if code != "dynamic":
        _require((~xp.any(fields == 2 ** (bits - 1)), "a field stands for nothing"))
    _require((~xp.any(fields[numel:] != 0), "an unused field is not zero"))
    fields = fields[:numel]
    if code == "natural":
        return _power(fields), finite
    if code == "dynamic":
        value = _dynamic(xp, device(body))[0][fields]
    else:
        value = xp.astype(xp.where(fields < 2 ** (bits - 1), fields, fields - 2**bits), xp.float32)
    return value * _spread(scales, numel, block_size), finite


def qsgd_decode_sum(payloads: list[Array], numel: int, bits: int, block_size: int, *, out: Array | None = None,
                    scale: float = 1.0) -> Array:
    """The sum of what :func:`qsgd_encode` made, times ``scale``."""
    return _fields_decode_sum("qsgd", payloads, numel, bits, block_size, "linear", out, scale)


def terngrad_decode_sum(payloads: list[Array], numel: int, *, out: Array | None = None, scale: float = 1.0) -> Array:
    """The sum of what :func:`terngrad_encode` made, times ``scale``."""
    return _fields_decode_sum("terngrad", payloads, numel, 2, max(numel, 1), "linear", out, scale)


def natural_decode_sum(payloads: list[Array], numel: int, *, out: Array | None = None, scale: float = 1.0) -> Array:
    """The sum of what :func:`natural_encode` made, times ``scale``."""
    return _fields_decode_sum("natural", payloads, numel, 8, 1, "natural", out, scale)


def blockwise8_decode_sum(payloads: list[Array], numel: int, code: str, block_size: int, *, out: Array | None = None,
                          scale: float = 1.0) -> Array:
    """The sum of what :func:`blockwise8_encode` made, times ``scale``."""
    return _fields_decode_sum("blockwise8", payloads, numel, 8, block_size, code, out, scale)


# ---------------------------------------------------------------------------------- sparse: threshold, adaptive, topk

def _hash(step: int) -> int:
    return int(step) * 0x9E3779B1 & 0xFFFFFFFF


def _start(numel: int, step: int) -> int:
    """The unit at which a step's scan starts."""
    return _hash(step) * units_of(numel) >> 32


def sample(grad: Array, residual: Array | None, step: int) -> Array:
    """The sampled entries of v: one of each stretch of N/S entries, at a place that changes with the step."""
    xp = array_namespace(grad)
    numel = size(grad)
    count = sample_size(numel)
    i = xp.arange(count, dtype=xp.int64, device=device(grad))
    m = (i ^ _hash(step)) * 0x9E3779B1 & 0xFFFFFFFF
    m = m ^ (m >> 15)
    m = m * 0x85EBCA77 & 0xFFFFFFFF
    m = m ^ (m >> 13)
    index = i * numel // max(count, 1) + (m * (numel // max(count, 1)) >> 32)
    return accumulate(grad[index], None if residual is None else residual[index])[0]


def topk_measure(grad: Array, residual: Array | None, ratio: float, step: int) -> Array:
    """Thresholds (tau+, tau-), fp32[2], between which an entry stays: |v| must exceed the sample's (1 - ratio) quantile."""
    xp = array_namespace(grad)
    tau = _beyond_quantile(xp.abs(sample(grad, residual, step)), ratio)
    return xp.concat([tau, -tau])


def _beyond_quantile(magnitudes: Array, ratio: float) -> Array:
    """What exceeds the (1 - ratio) quantile just so, of shape [1]."""
    xp = array_namespace(magnitudes)
    k = math.ceil(ratio * size(magnitudes))
    t = xp.sort(magnitudes, descending=True)[k:k + 1] if k < size(magnitudes) else _zero(magnitudes)
    return xp.nextafter(t, xp.full_like(t, math.inf))


def _zero(like: Array) -> Array:
    return array_namespace(like).zeros(1, dtype=like.dtype, device=device(like))


def model_measure(grad: Array, residual: Array | None, ratio: float, step: int, magnitudes: Array, threshold: Array) -> Array:
    """:func:`topk_measure` with a threshold that several tensors share, where :func:`model_threshold` has left one.

    Arguments:
        magnitudes: fp32, [sample_size(numel)]; |v| of this step's sample is written into it.
        threshold: fp32[2]: the shared tau+, 0 while there is none; and 1 once ``magnitudes`` holds a sample, which is set here.
    """
    xp = array_namespace(grad)
    magnitudes[:] = xp.abs(sample(grad, residual, step))
    threshold[1:] = 1.0
    # As bits, which also differ from 0 where TensorFlow's threads, on which NumPy runs there, flush denormals.
    tau = xp.where(threshold[:1].view(xp.int32) != 0, threshold[:1], _beyond_quantile(magnitudes, ratio))
    return xp.concat([tau, -tau])


def model_threshold(samples: list[tuple[Array, Array, int]], ratio: float) -> None:
    """Leave in each threshold the one that keeps ``ratio`` of several tensors' entries together: the largest sampled magnitude
    with more than ``ratio`` of the entries at or above it; what exceeds it is kept.

    Arguments:
        samples: the magnitudes and the threshold of :func:`model_measure`, and the entries that they stand for, of each tensor.
            A sample stands for as many entries as there are to each, in 2^-20 and rounded down, so that sums are exact.
    """
    xp = array_namespace(samples[0][0])
    magnitudes = xp.concat([magnitudes for magnitudes, _, _ in samples])
    weights = xp.concat([xp.broadcast_to(xp.astype(threshold[1:] > 0, xp.int64) * ((numel << 20) // max(1, size(sample))),
                                         sample.shape) for sample, threshold, numel in samples])
    order, total = xp.argsort(magnitudes, descending=True), xp.sum(weights)
    limit = xp.astype(xp.floor(xp.astype(total, xp.float64) * ratio), xp.int64)
    at_or_above = xp.cumulative_sum(xp.take(weights, order))
    place = xp.sum(xp.astype(at_or_above <= limit, xp.int64), keepdims=True)
    t = xp.take(xp.concat([xp.take(magnitudes, order), _zero(magnitudes)]), place)
    tau = xp.nextafter(t, xp.full_like(t, math.inf))
    for _, threshold, _ in samples:
        threshold[:1] = xp.where(total > 0, tau, threshold[:1])


def adaptive_measure(grad: Array, residual: Array | None, ratio: float, step: int) -> Array:
    """Thresholds (tau+, tau-), fp32[2], that keep ``ratio`` of the sampled positive and of the sampled negative entries."""
    xp = array_namespace(grad)
    v = sample(grad, residual, step)
    if not size(v):
        return xp.asarray([TINY, -TINY], dtype=xp.float32, device=device(grad))
    upper, n_upper = _kth_largest(v, ratio)
    lower, n_lower = _kth_largest(-v, ratio)
    tiny = xp.full_like(upper, TINY)
    upper, lower = (xp.where(n_upper > 0, upper, xp.where(n_lower > 0, lower, tiny)),
                    xp.where(n_lower > 0, lower, xp.where(n_upper > 0, upper, tiny)))
    return xp.concat([upper, -lower])


def _kth_largest(v: Array, ratio: float) -> tuple[Array, Array]:
    """The max(1, ceil(ratio n))-th largest of v, n being the number of positive entries, and n; both of shape [1]."""
    xp = array_namespace(v)
    count = xp.sum(xp.astype(v > 0, xp.int64), keepdims=True)
    k = xp.astype(xp.ceil(xp.astype(count, xp.float64) * ratio), xp.int64)
    return xp.take(xp.sort(v, descending=True), xp.clip(k, 1, None) - 1), count


def threshold_encode(grad: Array, residual: Array | None, tau: float, slots: int, step: int) -> Array:
    """Entries beyond +-tau, sent as +-tau; see :class:`hvd_quant.compressors.Threshold`."""
    xp = array_namespace(grad)
    v, finite = accumulate(grad, residual)
    kept = _select(v, (v >= tau) | (v <= -tau), slots, step)
    # full() fills on the device; a list would be copied there, for which a GPU makes the host wait
    levels = xp.concat([xp.full(1, value, dtype=xp.float32, device=device(grad)) for value in (tau, -tau)])
    decoded = xp.where(v > 0, levels[0], levels[1])
    return _sparse_finish("threshold", v, finite, kept, decoded, levels, residual, slots, step, [v > 0])


def adaptive_encode(grad: Array, residual: Array | None, thresholds: Array, slots: int, step: int) -> Array:
    """Entries beyond the thresholds, sent as the mean of their sign; see :class:`hvd_quant.compressors.Adaptive`."""
    xp = array_namespace(grad)
    v, finite = accumulate(grad, residual)
    numel = size(v)
    kept = _select(v, (v >= thresholds[0]) | (v <= thresholds[1]), slots, step)
    rows, mask = _rows(v, UNIT), _rows(kept, UNIT)
    levels = xp.stack([_masked_mean(rows, mask & (rows > 0)), _masked_mean(rows, mask & (rows < 0))], axis=1)
    levels, ok = _finite_levels(levels)
    decoded = xp.reshape(xp.where(rows > 0, levels[:, :1], levels[:, 1:]), (-1,))[:numel]
    return _sparse_finish("adaptive", v, finite & ok, kept, decoded, xp.reshape(levels, (-1,)), residual, slots, step, [v > 0])


def topk_encode(grad: Array, residual: Array | None, thresholds: Array, slots: int, values: str, step: int) -> Array:
    """Entries beyond the thresholds, sent as ``values``; see :class:`hvd_quant.compressors.TopK`."""
    xp = array_namespace(grad)
    v, finite = accumulate(grad, residual)
    beyond = (v >= thresholds[0]) | (v <= thresholds[1])
    t = xp.nextafter(thresholds[0], xp.zeros_like(thresholds[0]))
    ties = (xp.abs(v) >= t) & (t > 0)
    kept = _select(v, xp.where(xp.any(beyond), beyond, ties), slots, step)
    if TOPK_BITS[values] > 2:
        value = v if values == "float32" else _to_half(v)[0]
        levels, decoded, codes = value[:0].view(xp.float32), xp.astype(value, xp.float32), [value]
    else:
        levels, decoded, codes = _leveled(v, kept, values)
    return _sparse_finish("topk", v, finite, kept, decoded, levels, residual, slots, step, codes)


def _leveled(v: Array, kept: Array, values: str) -> tuple[Array, Array, list[Array]]:
    """Levels that stand for magnitudes of kept entries, what these decode to, and bits that say so."""
    xp = array_namespace(v)
    rows, mask = (xp.reshape(x, (1, -1)) if values == "tensor_sign" else _rows(x, UNIT) for x in (xp.abs(v), kept))
    mean = _mean_magnitude(rows, mask)
    if values != "2bit":
        levels, level, codes = xp.stack([mean, -mean], axis=1), mean[:, None], [v > 0]
    else:
        upper = rows > mean[:, None]
        levels = xp.stack([_mean_magnitude(rows, mask & ~upper), _mean_magnitude(rows, mask & upper)], axis=1)
        level, codes = xp.where(upper, levels[:, 1:], levels[:, :1]), [v > 0, xp.reshape(upper, (-1,))[:size(v)]]
    level = xp.reshape(xp.broadcast_to(level, rows.shape), (-1,))[:size(v)]
    return xp.reshape(levels, (-1,)), xp.where(v > 0, level, -level), codes


def _mean_magnitude(rows: Array, mask: Array) -> Array:
    """The mean of each row's masked entries, 0 where there is none, in double precision: so a constant is its own mean, and
    hardly any mean depends on the order of sums."""
    xp = array_namespace(rows)
    total = xp.sum(xp.where(mask, xp.astype(rows, xp.float64), 0.0), axis=1)
    return xp.astype(total / xp.clip(xp.sum(xp.astype(mask, xp.float64), axis=1), 1.0, None), xp.float32)


def _select(v: Array, candidates: Array, slots: int, step: int) -> Array:
    """Of the candidates, the first ``slots`` in the step's cyclic order, at most 255 a block."""
    xp = array_namespace(v)
    numel, units = size(v), units_of(size(v))
    # No zero exceeds a threshold; it would seem to exceed a denormal one where TensorFlow's threads, on which NumPy runs there,
    # flush it.
    candidates = candidates & (v != 0)
    cube = xp.astype(xp.reshape(_rows(candidates, UNIT), (units, UNIT // BLOCK, BLOCK)), xp.int64)
    # entries that each block has, and blocks that each unit has: fewer only at the tensor's end
    first = xp.arange(units * (UNIT // BLOCK), dtype=xp.int64, device=device(v)) * BLOCK
    entries = xp.reshape(xp.clip(numel - first, 0, BLOCK), (units, UNIT // BLOCK, 1))
    blocks = xp.sum(xp.astype(entries > 0, xp.int64), axis=1)
    # where in the tensor, in each unit and in each block the order begins, the fraction left each time choosing the next
    first_block = (_hash(step) * units & 0xFFFFFFFF) * blocks
    first_entry = (first_block & 0xFFFFFFFF)[:, :, None] * entries >> 32
    in_block = _cyclic_sum(cube, first_entry)
    cube = xp.where(in_block <= 255, cube, xp.zeros_like(cube))
    block_totals = xp.sum(cube, axis=2)
    in_unit = _cyclic_sum(block_totals, first_block >> 32)
    unit_totals = xp.sum(block_totals, axis=1)
    in_tensor = _cyclic_sum(unit_totals, _start(numel, step))
    rank = in_block + (in_unit - block_totals)[:, :, None] + (in_tensor - unit_totals)[:, None, None]
    return xp.reshape((cube > 0) & (rank <= slots), (-1,))[:numel]


def _cyclic_sum(x: Array, first: Array | int) -> Array:
    """Cumulative sums along the last axis in cyclic order from position ``first`` on, [..., 1] or one for all."""
    xp = array_namespace(x)
    place = xp.arange(x.shape[-1], dtype=xp.int64, device=device(x))
    before = xp.sum(xp.where(place < first, x, xp.zeros_like(x)), axis=-1, keepdims=True)
    after = xp.sum(x, axis=-1, keepdims=True) - before
    return xp.cumulative_sum(x, axis=-1) + xp.where(place < first, after, -before)


def _sparse_finish(codec: str, v: Array, finite: Array, kept: Array, decoded: Array, levels: Array,
                   residual: Array | None, slots: int, step: int, codes: list[Array]) -> Array:
    """Update the residual and write the kept entries into slots, unit by unit from the step's first one, with their codes: bits
    or values."""
    xp = array_namespace(v)
    numel = size(v)
    if residual is not None:
        residual[:] = xp.where(kept, v - decoded, v)
    start = _start(numel, step)
    counts = xp.sum(xp.astype(_rows(kept, BLOCK), xp.int32), axis=1)
    index = xp.roll(xp.arange(numel, dtype=xp.int64, device=device(v)), -start * UNIT)
    kept = xp.roll(kept, -start * UNIT)
    slot = xp.cumulative_sum(xp.astype(kept, xp.int64)) - 1
    slot = xp.where(kept, slot, xp.full_like(slot, slots))  # what isn't kept goes to one slot more, which is cut off

    def fill(x: Array) -> Array:
        filled = xp.zeros(slots + 1, dtype=x.dtype, device=device(v))
        filled[slot] = x[index]
        return filled[:slots]

    positions = fill(xp.astype(xp.arange(numel, dtype=xp.int64, device=device(v)) % BLOCK, xp.uint8))
    filled = [fill(code) for code in codes]
    filled = [pack_bits(code) if code.dtype == xp.bool else code for code in filled]
    head = xp.stack([xp.full((), start, dtype=xp.int64, device=device(v)), xp.sum(xp.astype(kept, xp.int64))])
    return pack(codec, numel, finite, xp.astype(head, xp.int32), levels, xp.astype(counts, xp.uint8), positions, *filled)


def _sparse_decode_sum(codec: str, payloads: list[Array], numel: int, slots: int, nlevels: int, values: str,
                       out: Array | None, scale: float) -> Array:
    out = new_vector(numel, payloads[0]) if out is None else out
    out[:] = 0.0
    finite = True
    for payload in payloads:
        index, value, ok = _sparse_decode(codec, payload, numel, slots, nlevels, values)
        finite &= ok
        with quiet():
            out[index] += value
    return _finish_sum(out, finite, scale)


def _sparse_decode(codec: str, payload: Array, numel: int, slots: int, nlevels: int,
                   values: str) -> tuple[Array, Array, bool]:
    """Indices and values of the kept entries, and whether all was finite when they were encoded."""
    xp = array_namespace(payload)
    nblocks = -(-numel // BLOCK)
    code_bits = TOPK_BITS[values]
    body, finite = unpack(payload, codec, numel, sparse_body_bytes(numel, slots, nlevels, code_bits))
    start, kept = (int(x) % 2**32 for x in body[:8].view(xp.int32))
    levels, rest = xp.reshape(as_floats(body[8:8 + 8 * nlevels]), (nlevels, 2)), body[8 + 8 * nlevels:]
    counts = xp.astype(rest[:nblocks], xp.int64)
    positions = xp.astype(rest[nblocks:nblocks + slots], xp.int64)
    codes = rest[nblocks + slots:]
    _require((start < max(1, units_of(numel)), "the scan starts outside the tensor"),
             (kept <= slots, "more entries are kept than there are slots"),
             (xp.sum(counts) == kept, "counts do not add up"),
             (xp.all(xp.isfinite(levels)), "a level is not finite"),
             (xp.all(positions[kept:] == 0), "an unused slot is not zero"))
    order = xp.roll(xp.arange(nblocks, dtype=xp.int64, device=device(body)), -start * (UNIT // BLOCK))
    ends = xp.cumulative_sum(counts[order])
    slot = xp.arange(kept, dtype=xp.int64, device=device(body))
    block = order[xp.searchsorted(ends, slot, side="right")]
    index = block * BLOCK + positions[:kept]
    _require((xp.all(index < numel), "a position lies outside the tensor"),
             (~xp.any((block[1:] == block[:-1]) & (index[1:] <= index[:-1])), "positions do not ascend"))
    if code_bits > 2:
        _require((xp.all(codes[kept * code_bits // 8:] == 0), "an unused slot is not zero"))
        value = xp.astype(xp.asarray(codes, copy=True).view(getattr(xp, values))[:kept], xp.float32)
        _require((xp.all(xp.isfinite(value)), "a value is not finite"))
        return index, value, finite
    maps = [unpack_bits(codes[first:first + slots // 8], slots) for first in range(0, size(codes), slots // 8)]
    for bits in maps:
        _require((~xp.any(bits[kept:]), "an unused slot is not zero"))
    positive, *upper = (bits[:kept] for bits in maps)
    first, second = (levels[:, i][index // UNIT if nlevels > 1 else xp.zeros_like(index)] for i in range(2))
    if not upper:
        return index, xp.where(positive, first, second), finite
    level = xp.where(upper[0], second, first)
    return index, xp.where(positive, level, -level), finite


def threshold_decode_sum(payloads: list[Array], numel: int, slots: int, *, out: Array | None = None,
                         scale: float = 1.0) -> Array:
    """The sum of what :func:`threshold_encode` made, times ``scale``."""
    return _sparse_decode_sum("threshold", payloads, numel, slots, 1, "sign", out, scale)


def adaptive_decode_sum(payloads: list[Array], numel: int, slots: int, *, out: Array | None = None,
                        scale: float = 1.0) -> Array:
    """The sum of what :func:`adaptive_encode` made, times ``scale``."""
    return _sparse_decode_sum("adaptive", payloads, numel, slots, units_of(numel), "sign", out, scale)


def topk_decode_sum(payloads: list[Array], numel: int, slots: int, values: str, *, out: Array | None = None,
                    scale: float = 1.0) -> Array:
    """The sum of what :func:`topk_encode` made, times ``scale``."""
    return _sparse_decode_sum("topk", payloads, numel, slots, topk_levels(numel, values), values, out, scale)
