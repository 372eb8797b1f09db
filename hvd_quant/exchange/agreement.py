"""Whether workers train the same thing: what they compare before they exchange, and digests of their parameters, in plain Python."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_quant import wire

OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
"""Horovod's reductions by their numbers."""
COLLECTIVES = "names of the collectives"
"""Starts what names of collectives are told as, where they count the optimizers that a worker has made."""
DIGEST_ENTRIES = 2**18
"""Entries of a parameter that are multiplied with :func:`digest_weights` at once."""
DIGEST_FACTOR = 0x5851F42D4C957F2D
"""What the digest of the entries before is multiplied with, modulo 2^64, when those of more entries are added."""

Gather = Callable[[bytes], Sequence[bytes]]
"""An allgather: from this worker's bytes to all workers', each as many, in the order of their ranks."""


class Parameter(NamedTuple):
    """A parameter as workers compare it.

    Attributes:
        name: what this worker calls it.
        dtype, shape: its own.
        spec: its compressor's, or whatever tells what it is compressed with.
        note: what else has to be the same, to be read after the rest.
        alike: the part of the name that has to be the same; all of it where None.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    spec: str
    note: str = ""
    alike: str | None = None


class Trait(NamedTuple):
    """Something that workers must have in common: what is compared, and how it is told."""

    compared: str
    told: str


def describe(parameters: Iterable[Parameter], settings: Mapping[str, Any]) -> dict[str, Trait]:
    """What workers compare, by what it is called: versions, then parameters in order, then settings."""
    from hvd_quant import __version__

    traits = {"hvd_quant": Trait(__version__, __version__), "wire format": Trait(str(wire.WIRE_VERSION), str(wire.WIRE_VERSION))}
    for place, one in enumerate(parameters):
        how = "uncompressed" if one.spec == "none" else f"compressed with {one.spec}"
        rest = f" {one.dtype} {list(one.shape)} {how}{one.note}"
        traits[f"parameter {place}"] = Trait((one.name if one.alike is None else one.alike) + rest, one.name + rest)
    return traits | {name: Trait(str(value), str(value)) for name, value in settings.items()}


def require_agreement(traits: Mapping[str, Trait], gather: Gather, ranks: Sequence[int], number: int = 0) -> int:
    """Check that all workers have the same traits; all of them come to the same result.

    A worker sends a hash of 32 bytes and a number. Only where hashes differ does it tell what was hashed: first how long that is, then
    the text, padded to the longest, so that the size of no allgather depends on what differs.

    Arguments:
        traits: of this worker.
        gather: to all workers and back.
        ranks: of the workers.
        number: what need not be the same.

    Returns:
        The largest number of all workers.

    Raises:
        ValueError: naming the first trait that differs, who has it how, and what to do.
    """
    compared = repr([(name, trait.compared) for name, trait in traits.items()])
    rows = gather(hashlib.sha256(compared.encode()).digest() + number.to_bytes(8, "little"))
    if len({row[:32] for row in rows}) > 1:
        text = json.dumps(traits).encode()
        longest = max(int.from_bytes(row, "little") for row in gather(len(text).to_bytes(8, "little")))
        told = [json.loads(row) for row in gather(text.ljust(longest))]
        raise ValueError(difference([{name: Trait(*trait) for name, trait in worker.items()} for worker in told], ranks))
    return max(int.from_bytes(row[32:], "little") for row in rows)


def difference(workers: Sequence[Mapping[str, Trait]], ranks: Sequence[int]) -> str:
    """A sentence about the first trait that workers don't have in common."""
    for name in dict.fromkeys(name for traits in workers for name in traits):
        sides = _sides([traits[name].compared if name in traits else None for traits in workers], ranks)
        if len(sides) > 1:
            break
    first = {rank: traits.get(name) for rank, traits in zip(ranks, workers)}
    told = "; ".join(f"{_named(side)} {'has' if len(side) == 1 else 'have'} " + (
        f"no {name}" if first[side[0]] is None else f"{name} = {first[side[0]].told}") for side in sides)
    if name in ("hvd_quant", "wire format"):
        advice = "install the same version of hvd_quant on all of them"
    elif name.startswith("parameter"):
        advice = "give all of them the same model, its parameters in the same order, and the same compression"
    elif name.startswith(COLLECTIVES):
        advice = "make as many optimizers on all of them, in the same order"
    else:
        advice = "give all of them the same arguments"
    return f"workers differ: {told}: {advice}"


def require_same(digests: Sequence[Sequence[int]], ranks: Sequence[int], names: Sequence[str], when: str) -> None:
    """Check that all workers have the same parameters.

    Arguments:
        digests: of each worker, one for each parameter.
        ranks: of the workers.
        names: of the parameters.
        when: as in "after 100 steps".

    Raises:
        RuntimeError: naming the first parameter that differs, who has the same and who another, and what that likely means.
    """
    columns = list(zip(*digests))
    differing = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if not differing:
        return
    first, *others = (_named(side) for side in _sides(columns[differing[0]], ranks))
    told = "".join(f", another on {side}" for side in others)
    if len(differing) == len(names):
        why = ("Since all of them do, they were probably not the same to begin with: broadcast them before the first step, and after "
               "a checkpoint is loaded")
    else:
        why = ("The others are the same, so something beside this optimizer probably changes it on some workers, such as code that "
               "only one of them runs; or a machine's memory is faulty")
    raise RuntimeError(f"parameters differ between workers {when}, {len(differing)} of {len(names)}: {names[differing[0]]} is one on "
                       f"{first}{told}. {why}")


def _sides(values: Iterable[Hashable], ranks: Sequence[int]) -> list[list[int]]:
    """Ranks that have the same value, together."""
    sides: dict[Hashable, list[int]] = {}
    for rank, value in zip(ranks, values):
        sides.setdefault(value, []).append(rank)
    return list(sides.values())


def _named(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


@functools.cache
def digest_weights() -> np.ndarray:
    """Odd numbers modulo 2^64, as int64, that :data:`DIGEST_ENTRIES` entries are multiplied with.

    The sum over the products of a parameter's bits with these changes with every change of one entry, since an odd number has an
    inverse, and of several but for one chance in 2^64.
    """
    numbers = np.arange(DIGEST_ENTRIES, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((numbers ^ (numbers >> np.uint64(32))) | np.uint64(1)).view(np.int64)


def checked_every(every: Any, elastic: bool) -> int | None:
    """``verify_every`` as the frontends take it.

    Raises:
        ValueError: unless it is None or a positive whole number, and in an elastic job.
    """
    if every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"verify_every={every!r} is not accepted; give the steps between two comparisons of the parameters, a whole "
                         "number, 1 or more, or None for none")
    if elastic:
        raise ValueError("verify_every can't be used in an elastic job: a worker that joins has not counted the others' steps, so it "
                         "can't know when they compare")
    return every
