"""Sparse gradients, compressed row by row: what codes can do that, what is sent, whether it is less, and sums by row.

For NumPy arrays and PyTorch tensors. A row is what an index of a sparse gradient stands for: numel / count entries of a tensor that
has so many rows. What a worker sends are two payloads: the numbers of the rows that its gradient touches (:data:`CODEC`), and the
values of these rows, in that order, as its compressor encodes a vector. Error feedback belongs to rows in the same way: what is
kept of a row is added to its next gradient, and rows that aren't touched keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device, size

from hvd_quant import wire
from hvd_quant.compressors import Compressor, TensorInfo, memory
from hvd_quant.exchange import sent_bytes
from hvd_quant.ops import generic

CODEC = "rows"
"""The name in the header of a payload of row numbers."""

Array = Any


def goes_whole(compressor: Compressor) -> bool:
    """Whether a sparse gradient has to become a dense one first: momentum, estimates and merges go on in all rows at each step."""
    return memory.of(compressor).active or compressor.merge != "none"


def goes_by_row(compressor: Compressor, info: TensorInfo) -> bool:
    """Whether rows can travel as a compressor encodes them: as a vector of any length, with nothing kept beside the residual.

    Linear codes that have no payload can't, nor hierarchical exchange, in which each worker keeps the residual of a part.
    """
    encodes = type(compressor).encode is not Compressor.encode
    return encodes and not compressor.hierarchical and (compressor.across_tensors or {"residual"} >= set(compressor.state_shapes(info)))


def uncompressed_warning(compressor: Compressor, name: str) -> str:
    """What is said once of a gradient that could be compressed only as a dense one."""
    return (f"the gradient of {name} is sparse and is exchanged uncompressed, since {compressor.spec} goes by whole tensors; pass "
            "sparse_as_dense=True to compress it as a dense one")


class Part(NamedTuple):
    """What has arrived of one worker: the rows that it touches, int64, ascending, and the payload of their values."""

    rows: Array
    payload: Array
    info: TensorInfo


class Table(NamedTuple):
    """A tensor by rows.

    Attributes:
        compressor: as what their values travel.
        info: of the whole tensor, among the workers that exchange it.
        count: its rows.
    """

    compressor: Compressor
    info: TensorInfo
    count: int

    @property
    def width(self) -> int:
        """Entries of a row."""
        return self.info.numel // self.count

    def part(self, rows: int) -> TensorInfo:
        """What a compressor may know of the values of so many rows."""
        return self.info.part(0, max(0, rows) * self.width)

    def require(self, rows: Array) -> None:
        """Refuse rows that the tensor doesn't have.

        Raises:
            ValueError: naming the first.
        """
        wrong = rows[(rows < 0) | (rows >= self.count)]
        if size(wrong):
            raise ValueError(f"the gradient has a row {int(wrong[0])}, the tensor has {self.count}")

    # ------------------------------------------------------------------------------------------------- what is sent

    def is_smaller_dense(self, rows: Sequence[int], exchange: str, compressor: Compressor) -> bool:
        """Whether workers send less if the gradient becomes a dense one.

        Arguments:
            rows: how many each worker touches, as all of them know; below 0 where one has failed, which rows will tell.
            exchange, compressor: how the dense one travels.
        """
        if not all(0 <= n <= self.count for n in rows):
            return False
        dense = compressor.payload_bytes(self.info) - (wire.HEADER_BYTES if exchange == "allreduce" else 0)
        by_row = sum(sum(self._sizes(n)) for n in rows if n)
        return sent_bytes(exchange, dense, self.info.world) < sent_bytes("sparse", by_row / self.info.world, self.info.world)

    def _sizes(self, rows: int) -> tuple[int, int]:
        numbers = wire.HEADER_BYTES + wire.padded(self._bytes_of_a_number * max(0, rows))
        return numbers, self.compressor.payload_bytes(self.part(rows))

    @property
    def _bytes_of_a_number(self) -> int:
        return 4 if self.count <= 2**31 else 8

    def pack(self, rows: Array) -> Array:
        """The payload of row numbers."""
        xp = array_namespace(rows)
        numbers = xp.astype(rows, xp.int32 if self._bytes_of_a_number == 4 else xp.int64)
        return generic.pack(CODEC, size(rows), xp.asarray(True, device=device(rows)), numbers)

    def failure(self, rows: int, error: Exception) -> np.ndarray:
        """What a worker that has told so many rows, and then failed, sends in their place."""
        reason = wire.failure(self.compressor.name, self.part(rows).numel, self.info.rank, f"{type(error).__name__}: {error}")
        return np.concatenate([self.pack(np.empty(0, np.int64)), reason])

    # ---------------------------------------------------------------------------------------------- what has arrived

    def unpack(self, payload: Array, rows: int) -> Array:
        """The row numbers in a payload, int64.

        Raises:
            hvd_quant.wire.PayloadError: if it isn't what :meth:`pack` makes of so many rows of this tensor.
        """
        body, _ = generic.unpack(payload, CODEC, rows, self._bytes_of_a_number * rows)
        xp = array_namespace(body)
        numbers = xp.astype(body.view(xp.int32 if self._bytes_of_a_number == 4 else xp.int64), xp.int64)
        if bool(xp.any(numbers[1:] <= numbers[:-1])):
            raise wire.PayloadError("payload is damaged: its rows don't ascend")
        if rows and not 0 <= int(numbers[0]) <= int(numbers[-1]) < self.count:
            raise wire.PayloadError(f"payload is damaged: it has a row {int(numbers[0 if numbers[0] < 0 else -1])}, the tensor has "
                                    f"{self.count}")
        return numbers

    def parts(self, gathered: Array, rows: Sequence[int]) -> tuple[int, list[Part]]:
        """The flags of all payloads together, and what has arrived of each worker that touches rows, in the order of ranks.

        Arguments:
            gathered: what all workers have sent.
            rows: how many each of them has told before.

        Raises:
            hvd_quant.wire.PayloadError: for a payload that is damaged, and with the reason of a worker that failed.
        """
        for rank, n in enumerate(rows):
            if not -1 <= n <= self.count:
                raise wire.PayloadError(f"worker {rank} says that its gradient has {n} rows, the tensor has {self.count}")
        told, flags = [n for n in rows if n], 0
        payloads = wire.split_with_heads(gathered, 2 * len(told), lambda: [nbytes for n in told for nbytes in self._sizes(n)])
        for n, (payload, head) in zip(told, payloads[1::2]):
            numel, name = self.part(n).numel, self.compressor.name
            flags |= wire.parse_header(head, payload.shape[0], name, numel).flags
            if flags & wire.FAILED:
                wire.check(payload, name, numel, 0)  # raises the reason
        return flags, [Part(self.unpack(numbers, max(0, n)), payload, self.part(n))
                       for n, (numbers, _), (payload, _) in zip(told, payloads[::2], payloads[1::2])]

    def add_up(self, terms: Iterable[tuple[Array, Array]], flags: int, mean: bool, like: Array) -> tuple[Array, Array]:
        """The rows that any worker touches, ascending, and their sums, fp32, one row each; NaN where anything was not finite.

        Arguments:
            terms: each worker's rows and their values, flat, in the order of ranks.
            flags: of all payloads.
            mean: divide by the number of workers.
            like: any array of the framework and device, where no worker touches rows.
        """
        terms, xp = list(terms), array_namespace(like)
        rows = xp.sort(xp.unique_values(xp.concat([xp.zeros(0, dtype=xp.int64, device=device(like)), *(rows for rows, _ in terms)])))
        total = xp.zeros((size(rows), self.width), dtype=xp.float32, device=device(like))
        with np.errstate(over="ignore", invalid="ignore"):
            for touched, values in terms:
                total[xp.searchsorted(rows, touched)] += xp.reshape(values, (-1, self.width))
        if flags & wire.NONFINITE:
            total[:] = float("nan")
        elif mean:
            total *= np.float32(1 / self.info.world).item()
        return rows, total
