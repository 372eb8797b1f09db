"""torch.distributed as the workers' network, with the names that :mod:`hvd_quant.torch.network` has.

It pairs collectives up by their order, and has to know all sizes beforehand; Horovod's workers tell each other both. So
payloads travel in rooms that are as large as all know them to be at most, each with its length in front.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from horovod.torch.mpi_ops import Average

from hvd_quant import wire
from hvd_quant.compressors import Compressor
from hvd_quant.exchange import cost
from hvd_quant.exchange.hosts import Workers
from hvd_quant.torch import measuring

ELASTIC = False
IN_ORDER = True
REFUSES = False
Error = RuntimeError
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # as it was called before
_LENGTH = 8  # bytes that say how many follow
_SPARE = 256  # bytes beside the payloads', so that the reason of a worker that failed mostly fits in their place


def mpi_enabled() -> bool:
    return False


class Group:
    """A process group in the place of Horovod's process set.

    Exchanges start in the same order on all workers, but which comes first, one's second collective or another's first, depends
    on what arrives when. So first, second and third collectives have a group each, in which the order is that of the exchanges.

    Arguments:
        group: torch's.
        device: on which small tensors travel: that of the parameters.

    Raises:
        ValueError: if this worker is not in it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if dist.get_rank(group) < 0:
            raise ValueError(f"worker {dist.get_rank()} is not in process_group=: make the hook on the group's members alone, "
                             "as DistributedDataParallel itself")
        self.ranks, self.device, self.groups = dist.get_process_group_ranks(group), device, [group]

    def expect(self, collectives: int) -> None:
        """Make the groups for exchanges of so many collectives, one after another. All members call this together."""
        while len(self.groups) < collectives:
            self.groups.append(self._another())

    def _another(self) -> dist.ProcessGroup:
        """One more group of the same workers; those that are not in it know nothing of this."""
        backend, some = dist.get_backend_config(self.groups[0]), len(self.ranks) < dist.get_world_size()
        if some:  # torch calls a group by its ranks, and how many groups its maker is in, which may be more on one worker
            known = dist.distributed_c10d._world.pg_names
            most = int(gather(torch.tensor([[len(known)]]), "", self).max())
            while len(known) < most:
                dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
        return dist.new_group(self.ranks, backend=backend, use_local_synchronization=some)

    def rank(self) -> int:
        return dist.get_rank(self.groups[0])

    def size(self) -> int:
        return len(self.ranks)

    def included(self) -> bool:
        return True


class _Started(NamedTuple):
    """A collective, and what makes its result of what it brings."""

    work: dist.Work
    finish: Callable[[], Any]


def start(kind: str, tensor: torch.Tensor, name: str, group: Group, number: int, rooms: Callable[[], list[int]] | None = None,
          op: int | None = None, splits: torch.Tensor | None = None, **_: Any) -> _Started:
    on, world = group.groups[number], group.size()
    if kind == "allreduce":
        tensor = tensor.data  # so that writing into it doesn't count as a change of the gradient, as it doesn't with Horovod
        work = dist.all_reduce(tensor, group=on, async_op=True)
        return _Started(work, lambda: tensor.div_(world) if op == Average else tensor)
    if kind == "allgather":
        message = _in_room(tensor, max(rooms()))
        gathered = message.new_empty(world * message.numel())
        work = _all_gather(gathered, message, group=on, async_op=True)
        return _Started(work, lambda: torch.cat(_out_of_rooms(gathered, world)))
    messages = [_in_room(part, room) for part, room in zip(tensor.split(splits.tolist()), rooms())]
    sizes, own = [message.numel() for message in messages], messages[group.rank()].numel()
    received = tensor.new_empty(world * own)
    work = dist.all_to_all_single(received, torch.cat(messages), [own] * world, sizes, group=on, async_op=True)

    def parts() -> tuple[torch.Tensor, torch.Tensor]:
        found = _out_of_rooms(received, world)
        return torch.cat(found), torch.tensor([part.numel() for part in found])

    return _Started(work, parts)


def arrived(handle: _Started) -> bool:
    return handle.work.is_completed()


def result(handle: _Started) -> Any:
    handle.work.wait()
    return handle.finish()


def _in_room(message: torch.Tensor, room: int) -> torch.Tensor:
    """A message with its length in front and zeros behind; of one that doesn't fit, the end is left out."""
    framed = message.new_zeros(_LENGTH + wire.padded(room) + _SPARE)
    kept = message[:framed.numel() - _LENGTH]
    framed[:_LENGTH].view(torch.int64).fill_(kept.numel())
    framed[_LENGTH:_LENGTH + kept.numel()] = kept
    return framed


def _out_of_rooms(framed: torch.Tensor, count: int) -> list[torch.Tensor]:
    """What was put into so many rooms of one size."""
    rows = framed.view(count, -1)
    lengths = rows[:, :_LENGTH].contiguous().view(torch.int64).flatten().tolist()
    return [row[_LENGTH:_LENGTH + length] for row, length in zip(rows, lengths)]


def gather(row: torch.Tensor, name: str, group: Group) -> torch.Tensor:
    row = row.to(group.device)
    rows = row.new_empty(group.size(), *row.shape[1:])
    _all_gather(rows, row, group=group.groups[0])
    return rows.cpu()


def broadcast(tensor: torch.Tensor, name: str, group: Group) -> None:
    sent = tensor.to(group.device)
    dist.broadcast(sent, group.ranks[0], group=group.groups[0])
    tensor.copy_(sent)


def workers_by_host(group: Group) -> Workers:
    raise ValueError("hierarchical=True goes by Horovod's hosts: leave it out in a communication hook, or use "
                     "DistributedOptimizer")


def slowest(seconds: list[float], group: Group) -> list[float]:
    return measuring.slowest(sys.modules[__name__], seconds, group)


def costs(workers: Workers, compressors: Iterable[Compressor], device: torch.device) -> cost.Costs:
    return measuring.costs(sys.modules[__name__], workers, compressors, device)
