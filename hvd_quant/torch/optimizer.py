"""DistributedOptimizer: Horovod's, with compressors. The hooks here start exchanges, ``synchronize`` finishes them."""

from __future__ import annotations

import collections
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops, optimizer as horovod_optimizer
from horovod.torch.mpi_ops import Adasum, Average, ProcessSet, Sum, global_process_set, rocm_built, size

from hvd_quant.compressors import Compressor, advice
from hvd_quant.compressors.base import is_int
from hvd_quant.exchange import refuse_join
from hvd_quant.exchange.buckets import BUCKET_BYTES
from hvd_quant.exchange.stats import Stats
from hvd_quant.registry import get_compressor, resolve, selector, unmatched
from hvd_quant.torch import agreement, network
from hvd_quant.torch.amp import Guarded
from hvd_quant.torch.averaging import average
from hvd_quant.torch.reducer import Reducer
from hvd_quant.torch.rows import sparse_bytes
from hvd_quant.torch.state import State, compresses
from hvd_quant.torch.stock import Bound

_Stock = horovod_optimizer._DistributedOptimizer
_NONE, _FP16 = get_compressor("none"), get_compressor("fp16")


def DistributedOptimizer(
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: Compressor | str | Mapping[str, Any] | Any = _NONE,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | list[list[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        verify_every: int | None = None) -> torch.optim.Optimizer:
    """Wrap an optimizer so that gradients are reduced over the workers, compressed, before they are applied.

    The signature and behaviour are those of ``horovod.torch.DistributedOptimizer``; the result is an instance of the
    optimizer's own class, and ``state_dict()`` keeps its layout. In addition it has ``compression_stats()``,
    ``compression_state_dict()`` and ``load_compression_state_dict()``, ``average_parameters()`` for compressors with a merge,
    ``set_loss_scale()``, and ``zero_grad`` takes ``set_to_none``.

    A step in which a value is not finite on some worker is void on all: with a compressor that keeps something between steps, that
    is as before, and all gradients are NaN.

    All workers of the process set call this together, and find out here if their parameters or arguments differ. (In an elastic
    job they don't.)

    Arguments:
        optimizer: any optimizer of ``torch.optim`` but LBFGS.
        named_parameters: (name, parameter) pairs, typically ``model.named_parameters()``.
        compression: a compressor, a spec string such as ``"topk:ratio=0.01"``, a mapping from patterns of parameter names
            to these (first match wins, no match goes dense), or any class with Horovod's ``compress``/``decompress``.
        backward_passes_per_step: backward passes before each exchange; their gradients add up locally.
        op: Average or Sum; Adasum for uncompressed and fp16 gradients.
        gradient_predivide_factor: as in Horovod for dense gradients; a compressed mean is the same whatever the factor.
        num_groups, groups: parameters that are exchanged together, whatever their size, when the last of them has its gradient.
        sparse_as_dense: reduce sparse gradients as dense ones; otherwise they are compressed row by row, those of a compressor
            that can't do that not at all, which is warned about.
        process_set: the workers to reduce over.
        bucket_bytes: gradients are encoded and exchanged together, in the order in which backward makes them, as soon as they
            are this many bytes (as fp32).
        verify_every: steps between two comparisons of the workers' parameters, at the end of ``step()``, which raises a
            RuntimeError on all of them if one differs. Where a ``merge`` lets them differ, it waits for the next averaging.

    Raises:
        ValueError: for LBFGS, for a combination that can't work, on all workers if they differ, and as Horovod does.
        TypeError: for a compression that is none of the above, or a parameter whose type can't be compressed.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS can't be distributed: its closure may run a different number of times on each worker, so "
                         "their exchanges would not pair up; use another optimizer")
    if hasattr(optimizer, "_averager"):
        raise ValueError("a model-averaging optimizer takes each worker's own gradients: give DistributedOptimizer the one that it was "
                         "made from")
    if isinstance(compression, Bound):
        raise TypeError("a bound compressor is for Horovod's own optimizer; pass the compressor itself: compression="
                        f"{compression.compressor.spec!r}")
    compression = resolve(compression)
    uncompressed = compression == _NONE or not isinstance(compression, Compressor | Mapping)
    if op == Adasum and not uncompressed and compression != _FP16:
        raise ValueError(f"op=Adasum can't be combined with compression={_spec(compression)}: Adasum needs the gradients "
                         "themselves; use 'none' or 'fp16', or op=Average")
    # Horovod's own allreduce doesn't take bf16.
    uncompressed &= compression != _NONE or all(p.dtype != torch.bfloat16 for group in optimizer.param_groups for p in group["params"])
    if not uncompressed and op not in (Average, Sum, Adasum):
        raise ValueError(f"op={op!r} can't be combined with compression={_spec(compression)}; give Average or Sum")
    named_parameters = None if named_parameters is None else list(named_parameters)
    verifier = agreement.Verifier(verify_every, process_set)
    names = {pair[1]: pair[0] for pair in named_parameters or () if isinstance(pair, tuple) and len(pair) == 2}
    number = agreement.agree("DistributedOptimizer", optimizer, names, compression, {
        "op": agreement.op_name(op), "backward_passes_per_step": backward_passes_per_step,
        "gradient_predivide_factor": gradient_predivide_factor, "groups": groups or num_groups, "sparse_as_dense": sparse_as_dense,
        "bucket_bytes": bucket_bytes, "verify_every": verify_every}, process_set, 0 if network.ELASTIC else _made[process_set.process_set_id])
    _made[process_set.process_set_id] = number + 1
    if not uncompressed and op != Adasum:
        wrapped = _compressed(optimizer, named_parameters, selector(compression), backward_passes_per_step, op,
                              gradient_predivide_factor, num_groups, groups, sparse_as_dense, process_set, bucket_bytes, number)
        for pattern in unmatched(compression, wrapped._parameter_names.values()):
            warnings.warn(f"the pattern {pattern!r} in compression= matches no parameter; the names are "
                          f"{', '.join(list(wrapped._parameter_names.values())[:5])}, ...", stacklevel=2)
        chosen = wrapped._reducer.state.compressors
        for sentence in [*advice.twice(optimizer, optimizer.param_groups, chosen.values()), *advice.left_out(chosen)]:
            warnings.warn(sentence, stacklevel=2)
        cls = type(wrapped)  # made by this very call
        cls.step = verifier.after(cls.step, lambda self: self._reducer.state.averaged)
        return wrapped
    counted = _Counted(compression, process_set)
    wrapped = horovod_optimizer.DistributedOptimizer(
        optimizer, named_parameters, counted, backward_passes_per_step, op, gradient_predivide_factor, num_groups, groups,
        sparse_as_dense, process_set)
    cls = type(wrapped)  # made by this very call
    cls.zero_grad = _zero_grad
    cls._step_supports_amp_scaling = Guarded._step_supports_amp_scaling
    cls.compression_stats = lambda self, residual_norms=False: counted.stats.as_dict()
    stateless = State(selector("none"), Average, process_set, network)
    cls.average_parameters = lambda self: None  # without a merge they don't differ
    cls.set_loss_scale = lambda self, scale: stateless.set_loss_scale(scale)
    cls.compression_state_dict = lambda self: stateless.state_dict()
    cls.load_compression_state_dict = lambda self, state: stateless.load_state_dict(state)
    counted.stats.exchanges.update(dict.fromkeys(wrapped._parameter_names.values(), "dense"))
    if hasattr(cls, "_sparse_allreduce_grad_async"):
        cls._sparse_allreduce_grad_async = counted.sparse(cls._sparse_allreduce_grad_async)
    last = "step" if op == Adasum and size() > 1 else "synchronize"
    setattr(cls, last, counted.counting(getattr(cls, last)))
    cls.step = verifier.after(cls.step)
    return wrapped


_made: collections.Counter[int] = collections.Counter()
"""How many optimizers the workers of a process set have made, which tells the collectives of one from those of another with the same
names. In an elastic job a newcomer can't know, so there it is always 0."""


def join(device: int = -1) -> int:
    """Wait for workers that have more batches than this one, as ``horovod.torch.join`` does.

    Raises:
        ValueError: where this process compresses gradients, unless it is the only one.
    """
    if size() > 1 and compresses():
        refuse_join()
    return mpi_ops.join(device)


def _spec(compression: Compressor | Mapping[str, Any]) -> str:
    return compression.spec if isinstance(compression, Compressor) else repr(compression)


class _Counted:
    """A compressor in Horovod's sense that counts what it is given and what it returns, and sparse gradients."""

    def __init__(self, inner: Any, process_set: ProcessSet) -> None:
        self._inner, self._process_set, self.stats = inner, process_set, Stats()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with self.stats.timed("encode"):
            sent, ctx = self._inner.compress(tensor)
        self.stats.count(None, "dense", tensor.numel(), sent.numel() * sent.element_size(), self._process_set.size())
        return sent, ctx

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        with self.stats.timed("decode"):
            return self._inner.decompress(tensor, ctx)

    def sparse(self, method: Any) -> Any:
        def counted(self_, p: torch.Tensor, name: str) -> Any:
            self.stats.count(name, "sparse", p.numel(), sparse_bytes(p.grad), self._process_set.size())
            return method(self_, p, name)

        return counted

    def counting(self, method: Any) -> Any:
        def counted(self_, *args: Any, **kwargs: Any) -> Any:
            before = self.stats.encode_seconds + self.stats.decode_seconds
            with self.stats.timed("wait"):
                result = method(self_, *args, **kwargs)
            self.stats.wait_seconds -= self.stats.encode_seconds + self.stats.decode_seconds - before
            self.stats.steps += 1
            return result

        return counted


def _compressed(optimizer, named_parameters, select, backward_passes_per_step, op, gradient_predivide_factor, num_groups,
                groups, sparse_as_dense, process_set, bucket_bytes, number):
    if not is_int(bucket_bytes) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r} is not accepted; give a whole number of bytes, 1 or more")
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    # As Horovod does: a class that inherits from the optimizer's own, so that isinstance and state_dict() stay.
    methods = {**vars(_Stock), **{k: v for k, v in {**vars(Guarded), **vars(_Compressed)}.items() if not k.startswith("__")},
               "__init__": _Compressed.__init__}
    cls = type(type(optimizer).__name__, (type(optimizer),), methods)
    return cls(optimizer.param_groups, named_parameters, select, backward_passes_per_step, op, gradient_predivide_factor,
               groups, sparse_as_dense, process_set, bucket_bytes, number)


def _zero_grad(self, set_to_none: bool = True) -> None:
    if self._handles:
        raise AssertionError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                             "optimizer.synchronize(). This is prohibited as it can cause a race condition.")
    self._synchronized = False
    super(self.__class__, self).zero_grad(set_to_none=set_to_none)


