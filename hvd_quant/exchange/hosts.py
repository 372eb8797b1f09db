"""Which workers share a host, for exchanges that reduce inside hosts first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Grid(NamedTuple):
    """The workers by host and by their number on it.

    Attributes:
        hosts: the ranks on each host, by local rank.
        columns: for each local rank, the ranks of that local rank on all hosts.
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
    hosts: dict[int, dict[int, int]] = {}
    for rank, (host, local) in enumerate(places):
        hosts.setdefault(host, {})[local] = rank
    rows = [[row[local] for local in sorted(row)] for row in hosts.values()]
    if len({len(row) for row in rows}) > 1:
        raise ValueError("hierarchical=True needs the same number of workers on each host; the hosts have "
                         f"{', '.join(str(len(row)) for row in rows)}")
    return Grid(rows, [list(column) for column in zip(*rows)])
