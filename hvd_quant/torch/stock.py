"""Compressors inside Horovod's stock optimizer and collectives.

Horovod calls ``compress(grad)``, sums or averages what it returns, and hands the result to ``decompress``. A bound
compressor runs the exchange itself, by name, and returns a 1-element tensor of ones: what comes back (1 for Average, the
number of workers for Sum) is the factor for the mean.
"""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.mpi_ops import Average, ProcessSet, global_process_set, size

from hvd_quant.compressors import Compressor
from hvd_quant.exchange.checkpoint import averaged, of_this_worker
from hvd_quant.torch import agreement
from hvd_quant.torch.flights import Flight
from hvd_quant.torch.reducer import Reducer


def bind(compressor: Compressor, named_parameters: list[tuple[str, torch.Tensor]],
         process_set: ProcessSet | None = None) -> Bound:
    """See :meth:`hvd_quant.Compressor.bind`."""
    for pair in named_parameters:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError("bind takes (name, parameter) pairs such as model.named_parameters(), the ones that the optimizer "
                             f"gets; it was given a {type(pair).__name__}")
    return Bound(compressor, named_parameters, process_set or global_process_set)


class Bound:
    """A compressor with state for named parameters, to be passed as ``compression=`` to horovod.torch.DistributedOptimizer.

    All workers of the process set bind together, and find out here if their parameters or compressors differ.
    ``stats`` counts the compressed exchanges; ``state_dict()`` and ``load_state_dict()`` are for checkpoints.
    """

    def __init__(self, compressor: Compressor, named_parameters: list[tuple[str, torch.Tensor]],
                 process_set: ProcessSet) -> None:
        if compressor.only_if_faster:
            raise ValueError(f"{compressor.spec} can't be bound: Horovod's optimizer has no place where all workers could measure "
                             "their network; use hvd_quant.torch.DistributedOptimizer, or only_if_faster=False")
        compressor.require_no_place()
        agreement.compare([agreement.parameter(name, p, compressor.spec) for name, p in named_parameters], {"wrapper": "bind"},
                          process_set)
        self.compressor = compressor
        self._named = named_parameters
        self._reducer = Reducer(named_parameters, lambda name: compressor, Average, 1.0, process_set)
        self._next = 0
        self.stats = self._reducer.stats
        self.state_dict = self._reducer.state_dict

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]], op: int | None = None) -> None:
        """Take up what ``state_dict()`` returned, or of a list of what it returned on all workers this worker's part.

        Arguments:
            op: that of the optimizer, Average or Sum, which a bound compressor doesn't know: needed for the states of another number
                of workers, whose shares depend on it.

        Raises:
            ValueError: if it is of another worker or format, and for another number of workers without ``op``; then nothing is changed.
        """
        self._reducer.load_state_dict(of_this_worker(state, averaged(op), **self._reducer.state.whose()))

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Flight | None]:
        """Start the exchange of a parameter's gradient.

        Raises:
            ValueError: if ``tensor`` is the gradient of no bound parameter.
        """
        started = self._reducer.start_unless_dense(self._name(tensor), tensor)
        return (tensor, None) if started is None else (torch.ones(1, dtype=torch.float32, device=tensor.device), started)

    def decompress(self, tensor: torch.Tensor, ctx: Flight | None) -> torch.Tensor:
        """Finish the exchange and return the reduced gradient."""
        if ctx is None:
            return tensor
        self._reducer.complete([ctx])
        grad = ctx.cargo[0].grad
        factor = round(tensor.item(), 2)  # gradient_predivide_factor leaves rounding errors
        if factor not in (1, self._reducer.process_set.size()):
            raise ValueError(f"Horovod reduced over {factor:g} workers, the compressor is bound to a process set of "
                             f"{self._reducer.process_set.size()}: give bind the optimizer's process_set")
        return grad if factor == 1 else grad.mul_(factor)

    def _name(self, tensor: torch.Tensor) -> str:
        # Gradients arrive in about the same order each step, so the search starts where the last one ended.
        for i in range(len(self._named)):
            at = (self._next - i) % len(self._named)
            if self._named[at][1].grad is tensor:
                self._next = at - 1
                return self._named[at][0]
        if any(p is tensor for _, p in self._named):
            raise ValueError(f"op=Adasum can't be combined with {self.compressor.spec}: it would compress weights; use op=Average")
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is not the gradient of a parameter that {self.compressor.spec} was bound "
            "to; bind all parameters of the optimizer, and with sparse_as_dense=True or in collectives of your own use "
            "hvd_quant.torch.DistributedOptimizer instead of Horovod's")


def compress_half(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """fp16 for Horovod's own functions: g / n, so that the sum can't overflow where the mean doesn't."""
    if not tensor.dtype.is_floating_point:
        return tensor, None
    return (tensor / size()).to(torch.float16), tensor.dtype


def decompress_half(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype).mul_(size())
