"""Gradient dropping: the largest entries by magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_quant import wire
from hvd_quant.compressors.base import TensorInfo, one_of
from hvd_quant.compressors.schedule import Scheduled
from hvd_quant.ops import layout
from hvd_quant.registry import register

_VALUES = {"float32": 32, "float16": 16}


@register
@dataclass(frozen=True, kw_only=True)
class TopK(Scheduled):
    """The largest entries by magnitude, with their values; about 1/74 of fp32 at 1 %, 1/118 with fp16 values.

    v = g + e; t is the (1 - ratio) quantile of a sample of \\|v\\|; entries with \\|v\\| > t are sent and leave e = 0 (with
    fp16 values, the rounding), the others leave e = v.

    The message always has the same size; if the sample was off and more would be kept, the rest stays in the residual.

    Source: Aji, Heafield 2017 ("gradient dropping"; their drop ratio is 1 - ratio).

    Arguments:
        ratio: the fraction of entries that is kept.
        schedule, schedule_steps: how that is reached; see :class:`hvd_quant.compressors.schedule.Scheduled`.
        values: "float32" or "float16".
    """

    name = "topk"
    native = True
    sparse = True
    ratio: float = 0.01
    values: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("values", one_of(_VALUES), lambda x: x in _VALUES)

    def _slots(self, info: TensorInfo) -> int:
        return layout.slots_for(self.ratio, info.numel)

    def payload_bytes(self, info: TensorInfo) -> int:
        body = layout.sparse_body_bytes(info.numel, self._slots(info), 0, _VALUES[self.values])
        return wire.HEADER_BYTES + wire.padded(body)

    def measure(self, ops, grad, state, info):
        return ops.topk_measure(grad, state.get("residual"), self.ratio, info.step)

    def encode(self, ops, grad, state, params, info):
        return ops.topk_encode(grad, state.get("residual"), params, self._slots(info), self.values, info.step)

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.topk_decode_sum(payloads, info.numel, self._slots(info), self.values, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.topk_decode_sum(payloads, info.numel, self._slots(info), self.values, out=out, scale=1 / info.world)
