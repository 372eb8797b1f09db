"""A gradient's way through memory, encode, exchange, decode and merge, for gradients that travel together.

Each exchange is a generator that reads from top to bottom: it yields the collectives it has started, and goes on with a
collective's result once that is there. Nothing here waits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from horovod.torch.mpi_ops import Average, ProcessSet, Sum

from hvd_quant import wire
from hvd_quant.compressors import Compressor, TensorInfo, memory
from hvd_quant.compressors.base import conclude
from hvd_quant.compressors.merge import local_part
from hvd_quant.exchange import ranges
from hvd_quant.exchange.rows import Part, Table
from hvd_quant.exchange.stats import Stats
from hvd_quant.ops import torch as ops


class Workers(NamedTuple):
    """Who reduces with whom.

    Attributes:
        all: the workers to reduce over.
        across: those that exchange payloads; with hierarchical exchange, of each host the one of this worker's local rank.
        host: this host's workers, which are averaged first, or None.
    """

    all: ProcessSet
    across: ProcessSet
    host: ProcessSet | None = None

    @property
    def local(self) -> tuple[int, int]:
        """This worker's place among those of its host that take part, and how many they are."""
        return (0, 1) if self.host is None else (self.host.rank(), self.host.size())


class Collective(NamedTuple):
    """A collective that was started: what :meth:`Flight.advance` waits for. ``last``: only :meth:`Flight.land` is left."""

    handle: Any
    last: bool
    started: float


