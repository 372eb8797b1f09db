"""Model averaging in plain Python: when workers average, and whether they agree on what."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hvd_quant.compressors.base import Compressor
from hvd_quant.registry import get_compressor, resolve, selector

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


def checked_compression(compression: Any, elastic: bool) -> Compressor | Mapping[str, Any]:
    """What ``compression=`` stands for.

    Raises:
        TypeError, ValueError: for none, and for one in Horovod's style, which keeps nothing between steps.
        ValueError: in an elastic job, and for a merge or momentum correction, which are of gradients.
    """
    if elastic:
        raise ValueError("ModelAveragingOptimizer can't be used in an elastic job: a worker that joins has not counted the "
                         "others' steps, so it can't know when they average")
    compression = resolve(compression)
    if not isinstance(compression, Compressor | Mapping):
        raise TypeError(f"compression={compression!r} is not accepted: give a compressor such as Compression.topk(ratio=0.01), "
                        "a spec string, or a mapping from patterns of names to these")
    selector(compression)  # raises for what can't be in a mapping
    for one in map(get_compressor, compression.values() if isinstance(compression, Mapping) else [compression]):
        if one.averaging or one.momentum:
            raise ValueError(f"{one.spec} can't be used in ModelAveragingOptimizer: a merge would let the averaged models differ, and "
                             "momentum is the inner or the outer optimizer's; give the code alone")
    return compression


@contextmanager
def reading() -> Iterator[None]:
    """Raise a ValueError in one sentence where a state lacks what is read from it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError("the compression state is none of a ModelAveragingOptimizer, or damaged: "
                         f"{type(error).__name__}: {error}; it should be what its compression_state_dict() returned") from error


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
    first = reports[0]
    for rank, report in zip(ranks, reports):
        if report.step != first.step:
            raise ValueError(f"worker {rank} has taken {report.step} steps and worker {ranks[0]} {first.step}: call the "
                             "wrapped optimizer the same number of times on all workers")
        if report.layout != first.layout:
            raise ValueError(f"worker {rank} averages other parameters, optimizer state or compressors than worker {ranks[0]}: "
                             "wrap the same model with the same arguments on all workers")
        if report.start != first.start:
            raise ValueError(f"worker {rank} started from other parameters than worker {ranks[0]}: broadcast them before the "
                             "first step")
    for rank, report in zip(ranks, reports):
        if report.bad >= 0:
            raise FloatingPointError(f"{names[report.bad]} of worker {rank} is not finite: nothing was averaged, and each "
                                     "worker has the parameters that it had")
