"""Which gradients travel together, and as what: that may be known after the first step, when the network has been measured."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_quant import exchange
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange import buckets, cost
from hvd_quant.exchange.hosts import Workers
from hvd_quant.exchange.stats import Stats
from hvd_quant.registry import get_compressor
from hvd_quant.torch.flights import Flight
from hvd_quant.torch.state import Slot, State

_log = logging.getLogger("hvd_quant")
_NONE = get_compressor("none")
SHARED = 2**16
"""Dense gradients of fewer entries share one vector; copying larger ones would cost more than a collective of their own."""


@dataclasses.dataclass(eq=False)
class Bucket:
    """Slots whose gradients travel together, and those gradients that are there, with their versions."""

    slots: list[Slot]
    arrived: dict[Slot, tuple[torch.Tensor, int]] = dataclasses.field(default_factory=dict)
    flights: list[Flight] = dataclasses.field(default_factory=list)
    started: bool = False

    def complete(self) -> bool:
        """Whether all gradients are there. One of a parameter that is frozen now may come with another backward pass before
        the step, so its bucket starts in :meth:`hvd_quant.torch.reducer.Reducer.finish`."""
        return all(slot in self.arrived for slot in self.slots)


Rehearsal = Callable[[dict[str, torch.Tensor]], float]
"""Exchanges copies of gradients, given by name, and returns how many seconds that took."""


class Plan:
    """The buckets of a reducer's gradients.

    Arguments:
        state: what is kept for their parameters.
        stats: whose buckets begin anew with each plan.
        bucket_bytes: dense bytes of gradients that travel together.

    Attributes:
        groups: names of parameters that travel together, whatever their size.
        bucket_of: the bucket of each slot.
        made_for: the worker, of how many, that the plan is of; None where it is to be made anew.
        arrivals: names of gradients in the first step, as they came here.
        order: as they came on the first worker, for all; empty until then.
        costs: what was measured.
        policy: by which it is decided what travels how.
        settled: whether the first step is over, and with it all that is found out.
    """

    def __init__(self, state: State, stats: Stats, bucket_bytes: int) -> None:
        self.bucket_bytes, self._state, self._stats = bucket_bytes, state, stats
        self.groups: list[list[str]] = []
        self.bucket_of: dict[Slot, Bucket] = {}
        self.made_for: dict[str, int | None] | None = None
        self.arrivals: list[str] = []
        self.order: list[str] = []
        self.costs: dict[Workers, cost.Costs] = {}
        self.policy = cost.CHEAPEST
        self.settled = False
        self._grown = False  # by parameters that came since it was made

    @property
    def buckets(self) -> list[Bucket]:
        """In the order in which they are expected to be complete."""
        return list(dict.fromkeys(self.bucket_of.values()))

    def update(self) -> None:
        """Make buckets, and decide how each travels, where parameters came, or workers came or went."""
        state, complete = self._state, len(self.bucket_of) == len(self._state.slots)
        if state.amid and complete:
            return
        whose = state.whose()
        if not state.process_set.included() or whose == self.made_for and complete:
            return
        if whose == self.made_for:
            # Parameters that come, unfrozen, travel by themselves for this step, on all workers: some may be amid it already.
            self._fill([name for name, slot in state.slots.items() if slot not in self.bucket_of])
            self._grown = True
            return
        self.made_for, self.bucket_of, self._stats.buckets = whose, {}, {}
        # Until it is known, the last parameters are taken to get their gradients first.
        self._fill(list(dict.fromkeys([*self.order, *reversed(state.slots)])))

    def end_step(self) -> None:
        """Let parameters that have come travel with the others from now on."""
        if self._grown:
            self._grown, self.made_for = False, None

    def _fill(self, names: list[str]) -> None:
        slots = {name: self._state.slots[name] for name in names}
        filled = [[slots.pop(name) for name in group if name in slots] for group in self.groups]
        # Sums in fp32 or fp16 depend on what is summed along, in their last bits, so that does not depend on the order of
        # gradients. Payloads decode to the same wherever they are.
        payloads, sums, small = [], [], []
        for slot in slots.values():
            if slot.info.numel < SHARED and not exchange.compressible(slot.compressor, slot.typical(slot.info)):
                small.append(slot)
            else:
                (sums if slot.compressor.linear else payloads).append(slot)
        for kind in (payloads, sums, small):
            if kind is not payloads:
                kind.sort(key=lambda slot: -slot.index)
            filled += buckets.fill({slot: 4 * slot.info.numel for slot in kind}, self.bucket_bytes)
        for members in filled:
            self.bucket_of.update(dict.fromkeys(members, Bucket(members)))
            for (compressor, resumed), alike in _together(members):
                travels = resumed or self._decide(compressor, alike)
                for slot in alike:
                    slot.travels = travels
                    slot.make_room()

    # -------------------------------------------------------------------------------------- how, and as what they travel

    def kind(self, slot: Slot, info: TensorInfo) -> str:
        """By which exchange a gradient travels of which so much is known."""
        if self._state.process_set.size() == 1:
            return "dense"
        return exchange.choose(slot.travels, slot.typical(info), self._state.network.mpi_enabled())

    def _decide(self, compressor: Compressor, slots: list[Slot]) -> Compressor:
        network, infos = self._state.network, _compressible(compressor, slots)
        if not infos:
            return _NONE
        if compressor.only_if_faster and not self.settled and not network.ELASTIC:
            return _NONE  # until it is known, after the first step
        if compressor.only_if_faster and network.ELASTIC:
            _log.warning("%s: in an elastic job the network is not measured, since workers that join would wait for the others; "
                         "gradients are compressed", compressor.spec)
            compressor = dataclasses.replace(compressor, only_if_faster=False)
        return cost.decide(compressor, infos, self._costs_of(compressor), network.mpi_enabled(), self.policy)

    def _costs_of(self, compressor: Compressor) -> cost.Costs | None:
        return self.costs.get(self._state.workers(compressor))

    # ------------------------------------------------------------------------------------------- after the first step

    def settle(self, gradients: dict[str, torch.Tensor], rehearsals: Callable[[list[str], list[str]], list[Rehearsal]]) -> None:
        """After the first step, when all workers are here: agree on the order of gradients, and measure where something
        depends on it. In an elastic job, workers that join would wait for the others to do it, so nobody does.

        Arguments:
            gradients: examples of them.
            rehearsals: makes one for each of these policies, of gradients with these names.
        """
        self.settled = True
        state, network = self._state, self._state.network
        if network.ELASTIC or state.process_set.size() == 1:
            return
        names, slots = list(state.slots), list(state.slots.values())
        numbers = {name: i for i, name in enumerate(names)}
        order = torch.tensor([numbers[name] for name in dict.fromkeys([*self.arrivals, *reversed(names)])], dtype=torch.int32)
        network.broadcast(order, f"hvd_quant.order.{names[0]}.{len(names)}", state.process_set)
        self.order = [names[i] for i in order.tolist()]
        for workers in dict.fromkeys(slot.workers for slot in slots):
            compressors = dict.fromkeys(slot.compressor for slot in slots if slot.workers == workers)
            undecided = [compressor for compressor in compressors if _is_open(compressor, workers.across.size())]
            if undecided:
                self.costs[workers] = network.costs(workers, undecided, slots[0].parameter.device)
        self.made_for = None
        if self.costs:
            self.update()
            self.policy = self._fastest(gradients, rehearsals)
            self.made_for = None

    def _fastest(self, gradients: dict[str, torch.Tensor], rehearsals: Callable[[list[str], list[str]], list[Rehearsal]]) -> str:
        """The policy with which the exchange of all gradients takes least time, tried with numbers and state of its own."""
        state, network = self._state, self._state.network
        groups = [group for bucket in self.buckets for group in _together(bucket.slots)]
        undecided = [(compressor, _compressible(compressor, slots)) for (compressor, resumed), slots in groups if not resumed]
        policies = cost.worth_a_trial([(compressor, infos) for compressor, infos in undecided if infos], self._costs_of,
                                      network.mpi_enabled())
        if len(policies) == 1 or not gradients:
            return policies[0]
        examples = {name: torch.randn_like(gradients[name]) for name in self.order if name in gradients}
        rehearsed = rehearsals(policies, list(examples))
        rounds = [network.slowest([rehearse(examples) for rehearse in rehearsed], state.process_set)]
        for _ in range(cost.rehearsals(sum(rounds[0]))):  # in turn: what else the machine does changes with time
            rounds.append(network.slowest([rehearse(examples) for rehearse in rehearsed], state.process_set))
        times = [sorted(one)[len(one) // 4] for one in zip(*rounds[1:])]  # the first made connections and memory
        _log.info("exchanges were tried: %s", ", ".join(f"{policy} {1e3 * t:.1f} ms" for policy, t in zip(policies, times)))
        return policies[times.index(min(times))]


def _compressible(compressor: Compressor, slots: list[Slot]) -> list[TensorInfo]:
    """What is known of those that are compressed after the warm-up."""
    infos = [slot.typical(slot.now.at(step=compressor.dense_steps)) for slot in slots]
    # An elastic job that starts with one worker may get more.
    infos = [info.at(world=max(2, info.world)) for info in infos]
    return [info for info in infos if exchange.compressible(compressor, info)]


def _is_open(compressor: Compressor, world: int) -> bool:
    """Whether what is best depends on the network and the machine."""
    several = compressor.exchange == "auto" and not compressor.linear and world > 2
    return compressor.name != "none" and world > 1 and (compressor.only_if_faster or several)


def _together(slots: Iterable[Slot]) -> Iterable[tuple[Any, list[Slot]]]:
    """Slots by what decides as what they travel."""
    return buckets.by(slots, lambda slot: (slot.compressor, slot.resumed)).items()
