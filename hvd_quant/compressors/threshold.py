"""Threshold quantisation with a fixed threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_quant import wire
from hvd_quant.compressors.base import Compressor, TensorInfo, is_number
from hvd_quant.ops import layout
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Threshold(Compressor):
    """Entries beyond a fixed threshold, sent as plus or minus that threshold.

    v = g + e; v >= tau sends '+' and leaves e = v - tau, v <= -tau sends '-' and leaves e = v + tau, otherwise e = v.
    Decodes to tau with its sign.

    As published the message has no bound; here it has ``capacity`` slots, always the same number, and
    what finds none stays in the residual. ``tau`` has to be tuned to the model: too small a value fills the capacity
    with small entries and moves a large one by only tau a step.

    Source: Strom 2015; Dryden, Moon, Jacobs, Van Essen 2016.

    Arguments:
        tau: the threshold, in units of the gradient.
        capacity: slots, as a fraction of the tensor's entries.
    """

    name = "threshold"
    native = True
    sparse = True
    follow_scale = (*Compressor.follow_scale, "tau")
    tau: float
    capacity: float = 1 / 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("tau", "a finite number above 0 that fp32 can hold",
                     lambda x: is_number(x) and 1e-38 < x < 3e38 and math.isfinite(x))
        self.require("capacity", "a number above 0 and up to 1", lambda x: is_number(x) and 0 < x <= 1)

    def _slots(self, info: TensorInfo) -> int:
        return layout.slots_for(self.capacity, info.numel)

    def payload_bytes(self, info: TensorInfo) -> int:
        return wire.HEADER_BYTES + wire.padded(layout.sparse_body_bytes(info.numel, self._slots(info), 1, 1))

    def encode(self, ops, grad, state, params, info):
        return ops.threshold_encode(grad, state.get("residual"), self.tau, self._slots(info), info.step)

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.threshold_decode_sum(payloads, info.numel, self._slots(info), out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.threshold_decode_sum(payloads, info.numel, self._slots(info), out=out, scale=1 / info.world)
