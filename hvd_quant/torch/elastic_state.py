"""Elastic training: what Horovod's ``TorchState`` does with a compressed optimizer, once this is imported.

Compression state is each worker's own. After a failure it goes back to the last commit like everything else; when workers come and
go, those that stay keep theirs, and newcomers begin with nothing kept and the others' numbers of steps.
"""

from __future__ import annotations

import torch
from horovod.torch.elastic.state import OptimizerStateHandler, get_handler_registry, set_handler_registry


class CompressedOptimizerHandler(OptimizerStateHandler):
    """What ``TorchState`` does with a compressed optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._kept = optimizer._reducer.state.snapshot()

    def save(self) -> None:
        """Note the optimizer's state and what is kept of gradients on this worker."""
        super().save()
        self._kept = self.value._reducer.state.snapshot()

    def restore(self) -> None:
        """Return to what was saved last; exchanges that are under way are taken back."""
        super().restore()
        self.value._reducer.go_back(self._kept)

    def sync(self) -> None:
        """Take worker 0's state, but of what is kept of gradients the numbers of steps alone."""
        self.value._cancel()
        super().sync()
        self.value._reducer.join()
        self.save()


def _handler(optimizer: torch.optim.Optimizer) -> OptimizerStateHandler:
    return (CompressedOptimizerHandler if hasattr(optimizer, "_reducer") else OptimizerStateHandler)(optimizer)


set_handler_registry([(kind, _handler if kind is torch.optim.Optimizer else handler) for kind, handler in get_handler_registry()])