class Cargo:
    """One gradient on its way.

    Attributes:
        slot: what is kept for its parameter.
        compressor: as what it travels.
        places: the workers of this host that exchange different parts of it.
        scale: of the loss that the gradient is of.
        info: what is known of the whole tensor at this step.
        grad: the gradient; after the flight, the reduced one, in the same memory.
        flat: the gradient as a flat fp32 vector: its own memory where it is contiguous fp32, else a copy.
        memory: what is made of it before it is encoded.
    """

    def __init__(self, slot: Any, compressor: Compressor, places: int, scale: float, info: TensorInfo, grad: torch.Tensor,
                 version: int) -> None:
        self.slot, self.compressor, self.places = slot, compressor.scaled(scale), places
        self.info, self.grad, self._version = info, grad, version
        self.error: Exception | None = None
        self.memory = memory.of(slot.compressor.scaled(scale))
        self._had_kept = slot.kept
        self._kept: dict[str, torch.Tensor] = {}  # what becomes of the state once the exchange is over
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # of state that only the code knows, what it was
        self._encoded: list[Encoded] = []
        self._own: list[Encoded] = []  # of those, what was encoded of this worker's own gradient

    def flatten(self) -> torch.Tensor:
        self.flat = self.grad.detach().contiguous().view(-1).float()
        return self.flat

    def prepare_to_encode(self) -> None:
        """:meth:`flatten`; what goes wrong is told to the others in the place of what would be encoded."""
        try:
            self.flatten()
        except Exception as error:
            self.error, self.flat = error, self.grad.new_zeros(self.info.numel, dtype=torch.float32)

    def require_untouched(self, horovod_writes: bool = False) -> None:
        """Refuse a gradient that was changed meanwhile: the change would be lost, or reduced on some workers only.

        Arguments:
            horovod_writes: into the gradient itself. Where Horovod takes a GPU's gradient through the host, its own copy back
                counts as a change.

        Raises:
            RuntimeError: saying what to do instead.
        """
        if self.grad._version != self._version and not (horovod_writes and self.grad.is_cuda):
            raise RuntimeError(
                f"the gradient of {self.info.name} was modified (unscaled, clipped, zeroed) after backward had started its "
                "exchange: call optimizer.synchronize() first, then modify gradients, then step() inside "
                "optimizer.skip_synchronize()")

    def holds(self, vector: torch.Tensor) -> bool:
        """Whether a vector is the gradient's own memory."""
        return not self.grad.is_sparse and vector.data_ptr() == self.grad.data_ptr()

    def after_the_host(self, flat: torch.Tensor) -> None:
        """Go on with the average of the host's workers. Had the gradient been changed, all are to be told."""
        try:
            self.require_untouched(horovod_writes=True)
        except RuntimeError as error:
            self.error = error
        self.flat, self._version = flat, self.grad._version

    def land(self, flat: torch.Tensor) -> None:
        """Bring a flat vector back into the gradient."""
        if flat.data_ptr() == self.grad.data_ptr():
            return
        flat = flat.view(self.grad.shape)
        if any(stride == 0 and length > 1 for stride, length in zip(self.grad.stride(), self.grad.shape)):
            self.grad.set_(flat.to(self.grad.dtype))  # entries that share memory can't take different values
        else:
            self.grad.copy_(flat)

    # ------------------------------------------------------------------------------------- memory, encode, decode, undo

    def uncompressed(self, world: int) -> torch.Tensor:
        """What travels where nothing is compressed: the gradient as it is, or what memory makes of it and what was kept of earlier
        ones, as a flat fp32 vector of its own."""
        kept = self.slot.state.get("residual") if self.slot.kept else None
        if kept is None and not self.memory.active:
            return self.grad.detach().contiguous()
        vector = self._prepared(self.flatten(), world, dense=True).clone()
        if kept is not None:
            first, last = self.slot.piece
            vector[first:last].add_(kept, alpha=self.places)  # of a host's workers, which are averaged otherwise
            self._kept["residual"] = torch.zeros(1, device=kept.device).expand(kept.shape)
        return vector

    def whole(self, world: int) -> torch.Tensor:
        """What a linear code makes of the gradient, flat: one with a residual adds that itself."""
        flat = self.flatten()
        return flat if self.compressor.memory == "error_feedback" else self.uncompressed(world).view(-1).float()

    def landed_uncompressed(self, total: torch.Tensor, op: int, world: int) -> None:
        """Bring what was reduced of :meth:`uncompressed` into the gradient, and let the state become what follows from it."""
        if self._kept:
            mean = total if op == Average else total / world
            mean = self._settle(None, mean.view(-1))
            total = mean if op == Average else mean * world
            self.slot.kept = False
            if self.memory.starts_anew:
                for value in self.slot.owner_state.values():
                    value.zero_()
        self.land(total)

    def _prepared(self, flat: torch.Tensor, world: int, dense: bool = False) -> torch.Tensor:
        parameter = self.slot.parameter.detach().reshape(-1).float() if self.memory.active else None
        vector, self._kept = self.memory.prepare(ops, flat, self.slot.worker_state, parameter, world, dense)
        return vector

    def _settle(self, sent: torch.Tensor | None, mean: torch.Tensor) -> torch.Tensor:
        state = self.slot.worker_state
        mean, kept = self.memory.settle(ops, state, self._kept, sent, mean)
        for key in kept.keys() & state.keys():
            state[key].copy_(kept[key])
        return mean

    def cut(self, workers: Workers, scatter: bool) -> None:
        """Decide which entries travel from whom: ``cuts[i][j]`` is what worker j of those that exchange with the i-th worker
        of each host sends in the last collective."""
        numel, multiple, index = self.info.numel, self.compressor.range_multiple, self.slot.index
        place, places = workers.local
        self.cuts = []
        for first, last in ranges(numel, multiple, places, index):
            cuts = ranges(last - first, multiple, self.info.world, index) if scatter else [(0, last - first)] * self.info.world
            self.cuts.append([(first + a, first + b) for a, b in cuts])
        self.own = self.cuts[place]
        self._piece = min(a for a, _ in self.own), max(b for _, b in self.own)

    def encode(self) -> list[torch.Tensor]:
        """The payloads of the entries that this worker has for each owner, or for all. A worker that can't make one sends the
        reason, so that the others don't wait for it."""
        state, (first, last) = self.slot.worker_state, self._piece
        cuts = [cut for cut in dict.fromkeys(self.own) if _entries(cut)]
        if not cuts:
            return []
        try:
            if self.error is not None:
                raise self.error
            vector = self._prepared(self.flat[first:last], self.info.world)
            params = self._measure(vector, state, self.info.part(first, last))
            for a, b in cuts:
                part = {key: v[a - first:b - first] if v.shape == (last - first,) else v for key, v in state.items()}
                self._encode(vector[a - first:b - first], part, params, self.info.part(a, b))
            self._own = list(self._encoded)
            self.slot.kept = True
            return [one.payload for one in self._own]
        except Exception as error:
            self.undo()
            self.error = error
            reason = f"{type(error).__name__}: {error}"
            return [self._failure(b - a, self.info.rank, reason) for a, b in cuts]

    def reduce(self, arrived: list[tuple[torch.Tensor, bytes]]) -> torch.Tensor:
        """As the owner of a range: its mean over the workers, encoded again with a residual of its own.

        Arguments:
            arrived: all workers' payloads of the range, with their headers.
        """
        a, b = self.own[self.info.rank]
        info = self.info.part(a, b)
        try:
            for payload, head in arrived:
                if wire.parse_header(head, payload.numel(), self.compressor.name, info.numel).flags & wire.FAILED:
                    return self._failure(info.numel, *wire.failure_of(payload))
            payloads = [payload for payload, _ in arrived]
            mean = self.compressor.decode_mean(ops, payloads, info, ops.new_vector(info.numel, payloads[0]))
            state = self.slot.owner_state
            params = self._measure(mean, state, info.at(phase=1))
            return self._encode(mean, state, params, info.at(phase=1))
        except Exception as error:
            self.error = error
            return self._failure(info.numel, self.info.rank, str(error) if isinstance(error, wire.PayloadError) else
                                 f"{type(error).__name__}: {error}")

    def _measure(self, vector: torch.Tensor, state: dict[str, torch.Tensor], info: TensorInfo) -> Any:
        known = self.memory.shapes(info, "owner" if info.phase else "worker")
        self._before += [(value, value.clone()) for key, value in state.items() if key not in known]
        return self.compressor.measure(ops, vector, state, info)

    def _encode(self, vector: torch.Tensor, state: dict[str, torch.Tensor], params: Any, info: TensorInfo) -> torch.Tensor:
        payload = self.compressor.encode(ops, vector, state, params, info)
        if not (isinstance(payload, torch.Tensor) and payload.dtype == torch.uint8 and payload.dim() == 1):
            raise TypeError(f"{self.compressor.name}.encode returned {_kind(payload)}, expected a 1-D uint8 tensor")
        self._encoded.append(Encoded(vector, state, payload.contiguous(), info))
        return self._encoded[-1].payload

    def _failure(self, numel: int, rank: int, reason: str) -> torch.Tensor:
        return torch.from_numpy(wire.failure(self.compressor.name, numel, rank, reason)).to(self.grad.device)

    def undo(self) -> None:
        """Return all state to what it was before the gradient was encoded, unless the gradient itself is lost."""
        if self.grad._version == self._version:
            for vector, state, payload, info in reversed(self._encoded):
                try:
                    self.compressor.undo(ops, vector, state, payload, info)
                except wire.PayloadError:
                    pass  # a code that has made what can't be decoded; all workers are about to be told
        for value, before in self._before:
            value.copy_(before)
        self._encoded.clear()
        self._before.clear()
        self.slot.kept = self._had_kept

    def void(self) -> None:
        """Let the exchange count for nothing: all state is as before it, and the gradient NaN throughout, so that nobody takes
        for reduced what is still kept."""
        self.undo()
        self.slot.step -= 1
        self.grad.fill_(math.nan)

    def flags(self, arrived: list[tuple[TensorInfo, torch.Tensor, bytes]]) -> int:
        """The flags of all payloads together.

        Raises:
            hvd_quant.wire.PayloadError: with the reason, if one is of a worker that failed; and for a header that is wrong.
        """
        flags = 0
        for info, payload, head in arrived:
            own = wire.parse_header(head, payload.numel(), self.compressor.name, info.numel).flags
            if own:  # before it voids a step of all tensors, the whole payload has to be sound
                wire.check(payload, self.compressor.name, info.numel, payload.numel() - wire.HEADER_BYTES)
            flags |= own
        return flags

    def decode(self, arrived: list[tuple[TensorInfo, torch.Tensor, bytes]], mean: bool) -> None:
        """Write what payloads hold into ``flat``: their sum, or mean, where several are of the same entries, in the order of
        ranks."""
        decode = self.compressor.decode_mean if mean else self.compressor.decode_sum
        for (a, b), same in itertools.groupby(arrived, key=lambda one: one[0].range):
            payloads = [(info, payload) for info, payload, _ in same]
            decode(ops, [payload for _, payload in payloads], payloads[0][0], self.flat[a:b])

    def before_merge(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The gradient and what was kept before, where a merge needs them after a linear code."""
        merges = self.slot.compressor.merge != "none" and self.compressor.stateful
        return (self.flat.clone(), self.slot.state["residual"].clone()) if merges else None

    def local_part(self, factor: float, gradient: torch.Tensor | None = None, before: torch.Tensor | None = None
                   ) -> torch.Tensor | None:
        """What is added of this worker's own gradient to the reduced one, or None.

        Arguments:
            factor: of it.
            gradient, before: from :meth:`before_merge`; without them it is to be asked before payloads are decoded.
        """
        merge = self.slot.compressor.merge
        if merge == "none":
            return None
        kept, sent = self.slot.state["residual"], None
        if merge == "replace":
            sent = self._sent() if gradient is None else gradient + before - kept
        part = local_part(merge, self.flat if gradient is None else gradient, sent, kept, factor)
        if merge == "error":
            kept.zero_()
        return part

    def settle(self) -> None:
        """Let the state become what follows from the mean, which ``flat`` holds, and the mean what memory makes of it."""
        if self.memory.active:
            mean = self._settle(self._sent(), self.flat)
            if mean is not self.flat:
                self.flat.copy_(mean)

    def _sent(self) -> torch.Tensor:
        """What this worker's own payloads decode to."""
        sent = ops.new_vector(self.info.numel, self.flat)
        for one in self._own:
            self.compressor.decode_sum(ops, [ops.without_flags(one.payload)], one.info, sent[slice(*one.info.range)])
        return sent


class SparseCargo(Cargo):
    """A sparse gradient on its way, by the rows that it touches, or, where that is smaller, as a dense one.

    Attributes:
        exchange: by which it travels as a dense one; "dense" where it goes uncompressed, rows as they are.
        table: what all know of its rows.
        rows: the numbers of those that it touches, ascending.
        counted: how many they are; -1 if they couldn't be found.
        touched: the indices of all workers' rows, a column each, once they are here.
    """

    def __init__(self, slot: Any, compressor: Compressor, scale: float, info: TensorInfo, grad: torch.Tensor, version: int,
                 exchange: str) -> None:
        super().__init__(slot, compressor, 1, scale, info, grad, version)
        self.exchange, self._lead = exchange, grad.shape[:grad.sparse_dim()]
        self.table = Table(self.compressor, info, self._lead.numel())
        self._rows_before: torch.Tensor | None = None

    def merge(self) -> None:
        """Add up what the gradient has of each row. A worker that can't, tells the others later."""
        self.rows, self.flat, self.counted = torch.zeros(0, dtype=torch.int64, device=self.grad.device), None, -1
        try:
            merged = self.grad.detach().float().coalesce()
            rows = torch.zeros_like(merged.indices()[0])
            for place, length in zip(merged.indices(), self._lead):
                rows.mul_(length).add_(place)
            self.table.require(rows)
            self.rows, self.flat, self.counted = rows, merged.values().reshape(-1), rows.shape[0]
        except Exception as error:
            self.error = error

    def densify(self) -> None:
        self.grad = self.grad.detach().to_dense()
        self._version = self.grad._version

    def encode_rows(self) -> torch.Tensor:
        """The payloads of the rows' numbers and values, where there are rows. A worker that can't make them sends the reason."""
        if not self.counted:
            return torch.zeros(0, dtype=torch.uint8, device=self.grad.device)
        try:
            if self.error is not None:
                raise self.error
            vector, state, info = self.flat, {}, self.table.part(self.counted)
            if "residual" in self.slot.state:
                self._rows_before = self._residual()[self.rows]
                kept = self._rows_before.clone().view(-1)
                if self.compressor.memory == "none":  # another code has kept it
                    vector, kept = vector + kept, torch.zeros_like(kept)
                else:
                    state["residual"] = kept
            payload = self._encode(vector, state, self._measure(vector, state, info), info)
            if self._rows_before is not None:
                self._residual()[self.rows] = kept.view(-1, self.table.width)
                self.slot.kept = True
            return torch.cat([self.table.pack(self.rows), payload])
        except Exception as error:
            self.undo()
            self.error = error
            return torch.from_numpy(self.table.failure(self.counted, error)).to(self.grad.device)

    def _residual(self) -> torch.Tensor:
        return self.slot.state["residual"].view(-1, self.table.width)

    def undo(self) -> None:
        if self._rows_before is not None:
            self._residual()[self.rows] = self._rows_before
            self._rows_before = None
            self._encoded.clear()
        super().undo()

    def void(self) -> None:
        if not self.grad.is_sparse:
            return super().void()
        self.undo()
        self.slot.step -= 1
        places = self.touched if self.touched.numel() else self.touched.new_zeros(len(self._lead), 1)  # there has to be a NaN
        self.land_sparse(places, self.grad._values().new_full((places.shape[1], *self.grad.shape[len(self._lead):]), math.nan))

    def decode_rows(self, parts: list[Part], flags: int, mean: bool) -> None:
        """Let the gradient become what all workers' rows add up to."""
        terms = ((part.rows, self.compressor.decode_sum(ops, [part.payload], part.info)) for part in parts)
        rows, values = self.table.add_up(terms, flags, mean, like=self.flat)
        self.land_sparse(self.indices_of(rows), values.view(-1, *self.grad.shape[len(self._lead):]), merged=True)

    def indices_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The indices of rows in the gradient, a column each."""
        places = []
        for length in reversed(self._lead):
            places.insert(0, rows % length)
            rows = rows // length
        return torch.stack(places)

    def land_sparse(self, indices: torch.Tensor, values: torch.Tensor, merged: bool = False) -> None:
        self.grad = torch.sparse_coo_tensor(indices, values.to(self.grad.dtype), self.grad.shape, check_invariants=False,
                                            is_coalesced=merged or None)


class Encoded(NamedTuple):
    """What was encoded: a vector with its state, into a payload."""

    vector: torch.Tensor
    state: dict[str, torch.Tensor]
    payload: torch.Tensor
    info: TensorInfo


class Flight:
    """Gradients that travel together.

    Attributes:
        network: which carries it, see :mod:`hvd_quant.torch.network`.
        here: whether everything has arrived.
        done: whether the gradients hold what was reduced.
        failure: what went wrong; it is raised where this flight is waited for.
    """

    def __init__(self, name: str, kind: str, cargo: list[Cargo], workers: Workers, op: int, predivide: float, stats: Stats,
                 network: Any) -> None:
        self.name, self.kind, self.cargo, self.workers, self.op, self.predivide = name, kind, cargo, workers, op, predivide
        self.stats, self.costs, self.network, self._started = stats, stats.buckets[name], network, 0
        self.here = self.done = self.cancelled = False
        self.flagged = False  # a payload said that a value was not finite
        self.sums: list[torch.Tensor] = []  # what allreduces brought
        self.failure: Exception | None = None
        self._route = {"dense": dense, "allreduce": allreduce, "sparse": sparse}.get(kind, compressed)(self)
        self._resume(None)

    def timed(self, what: str) -> Any:
        return self.stats.timed(what, self.costs)

    def count(self, one: Cargo, nbytes: int) -> None:
        among = self.workers.across if self.kind in ("allgather", "sra") else self.workers.all
        self.stats.count(one.info.name, self.kind, one.info.numel, nbytes, among.size(), self.costs)

    def start(self, kind: str, tensor: torch.Tensor, process_set: ProcessSet | None = None, label: str = "", last: bool = False,
              **arguments: Any) -> Collective:
        """Start a collective; if the network doesn't take it, the gradients are as if they had not been encoded."""
        try:
            handle = self.network.start(kind, tensor, self.name + label, process_set or self.workers.across, self._started, **arguments)
        except Exception:
            self.undo()
            raise
        self._started += 1
        return Collective(handle, last, time.perf_counter())

    def arrived(self) -> bool:
        """Whether the collective that was started last has a result, or never will have."""
        try:
            return self.network.arrived(self._flying.handle)
        except (ValueError, RuntimeError):
            return True

    @property
    def finite(self) -> bool:
        """Whether everything that is here is; the same on all workers."""
        return not self.flagged and all(map(_finite, self.sums))

    @property
    def landing(self) -> bool:
        """Whether nothing is left to do but to take what arrives and write the gradients."""
        return self.here or self._flying.last

    def advance(self) -> None:
        """Go on with a result that has arrived. What goes wrong is kept as ``failure``, and what was encoded is taken back."""
        try:
            try:
                result = self.network.result(self._flying.handle)
            except self.network.Error as error:
                self._resume(error)
                return
            self.costs.flight_seconds += time.perf_counter() - self._flying.started
            if result is None:
                raise self.network.Error(f"the exchange of {self.cargo[0].info.name} was lost when Horovod was reset")
            self._resume(result)
        except Exception as error:
            self.failure, self.done = error, True
            self.undo()

    def land(self, void: bool) -> None:
        """Write the gradients once everything is here, unless this was cancelled or has failed.

        Arguments:
            void: whether the step counts for nothing.
        """
        if self.done:
            return
        self.done = True
        try:
            if self.cancelled:
                self.undo()
                return
            for one in self.cargo:
                one.require_untouched(horovod_writes=any(map(one.holds, self.sums)))
            if void:
                with self.timed("decode"):
                    if self.kind == "allreduce":
                        self.stats.void_tensors += sum(not _finite(sums) for sums in self.sums)
                    for one in self.cargo:
                        one.void()
            else:
                self._resume(None)
        except Exception:
            self.undo()
            raise
        finally:
            self._route.close()

    def _resume(self, result: Any) -> None:
        go_on = self._route.throw if isinstance(result, Exception) else self._route.send
        try:
            self._flying = go_on(result)
        except StopIteration:
            self.done = True
        self.here = self._flying is None

    def undo(self) -> None:
        for one in self.cargo:
            one.undo()


def sparse_bytes(grad: torch.Tensor) -> int:
    """Bytes of a sparse gradient's indices and values."""
    return sum(t.numel() * t.element_size() for t in (grad._indices(), grad._values()))


_NOBODYS_SHAPE = (1,) * 9

Route = Generator[Collective | None, Any, None]
"""The collectives that it starts, one after another, and then None: everything is here, and what follows writes gradients."""


def dense(flight: Flight) -> Route:
    """Horovod's allreduce of the gradients as they are; where there are several, of one vector that holds them all."""
    cargo, world = flight.cargo, flight.workers.all.size()

    def vector() -> torch.Tensor:
        with flight.timed("encode"):
            # Horovod can't reduce bf16, and sums of fp16 overflow where the mean doesn't; fp32 holds both.
            given = [one.uncompressed(world) for one in cargo]
            wide = [grad.float() if grad.element_size() == 2 else grad for grad in given]
            for one, grad in zip(cargo, wide):
                flight.count(one, grad.numel() * grad.element_size())
            return wide[0] if len(wide) == 1 else torch.cat([grad.view(-1) for grad in wide])

    total = yield from summed(flight, vector, op=flight.op, prescale_factor=1 / flight.predivide, postscale_factor=flight.predivide)
    flight.sums = [total]
    yield None
    with flight.timed("decode"):
        for one, part in zip(cargo, total.view(-1).split([one.info.numel for one in cargo])):
            one.landed_uncompressed(part, flight.op, world)


def summed(flight: Flight, vector: Callable[[], torch.Tensor], label: str = "", last: bool = True, **how: Any
           ) -> Generator[Collective, Any, torch.Tensor]:
    """Horovod's allreduce of what each worker makes, in place.

    A worker that can't make its vector gives something in its place that has more dimensions. Horovod refuses that on all workers,
    which then hand around what went wrong; in a network that refuses nothing, that worker raises alone.
    """
    cargo, workers, error = flight.cargo, flight.workers.all, None
    try:
        given = vector()
    except Exception as failed:
        if not flight.network.REFUSES:
            raise
        error, given = failed, torch.zeros(_NOBODYS_SHAPE, device=cargo[0].grad.device)
    try:
        yield flight.start("allreduce", given, workers, label, last=last, **how)
    except flight.network.Error as refused:
        if not flight.network.REFUSES or "ismatched" not in str(refused):
            raise
        one = cargo[0]
        reason = _joined([] if error is None else [one._failure(
            one.info.numel, workers.rank(), f"{one.info.name}: {type(error).__name__}: {error}")], one)
        told = yield flight.start("allgather", reason, workers, ".why", last=True)
        if told.numel():
            raise wire.PayloadError(wire.failure_message(wire.host_bytes(told))) from error
        raise
    if error is not None:
        raise error  # as on all workers
    return given


def allreduce(flight: Flight) -> Route:
    """Linear codes: what they yield is summed by Horovod's allreduce, round by round, that of all gradients in one vector. State
    doesn't change before the last sum is there."""
    cargo, workers = flight.cargo, flight.workers.all
    at = {"rank": workers.rank(), "world": workers.size()}  # with hierarchical exchange, payloads travel among fewer
    codes: list[Any] = []
    parts: list[torch.Tensor] = []
    totals: list[torch.Tensor | None] = [None] * len(cargo)
    nbytes = [0] * len(cargo)
    allreduces = cargo[0].compressor.allreduces

    def vector() -> torch.Tensor:
        nonlocal codes
        with flight.timed("decode" if codes else "encode"):
            codes = codes or [one.compressor.rounds(ops, one.whole(at["world"]), one.slot.worker_state, one.info.at(**at), one.flat)
                              for one in cargo]
            parts.clear()
            for i, one in enumerate(cargo):
                one.require_untouched()
                parts.append(codes[i].send(totals[i]))
                nbytes[i] += parts[i].numel() * parts[i].element_size()
            return parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])

    for number in range(allreduces):
        total = yield from summed(flight, vector, f".{number}", last=number + 1 == allreduces, op=Sum)
        totals = [sum_.view(part.shape) for sum_, part in zip(total.split([part.numel() for part in parts]), parts)]
    for one, sent in zip(cargo, nbytes):
        flight.count(one, sent)
    flight.sums = totals
    yield None
    with flight.timed("decode"):
        for one, code, total in zip(cargo, codes, totals):
            before = one.before_merge()
            mean, counts = conclude(code, total)
            flight.stats.void_tensors += not counts
            one.slot.kept |= one.compressor.stateful
            factor = at["world"] if flight.op == Sum else 1
            local = one.local_part(factor, *before) if counts and before else None
            reduced = mean.mul_(factor) if flight.op == Sum else mean
            one.landed_uncompressed(reduced if local is None else reduced.add_(local), flight.op, at["world"])


