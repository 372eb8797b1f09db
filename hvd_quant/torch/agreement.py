"""Whether workers train the same thing: what they compare when they wrap their optimizers, and now and then their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import ProcessSet

from hvd_quant.compressors import Compressor
from hvd_quant.exchange import agreement
from hvd_quant.exchange.agreement import OPS, Parameter
from hvd_quant.registry import selector
from hvd_quant.torch import network


def agree(wrapper: str, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], compression: Any,
          settings: Mapping[str, Any], process_set: ProcessSet, number: int = 0) -> int:
    """Check that the workers are about to wrap the same optimizer with the same arguments; all of them call this together.

    Arguments:
        wrapper: what it is wrapped with.
        names: of its parameters, for those that have one.
        compression: as in :func:`hvd_quant.registry.resolve`.
        settings: the other arguments.
        number: what need not be the same.

    Returns:
        The largest number of all workers.

    Raises:
        ValueError: on all workers, as :func:`hvd_quant.exchange.agreement.require_agreement` does.
    """
    in_horovods_style = not isinstance(compression, Compressor | Mapping)
    select = None if in_horovods_style else selector(compression)
    spec_of, parameters = functools.cache(lambda compressor: compressor.spec), []
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            name = names.get(p, f"allreduce.noname.{i}.{j}")
            spec = spec_of(select(name)) if select else getattr(compression, "__qualname__", type(compression).__qualname__)
            parameters.append(parameter(name, p, spec))
    named = {p: one.name for p, one in zip((p for group in optimizer.param_groups for p in group["params"]), parameters)}
    told = {key: [[named.get(p, p) for p in group] for group in value] if key == "groups" and isinstance(value, list) else value
            for key, value in settings.items()}
    return compare(parameters, {"wrapper": wrapper, "optimizer": type(optimizer).__name__, **told}, process_set, number)


def parameter(name: str, p: torch.Tensor, spec: str) -> Parameter:
    """What is compared of a parameter."""
    return Parameter(name, str(p.dtype).removeprefix("torch."), p.shape, spec, "" if p.requires_grad else ", frozen")


def compare(parameters: Iterable[Parameter], settings: Mapping[str, Any], process_set: ProcessSet, number: int = 0,
            network: Any = network) -> int:
    """Check that the workers have the same, and return the largest number of all of them. In an elastic job they don't: one that joins
    would wait for the others, which are training.

    Arguments:
        network: of the process set, as in :class:`hvd_quant.torch.reducer.Reducer`.

    Raises:
        ValueError: on all workers, if they differ.
    """
    def gather(row: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(row), dtype=torch.uint8)[None]
        rows = network.gather(own, f"hvd_quant.agreement.{len(row)}", process_set)
        return [one.numpy().tobytes() for one in rows]

    if process_set.included() and process_set.size() > 1 and not network.ELASTIC:
        return agreement.require_agreement(agreement.describe(parameters, settings), gather, process_set.ranks, number)
    return number


def op_name(op: int) -> str:
    return dict(enumerate(OPS)).get(op, str(op))


class Verifier:
    """Compares the workers' parameters every so many steps.

    Arguments:
        every: steps between two comparisons, or None for none.
        process_set: the workers that compare.

    Raises:
        ValueError: for ``every`` as :func:`hvd_quant.exchange.agreement.checked_every` does.
    """

    def __init__(self, every: int | None, process_set: ProcessSet) -> None:
        self._every, self._process_set = agreement.checked_every(every, network.ELASTIC), process_set
        self._steps = self._since = 0

    def after(self, step: Callable[..., Any], settled: Callable[[Any], bool] = lambda optimizer: True) -> Callable[..., Any]:
        """An optimizer's ``step`` that compares the parameters when it is done.

        Arguments:
            settled: whether an optimizer's parameters are to be the same on all workers now.
        """
        @functools.wraps(step)
        def verified(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(optimizer, *args, **kwargs)
            named = ((optimizer._parameter_names[p], p) for group in optimizer.param_groups for p in group["params"])
            self.count(named, settled(optimizer))
            return result

        return step if self._every is None else verified

    def count(self, named: Iterable[tuple[str, torch.Tensor]], settled: bool = True, what: str = "steps") -> None:
        """A step is done: compare where it is time.

        Raises:
            RuntimeError: on all workers, naming the first parameter that differs.
        """
        self._steps, self._since = self._steps + 1, self._since + 1
        if self._every is None or self._since < self._every or not settled:
            return
        self._since = 0
        if not self._process_set.included() or self._process_set.size() == 1:
            return
        names, tensors = zip(*named)
        digests = [digest(tensor) for tensor in tensors]
        own = torch.stack([one.to(digests[0].device) for one in digests]).cpu()  # of parameters on one GPU in one copy
        rows = mpi_ops.allgather(own[None], name=f"hvd_quant.verify.{names[0]}.{len(names)}", process_set=self._process_set)
        agreement.require_same(rows.tolist(), self._process_set.ranks, names, f"after {self._steps} {what}")


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that tell a tensor's bits, in the order of its entries, from others, on its own device; see
    :func:`hvd_quant.exchange.agreement.digest_weights`."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits, weights = flat.view(kinds[flat.element_size()]), _weights(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in bits.split(agreement.DIGEST_ENTRIES):
        total = total * agreement.DIGEST_FACTOR + (part.long() * weights[:len(part)]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(agreement.digest_weights()).to(device)
