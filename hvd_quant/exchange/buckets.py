"""Which gradients are encoded together and travel in one collective."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

BUCKET_BYTES = 25 * 2**20
"""Dense bytes of a bucket unless asked otherwise: as PyTorch's DistributedDataParallel. Small enough that the first bucket leaves
early in the backward pass, large enough that what a collective costs by itself is little beside it."""

Key = TypeVar("Key", bound=Hashable)


def fill(sizes: Mapping[Key, int], limit: int = BUCKET_BYTES, groups: Iterable[Iterable[Key]] = ()) -> list[list[Key]]:
    """Distribute tensors over buckets.

    Arguments:
        sizes: dense bytes of each tensor, in the order in which gradients are expected.
        limit: dense bytes after which a bucket is closed; a larger tensor has one of its own.
        groups: tensors that have to travel together, whatever they weigh.

    Returns:
        The buckets, in the order in which they are expected to be complete.
    """
    together = {key: place for place, group in enumerate(groups) for key in group}
    last = {together[key]: key for key in sizes if key in together}
    buckets: list[list[Key]] = []
    room = -1
    for key, size in sizes.items():
        if key in together:
            if last[together[key]] == key:
                buckets.append([k for k in sizes if together.get(k) == together[key]])
                room = -1
            continue
        if size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(key)
        room -= size
    return buckets


def by(items: Iterable[Key], key: Callable[[Key], Any]) -> dict[Any, list[Key]]:
    """Items by their keys, in order."""
    groups: dict[Any, list[Key]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