def compressed(flight: Flight) -> Route:
    """Payloads, to all workers ("allgather"), or to the owners of ranges that reduce them and send on ("sra").

    1. With hierarchical exchange, the workers of a host average their gradients; each goes on with its range of them.
    2. Each worker encodes its gradients, with what it had kept: one payload a gradient, or one for each range of it.
    3. "sra": each owner gets the payloads of its range from all, adds them up in the order of ranks, divides, and encodes the
       mean, with what it had kept.
    4. All get all payloads. With hierarchical exchange, they are handed on within the host.
    5. Everyone decodes the same bytes in the same order, owners too, so that all have the same bits. Where something is kept
       between steps, that is when all of a step has arrived: if a value was not finite, nothing is decoded, and what was
       encoded is taken back.
    """
    cargo, workers, scatter = flight.cargo, flight.workers, flight.kind == "sra"
    rank, world = workers.across.rank(), workers.across.size()
    factor = 1 if flight.op == Average else world
    place, places = workers.local
    with flight.timed("encode"):
        for one in cargo:
            one.prepare_to_encode()
    if workers.host is not None:
        vector = cargo[0].flat if len(cargo) == 1 else torch.cat([one.flat for one in cargo])
        yield flight.start("allreduce", vector, workers.host, ".host", op=Average)
        for one, part in zip(cargo, vector.split([one.flat.numel() for one in cargo])):
            one.after_the_host(part)

    def rooms() -> list[int]:
        """Bytes of what there is to send of each worker's range, or of each worker."""
        return [sum(one.compressor.payload_bytes(one.info.part(*one.own[j])) for one in cargo if _entries(one.own[j]))
                for j in range(world)]

    with flight.timed("encode"):
        for one in cargo:
            one.cut(workers, scatter)
        sent = [one.encode() for one in cargo]
        sizes = [sum(payload.numel() for payload in payloads) for payloads in sent]
        message = _joined([payload for payloads in sent for payload in payloads], cargo[0])
    for one, nbytes in zip(cargo, sizes):
        flight.count(one, nbytes)

    if scatter:
        with flight.timed("encode"):
            queues = [iter(payloads) for payloads in sent]
            by_owner = [[next(queue) for one, queue in zip(cargo, queues) if _entries(one.own[owner])] for owner in range(world)]
            message = _joined([payload for payloads in by_owner for payload in payloads], cargo[0])
            splits = torch.tensor([sum(payload.numel() for payload in payloads) for payloads in by_owner], dtype=torch.int32)
        received, lengths = yield flight.start("alltoall", message, label=".owners", splits=splits, rooms=rooms)
        with flight.timed("decode"):
            owned = [one for one in cargo if _entries(one.own[rank])]
            expected = [payload.numel() for payload in by_owner[rank]]
            try:
                columns = [wire.split_with_heads(part, len(owned), lambda: expected) for part in received.split(lengths.tolist())]
                reduced = [one.reduce(list(payloads)) for one, payloads in zip(owned, zip(*columns))]
            except wire.PayloadError as error:
                reduced = [one._failure(_entries(one.own[rank]), rank, str(error)) for one in owned]
            message = _joined(reduced, cargo[0])

    gathered = yield flight.start("allgather", message, last=workers.host is None, rooms=rooms)
    if workers.host is not None:
        gathered = yield flight.start("allgather", gathered, workers.host, ".handed_on", last=True)

    with flight.timed("decode"):
        manifest = [(one, *one.cuts[i][j]) for i in range(places) for j in range(world) for one in cargo if _entries(one.cuts[i][j])]
        arrived: dict[Cargo, list[tuple[TensorInfo, torch.Tensor, bytes]]] = {one: [] for one in cargo}
        one = cargo[0]
        try:
            parts = wire.split_with_heads(gathered, len(manifest), lambda: [
                one.compressor.payload_bytes(one.info.part(a, b)) for one, a, b in manifest])
            for (one, a, b), (payload, head) in zip(manifest, parts):
                arrived[one].append((one.info.part(a, b), payload, head))
            flags = {}
            for one, payloads in arrived.items():
                flags[one] = one.flags(payloads)
        except wire.PayloadError as error:
            flight.undo()
            raise wire.PayloadError(f"{one.info.name}: {error}") from one.error
        void_tensors = {one for one in cargo if flags.get(one, 0) & wire.NONFINITE}
    flight.stats.void_tensors += len(void_tensors)
    flight.flagged = bool(void_tensors)
    yield None
    with flight.timed("decode"):
        for one, payloads in arrived.items():
            void = one in void_tensors
            if void:
                one.undo()
            local = None if void else one.local_part(factor)
            as_mean = scatter or one.memory.active or flight.op == Average
            try:
                one.decode(payloads, mean=as_mean and not scatter)
            except wire.PayloadError as error:
                raise wire.PayloadError(f"{one.info.name}: {error}") from one.error
            if void:
                one.flat.fill_(float("nan"))
            else:
                one.settle()
                if flight.op != Average and (as_mean or places > 1):
                    one.flat.mul_(places * world if as_mean else places)
                if local is not None:
                    one.flat.add_(local)
            one.land(one.flat)


