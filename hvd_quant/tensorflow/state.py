"""What is kept for variables between steps: residuals, step counts, and what their exchanges cost."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_quant import exchange
from hvd_quant.compressors import Compressor, TensorInfo, advice, memory
from hvd_quant.exchange import rows
from hvd_quant.exchange.checkpoint import OWNER, of_this_worker, restored, saved
from hvd_quant.exchange.stats import Bucket, Stats
from hvd_quant.registry import get_compressor, resolve, selector, unmatched
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.variables import path_of, plain

_NONE = get_compressor("none")
REAL = (tf.float32, tf.float16, tf.bfloat16, tf.float64)
COLLECTION = "hvd_quant"
"""Of a TensorFlow 1 graph: the variables that are each worker's own."""
COSTS = ("dense_bytes", "wire_bytes", "encode_seconds", "wait_seconds", "decode_seconds", "void_tensors")


class Way(NamedTuple):
    """How gradients travel from their exchange ``first`` on, counted from 0: by which exchange, and as what."""

    first: int
    kind: str
    compressor: Compressor | None


class Slot(tf.Module):
    """What is kept for one variable.

    Attributes:
        variable: itself.
        label: what the names of its collectives have in common, the same on all workers.
        index: its place among the variables that it was made with.
        compressor: what the user chose for it.
        travels: as what it travels: ``compressor`` with one exchange, or fp16 or none where that is faster; known once a graph
            has been made.
        info: what is known of it.
        workers: who reduces it with whom.
        pieces: the entries that each worker of a host exchanges: all of them, or with hierarchical exchange a range.
        state: name -> fp32 variable; names that start with ``OWNER`` are of the range that this worker reduces for all.
        step: int64 variable, exchanges so far.
        averaged: int64 variable, exchanges until the variable was averaged last; None where it isn't.
        sparse: whether its gradient was a ``tf.IndexedSlices`` when last a graph was made.
        in_step: a number that slots share which had the same number of exchanges when last a graph was made.
    """

    def __init__(self, label: str, index: int, name: str, variable: Any, compressor: Compressor,
                 workers: network.Workers) -> None:
        super().__init__()
        dtype, shape = tf.as_dtype(variable.dtype), tf.TensorShape(variable.shape)
        if dtype not in REAL and (compressor.name != "none" or compressor.momentum):
            raise TypeError(f"variable {name} is {dtype.name}; gradients of {', '.join(d.name for d in REAL)} can be "
                            "compressed: give it 'none'")
        if not shape.is_fully_defined():
            raise ValueError(f"variable {name} has shape {shape}; its gradient can be reduced when the shape is known: "
                             "make it with one")
        if network.ELASTIC and compressor.memory == "ef21":
            raise ValueError(f"{compressor.spec}: a worker that joins an elastic job doesn't have the mean that the others have "
                             "summed up; use error feedback as memory there")
        info, (place, places) = TensorInfo.whole(name, shape), workers.local
        pieces = ([(0, info.numel)] * places if compressor.allreduced else
                  exchange.ranges(info.numel, compressor.range_multiple, places, index))
        untracked(self, variable=plain(variable), label=label, index=index, compressor=compressor, travels=compressor, info=info,
                  workers=workers, pieces=pieces, sparse=False, in_step=0)
        self.state = {key: _variable(np.zeros(shape, np.float32), f"{label}/{key}") for key, shape in self._shapes(place).items()}
        _slots.add(self)
        self.step = _variable(np.int64(0), f"{label}/step")
        self.averaged = _variable(np.int64(0), f"{label}/averaged") if compressor.averaging else None

    def _shapes(self, place: int) -> dict[str, tuple[int, ...]]:
        compressor, workers, (first, last) = self.compressor, self.workers, self.pieces[place]
        if workers.across is None or not exchange.compressible(compressor, self.typical):
            return memory.of(compressor).always(self.info)
        shapes = compressor.state_shapes(self.info.part(first, last))
        scattered = compressor.exchange == "sra" or compressor.exchange == "auto" and not compressor.linear and workers.world > 2
        if scattered and workers.world > 1 and not network.ELASTIC:
            a, b = self.owned
            owned = compressor.state_shapes(self.info.part(a, b), role="owner")
            shapes = {**shapes, **{OWNER + key: shape for key, shape in owned.items()}}
        return shapes

    @property
    def counts(self) -> list[tf.Variable]:
        """What is the same on all workers."""
        return [self.step] if self.averaged is None else [self.step, self.averaged]

    @property
    def begun(self) -> int:
        """Its exchanges so far, also while a graph is made; 0 without stages, and in TensorFlow 1, where they aren't known then."""
        if not self.compressor.dense_steps and len(self.compressor.stages()) == 1:
            return 0
        with tf.init_scope():
            return int(self.step) if tf.executing_eagerly() else 0

    @property
    def worker_state(self) -> dict[str, tf.Variable]:
        return {key: value for key, value in self.state.items() if not key.startswith(OWNER)}

    @property
    def owner_state(self) -> dict[str, tf.Variable]:
        return {key.removeprefix(OWNER): value for key, value in self.state.items() if key.startswith(OWNER)}

    @property
    def piece(self) -> tuple[int, int]:
        """The range that this worker encodes."""
        return self.pieces[self.workers.local[0]]

    @property
    def owned(self) -> tuple[int, int]:
        """The range that this worker reduces for all in a scatter-reduce-allgather."""
        first, last = self.piece
        a, b = exchange.ranges(last - first, self.compressor.range_multiple, self.workers.world, self.index)[self.workers.rank]
        return first + a, first + b

    @property
    def typical(self) -> TensorInfo:
        """The largest piece, after the warm-up: all workers have to choose alike. An elastic job that starts with one worker may
        get more."""
        world = max(2, self.workers.world) if self.workers.across is not None else 1
        info = dataclasses.replace(self.info, step=self.compressor.dense_steps, world=world)
        return info.part(*max(self.pieces, key=lambda piece: piece[1] - piece[0]))

    @property
    def ways(self) -> tuple[Way, ...]:
        """How it travels, one stage of its compressor after another."""
        if self.workers.world == 1 and not network.ELASTIC:
            return (Way(0, "dense", None),)
        stages = {0: None} | {max(first, self.travels.dense_steps): stage for first, stage in self.travels.stages()}
        ways = [self._way(first, stage) for first, stage in stages.items()]
        return tuple(way for i, way in enumerate(ways) if i == 0 or not way.kind == ways[i - 1].kind == "dense")

    def _way(self, first: int, stage: Compressor | None) -> Way:
        kind = "dense" if stage is None else exchange.choose(stage, self.typical, mpi_ops.mpi_enabled())
        # A code in array operations runs on the host, where a payload is made and read in one call each.
        if kind == "sra" and network.ELASTIC or kind == "allreduce" and not stage.native:
            kind = "allgather"
        return Way(first, kind, None if kind == "dense" else stage)

    def left_by(self, way: Way) -> dict[str, tuple[int, float]]:
        """Of the state, what an exchange of another kind has kept and this one wouldn't send: the first of its entries, and how
        many times it is part of a sum over all workers."""
        left, everyone = {}, self.workers.all.size()
        sends_own = way.kind in ("allgather", "sra") or way.kind == "allreduce" and way.compressor.memory != "none"
        if "residual" in self.state and not sends_own:
            left["residual"] = self.piece[0], everyone / self.workers.world
        if OWNER + "residual" in self.state and way.kind != "sra":
            left[OWNER + "residual"] = self.owned[0], everyone
        return left


