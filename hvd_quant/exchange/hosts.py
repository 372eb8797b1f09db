"""Who reduces with whom: which workers share a host, for exchanges that reduce inside hosts first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Workers(NamedTuple):
    """Who reduces with whom, as Horovod's process sets or what has their methods.

    Attributes:
        all: the workers to reduce over.
        across: those that exchange payloads; with hierarchical exchange, of each host the one of this worker's local rank.
        host: this host's workers, which are averaged first, or None.
    """

    all: Any
    across: Any
    host: Any = None

    @property
    def local(self) -> tuple[int, int]:
        """This worker's place among those of its host that take part, and how many they are."""
        return (0, 1) if self.host is None else (self.host.rank(), self.host.size())


class Grid(NamedTuple):
    """The workers by host and by their number on it.

    Attributes:
        hosts: the ranks on each host, ascending, as Horovod's process sets have them.
        columns: of each host the first rank, of each the second, and so on.
    """

    hosts: list[list[int]]
    columns: list[list[int]]


def grid(places: Sequence[tuple[int, int]]) -> Grid:
    """Arrange workers.

    Arguments:
        places: (host, local rank) of each rank; hosts are numbered as you like.

    Raises:
        ValueError: if hosts have different numbers of workers.
    """
    hosts: dict[int, list[int]] = {}
    for rank, (host, _) in enumerate(places):
        hosts.setdefault(host, []).append(rank)
    rows = list(hosts.values())
    if len({len(row) for row in rows}) > 1:
        raise ValueError("hierarchical=True needs the same number of workers on each host; the hosts have "
                         f"{', '.join(str(len(row)) for row in rows)}")
    return Grid(rows, [list(column) for column in zip(*rows)])


def require_all(process_set: Any, elastic: bool) -> None:
    """Raise a ValueError unless all workers take part, and always the same."""
    from horovod.common import process_sets

    if process_set is not process_sets.global_process_set:
        raise ValueError("hierarchical=True exchanges between all workers: leave process_set= out")
    if elastic:
        raise ValueError("hierarchical=True can't be used in an elastic job, whose hosts come and go")


def process_set_of(ranks: list[int]) -> Any:
    """Horovod's process set of these ranks, which is made if there is none. All workers call this together.

    Raises:
        ValueError: if Horovod may not make one, saying what to set.
    """
    from horovod.common import process_sets

    if len(ranks) == process_sets.global_process_set.size():
        return process_sets.global_process_set
    for number, members in process_sets._basics._get_process_set_ids_and_ranks().items():
        if list(members) == ranks:
            found = process_sets.ProcessSet(ranks)
            found.process_set_id = number
            return found
    try:
        return process_sets.add_process_set(ranks)
    except ValueError as error:
        if "HOROVOD_DYNAMIC_PROCESS_SETS" not in str(error):
            raise
        raise ValueError("hierarchical=True makes a process set for each host, which Horovod allows where it was started with "
                         "the environment variable HOROVOD_DYNAMIC_PROCESS_SETS=1: set it on all workers before hvd.init()"
                         ) from error
