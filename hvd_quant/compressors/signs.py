"""What codes of one bit an entry have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_quant import wire
from hvd_quant.compressors.base import Compressor, TensorInfo
from hvd_quant.ops import layout


@dataclass(frozen=True, kw_only=True)
class Signs(Compressor):
    """A bit an entry, and numbers that the entries of a block share.

    Arguments:
        block_size: entries that share those numbers; a multiple of 64.
        zeros: send a bit map of the zeros, so that zeros decode to 0.
    """

    levels: ClassVar[int]
    """Numbers a block."""

    block_size: int = 2048
    zeros: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("block_size", layout.BLOCK_SIZES, layout.is_block_size)
        self.require("zeros", "True or False", lambda x: isinstance(x, bool))

    @property
    def range_multiple(self) -> int:
        return self.block_size

    def payload_bytes(self, info: TensorInfo) -> int:
        body = layout.onebit_body_bytes(info.numel, self.block_size, self.zeros, self.levels)
        return wire.HEADER_BYTES + wire.padded(body)
