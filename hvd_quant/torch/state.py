"""What is kept for parameters between steps: residuals, step counts, and as what their gradients travel."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import Average, ProcessSet

from hvd_quant import exchange
from hvd_quant.compressors import Compressor, TensorInfo, memory
from hvd_quant.compressors.base import is_number
from hvd_quant.exchange.checkpoint import OWNER, check, of_this_worker, restored, saved
from hvd_quant.exchange.hosts import Workers
from hvd_quant.registry import get_compressor
from hvd_quant.torch.amp import running_scale

_log = logging.getLogger("hvd_quant")
_REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclasses.dataclass(eq=False)
class Slot:
    """What is kept for one parameter.

    Attributes:
        parameter: itself.
        compressor: what the user chose for it.
        info: what is known of it.
        index: its place among the parameters.
        workers: who reduces it with whom.
        state: name -> fp32 tensor; names that start with "owner." are of the range that this worker reduces for all.
        piece: (first, one past last) entry of what this worker encodes; all but with hierarchical exchange.
        owned: (first, one past last) entry of what it reduces for all, where it does.
        step: exchanges so far.
        averaged: exchanges until its parameter was averaged last.
        travels: as what it travels: ``compressor`` with one exchange, or fp16 or none where that is faster.
        kept: whether the state may hold a part of a gradient.
        resumed: as what it travelled when a checkpoint was written, from which training is to go on bit for bit.
    """

    parameter: torch.Tensor
    compressor: Compressor
    info: TensorInfo
    index: int
    workers: Workers
    state: dict[str, torch.Tensor]
    piece: tuple[int, int]
    owned: tuple[int, int] = (0, 0)
    step: int = 0
    averaged: int = 0
    travels: Compressor = get_compressor("none")
    kept: bool = False
    resumed: Compressor | None = None

    @property
    def worker_state(self) -> dict[str, torch.Tensor]:
        return {key: value for key, value in self.state.items() if not key.startswith(OWNER)}

    @property
    def owner_state(self) -> dict[str, torch.Tensor]:
        return {key.removeprefix(OWNER): value for key, value in self.state.items() if key.startswith(OWNER)}

    @property
    def local(self) -> tuple[int, int]:
        """This worker's place among those of its host that exchange different parts of a tensor, and how many they are."""
        return (0, 1) if self.compressor.allreduced else self.workers.local

    @property
    def now(self) -> TensorInfo:
        """What is known of the next exchange; elastic jobs change their size between steps."""
        return self.info.at(step=self.step, rank=self.workers.across.rank(), world=self.workers.across.size())

    def typical(self, info: TensorInfo) -> TensorInfo:
        """The largest part of a tensor that a worker of this host exchanges: all of them have to choose alike."""
        if not self.compressor.hierarchical:
            return info
        pieces = exchange.ranges(info.numel, self.compressor.range_multiple, self.local[1], self.index)
        return info.part(*max(pieces, key=lambda piece: piece[1] - piece[0]))

    def make_room(self) -> None:
        """Allocate what is missing, and take in what was kept for a range that this worker no longer owns."""
        info, compressor = self.now, self.compressor
        # After the warm-up state is needed, also where an elastic job starts with one worker.
        compressible = exchange.compressible(compressor if self.travels.name == "none" else self.travels,
                                             self.typical(info.at(world=max(2, info.world))))
        place, places = self.local
        first, last = self.piece = exchange.ranges(info.numel, compressor.range_multiple, places, self.index)[place]
        shapes = compressor.state_shapes(info.part(first, last)) if compressible else memory.of(compressor).always(info)
        owned = (0, 0)
        if compressible and self.travels.exchange == "sra" and info.world > 1:
            a, b = exchange.ranges(last - first, compressor.range_multiple, info.world, self.index)[info.rank]
            owned = first + a, first + b
            of_owner = compressor.state_shapes(info.part(*owned), role="owner")
            shapes |= {OWNER + key: shape for key, shape in of_owner.items()}
        if self.owned not in ((0, 0), owned):
            self._give_back(info, first, last)
        self.owned = owned
        old, self.state = self.state, {}
        for key, shape in shapes.items():
            fits = key in old and tuple(old[key].shape) == tuple(shape)
            self.state[key] = old[key] if fits else torch.zeros(shape, dtype=torch.float32, device=self.parameter.device)

    def _give_back(self, info: TensorInfo, first: int, last: int) -> None:
        """Let go of the range that this worker owned: what was kept for it joins what it keeps of its own gradient's entries."""
        kept = self.state.pop(f"{OWNER}residual", None)
        a, b = self.owned
        if kept is not None and not first <= a <= b <= last:
            _log.warning("compression state of %s: what was kept of entries %d to %d, which other workers exchange now, is dropped",
                         info.name, a, b)
        elif kept is not None and "residual" in self.state:
            # An owner keeps means, and of this worker's residual a mean gets one part in `world`.
            self.state["residual"][a - first:b - first].add_(kept, alpha=info.world)
            self.kept = True
        elif kept is not None and "estimate" in self.state:
            # It is missing from the mean of the estimates, as if this worker's were that much smaller.
            self.state["estimate"][a - first:b - first].sub_(kept, alpha=info.world)