def sparse(flight: Flight) -> Route:
    """A sparse gradient: the rows that each worker touches, merged and compressed, to all workers; or, where all of them together
    are more than a dense one, that. Uncompressed, as Horovod does it: its indices, and its values."""
    (one,) = flight.cargo
    workers, table = flight.workers.all, one.table
    if one.exchange == "dense":
        indices, values = one.grad._indices().t().contiguous(), one.grad._values()
        flight.count(one, sparse_bytes(one.grad))
        bits = values.view(torch.int16) if values.dtype == torch.bfloat16 else values  # Horovod doesn't know the type
        indices = yield flight.start("allgather", indices, workers, ".indices")
        bits = yield flight.start("allgather", bits.contiguous(), workers, ".values", last=True)
        values, one.touched = bits.view(values.dtype), indices.t()
        flight.sums = [values]
        yield None
        one.land_sparse(indices.t(), values / workers.size() if flight.op == Average else values)
        return

    with flight.timed("encode"):
        one.merge()
    told = yield flight.start("allgather", torch.tensor([one.counted]), workers, ".counts")
    flight.stats.count(None, "sparse", 0, told.element_size(), workers.size(), flight.costs)
    counts = told.tolist()
    if table.is_smaller_dense(counts, one.exchange, one.compressor):
        one.densify()
        flight.kind = flight.costs.exchange = one.exchange
        yield from (allreduce if one.exchange == "allreduce" else compressed)(flight)
        return
    with flight.timed("encode"):
        message = one.encode_rows()
    flight.count(one, message.numel())
    gathered = yield flight.start("allgather", message, workers, last=True)
    with flight.timed("decode"):
        try:
            flags, parts = table.parts(gathered, counts)
        except wire.PayloadError as error:
            flight.undo()
            raise wire.PayloadError(f"{one.info.name}: {error}") from one.error
        one.touched = one.indices_of(torch.cat([part.rows for part in parts]) if parts else one.rows[:0])
        flight.flagged = bool(flags & wire.NONFINITE)
        flight.stats.void_tensors += flight.flagged
    yield None
    with flight.timed("decode"):
        if flight.flagged:
            one.undo()
        try:
            one.decode_rows(parts, flags, flight.op == Average)
        except wire.PayloadError as error:
            flight.undo()
            raise wire.PayloadError(f"{one.info.name}: {error}") from one.error


def _finite(vector: torch.Tensor) -> bool:
    """Whether all of it is, in one pass and without a copy."""
    return not vector.numel() or all(map(math.isfinite, torch.stack(torch.aminmax(vector)).tolist()))


def _entries(cut: tuple[int, int]) -> int:
    return cut[1] - cut[0]


def _joined(payloads: list[torch.Tensor], like: Cargo) -> torch.Tensor:
    if len(payloads) == 1:
        return payloads[0]
    return torch.cat(payloads) if payloads else torch.empty(0, dtype=torch.uint8, device=like.grad.device)


def _kind(x: Any) -> str:
    return f"a {x.dim()}-D {x.dtype} tensor" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
