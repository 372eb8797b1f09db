"""PowerSGD: low-rank gradients."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from hvd_quant.compressors.base import Compressor, TensorInfo, is_int
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """A gradient as the product of two thin matrices; r (n + m) values of n m, in two of Horovod's allreduces.

    M = G + E, the first dimension by all the others; P = M Q, with the Q of the step before; P is summed over the workers and
    made orthonormal; Q = M' P is averaged over the workers; the gradient is P Q', and E = M - P Q' with this worker's own Q.
    Vectors, and matrices that two thin ones are no smaller than, go dense.

    All workers get the same bits from the same sums, whatever their processors and libraries: what P's basis and P Q' add up is
    rounded so that the sums are exact.

    Source: Vogels, Karimireddy, Jaggi 2019. There Q is as long as the gradient makes it, and 1e-8 is added to what P is divided
    by; here neither matters how large gradients are, and a column of P of which the others leave less than 1e-8 is left out.

    Arguments:
        rank: r, columns of P and Q.
        seed: of the first Q.
    """

    name = "powersgd"
    native = True
    linear = True
    allreduces = 2
    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_allreduce()
        self.require("rank", "a whole number of columns, 1 or more", lambda x: is_int(x) and x >= 1)
        self.require("seed", "a whole number", is_int)

    def _columns(self, info: TensorInfo) -> int:
        return info.numel // max(1, info.shape[0]) if info.shape else 1

    def summed_bytes(self, info: TensorInfo) -> int:
        columns = max(1, self._columns(info))
        return 4 * self.rank * (info.numel // columns + columns)

    payload_bytes = summed_bytes

    def state_shapes(self, info: TensorInfo, role: str = "worker") -> dict[str, tuple[int, ...]]:
        return {**super().state_shapes(info, role), "q": (self.rank * self._columns(info),)}

    def rounds(self, ops, grad, state, info, out) -> Generator[Any, Any, tuple[Any, Any]]:
        matrix = ops.powersgd_matrix(grad, state.get("residual"), self._columns(info))
        total = yield ops.powersgd_left(matrix, ops.powersgd_start(matrix, state["q"], info.key(self.seed)))
        left = ops.orthonormal(total)
        own = ops.powersgd_right(matrix, left)
        total = yield ops.copy(own)  # the sum is written there
        return ops.powersgd_decode(total, own, left, matrix, state["q"], info.world, out)
