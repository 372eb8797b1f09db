"""The codes of :mod:`hvd_quant.ops.generic` in native code, for TensorFlow tensors on the CPU.

Same names, arguments and bytes, eagerly and in a ``tf.function``. What differs from the other backends:

- ``residual`` is a ``tf.Variable`` on the CPU, updated in place, or None; ``step`` and ``scale`` may be scalar tensors.
- ``payloads`` is a list of tensors, or what an allgather returned, as :class:`Payloads`.
- ``out`` is only memory that the result may take; the result is what is returned.
- A payload that is damaged, foreign, or says that its worker failed raises ``tf.errors.DataLossError`` with the
  sentence that :class:`hvd_quant.wire.PayloadError` has elsewhere.
- A user's own code in array operations runs over :mod:`hvd_quant.ops.generic`, so what that would use is not here.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_quant.ops.layout import BLOCK, UNIT, onebit_body_bytes, slots_for, sparse_body_bytes, units_of  # noqa: F401

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
    """The payloads of all workers, one after another in rank order, as an allgather returns them.

    Attributes:
        data: uint8, 1-D.
        world: number of workers, an int or a scalar int32 tensor.
        name: the parameter's, with which errors begin.
    """

    data: tf.Tensor
    world: Any
    name: str = ""

    @classmethod
    def of(cls, payloads: Payloads | list[tf.Tensor]) -> Payloads:
        return payloads if isinstance(payloads, cls) else cls(tf.concat(payloads, 0), len(payloads))


# -------------------------------------------------------------------------------------------------------------- encode

def _of_gradient(op: str, grad: tf.Tensor, residual: tf.Variable | None, **arguments: Any) -> tf.Tensor:
    if residual is None:
        return getattr(_native, op)(grad=grad, **arguments)
    return getattr(_native, f"{op}_with_residual")(grad=grad, residual=residual.handle, **arguments)


def onebit_encode(grad: tf.Tensor, residual: tf.Variable | None, block_size: int, zeros: bool = False) -> tf.Tensor:
    return _of_gradient("hvd_quant_onebit_encode", grad, residual, block_size=block_size, zeros=zeros)


def threshold_encode(grad: tf.Tensor, residual: tf.Variable | None, tau: float, slots: int, step: Any) -> tf.Tensor:
    return _of_gradient("hvd_quant_threshold_encode", grad, residual, tau=tau, slots=slots, step=step)


def adaptive_measure(grad: tf.Tensor, residual: tf.Variable | None, ratio: float, step: Any) -> tf.Tensor:
    return _of_gradient("hvd_quant_adaptive_measure", grad, residual, ratio=ratio, step=step)


def adaptive_encode(grad: tf.Tensor, residual: tf.Variable | None, thresholds: tf.Tensor, slots: int,
                    step: Any) -> tf.Tensor:
    return _of_gradient("hvd_quant_adaptive_encode", grad, residual, thresholds=thresholds, slots=slots, step=step)


def topk_measure(grad: tf.Tensor, residual: tf.Variable | None, ratio: float, step: Any) -> tf.Tensor:
    return _of_gradient("hvd_quant_topk_measure", grad, residual, ratio=ratio, step=step)


def topk_encode(grad: tf.Tensor, residual: tf.Variable | None, thresholds: tf.Tensor, slots: int, values: str,
                step: Any) -> tf.Tensor:
    return _of_gradient("hvd_quant_topk_encode", grad, residual, thresholds=thresholds, slots=slots, values=values,
                        step=step)


def cast_encode(grad: tf.Tensor, dtype: str, codec: str) -> tf.Tensor:
    return _native.hvd_quant_cast_encode(grad=grad, dtype=dtype, codec=codec)


# -------------------------------------------------------------------------------------------------------------- decode

def _sum(op: str, payloads: Payloads | list[tf.Tensor], numel: int, out: tf.Tensor | None, scale: Any,
         **settings: Any) -> tf.Tensor:
    payloads = Payloads.of(payloads)
    return getattr(_native, op)(gathered=payloads.data, world=payloads.world, scale=tf.cast(scale, tf.float32),
                                out=[] if out is None else [out], numel=numel, name_of=payloads.name, **settings)


def onebit_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, block_size: int, zeros: bool = False, *,
                      out: tf.Tensor | None = None, scale: Any = 1.0) -> tf.Tensor:
    return _sum("hvd_quant_onebit_decode_sum", payloads, numel, out, scale, block_size=block_size, zeros=zeros)


def threshold_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, slots: int, *, out: tf.Tensor | None = None,
                         scale: Any = 1.0) -> tf.Tensor:
    return _sum("hvd_quant_threshold_decode_sum", payloads, numel, out, scale, slots=slots)


def adaptive_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, slots: int, *, out: tf.Tensor | None = None,
                        scale: Any = 1.0) -> tf.Tensor:
    return _sum("hvd_quant_adaptive_decode_sum", payloads, numel, out, scale, slots=slots)


def topk_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, slots: int, values: str, *,
                    out: tf.Tensor | None = None, scale: Any = 1.0) -> tf.Tensor:
    return _sum("hvd_quant_topk_decode_sum", payloads, numel, out, scale, slots=slots, values=values)


def cast_decode_sum(payloads: Payloads | list[tf.Tensor], numel: int, dtype: str, codec: str, *,
                    out: tf.Tensor | None = None, scale: Any = 1.0) -> tf.Tensor:
    return _sum("hvd_quant_cast_decode_sum", payloads, numel, out, scale, dtype=dtype, codec=codec)


# --------------------------------------------------------------------------------------------- around encode and decode

def flags(payloads: Payloads | list[tf.Tensor], codec: str, numel: int) -> tf.Tensor:
    """The flags of all payloads (``wire.NONFINITE``, ``wire.FAILED``) in one int32, shape []; ``DAMAGED`` is among them where
    one has a wrong header or checksum, of which a decoder will tell more."""
    payloads = Payloads.of(payloads)
    return _native.hvd_quant_flags(gathered=payloads.data, world=payloads.world, codec=codec, numel=numel)


def without_flags(payload: tf.Tensor) -> tf.Tensor:
    """A copy of a payload that decodes as if everything had been finite (it leaves non-finite gradients out)."""
    return _native.hvd_quant_without_flags(payload)


def restore(residual: tf.Variable, decoded: tf.Tensor, grad: tf.Tensor) -> tf.Operation | None:
    """Take an encode back, as ``generic.restore`` does; in a graph, the operation that does it."""
    return _native.hvd_quant_restore(grad=grad, decoded=decoded, residual=residual.handle)


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
