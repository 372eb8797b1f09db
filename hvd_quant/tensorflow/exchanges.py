"""A gradient's way through memory, encode, exchange, decode and merge, for gradients that travel together, as operations of a
graph. Data flow alone decides what starts when: a collective starts as soon as the gradients in it are there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf
from horovod.tensorflow import allreduce as horovod_allreduce
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import Average, ProcessSet, Sum

from hvd_quant import wire
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.compressors.base import conclude
from hvd_quant.exchange import ranges, sent_bytes
from hvd_quant.ops import tensorflow as ops
from hvd_quant.registry import get_compressor
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.codes import Encoded, Hosted, Traced
from hvd_quant.tensorflow.state import COSTS, Slot

_NONE = get_compressor("none")
_SHARED = 2**16
"""Dense gradients of fewer entries share one vector; copying larger ones would cost more than a collective of their own."""

Gradient = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class Cargo:
    """One gradient on its way.

    Attributes:
        slot: what is kept for its variable.
        info: what is known of the whole tensor at this step; its rank and world are those of ``Workers.across``.
        grad: the gradient.
    """

    slot: Slot
    info: TensorInfo
    grad: Gradient

    @functools.cached_property
    def flat(self) -> tf.Tensor:
        return tf.reshape(tf.cast(self.grad, tf.float32), [-1])

    def land(self, flat: tf.Tensor) -> tf.Tensor:
        """A flat vector in the gradient's shape and type."""
        return tf.cast(tf.reshape(flat, self.info.shape), self.grad.dtype)

    def after_the_one_before(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, once this slot's last exchange is over."""
        return _after([self.info.step], tensor)


class Landed(NamedTuple):
    """The reduced gradients, and what ``COSTS`` names, as a vector."""

    gradients: list[Gradient]
    costs: tf.Tensor


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

    def dense(self) -> Landed:
        """Horovod's allreduce of the gradients as they are, or as a class in Horovod's style makes them; of small ones, of one
        vector that holds them all."""
        # Horovod can't reduce bf16, and sums of fp16 overflow where the mean doesn't; fp32 holds both.
        wide = [tf.cast(one.grad, tf.float32) if one.grad.dtype.size == 2 else one.grad for one in self.cargo]
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
        landed = [one.land(results[i]) for i, one in enumerate(self.cargo)]
        return self._landed("dense", landed, clock, sum(nbytes))

    def _dense_together(self, i: int, dtype: tf.DType) -> Any:
        alone = self.style is not None or self.op not in (Average, Sum) or self.cargo[i].info.numel >= _SHARED
        return i if alone else dtype.name

    def allreduce(self) -> Landed:
        """Linear codes: what they yield is summed by Horovod's allreduce, round by round, that of all gradients in one vector."""
        flats = [one.after_the_one_before(one.flat) for one in self.cargo]
        clock, infos = Clock(flats), [self._among_all(one.info) for one in self.cargo]
        codes = [self.compressor.rounds(ops, flat, one.slot.worker_state, info, flat)
                 for one, info, flat in zip(self.cargo, infos, flats)]
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
        means, count = zip(*map(conclude, codes, totals))
        factor = 1 if self.op == Average else infos[0].world
        landed = [one.land(_times(mean, factor)) for one, mean in zip(self.cargo, means)]
        void = sum(1.0 - tf.cast(counts, tf.float64) for counts in count)
        return self._landed("allreduce", landed, clock, bytes_sent, void)

    def allgather(self) -> Landed:
        """Every worker gets every payload and adds them up in rank order, so that all have the same bits."""
        return self._compressed("allgather")

    def sra(self) -> Landed:
        """Each worker adds up the payloads of the ranges that it owns and encodes their means for all."""
        return self._compressed("sra")

    def _compressed(self, kind: str) -> Landed:
        """Payloads, to all workers ("allgather"), or to the owners of ranges that reduce them and send on ("sra").

        1. With hierarchical exchange, the workers of a host average their gradients; each goes on with its range of them.
        2. Each worker encodes its gradients, with what it had kept: one payload a gradient, or one for each range of it.
        3. "sra": each owner gets the payloads of its range from all, adds them up in the order of ranks, divides, and encodes
           the mean, with what it had kept.
        4. All get all payloads. With hierarchical exchange, they are handed on within the host.
        5. With a value that is not finite, a worker that failed, or a damaged payload, a tensor's step is void: nothing was
           received, so nothing may leave the residuals, and what was encoded is taken back.
        6. Everyone decodes the same bytes in the same order, owners too, so that all have the same bits.
        """
        cargo, workers, scatter = self.cargo, self.workers, kind == "sra"
        code = (Traced if self.compressor.native else Hosted)(self.compressor)
        rank, world = cargo[0].info.rank, cargo[0].info.world
        place, places = workers.local
        clock = Clock(one.flat for one in cargo)
        flats = [one.flat for one in cargo]
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
        factor = 1 if self.op == Average else places * world if scatter else places
        landed = []
        for of_one, own, one, flat, cut, encodes in zip(payloads, tf.unstack(flags), cargo, flats, cuts, encoded):
            undone = [done for done in (code.undo(what, own) for what in encodes if what.state) if done is not None]
            with tf.control_dependencies(undone):
                total = code.decode(of_one._replace(teller=teller), one.info, cut, not scatter and self.op == Average, flat)
            landed.append(one.land(_times(total, factor)))
        return self._landed(kind, landed, clock, bytes_sent, tf.math.count_nonzero(flags))

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

    def sparse(self) -> Landed:
        """A sparse gradient: an allgather of its indices and one of its values."""
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
        if self.op == Average:
            values = values / tf.cast(self._among_all(info).world, values.dtype)
        landed = self._landed("sparse", [values], clock, bytes_sent)
        return Landed([tf.IndexedSlices(landed.gradients[0], indices, grad.dense_shape)], landed.costs)

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


def by(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Items by their keys, in order."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
