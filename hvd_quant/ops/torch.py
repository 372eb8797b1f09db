"""The codes of :mod:`hvd_quant.ops.generic` in native code, for PyTorch tensors on the CPU.

Same names, arguments and bytes. Tensors of other devices go to the generic functions, which run where the tensor is.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvd_quant import wire
from hvd_quant.ops import generic
from hvd_quant.ops.generic import (  # noqa: F401 - a user's own compressor finds the same names on every backend
    BLOCK, UNIT, accumulate, add_up, as_floats, divide, divide_to_half, new_vector, onebit_body_bytes, pack, pack_bits,
    restore, sample, slots_for, sparse_body_bytes, units_of, unpack, unpack_bits, widen, without_flags)

Tensor = torch.Tensor

_spec = importlib.util.find_spec("hvd_quant._torch_ops")
_BUILD = "with torch installed, run `pip install --no-build-isolation --force-reinstall --no-deps .` in hvd_quant's source"
if _spec is None or _spec.origin is None:
    raise ImportError(f"hvd_quant was built without its kernels for PyTorch: {_BUILD}")
try:
    torch.ops.load_library(_spec.origin)
except OSError as error:
    raise ImportError(f"hvd_quant's kernels were built for another PyTorch than {torch.__version__}: {_BUILD} ({error})"
                      ) from error
_native = torch.ops.hvd_quant

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _for_cpu(native: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``native`` for tensors on the CPU, ``reference`` for others; both take a tensor, or a list of them, first."""

    @functools.wraps(reference)
    def function(first: Any, *args: Any, **kwargs: Any) -> Tensor:
        on_cpu = (first[0] if isinstance(first, list) else first).is_cpu
        return (native if on_cpu else reference)(first, *args, **kwargs)

    return function


def _vector(payloads: list[Tensor], numel: int, out: Tensor | None) -> Tensor:
    """Where the sum of ``payloads`` goes: ``out``, or a new vector."""
    if out is None:
        return generic.new_vector(numel, payloads[0])
    if out.shape != (numel,):
        raise ValueError(f"out has shape {tuple(out.shape)}, expected ({numel},)")
    return out


def _raise(error: str) -> None:
    if error:
        raise wire.PayloadError(error)


def _decoder(op: Callable[..., str], reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function for ``op``, whose arguments are those of ``reference`` without numel, with scale and out last."""

    def native(payloads: list[Tensor], numel: int, *knobs: Any, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        out = _vector(payloads, numel, out)
        _raise(op(payloads, *knobs, scale=scale, out=out))
        return out

    return _for_cpu(native, reference)


onebit_encode = _for_cpu(_native.onebit_encode, generic.onebit_encode)
onebit_decode_sum = _decoder(_native.onebit_decode_sum, generic.onebit_decode_sum)
threshold_encode = _for_cpu(_native.threshold_encode, generic.threshold_encode)
threshold_decode_sum = _decoder(_native.threshold_decode_sum, generic.threshold_decode_sum)
adaptive_measure = _for_cpu(_native.adaptive_measure, generic.adaptive_measure)
adaptive_encode = _for_cpu(_native.adaptive_encode, generic.adaptive_encode)
adaptive_decode_sum = _decoder(_native.adaptive_decode_sum, generic.adaptive_decode_sum)
topk_measure = _for_cpu(_native.topk_measure, generic.topk_measure)
topk_encode = _for_cpu(_native.topk_encode, generic.topk_encode)
topk_decode_sum = _decoder(_native.topk_decode_sum, generic.topk_decode_sum)


# ------------------------------------------------------------------------------------------------- none, fp16 and bf16

def _cast_encode(grad: Tensor, dtype: str, codec: str) -> Tensor:
    if not grad.numel():
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


def _cast_decode_sum(payloads: list[Tensor], numel: int, dtype: str, codec: str, *, out: Tensor | None = None,
                     scale: float = 1.0) -> Tensor:
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
    return out.mul_(np.float32(scale).item()) if scale != 1 else out


def _all_finite(values: Tensor) -> bool:
    """Whether no value is infinite or NaN, without a vector of bools."""
    return not values.numel() or all(bool(torch.isfinite(bound)) for bound in values.aminmax())


cast_encode = _for_cpu(_cast_encode, generic.cast_encode)
cast_decode_sum = _for_cpu(_cast_decode_sum, generic.cast_decode_sum)
