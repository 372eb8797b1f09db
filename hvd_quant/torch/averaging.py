"""Model averaging: workers take steps of their own and average their parameters now and then, through an outer optimizer if
there is one (DiLoCo)."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch import optimizer as horovod_optimizer
from horovod.torch.mpi_ops import Average, ProcessSet, global_process_set

from hvd_quant.compressors import Compressor
from hvd_quant.exchange import averaging, buckets
from hvd_quant.registry import selector, unmatched
from hvd_quant.torch import agreement, network
from hvd_quant.torch.reducer import Reducer

_HALF = (torch.float16, torch.bfloat16)


def ModelAveragingOptimizer(
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        *,
        every: averaging.Every,
        outer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
        compression: Compressor | str | Mapping[str, Any] = "none",
        model: torch.nn.Module | None = None,
        average_state: bool = False,
        process_set: ProcessSet = global_process_set,
        bucket_bytes: int = buckets.BUCKET_BYTES,
        verify_every: int | None = None) -> torch.optim.Optimizer:
    """Wrap an optimizer so that ``step()`` applies this worker's own gradients, and after every ``every`` of them the workers'
    parameters are averaged.

    What is averaged is Δ = θ₀ − θ, the way from the parameters θ₀ that the workers last had in common, with error feedback if
    it is compressed. θ₀ then moves by −mean Δ, or as ``outer`` moves it with mean Δ for a gradient, and all go on from there.
    The first θ₀ is what the parameters are when ``step()`` is first called; broadcast them before.

    The result is an instance of the optimizer's own class and shares its state; ``state_dict()`` keeps its layout. In addition
    it has ``average()``, ``compression_stats()``, ``compression_state_dict()`` and ``load_compression_state_dict()``.

    A ``GradScaler`` is each worker's own. A step that it skips on one worker counts there as on the others.

    All workers of the process set call this together, and find out here if their parameters or arguments differ.

    Sources: Yu, Yang, Zhu 2019 (parallel restarted SGD); Douillard et al. 2023 (DiLoCo).

    Arguments:
        optimizer: any optimizer of ``torch.optim``.
        named_parameters: (name, parameter) pairs; without them, those of ``model``, or numbers.
        every: the local steps between two averagings, or a function from the steps taken so far to those until the next one.
            See :func:`averaging_bound`.
        outer: a function from a list of parameters to an optimizer for them, such as ``lambda params: torch.optim.SGD(params,
            lr=0.7, momentum=0.9, nesterov=True)``; or an optimizer of the same parameters, which from now on is one of θ₀.
        compression: a compressor, a spec string, or a mapping from patterns of parameter names to these.
        model: its floating-point buffers, such as the statistics of batch normalisation, are averaged too, dense. Without it
            they stay each worker's own.
        average_state: average, dense, what the optimizer keeps of a parameter in its shape: momentum and the like.
        process_set: the workers to average over.
        bucket_bytes: bytes that travel together.
        verify_every: averagings between two comparisons of the workers' parameters, right after one, which raises a RuntimeError
            on all of them if one differs.

    Raises:
        ValueError, TypeError: for arguments that can't work, on all workers if they differ, and in elastic jobs.
    """
    if hasattr(optimizer, "skip_synchronize") or hasattr(optimizer, "_averager"):
        raise ValueError(f"this {type(optimizer).__name__} is distributed already: wrap the one that it was made from")
    compression = averaging.checked_compression(compression, network.ELASTIC)
    if named_parameters is None and model is not None:
        named_parameters = model.named_parameters()
    names = _names(optimizer, named_parameters)
    for pattern in unmatched(compression, names):
        warnings.warn(f"the pattern {pattern!r} in compression= matches no parameter; the names are "
                      f"{', '.join(list(names)[:5])}, ...", stacklevel=2)
    verifier = agreement.Verifier(verify_every, process_set)
    agreement.agree("ModelAveragingOptimizer", optimizer, {p: name for name, p in names.items()}, compression, {
        "every": "a function" if callable(every) else every, "outer": type(outer).__name__, "average_state": average_state,
        "model": type(model).__name__, "bucket_bytes": bucket_bytes, "verify_every": verify_every}, process_set)
    # As Horovod makes one, whose broadcast_optimizer_state then makes missing state by a step of the optimizer's own class.
    methods = {key: value for key, value in vars(_ModelAveraging).items() if not key.startswith("__")}
    cls = type(type(optimizer).__name__, (type(optimizer),), {**methods, "__module__": horovod_optimizer.__name__})
    wrapped: Any = object.__new__(cls)
    # A learning-rate scheduler replaces the step of the optimizer that it is made for.
    vars(wrapped).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    vars(wrapped).update(_step_supports_amp_scaling=True, _inner_scales=getattr(optimizer, "_step_supports_amp_scaling", False))
    wrapped._averager = Averager(wrapped, names, every, outer, selector(compression), model, average_state, process_set,
                                 bucket_bytes, verifier)
    return wrapped


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name, in its order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return {f"parameter.{i}": p for i, p in enumerate(parameters)}
    named = list(named)
    names = {p: name for name, p in named}
    if len({name for name, _ in named}) < len(named):
        raise ValueError("named_parameters has a name twice; give each parameter its own, as model.named_parameters() does")
    nameless = [tuple(p.shape) for p in parameters if p not in names]
    if nameless:
        raise ValueError(f"named_parameters lacks {len(nameless)} of the optimizer's parameters, the first of shape "
                         f"{nameless[0]}; give all of them")
    return {names[p]: p for p in parameters}


class _ModelAveraging:
    """What a model-averaging optimizer's class has beside that of the optimizer it was made from."""

    _averager: Averager
    _inner_scales: bool

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step with this worker's gradients, and average where it is time."""
        self._averager.begin()
        result = self._local_step(args, kwargs)
        self._averager.count()
        return result

    step.hooked = True  # PyTorch calls the optimizer's hooks in that of the class it was

    def _local_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The optimizer's own step. A GradScaler calls it also where it has found an overflow (that is what
        ``_step_supports_amp_scaling`` asks for), so that steps are counted alike on all workers."""
        if "found_inf" not in vars(self) or self._inner_scales:
            return super(type(self), self).step(*args, **kwargs)
        if self.found_inf:
            return None
        if self.grad_scale is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(1 / float(self.grad_scale))
        # PyTorch's own optimizers refuse to see them unless they are fused.
        scaling = {key: vars(self).pop(key) for key in ("found_inf", "grad_scale")}
        try:
            return super(type(self), self).step(*args, **kwargs)
        finally:
            vars(self).update(scaling)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("parameters can't be added to a model-averaging optimizer: add them to the optimizer that it was made "
                         "from, and wrap that anew")

    def average(self) -> None:
        """Average now, before an evaluation or a checkpoint; all workers have to call it. It starts a new interval, and does
        nothing where no step was taken since the last one."""
        self._averager.average()

    def compression_stats(self, residual_norms: bool = False) -> dict[str, Any]:
        """What averaging cost so far on this worker; see :class:`hvd_quant.exchange.stats.Stats`. ``steps`` are averagings, and
        ``local_steps`` those of the optimizer.

        Arguments:
            residual_norms: add the 2-norm of what is kept of each parameter, which takes a pass over it.
        """
        return self._averager.compression_stats(residual_norms)

    def compression_state_dict(self) -> dict[str, Any]:
        """What this worker keeps for averaging (θ₀, the outer optimizer's state, residuals, step counts), for a checkpoint a
        worker.

        It holds tensors, numbers and strings only, so ``torch.load(weights_only=True)`` reads it.
        """
        return self._averager.state_dict()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state that :meth:`compression_state_dict` returned on the same worker."""
        self._averager.load_state_dict(state)


@dataclasses.dataclass(eq=False)
class Part:
    """One parameter.

    Attributes:
        name, index: what it is called, and its place among all.
        parameter: itself, θ.
        anchor: θ₀ in fp32, or fp64; until it is taken, what the parameter is, for an outer optimizer to be made of it.
        reduced: whether the reducer knows it.
        taken: whether ``anchor`` has a value.
        compared: whether the workers have found that they started with the same.
    """

    name: str
    index: int
    parameter: torch.Tensor
    anchor: torch.nn.Parameter
    reduced: bool = False
    taken: bool = False
    compared: bool = False

    @property
    def start(self) -> torch.Tensor:
        """θ₀ as the parameter had it: what a half type rounds away is no step of a worker's."""
        return self.anchor.to(self.parameter.dtype).to(self.anchor.dtype)


class Averager:
    """Counts an optimizer's steps, and averages.

    Arguments:
        optimizer: whose parameters and state are averaged.
        names: its parameters by name.
        select: from a name to its compressor.
        others: see :func:`ModelAveragingOptimizer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor], every: averaging.Every, outer: Any,
                 select: Callable[[str], Compressor], model: torch.nn.Module | None, average_state: bool,
                 process_set: ProcessSet, bucket_bytes: int, verifier: agreement.Verifier) -> None:
        self._verifier = verifier
        self._optimizer, self._every, self._select, self._model = optimizer, every, select, model
        self._average_state, self._process_set = average_state, process_set
        self.steps, self.averaged, self.due = 0, 0, averaging.interval(every, 0)
        self._parts = [Part(name, i, p, torch.nn.Parameter(p.detach().float() if p.dtype in _HALF else p.detach()))
                       for i, (name, p) in enumerate(names.items())]
        self._plain = outer is None
        self._outer = _outer(outer, self._parts, optimizer)
        self._reducer = Reducer([], select, Average, 1.0, process_set, bucket_bytes)
        for part in self._parts:
            if part.parameter.requires_grad:
                self._include(part)

    def begin(self) -> None:
        """Before a step: note where parameters are that may move from now on. Those that are frozen don't travel."""
        for part in self._parts:
            if part.parameter.requires_grad and not part.taken:
                self._include(part)
                part.anchor.data = part.parameter.detach().to(part.anchor.dtype, copy=True)
                part.taken = True

    def _include(self, part: Part) -> None:
        if self._process_set.included() and not part.reduced:
            self._reducer.state.add(part.name, part.parameter, part.index)
            part.reduced = True

    def count(self) -> None:
        """After a step: average where it is time."""
        self.steps += 1
        if self.steps >= self.due:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Bring the workers' parameters together, unless they are.

        1. Δ = θ₀ − θ, on each worker.
        2. The workers ask each other whether they are at the same step, average the same things, and have finite ones. If not,
           all of them raise, and nothing has changed.
        3. Mean Δ, through the compressor.
        4. The outer optimizer steps on θ₀ with mean Δ for a gradient. Without one, θ₀ ← θ₀ − mean Δ.
        5. θ ← θ₀. Buffers and the optimizer's state are averaged as they are.
        """
        alone = self._process_set.size() == 1
        if self._process_set.included() and not (alone and self._plain):
            ahead = self.averaged < self.steps  # here; the others may be elsewhere, and have to be told
            parts = [part for part in self._parts if part.taken and ahead]
            also = self._also() if ahead else {}
            deltas = {part.name: part.start - part.parameter for part in parts}
            self._agree(parts, also, deltas)
            if ahead:
                self._exchange(parts, also, deltas)
        self.averaged, self.due = self.steps, self.steps + averaging.interval(self._every, self.steps)

    def _exchange(self, parts: list[Part], also: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor]) -> None:
        for name, delta in deltas.items():
            self._reducer.ready(name, delta)
        means = self._reducer.finish()
        for part in parts:
            part.anchor.grad = means[part.name]
        self._outer.step()
        for part in parts:
            part.anchor.grad = None
            part.parameter.copy_(part.anchor)
        sent = average(also, self._process_set)
        self._reducer.stats.count(None, "dense", sent // 4, sent, self._process_set.size())
        self._reducer.stats.steps += 1
        self._verifier.count([(part.name, part.parameter) for part in parts], what="averagings")

    def _also(self) -> dict[str, torch.Tensor]:
        """What is averaged beside the parameters, by name."""
        also = {} if self._model is None else {f"buffer.{name}": buffer for name, buffer in self._model.named_buffers()}
        if self._average_state:
            for part in self._parts:
                for key, value in sorted(self._optimizer.state.get(part.parameter, {}).items()):
                    if isinstance(value, torch.Tensor) and value.shape == part.parameter.shape:
                        also[f"{key}.{part.name}"] = value
        return {name: value for name, value in also.items() if _is_real(value)}

    def _agree(self, parts: list[Part], also: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor]) -> None:
        described = [(part.name, tuple(part.parameter.shape), self._select(part.name).spec) for part in parts]
        described += [(name, tuple(value.shape)) for name, value in also.items()]
        finite = torch.stack([delta.isfinite().all().cpu() for delta in deltas.values()]).tolist() if deltas else []
        start = _sum_of_bits(part.anchor for part in parts if not part.compared)
        bad = finite.index(False) if False in finite else -1
        report = averaging.Report(self.steps, averaging.layout(described), start, bad)
        reports = mpi_ops.allgather(torch.tensor([report]), name=f"hvd_quant.averaging.{self._parts[0].name}",
                                    process_set=self._process_set)
        averaging.require_agreement(reports.tolist(), self._process_set.ranks, [part.name for part in parts])
        for part in parts:
            part.compared = True

    def compression_stats(self, residual_norms: bool = False) -> dict[str, Any]:
        """See :meth:`_ModelAveraging.compression_stats`."""
        stats = {**self._reducer.stats.as_dict(), "local_steps": self.steps}
        return {**stats, "residual_norms": self._reducer.state.residual_norms()} if residual_norms else stats

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`_ModelAveraging.compression_state_dict`."""
        return {**self._reducer.state_dict(), "averaging": {
            "steps": self.steps, "averaged": self.averaged, "due": self.due, "outer": copy.deepcopy(self._outer.state_dict()),
            "anchors": {part.name: part.anchor.detach().clone() for part in self._parts if part.taken}}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned.

        Raises:
            ValueError: if it is of another worker, other parameters, another kind of optimizer, or damaged; then nothing is
                changed.
        """
        with averaging.reading():
            kept = state["averaging"]
            counts = [int(kept[key]) for key in ("steps", "averaged", "due")]
            anchors, outer = dict(kept["anchors"]), kept["outer"]
            shapes = {name: tuple(anchor.shape) for name, anchor in anchors.items()}
        parts = {part.name: part for part in self._parts}
        for name, shape in shapes.items():
            own = tuple(parts[name].parameter.shape) if name in parts else "no such parameter"
            if own != shape:
                raise ValueError(f"the compression state has a {name} of shape {shape}, and the optimizer has {own}: load it "
                                 "into the optimizer of the same model")
        before = copy.deepcopy(self._outer.state_dict())
        self._outer.load_state_dict(copy.deepcopy(outer))
        try:
            for name in anchors:
                self._include(parts[name])
            self._reducer.load_state_dict(dict(state))
        except ValueError:
            self._outer.load_state_dict(before)
            raise
        self.steps, self.averaged, self.due = counts
        for name, part in parts.items():
            part.taken = part.compared = name in anchors
            if part.taken:
                part.anchor.data = anchors[name].to(part.parameter.device, part.anchor.dtype, copy=True)


def _outer(outer: Any, parts: list[Part], inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of the anchors that ``outer`` stands for."""
    anchors = [part.anchor for part in parts]
    if outer is None:
        return torch.optim.SGD(anchors, lr=1.0)
    if not isinstance(outer, torch.optim.Optimizer):
        made = outer(anchors) if callable(outer) else None
        if not isinstance(made, torch.optim.Optimizer):
            what = f"returned {made!r}" if callable(outer) else "is not accepted"
            raise TypeError(f"outer={outer!r} {what}; give a function from a list of parameters to an optimizer, such as "
                            "lambda params: torch.optim.SGD(params, lr=0.7)")
        return made
    anchor_of = {part.parameter: part.anchor for part in parts}
    theirs = [p for group in outer.param_groups for p in group["params"]]
    if outer.param_groups[0] is inner.param_groups[0] or any(p not in anchor_of for p in theirs):
        raise ValueError(f"outer={type(outer).__name__} has to be another optimizer, of parameters that the first one has; "
                         "give a function from a list of parameters to an optimizer instead")
    for group in outer.param_groups:
        group["params"] = [anchor_of[p] for p in group["params"]]
    outer.state.update({anchor_of[p]: outer.state.pop(p) for p in list(outer.state)})
    return outer


def _sum_of_bits(tensors: Iterable[torch.Tensor]) -> int:
    """A number that differs between tensors which aren't the same, most of the time."""
    total = sum(int(t.detach().contiguous().view(-1).view(torch.int32).sum()) for t in tensors)
    return (total + 2**62) % 2**63 - 2**62


# ---------------------------------------------------------------------------------------------------- once, by themselves

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def average_parameters(what: torch.nn.Module | torch.optim.Optimizer | Named,
                       process_set: ProcessSet = global_process_set) -> None:
    """Replace parameters by their mean over the workers, uncompressed, all of which have to call it.

    Half types are averaged in fp32; what is not floating point stays as it is.

    Arguments:
        what: a module, whose parameters and buffers are averaged; an optimizer, whose parameters; or tensors by name.
        process_set: the workers to average over.

    Raises:
        TypeError: for something else.
    """
    if isinstance(what, torch.nn.Module):
        named: Any = [*what.named_parameters(), *what.named_buffers()]
    elif isinstance(what, torch.optim.Optimizer):
        named = _names(what, None).items()
    else:
        named = what.items() if isinstance(what, Mapping) else list(what) if isinstance(what, Iterable) else [what]
    try:
        tensors = {str(name): tensor for name, tensor in named if _is_real(tensor)}
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError("average_parameters takes a module, an optimizer, or (name, tensor) pairs such as "
                        f"model.named_parameters(), not {what!r:.100}") from error
    average(tensors, process_set)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


@torch.no_grad()
def average(tensors: Mapping[str, torch.Tensor], process_set: ProcessSet) -> int:
    """Replace tensors by their means, in a few collectives, of so many bytes."""
    if not process_set.included() or process_set.size() == 1:
        return 0
    flying = []
    for names in _together(tensors):
        parts = [tensors[name] for name in names]
        # Sums of half types overflow where means don't.
        vector = torch.cat([part.reshape(-1).float() if part.dtype in _HALF else part.reshape(-1) for part in parts])
        # Horovod doesn't like a name with another size.
        handle = mpi_ops.allreduce_async_(vector, name=f"hvd_quant.average.{names[0]}.{vector.numel()}", op=Average,
                                          process_set=process_set)
        flying.append((handle, vector, parts))
    for handle, vector, parts in flying:
        mpi_ops.synchronize(handle)
        for part, mean in zip(parts, vector.split([part.numel() for part in parts])):
            part.copy_(mean.view(part.shape))
    return sum(vector.numel() * vector.element_size() for _, vector, _ in flying)


def _together(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names of those that travel in one vector."""
    kinds: dict[Any, dict[str, int]] = {}
    for name, tensor in tensors.items():
        dtype = torch.float32 if tensor.dtype in _HALF else tensor.dtype
        kinds.setdefault((dtype, tensor.device), {})[name] = tensor.numel() * dtype.itemsize
    for sizes in kinds.values():
        yield from buckets.fill(sizes)
