"""What an optimizer's exchanges cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hvd_quant.exchange import sent_bytes


@dataclass
class Stats:
    """Totals since the optimizer was made, of this worker.

    Attributes:
        steps: synchronised steps.
        dense_bytes: bytes this worker would have sent with a ring allreduce of fp32 gradients.
        wire_bytes: bytes it sent, headers included.
        encode_seconds, wait_seconds, decode_seconds: host time spent encoding, waiting for collectives, decoding.
        void_tensors: tensors that a non-finite value made NaN, once a step.
        exchanges: exchange -> names of the tensors that last travelled by it.
    """

    steps: int = 0
    dense_bytes: float = 0
    wire_bytes: float = 0
    encode_seconds: float = 0
    wait_seconds: float = 0
    decode_seconds: float = 0
    void_tensors: int = 0
    exchanges: dict[str, str] = field(default_factory=dict)

    def count(self, name: str | None, exchange: str, numel: int, payload: int, world: int) -> None:
        """Add one tensor's exchange of ``payload`` bytes."""
        if name is not None:
            self.exchanges[name] = exchange
        self.dense_bytes += sent_bytes("allreduce", 4 * numel, world)
        self.wire_bytes += sent_bytes(exchange, payload, world)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of the block to ``what`` + "_seconds"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            what += "_seconds"
            setattr(self, what, getattr(self, what) + time.perf_counter() - start)

    def as_dict(self) -> dict:
        """All of it as plain numbers, with ``compression_ratio`` = dense_bytes / wire_bytes (None when nothing was sent)."""
        by_exchange: dict[str, list[str]] = {}
        for name, exchange in self.exchanges.items():
            by_exchange.setdefault(exchange, []).append(name)
        return {
            "steps": self.steps,
            "dense_bytes": round(self.dense_bytes),
            "wire_bytes": round(self.wire_bytes),
            "compression_ratio": self.dense_bytes / self.wire_bytes if self.wire_bytes else None,
            "encode_seconds": self.encode_seconds,
            "wait_seconds": self.wait_seconds,
            "decode_seconds": self.decode_seconds,
            "void_tensors": self.void_tensors,
            "exchanges": by_exchange,
        }
