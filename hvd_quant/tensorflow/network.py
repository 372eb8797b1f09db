"""The workers' network: who shares a host, and what collectives and codes cost here. All of this is called by all workers
together."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet, Sum
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange import cost, hosts, timing
from hvd_quant.exchange.hosts import process_set_of
from hvd_quant.ops import tensorflow as ops
from hvd_quant.tensorflow.codes import Hosted, Traced

_log = logging.getLogger("hvd_quant")

ELASTIC = bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))
"""Whether the number of workers is known only when a graph runs."""


class Workers(hosts.Workers):
    """See :class:`hvd_quant.exchange.hosts.Workers`; with hierarchical exchange, ``across`` is None where there is but one host."""

    @property
    def rank(self) -> int:
        """This worker's place among those that exchange payloads; 0 outside of them."""
        return self.across.rank() if self.across is not None and self.across.included() else 0

    @property
    def world(self) -> int:
        """How many exchange payloads; 1 outside of them."""
        return self.across.size() if self.across is not None and self.across.included() else 1


def workers_by_host(process_set: ProcessSet) -> Workers:
    """Who averages inside hosts and who exchanges between them.

    Raises:
        ValueError: where that can't work, saying why.
    """
    hosts.require_all(process_set, ELASTIC)
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise ValueError("hierarchical=True needs TensorFlow 2: in a graph of TensorFlow 1 use hierarchical=False")
        grid = hosts.grid(_places())
    if len(grid.hosts) == 1:
        return Workers(process_set, None)
    if len(grid.columns) == 1:
        return Workers(process_set, process_set)
    rank, rows = mpi_ops.rank(), [sorted(row) for row in grid.hosts]  # as in process sets
    own: list[ProcessSet] = []
    for sets in (rows, [list(column) for column in zip(*rows)]):
        joined = [(ranks, process_set_of(sorted(ranks))) for ranks in sets]
        own += [found for ranks, found in joined if rank in ranks]
    host, across = own
    return Workers(process_set, across, host)


def _places() -> list[tuple[int, int]]:
    """(host, local rank) of each worker."""
    own = tf.constant([[mpi_ops.cross_rank(), mpi_ops.local_rank()]])
    return [(host, local) for host, local in mpi_ops.allgather(own, name="hvd_quant_places").numpy().tolist()]


def costs(workers: Workers, compressors: Iterable[Compressor]) -> cost.Costs | None:
    """What collectives and codes cost between these workers, measured once; None where there is nothing to choose, or nothing can
    be measured: in elastic jobs, whose newcomers couldn't take part, and in graphs of TensorFlow 1."""
    world = workers.world
    to_choose = [c for c in compressors if c.name != "none" and (
        c.only_if_faster or c.exchange == "auto" and not c.linear and world > 2)]
    if not to_choose or world == 1:
        return None
    with tf.init_scope():
        if ELASTIC or not tf.executing_eagerly():
            if any(c.only_if_faster for c in to_choose) and not _warned:
                _warned.append(True)
                where = "in an elastic job" if ELASTIC else "in a graph of TensorFlow 1"
                _log.warning("only_if_faster has no effect %s, since nothing is measured: gradients are compressed", where)
            return None
        to_choose = sorted(to_choose, key=cost.key_of)
        key = (workers.across.process_set_id, *workers.across.ranks, any(c.only_if_faster for c in to_choose), *dict.fromkeys(map(cost.key_of, to_choose)))
        if key not in _measured:
            with tf.device("CPU:0"):
                _measured[key] = cost.measure(_Network(workers), to_choose)
        return _measured[key]


def measure(compressors: Iterable[Compressor], sample: int, repeats: int) -> cost.Costs:
    """What they cost between all workers, see :func:`hvd_quant.exchange.cost.measure`."""
    everyone = Workers(mpi_ops.global_process_set, mpi_ops.global_process_set)
    with tf.device("CPU:0"):
        return cost.measure(_Network(everyone), compressors, sample, repeats)


