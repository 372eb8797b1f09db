"""The workers' network: who shares a host, and what collectives and codes cost here. All of this is called by all workers
together."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import ProcessSet

from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange import cost, hosts
from hvd_quant.exchange.hosts import process_set_of
from hvd_quant.ops import torch as ops
from hvd_quant.torch.exchanges import Workers

ELASTIC = os.environ.get("HOROVOD_ELASTIC") == "1"


def workers_by_host(process_set: ProcessSet) -> Workers:
    """Who averages inside hosts and who exchanges between them.

    Raises:
        ValueError: where that can't work, saying why.
    """
    hosts.require_all(process_set, ELASTIC)
    rank = mpi_ops.rank()
    grid = hosts.grid(_places())
    if len(grid.hosts) == 1:
        return Workers(process_set, _Alone(), process_set)
    own = {}
    for kind, rows in zip(("host", "across"), grid):
        for row in rows:
            joined = process_set_of(row) if len(row) > 1 or kind == "across" else None
            if rank in row:
                own[kind] = joined
    return Workers(process_set, own["across"], own["host"])


class _Alone:
    """In the place of a process set: this worker, where there is no other host to exchange with."""

    ranks: list[int] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def _places() -> list[tuple[int, int]]:
    """(host, local rank) of each worker."""
    own = torch.tensor([[mpi_ops.cross_rank(), mpi_ops.local_rank()]], dtype=torch.int32)
    return [(host, local) for host, local in mpi_ops.allgather(own, name="hvd_quant.places").tolist()]


def broadcast(tensor: torch.Tensor, name: str, process_set: ProcessSet) -> None:
    """Take the values of the process set's first worker."""
    mpi_ops.broadcast_(tensor, process_set.ranks[0], name=name, process_set=process_set)


def slowest(seconds: list[float], process_set: ProcessSet) -> list[float]:
    """The largest of all workers' values, each by itself."""
    rows = mpi_ops.allgather(torch.tensor([seconds], dtype=torch.float64), name=f"hvd_quant.measure.slowest.{len(seconds)}",
                             process_set=process_set)
    return rows.max(0).values.tolist()


def costs(workers: Workers, compressors: Iterable[Compressor], device: torch.device) -> cost.Costs:
    """What collectives and codes cost between those that exchange payloads, by the slowest of all; measured once."""
    compressors = sorted(compressors, key=cost.key_of)
    with_fp16 = any(compressor.only_if_faster for compressor in compressors)
    key = (*workers.all.ranks, -1, *workers.across.ranks, device, with_fp16, *map(cost.key_of, compressors))
    if key not in _measured:
        _measured[key] = cost.measure(_Workers(workers, device), compressors)
    return _measured[key]


_measured: dict[tuple, cost.Costs] = {}


class _Workers:
    """See :class:`hvd_quant.exchange.cost.Workers`."""

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self._all, self._process_set, self._device = workers.all, workers.across, device

    def collective(self, kind: str, nbytes: int) -> float:
        world = self._process_set.size()
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        arguments = {}
        name = f"hvd_quant.measure.{kind}.{nbytes}"  # Horovod negotiates anew what has another size than before
        if kind.startswith("allreduce"):
            tensor, kind = tensor.view(torch.float16 if kind == "allreduce_fp16" else torch.float32), "allreduce"
        elif kind == "alltoall":
            share = nbytes // world
            arguments["splits"] = torch.tensor([share] * (world - 1) + [nbytes - share * (world - 1)], dtype=torch.int32)
        self.slowest([0.0])  # all start together
        start = time.perf_counter()
        handle = getattr(mpi_ops, f"{kind}_async")(tensor, name=name, process_set=self._process_set, **arguments)
        while not mpi_ops.poll(handle):
            time.sleep(5e-5)
        mpi_ops.synchronize(handle)
        return time.perf_counter() - start

    def rates(self, compressor: Compressor, entries: int) -> cost.Rates:
        world = self._process_set.size()
        info = TensorInfo.whole("", (entries,), world=world)
        grad = torch.randn(entries, generator=torch.Generator().manual_seed(0)).to(self._device)
        state = {key: torch.zeros(shape, device=self._device) for key, shape in compressor.state_shapes(info).items()}
        out = ops.new_vector(entries, grad)
        payload = None

        def encode() -> None:
            nonlocal payload
            payload = compressor.encode(ops, grad, state, compressor.measure(ops, grad, state, info), info)

        def timed(action: Callable[[], object]) -> float:
            times = []
            for _ in range(5):
                start = time.perf_counter()
                action()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                times.append(time.perf_counter() - start)
            return statistics.median(times) / entries

        self.slowest([0.0])
        return cost.Rates(timed(encode), timed(lambda: compressor.decode_mean(ops, [payload] * world, info, out)),
                          timed(lambda: compressor.decode_sum(ops, [payload], info, out)))

    def slowest(self, seconds: list[float]) -> list[float]:
        return slowest(seconds, self._all)
