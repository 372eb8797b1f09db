"""Sparse gradients of workers, and what becomes of them with error feedback by row, in NumPy."""

import dataclasses

import numpy as np

from hvd_quant import get_compressor, wire
from hvd_quant.compressors import TensorInfo
from hvd_quant.ops import generic
from tests.conftest import CODECS

ROWS, WIDTH = 1000, 16
CODES = {compressor.name: compressor if compressor.linear else dataclasses.replace(compressor, exchange="allgather")
         for compressor in CODECS.values() if compressor.name not in ("none", "bf16")}
"""One of each kind."""
CODES["model"] = get_compressor("topk:ratio=0.1,min_numel=0,scope=model,exchange=allgather")


def given(step, rank):
    """A worker's indices, some of them twice, none in every fourth step, and their values."""
    random = np.random.default_rng([step, rank])
    count = [5, 0, 9, 3][(step + rank) % 4]
    return random.integers(0, 12, count) * 83, random.normal(size=(count, WIDTH)).astype(np.float32)


def of_all_rows(step, rank):
    """As many rows as there are."""
    return np.arange(ROWS), np.random.default_rng([step, rank]).normal(size=(ROWS, WIDTH)).astype(np.float32)


class Workers:
    """All workers, each with what it keeps of each row."""

    def __init__(self, compressor, name, world):
        self.compressor, self.info, self.world = compressor, TensorInfo.whole(name, (ROWS, WIDTH), world=world), world
        self.kept = np.zeros((world, ROWS, WIDTH), np.float32)
        self.wire_bytes = np.zeros(world, int)

    def reduce(self, gradients, step, dense=False):
        """The sum over the workers. The bytes that each sends are counted where gradients go by row."""
        total = np.zeros((ROWS, WIDTH), np.float32)
        for rank, (indices, values) in enumerate(gradients):
            rows = np.arange(ROWS) if dense else np.unique(indices)
            merged = np.zeros((ROWS, WIDTH), np.float32)
            np.add.at(merged, indices, values)
            if not dense:
                self.wire_bytes[rank] += 8 * (self.world - 1)
            if not len(rows):
                continue
            state = {"residual": self.kept[rank, rows].ravel()} if self.compressor.memory == "error_feedback" else {}
            info, vector = self.info.part(0, len(rows) * WIDTH).at(step=step, rank=rank), merged[rows].ravel()
            params = self.compressor.measure(generic, vector, state, info)
            payload = self.compressor.encode(generic, vector, state, params, info)
            if state:
                self.kept[rank, rows] = state["residual"].reshape(-1, WIDTH)
            if not dense:
                self.wire_bytes[rank] += (wire.HEADER_BYTES + wire.padded(4 * len(rows)) + len(payload)) * (self.world - 1)
            total[rows] += self.compressor.decode_sum(generic, [payload], info).reshape(-1, WIDTH)
        return total
