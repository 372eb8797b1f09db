"""The codes of :mod:`hvd_quant.ops.generic` in native code, for PyTorch tensors on the CPU.

Same names, arguments and bytes. Tensors of other devices go to the generic functions, which run where the tensor is.
"""

from __future__ import annotations

import importlib.util

import torch

from hvd_quant import wire
from hvd_quant.ops import generic
from hvd_quant.ops.generic import (  # noqa: F401 - a user's own compressor finds the same names on every backend
    BLOCK, UNIT, accumulate, add_up, as_floats, divide, divide_to_half, new_vector, onebit_body_bytes, pack, pack_bits, restore, sample, slots_for,
    sparse_body_bytes, units_of, unpack, unpack_bits, widen, without_flags)

Tensor = torch.Tensor

_spec = importlib.util.find_spec("hvd_quant._torch_ops")
if _spec is None or _spec.origin is None:
    raise ImportError("hvd_quant was built without PyTorch: with torch installed, run `pip install --no-build-isolation "
                      "--force-reinstall hvd_quant`, or `pip install --no-build-isolation .` in its source")
torch.ops.load_library(_spec.origin)
_native = torch.ops.hvd_quant

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _vector(payloads: list[Tensor], numel: int, out: Tensor | None) -> Tensor:
    """Where the sum of ``payloads`` goes: ``out``, or a new vector."""
    if out is None:
        return torch.empty(numel, dtype=torch.float32, device=payloads[0].device)
    if out.shape != (numel,):
        raise ValueError(f"out has shape {tuple(out.shape)}, expected ({numel},)")
    return out


def _raise(error: str) -> None:
    if error:
        raise wire.PayloadError(error)


# ------------------------------------------------------------------------------------------------- none, fp16 and bf16

def cast_encode(grad: Tensor, dtype: str, codec: str) -> Tensor:
    """See :func:`hvd_quant.ops.generic.cast_encode`."""
    if not grad.is_cpu or not grad.numel():
        return generic.cast_encode(grad, dtype, codec)
    nbytes = grad.numel() * _DTYPES[dtype].itemsize
    payload = torch.empty(wire.HEADER_BYTES + wire.padded(nbytes), dtype=torch.uint8)
    payload[:wire.HEADER_BYTES] = torch.from_numpy(wire.pack_header(codec, grad.numel(), wire.padded(nbytes)))
    payload[wire.HEADER_BYTES + nbytes:] = 0
    values = payload[wire.HEADER_BYTES:wire.HEADER_BYTES + nbytes].view(_DTYPES[dtype])
    values.copy_(grad)
    if not _all_finite(values):
        return generic.cast_encode(grad, dtype, codec)
    _native.seal(payload, True)
    return payload


def cast_decode_sum(payloads: list[Tensor], numel: int, dtype: str, codec: str, out: Tensor | None = None) -> Tensor:
    """See :func:`hvd_quant.ops.generic.cast_decode_sum`."""
    if not payloads[0].is_cpu:
        return generic.cast_decode_sum(payloads, numel, dtype, codec, out)
    out = _vector(payloads, numel, out)
    nbytes = numel * _DTYPES[dtype].itemsize
    terms, flags = [], 0
    for payload in payloads:
        flag, error = _native.check(payload, codec, numel, nbytes)
        _raise(error)
        flags |= flag
        body = payload[wire.HEADER_BYTES:wire.HEADER_BYTES + nbytes]
        if body.storage_offset() % 8:
            body = body.clone()  # view() wants aligned bytes
        terms.append(body.view(_DTYPES[dtype]))
        if not _all_finite(terms[-1]):
            raise wire.PayloadError("payload is damaged: a value is not finite")
    if flags & wire.NONFINITE:
        return out.fill_(torch.nan)
    out.zero_()
    for term in terms:
        out += term
    return out


def _all_finite(values: Tensor) -> bool:
    """Whether no value is infinite or NaN, without a vector of bools."""
    return not values.numel() or all(bool(torch.isfinite(bound)) for bound in values.aminmax())


# -------------------------------------------------------------------------------------------------------------- onebit

