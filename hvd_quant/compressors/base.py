"""The base class of all compressors, and what a compressor may know about the tensor it encodes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvd_quant import wire
from hvd_quant.compressors import memory
from hvd_quant.compressors.memory import MEMORIES
from hvd_quant.compressors.merge import AVERAGE_EVERY, MERGES

Array = Any
"""A flat vector of whatever framework ``ops`` belongs to."""

EXCHANGES = ("auto", "allreduce", "allgather", "sra")


@dataclass(frozen=True)
class TensorInfo:
    """What a compressor may depend on, the same on all workers but for ``rank``.

    Attributes:
        name: the parameter's name.
        shape: the whole tensor's shape.
        numel: entries in the range that is encoded.
        range: (first, one past last) entry of that range in the flattened tensor.
        step: exchanges of this tensor before this one; an int in PyTorch, a scalar tensor in TensorFlow.
        rank: this worker's rank in the process set.
        world: workers in the process set.
        seed: of random codes.
        phase: 0 where a worker encodes its own gradient, 1 where the owner of a range encodes the mean again.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    range: tuple[int, int]
    step: Any = 0
    rank: int = 0
    world: int = 1
    seed: int = 0
    phase: int = 0

    @classmethod
    def whole(cls, name: str, shape: Iterable[int], **known: Any) -> TensorInfo:
        """The record of a tensor that is encoded in one piece."""
        shape = tuple(int(n) for n in shape)
        numel = 1
        for n in shape:
            numel *= n
        return cls(name=name, shape=shape, numel=numel, range=(0, numel), **known)

    def part(self, start: int, stop: int) -> TensorInfo:
        """The record of the entries from ``start`` up to ``stop`` of the flattened tensor."""
        return self.at(numel=stop - start, range=(start, stop))

    def key(self, seed: int) -> int:
        """64 bits for a random code to start from, as a signed number, the same on all workers and at all steps."""
        return _hash(seed, self.seed, self.name)

    def at(self, **known: Any) -> TensorInfo:
        """The record with other values. (``dataclasses.replace`` takes many times as long, for hundreds of ranges a step.)"""
        record = object.__new__(type(self))
        vars(record).update(vars(self), **known)
        return record