def _no_rows(p: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """A sparse zero gradient of the layout that ``p`` has had before, so that it pairs with other workers'."""
    return torch.sparse_coo_tensor(torch.zeros((sparse_dim, 0), dtype=torch.int64, device=p.device),
                                   torch.zeros((0, *p.shape[sparse_dim:]), dtype=p.dtype, device=p.device), p.shape,
                                   check_invariants=False)


class _Compressed:
    """What differs from Horovod's _DistributedOptimizer, whose other methods a distributed optimizer's class has too."""

    def __init__(self, params, named_parameters, select, backward_passes_per_step, op, gradient_predivide_factor, groups,
                 sparse_as_dense, process_set, bucket_bytes, number):
        if named_parameters is not None:
            named_parameters = list(named_parameters)
        _Stock.__init__(self, params, named_parameters, horovod_optimizer.Compression.none, backward_passes_per_step, op,
                        gradient_predivide_factor, groups, sparse_as_dense, process_set)
        self._reducer = Reducer([], select, op, gradient_predivide_factor, process_set, bucket_bytes, number)
        self._ordered = []  # Horovod keeps a set, whose order differs between workers
        for index, p in enumerate(self._all()):
            if p in self._requires_update:
                self._ordered.append(p)
                self._reducer.state.add(self._parameter_names[p], p, index)
        self._select = select
        self._sparse_dims = {}  # of parameters that have had a sparse gradient, on any worker
        self._unseen = {} if sparse_as_dense else dict.fromkeys(self._ordered)  # those that have had no gradient yet, on all workers
        if size() == 1:
            self._watch_newcomers()
        # Horovod makes a group of each parameter that is in none.
        self._reducer.plan.groups = [[self._parameter_names[p] for p in group] for group in dict.fromkeys(self._p_to_group.values())
                                if len(group) > 1 or isinstance(groups, int)]
        self._reducer.plan.update()  # now, when all workers have the same parameters

    def _make_hook(self, p):
        # An optimizer that nobody needs any more is gone at once, and its hooks with it, before the next one's fire.
        optimizer = weakref.ref(self)

        def hook(*ignore):
            self = optimizer()
            if self is None:
                return
            if self._allreduce_delay[p] <= 0:
                raise AssertionError(
                    f"The gradient of {self._parameter_names[p]} was computed more than backward_passes_per_step="
                    f"{self.backward_passes_per_step} times before step(). Increase backward_passes_per_step to "
                    "accumulate gradients locally.")
            self._synchronized = False
            self._allreduce_delay[p] -= 1
            self._handles.setdefault(p, None)
            if self._allreduce_delay[p] == 0:
                self._handles[p] = self._hand_over(p)

        return hook

    def _hand_over(self, p):
        """Give a parameter's gradient to be exchanged; None counts as zero, since another worker may have one."""
        name = self._parameter_names[p]
        if p.grad is None:
            p.grad = _no_rows(p, self._sparse_dims[p]) if p in self._sparse_dims else torch.zeros_like(p)
        if p.grad.is_sparse:
            self._sparse_dims[p] = p.grad.sparse_dim()
        return self._reducer.ready(name, p.grad.to_dense() if p.grad.is_sparse and self.sparse_as_dense else p.grad)

    def synchronize(self):
        if not self.process_set.included():
            self._synchronized = True
            return
        if self._synchronized and not self._handles:
            return  # the gradients are the reduced ones already; sending them would put them into the residuals again
        try:
            self._watch_newcomers()
        except ValueError:
            self._cancel()
            raise
        # A parameter that was frozen has no gradient to reduce, and its residual has to wait.
        given = [p for p in self._ordered if p.requires_grad or self._given(p)]
        self._look_for_sparse([p for p in given if p in self._unseen])
        for p in given:
            if not self._given(p):
                self._handles[p] = self._hand_over(p)
        self._forget()
        reduced = self._reducer.finish()
        for p in given:
            grad = reduced[self._parameter_names[p]]
            if p in self._sparse_dims and not grad.is_sparse:
                grad = grad.to_sparse(self._sparse_dims[p])
            if p.grad is not grad:  # also if the user has replaced it since backward: all workers must step alike
                p.grad = grad
        if given:
            self._reducer.stats.steps += 1
        self._synchronized = True

    def _look_for_sparse(self, unseen):
        """Learn which gradients are sparse on some worker, until there has been one of each parameter: a worker that lacks one has
        to take part in the exchange that the others have started."""
        if not unseen or self.process_set.size() == 1 or network.ELASTIC:
            return
        own = torch.tensor([[-1 if p.grad is None else p.grad.sparse_dim() if p.grad.is_sparse else 0 for p in unseen]])
        name = f"hvd_quant.layouts.{self._reducer.number}.{len(unseen)}"
        most = network.gather(own, name, self.process_set).amax(0).tolist()
        for p, layout in zip(unseen, most):
            if layout > 0:
                self._sparse_dims[p] = layout
            if layout >= 0:
                del self._unseen[p]

    def step(self, closure=None):
        result = _Stock.step(self, closure)
        self._average(self._reducer.state.to_average())
        return result

    def average_parameters(self):
        """Set the parameters that differ between workers, because of a compressor's ``merge``, to their means, as is to be done
        before evaluation and checkpoints. All workers call this together."""
        self._average(self._reducer.state.to_average(all=True))

    def _average(self, parameters):
        sent = average(dict(parameters), self.process_set)
        self._reducer.stats.count(None, "dense", 0, sent, self.process_set.size())  # where gradients are dense, nothing is averaged

    def set_loss_scale(self, scale):
        """Say by what the loss is multiplied, before backward; :class:`hvd_quant.torch.GradScaler` does so by itself.

        What is kept of gradients is multiplied by how much the scale has grown. Compressors are told nothing else of it: what
        they are told in units of the gradient (``tau``, ``clip_norm``, ``weight_decay``) counts for the unscaled one.

        Arguments:
            scale: a number above 0, the same on all workers.

        Raises:
            ValueError: for what is no such number.
            RuntimeError: while gradients of another scale are being exchanged.
        """
        self._reducer.state.set_loss_scale(scale)

    def _given(self, p):
        """Whether the last of a parameter's backward passes is done."""
        return p in self._handles and self._allreduce_delay[p] == 0

    def _forget(self):
        self._handles.clear()
        for p in self._ordered:
            self._allreduce_delay[p] = self.backward_passes_per_step

    def _watch_newcomers(self):
        """Take in parameters that were frozen when the optimizer was wrapped, or came with add_param_group. Horovod leaves one
        worker's gradients alone, but momentum is part of training with one worker too."""
        alone = size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
        for index, p in enumerate(self._all()):
            if p.requires_grad and p not in self._requires_update:
                if alone and not self._select(self._parameter_names.get(p, "")).has_momentum:
                    continue
                if p not in self._parameter_names:
                    raise ValueError(f"a parameter of shape {tuple(p.shape)} was added after the optimizer was wrapped "
                                     "and has no name to be reduced by: wrap the optimizer anew with all "
                                     "named_parameters")
                self._requires_update.add(p)
                self._ordered.append(p)
                self._allreduce_delay[p] = self.backward_passes_per_step
                self._reducer.state.add(self._parameter_names[p], p, index)
                if not self.sparse_as_dense:
                    self._unseen[p] = None
                if alone:
                    continue  # there is nothing to start in backward
                accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
                accumulator.register_hook(self._make_hook(p))
                self._grad_accs.append(accumulator)

    def _all(self):
        """All parameters, frozen ones too."""
        return (p for group in self.param_groups for p in group["params"])

    def _cancel(self):
        """Take back what backward has started."""
        self._forget()
        self._reducer.cancel()

    def load_state_dict(self, state_dict):
        self._cancel()
        _Stock.load_state_dict(self, state_dict)

    zero_grad = _zero_grad

    def compression_stats(self, residual_norms: bool = False) -> dict[str, Any]:
        """What the exchanges cost so far on this worker, in all and by bucket; see :class:`hvd_quant.exchange.stats.Stats`.

        Arguments:
            residual_norms: add the 2-norm of what is kept of each parameter's gradients, which takes a pass over it.
        """
        stats = self._reducer.stats.as_dict()
        return {**stats, "residual_norms": self._reducer.state.residual_norms()} if residual_norms else stats

    def compression_state_dict(self) -> dict[str, Any]:
        """This worker's compression state (residuals and step counts), for a checkpoint a worker.

        It holds tensors, numbers and strings only, so ``torch.load(weights_only=True)`` reads it.
        """
        return self._reducer.state_dict()

    def load_compression_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Take up the state that :meth:`compression_state_dict` returned on the same worker, or a list of those of all workers, which
        may have been another number: what would have reached the optimizer is kept, in equal shares."""
        self._reducer.load_state_dict(state)