def onebit_encode(grad: Tensor, residual: Tensor | None, block_size: int, zeros: bool = False) -> Tensor:
    """See :func:`hvd_quant.ops.generic.onebit_encode`."""
    if not grad.is_cpu:
        return generic.onebit_encode(grad, residual, block_size, zeros)
    return _native.onebit_encode(grad, residual, block_size, zeros)


def onebit_decode_sum(payloads: list[Tensor], numel: int, block_size: int, zeros: bool = False,
                      out: Tensor | None = None) -> Tensor:
    """See :func:`hvd_quant.ops.generic.onebit_decode_sum`."""
    if not payloads[0].is_cpu:
        return generic.onebit_decode_sum(payloads, numel, block_size, zeros, out)
    out = _vector(payloads, numel, out)
    _raise(_native.onebit_decode_sum(payloads, block_size, zeros, out))
    return out


# ---------------------------------------------------------------------------------- sparse: threshold, adaptive, topk

def threshold_encode(grad: Tensor, residual: Tensor | None, tau: float, slots: int, step: int) -> Tensor:
    """See :func:`hvd_quant.ops.generic.threshold_encode`."""
    if not grad.is_cpu:
        return generic.threshold_encode(grad, residual, tau, slots, step)
    return _native.threshold_encode(grad, residual, tau, slots, step)


def threshold_decode_sum(payloads: list[Tensor], numel: int, slots: int, out: Tensor | None = None) -> Tensor:
    """See :func:`hvd_quant.ops.generic.threshold_decode_sum`."""
    if not payloads[0].is_cpu:
        return generic.threshold_decode_sum(payloads, numel, slots, out)
    out = _vector(payloads, numel, out)
    _raise(_native.threshold_decode_sum(payloads, slots, out))
    return out


def adaptive_measure(grad: Tensor, residual: Tensor | None, ratio: float, step: int) -> Tensor:
    """See :func:`hvd_quant.ops.generic.adaptive_measure`."""
    if not grad.is_cpu:
        return generic.adaptive_measure(grad, residual, ratio, step)
    return _native.adaptive_measure(grad, residual, ratio, step)


def adaptive_encode(grad: Tensor, residual: Tensor | None, thresholds: Tensor, slots: int, step: int) -> Tensor:
    """See :func:`hvd_quant.ops.generic.adaptive_encode`."""
    if not grad.is_cpu:
        return generic.adaptive_encode(grad, residual, thresholds, slots, step)
    return _native.adaptive_encode(grad, residual, thresholds, slots, step)


def adaptive_decode_sum(payloads: list[Tensor], numel: int, slots: int, out: Tensor | None = None) -> Tensor:
    """See :func:`hvd_quant.ops.generic.adaptive_decode_sum`."""
    if not payloads[0].is_cpu:
        return generic.adaptive_decode_sum(payloads, numel, slots, out)
    out = _vector(payloads, numel, out)
    _raise(_native.adaptive_decode_sum(payloads, slots, out))
    return out


def topk_measure(grad: Tensor, residual: Tensor | None, ratio: float, step: int) -> Tensor:
    """See :func:`hvd_quant.ops.generic.topk_measure`."""
    if not grad.is_cpu:
        return generic.topk_measure(grad, residual, ratio, step)
    return _native.topk_measure(grad, residual, ratio, step)


def topk_encode(grad: Tensor, residual: Tensor | None, thresholds: Tensor, slots: int, values: str, step: int) -> Tensor:
    """See :func:`hvd_quant.ops.generic.topk_encode`."""
    if not grad.is_cpu:
        return generic.topk_encode(grad, residual, thresholds, slots, values, step)
    return _native.topk_encode(grad, residual, thresholds, slots, values, step)


def topk_decode_sum(payloads: list[Tensor], numel: int, slots: int, values: str, out: Tensor | None = None) -> Tensor:
    """See :func:`hvd_quant.ops.generic.topk_decode_sum`."""
    if not payloads[0].is_cpu:
        return generic.topk_decode_sum(payloads, numel, slots, values, out)
    out = _vector(payloads, numel, out)
    _raise(_native.topk_decode_sum(payloads, slots, values, out))
    return out
