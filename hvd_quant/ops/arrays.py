"""What all codes in array operations start from: random numbers, copies, stretches, and a NumPy that is quiet."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

Array = Any


def quiet() -> np.errstate:
    """NumPy warns where fp32 overflows; here that is expected, and flagged or replaced."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def copy(x: Array) -> Array:
    """x in memory of its own."""
    return array_namespace(x).asarray(x, copy=True)


_STRETCH = 2**18
"""Entries that are worked on together on the host, so that what is made of them stays in the cache."""


def stretches(x: Array) -> list[slice]:
    """Entries of a vector, or rows of a matrix, that are worked on together."""
    length, columns = x.shape[0], math.prod(x.shape[1:])
    each = max(1, _STRETCH // max(1, columns) if str(device(x)) == "cpu" else length)
    return [slice(first, first + each) for first in range(0, length, each)]


def noise(numel: int, like: Array, stream: int, first: int, step: int, rank: int, phase: int) -> Array:
    """The random numbers of a range, int64 from 0 up to 2^32: whatever is called when and where, an entry has the same one.

    Arguments:
        stream: a constant of the seed and the tensor's name; its last 64 bits count.
        first: the place of the range's first entry in the whole tensor, a multiple of 64.
        rank: whose they are; 0 where all workers draw the same.
        phase: 0 for a worker's own gradient, 1 where an owner encodes a mean again, 2 where all workers draw the same.
    """
    xp = array_namespace(like)
    key = int(stream) % 2**64
    for word in (step, rank, phase):
        key = _mix(key ^ int(word) % 2**64)
    place = xp.arange(first, first + numel, dtype=xp.int64, device=device(like))
    x = (place & 0xFFFFFFFF) ^ (key & 0xFFFFFFFF)
    x = (x ^ (x >> 17)) * 0xED5AD4BB & 0xFFFFFFFF
    x = (x ^ (x >> 11)) + (key >> 32) + (place >> 32) * 0x9E3779B1 & 0xFFFFFFFF
    x = x * 0xAC4C1B51 & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x31848BAB & 0xFFFFFFFF
    return x ^ (x >> 14)


def _mix(x: int) -> int:
    """splitmix64."""
    x = x + 0x9E3779B97F4A7C15 & 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return x ^ x >> 31
