"""Loss scaling: torch's GradScaler, for optimizers that reduce gradients over workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.variable import Variable

RECIPE = ("call optimizer.set_loss_scale(scaler.get_scale()) before backward, and after it optimizer.synchronize(), "
          "scaler.unscale_(optimizer), and scaler.step(optimizer) inside optimizer.skip_synchronize(); or use "
          "hvd_quant.torch.GradScaler, which does that")
_running: list[float] = []


def running_scale() -> float | None:
    """What the loss was multiplied by whose backward runs now; None where no :class:`GradScaler` tells."""
    return _running[-1] if _running else None


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for distributed optimizers of this package and of Horovod, with the same arguments::

        scaler = hvd.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # where gradients are clipped
        scaler.step(optimizer)
        scaler.update()

    Gradients are reduced before they are unscaled and looked at, so all workers skip the same steps and keep the same scale,
    which has to start the same. Compressed optimizers are told the scale as backward begins, and what they keep follows it. With
    ``enabled=False`` gradients are reduced in the same places, so what comes between them sees the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_host: float | None = None

    def scale(self, outputs: Any) -> Any:
        """The outputs times the scale. As their backward begins, optimizers whose gradients it makes learn it."""
        if not self._enabled:
            return outputs
        if not isinstance(outputs, torch.Tensor):
            outputs = list(outputs)
        scaled = super().scale(outputs)
        self._tell(scaled)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce the optimizer's gradients, if they aren't yet, and divide them by the scale."""
        self._synchronize(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Reduce the optimizer's gradients, if they aren't yet, unscale them, if they aren't, and take a step if they are finite.

        Raises:
            ValueError: for one that doesn't reduce gradients but what a step changes, with op=Adasum.
        """
        if not self._synchronize(optimizer):
            return super().step(optimizer, *args, **kwargs)
        try:
            with optimizer.skip_synchronize():
                return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._synchronized = False  # also where the step was skipped

    def update(self, new_scale: Any = None) -> None:
        """As torch's."""
        super().update(new_scale)
        self._on_host = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        super().load_state_dict(state_dict)
        self._on_host = None

    def _tell(self, scaled: torch.Tensor | Iterable[Any]) -> None:
        if not isinstance(scaled, torch.Tensor):
            for one in scaled:
                self._tell(one)
        elif scaled.requires_grad:
            scaled.register_hook(self._begin)

    def _begin(self, grad: torch.Tensor) -> None:
        _running[:] = [self._host_scale()]
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(_running.clear))  # after DDP's callback, which reduces all gradients of a static graph's first step

    def _host_scale(self) -> float:
        if self._on_host is None:
            self._on_host = self.get_scale()
        return self._on_host

    def _synchronize(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is an optimizer whose gradients are reduced; they are then."""
        if not hasattr(optimizer, "skip_synchronize"):
            return False
        if hasattr(optimizer, "_starting_models"):
            if not self._enabled:
                return False
            raise ValueError("op=Adasum can't be combined with a GradScaler: it reduces what a step changes, and with an overflow on "
                             "one worker that worker alone would take none; use op=Average")
        if not optimizer._synchronized or optimizer._handles:
            if self._enabled and hasattr(optimizer, "set_loss_scale"):
                optimizer.set_loss_scale(self._host_scale())
            optimizer.synchronize()
        return True


class Guarded:
    """What an optimizer's class has so that torch's own GradScaler is refused where workers would skip different steps."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The first that torch's scaler asks in its step, on every worker, whether it has found an overflow there or not.
        if self._handles:
            raise RuntimeError("torch's GradScaler was about to look at gradients that are not reduced yet, so that workers would skip "
                               f"different steps: {RECIPE}")
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        pass  # fused optimizers say so when they are made; gradients are unscaled by the scaler all the same