_slots: weakref.WeakSet[Slot] = weakref.WeakSet()


def compresses() -> bool:
    """Whether anything in this process travels otherwise than dense."""
    return any(way.kind != "dense" for slot in _slots for way in slot.ways)


def slots_of(variables: Iterable[Any]) -> list[Slot]:
    """What this process keeps for variables, whoever reduces their gradients."""
    sought = {id(plain(v)) for v in variables}
    return [slot for slot in _slots if id(slot.variable) in sought]


@dataclasses.dataclass
class Account:
    """What the exchanges of gradients cost that travel together.

    Attributes:
        label: what the names of their collectives have in common.
        slots: whose they are.
        costs: float64 variable, totals of what ``COSTS`` names; not part of a checkpoint.
    """

    label: str
    slots: list[Slot]
    costs: tf.Variable


class State(tf.Module):
    """Compression state of variables. It belongs to whatever tracks it, and to its checkpoints.

    Arguments:
        compression: as in :func:`hvd_quant.registry.resolve`.
        variables: TensorFlow's or Keras's, in the same order on all workers; one that is met again counts once.
        process_set: the workers to reduce over.
        name: starts the names of the collectives.
        shared: take what the variables themselves have for a compressor, and leave it there.
        synced: whether workers that join an elastic job get the others' step counts.

    Raises:
        TypeError: for a compression that is none, or a variable whose type can't be compressed.
        ValueError: for a variable of unknown shape, and in an elastic job for what can't work there.
    """

    def __init__(self, compression: Any, variables: Iterable[Any], process_set: ProcessSet, name: str,
                 shared: bool = False, synced: bool = False) -> None:
        super().__init__()
        compression = resolve(compression)
        variables = list({id(plain(v)): v for v in variables}.values())
        in_horovods_style = not isinstance(compression, Compressor | Mapping)
        select = selector("none" if in_horovods_style else compression)
        names = _unique(path_of(v) for v in variables)
        for pattern in unmatched(compression, names):
            warnings.warn(f"the pattern {pattern!r} in compression= matches no variable; the names are "
                          f"{', '.join(names[:5])}, ...", stacklevel=5)
        label = _numbered(re.sub(r"\W", "_", name))
        chosen = [select(name) for name in names]
        for sentence in advice.left_out(dict(zip(names, chosen))):
            warnings.warn(sentence, stacklevel=5)
        workers = {False: network.Workers(process_set, process_set)}
        if any(compressor.hierarchical for compressor in chosen):
            from hvd_quant.tensorflow import agreement  # which needs this module

            # Where another worker's are not, this is what it hears when it comes to its first exchange.
            agreement.compare([agreement.parameter(name, v, c.spec) for name, v, c in zip(names, variables, chosen)], {}, process_set)
            workers[True] = network.workers_by_host(process_set)

        def slot(place: int, name: str, variable: Any) -> Slot:
            compressor, leaf = chosen[place], re.sub(r"\W", "_", name.rpartition("/")[2])
            kept = vars(plain(variable)).setdefault("_hvd_quant_slots", {}) if shared else {}
            key = (compressor, process_set.process_set_id)
            if key not in kept:
                kept[key] = Slot(f"{label}_{place}_{leaf}", place, name, variable, compressor, workers[compressor.hierarchical])
            return kept[key]

        slots = [slot(i, name, v) for i, (name, v) in enumerate(zip(names, variables))]
        if network.ELASTIC and not synced:
            for compressor in chosen:
                compressor.require_no_counts()
        self.by_place = slots  # so checkpoints hold them, since Keras makes up other names for layers each time
        self.owner = Owner(self._whose)
        untracked(self, slots=dict(zip(names, slots)), process_set=process_set, _variables=variables,
                  horovod_style=compression if in_horovods_style else None,
                  _places={id(key): i for i, v in enumerate(variables) for key in (v, plain(v))},
                  accounts={}, reducers={},  # of gradients that travel together, by their slots; of tapes, by their settings
                  averaging_bytes=_variable(np.float64(0), f"{label}/averaging") if any(c.averaging for c in chosen) else 0.0)

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

    def decide(self, slots: list[Slot]) -> None:
        """Decide as what slots of one compressor travel together; all workers get here together the first time."""
        compressor = slots[0].compressor
        infos = [slot.typical for slot in slots if exchange.compressible(compressor, slot.typical)]
        if not infos or infos[0].world == 1 or compressor.name == "none":
            return
        everyone = dict.fromkeys(slot.compressor for slot in self.by_place)
        chosen = network.travels(compressor, infos, network.costs(slots[0].workers, everyone))
        for slot in slots:
            object.__setattr__(slot, "travels", _NONE if chosen.name == "none" else chosen)

    @property
    def has_momentum(self) -> bool:
        """Whether there is something to do with one worker."""
        return any(slot.compressor.has_momentum for slot in self.by_place)

    def account(self, slots: list[Slot], label: str) -> Account:
        """The account of gradients that travel together."""
        key = tuple(map(id, slots))
        if key not in self.accounts:
            self.accounts[key] = Account(label, slots, _variable(np.zeros(len(COSTS)), f"{label}/costs"))
        return self.accounts[key]

    def count_averaging(self, sizes: Iterable[int]) -> None:
        """Add an averaging of variables because of a merge, which took collectives of so many bytes."""
        world = mpi_ops.size_op(self.process_set.process_set_id) if network.ELASTIC else self.process_set.size()
        self.averaging_bytes.assign_add(exchange.sent_bytes("dense", sum(sizes), tf.cast(world, tf.float64)))

    def stats(self, residual_norms: bool = False) -> dict[str, Any]:
        """What the exchanges cost so far on this worker; see :class:`hvd_quant.exchange.stats.Stats`. Seconds are summed over
        buckets, whose exchanges overlap.

        Arguments:
            residual_norms: add the 2-norm of what is kept of each variable's gradients, which takes a pass over it.
        """
        stats = Stats(steps=max((int(slot.step) for slot in self.slots.values()), default=0))
        names = {slot: name for name, slot in self.slots.items()}
        kinds = {slot: "sparse" if slot.sparse else self._last(slot).kind for slot in names}
        stats.exchanges = {name: kinds[slot] for slot, name in names.items() if slot.step > 0}
        for account in self.accounts.values():
            costs = dict(zip(COSTS, account.costs.numpy().tolist()))
            first = account.slots[0]
            compressor = self._last(first).compressor or _NONE
            spec = (_NONE if first.sparse and not rows.goes_by_row(compressor, first.info) else compressor).spec
            label = account.label if account.label not in stats.buckets else f"{account.label}_{len(stats.buckets)}"
            bucket = stats.buckets[label] = Bucket(kinds[first], spec, [names[slot] for slot in account.slots])
            for what in COSTS:
                for total in (stats, bucket):
                    if hasattr(total, what):
                        setattr(total, what, getattr(total, what) + costs[what])
        stats.void_tensors = round(stats.void_tensors)
        stats.wire_bytes += float(self.averaging_bytes)
        return {**stats.as_dict(), **({"residual_norms": self._residual_norms()} if residual_norms else {})}

    def _residual_norms(self) -> dict[str, float]:
        kept = {name: [value.numpy() for key, value in slot.state.items() if key.endswith("residual")] for name, slot in self.slots.items()}
        return {name: sum(float(np.square(value, dtype=np.float64).sum()) for value in values) ** 0.5
                for name, values in kept.items() if values}

    @staticmethod
    def _last(slot: Slot) -> Way:
        """How it travelled last."""
        return next(way for way in reversed(slot.ways) if way.first < max(1, int(slot.step)))

    def state_dict(self) -> dict[str, Any]:
        """Residuals (NumPy arrays) and step counts by variable name, and whose they are."""
        state = saved(self.slots, lambda value: value.numpy(), **self._whose())
        for name, slot in self.slots.items():
            if slot.averaged is not None:
                state["tensors"][name]["averaged"] = int(slot.averaged)
        return state

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], average: bool | None = None) -> None:
        """Take up what :meth:`state_dict` returned, or of a list of what it returned on all workers, which may have been another
        number, this worker's part; what no longer fits is reset, with a line in the log.

        Where names differ, as those of layers do when Keras makes them up again, variables are told apart by their places.

        Arguments:
            average: whether gradients are averaged, or else summed, on which shares among another number of workers depend; None
                if it isn't known.

        Raises:
            ValueError: if it is of another worker, number of workers, or format, or if shares depend on ``average``, which is None;
                then nothing is changed.
        """
        state = of_this_worker(state, average, **self._whose())
        tensors = state.get("tensors")
        if isinstance(tensors, Mapping) and len(tensors) == len(self.slots) and tensors.keys() != self.slots.keys():
            state = {**state, "tensors": dict(zip(self.slots, tensors.values()))}
        names = {slot: name for name, slot in self.slots.items()}
        for slot, step, values in restored(state, self.slots, **self._whose()):
            slot.step.assign(step)
            if slot.averaged is not None:
                slot.averaged.assign(state["tensors"].get(names[slot], {}).get("averaged", 0))
            for key, value in slot.state.items():
                value.assign(values.get(key, np.zeros(value.shape, np.float32)))

    def _whose(self) -> dict[str, int | None]:
        if not self.process_set.included():
            return {"rank": None, "world": None}
        return {"rank": self.process_set.rank(), "world": self.process_set.size()}


class Owner(tf.train.experimental.PythonState):
    """Puts into a checkpoint whose the state is, and lets it be restored by that worker alone. (TensorFlow restores this before
    any variable, whose shapes may differ between workers.)"""

    def __init__(self, whose: Callable[[], dict[str, int | None]]) -> None:
        self._whose = whose

    def serialize(self) -> str:
        return json.dumps(self._whose())

    def deserialize(self, string_value: str | bytes) -> None:
        found, own = json.loads(string_value), self._whose()
        if found != own:
            raise ValueError(f"the compression state is of worker {found['rank']} of {found['world']}; this is worker {own['rank']} "
                             f"of {own['world']}: each worker has to save and restore its own, in a checkpoint of its own name")


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
