"""What is kept for variables between steps: residuals, step counts, and what their exchanges cost."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_quant import exchange
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange.checkpoint import restored, saved
from hvd_quant.exchange.stats import Stats
from hvd_quant.registry import resolve, selector, unmatched
from hvd_quant.tensorflow.variables import path_of, plain

_REAL = (tf.float32, tf.float16, tf.bfloat16, tf.float64)
COLLECTION = "hvd_quant"
"""Of a TensorFlow 1 graph: the variables that are each worker's own."""
TIMES = ("started", "encoded", "arrived", "decoded")  # when each stage of an exchange had its result
COSTS = ("dense_bytes", "wire_bytes", *TIMES, "void_tensors")


class Slot(tf.Module):
    """What is kept for one variable.

    Attributes:
        label: what the names of its collectives have in common, the same on all workers.
        compressor: its compressor.
        info: what is known of it.
        state: name -> fp32 variable.
        step: int64 variable, exchanges so far.
        costs: float64 variable, totals of what ``COSTS`` names, times being sums of moments; not part of a checkpoint.
        sparse: whether its gradient was an uncompressed ``tf.IndexedSlices`` when last a graph was made.
    """

    def __init__(self, label: str, name: str, variable: Any, compressor: Compressor, world: int) -> None:
        super().__init__()
        dtype, shape = tf.as_dtype(variable.dtype), tf.TensorShape(variable.shape)
        if dtype not in _REAL and compressor.name != "none":
            raise TypeError(f"variable {name} is {dtype.name}; gradients of {', '.join(d.name for d in _REAL)} can be "
                            "compressed: give it 'none'")
        if not shape.is_fully_defined():
            raise ValueError(f"variable {name} has shape {shape}; its gradient can be reduced when the shape is known: "
                             "make it with one")
        self.label, self.compressor, self.info = label, compressor, TensorInfo.whole(name, shape)
        # An elastic job that starts with one worker may get more, and after the warm-up state is needed.
        compressed = self.kinds(max(2, world))[1] != "dense"
        shapes = compressor.state_shapes(self.info) if compressed else {}
        self.state = {key: _variable(np.zeros(shape, np.float32), f"{label}/{key}") for key, shape in shapes.items()}
        self.step = _variable(np.int64(0), f"{label}/step")
        self.sparse = False
        untracked(self, costs=_variable(np.zeros(len(COSTS)), f"{label}/costs"))

    def kinds(self, world: int) -> tuple[str, str]:
        """How it travels among ``world`` workers: during its compressor's warm-up, and after it."""
        during, after = (exchange.choose(self.compressor, dataclasses.replace(self.info, step=step, world=world),
                                         mpi_ops.mpi_enabled()) for step in (0, self.compressor.warmup))
        # A code in array operations runs on the host, where a payload is made and read in one call each.
        return during, "allgather" if after == "allreduce" and not self.compressor.native else after