@functools.lru_cache(maxsize=4096)
def _hash(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """How gradients travel: what is kept between steps, what is sent, and how it is exchanged.

    A compressor is a frozen dataclass; its fields are its knobs. A new one needs ``name``, :meth:`payload_bytes`,
    :meth:`encode` and :meth:`decode`; the rest has defaults. ``grad`` and state are flat fp32 vectors, payloads flat
    uint8 ones, and ``ops`` is one of ``hvd_quant.ops.{generic, torch, tensorflow}``, which share all their names.

    Arguments:
        exchange: "allgather" (every worker gets every payload), "sra" (scatter-reduce-allgather: each worker reduces a part of
            every tensor for all and encodes the mean again), "allreduce" (linear codes only), or "auto", which goes by what
            they cost on this network and machine.
        only_if_faster: exchange dense or fp16 gradients instead where that takes less time.
        hierarchical: average the gradients of the workers on one host first, uncompressed, and exchange between hosts.
        memory: "error_feedback" keeps what was not sent and adds it to the next gradient; "none" forgets it; "ef21" sends what
            gradients differ by from a running estimate of them.
        warmup: exchange dense gradients for this many steps first.
        min_numel: tensors with fewer entries go dense. So do those whose payload would not be smaller.
        merge: what the optimizer gets; "none": the reduced gradient alone; "sum", "replace" or "error": with a part of this
            worker's own gradient, see :mod:`hvd_quant.compressors.merge`. The workers' parameters differ then, until they are
            averaged.
        average_every: steps between two averagings of the parameters; 0: never, and every 500 where there is a merge.
        momentum: of momentum correction; 0: none. The optimizer itself runs without.
        nesterov: whether that momentum is Nesterov's.
        clip_norm: with momentum correction, clip each tensor's gradient to a 2-norm of this over the square root of the number
            of workers first; 0: don't.
        weight_decay: with momentum correction, add so much of the parameter to its gradient first, instead of the optimizer.
        eta: with "ef21", how much of a new gradient enters the moving average that is estimated; 1: no average.

    Raises:
        ValueError: naming the field, its value and what is accepted.
    """

    name: ClassVar[str]
    linear: ClassVar[bool] = False
    """Whether payloads may be summed as they are, by an allreduce; then :meth:`rounds` says how."""
    sparse: ClassVar[bool] = False
    """Whether most entries are not sent, and decode to 0."""
    faithful: ClassVar[bool] = False
    """Whether all that is lost is what a float type rounds away, so that nothing need be kept."""
    allreduces: ClassVar[int] = 1
    """How many allreduces one after another that takes: as many as :meth:`rounds` yields vectors."""
    native: ClassVar[bool] = False
    """Whether the methods use nothing but the codes in ``ops``, so that TensorFlow can trace them into a graph. Others are
    called there on the host, with NumPy arrays. It is not inherited: a subclass may add array operations."""

    follow_scale: ClassVar[tuple[str, ...]] = ("clip_norm", "weight_decay")
    """The fields that are in units of the gradient, and so follow the scale of a loss."""

    exchange: str = "auto"
    only_if_faster: bool = False
    hierarchical: bool = False
    memory: str = "error_feedback"
    warmup: int = 0
    min_numel: int = 4096
    merge: str = "none"
    average_every: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float = 0.0
    weight_decay: float = 0.0
    eta: float = 1.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.native = vars(cls).get("native", False)

    def __post_init__(self) -> None:
        exchanges = [e for e in EXCHANGES if e != "allreduce" or self.linear]
        self.require("exchange", one_of(exchanges), lambda x: x in exchanges)
        for switch in ("only_if_faster", "hierarchical", "nesterov"):
            self.require(switch, "True or False", lambda x: isinstance(x, bool))
        self.require("memory", one_of(MEMORIES), lambda x: x in MEMORIES)
        for count, unit in {"warmup": "steps", "min_numel": "entries", "average_every": "steps"}.items():
            self.require(count, f"a whole number of {unit}, 0 or more", lambda x: is_int(x) and x >= 0)
        self.require("merge", one_of(MERGES), lambda x: x in MERGES)
        self.require("momentum", "a number from 0 up to, but not, 1", lambda x: is_number(x) and 0 <= x < 1)
        for size in ("clip_norm", "weight_decay"):
            self.require(size, "a number, 0 or more", lambda x: is_number(x) and 0 <= x < math.inf)
        self.require("eta", "a number above 0 and up to 1", lambda x: is_number(x) and 0 < x <= 1)
        for field, why in self._conflicts().items():
            self.require(field, why, lambda x: False)

    def _conflicts(self) -> dict[str, str]:
        """Fields that don't go with others, and what is accepted beside those."""
        found = {}
        if self.merge != "none" and self.memory != "error_feedback":
            found["merge"] = f"'none' beside memory={self.memory!r}, or memory='error_feedback'"
        if self.merge != "none" and self.momentum:
            found["merge"] = "'none' beside momentum correction, in which what is sent is no part of the gradient"
        if self.hierarchical and (self.merge != "none" or self.memory == "ef21" or self.momentum):
            found["hierarchical"] = "False beside a merge, momentum correction or memory='ef21', which go by a worker's own gradient"
        if self.momentum and (self.memory != "error_feedback" or self.linear) and not (self.faithful and self.memory == "none"):
            found["momentum"] = "0 beside a linear code or another memory than 'error_feedback'"
        if self.faithful and self.memory != "none":
            found["memory"] = "'none': there is no residual of what is merely rounded"
        elif self.linear and self.memory == "ef21":
            found["memory"] = "'error_feedback' or 'none', since this code is linear"
        if not self.momentum:
            found |= {field: "it together with momentum=, of whose correction it is a part"
                      for field in ("nesterov", "clip_norm", "weight_decay") if getattr(self, field)}
        if self.eta != 1 and self.memory != "ef21":
            found["eta"] = "1, or memory='ef21'"
        return found

    def require(self, field: str, accepted: str, ok: Callable[[Any], bool]) -> None:
        """Raise a ValueError that names ``field``, its value and what is ``accepted``, unless ``ok(value)``."""
        value = getattr(self, field)
        if not ok(value):
            raise ValueError(f"{self.name}: {field}={value!r} is not accepted; give {accepted}")

    # ------------------------------------------------------------------------------------- what a codec overrides

    def payload_bytes(self, info: TensorInfo) -> int:
        """Bytes of the payload of ``info.numel`` entries, header included; exact, or an upper bound. A code for an allreduce
        alone has none, and says :meth:`summed_bytes`."""
        raise NotImplementedError(f"{type(self).__name__} does not say its payload_bytes(info)")

    def summed_bytes(self, info: TensorInfo) -> int:
        """Bytes of all that :meth:`rounds` yields: what a payload has beside its header, if it has payloads."""
        return self.payload_bytes(info) - wire.HEADER_BYTES

    def state_shapes(self, info: TensorInfo, role: str = "worker") -> dict[str, tuple[int, ...]]:
        """Name and shape of the fp32 state to allocate, zeroed, for a range. It is in units of the gradient, whose scale it follows.

        Arguments:
            role: "worker" for the state of one's own gradient, "owner" for that of a range one reduces for all.
        """
        return memory.of(self).shapes(info, role)

    @property
    def range_multiple(self) -> int:
        """A tensor may be cut into ranges at multiples of this many entries."""
        return 256

    def measure(self, ops: Any, grad: Array, state: Mapping[str, Array], info: TensorInfo) -> Any:
        """What is decided once for a whole tensor (thresholds, scales) before ranges of it are encoded."""
        return None

    def encode(self, ops: Any, grad: Array, state: Mapping[str, Array], params: Any, info: TensorInfo) -> Array:
        """Encode the range ``info.range`` and update its state in place.

        Arguments:
            grad: fp32, shape [info.numel]; not modified.
            state: what :meth:`state_shapes` asked for.
            params: what :meth:`measure` returned.

        Returns:
            The payload: uint8, 1-D, made by ``ops.pack`` or an encoder of ``ops``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement encode")

    def decode_sum(self, ops: Any, payloads: list[Array], info: TensorInfo, out: Array | None = None) -> Array:
        """The sum of what ``payloads`` decode to, added in their order, so that all workers get the same bits.

        Arguments:
            payloads: uint8 views, one a worker, in rank order.
            out: fp32, shape [info.numel], to write into; a fresh vector where None.

        Raises:
            hvd_quant.wire.PayloadError: for a payload that is damaged, foreign, or says that its worker failed.
        """
        out = ops.new_vector(info.numel, payloads[0]) if out is None else out
        return ops.add_up((self.decode(ops, payload, info) for payload in payloads), out)

    def decode(self, ops: Any, payload: Array, info: TensorInfo) -> tuple[Array, bool]:
        """One payload's vector, and whether all of it was finite when it was encoded, as ``ops.unpack`` tells.

        Codecs with a faster way to decode several override :meth:`decode_sum` instead.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither decode nor decode_sum")

    def decode_mean(self, ops: Any, payloads: list[Array], info: TensorInfo, out: Array | None = None) -> Array:
        """:meth:`decode_sum` times the fp32 value of 1 / info.world; codecs override it where that saves a pass."""
        total = self.decode_sum(ops, payloads, info, out)
        total *= np.float32(1 / info.world).item()
        return total

    @property
    def across_tensors(self) -> bool:
        """Whether :meth:`between_steps` has something to do. What it needs is there from :meth:`state_shapes`."""
        return False

    def between_steps(self, ops: Any, slots: list[tuple[TensorInfo, Mapping[str, Array]]]) -> Any:
        """What is decided for several tensors together, once after each step and for the next one; nothing is exchanged.

        It is that of the next step's stage (:meth:`at`) which is called.

        Arguments:
            slots: what :meth:`encode` had of each tensor that has state with this compressor as a worker: the record of the
                entries that it encodes, as one range, and the state.

        Returns:
            In a graph, what is done when the state is written.
        """
        return None

    def stages(self) -> tuple[tuple[int, Compressor | None], ...]:
        """What a tensor's gradients travel as: pairs of the first step, and the compressor from there on or None for dense.

        First steps ascend from 0. The last compressor stays; all have state of the same shapes. As a default, dense for the
        steps of the warm-up, and then this compressor.
        """
        return ((0, None), (self.warmup, self)) if self.warmup else ((0, self),)

    def rounds(self, ops: Any, grad: Array, state: Mapping[str, Array], info: TensorInfo,
               out: Array) -> Generator[Array, Array, tuple[Array, Any]]:
        """How a linear code reduces a gradient by allreduce: :attr:`allreduces` rounds, written as a generator.

        It yields a vector, is sent back its sum over the workers in the same memory, and in the end returns the mean gradient,
        which it may have written into ``out``, and whether the exchange counts: with a value that was not finite it may be void,
        the mean NaN throughout and all state as before. ``out`` may be ``grad`` itself. Until the last sum is there, nothing
        but what is yielded may change: an exchange that is cancelled, or fails, ends before.
        """
        raise NotImplementedError(f"{self.name} is not linear: it can't be exchanged by allreduce")

    def require_allreduce(self) -> None:
        """Refuse, in a code that has :meth:`rounds` alone, the common knobs of codes that travel as payloads."""
        self.require("exchange", "'auto' or 'allreduce': its values are summed by Horovod", lambda x: x in ("auto", "allreduce"))
        self.require("only_if_faster", "False: its allreduces aren't measured", lambda x: not x)

    # ----------------------------------------------------------------------------------- what every codec comes with

    def undo(self, ops: Any, grad: Array, state: Mapping[str, Array], payload: Array, info: TensorInfo) -> Any:
        """Return the state to its value before ``payload`` was encoded from ``grad``, to fp32 rounding of what was added.

        This knows the residual; state of a codec's own is copied before :meth:`measure`, and put back afterwards. What it returns
        is done when the state is back.
        """
        if "residual" in state:
            own = self.decode_sum(ops, [ops.without_flags(payload)], info)
            return ops.restore(state["residual"], own, grad)
        return None

    def at(self, step: int) -> Compressor | None:
        """What a tensor's gradient travels as after ``step`` exchanges, as :meth:`stages` has it; None: dense."""
        return next(compressor for first, compressor in reversed(_stages(self)) if first <= step)

    def scaled(self, factor: float) -> Compressor:
        """This compressor for gradients that are ``factor`` times as large, as those of a loss that is scaled are."""
        return self if factor == 1 else _scaled(self, factor)

    @property
    def spec(self) -> str:
        """The string from which :func:`hvd_quant.get_compressor` makes an equal compressor."""
        knobs = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                knobs.append(f"{field.name}={str(value).lower() if isinstance(value, bool) else value}")
        return self.name + (":" + ",".join(knobs) if knobs else "")

    @property
    def dense_steps(self) -> int:
        """Steps in which everything goes uncompressed: the warm-up, and the one from which "ef21" starts."""
        return max(self.warmup, int(self.memory == "ef21"))

    @property
    def averaging(self) -> int:
        """Steps between two averagings of the parameters, 0 where there are none."""
        return self.average_every or (AVERAGE_EVERY if self.merge != "none" else 0)

    @property
    def counted(self) -> bool:
        """Whether all workers have to count a tensor's exchanges alike."""
        return bool(self.dense_steps or self.averaging or len(self.stages()) > 1)

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer gets something else than the mean gradient even where nothing is compressed, and with one worker:
        momentum correction, or the moving average of "ef21"."""
        return bool(memory.of(self).always(TensorInfo.whole("", (1,))))

    @property
    def allreduced(self) -> bool:
        """Whether it travels by one allreduce, or several, of whole tensors among all workers."""
        return self.linear and self.exchange in ("auto", "allreduce")

    @property
    def stateful(self) -> bool:
        """Whether anything is kept between steps."""
        return bool(self.state_shapes(TensorInfo.whole("", (1,))))

    # ------------------------------------------------------------------- Horovod's own optimizers and collectives

    def bind(self, parameters: Iterable[Any], process_set: Any = None) -> Any:
        """This compressor as Horovod's stock optimizer and tape take it, with state for each of ``parameters``.

        Example::

            opt = horovod.torch.DistributedOptimizer(opt, named_parameters=model.named_parameters(),
                                                     compression=Compression.onebit().bind(model.named_parameters()))
            bound = Compression.onebit().bind(model.trainable_variables)
            tape = horovod.tensorflow.DistributedGradientTape(tape, compression=bound)

        Arguments:
            parameters: what the optimizer or tape gets: (name, parameter) pairs in PyTorch, variables in TensorFlow.
            process_set: the one that the optimizer or tape gets, Horovod's global one where None.

        Raises:
            ValueError: for parameters without names, or of no framework known here.
        """
        if hasattr(parameters, "trainable_variables") or hasattr(parameters, "named_parameters"):
            raise ValueError(f"bind was given a model, a {type(parameters).__name__}; give it model.named_parameters() in PyTorch "
                             "and model.trainable_variables in TensorFlow")
        parameters = list(parameters)
        if not parameters:
            raise ValueError("bind was given no parameters; it takes model.named_parameters() in PyTorch and "
                             "model.trainable_variables in TensorFlow, those that the optimizer or tape gets")
        first = parameters[0]
        return stock_hooks(first[1] if isinstance(first, tuple) and len(first) == 2 else first).bind(self, parameters, process_set)

    def require_no_place(self) -> None:
        """Refuse what needs a place in an optimizer or a tape.

        Raises:
            ValueError: for momentum correction, "ef21", merging, averaging, and what tensors decide together.
        """
        if memory.of(self).active or self.averaging or self.across_tensors:
            raise ValueError(f"{self.spec} can't be used there: Horovod's own optimizers have no place for momentum correction, ef21, "
                             "merging, averaging and a model's threshold; use hvd_quant's DistributedOptimizer or "
                             "DistributedGradientTape")

    def require_no_counts(self) -> None:
        """Refuse, in an elastic job whose newcomers aren't told the others' numbers of exchanges, what goes by them.

        Raises:
            ValueError: for warm-ups, ratio schedules, averaging, "ef21", and entries that all workers draw alike.
        """
        if self.counted:
            raise ValueError(f"{self.spec}: a worker that joins an elastic job has not counted the others' exchanges, so it can't "
                             "know when a warm-up or a stage ends, when parameters are averaged, or which entries all draw; give "
                             "a PyTorch optimizer to hvd.elastic.TorchState(optimizer=...), or a Keras model to KerasState, and elsewhere use "
                             "warmup=0, schedule=none, no merge, another code than randomk, and error feedback as memory")

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Horovod's hook for codes that keep no state and need no name; what it returns is summed or averaged by Horovod.

        Raises:
            ValueError: for a compressor that has to be bound first (:meth:`bind`).
        """
        why = "keeps state by parameter" if self.stateful else "exchanges its payloads by the parameters' names"
        raise ValueError(
            f"{self.spec} {why}, so Horovod's own functions can't use it unbound: pass "
            "compression=compressor.bind(model.named_parameters()), in TensorFlow compressor.bind(model.trainable_variables), "
            "or use hvd_quant's DistributedOptimizer or DistributedGradientTape")

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The other half of :meth:`compress`."""
        return self.compress(tensor)


@functools.lru_cache(maxsize=256)
def _scaled(compressor: Compressor, factor: float) -> Compressor:
    fields = {field: getattr(compressor, field) * factor for field in compressor.follow_scale}
    return dataclasses.replace(compressor, **fields) if any(fields.values()) else compressor


@functools.lru_cache(maxsize=256)
def _stages(compressor: Compressor) -> tuple[tuple[int, Compressor | None], ...]:
    return compressor.stages()


def stock_hooks(tensor: Any) -> Any:
    """The frontend module that serves Horovod's stock functions for the framework of ``tensor``."""
    packages = {cls.__module__.partition(".")[0] for cls in type(tensor).__mro__}
    if "torch" in packages:
        return importlib.import_module("hvd_quant.torch.stock")
    if packages & {"tensorflow", "keras", "tf_keras"}:
        return importlib.import_module("hvd_quant.tensorflow.stock")
    raise ValueError("a PyTorch tensor or a TensorFlow tensor or variable is expected, not a "
                     f"{type(tensor).__module__}.{type(tensor).__name__}")


def conclude(code: Generator[Array, Array, tuple[Array, Any]], total: Array) -> tuple[Array, Any]:
    """What :meth:`Compressor.rounds` returns when it gets the last sum."""
    try:
        code.send(total)
    except StopIteration as end:
        return end.value
    raise TypeError("rounds() yields more vectors than the compressor's allreduces says")


def is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    return is_int(x) or isinstance(x, float)


def one_of(names: Iterable[str]) -> str:
    return " or ".join(repr(n) for n in names)
