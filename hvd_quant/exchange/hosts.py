"""Which workers share a host, for exchanges that reduce inside hosts first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
