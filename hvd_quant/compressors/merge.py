"""What the optimizer gets: the reduced gradient alone, or together with a part of this worker's own.

A sparse code leaves most of a gradient out. What is left out can still move this worker's own parameters, which then differ
between workers until they are averaged. With G the reduced gradient, L this worker's own, S the part of it that was sent and e
what is kept of it, the optimizer gets

- "none": G
- "sum": G + f L (a coordinate that was sent counts twice, as published)
- "replace": G + f (L - S)
- "error": G + f e, and e is 0 then

with f = 1 where G is a mean, and the number of workers where it is a sum: then a coordinate that nobody sent moves with "replace"
like one that all have sent.

Source: Aji, Heafield, Bogoychev 2019 ("Combining global sparse gradients with local gradients").
"""

from __future__ import annotations

from typing import Any

MERGES = ("none", "sum", "replace", "error")
AVERAGE_EVERY = 500
"""Steps between two averagings of parameters that differ because of a merge, as in the authors' code."""

Array = Any


def local_part(merge: str, gradient: Array, sent: Array | None, kept: Array, factor: float) -> Array:
    """What is added to the reduced gradient, fp32, in the shape of the arguments; a new array, or in memory of ``sent``.

    Arguments:
        merge: "sum", "replace" or "error".
        gradient: L.
        sent: S; used by "replace" alone.
        kept: e, after S was sent.
        factor: f.
    """
    if merge != "replace":
        return {"sum": gradient, "error": kept}[merge] * factor
    part: Array = sent
    part -= gradient
    part *= -factor
    part += 0.0  # 0, not -0, where all was sent
    return part