_measured: dict[tuple, cost.Costs] = {}
_warned: list[bool] = []


class _Network:
    """See :class:`hvd_quant.exchange.cost.Workers`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def collective(self, kind: str, nbytes: int) -> float:
        how = {"name": f"hvd_quant_measure_{kind}_{nbytes}", "process_set": self._workers.across}
        data, world = tf.zeros([nbytes], tf.uint8), self._workers.world
        share = nbytes // world
        splits = tf.constant([share] * (world - 1) + [nbytes - share * (world - 1)])
        values = tf.zeros([nbytes // 2], tf.float16) if kind == "allreduce_fp16" else tf.zeros([nbytes // 4])
        self.slowest([0.0])  # all start together
        start = time.perf_counter()
        if kind.startswith("allreduce"):
            result = mpi_ops._allreduce(values, op=Sum, **how)
        elif kind == "allgather":
            result = mpi_ops.allgather(data, **how)
        else:
            result, _ = mpi_ops.alltoall(data, splits, **how)
        result[:1].numpy()  # which waits for it
        return time.perf_counter() - start

    def rates(self, compressor: Compressor, entries: int) -> cost.Rates:
        world = self._workers.world
        if type(compressor).encode is Compressor.encode:
            return timing.rates(compressor, timing.in_tensorflow(), entries, world)
        code = (Traced if compressor.native else Hosted)(compressor)
        info = TensorInfo.whole("sample", (entries,), world=world)
        grad = tf.constant(np.random.default_rng(0).normal(size=entries).astype(np.float32))
        # (A tf.Variable would make the tf.function that is being traced trace twice.)
        state = {key: ResourceVariable(tf.zeros(shape), trainable=False)
                 for key, shape in compressor.state_shapes(info).items()}
        payload = code.encode(grad, state, info, [info.range]).payload
        one, all_ = (ops.Payloads.of(ops.Payloads(tf.tile(payload, [n]), n)) for n in (1, world))

        def timed(make: Callable[[], tf.Tensor]) -> float:
            @functools.partial(tf.function, autograph=False)  # as it runs later, without the costs of a call from Python
            def seconds() -> tf.Tensor:
                start = ops.now(tf.constant(0))[1]
                with tf.control_dependencies([start]):
                    made = make()
                with tf.control_dependencies([made]):
                    return ops.now(tf.constant(0))[1] - start

            return statistics.median([float(seconds()) for _ in range(6)][1:]) / entries

        self.slowest([0.0])
        return cost.Rates(timed(lambda: code.encode(grad, state, info, [info.range]).payload),
                          timed(lambda: code.decode(all_, info, [info.range], mean=True)),
                          timed(lambda: code.decode(one, info, [info.range], mean=False)))

    def slowest(self, seconds: list[float]) -> list[float]:
        rows = mpi_ops.allgather(tf.constant([seconds], tf.float64), name=f"hvd_quant_measure_slowest_{len(seconds)}",
                                 process_set=self._workers.all)
        return rows.numpy().max(0).tolist()


def travels(compressor: Compressor, infos: list[TensorInfo], measured: cost.Costs | None) -> Compressor:
    """As what tensors go that travel together: see :func:`hvd_quant.exchange.cost.decide`.

    Arguments:
        infos: of those that are compressed by their size.
        measured: what :func:`costs` returned.
    """
    if ELASTIC:
        # How tensors are cut must not depend on a number of workers that changes.
        exchange = "allreduce" if compressor.linear and compressor.exchange == "auto" else (
            "allgather" if compressor.exchange in ("auto", "sra") else compressor.exchange)
        return dataclasses.replace(compressor, exchange=exchange)
    if measured is None:
        compressor = dataclasses.replace(compressor, only_if_faster=False)
    if infos[0].world <= 2 and compressor.exchange == "auto" and not compressor.linear:
        compressor = dataclasses.replace(compressor, exchange="allgather")  # one collective of as many bytes
    return cost.decide(compressor, infos, measured, mpi_ops.mpi_enabled())
