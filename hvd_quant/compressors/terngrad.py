"""TernGrad: minus one, zero or one times a tensor's largest entry, at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_quant import wire
from hvd_quant.compressors.base import TensorInfo, is_number
from hvd_quant.compressors.stochastic import Stochastic
from hvd_quant.ops import layout
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class TernGrad(Stochastic):
    """Two bits an entry and one magnitude a tensor; about 1/16 of fp32.

    s is the largest magnitude, and an entry is sent as s * sign(v) with the chance \\|v\\| / s, else as 0. The mean is the gradient,
    the variance of an entry s\\|v\\| - v^2, so one large entry makes noise of all others. With ``clip``, v is clipped to so many
    standard deviations of the tensor first, which biases the largest entries and takes noise from the rest.

    The authors clip at 2.5 and leave the last layer uncompressed: ``{"last.*": "none", "*": "terngrad:clip=2.5"}``.

    Source: Wen, Xu, Yan, Wu, Wang, Chen, Li 2017. Different from there: nothing is clipped unless asked for, and the clipping never
    goes below the tensor's mean, as it would where all entries are nearly equal, nothing of which would be sent.

    Arguments:
        clip: in standard deviations about the mean; 0: none, and the mean is the gradient itself.
    """

    name = "terngrad"
    native = True
    clip: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("clip", "a number of standard deviations, 0 for none", lambda x: is_number(x) and 0 <= x < math.inf)

    def payload_bytes(self, info: TensorInfo) -> int:
        return wire.HEADER_BYTES + wire.padded(layout.fields_body_bytes(info.numel, 2, 1))

    def measure(self, ops, grad, state, info):
        return ops.terngrad_measure(grad, state.get("residual"), self.clip)

    def encode(self, ops, grad, state, params, info):
        return ops.terngrad_encode(grad, state.get("residual"), params, *self.draw(info))

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.terngrad_decode_sum(payloads, info.numel, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.terngrad_decode_sum(payloads, info.numel, out=out, scale=1 / info.world)
