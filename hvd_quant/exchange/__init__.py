"""How payloads travel, in plain Python without a framework; the frontends drive it."""

from __future__ import annotations

from hvd_quant import wire
from hvd_quant.compressors.base import Compressor, TensorInfo

MPI_COUNT_LIMIT = 2**31


def choose(compressor: Compressor, info: TensorInfo, mpi: bool = False) -> str:
    """The exchange for a tensor: "dense", "allreduce" or "allgather".

    Dense are tensors below the compressor's ``min_numel``, those whose payload would not be smaller, those of the
    warm-up, and all where there is one worker. The choice depends only on what is the same on all workers.

    Arguments:
        mpi: whether the collectives may run over MPI.

    Raises:
        ValueError: if the gathered payloads would not fit into the 32-bit counts of MPI's allgather.
    """
    if info.world == 1:
        return "dense"
    exchange = compressor.exchange
    if exchange == "auto":
        if compressor.name == "none":
            return "dense"
        exchange = "allreduce" if compressor.linear else "allgather"
    if info.step < compressor.warmup or info.numel < compressor.min_numel:
        return "dense"
    payload = compressor.payload_bytes(info)
    travelling = payload - wire.HEADER_BYTES if exchange == "allreduce" else payload
    if travelling >= 4 * info.numel and compressor.name != "none":
        return "dense"
    if mpi and exchange == "allgather" and payload * info.world >= MPI_COUNT_LIMIT:
        raise ValueError(
            f"{info.name}: payloads of {payload} bytes from {info.world} workers are more than the 2^31 bytes that an "
            "allgather over MPI can move; use Gloo, or choose a smaller payload for it, for example "
            f"{{{info.name!r}: 'topk:ratio=0.001'}}")
    return exchange


def sent_bytes(exchange: str, payload: float, world: int) -> float:
    """Bytes that one worker sends to the others for a payload of that many bytes.

    A ring allreduce sends 2 P (n - 1) / n, a ring allgather P (n - 1); sparse gradients are allgathered.
    """
    if exchange in ("allgather", "sparse"):
        return payload * (world - 1)
    return 2 * payload * (world - 1) / world
