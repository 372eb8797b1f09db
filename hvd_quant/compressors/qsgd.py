"""QSGD: levels chosen at random so that their mean is the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_quant import wire
from hvd_quant.compressors.base import TensorInfo, is_int, one_of
from hvd_quant.compressors.stochastic import Stochastic
from hvd_quant.ops import layout
from hvd_quant.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class QSGD(Stochastic):
    """A signed level an entry and a norm a block; about 1/8 of fp32 at 4 bits, 1/4 at 8, 1/16 at 2.

    With s = 2^(bits - 1) - 1 levels, \\|v\\| / norm * s is rounded down or up, up with the chance that makes the mean right, and
    decodes to sign(v) * level * norm / s. The variance of a block of d entries is at most min(d / s^2, sqrt(d) / s) times
    \\|v\\|^2 with the 2-norm; with the largest magnitude, which never exceeds it, an entry is off by less than largest / s.

    A memory goes with the 2-norm only where that bound is below 1: an error as large as v grows without end where it is added to
    the next v. With the largest magnitude it can't grow beyond that, but with 2 bits it grows to several times the gradient first.

    Source: Alistarh, Grubic, Li, Tomioka, Vojnovic 2017. Different from there: fields have a fixed width.

    Arguments:
        bits: of a field: 2, 4 or 8.
        norm: "max", the block's largest magnitude, or "l2", its 2-norm, which sends fewer levels that aren't 0.
        block_size: entries that share a norm; a multiple of 64. The variance grows with its square root.
    """

    name = "qsgd"
    native = True
    bits: int = 4
    norm: str = "max"
    block_size: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("bits", "2, 4 or 8", lambda x: is_int(x) and x in (2, 4, 8))
        self.require("norm", one_of(["max", "l2"]), lambda x: x in ("max", "l2"))
        self.require("block_size", layout.BLOCK_SIZES, layout.is_block_size)
        levels = 2 ** (self.bits - 1) - 1
        if self.memory != "none" and min(self.block_size / levels**2, self.block_size**0.5 / levels) >= 1:
            self.require("norm", f"'max' beside memory={self.memory!r}, or 8 bits and blocks below 16,129 entries: what is kept would "
                                 "grow without end", lambda x: x == "max")

    @property
    def range_multiple(self) -> int:
        return self.block_size

    def payload_bytes(self, info: TensorInfo) -> int:
        body = layout.fields_body_bytes(info.numel, self.bits, -(-info.numel // self.block_size))
        return wire.HEADER_BYTES + wire.padded(body)

    def encode(self, ops, grad, state, params, info):
        return ops.qsgd_encode(grad, state.get("residual"), self.bits, self.norm, self.block_size, *self.draw(info))

    def decode_sum(self, ops, payloads, info, out=None):
        return ops.qsgd_decode_sum(payloads, info.numel, self.bits, self.block_size, out=out)

    def decode_mean(self, ops, payloads, info, out=None):
        return ops.qsgd_decode_sum(payloads, info.numel, self.bits, self.block_size, out=out, scale=1 / info.world)
