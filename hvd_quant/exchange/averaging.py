"""Model averaging in plain Python: when workers average, and whether they agree on what."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Every = int | Callable[[int], int]
"""Local steps between two averagings: a number, or a function from the steps taken so far to that of the next interval."""


def averaging_bound(workers: int, steps: int) -> int:
    """The longest interval between averagings that keeps the rate O(1/√(N T)) of N workers over T steps: the whole part of
    T^(1/4) / N^(3/4), at least 1.

    Source: Yu, Yang, Zhu 2019, Parallel Restarted SGD with Faster Convergence and Less Communication.

    Arguments:
        workers: N.
        steps: T, those that each worker takes in the whole training.

    Raises:
        ValueError: if one of them is not a positive whole number.
    """
    for name, value in (("workers", workers), ("steps", steps)):
        if not _is_count(value):
            raise ValueError(f"{name}={value!r} is not accepted; give a whole number, 1 or more")
    return max(1, math.isqrt(math.isqrt(steps // workers**3)))


def interval(every: Every, step: int) -> int:
    """The local steps between ``step`` and the next averaging.

    Raises:
        ValueError: if that is not a positive whole number.
    """
    steps = every(step) if callable(every) else every
    if not _is_count(steps):
        what = f"every({step}) returned {steps!r}" if callable(every) else f"every={steps!r} is not accepted"
        raise ValueError(f"{what}; give the steps between two averagings, a whole number, 1 or more")
    return int(steps)


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and value.__index__() >= 1


class Report(NamedTuple):
    """What a worker tells the others before they average, all whole numbers.

    Attributes:
        step: its local steps so far.
        layout: :func:`layout` of what it is about to send.
        start: a sum over the bits of those parameters that it started from and that were not compared yet.
        bad: the place of the first parameter that is not finite, or -1.
    """

    step: Any
    layout: Any
    start: Any
    bad: Any


def layout(described: Iterable[Any]) -> int:
    """A number that differs between workers which are about to send different things."""
    return zlib.crc32(repr(list(described)).encode())


def require_agreement(reports: Iterable[Sequence[int]], ranks: Sequence[int], names: Sequence[str]) -> None:
    """Check that workers can average; all of them come to the same result.

    Arguments:
        reports: of all workers.
        ranks: theirs.
        names: of the parameters.

    Raises:
        ValueError: if they have taken different numbers of steps, average different things, or started apart.
        FloatingPointError: if a parameter is not finite.
    """
    reports = [Report(*map(int, report)) for report in reports]
    for field, what in (
            ("step", "has taken {theirs} steps and worker {first} {own}: call the wrapped optimizer the same number of times on "
                     "all workers"),
            ("layout", "averages other parameters, optimizer state or compressors than worker {first}: wrap the same model with "
                       "the same arguments on all workers"),
            ("start", "started from other parameters than worker {first}: broadcast them before the first step")):
        values = [getattr(report, field) for report in reports]
        for rank, value in zip(ranks, values):
            if value != values[0]:
                raise ValueError(f"worker {rank} {what.format(first=ranks[0], own=values[0], theirs=value)}")
    for rank, report in zip(ranks, reports):
        if report.bad >= 0:
            raise FloatingPointError(f"{names[report.bad]} of worker {rank} is not finite: nothing was averaged, and each worker has "
                                     "the parameters that it had")
