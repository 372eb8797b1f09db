"""Parameters averaged over the workers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, ProcessSet, global_process_set


def average_parameters(named_parameters: Iterable[tuple[str, torch.Tensor]], process_set: ProcessSet = global_process_set) -> None:
    """Set each parameter to its mean over the workers."""
    for name, p in named_parameters:
        mpi_ops.allreduce_(p.data, name=f"hvd_quant.average.{name}", op=Average, process_set=process_set)
