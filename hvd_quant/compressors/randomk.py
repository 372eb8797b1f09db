"""Random-k: the same random entries on all workers."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from hvd_quant.compressors.base import Compressor, TensorInfo, is_int, is_number
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Random entries, of which all workers know the places; 1/10 of fp32, over Horovod's allreduce.

    v = g + e; k = ceil(ratio * N) entries are drawn anew at each step, from (seed, parameter name, step), by all workers alike:
    one of each stretch of N / k, and each entry with the same probability k / N. They are sent as fp32 and leave e = 0; the
    others leave e = v. With ``memory="none"`` they are sent as v * N / k, so that the mean is unbiased.

    Names and numbers of exchanges have to be the same on all workers, which all of them are told where they aren't. In elastic jobs
    a worker that joins gets the others' numbers from ``hvd.elastic.TorchState`` or ``KerasState``, without which random-k is refused.

    Source: Stich, Cordonnier, Jaggi 2018 (sparsified SGD with memory); Wangni, Wang, Liu, Zhang 2018 (unbiased).

    Arguments:
        ratio: the fraction of entries that is sent; they are late by 1 / ratio steps on average.
        seed: of the draws.
    """

    name = "randomk"
    native = True
    linear = True
    ratio: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_allreduce()
        self.require("ratio", "a number above 0 and up to 1", lambda x: is_number(x) and 0 < x <= 1)
        self.require("seed", "a whole number", is_int)

    @property
    def counted(self) -> bool:
        return True

    def _count(self, info: TensorInfo) -> int:
        return math.ceil(self.ratio * info.numel)

    def summed_bytes(self, info: TensorInfo) -> int:
        return 4 * (self._count(info) + 2)

    payload_bytes = summed_bytes

    def rounds(self, ops, grad, state, info, out) -> Generator[Any, Any, tuple[Any, Any]]:
        residual, count = state.get("residual"), self._count(info)
        index = ops.strata(grad, count, info.key(self.seed), info.step)
        total = yield ops.randomk_encode(grad, residual, index, 1.0 if residual is not None else info.numel / count)
        return ops.randomk_decode(total, grad, residual, index, info.world, info.name, out)
