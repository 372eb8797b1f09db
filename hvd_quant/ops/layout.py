"""Sizes of the payloads' parts, shared by the compressors and the backends; ``docs/payloads.md`` has the tables."""

from __future__ import annotations

import math
from typing import Any

BLOCK = 256
"""Entries that share a count byte in the sparse codes."""
UNIT = 64 * BLOCK
"""Entries that share levels in the adaptive code; the scan of a sparse code starts at a multiple of it."""
TOPK_BITS = {"float32": 32, "float16": 16, "sign": 1, "tensor_sign": 1, "2bit": 2}
"""Bits a slot of topk's values."""


GROUP = 64
"""Entries whose fields are packed together where an entry has a few bits."""


BLOCK_SIZES = "a multiple of 64 from 64 to 1048576"
"""What a compressor's ``block_size`` may be."""


def is_block_size(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 64 <= x <= 2**20 and x % 64 == 0


def onebit_body_bytes(numel: int, block_size: int, zeros: bool, levels: int = 2) -> int:
    return -(-numel // block_size) * 4 * levels + -(-numel // 8) * (2 if zeros else 1)


def fields_body_bytes(numel: int, bits: int, scales: int) -> int:
    """Body bytes of a payload with a field of ``bits`` an entry and so many scales."""
    return 4 * scales + -(-numel // GROUP) * GROUP * bits // 8


def dynamic_code() -> list[float]:
    """What the 256 fields of the dynamic code stand for, as parts of a block's scale, before rounding to fp32.

    Source: Dettmers, Lewis, Shleifer, Zettlemoyer 2021 (signed dynamic tree quantisation). Each decade from 1e-6 to 1 has twice
    as many steps as the one below, from 1 to 64, and a value in the middle of each; and there are 0 and 1, but no -1. Field 0
    is 0, the next 128 ascend to 1, and of the last 127, field 256 - k is minus field k.
    """
    decades = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    middles = [decade * (0.1 + 0.9 * (2 * j + 1) / (2 << i)) for i, decade in enumerate(decades) for j in range(1 << i)]
    return [0.0, *middles, 1.0, *(-x for x in reversed(middles))]


def slots_for(ratio: float, numel: int) -> int:
    """Slots of a sparse payload: ``ratio`` of the entries, at least one, rounded up to a multiple of 8."""
    return -(-max(1, math.ceil(ratio * numel)) // 8) * 8


def sample_size(numel: int) -> int:
    """How many entries :func:`hvd_quant.ops.generic.sample` takes."""
    return min(numel, max(4096, numel // 512))


def units_of(numel: int) -> int:
    return -(-numel // UNIT)


def sparse_body_bytes(numel: int, slots: int, levels: int, code_bits: int) -> int:
    """Body bytes of a sparse payload with ``levels`` pairs of levels and ``code_bits`` bits a slot."""
    return 8 + 8 * levels + -(-numel // BLOCK) + slots + slots * code_bits // 8


def topk_levels(numel: int, values: str) -> int:
    """Pairs of levels in a topk payload."""
    return {"float32": 0, "float16": 0, "tensor_sign": 1}.get(values, units_of(numel))


def topk_body_bytes(numel: int, slots: int, values: str) -> int:
    return sparse_body_bytes(numel, slots, topk_levels(numel, values), TOPK_BITS[values])