class State(tf.Module):
    """Compression state of variables. It belongs to whatever tracks it, and to its checkpoints.

    Arguments:
        compression: as in :func:`hvd_quant.registry.resolve`.
        variables: TensorFlow's or Keras's, in the same order on all workers; one that is met again counts once.
        process_set: the workers to reduce over.
        name: starts the names of the collectives.
        shared: take what the variables themselves have for a compressor, and leave it there.

    Raises:
        TypeError: for a compression that is none, or a variable whose type can't be compressed.
        ValueError: for a variable of unknown shape.
    """

    def __init__(self, compression: Any, variables: Iterable[Any], process_set: ProcessSet, name: str,
                 shared: bool = False) -> None:
        super().__init__()
        compression = resolve(compression)
        variables = list({id(plain(v)): v for v in variables}.values())
        in_horovods_style = not isinstance(compression, Compressor | Mapping)
        select = selector("none" if in_horovods_style else compression)
        names = _unique(path_of(v) for v in variables)
        for pattern in unmatched(compression, names):
            warnings.warn(f"the pattern {pattern!r} in compression= matches no variable; the names are "
                          f"{', '.join(names[:5])}, ...", stacklevel=5)
        world = process_set.size() if process_set.included() else 1
        label = _numbered(re.sub(r"\W", "_", name))

        def slot(place: int, name: str, variable: Any) -> Slot:
            compressor, leaf = select(name), re.sub(r"\W", "_", name.rpartition("/")[2])
            kept = vars(plain(variable)).setdefault("_hvd_quant_slots", {}) if shared else {}
            key = (compressor, process_set.process_set_id)
            if key not in kept:
                kept[key] = Slot(f"{label}_{place}_{leaf}", name, variable, compressor, world)
            return kept[key]

        slots = [slot(i, name, v) for i, (name, v) in enumerate(zip(names, variables))]
        self.by_place = slots  # so checkpoints hold them, since Keras makes up other names for layers each time
        self.owner = Owner(self._whose)
        untracked(self, slots=dict(zip(names, slots)), process_set=process_set, _variables=variables,
                  horovod_style=compression if in_horovods_style else None,
                  _places={id(key): i for i, v in enumerate(variables) for key in (v, plain(v))},
                  reducers={})  # of tapes, by their settings

    def place(self, variable: Any) -> int:
        """Where a variable is among those that this was made for.

        Raises:
            ValueError: if it is none of them.
        """
        place = self._places.get(id(variable), self._places.get(id(plain(variable))))
        if place is None:
            raise ValueError(f"{path_of(variable)} is none of the {len(self._variables)} variables that compression state was "
                             "made for: give all variables that are trained when it is made (to bind(), or to the optimizer)")
        return place

    def slot(self, variable: Any) -> Slot:
        """What is kept for a variable; raises as :meth:`place`."""
        return self.by_place[self.place(variable)]

    def stats(self) -> dict[str, Any]:
        """What the exchanges cost so far on this worker; see :class:`hvd_quant.exchange.stats.Stats`. Seconds are summed over
        tensors, whose exchanges overlap."""
        stats = Stats(steps=max((int(slot.step) for slot in self.slots.values()), default=0))
        world = max(2, self.process_set.size()) if self.process_set.included() else 2
        for name, slot in self.slots.items():
            costs = dict(zip(COSTS, slot.costs.numpy().tolist()))
            for what in ("dense_bytes", "wire_bytes", "void_tensors"):
                setattr(stats, what, getattr(stats, what) + costs[what])
            stats.encode_seconds += costs["encoded"] - costs["started"]
            stats.wait_seconds += costs["arrived"] - costs["encoded"]
            stats.decode_seconds += costs["decoded"] - costs["arrived"]
            during, after = slot.kinds(world)
            if slot.step > 0:
                warming_up = slot.step <= slot.compressor.warmup
                stats.exchanges[name] = "sparse" if slot.sparse else during if warming_up else after
        stats.void_tensors = round(stats.void_tensors)
        return stats.as_dict()

    def state_dict(self) -> dict[str, Any]:
        """Residuals (NumPy arrays) and step counts by variable name, and whose they are."""
        return saved(self.slots, lambda value: value.numpy(), **self._whose())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned; what no longer fits is reset, with a line in the log.

        Where names differ, as those of layers do when Keras makes them up again, variables are told apart by their places.

        Raises:
            ValueError: if it is of another worker, number of workers, or format; then nothing is changed.
        """
        tensors = state.get("tensors")
        if isinstance(tensors, Mapping) and len(tensors) == len(self.slots) and tensors.keys() != self.slots.keys():
            state = {**state, "tensors": dict(zip(self.slots, tensors.values()))}
        for slot, step, values in restored(state, self.slots, **self._whose()):
            slot.step.assign(step)
            for key, value in slot.state.items():
                value.assign(values.get(key, np.zeros(value.shape, np.float32)))

    def _whose(self) -> dict[str, int | None]:
        if not self.process_set.included():
            return {"rank": None, "world": None}
        return {"rank": self.process_set.rank(), "world": self.process_set.size()}


class Owner(tf.Module):
    """Puts into a checkpoint whose the state is, and lets it be restored by that worker alone."""

    def __init__(self, whose: Callable[[], dict[str, int | None]]) -> None:
        super().__init__()
        untracked(self, _whose=lambda: [-1 if value is None else value for value in whose().values()])

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"rank_and_world": tf.constant(self._whose(), tf.int64)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        if tf.executing_eagerly() and restored["rank_and_world"].numpy().tolist() != self._whose():
            (rank, world), (own_rank, own_world) = restored["rank_and_world"].numpy().tolist(), self._whose()
            raise ValueError(f"the compression state is of worker {rank} of {world}; this is worker {own_rank} of {own_world}: "
                             "each worker has to save and restore its own, in a checkpoint of its own name")


def state_of(compression: Any, variables: list[Any], process_set: ProcessSet) -> State:
    """The state that a tape's compression has for ``variables``; a :class:`State` (what ``bind`` returns) is its own.

    A tape lives for one step, so what is kept can't be its own: it is the variables', one slot for each compressor.
    """
    if isinstance(compression, State):
        return compression
    compression = resolve(compression)
    if isinstance(compression, Mapping):
        chosen: Any = tuple(compression.items())
    else:
        chosen = compression if isinstance(compression, Compressor) else id(compression)
    views = vars(plain(variables[0])).setdefault("_hvd_quant_states", {})
    key = (tuple(map(id, variables)), chosen, process_set.process_set_id)
    if key not in views:
        while len(views) >= _MOST_VIEWS:
            del views[next(iter(views))]
        views[key] = State(compression, variables, process_set, "DistributedGradientTape", shared=True)
    return views[key]


_MOST_VIEWS = 4
"""Sets of sources that a variable remembers as their first one. They hold graphs and other variables, but no state."""


def untracked(module: tf.Module, **attributes: Any) -> None:
    """Set attributes that are no part of the module's checkpoints and stay what they are, where dicts would be wrapped."""
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def _unique(names: Iterable[str]) -> list[str]:
    """The names, with _1, _2... added where one is met again."""
    unique: dict[str, None] = {}
    for name in names:
        numbered, n = name, 0
        while numbered in unique:
            n += 1
            numbered = f"{name}_{n}"
        unique[numbered] = None
    return list(unique)


_numbers: dict[str, int] = {}


def _numbered(label: str) -> str:
    """``label``, or ``label_1``... when it is asked for again. Workers make their states in the same order."""
    n = _numbers[label] = _numbers.get(label, -1) + 1
    return f"{label}_{n}" if n else label


def _variable(value: np.ndarray, name: str) -> tf.Variable:
    """A variable on the host, where the codes run, and outside of whatever is being traced. (A tf.Variable would make
    tf.function trace twice.)"""
    # In a graph of TensorFlow 1 it is initialised with the others, and the second collection tells it from them.
    collections = [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, COLLECTION]
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(value, trainable=False, name=f"hvd_quant/{name}", collections=collections)
