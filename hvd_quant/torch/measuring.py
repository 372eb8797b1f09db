"""What collectives and codes cost on a network: :mod:`hvd_quant.torch.network`, or a module with the same names. All of this is
called by all workers together."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch.mpi_ops import Sum

from hvd_quant.compressors import Compressor
from hvd_quant.exchange import cost, timing
from hvd_quant.exchange.hosts import Workers


def slowest(network: Any, seconds: list[float], group: Any) -> list[float]:
    """The largest of all workers' values, each by itself."""
    rows = network.gather(torch.tensor([seconds], dtype=torch.float64), f"hvd_quant.measure.slowest.{len(seconds)}", group)
    return rows.max(0).values.tolist()


def costs(network: Any, workers: Workers, compressors: Iterable[Compressor], device: torch.device) -> cost.Costs:
    """What collectives and codes cost between those that exchange payloads, by the slowest of all; measured once."""
    compressors = sorted(compressors, key=cost.key_of)
    with_fp16 = any(compressor.only_if_faster for compressor in compressors)
    key = (network, *workers.all.ranks, -1, *workers.across.ranks, device, with_fp16, *map(cost.key_of, compressors))
    if key not in measured:
        measured[key] = measure(network, workers, compressors, device)
    return measured[key]


def measure(network: Any, workers: Workers, compressors: Iterable[Compressor], device: torch.device, *how: int) -> cost.Costs:
    """The same, measured now; ``how`` as :func:`hvd_quant.exchange.cost.measure` takes it."""
    return cost.measure(_Workers(network, workers, device), compressors, *how)


measured: dict[tuple, cost.Costs] = {}


class _Workers:
    """See :class:`hvd_quant.exchange.cost.Workers`."""

    def __init__(self, network: Any, workers: Workers, device: torch.device) -> None:
        self._network, self._all, self._across, self._device = network, workers.all, workers.across, device

    def collective(self, kind: str, nbytes: int) -> float:
        world = self._across.size()
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        shares = [nbytes // world] * (world - 1) + [nbytes - nbytes // world * (world - 1)]
        arguments: dict[str, Any] = {"rooms": lambda: [nbytes] * world}
        name = f"hvd_quant.measure.{kind}.{nbytes}"  # Horovod negotiates anew what has another size than before
        if kind.startswith("allreduce"):
            tensor, kind = tensor.view(torch.float16 if kind == "allreduce_fp16" else torch.float32), "allreduce"
            arguments = {"op": Sum}
        elif kind == "alltoall":
            arguments = {"splits": torch.tensor(shares, dtype=torch.int32), "rooms": lambda: shares}
        self.slowest([0.0])  # all start together
        start = time.perf_counter()
        handle = self._network.start(kind, tensor, name, self._across, 0, **arguments)
        while not self._network.arrived(handle):
            time.sleep(5e-5)
        self._network.result(handle)
        return time.perf_counter() - start

    def rates(self, compressor: Compressor, entries: int) -> cost.Rates:
        self.slowest([0.0])
        on_gpu = self._device.type == "cuda"
        return timing.rates(compressor, timing.in_torch(self._device), entries, self._across.size(),
                            wait=(lambda: torch.cuda.synchronize(self._device)) if on_gpu else lambda: None)

    def slowest(self, seconds: list[float]) -> list[float]:
        return slowest(self._network, seconds, self._all)
