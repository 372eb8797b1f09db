"""A gradient's way from the hook to the optimizer: :meth:`Reducer.ready` starts its exchange with those that travel with it, and
:meth:`Reducer.finish` returns what was reduced.

What travels together is in :mod:`hvd_quant.torch.plans`, what is kept in :mod:`hvd_quant.torch.state`, the exchanges in
:mod:`hvd_quant.torch.exchanges`, what they do with a gradient in :mod:`hvd_quant.torch.cargo` and :mod:`hvd_quant.torch.rows`.
"""

from __future__ import annotations

import collections
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet

from hvd_quant import exchange
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange import buckets, rows
from hvd_quant.exchange.stats import Bucket as BucketCosts
from hvd_quant.exchange.stats import Stats
from hvd_quant.ops import torch as ops
from hvd_quant.registry import get_compressor
from hvd_quant.torch import network
from hvd_quant.torch.cargo import Cargo
from hvd_quant.torch.exchanges import ROUTES
from hvd_quant.torch.flights import Flight
from hvd_quant.torch.plans import SHARED, Bucket, Plan, Rehearsal
from hvd_quant.torch.rows import SparseCargo
from hvd_quant.torch.state import Slot, State

_NONE = get_compressor("none")


class Reducer:
    """Reduces named gradients.

    Arguments:
        named_parameters: (name, parameter) pairs, in the same order on all workers.
        select: from a name to its compressor.
        op: Average or Sum.
        predivide: Horovod's gradient_predivide_factor, for dense gradients.
        process_set: the workers to reduce over.
        bucket_bytes: dense bytes of gradients that travel together.
        number: tells the collectives from those of another reducer with the same names.
        network: the module by which they travel: :mod:`hvd_quant.torch.network`, or one with the same names.

    Attributes:
        state: what is kept for the parameters; more are added to it.
        plan: which gradients travel together, and as what.
        stats: what the exchanges cost so far.

    Raises:
        TypeError, ValueError: as :meth:`State.add`.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]], select: Callable[[str], Compressor],
                 op: int, predivide: float, process_set: ProcessSet, bucket_bytes: int = buckets.BUCKET_BYTES, number: int = 0,
                 network: Any = network) -> None:
        self.op, self.predivide, self.process_set, self.number = op, predivide, process_set, number
        self.stats, self._network = Stats(), network
        self.state = State(select, op, process_set, network)
        self.plan = Plan(self.state, self.stats, bucket_bytes)
        self._warned: set[str] = set()
        self._flying: list[Flight] = []
        if process_set.included():
            for index, (name, p) in enumerate(named_parameters):
                self.state.add(name, p, index)

    # ------------------------------------------------------------------------------------------------- from the hooks

    def ready(self, name: str, grad: torch.Tensor) -> None:
        """A gradient is there. What travels with it starts when it was the last one, and what has arrived goes on."""
        self.plan.update()
        if not self.state.amid:
            self.state.require_joined()
            self.state.follow_scaler()
        self.state.amid = True
        slot = self.state.slots[name]
        bucket = self.plan.bucket_of[slot]
        if not self.plan.settled:
            self.plan.arrivals.append(name)
        if grad.is_sparse and rows.goes_whole(slot.compressor):
            grad = grad.to_dense()
        bucket.arrived[slot] = grad, grad._version
        if not bucket.started and bucket.complete():
            self._start(bucket)
        self._progress()

    def _start(self, bucket: Bucket) -> None:
        bucket.started = True
        # In the bucket's order: that of arrival may differ between workers.
        for flight in self._launch({slot: bucket.arrived[slot] for slot in bucket.slots if slot in bucket.arrived}):
            bucket.flights.append(flight)

    def _launch(self, gradients: dict[Slot, tuple[torch.Tensor, int]]) -> Iterator[Flight]:
        together: dict[Any, list[Cargo]] = {}
        gathered: collections.Counter[Any] = collections.Counter()  # bytes that a collective moves so far, which MPI's counts limit
        begun: collections.Counter[Any] = collections.Counter()
        for slot, (grad, version) in gradients.items():
            info = slot.now
            kind = self.plan.kind(slot, info)
            travels = slot.travels.at(slot.step) or _NONE
            slot.step += 1
            scale = self.state.loss_scale or 1.0
            if grad.is_sparse:
                together["sparse", travels, slot] = [self._sparse(slot, travels, scale, info, grad, version, kind)]
                continue
            cargo = Cargo(slot, travels, slot.local[1], scale, info, grad, version)
            if kind == "dense":
                key = (kind, grad.dtype == torch.float64, grad.device, slot if grad.numel() >= SHARED else None)
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
            flight = Flight(name, kind, ROUTES[kind], cargo, self.state.workers(cargo[0].compressor), self.op, self.predivide, self.stats,
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

    # ---------------------------------------------------------------------------------------------------- synchronize

    def finish(self) -> dict[str, torch.Tensor]:
        """Start what has not been, wait for everything, and return the reduced gradients by name, dense ones in the memory of
        those that were given.

        Raises:
            RuntimeError: if a gradient was changed since it was given.
            hvd_quant.wire.PayloadError: on all workers, for a payload that is damaged, or a worker that failed.
            HorovodInternalError: if Horovod was reset.
        """
        self.plan.update()
        for bucket in self.plan.buckets:
            if not bucket.started:
                self._start(bucket)
        flights = [flight for bucket in self.plan.buckets for flight in bucket.flights]
        if self._network.IN_ORDER:
            flights.sort(key=self._flying.index)
        self._forget()
        if self.complete(flights):
            self._decide_together([one.slot for flight in flights if flight.kind not in ("dense", "sparse") for one in flight.cargo
                                   if one.compressor.across_tensors])
        if flights and not self.plan.settled:
            self.plan.settle({one.info.name: one.grad for flight in flights for one in flight.cargo
                              if not isinstance(one, SparseCargo)}, self._rehearsals)
        self.plan.end_step()
        return {one.info.name: one.grad for flight in flights for one in flight.cargo}

    def _decide_together(self, slots: list[Slot]) -> None:
        """What the next step's compressors decide for tensors that have travelled in a step together; those on one device."""
        groups = buckets.by(slots, lambda slot: (slot.compressor, slot.compressor.at(slot.step), slot.parameter.device))
        for (_, stage, _), alike in groups.items():
            if stage is not None:  # a dense one has nothing to decide
                stage.between_steps(ops, [(slot.now.part(*slot.piece), slot.worker_state) for slot in alike])

    def complete(self, flights: list[Flight]) -> bool:
        """Finish flights in order, and tell whether they count.

        Where something is kept between steps, gradients are written when everything is here. If a value was not finite
        somewhere, the step is void on all workers: all state is as before it, and all gradients are NaN. After an error, those that
        haven't landed are waited for and taken back too, so that none stays in flight and no residual lacks what was not
        received; then the error is raised.
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
        """Wait for what has been started, and take back what was encoded. Gradients that Horovod reduced in their own memory stay
        reduced, so backward has to make them anew, and steps stay counted."""
        flights = [flight for bucket in self.plan.buckets for flight in bucket.flights]
        self._forget()
        for flight in flights:
            flight.cancelled = True
        try:
            self.complete(flights)
        except self._network.Error:
            pass  # what was lost needs no cancelling

    def _forget(self) -> None:
        self.state.amid = False
        for bucket in self.plan.buckets:
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

    # ------------------------------------------------------------------------------------ for Horovod's stock optimizer

    def start(self, name: str, grad: torch.Tensor) -> Flight:
        """Start reducing one gradient by itself; :meth:`complete` finishes it."""
        self.plan.update()
        self.state.follow_scaler()
        return next(self._launch({self.state.slots[name]: (grad, grad._version)}))

    def start_unless_dense(self, name: str, grad: torch.Tensor) -> Flight | None:
        """Like :meth:`start`, but leave what goes dense to somebody else's allreduce and return None."""
        self.plan.update()
        slot = self.state.slots[name]
        info = slot.now
        if self.plan.kind(slot, info) != "dense":
            return self.start(name, grad)
        self.stats.count(name, "dense", info.numel, grad.numel() * grad.element_size(), info.world)
        slot.step += 1
        return None

    # ------------------------------------------------------------------------------------------------- what is kept

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`State.state_dict`."""
        self.plan.update()
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See :meth:`State.load_state_dict`.

        Raises:
            RuntimeError: amid a step, whose exchange would change what was loaded.
        """
        if self.state.amid:
            raise RuntimeError("compression state was to be loaded while gradients are being exchanged, which would change it: load it "
                               "before backward, or after step() or synchronize()")
        self.plan.update()
        self.state.load_state_dict(state)
        self.plan.made_for = None

    def go_back(self, snapshot: dict[str, Any]) -> None:
        """See :meth:`State.go_back`."""
        self.state.go_back(snapshot)
        self.plan.made_for = None

    def join(self) -> None:
        """See :meth:`State.join`."""
        self.state.join()
        self.plan.made_for = None

    # ---------------------------------------------------------------------------------------------------- rehearsals

    def _rehearsals(self, policies: list[str], names: list[str]) -> list[Rehearsal]:
        """One a policy, by reducers of the same parameters past warm-up; they share a state, which is not this one's."""
        rehearsals, state = [], {name: {} for name in names}
        for policy in policies:
            other = Reducer([(name, self.state.slots[name].parameter) for name in names], self.state.select, self.op, self.predivide,
                            self.process_set, self.plan.bucket_bytes, self.number, self._network)
            other.plan.groups, other.plan.order, other.plan.costs = self.plan.groups, names, self.plan.costs
            other.plan.policy, other.plan.settled = policy, True
            for name, slot in other.state.slots.items():
                slot.step, slot.state = max(slot.compressor.dense_steps, slot.compressor.stages()[-1][0]), state[name]
            other.plan.update()
            state = {name: state[name] | slot.state for name, slot in other.state.slots.items()}
            rehearsals.append(other._rehearse)
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
