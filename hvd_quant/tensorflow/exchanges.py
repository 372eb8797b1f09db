"""A gradient's way through memory, encode, exchange, decode and merge, for gradients that travel together, as operations of a
graph. Data flow alone decides what starts when: a collective starts as soon as the gradients in it are there."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
from horovod.tensorflow import allreduce as horovod_allreduce
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import Average, ProcessSet, Sum

from hvd_quant import wire
from hvd_quant.compressors import Compressor, TensorInfo, memory
from hvd_quant.compressors.base import conclude
from hvd_quant.compressors.merge import local_part
from hvd_quant.exchange import ranges, sent_bytes
from hvd_quant.exchange.buckets import by
from hvd_quant.exchange.rows import Table
from hvd_quant.ops import tensorflow as ops
from hvd_quant.registry import get_compressor
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.codes import Encoded, Hosted, Traced
from hvd_quant.tensorflow.rows import Merged, Rows
from hvd_quant.tensorflow.state import COSTS, OWNER, Slot

_NONE = get_compressor("none")
_SHARED = 2**16
"""Dense gradients of fewer entries share one vector; copying larger ones would cost more than a collective of their own."""

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class Change(NamedTuple):
    """What a part of the state becomes once the exchange is over, or stays if that is void."""

    variable: tf.Variable
    after: tf.Tensor
    before: tf.Tensor


@dataclasses.dataclass(eq=False)
class Cargo:
    """One gradient on its way.

    Attributes:
        slot: what is kept for its variable.
        info: what is known of the whole tensor at this step; its rank and world are those of ``Workers.across``.
        grad: the gradient.
        left: what :meth:`Slot.left_by` tells of the way that it takes in the end.
        scale: of the loss that the gradient is of, or None; what is kept, and what compressors see, is in units of the gradient
            of the unscaled loss.
        changes: of the state, beside what encoders do.
    """

    slot: Slot
    info: TensorInfo
    grad: Gradient
    left: Mapping[str, tuple[int, float]]
    scale: tf.Tensor | None = None
    changes: list[Change] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def flat(self) -> tf.Tensor:
        flat = tf.reshape(tf.cast(self.grad, tf.float32), [-1])
        return flat if self.scale is None else flat / self.scale

    @functools.cached_property
    def memory(self) -> memory.Memory:
        return memory.of(self.slot.compressor)

    @property
    def merge(self) -> str:
        return self.slot.compressor.merge

    # ------------------------------------------------------------------------------------------------ memory and merge

    def vector(self, dense: bool = False) -> tf.Tensor:
        """What is encoded, or sent as it is: the gradient, or what memory makes of it, and what is left of earlier ones, so that
        nothing is lost where a job is resumed on another network. Flat and fp32."""
        if not self.memory.active:
            return self._with_what_is_left(self.flat)
        self._before = {key: self.after_the_one_before(variable) for key, variable in self.slot.worker_state.items()}
        self._state, parameter = dict(self._before), tf.reshape(tf.cast(self.slot.variable, tf.float32), [-1])
        if "estimate" in self._state:
            # What an owner has kept is missing from the mean that all have summed up, as if its estimate were that much smaller.
            self._state["estimate"] = self._with_what_is_left(self._state["estimate"], -1)
        vector, self._kept, _ = self.memory.prepare(ops, self.flat, self._state, parameter, self.info.world, dense)
        return vector if "estimate" in self._state else self._with_what_is_left(vector)

    def _with_what_is_left(self, vector: tf.Tensor, sign: int = 1) -> tf.Tensor:
        for key, (first, times) in self.left.items():
            variable = self.slot.state[key]
            before = self.after_the_one_before(variable)
            with tf.control_dependencies([before]):
                vector = ops.give_back(vector, variable, first, sign * times)
            self.changes.append(Change(variable, _after([vector], variable), before))
        return vector

    def copied(self, vector: tf.Tensor) -> tf.Tensor:
        """The vector, once state that only the code knows is copied."""
        known = {*self.memory.shapes(self.info, "worker"), *self.memory.shapes(self.info, "owner")}
        own = [value for key, value in self.slot.state.items() if key.removeprefix(OWNER) not in known]
        self._own = [(variable, self.after_the_one_before(variable)) for variable in own]
        return _after([before for _, before in self._own], vector) if own else vector

    def put_back_if_void(self, done: tf.Tensor) -> None:
        """Note what :meth:`copied` has copied, and what it is when the exchange is ``done``."""
        self.changes += [Change(variable, _after([done], variable), before) for variable, before in self._own]

    def remember(self, mean: tf.Tensor, sent: tf.Tensor | None = None) -> tf.Tensor:
        """What memory makes of the mean of what all have sent; it notes what the state becomes.

        Arguments:
            sent: what this worker's own payloads decode to; None where nothing was compressed.
        """
        mean, kept = self.memory.settle(ops, self._state, self._kept, sent, mean)
        self.changes += [Change(self.slot.state[key], kept[key], before) for key, before in self._before.items() if key in kept]
        if sent is None and self.memory.starts_anew:
            owners = {key: self.after_the_one_before(value) for key, value in self.slot.state.items()
                      if key.startswith(OWNER) and key not in self.left}
            self.changes += [Change(self.slot.state[key], tf.zeros_like(before), before) for key, before in owners.items()]
        return mean

    def local_part(self, done: list[Any], sent: tf.Tensor | None, factor: Any, before: tf.Tensor | None = None) -> tf.Tensor:
        """What is added of this worker's own gradient to the reduced one.

        Arguments:
            done: what has happened when the residual holds what is kept.
            sent: what this worker's own payloads decode to.
            before: the residual before, from which that of a linear code follows.
        """
        residual = self.slot.state["residual"]
        kept = _after(done, residual)
        if before is not None:
            sent = self.flat + before - kept
        if self.merge == "error":
            self.changes.append(Change(residual, tf.zeros_like(kept), kept))
        return local_part(self.merge, self.flat, sent, kept, tf.cast(factor, tf.float32))

    def land(self, flat: tf.Tensor, scaled: bool = False) -> tf.Tensor:
        """A flat vector in the gradient's shape, type and scale.

        Arguments:
            scaled: whether it has that scale already.
        """
        if self.scale is not None and not scaled:
            flat *= tf.cast(self.scale, flat.dtype)
        return tf.cast(tf.reshape(flat, self.info.shape), self.grad.dtype)

    def after_the_one_before(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, once this slot's last exchange is over."""
        return _after([self.info.step], tensor)


