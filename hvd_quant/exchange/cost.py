"""What an exchange costs on this network and machine, and which is the cheapest.

The seconds of a collective are interpolated between sizes that were measured, those of encoding and decoding are
proportional to the number of entries. All workers hold the same figures, so they choose alike.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hvd_quant.compressors.base import Compressor, TensorInfo
from hvd_quant.compressors.half import FP16
from hvd_quant.compressors.none import NoCompression

_log = logging.getLogger("hvd_quant")

COLLECTIVES = ("allreduce", "allreduce_fp16", "allgather", "alltoall")
"""What is timed. Horovod adds fp16 up in other code than fp32: over Gloo it takes longer for half the bytes."""
SAMPLE = 2**21
"""Entries on which encoding and decoding are timed: more than caches hold."""
_SIZES = [2**k for k in range(10, 25, 2)]  # bytes that a worker gives to a collective: 1 KiB to 16 MiB
_ENOUGH = 0.03  # seconds: once a collective takes this long, larger ones take proportionally longer
_LARGE = 2**20
_REPEATS = 5
LITTLE = 4096
"""Entries on which it is timed what a call costs."""
_TWICE = 2.0
_REHEARSALS = range(4, 33)
_REHEARSING = 3.0  # seconds, by which there are as many as are in them


@dataclass(frozen=True)
class Rates:
    """Seconds of a code.

    Attributes:
        encode, decode_all, decode_one: an entry, of encoding, of decoding the sum of all workers' payloads, and one payload.
        call: of encoding and decoding next to nothing, whatever the number of entries.
    """

    encode: float
    decode_all: float
    decode_one: float
    call: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What was measured.

    Attributes:
        collectives: for each of ``COLLECTIVES``, (bytes that a worker gives, seconds), ascending.
        rates: of a compressor by its spec without exchange, warm-up and the like; see :func:`key_of`.
    """

    collectives: Mapping[str, tuple[tuple[float, float], ...]]
    rates: Mapping[str, Rates] = field(default_factory=dict)

    def collective(self, kind: str, nbytes: float) -> float:
        """Seconds of a collective to which each worker gives so many bytes."""
        sizes, seconds = zip(*self.collectives[kind])
        if nbytes <= sizes[-1]:
            return float(np.interp(nbytes, sizes, seconds))
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return seconds[-1] + max(slope, 0.0) * (nbytes - sizes[-1])

    def exchange(self, compressor: Compressor, infos: Iterable[TensorInfo]) -> float:
        """Seconds that tensors need which travel together, compressed like this, by the compressor's exchange."""
        infos = list(infos)
        entries, world = sum(info.numel for info in infos), infos[0].world
        if compressor.name == "none" and compressor.allreduced:
            return self.collective("allreduce", 4 * entries)
        rates = self.rates.get(key_of(compressor), _UNKNOWN)
        calls = len(infos) * rates.call
        if compressor.allreduced:
            in_fp16 = compressor.name == "fp16" and "allreduce_fp16" in self.collectives
            each = sum(map(compressor.summed_bytes, infos)) / compressor.allreduces
            summed = compressor.allreduces * self.collective("allreduce_fp16" if in_fp16 else "allreduce", each)
            return calls + entries * (rates.encode + rates.decode_one) + summed
        payload = sum(map(compressor.payload_bytes, infos))
        if compressor.exchange == "allgather":
            return calls + entries * (rates.encode + rates.decode_all) + self.collective("allgather", payload)
        owner = entries / world * (rates.encode + rates.decode_all)
        return (calls * (world + 1) + entries * (rates.encode + rates.decode_one) + owner
                + self.collective("alltoall", payload) + self.collective("allgather", payload / world))

    def step(self, together: Iterable[tuple[Compressor, list[TensorInfo]]], backward: float = 0.0) -> float:
        """Seconds of a backward pass and of the exchanges that start in it, each when its gradients are there and the one before
        has ended. (Encoding beside a collective gains little where they share cores.)

        Arguments:
            together: what travels together, in the order in which it is started, with one exchange.
            backward: seconds in which the gradients are made, evenly by entries.
        """
        together = list(together)
        entries = sum(info.numel for _, infos in together for info in infos)
        there = done = 0.0
        for compressor, infos in together:
            there += backward * sum(info.numel for info in infos) / entries
            done = max(done, there) + self.exchange(compressor, infos)
        return done

    def as_dict(self) -> dict[str, Any]:
        """All of it as lists and numbers, for a file; see :meth:`of`."""
        return {"collectives": {kind: [list(point) for point in points] for kind, points in self.collectives.items()},
                "rates": {spec: dataclasses.asdict(rates) for spec, rates in self.rates.items()}}

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Costs:
        """What :meth:`as_dict` made a dictionary of.

        Raises:
            ValueError: if it is none.
        """
        try:
            collectives = figures["collectives"]
            return cls({kind: tuple((float(n), float(seconds)) for n, seconds in collectives[kind]) for kind in COLLECTIVES},
                       {spec: Rates(**rates) for spec, rates in figures["rates"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"these are no costs of exchanges: {type(error).__name__}: {error}") from None


_UNKNOWN = Rates(1e-9, 1e-9, 0.5e-9, 1e-4)


@functools.cache
def typical(world: int, bits_per_second: float = 1e9) -> Costs:
    """What is assumed where nothing was measured: 1 Gb/s Ethernet, about, or another rate of each worker's link."""
    ring = (world - 1) / world
    hops = {"allreduce": 2 * ring, "allreduce_fp16": 4 * ring, "allgather": world - 1, "alltoall": ring}
    latency = dict.fromkeys(COLLECTIVES, 1.5e-3) | {"alltoall": 2.5e-3}
    second = 8 / bits_per_second
    return Costs({kind: tuple((n, latency[kind] + hops[kind] * n * second) for n in (0, 2**20)) for kind in COLLECTIVES})


def key_of(compressor: Compressor) -> str:
    """The spec of a compressor's code alone: what its speed depends on."""
    common = {field.name for field in dataclasses.fields(Compressor)} - {"memory"}
    return dataclasses.replace(compressor, **{field.name: field.default for field in dataclasses.fields(compressor)
                                              if field.name in common}).spec


_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)((?P<prefix>[kmgt]i?)?(?P<unit>bit|bps))?", re.IGNORECASE)


def bits_per_second(rate: str) -> float | None:
    """The rate of a link in bits a second, in tc's syntax: a bare number is bits, bps is bytes a second. None is unlimited.

    Raises:
        ValueError: for what is no such rate.
    """
    if rate == "unlimited":
        return None
    match = _RATE.fullmatch(rate)
    if not match or not float(match["number"]):
        raise ValueError(f"the rate is {rate!r}, expected tc's syntax, as 100mbit or 1.5gbit, or else unlimited")
    prefix = (match["prefix"] or "").lower()
    factor = (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(prefix[:1] or " ")
    return float(match["number"]) * factor * (8 if (match["unit"] or "").lower() == "bps" else 1)


def ways(compressor: Compressor) -> list[Compressor]:
    """The compressor with each exchange that "auto" chooses from, or with its own."""
    exchanges = [compressor.exchange]
    if compressor.exchange == "auto":
        exchanges = ["allreduce"] if compressor.linear else ["allgather", "sra"]
    return [dataclasses.replace(compressor, exchange=exchange) for exchange in exchanges]


CHEAPEST = "cheapest"
POLICIES = (CHEAPEST, "allgather", "sra", "fp16", "none")


def decide(compressor: Compressor, infos: list[TensorInfo], costs: Costs | None = None, mpi: bool = False,
           policy: str = CHEAPEST) -> Compressor:
    """As what tensors that travel together go: the compressor with one of its exchanges, or, where it says ``only_if_faster``,
    fp16 or none if that takes less time.

    Arguments:
        infos: of the tensors; their world is the number of workers.
        costs: the same on all workers; :func:`typical` where None.
        mpi: whether collectives have MPI's 32-bit counts.
        policy: which of these is taken where it may be, instead of the cheapest: an exchange, "fp16" or "none".
    """
    from hvd_quant.exchange import MPI_COUNT_LIMIT, gathered_bytes

    costs = costs or typical(infos[0].world)
    candidates = ways(compressor)
    if mpi and len(candidates) > 1:
        world, payload = infos[0].world, max(compressor.payload_bytes(info) for info in infos)
        candidates = [c for c in candidates if gathered_bytes(c.exchange, payload, world) < MPI_COUNT_LIMIT] or candidates[:1]
    if compressor.only_if_faster:
        common = {"warmup": compressor.warmup, "min_numel": compressor.min_numel}
        candidates += [FP16(exchange="allreduce", **common), NoCompression(**common)]
    preferred = [c for c in candidates if policy in ((c.exchange,) if c.name == compressor.name else (c.name,))]
    if len(preferred or candidates) == 1:
        return (preferred or candidates)[0]  # of which perhaps not everything was measured
    return min(candidates, key=lambda candidate: costs.exchange(candidate, infos))


def worth_a_trial(together: list[tuple[Compressor, list[TensorInfo]]], costs: Callable[[Compressor], Costs | None],
                  mpi: bool = False) -> list[str]:
    """The policies that may be the fastest, each with another outcome: those that are at most ``_TWICE`` as dear as the cheapest.

    Exchanges that are under way at the same time share the network, and encoding goes on beside it, so what one of them takes
    says little of what all of them take.

    Arguments:
        together: compressors with what travels together.
        costs: from a compressor to what was measured for it.
    """
    outcomes: dict[tuple[Compressor, ...], tuple[float, str]] = {}
    for policy in POLICIES:
        chosen = tuple(decide(compressor, infos, costs(compressor), mpi, policy) for compressor, infos in together)
        if chosen not in outcomes:
            seconds = sum((costs(one) or typical(infos[0].world)).exchange(choice, infos)
                          for (one, infos), choice in zip(together, chosen))
            outcomes[chosen] = seconds, policy
    least = min(seconds for seconds, _ in outcomes.values())
    return [policy for seconds, policy in outcomes.values() if seconds <= _TWICE * least]


def rehearsals(seconds: float) -> int:
    """How often plans are tried that take so many seconds together."""
    return max(_REHEARSALS[0], min(_REHEARSALS[-1], round(_REHEARSING / seconds)))


class Workers(Protocol):
    """What a frontend does for :func:`measure`. Each call is made by all workers together."""

    def collective(self, kind: str, nbytes: int) -> float:
        """Seconds of one collective to which this worker gives ``nbytes``."""

    def rates(self, compressor: Compressor, entries: int) -> Rates:
        """Seconds an entry of encoding and decoding so many on this worker, while the others do the same."""

    def slowest(self, seconds: list[float]) -> list[float]:
        """The largest of all workers' values, each by itself."""


def measure(workers: Workers, compressors: Iterable[Compressor], sample: int | None = None, repeats: int = _REPEATS) -> Costs:
    """Measure the network and the machine, together with all workers; some seconds.

    Arguments:
        compressors: those whose codes are timed, in the same order on all workers.
        sample: entries on which that is done; ``SAMPLE`` where None.
        repeats: of each collective.
    """
    compressors, sample = list(compressors), sample or SAMPLE
    kinds = [kind for kind in COLLECTIVES if kind != "allreduce_fp16" or any(c.only_if_faster for c in compressors)]
    collectives = {}
    for kind in kinds:
        workers.collective(kind, _SIZES[0])  # the first one makes connections
        points: list[tuple[float, float]] = []
        for size in _SIZES:
            times = workers.slowest([workers.collective(kind, size) for _ in range(repeats)])
            points.append((size, sorted(times)[repeats // 4]))  # nearly the fastest: others use network and machine now and then
            if size >= _LARGE and points[-1][1] > _ENOUGH:
                break
        # What takes longer than something larger was disturbed.
        sizes, seconds = zip(*points)
        collectives[kind] = tuple(zip(sizes, np.minimum.accumulate(seconds[::-1])[::-1].tolist()))
    if "allreduce_fp16" in kinds:
        compressors.append(FP16())
    rates = {}
    for compressor in {key_of(c): c for c in compressors}.values():
        rates[key_of(compressor)] = with_call(*(
            Rates(*workers.slowest(list(dataclasses.astuple(workers.rates(compressor, n))[:3]))) for n in (sample, LITTLE)))
    costs = Costs(collectives, rates)
    _log.info("exchanges were measured: %s", describe(costs))
    return costs


def with_call(large: Rates, small: Rates) -> Rates:
    """Those of many entries, with what a call costs by those of ``LITTLE``."""
    more = (max(0.0, few - many) for many, few in zip(dataclasses.astuple(large), dataclasses.astuple(small)))
    return dataclasses.replace(large, call=sum(more) * LITTLE)


def describe(costs: Costs) -> str:
    """The figures in one line."""
    parts = []
    for kind, points in costs.collectives.items():
        (n, seconds), least = points[-1], points[0][1]
        parts.append(f"{kind} {1e3 * least:.2f} ms + {8e-6 * n / max(seconds - least, 1e-9):.0f} Mbit/s")
    for spec, rates in costs.rates.items():
        parts.append(f"{spec} {1e9 * rates.encode:.2f} + {1e9 * rates.decode_all:.2f} ns an entry")
    return ", ".join(parts)

