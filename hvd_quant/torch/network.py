"""Horovod as the workers' network: its collectives, who shares a host, and what collectives and codes cost here.

A :class:`hvd_quant.torch.reducer.Reducer` goes by the names in this module; :mod:`hvd_quant.torch.c10d` has the same. All that
asks other workers is called by all of them together.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import ProcessSet

from hvd_quant.compressors import Compressor
from hvd_quant.exchange import cost, hosts
from hvd_quant.exchange.hosts import Workers, process_set_of
from hvd_quant.torch import measuring

ELASTIC = os.environ.get("HOROVOD_ELASTIC") == "1"
IN_ORDER = False
"""Whether workers have to start their collectives in the same order; Horovod pairs them up by name."""
REFUSES = True
"""Whether a collective of shapes that don't fit is refused on all workers."""
Error = mpi_ops.HorovodInternalError
"""What a collective fails with."""
mpi_enabled = mpi_ops.mpi_enabled


def start(kind: str, tensor: torch.Tensor, name: str, process_set: ProcessSet, number: int, rooms: Any = None,
          **arguments: Any) -> Any:
    """Start a collective and return its handle.

    Arguments:
        kind: "allreduce", which is in place, "allgather" or "alltoall".
        number: of the exchange's collectives before this one.
        rooms: a function that returns, by rank, the bytes that an allgather brings from each worker, or that each gets of an
            alltoall, at most; of a worker that failed it may be more. Horovod finds that out by itself.
        arguments: Horovod's, such as ``op`` and ``splits``.
    """
    collective = getattr(mpi_ops, "allreduce_async_" if kind == "allreduce" else f"{kind}_async")
    return collective(tensor, name=name, process_set=process_set, **arguments)


def arrived(handle: Any) -> bool:
    """Whether it has a result, or never will have."""
    return mpi_ops.poll(handle)


def result(handle: Any) -> Any:
    """What a collective brought, once it is there; of an alltoall, with how much is from whom."""
    return mpi_ops.synchronize(handle)


def gather(row: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """All workers' rows, by rank. Horovod negotiates anew what has another size than before, so names are to tell that."""
    handle = mpi_ops.allgather_async(row, name=name, process_set=process_set)
    while not mpi_ops.poll(handle):
        time.sleep(1e-4)  # Horovod's own waiting takes the processor from those that are waited for
    return mpi_ops.synchronize(handle)


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
    return measuring.slowest(sys.modules[__name__], seconds, process_set)


def costs(workers: Workers, compressors: Iterable[Compressor], device: torch.device) -> cost.Costs:
    """What collectives and codes cost between those that exchange payloads, by the slowest of all; measured once."""
    return measuring.costs(sys.modules[__name__], workers, compressors, device)


def measure(compressors: Iterable[Compressor], sample: int, repeats: int) -> cost.Costs:
    """What they cost between all workers on the CPU, see :func:`hvd_quant.exchange.cost.measure`."""
    everyone = Workers(mpi_ops.global_process_set, mpi_ops.global_process_set)
    return measuring.measure(sys.modules[__name__], everyone, compressors, torch.device("cpu"), sample, repeats)
