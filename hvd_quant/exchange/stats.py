"""What an optimizer's exchanges cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hvd_quant.exchange import sent_bytes


@dataclass
class Bucket:
    """What the exchanges of tensors that travel together cost, added up over the steps.

    Attributes:
        exchange: how they last travelled: "dense", "allreduce", "allgather", "sra", "sparse".
        compressor: the spec of what they last travelled as.
        tensors: their names.
        dense_bytes, wire_bytes: what this worker would have sent with a ring allreduce of fp32 gradients, and what it sent.
        encode_seconds, wait_seconds, decode_seconds: host time.
        flight_seconds: from the start of each collective until this worker took its result.
    """

    exchange: str = ""
    compressor: str = ""
    tensors: list[str] = field(default_factory=list)
    dense_bytes: float = 0
    wire_bytes: float = 0
    encode_seconds: float = 0
    wait_seconds: float = 0
    decode_seconds: float = 0
    flight_seconds: float = 0

    def as_dict(self) -> dict[str, Any]:
        """All of it, with ``hidden_share``: the part of the flight time in which this worker did something else."""
        hidden = 1 - self.wait_seconds / self.flight_seconds if self.flight_seconds else None
        return {**vars(self), "dense_bytes": round(self.dense_bytes), "wire_bytes": round(self.wire_bytes), "hidden_share": hidden}


@dataclass
class Stats:
    """Totals since the optimizer was made, of this worker.

    Attributes:
        steps: synchronised steps.
        dense_bytes: bytes this worker would have sent with a ring allreduce of fp32 gradients.
        wire_bytes: bytes it sent, headers included, and parameters that were averaged because of a merge.
        encode_seconds, wait_seconds, decode_seconds: host time spent encoding, waiting for collectives, decoding.
        void_tensors: compressed tensors in which a value was not finite on some worker, once a step.
        exchanges: exchange -> names of the tensors that last travelled by it.
        buckets: by the name of their collectives, since buckets were made; after the first step they are made anew.
    """

    steps: int = 0
    dense_bytes: float = 0
    wire_bytes: float = 0
    encode_seconds: float = 0
    wait_seconds: float = 0
    decode_seconds: float = 0
    void_tensors: int = 0
    exchanges: dict[str, str] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def count(self, name: str | None, exchange: str, numel: int, payload: float, world: int, bucket: Bucket | None = None) -> None:
        """Add one tensor's exchange of ``payload`` bytes."""
        if name is not None:
            self.exchanges[name] = exchange
        for total in filter(None, (self, bucket)):
            total.dense_bytes += sent_bytes("allreduce", 4 * numel, world)
            total.wire_bytes += sent_bytes(exchange, payload, world)

    @contextmanager
    def timed(self, what: str, bucket: Bucket | None = None) -> Iterator[None]:
        """Add the time of the block to ``what`` + "_seconds"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            for total in filter(None, (self, bucket)):
                setattr(total, f"{what}_seconds", getattr(total, f"{what}_seconds") + seconds)

    def as_dict(self) -> dict[str, Any]:
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
            "buckets": {name: bucket.as_dict() for name, bucket in self.buckets.items()},
        }
