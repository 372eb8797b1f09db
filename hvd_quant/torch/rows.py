"""A sparse gradient on its way, by the rows that it touches."""

from __future__ import annotations

import math

import torch

from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange.rows import Part, Table
from hvd_quant.ops import torch as ops
from hvd_quant.torch.cargo import Cargo
from hvd_quant.torch.state import Slot


class SparseCargo(Cargo):
    """A sparse gradient on its way, by the rows that it touches, or, where that is smaller, as a dense one.

    Attributes:
        exchange: by which it travels as a dense one; "dense" where it goes uncompressed, rows as they are.
        table: what all know of its rows.
        rows: the numbers of those that it touches, ascending.
        counted: how many they are; -1 if they couldn't be found.
        touched: the indices of all workers' rows, a column each, once they are here.
    """

    def __init__(self, slot: Slot, compressor: Compressor, scale: float, info: TensorInfo, grad: torch.Tensor, version: int,
                 exchange: str) -> None:
        super().__init__(slot, compressor, 1, scale, info, grad, version)
        self.exchange, self._lead = exchange, grad.shape[:grad.sparse_dim()]
        self.table = Table(self.compressor, info, self._lead.numel())
        self._rows_before: torch.Tensor | None = None

    def merge(self) -> None:
        """Add up what the gradient has of each row. A worker that can't, tells the others later."""
        self.rows, self.flat, self.counted = torch.zeros(0, dtype=torch.int64, device=self.grad.device), None, -1
        try:
            merged = self.grad.detach().float().coalesce()
            rows = torch.zeros_like(merged.indices()[0])
            for place, length in zip(merged.indices(), self._lead):
                rows.mul_(length).add_(place)
            self.table.require(rows)
            self.rows, self.flat, self.counted = rows, merged.values().reshape(-1), rows.shape[0]
        except Exception as error:
            self.error = error

    def densify(self) -> None:
        self.grad = self.grad.detach().to_dense()
        self._version = self.grad._version

    def encode_rows(self) -> torch.Tensor:
        """The payloads of the rows' numbers and values, where there are rows. A worker that can't make them sends the reason."""
        if not self.counted:
            return torch.zeros(0, dtype=torch.uint8, device=self.grad.device)
        try:
            if self.error is not None:
                raise self.error
            vector, state, info = self.flat, {}, self.table.part(self.counted)
            if "residual" in self.slot.state:
                self._rows_before = self._residual()[self.rows]
                kept = self._rows_before.clone().view(-1)
                if self.compressor.memory == "none":  # another code has kept it
                    vector, kept = vector + kept, torch.zeros_like(kept)
                else:
                    state["residual"] = kept
            payload = self._encode(vector, state, self._measure(vector, state, info), info)
            if self._rows_before is not None:
                self._residual()[self.rows] = kept.view(-1, self.table.width)
                self.slot.kept = True
            return torch.cat([self.table.pack(self.rows), payload])
        except Exception as error:
            self.undo()
            self.error = error
            return torch.from_numpy(self.table.failure(self.counted, error)).to(self.grad.device)

    def _residual(self) -> torch.Tensor:
        return self.slot.state["residual"].view(-1, self.table.width)

    def undo(self) -> None:
        if self._rows_before is not None:
            self._residual()[self.rows] = self._rows_before
            self._rows_before = None
            self._encoded.clear()
        super().undo()

    def void(self) -> None:
        if not self.grad.is_sparse:
            return super().void()
        self.undo()
        self.slot.step -= 1
        places = self.touched if self.touched.numel() else self.touched.new_zeros(len(self._lead), 1)  # there has to be a NaN
        self.land_sparse(places, self.grad._values().new_full((places.shape[1], *self.grad.shape[len(self._lead):]), math.nan))

    def decode_rows(self, parts: list[Part], flags: int, mean: bool) -> None:
        """Let the gradient become what all workers' rows add up to."""
        terms = ((part.rows, self.compressor.decode_sum(ops, [part.payload], part.info)) for part in parts)
        rows, values = self.table.add_up(terms, flags, mean, like=self.flat)
        self.land_sparse(self.indices_of(rows), values.view(-1, *self.grad.shape[len(self._lead):]), merged=True)

    def indices_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The indices of rows in the gradient, a column each."""
        places = []
        for length in reversed(self._lead):
            places.insert(0, rows % length)
            rows = rows // length
        return torch.stack(places)

    def land_sparse(self, indices: torch.Tensor, values: torch.Tensor, merged: bool = False) -> None:
        self.grad = torch.sparse_coo_tensor(indices, values.to(self.grad.dtype), self.grad.shape, check_invariants=False,
                                            is_coalesced=merged or None)


def sparse_bytes(grad: torch.Tensor) -> int:
    """Bytes of a sparse gradient's indices and values."""
    return sum(t.numel() * t.element_size() for t in (grad._indices(), grad._values()))