class Landed(NamedTuple):
    """The reduced gradients, and what ``COSTS`` names, as a vector."""

    gradients: list[Gradient]
    costs: tf.Tensor


Route = Generator[Any, Any, Landed]
"""An exchange that stops when everything has arrived. It yields a function that makes a scalar of the graph: whether a value was
not finite, the same on all workers. It goes on when it is sent whether the step is void, or None where nothing is kept. One whose
decoders may stop the graph with an error then yields what takes its encodes back, and goes on when it is sent what has to happen
before any decoder starts."""


def not_finite(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
    """Whether there is such a value in any of them."""
    return ~tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]))


def unless(void: tf.Tensor | None, gradients: list[Gradient]) -> list[Gradient]:
    """The gradients, or NaN throughout in a void step, so that nobody takes for reduced what is still kept."""
    if void is None:
        return gradients
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    # A list of one would come back as a tensor.
    values = tf.nest.flatten(tf.cond(void, lambda: [tf.fill(tf.shape(g), tf.constant(float("nan"), g.dtype)) for g in values],
                                     lambda: [tf.identity(g) for g in values]))
    return [tf.IndexedSlices(value, gradient.indices, gradient.dense_shape) if isinstance(gradient, tf.IndexedSlices) else value
            for gradient, value in zip(gradients, values)]


def rest(route: Generator[Any, Any, Any], void: tf.Tensor | None) -> Generator[list[Any], list[Any], Any]:
    """What is left of a route that has told whether a value was not finite, and what it returns."""
    try:
        route.send((yield route.send(void)))
    except StopIteration as stopped:
        return stopped.value
    raise RuntimeError("an exchange stops twice at most")


