"""One-bit quantisation with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_quant.compressors.signs import Signs
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class OneBit(Signs):
    """One bit an entry and two levels a block; about 1/32 of fp32.

    v = g + e; an entry with v >= 0 decodes to the mean of the block's v >= 0, another to the mean of its v < 0;
    e = v - decoded.

    One bit can't carry a zero inside a mixed block, so entries that never had a gradient drift a little; ``zeros=True``
    sends a second bit and keeps them still.

    Source: Seide, Fu, Droppo, Li, Yu 2014 (levels a matrix column), as used by Dryden, Moon, Jacobs, Van Essen 2016.
    """

    name = "onebit"
    native = True
    levels = 2

    def encode(self, ops, grad, state, params, info):
        return ops.onebit_encode(grad, state.get("residual"), self.block_size, self.zeros)

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.onebit_decode_sum(payloads, info.numel, self.block_size, self.zeros, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.onebit_decode_sum(payloads, info.numel, self.block_size, self.zeros, out=out, scale=1 / info.world)
