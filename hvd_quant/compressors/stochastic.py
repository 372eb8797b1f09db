"""What codes have in common that round at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_quant.compressors.base import Compressor, TensorInfo, is_int


@dataclass(frozen=True, kw_only=True)
class Stochastic(Compressor):
    """A code whose errors have the mean 0, so that nothing need be kept of them.

    An entry's random number depends on the seed, the tensor's name, the step, the worker, and the entry's place in the whole
    tensor, and on nothing else; workers that drew the same numbers would make the same errors, which no average takes away.

    Arguments:
        seed: of the random numbers, the same on all workers.
        memory: "none", or "error_feedback" all the same.
    """

    memory: str = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("seed", "a whole number", is_int)

    def draw(self, info: TensorInfo) -> tuple[int, int, Any, Any, int]:
        """What ``ops.noise`` takes of a range: stream, first, step, rank, phase."""
        return info.key(self.seed), info.range[0], info.step, info.rank, info.phase
