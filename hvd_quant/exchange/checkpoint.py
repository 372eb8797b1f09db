"""The compression state of one worker as a dictionary of tensors, numbers and strings, for a checkpoint a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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


_LINEAR = ("residual", "velocity", "average", "estimate")
"""State of which the mean over the workers is what reaches the optimizer."""


def averaged(op: int | None) -> bool | None:
    """Whether Horovod's reduction of that number is Average; None if it isn't known.

    Raises:
        ValueError: for another one than Average and Sum.
    """
    if op not in (None, 0, 1):
        raise ValueError(f"op={op!r} is none whose state can be shared out: give hvd.Average or hvd.Sum")
    return None if op is None else op == 0


def of_this_worker(states: Any, average: bool | None, rank: int | None, world: int | None) -> Any:
    """The state that a worker takes up of a list of all workers' states: its own, or, where they were another number of workers, an
    equal share of what all of them had kept. What is given is handed back if it is no list.

    An owner's residual is of a mean, so it goes into each share; a share of "ef21" has what an owner has left out of the mean taken
    off its estimate. Of a code's own state that is kept which is the same on all workers, such as PowerSGD's Q.

    Arguments:
        states: as :func:`saved` makes them, one a worker, in any order.
        average: whether gradients are averaged, or else summed: then shares add up to what had been kept. None if it isn't known.
        rank, world: of this worker now.

    Raises:
        ValueError: if one is missing, or two are of the same worker, or they are of hierarchical exchange, in which each worker keeps a
            part of a tensor; and if shares depend on ``average``, which is None.
    """
    if not isinstance(states, Sequence):
        return states
    if not all(isinstance(state, Mapping) for state in states):
        raise ValueError(f"a list of {', '.join(sorted({type(state).__name__ for state in states}))} is not one of compression states; give "
                         "what each worker saved")
    found = [(state.get("rank"), state.get("world")) for state in states]
    if len(found) != len(set(found)) or set(found) != {(i, len(states)) for i in range(len(states))}:
        raise ValueError(f"{len(states)} compression states are of the workers {', '.join(f'{one} of {all}' for one, all in found)}; give "
                         "one of each worker that there was")
    states = sorted(states, key=lambda state: state["rank"])
    if len(states) == world:
        return states[rank]
    if average is None:
        raise ValueError(f"what {world} workers take up of {len(states)} compression states depends on whether gradients are averaged or "
                         "summed: say load_state_dict(states, op=hvd.Average) or op=hvd.Sum, as the tape or optimizer has it")
    for i, state in enumerate(states):
        check(state, i, len(states))
        if state["tensors"].keys() != states[0]["tensors"].keys():
            raise ValueError(f"the compression state of worker {i} is of other parameters than worker 0's: give states of the same step of "
                             "the same job")
    tensors = {name: _share(name, [state["tensors"][name] for state in states], average, world) for name in states[0]["tensors"]}
    return {**states[0], "rank": rank, "world": world, "tensors": tensors}


def _share(name: str, each: list[dict[str, Any]], average: bool, world: int | None) -> dict[str, Any]:
    """What one of ``world`` workers takes up of what each had kept of a tensor."""
    if not all("piece" in one and "owned" in one for one in each):
        raise ValueError(f"the compression state of {name} doesn't say of which entries it is, as an older version saved it: load it with "
                         f"{len(each)} workers, and save it again")
    piece = each[0]["piece"]
    if any(one["piece"] != piece for one in each):
        raise ValueError(f"the compression state of {name} is of hierarchical exchange, which can't be shared out among another number of "
                         f"workers: start without it, or with {len(each)} workers")
    factor = 1.0 if average else len(each) / world  # of the mean
    state = {}
    for key, first in each[0]["state"].items():
        values = [one["state"].get(key) for one in each]
        if key.startswith(OWNER) or any(value is None or value.shape != first.shape for value in values):
            continue
        if key in _LINEAR:
            state[key] = sum(values[1:], start=first + 0) * (factor / len(each))
        elif all(bool((value == first).all()) for value in values):
            state[key] = first * factor if key == "mean" else first  # of the estimates
    into, sign = ("residual", 1) if "residual" in state else ("estimate", -1)
    for one in each:
        kept, (a, b) = one["state"].get(f"{OWNER}residual"), one["owned"]
        if kept is not None and into in state:
            state[into][a - piece[0]:b - piece[0]] += sign * factor * kept
    return {**each[0], "state": state, "owned": [0, 0], "travels": "none"}  # which is decided anew


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
        before = shapes.get(name, {})
        # A range of another tensor is another one, though it may have as many entries.
        another = any(key in before and before[key] != tuple(value.shape) for key, value in slot.state.items()
                      if not key.startswith(OWNER))
        for key, value in slot.state.items():
            which = "owned" if key.startswith(OWNER) else "piece"
            old, new = before.get(key), tuple(value.shape)
            of_old, of_new = tuple(state["tensors"].get(name, {}).get(which, ())), tuple(getattr(slot, which))
            if (old, of_old) != (new, of_new) or another and which == "owned":
                found = "none" if old is None else f"shape {old} of entries {of_old}"
                _log.warning("compression state %s of %s starts at zero: the checkpoint has %s, the model needs shape %s of "
                             "entries %s", key, name, found, new, of_new)
                values.pop(key, None)
        yield slot, step, values
