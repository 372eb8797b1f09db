"""Natural compression: powers of two."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_quant import wire
from hvd_quant.compressors.base import TensorInfo
from hvd_quant.compressors.stochastic import Stochastic
from hvd_quant.ops import layout
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Natural(Stochastic):
    """A sign and an exponent, 8 bits an entry; 1/4 of fp32.

    An entry is rounded at random to one of the two powers of two around it, to the larger with the chance that makes the mean
    right, so E\\|C(v)\\|^2 <= 9/8 \\|v\\|^2. No entry depends on another, and there is no scale to be found first.

    Seven bits are for 0 and the powers from 2^-62 to 2^64, about 2e-19 to 2e19. Below that an entry becomes 0 or 2^-62, with the
    right mean still; one above it counts as not finite, as one above fp16's range does there: such a gradient is lost anyway.

    Source: Horvath, Ho, Horvath, Sahu, Canini, Richtarik 2019.
    """

    name = "natural"
    native = True

    def payload_bytes(self, info: TensorInfo) -> int:
        return wire.HEADER_BYTES + wire.padded(layout.fields_body_bytes(info.numel, 8, 0))

    def encode(self, ops, grad, state, params, info):
        return ops.natural_encode(grad, state.get("residual"), *self.draw(info))

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.natural_decode_sum(payloads, info.numel, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.natural_decode_sum(payloads, info.numel, out=out, scale=1 / info.world)
