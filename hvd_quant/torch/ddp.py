"""A communication hook for PyTorch's DistributedDataParallel: the optimizer's exchange, over torch.distributed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from horovod.torch.mpi_ops import Average
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel

from hvd_quant.compressors import Compressor, advice
from hvd_quant.compressors.base import is_int
from hvd_quant.exchange.buckets import BUCKET_BYTES
from hvd_quant.registry import resolve, selector, unmatched
from hvd_quant.torch import agreement, c10d
from hvd_quant.torch.optimizer import _Compressed
from hvd_quant.torch.reducer import Reducer


def ddp_comm_hook(compression: Compressor | str | Mapping[str, Any], model: torch.nn.Module,
                  process_group: dist.ProcessGroup | None = None, *, bucket_bytes: int = BUCKET_BYTES) -> CommHook:
    """A communication hook that averages DDP's gradients, compressed::

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, hvd.ddp_comm_hook("topk:ratio=0.01", model))

    Horovod need not be initialised. What is kept of gradients belongs to parameters, by the names that they have in the wrapped
    module, so DDP may arrange its buckets as it likes. The hook has ``compression_stats()``, ``set_loss_scale()``,
    ``compression_state_dict()`` and ``load_compression_state_dict()``, as a :func:`hvd_quant.torch.DistributedOptimizer` has,
    which can load the hook's state, too.

    A step in which a value is not finite on some worker is void on all: with a compressor that keeps something between steps,
    that is as before, and all gradients are NaN.

    All workers of the group call this together, and find out here if their parameters or arguments differ.

    Arguments:
        compression: a compressor, a spec string, or a mapping from patterns of parameter names to these (first match wins, no
            match goes dense).
        model: the DistributedDataParallel that gets the hook.
        process_group: the workers to average over; DDP's own as a default.
        bucket_bytes: gradients are encoded and exchanged together as soon as they are this many bytes (as fp32), whatever DDP's
            buckets are.

    Raises:
        ValueError: for a compressor that can't be in a hook, and on all workers if they differ.
        TypeError: for a compression that is none of the above, or a model that is no DistributedDataParallel.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"a {type(model).__name__} was given; give ddp_comm_hook the DistributedDataParallel that gets the "
                        "hook")
    compression = resolve(compression)
    if not isinstance(compression, Compressor | Mapping):
        raise TypeError(f"compression={compression!r} can't be used in a communication hook, since it has no exchange of its "
                        "own: give a compressor, a spec string, or a mapping from patterns of names to these")
    if not is_int(bucket_bytes) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r} is not accepted; give a whole number of bytes, 1 or more")
    return CommHook(compression, model, process_group or model.process_group, bucket_bytes)


class CommHook:
    """What :func:`ddp_comm_hook` returns."""

    __name__ = "ddp_comm_hook"  # DDP asks for it

    def __init__(self, compression: Compressor | Mapping[str, Any], model: DistributedDataParallel,
                 process_group: dist.ProcessGroup, bucket_bytes: int) -> None:
        self.__qualname__ = self.__name__
        select, named = selector(compression), list(model.module.named_parameters())
        places = {name: i for i, (name, p) in enumerate(named) if p.requires_grad and name not in model.parameters_to_ignore}
        self._names = {p: name for name, p in named if name in places}
        chosen = {name: select(name) for name in places}
        for one in chosen.values():
            if one.averaging:
                raise ValueError(f"{one.spec} can't be used in a communication hook: it lets the workers' parameters differ "
                                 "until they are averaged after a step, and a hook sees no steps; use DistributedOptimizer")
        group = c10d.Group(process_group, next(iter(self._names)).device)
        agreement.compare([agreement.parameter(name, p, select(name).spec) for name, p in named],
                          {"wrapper": "ddp_comm_hook", "bucket_bytes": bucket_bytes}, group, network=c10d)
        group.expect(max(map(_collectives, chosen.values())))
        for pattern in unmatched(compression, places):
            warnings.warn(f"the pattern {pattern!r} in compression= matches no parameter; the names are "
                          f"{', '.join(list(places)[:5])}, ...", stacklevel=3)
        for sentence in advice.left_out(chosen):
            warnings.warn(sentence, stacklevel=3)
        self._reducer = Reducer([], select, Average, 1.0, group, bucket_bytes, network=c10d)
        for p, name in self._names.items():
            self._reducer.state.add(name, p, places[name])
        self._reducer.plan.update()
        self._promised: list[tuple[torch.futures.Future, torch.Tensor]] = []

    def __call__(self, state, bucket):  # without annotations, which DDP compares with classes, and here they are strings
        """What DDP calls: take a bucket's gradients, start what is complete, and go on with what has arrived. Buckets come in the
        same order on all workers; with the last one, everything is waited for, as DDP itself would do next."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError(f"the gradient of {self._names[bucket.parameters()[0]]} is sparse, which a communication hook "
                             "can't reduce: make the embedding with sparse=False, or use DistributedOptimizer")
        is_dense = torch.ops.aten.is_non_overlapping_and_dense
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._promised.append((future, buffer))
        for p, grad in zip(bucket.parameters(), bucket.gradients()):
            # Entries are in the parameter's order of memory. Views of one buffer count changes together, their data doesn't.
            grad = grad.data.as_strided(p.shape, p.stride()) if is_dense(p) else grad.data
            self._reducer.ready(self._names[p], grad)
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        try:
            self._reducer.finish()
            self._reducer.stats.steps += 1
        except Exception as error:
            failed = error

            def fail() -> None:
                raise failed

            # DDP could never go on if this was raised before it has finished, which it will do in a callback that comes next.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(fail))
        for future, buffer in self._promised:
            future.set_result(buffer)
        self._promised.clear()

    set_loss_scale = _Compressed.set_loss_scale
    compression_stats = _Compressed.compression_stats
    compression_state_dict = _Compressed.compression_state_dict
    load_compression_state_dict = _Compressed.load_compression_state_dict


def _collectives(compressor: Compressor) -> int:
    """How many of them an exchange takes one after another, at most."""
    return compressor.allreduces if compressor.allreduced else 1 if compressor.exchange == "allgather" else 2
