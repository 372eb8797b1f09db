"""The compression state of one worker as a dictionary of tensors, numbers and strings, for a checkpoint a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from hvd_quant.compressors import Compressor

_log = logging.getLogger("hvd_quant")

OWNER = "owner."
"""Starts the names of the state that a worker keeps as the owner of a range."""


class Slot(Protocol):
    """What a frontend keeps for one parameter.

    Attributes:
        piece, owned: (first, one past last) entry of what this worker encodes, and of what it reduces for all.
    """

    compressor: Compressor
    state: Mapping[str, Any]
    step: Any
    piece: tuple[int, int]
    owned: tuple[int, int]


def saved(slots: Mapping[str, Slot], copy: Callable[[Any], Any], rank: int | None, world: int | None) -> dict[str, Any]:
    """State, its ranges and step counts by parameter name, and whose they are.

    Arguments:
        copy: from a tensor of the state to one that training doesn't change.
        rank, world: this worker's in the process set; None outside it.
    """
    tensors = {name: {"compressor": slot.compressor.spec, "step": int(slot.step),
                      "state": {key: copy(value) for key, value in slot.state.items()},
                      "piece": list(slot.piece), "owned": list(slot.owned)}
               for name, slot in slots.items()}
    return {"version": 1, "rank": rank, "world": world, "tensors": tensors}


def check(state: Mapping[str, Any], rank: int | None, world: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``state`` holds, by name: (compressor, step, tensors), and the tensors' shapes.

    Raises:
        ValueError: if it is of another worker, number of workers, or format, or damaged.
    """
    found = {key: state.get(key) for key in ("version", "rank", "world")}
    if found != {"version": 1, "rank": rank, "world": world}:
        raise ValueError(f"the compression state is of worker {found['rank']} of {found['world']}, format "
                         f"{found['version']}; this is worker {rank} of {world} and reads format 1: each worker has to save and "
                         "load its own")
    try:
        tensors = {name: (kept["compressor"], int(kept["step"]), dict(kept["state"]))
                   for name, kept in state["tensors"].items()}
        shapes = {name: {key: tuple(value.shape) for key, value in values.items()} for name, (_, _, values) in tensors.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the compression state is damaged: {type(error).__name__}: {error}; it should be what was "
                         "saved") from error
    return tensors, shapes


def restored(state: Mapping[str, Any], slots: Mapping[str, Slot], rank: int | None,
             world: int | None) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """Each slot with the step and the tensors that ``state`` holds for it; what no longer fits, or is of other entries than this
    worker's (which depend on the parameter's place among all), is left out, with a line in the log, and has to start at zero.

    Raises:
        ValueError: before the first slot, if the state is of another worker, number of workers, or format.
    """
    tensors, shapes = check(state, rank, world)
    for name in tensors.keys() - slots.keys():
        _log.warning("compression state of %s is dropped: there is no such parameter", name)
    for name, slot in slots.items():
        compressor, step, values = tensors.get(name, (slot.compressor.spec, 0, {}))
        if compressor != slot.compressor.spec:
            _log.warning("compression state of %s was kept for %s and goes on with %s", name, compressor, slot.compressor.spec)
        for key, value in slot.state.items():
            which = "owned" if key.startswith(OWNER) else "piece"
            old, new = shapes.get(name, {}).get(key), tuple(value.shape)
            of_old, of_new = tuple(state["tensors"].get(name, {}).get(which, ())), tuple(getattr(slot, which))
            if (old, of_old) != (new, of_new):
                found = "none" if old is None else f"shape {old} of entries {of_old}"
                _log.warning("compression state %s of %s starts at zero: the checkpoint has %s, the model needs shape %s of "
                             "entries %s", key, name, found, new, of_new)
                values.pop(key, None)
        yield slot, step, values
