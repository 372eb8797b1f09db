"""What is kept for variables between steps: residuals, step counts, and what their exchanges cost."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
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

_REAL = (tf.float32, tf.float16, tf.bfloat16, tf.float64)
TIMES = ("started", "encoded", "arrived", "decoded")  # when each stage of an exchange had its result
COSTS = ("dense_bytes", "wire_bytes", *TIMES, "void_tensors")


class Slot(tf.Module):
    """What is kept for one variable.

    Attributes:
        index: its place among the variables.
        compressor: its compressor.
        info: what is known of it.
        state: name -> fp32 variable.
        step: int64 variable, exchanges so far.
        costs: float64 variable, totals of what ``COSTS`` names, times being sums of moments; not part of a checkpoint.
        sparse: whether its last gradient was an uncompressed ``tf.IndexedSlices``.
    """

    def __init__(self, index: int, name: str, variable: Any, compressor: Compressor, world: int) -> None:
        super().__init__()
        dtype, shape = tf.as_dtype(variable.dtype), tf.TensorShape(variable.shape)
        if dtype not in _REAL and compressor.name != "none":
            raise TypeError(f"variable {name} is {dtype.name}; gradients of {', '.join(d.name for d in _REAL)} can be "
                            "compressed: give it 'none'")
        if not shape.is_fully_defined():
            raise ValueError(f"variable {name} has shape {shape}; its gradient can be reduced when the shape is known: "
                             "make it with one")
        self.index, self.compressor, self.info = index, compressor, TensorInfo.whole(name, shape)
        # An elastic job that starts with one worker may get more, and after the warm-up state is needed.
        compressed = self.kinds(max(2, world))[1] != "dense"
        shapes = compressor.state_shapes(self.info) if compressed else {}
        self.state = {key: _variable(np.zeros(shape, np.float32)) for key, shape in shapes.items()}
        self.step = _variable(np.int64(0))
        self.sparse = False
        untracked(self, costs=_variable(np.zeros(len(COSTS))))

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
        variables: TensorFlow's or Keras's, in the same order on all workers.
        process_set: the workers to reduce over.

    Raises:
        TypeError: for a compression that is none, or a variable whose type can't be compressed.
        ValueError: for a variable of unknown shape.
    """

    def __init__(self, compression: Any, variables: Iterable[Any], process_set: ProcessSet) -> None:
        super().__init__()
        compression, variables = resolve(compression), list(variables)
        in_horovods_style = not isinstance(compression, Compressor | Mapping)
        select = selector("none" if in_horovods_style else compression)
        names = _unique(path_of(v) for v in variables)
        for pattern in unmatched(compression, names):
            warnings.warn(f"the pattern {pattern!r} in compression= matches no variable; the names are "
                          f"{', '.join(names[:5])}, ...", stacklevel=3)
        world = process_set.size() if process_set.included() else 1
        slots = [Slot(i, name, v, select(name), world) for i, (name, v) in enumerate(zip(names, variables))]
        self.by_place = slots  # so checkpoints hold them, since Keras makes up other names for layers each time
        untracked(self, slots=dict(zip(names, slots)), process_set=process_set, other=compression if in_horovods_style else None, _variables=variables,
                  _slot_of={id(key): slot for v, slot in zip(variables, slots) for key in (v, plain(v))},
                  reducers={})  # of tapes, by their settings

    def slot(self, variable: Any) -> Slot:
        """What is kept for a variable.

        Raises:
            ValueError: if it is none of those that this was made for.
        """
        slot = self._slot_of.get(id(variable)) or self._slot_of.get(id(plain(variable)))
        if slot is None:
            raise ValueError(f"{path_of(variable)} is none of the {len(self._variables)} variables that compression state was "
                             "made for; give all variables that are trained to bind() or build()")
        return slot

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
                stats.exchanges[name] = "sparse" if slot.sparse else during if slot.step <= slot.compressor.warmup else after
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


def state_of(compression: Any, variables: list[Any], process_set: ProcessSet) -> State:
    """The state that a tape's compression has for ``variables``: made at their first use, and as long-lived as they are.

    A tape lives for one step, so the state can't be its own. A :class:`State` (what ``bind`` returns) is returned as it is.
    """
    if isinstance(compression, State):
        return compression
    compression = resolve(compression)
    chosen = tuple(compression.items()) if isinstance(compression, Mapping) else compression
    states = vars(variables[0]).setdefault("_hvd_quant_states", {})
    key = (tuple(map(id, variables)), chosen, process_set.process_set_id)
    if key not in states:
        states[key] = State(compression, variables, process_set)
    return states[key]


def untracked(module: tf.Module, **attributes: Any) -> None:
    """Set attributes that are no part of the module's checkpoints and stay what they are, where dicts would be wrapped."""
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def plain(variable: Any) -> Any:
    """The tf.Variable inside a Keras 3 variable; others as they are."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def path_of(variable: Any) -> str:
    """A variable's name: ``path`` for Keras 3, else ``name`` without TensorFlow's ":0"."""
    path = getattr(variable, "path", None)
    return path if isinstance(path, str) else str(variable.name).removesuffix(":0")


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


def _variable(value: np.ndarray) -> tf.Variable:
    """A variable on the host, where the codes run, and outside of whatever is being traced. (A tf.Variable would make
    tf.function trace twice.)"""
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(value, trainable=False)
