"""Gradient dropping: the largest entries by magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_quant import wire
from hvd_quant.compressors.base import TensorInfo, one_of
from hvd_quant.compressors.schedule import Scheduled
from hvd_quant.ops import layout
from hvd_quant.registry import register

_VALUES = ("float32", "float16", "sign", "2bit")


@register
@dataclass(frozen=True, kw_only=True)
class TopK(Scheduled):
    """The largest entries by magnitude, with their values; about 1/74 of fp32 at 1 %, 1/118 with fp16 values, 1/250 with signs.

    v = g + e; t is the (1 - ratio) quantile of a sample of \\|v\\|; entries with \\|v\\| > t are sent and leave e = 0, or what their
    rounding leaves, the others leave e = v.

    The message always has the same size; if the sample was off and more would be kept, the rest stays in the residual.

    With ``scope="model"`` t is one for all tensors of this compressor, whatever their share of the largest entries then is. It is
    that of the step before, on this worker, so that gradients still travel while backward makes others; in the first step, and
    where an owner of a range encodes the mean again, it is a tensor's own. Messages have room for twice the ratio, and so are
    about twice as long; what a tensor has beyond that stays in its residual.

    Source: Aji, Heafield 2017 ("gradient dropping"; their drop ratio is 1 - ratio).

    Arguments:
        ratio: the fraction of entries that is kept.
        schedule, schedule_steps: how that is reached; see :class:`hvd_quant.compressors.schedule.Scheduled`.
        values: "float32", "float16", "sign": the sign of each kept entry, and one mean \\|v\\| of kept entries; "2bit": the sign,
            and one of two: kept entries of a stretch of 16,384 are parted at their mean \\|v\\|, and each decodes to the mean of
            its part.
        scope: whose quantile t is: the "tensor"'s or the "model"'s.
        mean: with "sign", whose it is: a "unit", which is a stretch of 16,384 entries, or the "tensor" (or a range of it that is
            encoded by itself).
    """

    name = "topk"
    native = True
    sparse = True
    ratio: float = 0.01
    values: str = "float32"
    scope: str = "tensor"
    mean: str = "unit"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("values", one_of(_VALUES), lambda x: x in _VALUES)
        self.require("scope", "'tensor' or 'model'", lambda x: x in ("tensor", "model"))
        means = ("unit", "tensor") if self.values == "sign" else ("unit",)
        self.require("mean", one_of(means) + ("" if self.values == "sign" else f" with values={self.values!r}"),
                     lambda x: x in means)

    @property
    def range_multiple(self) -> int:
        return layout.UNIT if self._values in ("sign", "2bit") else super().range_multiple

    @property
    def _values(self) -> str:
        """As ``ops`` calls them."""
        return "tensor_sign" if self.mean == "tensor" else self.values

    def _slots(self, info: TensorInfo) -> int:
        return layout.slots_for(min(1.0, 2 * self.ratio) if self.across_tensors else self.ratio, info.numel)

    def payload_bytes(self, info: TensorInfo) -> int:
        return wire.HEADER_BYTES + wire.padded(layout.topk_body_bytes(info.numel, self._slots(info), self._values))

    @property
    def across_tensors(self) -> bool:
        return self.scope == "model"

    def state_shapes(self, info: TensorInfo, role: str = "worker") -> dict[str, tuple[int, ...]]:
        shapes = super().state_shapes(info, role)
        if self.across_tensors and role == "worker":
            # A step that turns out void leaves them as they are: v was finite wherever it was sampled, and the next step samples
            # again.
            shapes |= {"magnitudes": (layout.sample_size(info.numel),), "threshold": (2,)}
        return shapes

    def between_steps(self, ops, slots):
        if self.across_tensors:
            return ops.model_threshold([(s["magnitudes"], s["threshold"], info.numel) for info, s in slots], self.ratio)
        return None

    def measure(self, ops, grad, state, info):
        if "threshold" in state:
            return ops.model_measure(grad, state.get("residual"), self.ratio, info.step, state["magnitudes"], state["threshold"])
        return ops.topk_measure(grad, state.get("residual"), self.ratio, info.step)

    def encode(self, ops, grad, state, params, info):
        return ops.topk_encode(grad, state.get("residual"), params, self._slots(info), self._values, info.step)

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.topk_decode_sum(payloads, info.numel, self._slots(info), self._values, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.topk_decode_sum(payloads, info.numel, self._slots(info), self._values, out=out, scale=1 / info.world)
