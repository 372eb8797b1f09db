"""Half precision: fp16 and bf16."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from hvd_quant import wire
from hvd_quant.compressors.base import Compressor, TensorInfo, stock_hooks
from hvd_quant.registry import register


@dataclass(frozen=True, kw_only=True)
class _Half(Compressor):
    dtype: ClassVar[str]
    faithful = True
    memory: str = "none"
    min_numel: int = 0

    def payload_bytes(self, info: TensorInfo) -> int:
        return wire.HEADER_BYTES + wire.padded(2 * info.numel)

    def encode(self, ops, grad, state, params, info):
        return ops.cast_encode(grad, self.dtype, self.name)

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.cast_decode_sum(payloads, info.numel, self.dtype, self.name, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.cast_decode_sum(payloads, info.numel, self.dtype, self.name, out=out, scale=1 / info.world)


@register
@dataclass(frozen=True, kw_only=True)
class FP16(_Half):
    """IEEE half precision, 2 bytes an entry, over Horovod's allreduce.

    Each worker sends g / n, so the sum can't overflow where the mean doesn't (Horovod's own fp16 sums g: two workers with
    40000 give infinity). A mean beyond 65504 becomes infinite on all workers. A worker's gradient below n * 3e-8 flushes to
    0 (with Horovod's, below 3e-8); where that matters, scale the loss or use bf16.
    """

    name = "fp16"
    native = True
    dtype = "float16"
    linear = True

    def rounds(self, ops, grad, state, info, out) -> Generator[Any, Any, tuple[Any, bool]]:
        total = yield ops.divide_to_half(grad, info.world)
        return ops.widen(total, out), True

    def compress(self, tensor):
        self.require_no_place()
        return stock_hooks(tensor).compress_half(tensor)

    def decompress(self, tensor, ctx):
        return stock_hooks(tensor).decompress_half(tensor, ctx)


@register
@dataclass(frozen=True, kw_only=True)
class BF16(_Half):
    """bfloat16, 2 bytes an entry: fp32's range with 8 significant bits.

    Horovod can't reduce bf16, so the bytes are allgathered and summed in fp32: each value is rounded once.
    """

    name = "bf16"
    native = True
    dtype = "bfloat16"
