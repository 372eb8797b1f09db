"""Who owns what: the part of each tensor that a worker reduces for all in a scatter-reduce-allgather."""

from __future__ import annotations


def ranges(numel: int, multiple: int, parts: int, index: int) -> list[tuple[int, int]]:
    """Cut a tensor into consecutive ranges, one a worker, as even as multiples allow; there may be empty ones.

    Which range is whose depends on nothing but the tensor and the number of workers, so that an owner's state stays its own
    whatever else travels along. Tensors start with another worker each, so that what is left over is spread.

    Arguments:
        numel: the tensor's entries.
        multiple: all ranges but the last start and end at multiples of it.
        parts: the number of workers.
        index: the tensor's place among the tensors, the same on all workers.

    Returns:
        (first, one past last) entry of each worker's range, in the order of their ranks.
    """
    each, extra = divmod(-(-numel // multiple), parts)
    bounds = [min(numel, multiple * (each * i + min(i, extra))) for i in range(parts + 1)]
    places = [(rank + index) % parts for rank in range(parts)]
    return [(bounds[place], bounds[place + 1]) for place in places]
