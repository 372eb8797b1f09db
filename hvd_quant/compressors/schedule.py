"""Ratio warm-ups: compressors that keep a ratio of the entries and may start with a higher one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hvd_quant.compressors.base import Compressor, is_int, is_number, one_of

_DGC = (0.25, 0.0625, 0.015625, 0.004)
_SCHEDULE_STEPS = 1000
_DENSE = 0.1
"""With schedule="merging", gradients are dense while more than this is kept."""


@dataclass(frozen=True, kw_only=True)
class Scheduled(Compressor):
    """What compressors share that keep a ratio of the entries.

    ``schedule`` says how that ratio is reached, after the ``warmup``, if any:

    - "none": at once.
    - "dgc" (Lin, Han, Mao, Wang, Dally 2018): 25, 6.25, 1.5625 and 0.4 % are kept, each for ``schedule_steps`` steps; what is not
      more than ``ratio`` is left out. The paper gives an epoch to each, so give the steps of an epoch, ``len(loader)``.
    - "merging" (Aji, Heafield, Bogoychev 2019): in step t, from 0, 1 - (1 - ratio)^(schedule_steps / (t + 1)) are kept, and all
      while that is more than 10 %. Different from there: it is rounded up to a multiple of ``ratio`` by a power of the square
      root of 2, so that the size of messages changes a few times and not in each step.

    Arguments:
        ratio: the proportion of the entries that is kept.
        schedule: "none", "dgc" or "merging".
        schedule_steps: of each stage with "dgc", until ``ratio`` is reached with "merging".
    """

    ratio: float
    schedule: str = "none"
    schedule_steps: int = _SCHEDULE_STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("ratio", "a number above 0 and up to 1", lambda x: is_number(x) and 0 < x <= 1)
        self.require("schedule", one_of(["none", "dgc", "merging"]), lambda x: x in ("none", "dgc", "merging"))
        self.require("schedule_steps", "a whole number of steps, 1 or more", lambda x: is_int(x) and x >= 1)
        if self.schedule == "none":
            self.require("schedule_steps", "it together with schedule='dgc' or 'merging', of which it is a part",
                         lambda x: x == _SCHEDULE_STEPS)

    def stages(self) -> tuple[tuple[int, Compressor | None], ...]:
        if self.schedule == "none":
            return super().stages()
        ratios = self._dgc() if self.schedule == "dgc" else self._merging()
        at_once = dataclasses.replace(self, schedule="none", schedule_steps=_SCHEDULE_STEPS, warmup=0)
        stages = {self.warmup + first: dataclasses.replace(at_once, ratio=ratio)
                  for first, ratio in ratios}  # of stages that start together the last remains
        return (*(((0, None),) if 0 not in stages else ()), *stages.items())

    def _dgc(self) -> list[tuple[int, float]]:
        ratios = [ratio for ratio in _DGC if ratio > self.ratio] + [self.ratio]
        return [(i * self.schedule_steps, ratio) for i, ratio in enumerate(ratios)]

    def _merging(self) -> list[tuple[int, float]]:
        if self.ratio >= _DENSE:
            return [(self.schedule_steps, self.ratio)]

        def reached(kept: float) -> int:
            """The first step in which the formula keeps no more than that."""
            return math.ceil(self.schedule_steps * math.log1p(-self.ratio) / math.log1p(-kept)) - 1

        ratios = [self.ratio * 2 ** (j / 2) for j in range(math.ceil(2 * math.log2(_DENSE / self.ratio)), -1, -1)]
        return [(reached(min(ratio, _DENSE)), ratio) for ratio in ratios]
