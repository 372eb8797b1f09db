"""Gradients in flight together: the collectives of their exchange, started and gone on with as they arrive. Nothing here waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from horovod.torch.mpi_ops import ProcessSet

from hvd_quant.exchange.hosts import Workers
from hvd_quant.exchange.stats import Stats
from hvd_quant.torch.cargo import Cargo


class Collective(NamedTuple):
    """A collective that was started: what :meth:`Flight.advance` waits for. ``last``: only :meth:`Flight.land` is left."""

    handle: Any
    last: bool
    started: float


Route = Generator[Collective | None, Any, None]
"""The collectives that it starts, one after another, and then None: everything is here, and what follows writes gradients."""


class Flight:
    """Gradients that travel together.

    Attributes:
        network: which carries it, see :mod:`hvd_quant.torch.network`.
        here: whether everything has arrived.
        done: whether the gradients hold what was reduced.
        failure: what went wrong; it is raised where this flight is waited for.
    """

    def __init__(self, name: str, kind: str, route: Callable[[Flight], Route], cargo: list[Cargo], workers: Workers, op: int,
                 predivide: float, stats: Stats, network: Any) -> None:
        self.name, self.kind, self.cargo, self.workers, self.op, self.predivide = name, kind, cargo, workers, op, predivide
        self.stats, self.costs, self.network, self._started = stats, stats.buckets[name], network, 0
        self.here = self.done = self.cancelled = False
        self.flagged = False  # a payload said that a value was not finite
        self.sums: list[torch.Tensor] = []  # what allreduces brought
        self.failure: Exception | None = None
        self._route = route(self)
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


def _finite(vector: torch.Tensor) -> bool:
    """Whether all of it is, in one pass and without a copy."""
    return not vector.numel() or all(map(math.isfinite, torch.stack(torch.aminmax(vector)).tolist()))
