"""The codes of :mod:`hvd_quant.ops.generic` in native code, for PyTorch tensors on the CPU.

Same names, arguments and bytes. Tensors of other devices go to the generic functions, which run where the tensor is.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from hvd_quant import wire
from hvd_quant.ops import generic
from hvd_quant.ops.generic import (  # noqa: F401 - a user's own compressor finds the same names on every backend
    BLOCK, GROUP, UNIT, accumulate, add_up, as_floats, clip_norm, copy, divide, divide_to_half, dynamic_code, exact_factors,
    fields_body_bytes, model_threshold, moving_average, new_vector, noise, normal, onebit_body_bytes, orthonormal, pack,
    pack_bits, powersgd_decode, powersgd_left, powersgd_matrix, powersgd_right, powersgd_start, randomk_decode,
    randomk_encode, restore, sample, sample_size, slots_for, sparse_body_bytes, strata, units_of, unpack, unpack_bits,
    widen, without_flags, zero_where)

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


def simd_level() -> str:
    """The instructions that the kernels choose on this machine."""
    return _native.simd_level()


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


def _decoder(op: Callable[..., str], reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function for ``op``, whose arguments are those of ``reference`` without numel, with scale and out last."""

    def native(payloads: list[Tensor], numel: int, *knobs: Any, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        out = _vector(payloads, numel, out)
        error = op(payloads, *knobs, scale=scale, out=out)
        if error:
            raise wire.PayloadError(error)
        return out

    return _for_cpu(native, reference)


onebit_encode = _for_cpu(_native.onebit_encode, generic.onebit_encode)
onebit_decode_sum = _decoder(_native.onebit_decode_sum, generic.onebit_decode_sum)
signsgd_encode = _for_cpu(_native.signsgd_encode, generic.signsgd_encode)
signsgd_decode_sum = _decoder(_native.signsgd_decode_sum, generic.signsgd_decode_sum)
qsgd_encode = _for_cpu(_native.qsgd_encode, generic.qsgd_encode)
qsgd_decode_sum = _decoder(_native.qsgd_decode_sum, generic.qsgd_decode_sum)
terngrad_measure = _for_cpu(_native.terngrad_measure, generic.terngrad_measure)
terngrad_encode = _for_cpu(_native.terngrad_encode, generic.terngrad_encode)
terngrad_decode_sum = _decoder(_native.terngrad_decode_sum, generic.terngrad_decode_sum)
natural_encode = _for_cpu(_native.natural_encode, generic.natural_encode)
natural_decode_sum = _decoder(_native.natural_decode_sum, generic.natural_decode_sum)
blockwise8_encode = _for_cpu(_native.blockwise8_encode, generic.blockwise8_encode)
blockwise8_decode_sum = _decoder(_native.blockwise8_decode_sum, generic.blockwise8_decode_sum)
threshold_encode = _for_cpu(_native.threshold_encode, generic.threshold_encode)
threshold_decode_sum = _decoder(_native.threshold_decode_sum, generic.threshold_decode_sum)
adaptive_measure = _for_cpu(_native.adaptive_measure, generic.adaptive_measure)
adaptive_encode = _for_cpu(_native.adaptive_encode, generic.adaptive_encode)
adaptive_decode_sum = _decoder(_native.adaptive_decode_sum, generic.adaptive_decode_sum)
topk_measure = _for_cpu(_native.topk_measure, generic.topk_measure)
model_measure = _for_cpu(_native.model_measure, generic.model_measure)
topk_encode = _for_cpu(_native.topk_encode, generic.topk_encode)
topk_decode_sum = _decoder(_native.topk_decode_sum, generic.topk_decode_sum)
cast_encode = _for_cpu(_native.cast_encode, generic.cast_encode)
cast_decode_sum = _decoder(_native.cast_decode_sum, generic.cast_decode_sum)
