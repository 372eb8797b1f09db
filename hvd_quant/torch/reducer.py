"""The compression state of an optimizer's parameters, and which gradients travel together."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import Average, ProcessSet

from hvd_quant import exchange
from hvd_quant.compressors import Compressor, TensorInfo, memory
from hvd_quant.compressors.base import is_number
from hvd_quant.exchange import buckets, cost, rows
from hvd_quant.exchange.checkpoint import OWNER, check, of_this_worker, restored, saved
from hvd_quant.exchange.stats import Bucket as BucketCosts
from hvd_quant.exchange.stats import Stats
from hvd_quant.ops import torch as ops
from hvd_quant.registry import get_compressor
from hvd_quant.torch import network
from hvd_quant.torch.amp import running_scale
from hvd_quant.torch.exchanges import Cargo, Flight, SparseCargo, Workers

_log = logging.getLogger("hvd_quant")
_REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NONE = get_compressor("none")
_SHARED = 2**16
"""Dense gradients of fewer entries share one vector; copying larger ones would cost more than a collective of their own."""


@dataclasses.dataclass(eq=False)
class Slot:
    """What is kept for one parameter.

    Attributes:
        parameter: itself.
        compressor: what the user chose for it.
        info: what is known of it.
        index: its place among the parameters.
        state: name -> fp32 tensor; names that start with "owner." are of the range that this worker reduces for all.
        piece: (first, one past last) entry of what this worker encodes; all but with hierarchical exchange.
        owned: (first, one past last) entry of what it reduces for all, where it does.
        step: exchanges so far.
        averaged: exchanges until its parameter was averaged last.
        travels: as what it travels: ``compressor`` with one exchange, or fp16 or none where that is faster.
        kept: whether the state may hold a part of a gradient.
        resumed: as what it travelled when a checkpoint was written, from which training is to go on bit for bit.
    """

    parameter: torch.Tensor
    compressor: Compressor
    info: TensorInfo
    index: int
    state: dict[str, torch.Tensor]
    piece: tuple[int, int]
    owned: tuple[int, int] = (0, 0)
    step: int = 0
    averaged: int = 0
    travels: Compressor = _NONE
    kept: bool = False
    resumed: Compressor | None = None

    @property
    def worker_state(self) -> dict[str, torch.Tensor]:
        return {key: value for key, value in self.state.items() if not key.startswith(OWNER)}

    @property
    def owner_state(self) -> dict[str, torch.Tensor]:
        return {key.removeprefix(OWNER): value for key, value in self.state.items() if key.startswith(OWNER)}


@dataclasses.dataclass(eq=False)
class Bucket:
    """Slots whose gradients travel together, and those gradients that are there, with their versions."""

    slots: list[Slot]
    arrived: dict[Slot, tuple[torch.Tensor, int]] = dataclasses.field(default_factory=dict)
    flights: list[Flight] = dataclasses.field(default_factory=list)
    started: bool = False

    def complete(self) -> bool:
        """Whether all gradients are there. One of a parameter that is frozen now may come with another backward pass before
        the step, so its bucket starts in :meth:`Reducer.finish`."""
        return all(slot in self.arrived for slot in self.slots)


_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def compresses() -> bool:
    """Whether anything in this process travels otherwise than dense, now or after a warm-up."""
    return any(slot.travels.name != "none" for reducer in _reducers for slot in reducer._slots.values())


class Reducer:
    """Reduces named gradients and owns their state.

    Arguments:
        named_parameters: (name, parameter) pairs, in the same order on all workers.
        select: from a name to its compressor.
        op: Average or Sum.
        predivide: Horovod's gradient_predivide_factor, for dense gradients.
        process_set: the workers to reduce over.
        bucket_bytes: dense bytes of gradients that travel together.
        number: tells the collectives from those of another reducer with the same names.
        network: the module by which they travel: :mod:`hvd_quant.torch.network`, or one with the same names.

    Raises:
        TypeError: for a parameter that is not real floating point.
        ValueError: for hierarchical exchange where it can't work.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]], select: Callable[[str], Compressor],
                 op: int, predivide: float, process_set: ProcessSet, bucket_bytes: int = buckets.BUCKET_BYTES, number: int = 0,
                 network: Any = network) -> None:
        self.op, self.predivide, self.process_set, self.number = op, predivide, process_set, number
        self.stats, self._network = Stats(), network
        self.groups: list[list[str]] = []
        self._select, self._bucket_bytes = select, bucket_bytes
        self._slots: dict[str, Slot] = {}
        self._warned: set[str] = set()
        self._flying: list[Flight] = []
        self._arrivals: list[str] = []  # of gradients in the first step, here
        self._order: list[str] = []  # and on the first worker, for all
        self._costs: dict[Workers, cost.Costs] = {}  # what was measured
        self._policy = cost.CHEAPEST
        self._settled = False
        self._plan: dict[Slot, Bucket] = {}
        self._planned_for: Any = None
        self._by_host: Workers | None = None
        self.loss_scale: float | None = None  # until it is told
        self._joined = False  # the other workers of an elastic job, whose counts this one has then
        self._amid = False  # a step: gradients have arrived that are not reduced yet
        self._grown = False  # the plan, by parameters that came since it was made
        _reducers.add(self)
        if process_set.included():
            for index, (name, p) in enumerate(named_parameters):
                self.add(name, p, index)

    def add(self, name: str, p: torch.Tensor, index: int) -> None:
        """Take in one more parameter.

        Arguments:
            index: its place among all parameters, frozen ones too: who owns which of its ranges depends on it.
        """
        if p.dtype not in _REAL:
            raise TypeError(f"parameter {name} is {p.dtype}; gradients of {', '.join(map(str, _REAL))} can be reduced: "
                            "leave it out of the optimizer, or use compression='none'")
        info, compressor = TensorInfo.whole(name, p.shape), self._select(name)
        self._workers(compressor)  # all workers are here when they wrap their optimizers
        self._slots[name] = Slot(p, compressor, info, index, {}, (0, info.numel))

    # ------------------------------------------------------------------------------------------------- from the hooks

    def ready(self, name: str, grad: torch.Tensor) -> None:
        """A gradient is there. What travels with it starts when it was the last one, and what has arrived goes on."""
        slot, bucket = self._at(name)
        if grad.is_sparse and rows.goes_whole(slot.compressor):
            grad = grad.to_dense()
        bucket.arrived[slot] = grad, grad._version
        if not bucket.started and bucket.complete():
            self._start(bucket)
        self._progress()

    def _at(self, name: str) -> tuple[Slot, Bucket]:
        self.plan()
        if not self._amid:
            self._require_joined()
            self._follow_scaler()
        self._amid = True
        slot = self._slots[name]
        if not self._settled:
            self._arrivals.append(name)
        return slot, self._plan[slot]

    def _start(self, bucket: Bucket) -> None:
        bucket.started = True
        # In the bucket's order: that of arrival may differ between workers.
        for flight in self._launch({slot: bucket.arrived[slot] for slot in bucket.slots if slot in bucket.arrived}):
            bucket.flights.append(flight)

    # ---------------------------------------------------------------------------------------------------- synchronize

    def finish(self) -> dict[str, torch.Tensor]:
        """Start what has not been, wait for everything, and return the reduced gradients by name, dense ones in the memory of
        those that were given.

        Raises:
            RuntimeError: if a gradient was changed since it was given.
            hvd_quant.wire.PayloadError: on all workers, for a payload that is damaged, or a worker that failed.
            HorovodInternalError: if Horovod was reset.
        """
        self.plan()
        planned = list(dict.fromkeys(self._plan.values()))
        for bucket in planned:
            if not bucket.started:
                self._start(bucket)
        flights = [flight for bucket in planned for flight in bucket.flights]
        if self._network.IN_ORDER:
            flights.sort(key=self._flying.index)
        self._forget()
        if self.complete(flights):
            self._decide_together([one.slot for flight in flights if flight.kind not in ("dense", "sparse") for one in flight.cargo
                                   if one.compressor.across_tensors])
        if flights and not self._settled:
            self._settle({one.info.name: one.grad for flight in flights for one in flight.cargo if not isinstance(one, SparseCargo)})
        if self._grown:
            self._grown, self._planned_for = False, None
        return {one.info.name: one.grad for flight in flights for one in flight.cargo}

    def _decide_together(self, slots: list[Slot]) -> None:
        """What the next step's compressors decide for tensors that have travelled in a step together; those on one device."""
        groups = _by(slots, lambda slot: (slot.compressor, slot.compressor.at(slot.step), slot.parameter.device))
        for (_, stage, _), alike in groups.items():
            if stage is not None:  # a dense one has nothing to decide
                stage.between_steps(ops, [(self._info(slot).part(*slot.piece), slot.worker_state) for slot in alike])

    def complete(self, flights: list[Flight]) -> bool:
        """Finish flights in order, and tell whether they count.

        Where something is kept between steps, gradients are written when everything is here. If a value was not finite
        somewhere, the step is void on all workers: all state is as before it, and all gradients are NaN. After an error, the
        others are waited for and taken back too, so that none stays in flight and no residual lacks what was not received;
        then the error is raised.
        """
        together = any(one.slot.state for flight in flights for one in flight.cargo)
        failure: Exception | None = None

        def go(on: Callable[..., None], flight: Flight, *arguments: Any) -> None:
            nonlocal failure
            try:
                flight.cancelled |= failure is not None
                on(flight, *arguments)
            except Exception as error:
                failure = failure or error

        for flight in flights:
            go(self._wait, flight)
            if not together:
                go(Flight.land, flight, False)
        void = together and failure is None and not all(flight.finite for flight in flights if not flight.cancelled)
        if together:
            for flight in flights:
                go(Flight.land, flight, void)
        if failure is not None:
            raise failure
        return not void

    def cancel(self) -> None:
        """Wait for what has been started, and leave gradients and state as if it had not been."""
        flights = [flight for bucket in dict.fromkeys(self._plan.values()) for flight in bucket.flights]
        self._forget()
        for flight in flights:
            flight.cancelled = True
        try:
            self.complete(flights)
        except self._network.Error:
            pass  # what was lost needs no cancelling

    def _forget(self) -> None:
        self._amid = False
        for bucket in self._plan.values():
            bucket.arrived, bucket.flights, bucket.started = {}, [], False

    def _wait(self, flight: Flight) -> None:
        pause = 5e-5
        try:
            while not (flight.here or flight.done):
                if flight.arrived():
                    flight.advance()
                elif not self._progress():
                    with flight.timed("wait"):
                        time.sleep(pause)
                        pause = min(1.5 * pause, 5e-4)
        finally:
            self._flying.remove(flight)
        if flight.failure is not None:
            raise flight.failure

    def _progress(self) -> bool:
        """Go on with what has arrived of exchanges of several collectives, but for writing gradients; whether there was any.
        It never waits: two workers that take different branches of a model meet their buckets in different orders. Where the
        network pairs collectives by their order, none overtakes an exchange that was started before it."""
        went_on = False
        for flight in self._flying:
            if flight.done or flight.landing:
                continue
            if flight.arrived():
                flight.advance()
                went_on = True
            elif self._network.IN_ORDER:
                break
        return went_on

    # ------------------------------------------------------------------------------------- what travels how, with what

    def start(self, name: str, grad: torch.Tensor) -> Flight:
        """Start reducing one gradient by itself, for Horovod's stock optimizer; :meth:`complete` finishes it."""
        self.plan()
        self._follow_scaler()
        return next(self._launch({self._slots[name]: (grad, grad._version)}))

    def start_unless_dense(self, name: str, grad: torch.Tensor) -> Flight | None:
        """Like :meth:`start`, but leave what goes dense to somebody else's allreduce and return None."""
        self.plan()
        slot = self._slots[name]
        info = self._info(slot)
        if self._kind(slot, info) != "dense":
            return self.start(name, grad)
        self.stats.count(name, "dense", info.numel, grad.numel() * grad.element_size(), info.world)
        slot.step += 1
        return None

    def _launch(self, gradients: dict[Slot, tuple[torch.Tensor, int]]) -> Iterator[Flight]:
        together: dict[Any, list[Cargo]] = {}
        gathered: collections.Counter[Any] = collections.Counter()  # bytes that a collective moves so far, which MPI's counts limit
        begun: collections.Counter[Any] = collections.Counter()
        for slot, (grad, version) in gradients.items():
            info = self._info(slot)
            kind = self._kind(slot, info)
            travels = slot.travels.at(slot.step) or _NONE
            slot.step += 1
            scale = self.loss_scale or 1.0
            if grad.is_sparse:
                together["sparse", travels, slot] = [self._sparse(slot, travels, scale, info, grad, version, kind)]
                continue
            cargo = Cargo(slot, travels, self._local(slot.compressor)[1], scale, info, grad, version)
            if kind == "dense":
                key = (kind, grad.dtype == torch.float64, grad.device, slot if grad.numel() >= _SHARED else None)
            else:
                way, nbytes = (kind, travels, grad.device), exchange.gathered_bytes(kind, travels.payload_bytes(info), info.world)
                if gathered[way] + nbytes >= exchange.MPI_COUNT_LIMIT:
                    begun[way], gathered[way] = begun[way] + 1, 0
                gathered[way] += nbytes
                key = (*way, begun[way])
            together.setdefault(key, []).append(cargo)
        for (kind, travels, *_), cargo in together.items():
            name = f"hvd_quant.{kind}.{cargo[0].info.name}{f'.{self.number}' if self.number else ''}"
            costs = self.stats.buckets.setdefault(name, BucketCosts())
            costs.exchange, costs.compressor = kind, travels.spec if kind != "dense" else "none"
            costs.tensors = [one.info.name for one in cargo]
            flight = Flight(name, kind, cargo, self._workers(cargo[0].compressor), self.op, self.predivide, self.stats,
                            self._network)
            self._flying.append(flight)
            yield flight

    def _sparse(self, slot: Slot, travels: Compressor, scale: float, info: TensorInfo, grad: torch.Tensor, version: int, kind: str
                ) -> SparseCargo:
        if kind != "dense" and not rows.goes_by_row(travels, info):
            kind = "dense"
            if info.name not in self._warned:
                self._warned.add(info.name)
                warnings.warn(rows.uncompressed_warning(travels, info.name), stacklevel=2)
        return SparseCargo(slot, travels if kind != "dense" else _NONE, scale, info, grad, version, kind)

    def _workers(self, compressor: Compressor) -> Workers:
        if not compressor.hierarchical:
            return Workers(self.process_set, self.process_set)
        if self._by_host is None:
            self._by_host = self._network.workers_by_host(self.process_set)
        return self._by_host

    def _local(self, compressor: Compressor) -> tuple[int, int]:
        """This worker's place among those of its host that exchange different parts of a tensor, and how many they are."""
        return (0, 1) if compressor.allreduced else self._workers(compressor).local

    def _info(self, slot: Slot) -> TensorInfo:
        """What is known of the next exchange; elastic jobs change their size between steps."""
        across = self._workers(slot.compressor).across
        return slot.info.at(step=slot.step, rank=across.rank(), world=across.size())

    def _kind(self, slot: Slot, info: TensorInfo) -> str:
        if self.process_set.size() == 1:
            return "dense"
        return exchange.choose(slot.travels, self._typical(slot, info), self._network.mpi_enabled())

    def _typical(self, slot: Slot, info: TensorInfo) -> TensorInfo:
        """The largest part of a tensor that a worker of this host exchanges: all of them have to choose alike."""
        if not slot.compressor.hierarchical:
            return info
        places = self._local(slot.compressor)[1]
        pieces = exchange.ranges(info.numel, slot.compressor.range_multiple, places, slot.index)
        return info.part(*max(pieces, key=lambda piece: piece[1] - piece[0]))

    def plan(self) -> None:
        """Make buckets, and decide how each travels, where parameters came, or workers came or went."""
        if self._amid and len(self._plan) == len(self._slots):
            return
        whose = self._whose()
        if not self.process_set.included() or whose == self._planned_for and len(self._plan) == len(self._slots):
            return
        if whose == self._planned_for:
            # Parameters that come, unfrozen, travel by themselves for this step, on all workers: some may be amid it already.
            self._fill([name for name, slot in self._slots.items() if slot not in self._plan])
            self._grown = True
            return
        self._planned_for, self._plan, self.stats.buckets = whose, {}, {}
        # Until it is known, the last parameters are taken to get their gradients first.
        self._fill(list(dict.fromkeys([*self._order, *reversed(self._slots)])))

    def _fill(self, names: list[str]) -> None:
        slots = {name: self._slots[name] for name in names}
        filled = [[slots.pop(name) for name in group if name in slots] for group in self.groups]
        # Sums in fp32 or fp16 depend on what is summed along, in their last bits, so that does not depend on the order of
        # gradients. Payloads decode to the same wherever they are.
        payloads, sums, small = [], [], []
        for slot in slots.values():
            if slot.info.numel < _SHARED and not exchange.compressible(slot.compressor, self._typical(slot, slot.info)):
                small.append(slot)
            else:
                (sums if slot.compressor.linear else payloads).append(slot)
        for kind in (payloads, sums, small):
            if kind is not payloads:
                kind.sort(key=lambda slot: -slot.index)
            filled += buckets.fill({slot: 4 * slot.info.numel for slot in kind}, self._bucket_bytes)
        for members in filled:
            self._plan.update(dict.fromkeys(members, Bucket(members)))
            for (compressor, resumed), alike in _together(members):
                travels = resumed or self._decide(compressor, alike)
                for slot in alike:
                    slot.travels = travels
                    self._make_room(slot)

    def _compressible(self, compressor: Compressor, slots: list[Slot]) -> list[TensorInfo]:
        """What is known of those that are compressed after the warm-up."""
        infos = [self._typical(slot, self._info(slot).at(step=compressor.dense_steps)) for slot in slots]
        # An elastic job that starts with one worker may get more.
        infos = [info.at(world=max(2, info.world)) for info in infos]
        return [info for info in infos if exchange.compressible(compressor, info)]

    def _decide(self, compressor: Compressor, slots: list[Slot]) -> Compressor:
        infos = self._compressible(compressor, slots)
        if not infos:
            return _NONE
        if compressor.only_if_faster and not self._settled and not self._network.ELASTIC:
            return _NONE  # until it is known, after the first step
        if compressor.only_if_faster and self._network.ELASTIC:
            _log.warning("%s: in an elastic job the network is not measured, since workers that join would wait for the others; "
                         "gradients are compressed", compressor.spec)
            compressor = dataclasses.replace(compressor, only_if_faster=False)
        return cost.decide(compressor, infos, self._costs.get(self._workers(compressor)), self._network.mpi_enabled(), self._policy)

    def _settle(self, gradients: dict[str, torch.Tensor]) -> None:
        """After the first step, when all workers are here: agree on the order of gradients, and measure where something
        depends on it. In an elastic job, workers that join would wait for the others to do it, so nobody does.

        Arguments:
            gradients: examples of them.
        """
        self._settled = True
        if self._network.ELASTIC or self.process_set.size() == 1:
            return
        names = list(self._slots)
        numbers = {name: i for i, name in enumerate(names)}
        order = torch.tensor([numbers[name] for name in dict.fromkeys([*self._arrivals, *reversed(names)])], dtype=torch.int32)
        self._network.broadcast(order, f"hvd_quant.order.{names[0]}", self.process_set)
        self._order = [names[i] for i in order.tolist()]
        for workers in {self._workers(slot.compressor): None for slot in self._slots.values()}:
            undecided = [c for c in {slot.compressor: None for slot in self._slots.values()}
                         if self._workers(c) == workers and _is_open(c, workers.across.size())]
            if undecided:
                self._costs[workers] = self._network.costs(workers, undecided, self._slots[names[0]].parameter.device)
        self._planned_for = None
        if self._costs:
            self.plan()
            self._policy = self._fastest(gradients)
            self._planned_for = None

    def _fastest(self, gradients: dict[str, torch.Tensor]) -> str:
        """The policy with which the exchange of all gradients takes least time, tried with numbers and state of its own.

        Arguments:
            gradients: examples of them.
        """
        groups = [group for bucket in dict.fromkeys(self._plan.values()) for group in _together(bucket.slots)]
        undecided = [(compressor, self._compressible(compressor, slots)) for (compressor, resumed), slots in groups if not resumed]
        policies = cost.worth_a_trial([(compressor, infos) for compressor, infos in undecided if infos],
                                      lambda compressor: self._costs.get(self._workers(compressor)), self._network.mpi_enabled())
        if len(policies) == 1 or not gradients:
            return policies[0]
        examples = {name: torch.randn_like(gradients[name]) for name in self._order if name in gradients}
        rehearsals = self._rehearsals(policies, list(examples))
        rounds = [self._network.slowest([rehearsal._rehearse(examples) for rehearsal in rehearsals], self.process_set)]
        for _ in range(cost.rehearsals(sum(rounds[0]))):  # in turn: what else the machine does changes with time
            rounds.append(self._network.slowest([rehearsal._rehearse(examples) for rehearsal in rehearsals], self.process_set))
        times = [sorted(one)[len(one) // 4] for one in zip(*rounds[1:])]  # the first made connections and memory
        _log.info("exchanges were tried: %s", ", ".join(f"{policy} {1e3 * t:.1f} ms" for policy, t in zip(policies, times)))
        return policies[times.index(min(times))]

    def _rehearsals(self, policies: list[str], names: list[str]) -> list[Reducer]:
        """Reducers of the same parameters, one a policy, past warm-up; they share a state, which is not this one's."""
        rehearsals, state = [], {name: {} for name in names}
        for policy in policies:
            rehearsal = Reducer([(name, self._slots[name].parameter) for name in names], self._select, self.op, self.predivide,
                                self.process_set, self._bucket_bytes, self.number, self._network)
            rehearsal.groups, rehearsal._order, rehearsal._costs = self.groups, names, self._costs
            rehearsal._policy, rehearsal._settled = policy, True
            for name, slot in rehearsal._slots.items():
                slot.step, slot.state = max(slot.compressor.dense_steps, slot.compressor.stages()[-1][0]), state[name]
            rehearsal.plan()
            state = {name: state[name] | slot.state for name, slot in rehearsal._slots.items()}
            rehearsals.append(rehearsal)
        return rehearsals

    def _rehearse(self, gradients: dict[str, torch.Tensor]) -> float:
        """Seconds of exchanging copies of gradients."""
        given = {name: grad.clone() for name, grad in gradients.items()}
        self._network.slowest([0.0], self.process_set)  # all start together
        start = time.perf_counter()
        for name, grad in given.items():
            self.ready(name, grad)
        self.finish()
        if grad.is_cuda:
            torch.cuda.synchronize(grad.device)
        return time.perf_counter() - start

    # ---------------------------------------------------------------------------------------------------------- state

    def _make_room(self, slot: Slot) -> None:
        """Allocate what is missing, and take in what was kept for a range that this worker no longer owns."""
        info, coder = self._info(slot), slot.compressor if slot.travels.name == "none" else slot.travels
        # After the warm-up state is needed, also where an elastic job starts with one worker.
        compressible = exchange.compressible(coder, self._typical(slot, info.at(world=max(2, info.world))))
        place, places = self._local(slot.compressor)
        first, last = slot.piece = exchange.ranges(info.numel, slot.compressor.range_multiple, places, slot.index)[place]
        piece = info.part(first, last)
        shapes = slot.compressor.state_shapes(piece) if compressible else memory.of(slot.compressor).always(info)
        owned = (0, 0)
        if compressible and slot.travels.exchange == "sra" and info.world > 1:
            owned = self._range_of(slot, info)
            of_owner = slot.compressor.state_shapes(info.part(*owned), role="owner")
            shapes |= {OWNER + key: shape for key, shape in of_owner.items()}
        if slot.owned not in ((0, 0), owned):
            kept = slot.state.pop(f"{OWNER}residual", None)
            a, b = slot.owned
            if kept is not None and not first <= a <= b <= last:
                _log.warning("compression state of %s: what was kept of entries %d to %d, which other workers exchange now, is dropped",
                             info.name, a, b)
            elif kept is not None and "residual" in slot.state:
                # An owner keeps means, and of this worker's residual a mean gets one part in `world`.
                slot.state["residual"][a - first:b - first].add_(kept, alpha=info.world)
                slot.kept = True
            elif kept is not None and "estimate" in slot.state:
                # It is missing from the mean of the estimates, as if this worker's were that much smaller.
                slot.state["estimate"][a - first:b - first].sub_(kept, alpha=info.world)
        slot.owned = owned
        old, slot.state = slot.state, {}
        for key, shape in shapes.items():
            fits = key in old and tuple(old[key].shape) == tuple(shape)
            slot.state[key] = old[key] if fits else torch.zeros(shape, dtype=torch.float32, device=slot.parameter.device)

    def _range_of(self, slot: Slot, info: TensorInfo) -> tuple[int, int]:
        """The range of a tensor that this worker reduces for all."""
        first, last = slot.piece
        a, b = exchange.ranges(last - first, slot.compressor.range_multiple, info.world, slot.index)[info.rank]
        return first + a, first + b

    def set_loss_scale(self, scale: float) -> None:
        """Say by what the loss is multiplied from the next backward on. What is kept of gradients is multiplied along, and what
        compressors are told in units of the gradient counts for the unscaled one.

        Arguments:
            scale: the same on all workers.

        Raises:
            ValueError: for what is no such number.
            RuntimeError: amid a step whose gradients are of another scale.
        """
        if not (is_number(scale) and 0 < scale < math.inf):
            raise ValueError(f"a loss scale of {scale!r} is not accepted; give a finite number above 0")
        factor = scale / (self.loss_scale or 1.0)
        if factor != 1 and self._amid:
            raise RuntimeError(f"the loss scale can't become {scale:g} now, since gradients of a loss times {self.loss_scale or 1.0:g} "
                               "are being exchanged: call set_loss_scale before backward, or after synchronize()")
        if factor != 1:
            for slot in self._slots.values():
                for value in slot.state.values():
                    value.mul_(factor)
        self.loss_scale = scale

    def _follow_scaler(self) -> None:
        scale = running_scale()
        if scale is not None:
            self.set_loss_scale(scale)

    def state_dict(self) -> dict[str, Any]:
        """Residuals and step counts by parameter name, as what they travel, and whose they are."""
        self.plan()
        state = saved(self._slots, torch.clone, **self._whose()) | {"loss_scale": self.loss_scale or 1.0}
        for name, slot in self._slots.items():
            state["tensors"][name] |= {"travels": slot.travels.spec, "averaged": slot.averaged}
        return state

    def _whose(self) -> dict[str, int | None]:
        if not self.process_set.included():
            return {"rank": None, "world": None}
        return {"rank": self.process_set.rank(), "world": self.process_set.size()}

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Take up what :meth:`state_dict` returned, or of a list of what it returned on all workers this worker's part; what no
        longer fits is reset, with a line in the log.

        Raises:
            ValueError: if it is of another worker, number of workers, or format; then nothing is changed.
        """
        self.plan()
        state = of_this_worker(state, self.op == Average, **self._whose())
        check(state, **self._whose())
        found = state["tensors"]
        for name, slot in self._slots.items():
            kept = found.get(name, {"state": {}})
            owned = [key for key in kept["state"] if key.startswith(OWNER)]
            mine = [key for key in ("residual", "estimate") if key in slot.state]
            fits = all(key in kept["state"] and kept["state"][key].shape == slot.state[key].shape for key in mine)
            if owned and fits and "owned" in kept:
                # If another worker owns that range now, the next plan gives it back.
                slot.owned = tuple(kept["owned"])
                slot.state |= {key: torch.zeros_like(kept["state"][key], device=slot.parameter.device) for key in owned}
        for slot, step, values in restored(state, self._slots, **self._whose()):
            slot.step, slot.kept = step, bool(values)
            kept = found.get(slot.info.name, {})
            slot.averaged = kept.get("averaged", 0)
            same = kept.get("compressor") == slot.compressor.spec
            goes_on = same and kept.get("travels", "none") != "none" and not self._network.ELASTIC
            slot.resumed = get_compressor(kept["travels"]) if goes_on else None
            for key, value in slot.state.items():
                value.copy_(values[key]) if key in values else value.zero_()
        told, self.loss_scale = self.loss_scale, state.get("loss_scale", 1.0)
        if told is not None:
            self.set_loss_scale(told)
        self._planned_for = None

    # -------------------------------------------------------------------------------------------------------- elastic jobs

    def snapshot(self) -> dict[str, Any]:
        """What :meth:`go_back` takes: copies of all that is kept of gradients on this worker."""
        slots = {name: (slot.step, slot.averaged, slot.kept, slot.piece, slot.owned, {key: value.clone() for key, value in slot.state.items()})
                 for name, slot in self._slots.items()}
        return {"loss_scale": self.loss_scale, "slots": slots}

    def go_back(self, snapshot: dict[str, Any]) -> None:
        """Return to a snapshot, which may be of another number of workers: then ranges move with the next plan."""
        self.loss_scale = snapshot["loss_scale"]
        for name, (step, averaged, kept, piece, owned, state) in snapshot["slots"].items():
            slot = self._slots[name]
            slot.step, slot.averaged, slot.kept, slot.piece, slot.owned = step, averaged, kept, piece, owned
            slot.state = {key: value.clone() for key, value in state.items()}
        self._planned_for = None

    def join(self) -> None:
        """Take worker 0's numbers of steps, as all workers of an elastic job do when some have come or gone. "ef21" begins anew,
        since newcomers lack the mean of the estimates."""
        counts = broadcast_object({name: (slot.step, slot.averaged) for name, slot in self._slots.items()}, name="hvd_quant.join")
        for name, slot in self._slots.items():
            slot.step, slot.averaged = counts.get(name, (0, 0))
            if slot.compressor.memory == "ef21":
                slot.step, slot.kept = 0, False
                for value in slot.state.values():
                    value.zero_()
        self._joined, self._planned_for = True, None

    def _require_joined(self) -> None:
        if self._network.ELASTIC and not self._joined:
            for slot in self._slots.values():
                slot.compressor.require_no_counts()

    def residual_norms(self) -> dict[str, float]:
        """The 2-norm of what is kept of each parameter's gradients, an owner's included."""
        kept = {name: [value for key, value in slot.state.items() if key.endswith("residual")] for name, slot in self._slots.items()}
        return {name: sum(float(value.double().square().sum()) for value in values) ** 0.5 for name, values in kept.items() if values}

    @property
    def compressors(self) -> dict[str, Compressor]:
        """What the user chose, by parameter."""
        return {name: slot.compressor for name, slot in self._slots.items()}

    @property
    def averaged(self) -> bool:
        """Whether no parameter may differ between workers, or none has moved since it was averaged last."""
        return all(slot.step == slot.averaged for slot in self._slots.values() if slot.compressor.averaging)

    def to_average(self, all: bool = False) -> list[tuple[str, torch.Tensor]]:
        """The parameters whose values are to be averaged over the workers now, as their compressors' ``average_every`` says, and
        as many workers take it; what is returned counts as averaged.

        Arguments:
            all: those that may differ between workers, however long ago they were averaged.
        """
        due = [slot for slot in self._slots.values() if slot.compressor.averaging
               and slot.step - slot.averaged >= (1 if all else slot.compressor.averaging)]
        for slot in due:
            slot.averaged = slot.step
        return [(slot.info.name, slot.parameter) for slot in due]


def _is_open(compressor: Compressor, world: int) -> bool:
    """Whether what is best depends on the network and the machine."""
    several = compressor.exchange == "auto" and not compressor.linear and world > 2
    return compressor.name != "none" and world > 1 and (compressor.only_if_faster or several)


def _together(slots: Iterable[Slot]) -> Iterable[tuple[Any, list[Slot]]]:
    """Slots by what decides as what they travel."""
    return _by(slots, lambda slot: (slot.compressor, slot.resumed)).items()


def _by(slots: Iterable[Slot], key: Callable[[Slot], Any]) -> dict[Any, list[Slot]]:
    groups: dict[Any, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(key(slot), []).append(slot)
    return groups
