"""Eight bits an entry, relative to the largest of its block."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_quant import wire
from hvd_quant.compressors.base import Compressor, TensorInfo, one_of
from hvd_quant.ops import layout
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Blockwise8(Compressor):
    """One of 256 parts of the block's largest magnitude; about 1/4 of fp32.

    v = g + e; v / largest is rounded to the nearest value of the code; e = v - decoded. The "linear" code has the 255 steps
    from -127 / 127 to 127 / 127. The "dynamic" one, :func:`hvd_quant.ops.layout.dynamic_code`, goes down to 5.5e-7 with fewer
    and fewer digits, so that small entries beside a large one aren't lost; since it has no -1, a largest entry that is negative
    is sent as 0.993 of it.

    Source: Dettmers, Lewis, Shleifer, Zettlemoyer 2021, where it is for the optimizer's state.

    Arguments:
        code: "dynamic" or "linear".
        block_size: entries that share a scale; a multiple of 64.
    """

    name = "blockwise8"
    native = True
    code: str = "dynamic"
    block_size: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("code", one_of(["dynamic", "linear"]), lambda x: x in ("dynamic", "linear"))
        self.require("block_size", layout.BLOCK_SIZES, layout.is_block_size)

    @property
    def range_multiple(self) -> int:
        return self.block_size

    def payload_bytes(self, info: TensorInfo) -> int:
        body = layout.fields_body_bytes(info.numel, 8, -(-info.numel // self.block_size))
        return wire.HEADER_BYTES + wire.padded(body)

    def encode(self, ops, grad, state, params, info):
        return ops.blockwise8_encode(grad, state.get("residual"), self.code, self.block_size)

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.blockwise8_decode_sum(payloads, info.numel, self.code, self.block_size, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.blockwise8_decode_sum(payloads, info.numel, self.code, self.block_size, out=out, scale=1 / info.world)
