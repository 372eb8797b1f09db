"""Adaptive quantisation: thresholds chosen so that a fixed proportion is sent."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_quant import wire
from hvd_quant.compressors.base import TensorInfo
from hvd_quant.compressors.schedule import Scheduled
from hvd_quant.ops import layout
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Adaptive(Scheduled):
    """A fixed proportion of the entries, chosen by sign, sent as signs and means; about 1/180 of fp32 at the default ratio.

    From a sample of v = g + e, tau+ is the threshold that keeps ``ratio`` of the positive entries and tau- the one that
    keeps ``ratio`` of the negative ones; v >= tau+ and v <= tau- are sent, and decode to the mean of what was kept of
    their sign in their stretch of 16,384 entries; the others decode to 0. e = v - decoded.

    The message always has the same size; if the sample was off and more would be kept, the rest stays in the residual.

    Source: Dryden, Moon, Jacobs, Van Essen 2016. Different from there: means belong to a stretch, not to a tensor; zeros
    take no part in the sample; the message is bounded; unsent entries decode to 0, where receivers kept their own local
    gradient and so drifted apart.

    Arguments:
        ratio: the proportion that is kept; the paper's default drops 98.4375 %.
        schedule, schedule_steps: how that is reached; see :class:`hvd_quant.compressors.schedule.Scheduled`.
    """

    name = "adaptive"
    native = True
    sparse = True
    ratio: float = 1 / 64

    @property
    def range_multiple(self) -> int:
        return layout.UNIT

    def _slots(self, info: TensorInfo) -> int:
        return layout.slots_for(self.ratio, info.numel)

    def payload_bytes(self, info: TensorInfo) -> int:
        levels = layout.units_of(info.numel)
        return wire.HEADER_BYTES + wire.padded(layout.sparse_body_bytes(info.numel, self._slots(info), levels, 1))

    def measure(self, ops, grad, state, info):
        return ops.adaptive_measure(grad, state.get("residual"), self.ratio, info.step)

    def encode(self, ops, grad, state, params, info):
        return ops.adaptive_encode(grad, state.get("residual"), params, self._slots(info), info.step)

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.adaptive_decode_sum(payloads, info.numel, self._slots(info), out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.adaptive_decode_sum(payloads, info.numel, self._slots(info), out=out, scale=1 / info.world)
