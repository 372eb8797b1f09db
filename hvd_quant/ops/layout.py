"""Sizes of the payloads' parts, shared by the compressors and the backends; ``docs/payloads.md`` has the tables."""

from __future__ import annotations

import math

BLOCK = 256
"""Entries that share a count byte in the sparse codes."""
UNIT = 64 * BLOCK
"""Entries that share levels in the adaptive code; the scan of a sparse code starts at a multiple of it."""


def onebit_body_bytes(numel: int, block_size: int, zeros: bool) -> int:
    return -(-numel // block_size) * 8 + -(-numel // 8) * (2 if zeros else 1)


def slots_for(ratio: float, numel: int) -> int:
    """Slots of a sparse payload: ``ratio`` of the entries, at least one, rounded up to a multiple of 8."""
    return -(-max(1, math.ceil(ratio * numel)) // 8) * 8


def units_of(numel: int) -> int:
    return -(-numel // UNIT)


def sparse_body_bytes(numel: int, slots: int, levels: int, code_bits: int) -> int:
    """Body bytes of a sparse payload with ``levels`` pairs of levels and ``code_bits`` bits a slot."""
    return 8 + 8 * levels + -(-numel // BLOCK) + slots + slots * code_bits // 8