def end(routes: list[Generator[Any, Any, Any]], void: tf.Tensor | None) -> list[Any]:
    """What routes return when they are told whether the step is void: all encodes are taken back before anything is decoded."""
    returned, undone = {}, {}
    for route in routes:
        try:
            undone[route] = route.send(void)
        except StopIteration as stopped:
            returned[route] = stopped.value
    first = [tf.group(*itertools.chain(*undone.values()))]
    for route in undone:
        try:
            route.send(first)
        except StopIteration as stopped:
            returned[route] = stopped.value
    return [returned[route] for route in routes]


class Clock:
    """Seconds of encoding, waiting and decoding, one stage after another, from when ``tensors`` are there."""

    def __init__(self, tensors: Iterable[tf.Tensor]) -> None:
        self.seconds: dict[str, Any] = {"encode": 0.0, "wait": 0.0, "decode": 0.0}
        self._last = self._now(tensors)

    def lap(self, what: str, tensors: list[tf.Tensor]) -> None:
        """A stage ends when all ``tensors`` are there."""
        moment = self._now([*tensors, self._last])  # never before the stage began
        self.seconds[what] += moment - self._last
        self._last = moment

    @staticmethod
    def _now(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
        with tf.control_dependencies(list(tensors)):
            return ops.now(tf.constant(0))[1]


@dataclasses.dataclass(frozen=True)
class Flight:
    """Gradients that travel together, in one of the ways that its methods are named after.

    Attributes:
        label: what the names of its collectives have in common, the same on all workers.
        compressor: as what they travel.
        cargo: the gradients; a sparse one travels by itself.
        workers: who reduces with whom.
        op, predivide: of the reduction.
        style: a class in Horovod's style for dense gradients, or None.
    """

    label: str
    compressor: Compressor
    cargo: list[Cargo]
    workers: network.Workers
    op: int
    predivide: float
    style: Any = None

    def dense(self) -> Route:
        """Horovod's allreduce of the gradients as they are, or as a class in Horovod's style makes them; of small ones, of one
        vector that holds them all."""
        unscaled = [one.memory.active or bool(one.left) for one in self.cargo]
        given = [one.vector(dense=True) if flat else one.grad for one, flat in zip(self.cargo, unscaled)]
        # Horovod can't reduce bf16, and sums of fp16 overflow where the mean doesn't; fp32 holds both.
        wide = [tf.cast(grad, tf.float32) if grad.dtype.size == 2 else grad for grad in given]
        wide = [one.after_the_one_before(tensor) for one, tensor in zip(self.cargo, wide)]
        clock, factors, nbytes = Clock(wide), {}, []
        if self.op == Average:
            factors = {"prescale_factor": 1 / self.predivide, "postscale_factor": self.predivide}

        def reduced(tensor: tf.Tensor, label: str) -> tf.Tensor:
            style = _HorovodStyle(_NONE if self.style is None else self.style)
            total = horovod_allreduce(tensor, op=self.op, compression=style, name=f"HorovodAllreduce_{label}",
                                      ignore_name_scope=True, process_set=self.workers.all, **factors)
            nbytes.append(style.bytes_sent)
            return total

        results: dict[int, tf.Tensor] = {}
        for places in by(range(len(wide)), lambda i: self._dense_together(i, wide[i].dtype)).values():
            label = label_of([self.cargo[i].slot for i in places])
            if len(places) == 1:
                results[places[0]] = reduced(wide[places[0]], label)
            else:
                parts = reduced(tf.concat([tf.reshape(wide[i], [-1]) for i in places], 0), label)
                for i, part in zip(places, tf.split(parts, [self.cargo[i].info.numel for i in places])):
                    results[i] = part
        clock.lap("wait", list(results.values()))
        void = yield lambda: not_finite(results.values())
        landed = self._land_uncompressed([results[i] for i in range(len(wide))], void, [not flat for flat in unscaled])
        return self._landed("dense", landed, clock, sum(nbytes))

    def _dense_together(self, i: int, dtype: tf.DType) -> Any:
        alone = self.style is not None or self.op not in (Average, Sum) or self.cargo[i].info.numel >= _SHARED
        return i if alone else dtype.name

    def allreduce(self) -> Route:
        """Linear codes: what they yield is summed by Horovod's allreduce, round by round, that of all gradients in one vector."""
        flats = [one.after_the_one_before(one.vector(dense=True) if self.compressor.memory == "none" else one.flat)
                 for one in self.cargo]
        clock, infos = Clock(flats), [self._among_all(one.info) for one in self.cargo]
        codes = [self.compressor.rounds(ops, flat, one.slot.worker_state, info, flat)
                 for one, info, flat in zip(self.cargo, infos, flats)]
        before = [one.after_the_one_before(one.slot.state["residual"]) if one.merge != "none" and self.compressor.stateful else None
                  for one in self.cargo]
        totals: list[tf.Tensor | None] = [None] * len(codes)
        bytes_sent = 0.0
        for number in range(self.compressor.allreduces):
            sent = [code.send(total) for code, total in zip(codes, totals)]
            vector = _guarded(_joined([tf.reshape(part, [-1]) for part in sent]))
            clock.lap("decode" if number else "encode", [vector])
            bytes_sent += _bytes_of(vector)
            total = mpi_ops._allreduce(vector, op=Sum, name=f"HorovodAllreduce_{self.label}_{number}", ignore_name_scope=True,
                                       process_set=self.workers.all)
            clock.lap("wait", [total])
            parts = tf.split(total, [part.shape.num_elements() for part in sent]) if len(sent) > 1 else [total]
            totals = [tf.reshape(part, like.shape) for part, like in zip(parts, sent)]
        void = yield lambda: not_finite(totals)

        def concluded() -> tuple[list[tf.Tensor], list[Any]]:
            means, count = zip(*map(conclude, codes, totals))
            return list(means), [tf.cast(counts, tf.float64) for counts in count]

        def left_alone() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            return ([tf.fill(tf.shape(flat), float("nan")) for flat in flats],
                    [tf.cast(~not_finite([total]), tf.float64) for total in totals])

        means, count = concluded() if void is None else tf.cond(void, left_alone, concluded)
        factor = 1 if self.op == Average else infos[0].world
        totals = [_times(mean, factor) for mean in means]
        for i, (one, e) in enumerate(zip(self.cargo, before)):
            if e is not None:
                totals[i] += one.local_part([means[i]], None, factor, e)
        landed = self._land_uncompressed(totals, void, [False] * len(totals))
        return self._landed("allreduce", landed, clock, bytes_sent, sum(1.0 - counts for counts in count))

    def _land_uncompressed(self, totals: list[tf.Tensor], void: tf.Tensor | None, scaled: list[bool]) -> list[tf.Tensor]:
        """The gradients, of what was reduced."""
        world = tf.cast(self._among_all(self.cargo[0].info).world, tf.float32)
        for i, one in enumerate(self.cargo):
            if one.memory.active:
                mean = totals[i] if self.op == Average else totals[i] / world
                mean = one.remember(mean)
                totals[i] = mean if self.op == Average else mean * world
        return self._land(totals, void, scaled)

    def allgather(self) -> Route:
        """Every worker gets every payload and adds them up in rank order, so that all have the same bits."""
        return self._compressed("allgather")

    def sra(self) -> Route:
        """Each worker adds up the payloads of the ranges that it owns and encodes their means for all."""
        return self._compressed("sra")

    def _compressed(self, kind: str) -> Route:
        """Payloads, to all workers ("allgather"), or to the owners of ranges that reduce them and send on ("sra").

        1. With hierarchical exchange, the workers of a host average their gradients; each goes on with its range of them.
        2. Each worker encodes what its memories make of its gradients, with what it had kept: one payload a gradient, or one for
           each range of it.
        3. "sra": each owner gets the payloads of its range from all, adds them up in the order of ranks, divides, and encodes
           the mean, with what it had kept.
        4. All get all payloads. With hierarchical exchange, they are handed on within the host.
        5. With a value that is not finite, a worker that failed, or a damaged payload, in whatever tensor, the step is void where
           something is kept: nothing was received, so nothing may leave the residuals, and what was encoded is taken back.
        6. Everyone decodes the same bytes in the same order, owners too, so that all have the same bits; memories and merges go on
           from there.
        """
        cargo, workers, scatter = self.cargo, self.workers, kind == "sra"
        code = (Traced if self.compressor.native else Hosted)(self.compressor)
        rank, world = cargo[0].info.rank, cargo[0].info.world
        place, places = workers.local
        clock = Clock(one.flat for one in cargo)
        flats = [one.copied(one.vector()) for one in cargo]
        if workers.host is not None:
            flats = self._averaged_inside_host(flats)
            clock.lap("wait", flats)

        cuts = [_cuts(one, workers, scatter) for one in cargo]
        encoded: list[list[Encoded]] = [[] for _ in cargo]
        for one, flat, cut, encodes in zip(cargo, flats, cuts, encoded):
            first, last = piece = _ends(cut[place])
            if first < last:
                vector = flat if places == 1 else flat[first:last]
                encodes.append(code.encode(vector, one.slot.worker_state, one.info.part(*piece), cut[place]))
        made = [encodes[0] for encodes in encoded if encodes]
        bytes_sent = sum((_bytes_of(one.payload) for one in made), 0.0)
        message = self._sent([one.payload for one in made])

        if scatter:
            splits = tf.zeros([world], tf.int32)
            if made:
                message, splits = ops.by_owner([one.payload for one in made], [one.sizes for one in made])
                message = self._sent([message])
            clock.lap("encode", [message])
            received, _ = mpi_ops.alltoall(message, splits, name=f"HorovodAlltoall_{self.label}", ignore_name_scope=True,
                                           process_set=workers.across)
            clock.lap("wait", [received])
            owned = [cut[place][rank] for cut in cuts]
            sizes = [self._payload_bytes(one, range_) for one, range_ in zip(cargo, owned)]
            table = ops.locate(received, world, len(cargo), sizes)
            answers = []
            for column, (one, (a, b), encodes) in enumerate(zip(cargo, owned, encoded)):
                if a < b:
                    payloads = ops.Payloads(received, world, one.info.name, table, column)
                    again, answer = code.reduce(payloads, one.slot.owner_state, one.info.part(a, b))
                    encodes.append(again)
                    answers.append(answer)
            # Graph optimisers would drop a collective whose result a worker that owns nothing doesn't need.
            message = self._sent(answers or [received[:0]])
        clock.lap("decode" if scatter else "encode", [message])

        gathered = _gathered(message, self.label, workers.across)
        if workers.host is not None:
            gathered = _gathered(gathered, f"{self.label}_handed_on", workers.host)
        clock.lap("wait", [gathered])
        # Each range has one row of payloads that was reduced, or a row from each worker that exchanges it.
        if scatter:
            cuts = [[range_ for row in cut for range_ in row] for cut in cuts]
            rows = range(places * world)
        else:
            cuts = [[_ends(row) for row in cut] for cut in cuts]
            rows = [i for i in range(places) for _ in range(1 if places == 1 else world)]  # the world may not be known yet
        expected = [self._payload_bytes(one, cut[i]) for i in rows for one, cut in zip(cargo, cuts)]
        table = ops.locate(gathered, places * world, len(cargo), expected)
        payloads = [ops.Payloads(gathered, places * world, one.info.name, table, column) for column, one in enumerate(cargo)]
        flags = tf.stack([code.flags(of_one, one.info, cut) for of_one, one, cut in zip(payloads, cargo, cuts)])
        # Of several tensors with errors the first tells, on all workers.
        wrong = flags >= wire.FAILED
        teller = tf.where(tf.reduce_any(wrong), tf.argmax(wrong, output_type=tf.int32), -1)
        void = yield lambda: tf.reduce_any(flags > 0)
        voids = flags if void is None else tf.where(void, tf.maximum(flags, wire.NONFINITE), flags)
        undone = [code.undo(what, own) for own, encodes in zip(tf.unstack(voids), encoded) for what in encodes if what.state]
        undone = yield [done for done in undone if done is not None]
        totals = []
        for of_one, one, flat, cut, encodes in zip(payloads, cargo, flats, cuts, encoded):
            as_mean = scatter or one.memory.active or self.op == Average
            with tf.control_dependencies(undone):
                total = code.decode(of_one._replace(teller=teller), one.info, cut, as_mean and not scatter, flat)
            sent = self._sent_by_this_worker(code, one, encodes[0]) if one.memory.active or one.merge == "replace" else None
            if one.memory.active:
                total = one.remember(total, sent)
            if self.op != Average:
                total = _times(total, places * world if as_mean else places)
            if one.merge != "none":
                total += one.local_part([encodes[0].payload, *undone], sent, 1 if self.op == Average else world)
            one.put_back_if_void(total)
            totals.append(total)
        landed = self._land(totals, void)
        return self._landed(kind, landed, clock, bytes_sent, tf.math.count_nonzero(flags))

    def _sent_by_this_worker(self, code: Traced | Hosted, one: Cargo, encoded: Encoded) -> tf.Tensor:
        """What its own payloads decode to. Where one says that this worker failed, the others' tell it, and this is of no use."""
        sizes = [self._payload_bytes(one, cut) for cut in encoded.cuts]
        table = ops.locate(encoded.payload, len(sizes), 1, sizes)
        silent = ops.Payloads(encoded.payload, len(sizes), one.info.name, table, teller=1)  # of no column here
        return code.decode(silent, one.info, encoded.cuts, mean=False)

    def _land(self, totals: list[tf.Tensor], void: tf.Tensor | None, scaled: Iterable[bool] = ()) -> list[tf.Tensor]:
        """The gradients, once the state is what follows from the exchange, or what it was before a void one."""
        changes = [change for one in self.cargo for change in one.changes]
        if changes:
            with tf.control_dependencies(totals):
                values = tf.cond(void, lambda: [change.before for change in changes], lambda: [change.after for change in changes])
            kept = [change.variable.assign(value) for change, value in zip(changes, tf.nest.flatten(values))]
            totals = [_after(kept, total) for total in totals]
        landed = [one.land(total, as_it_is) for one, total, as_it_is in itertools.zip_longest(self.cargo, totals, scaled)]
        return unless(void, landed)

    def _averaged_inside_host(self, flats: list[tf.Tensor]) -> list[tf.Tensor]:
        vector = _guarded(_after(self._steps(), _joined(flats)))
        mean = horovod_allreduce(vector, op=Average, name=f"HorovodAllreduce_{self.label}_host", ignore_name_scope=True,
                                 process_set=self.workers.host)
        return tf.split(mean, [one.info.numel for one in self.cargo]) if len(flats) > 1 else [mean]

    def _payload_bytes(self, one: Cargo, range_: tuple[int, int]) -> int:
        return self.compressor.payload_bytes(one.info.part(*range_)) if range_[0] < range_[1] else 0

    def _sent(self, payloads: list[tf.Tensor]) -> tf.Tensor:
        """What is given to a collective, once these slots' last exchanges are over."""
        return _guarded(_after(self._steps(), _joined(payloads) if payloads else tf.zeros([0], tf.uint8)))

    def _steps(self) -> list[tf.Tensor]:
        return [one.info.step for one in self.cargo]

    def _among_all(self, info: TensorInfo) -> TensorInfo:
        if self.workers.across is self.workers.all:
            return info
        return dataclasses.replace(info, rank=self.workers.all.rank(), world=self.workers.all.size())

    def rows(self, exchange: str) -> Route:
        """A sparse gradient: the rows that each worker touches, merged and compressed, to all workers; or, where all of them
        together are more than a dense one, that.

        Arguments:
            exchange: by which it travels as a dense one.
        """
        (one,) = self.cargo
        info, world = self._among_all(one.info), tf.cast(self._among_all(one.info).world, tf.float64)
        table = Table(self.compressor, info, info.shape[0])
        code, merged = Rows(table), Merged(one.grad, table)
        if one.scale is not None:
            merged.values /= one.scale
        counted = _guarded(one.after_the_one_before(merged.counted)[None])
        clock = Clock([counted])
        told = _gathered(counted, f"{self.label}_counts", self.workers.all)
        clock.lap("wait", [told])
        more = {"wire_bytes": sent_bytes("sparse", 8.0, world), "wait_seconds": clock.seconds["wait"]}
        kept, residual = list(one.slot.state.values()), one.slot.state.get("residual")

        def as_rows() -> tuple[Landed, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
            clock, places, before = Clock([told]), merged.entries(table), None
            if residual is not None:
                with tf.control_dependencies([told]):
                    before = residual.sparse_read(places)
            message, keeps = code.encode(merged, before)
            message = _guarded(message)
            clock.lap("encode", [message])
            gathered = _gathered(message, f"{self.label}_rows", self.workers.all)
            clock.lap("wait", [gathered])
            rows, values, flagged = code.decode(gathered, told, self.op == Average)
            if residual is not None:
                with tf.control_dependencies([values]):
                    stored = residual.scatter_nd_update(places[:, None], tf.where(flagged, before, keeps))
                values = _after([stored], values)
            landed = self._landed("sparse", [values], clock, _bytes_of(message), flagged)
            return (Landed([self._slices(rows, landed.gradients[0])], landed.costs), flagged, places,
                    [before if variable is residual else tf.zeros(0) for variable in kept])

        def as_dense() -> tuple[Landed, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
            """In a branch, which can't stop amid it: what is kept is copied before."""
            before = [tf.reshape(variable, [-1]) for variable in kept]
            flat = _after(before, tf.scatter_nd(merged.rows[:, None], merged.values, [table.count, table.width]))
            cargo = dataclasses.replace(one, grad=tf.reshape(flat, info.shape), scale=None, changes=[])
            route = getattr(dataclasses.replace(self, cargo=[cargo]), exchange)()
            ask = next(route)
            flagged = ask() if kept else None
            (landed,) = end([route], flagged)
            dense = tf.reshape(landed.gradients[0], [table.count, table.width])
            rows = tf.where(tf.reduce_any(dense != 0, 1))[:, 0]
            return (Landed([self._slices(rows, tf.gather(dense, rows))], landed.costs),
                    tf.constant(False) if flagged is None else flagged, tf.zeros(0, tf.int64), before)

        smaller = code.is_smaller_dense(told, exchange, self.compressor)
        landed, flagged, places, before = tf.cond(smaller, as_dense, as_rows)
        landed = landed._replace(costs=landed.costs + tf.stack([tf.cast(more.get(what, 0), tf.float64) for what in COSTS]))
        void = yield lambda: flagged
        if void is None:
            return landed

        def put_back() -> tf.Tensor:
            def whole() -> tf.Tensor:
                return _after([variable.assign(tf.reshape(value, variable.shape)) for variable, value in zip(kept, before)], True)

            def of_rows() -> tf.Tensor:
                values = [value for variable, value in zip(kept, before) if variable is residual]
                return _after([residual.scatter_nd_update(places[:, None], value) for value in values], True)

            return tf.cond(smaller, whole, of_rows)

        with tf.control_dependencies([landed.costs]):  # which are known in the end
            done = tf.cond(void, put_back, lambda: tf.constant(False))
        with tf.control_dependencies([done]):
            return landed._replace(gradients=unless(void, landed.gradients))

    def _slices(self, rows: tf.Tensor, values: tf.Tensor) -> tf.IndexedSlices:
        """Rows as a gradient of the kind that was given."""
        (one,) = self.cargo
        if one.scale is not None:
            values *= one.scale
        values = tf.cast(tf.reshape(values, [-1, *one.info.shape[1:]]), one.grad.dtype)
        return tf.IndexedSlices(values, tf.cast(rows, one.grad.indices.dtype), one.grad.dense_shape)

    def sparse(self) -> Route:
        """A sparse gradient, uncompressed: an allgather of its indices and one of its values."""
        (one,) = self.cargo
        grad, info = one.grad, one.info
        values, indices = (_guarded(one.after_the_one_before(x)) for x in (grad.values, grad.indices))
        clock, bytes_sent = Clock([values, indices]), _bytes_of(values) + _bytes_of(indices)
        if grad.dtype == tf.bfloat16:  # which Horovod doesn't know; its bits it can send
            values = tf.bitcast(_gathered(tf.bitcast(values, tf.uint16), f"{self.label}_values", self.workers.all), tf.bfloat16)
        else:
            values = _gathered(values, f"{self.label}_values", self.workers.all)
        indices = _gathered(indices, f"{self.label}_indices", self.workers.all)
        clock.lap("wait", [values, indices])
        void = yield lambda: not_finite([values])
        if self.op == Average:
            values = values / tf.cast(self._among_all(info).world, values.dtype)
        landed = self._landed("sparse", [values], clock, bytes_sent)
        return Landed(unless(void, [tf.IndexedSlices(landed.gradients[0], indices, grad.dense_shape)]), landed.costs)

    def _landed(self, kind: str, gradients: list[tf.Tensor], clock: Clock, nbytes: Any, void: Any = 0) -> Landed:
        clock.lap("decode", gradients)
        at = self.cargo[0].info if kind in ("allgather", "sra") else self._among_all(self.cargo[0].info)
        world = tf.cast(at.world, tf.float64) if network.ELASTIC else at.world
        entries = sum(one.info.numel for one in self.cargo)
        costs = {"dense_bytes": sent_bytes("allreduce", 4.0 * entries, world), "wire_bytes": sent_bytes(kind, nbytes, world),
                 **{f"{what}_seconds": seconds for what, seconds in clock.seconds.items()}, "void_tensors": void}
        return Landed(gradients, tf.stack([tf.cast(costs[what], tf.float64) for what in COSTS]))


def _cuts(one: Cargo, workers: network.Workers, scatter: bool) -> list[list[tuple[int, int]]]:
    """Which entries travel from whom: ``[i][j]`` is what is sent, in the last collective, by worker j of those that exchange with
    the i-th worker of each host; all the same, and so given once, where payloads are not scattered."""
    multiple = one.slot.compressor.range_multiple
    pieces = one.slot.pieces
    if not scatter:
        return [[piece] for piece in pieces]
    return [[(first + a, first + b) for a, b in ranges(last - first, multiple, workers.world, one.slot.index)]
            for first, last in pieces]


def _ends(cuts: list[tuple[int, int]]) -> tuple[int, int]:
    return min(a for a, _ in cuts), max(b for _, b in cuts)


def label_of(slots: list[Slot]) -> str:
    """What the names of the collectives of gradients that travel together have in common. A slot is in one exchange at a time, so
    no two of a name are ever under way."""
    return slots[0].label if len(slots) == 1 else f"{slots[0].label}_and_{len(slots) - 1}_more"


class _HorovodStyle:
    """A compressor in Horovod's sense that notes what it sends."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        sent, context = self._inner.compress(tensor)
        self.bytes_sent = _bytes_of(sent)
        return _guarded(sent), context

    def decompress(self, tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return self._inner.decompress(tensor, context)


def _gathered(tensor: tf.Tensor, label: str, process_set: ProcessSet) -> tf.Tensor:
    return mpi_ops.allgather(tensor, name=f"HorovodAllgather_{label}", ignore_name_scope=True, process_set=process_set)


def _after(others: list[tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies(others):
        return tf.identity(tensor)


def _guarded(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor that graph optimisers don't compute in advance, nor the collective that gets it."""
    return ops.now(tensor)[0]


def _times(vector: tf.Tensor, factor: Any) -> tf.Tensor:
    return vector if isinstance(factor, int) and factor == 1 else vector * tf.cast(factor, vector.dtype)


def _joined(vectors: list[tf.Tensor]) -> tf.Tensor:
    return vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)


def _bytes_of(tensor: tf.Tensor) -> float | tf.Tensor:
    """A tensor's bytes, as float64 where they are known only when the graph runs."""
    numel, size = tensor.shape.num_elements(), tensor.dtype.size
    return float(size * numel) if numel is not None else tf.cast(size * tf.size(tensor, tf.int64), tf.float64)