_states: weakref.WeakSet[State] = weakref.WeakSet()


def compresses() -> bool:
    """Whether anything in this process travels otherwise than dense, now or after a warm-up."""
    return any(slot.travels.name != "none" for state in _states for slot in state.slots.values())


class State:
    """The compression state of named parameters.

    Arguments:
        select: from a name to its compressor.
        op: Average or Sum.
        process_set: the workers to reduce over.
        network: the module by which gradients travel: :mod:`hvd_quant.torch.network`, or one with the same names.

    Attributes:
        slots: by name, in the same order on all workers.
        loss_scale: by what the loss is multiplied; None until it is told.
        amid: a step: gradients have arrived that are not reduced yet.
    """

    def __init__(self, select: Callable[[str], Compressor], op: int, process_set: ProcessSet, network: Any) -> None:
        self.select, self.op, self.process_set, self.network = select, op, process_set, network
        self.slots: dict[str, Slot] = {}
        self.loss_scale: float | None = None
        self._told = False  # rather than loaded
        self.amid = False
        self._by_host: Workers | None = None
        self._joined = False  # the other workers of an elastic job, whose counts this one has then
        _states.add(self)

    def add(self, name: str, p: torch.Tensor, index: int) -> None:
        """Take in one more parameter.

        Arguments:
            index: its place among all parameters, frozen ones too: who owns which of its ranges depends on it.

        Raises:
            TypeError: if it is not real floating point.
            ValueError: for hierarchical exchange where it can't work.
        """
        if p.dtype not in _REAL:
            raise TypeError(f"parameter {name} is {p.dtype}; gradients of {', '.join(map(str, _REAL))} can be reduced: "
                            "leave it out of the optimizer, or use compression='none'")
        info, compressor = TensorInfo.whole(name, p.shape), self.select(name)
        # All workers are here when they wrap their optimizers.
        self.slots[name] = Slot(p, compressor, info, index, self.workers(compressor), {}, (0, info.numel))

    def workers(self, compressor: Compressor) -> Workers:
        """Who reduces with whom; all workers have to be here where a hierarchical compressor is asked for first."""
        if not compressor.hierarchical:
            return Workers(self.process_set, self.process_set)
        if self._by_host is None:
            self._by_host = self.network.workers_by_host(self.process_set)
        return self._by_host

    def whose(self) -> dict[str, int | None]:
        """This worker's rank and the number of workers; None outside of the process set."""
        if not self.process_set.included():
            return {"rank": None, "world": None}
        return {"rank": self.process_set.rank(), "world": self.process_set.size()}

    # ----------------------------------------------------------------------------------------------------- loss scale

    def set_loss_scale(self, scale: float) -> None:
        """Say by what the loss is multiplied from the next backward on. What is kept of gradients is multiplied along, and what
        compressors are told in units of the gradient counts for the unscaled one.

        Arguments:
            scale: the same on all workers.

        Raises:
            ValueError: for what is no such number.
            RuntimeError: amid a step whose gradients are of another scale.
        """
        if not (is_number(scale) and 0 < scale < math.inf):
            raise ValueError(f"a loss scale of {scale!r} is not accepted; give a finite number above 0")
        factor = scale / (self.loss_scale or 1.0)
        if factor != 1 and self.amid:
            raise RuntimeError(f"the loss scale can't become {scale:g} now, since gradients of a loss times {self.loss_scale or 1.0:g} "
                               "are being exchanged: call set_loss_scale before backward, or after synchronize()")
        if factor != 1:
            for slot in self.slots.values():
                for value in slot.state.values():
                    value.mul_(factor)
        self.loss_scale, self._told = scale, True

    def follow_scaler(self) -> None:
        """As a step begins, take the scale of the scaler whose backward is running; without one, and never told any, the loss is as it
        is, whatever it was where a checkpoint was made."""
        scale = running_scale()
        if scale is None and not self._told:
            scale = 1.0
        if scale is not None:
            self.set_loss_scale(scale)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Residuals and step counts by parameter name, as what they travel, and whose they are."""
        state = saved(self.slots, torch.clone, **self.whose()) | {"loss_scale": self.loss_scale or 1.0}
        for name, slot in self.slots.items():
            state["tensors"][name] |= {"travels": slot.travels.spec, "averaged": slot.averaged}
        return state

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Take up what :meth:`state_dict` returned, or of a list of what it returned on all workers this worker's part; what no
        longer fits is reset, with a line in the log.

        Raises:
            ValueError: if it is of another worker, number of workers, or format; then nothing is changed.
        """
        state = of_this_worker(state, self.op == Average, **self.whose())
        check(state, **self.whose())
        found = state["tensors"]
        for name, slot in self.slots.items():
            kept = found.get(name, {"state": {}})
            owned = [key for key in kept["state"] if key.startswith(OWNER)]
            mine = [key for key in ("residual", "estimate") if key in slot.state]
            fits = all(key in kept["state"] and kept["state"][key].shape == slot.state[key].shape for key in mine)
            if owned and fits and "owned" in kept:
                # If another worker owns that range now, the next plan gives it back.
                slot.owned = tuple(kept["owned"])
                slot.state |= {key: torch.zeros_like(kept["state"][key], device=slot.parameter.device) for key in owned}
        for slot, step, values in restored(state, self.slots, **self.whose()):
            slot.step, slot.kept = step, bool(values)
            kept = found.get(slot.info.name, {})
            slot.averaged = kept.get("averaged", 0)
            same = kept.get("compressor") == slot.compressor.spec
            goes_on = same and kept.get("travels", "none") != "none" and not self.network.ELASTIC
            slot.resumed = get_compressor(kept["travels"]) if goes_on else None
            for key, value in slot.state.items():
                value.copy_(values[key]) if key in values else value.zero_()
        told, self.loss_scale = self.loss_scale if self._told else None, state.get("loss_scale", 1.0)
        if told is not None:
            self.set_loss_scale(told)

    # --------------------------------------------------------------------------------------------------- elastic jobs

    def snapshot(self) -> dict[str, Any]:
        """What :meth:`go_back` takes: copies of all that is kept of gradients on this worker."""
        slots = {name: (slot.step, slot.averaged, slot.kept, slot.piece, slot.owned, {key: value.clone() for key, value in slot.state.items()})
                 for name, slot in self.slots.items()}
        return {"loss_scale": self.loss_scale, "slots": slots}

    def go_back(self, snapshot: dict[str, Any]) -> None:
        """Return to a snapshot, which may be of another number of workers: then ranges move with the next plan."""
        self.loss_scale = snapshot["loss_scale"]
        for name, (step, averaged, kept, piece, owned, state) in snapshot["slots"].items():
            slot = self.slots[name]
            slot.step, slot.averaged, slot.kept, slot.piece, slot.owned = step, averaged, kept, piece, owned
            slot.state = {key: value.clone() for key, value in state.items()}

    def join(self) -> None:
        """Take worker 0's numbers of steps, as all workers of an elastic job do when some have come or gone. "ef21" begins anew,
        since newcomers lack the mean of the estimates."""
        counts = broadcast_object({name: (slot.step, slot.averaged) for name, slot in self.slots.items()}, name="hvd_quant.join")
        for name, slot in self.slots.items():
            slot.step, slot.averaged = counts.get(name, (0, 0))
            if slot.compressor.memory == "ef21":
                slot.step, slot.averaged, slot.kept = 0, 0, False
                for value in slot.state.values():
                    value.zero_()
        self._joined = True

    def require_joined(self) -> None:
        """Raise a ValueError in an elastic job where newcomers would need the others' numbers of steps and don't get them."""
        if self.network.ELASTIC and not self._joined:
            for slot in self.slots.values():
                slot.compressor.require_no_counts()

    # --------------------------------------------------------------------------------------------- what users ask for

    def residual_norms(self) -> dict[str, float]:
        """The 2-norm of what is kept of each parameter's gradients, an owner's included."""
        kept = {name: [value for key, value in slot.state.items() if key.endswith("residual")] for name, slot in self.slots.items()}
        return {name: sum(float(value.double().square().sum()) for value in values) ** 0.5 for name, values in kept.items() if values}

    @property
    def compressors(self) -> dict[str, Compressor]:
        """What the user chose, by parameter."""
        return {name: slot.compressor for name, slot in self.slots.items()}

    @property
    def averaged(self) -> bool:
        """Whether no parameter may differ between workers, or none has moved since it was averaged last."""
        return all(slot.step == slot.averaged for slot in self.slots.values() if slot.compressor.averaging)

    def to_average(self, all: bool = False) -> list[tuple[str, torch.Tensor]]:
        """The parameters whose values are to be averaged over the workers now, as their compressors' ``average_every`` says, and
        as many workers take it; what is returned counts as averaged.

        Arguments:
            all: those that may differ between workers, however long ago they were averaged.
        """
        due = [slot for slot in self.slots.values() if slot.compressor.averaging
               and slot.step - slot.averaged >= (1 if all else slot.compressor.averaging)]
        for slot in due:
            slot.averaged = slot.step
        return [(slot.info.name, slot.parameter) for slot in due]
