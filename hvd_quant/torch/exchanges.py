"""The exchanges of gradients that travel together, from encode to merge.

Each is a generator that reads from top to bottom: it yields the collectives it has started, and goes on with a collective's
result once that is there. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from horovod.torch.mpi_ops import Average, Sum

from hvd_quant import wire
from hvd_quant.compressors import TensorInfo
from hvd_quant.compressors.base import conclude
from hvd_quant.ops import torch as ops
from hvd_quant.torch.cargo import Cargo, entries
from hvd_quant.torch.flights import Collective, Flight, Route
from hvd_quant.torch.rows import sparse_bytes

_NOBODYS_SHAPE = (1,) * 9


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
        reason = _joined([] if error is None else [one.failure(
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
        with flight.timed("decode" if codes else "encode"):
            if not codes:
                for one in cargo:
                    flat = one.whole(at["world"])  # which is the mean's memory too
                    codes.append(one.compressor.rounds(ops, flat, one.slot.worker_state, one.info.at(**at), flat))
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
            if local is not None:
                one.add_local(reduced, local)
            one.landed_uncompressed(reduced, flight.op, at["world"])


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
        return [sum(one.compressor.payload_bytes(one.info.part(*one.own[j])) for one in cargo if entries(one.own[j]))
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
            by_owner = [[next(queue) for one, queue in zip(cargo, queues) if entries(one.own[owner])] for owner in range(world)]
            message = _joined([payload for payloads in by_owner for payload in payloads], cargo[0])
            splits = torch.tensor([sum(payload.numel() for payload in payloads) for payloads in by_owner], dtype=torch.int32)
        received, lengths = yield flight.start("alltoall", message, label=".owners", splits=splits, rooms=rooms)
        with flight.timed("decode"):
            owned = [one for one in cargo if entries(one.own[rank])]
            expected = [payload.numel() for payload in by_owner[rank]]
            try:
                columns = [wire.split_with_heads(part, len(owned), lambda: expected) for part in received.split(lengths.tolist())]
                reduced = [one.reduce(list(payloads)) for one, payloads in zip(owned, zip(*columns))]
            except wire.PayloadError as error:
                reduced = [one.failure(entries(one.own[rank]), rank, str(error)) for one in owned]
            message = _joined(reduced, cargo[0])

    gathered = yield flight.start("allgather", message, last=workers.host is None, rooms=rooms)
    if workers.host is not None:
        gathered = yield flight.start("allgather", gathered, workers.host, ".handed_on", last=True)

    with flight.timed("decode"):
        manifest = [(one, *one.cuts[i][j]) for i in range(places) for j in range(world) for one in cargo if entries(one.cuts[i][j])]
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
                    one.add_local(one.flat, local)
            one.land(one.flat)
            one.done()


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
        yield from ROUTES[one.exchange](flight)
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


ROUTES: dict[str, Callable[[Flight], Route]] = {
    "dense": dense, "allreduce": allreduce, "allgather": compressed, "sra": compressed, "sparse": sparse}


def _joined(payloads: list[torch.Tensor], like: Cargo) -> torch.Tensor:
    if len(payloads) == 1:
        return payloads[0]
    return torch.cat(payloads) if payloads else torch.empty(0, dtype=torch.uint8, device=like.grad.device)
