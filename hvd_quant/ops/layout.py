"""Sizes of the payloads' parts, shared by the compressors and the backends; ``docs/payloads.md`` has the tables."""

from __future__ import annotations

import math

BLOCK = 256
"""Entries that share a count byte in the sparse codes."""
UNIT = 64 * BLOCK
"""Entries that share levels in the adaptive code; the scan of a sparse code starts at a multiple of it."""
TOPK_BITS = {"float32": 32, "float16": 16, "sign": 1, "tensor_sign": 1, "2bit": 2}
"""Bits a slot of topk's values."""


def onebit_body_bytes(numel: int, block_size: int, zeros: bool) -> int:
    return -(-numel // block_size) * 8 + -(-numel // 8) * (2 if zeros else 1)


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
