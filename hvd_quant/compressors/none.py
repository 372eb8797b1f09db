"""No compression: Horovod's own allreduce."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from hvd_quant import wire
from hvd_quant.compressors.base import Compressor, TensorInfo
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class NoCompression(Compressor):
    """The gradient as it is, 4 bytes an entry. Linear, stateless."""

    name = "none"
    native = True
    linear = True
    faithful = True
    memory: str = "none"
    min_numel: int = 0

    def payload_bytes(self, info: TensorInfo) -> int:
        return wire.HEADER_BYTES + wire.padded(4 * info.numel)

    def encode(self, ops, grad, state, params, info):
        return ops.cast_encode(grad, "float32", self.name)

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.cast_decode_sum(payloads, info.numel, "float32", self.name, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.cast_decode_sum(payloads, info.numel, "float32", self.name, out=out, scale=1 / info.world)

    def rounds(self, ops, grad, state, info, out) -> Generator[Any, Any, tuple[Any, bool]]:
        total = yield grad
        return ops.divide(total, info.world, out), True

    def compress(self, tensor):
        self.require_no_place()
        return tensor, None

    def decompress(self, tensor, ctx):
        return tensor
