"""How payloads travel, in plain Python without a framework; the frontends drive it."""

from __future__ import annotations

from typing import NoReturn

from hvd_quant.compressors.base import Compressor, TensorInfo
from hvd_quant.exchange import cost
from hvd_quant.exchange.ranges import ranges

MPI_COUNT_LIMIT = 2**31
"""Bytes that a collective over MPI can't reach, since it counts them in 32 bits."""


def choose(compressor: Compressor, info: TensorInfo, mpi: bool = False) -> str:
    """The exchange for a tensor: "dense", "allreduce", "allgather" or "sra".

    Dense are tensors below the compressor's ``min_numel``, those whose payload would not be smaller, those of the
    warm-up, and all where there is one worker. The choice depends only on what is the same on all workers.

    Arguments:
        compressor: of its stages, that of ``info.step`` counts. Where its exchange is "auto",
            :func:`hvd_quant.exchange.cost.decide` chooses for this tensor alone.
        mpi: whether the collectives may run over MPI.

    Raises:
        ValueError: if what one collective moves would not fit into the 32-bit counts of MPI.
    """
    stage = compressor.at(info.step)
    if info.world == 1 or stage is None or info.step < compressor.dense_steps or not compressible(stage, info):
        return "dense"
    compressor = stage
    exchange = compressor.exchange
    if exchange == "auto":
        exchange = cost.decide(compressor, [info], mpi=mpi).exchange
    payload = compressor.payload_bytes(info)
    if mpi and gathered_bytes(exchange, payload, info.world) >= MPI_COUNT_LIMIT:
        raise ValueError(
            f"{info.name}: payloads of {payload} bytes from {info.world} workers are more than the 2^31 bytes that an "
            f"{exchange} over MPI can move; use Gloo, or choose a smaller payload for it, for example "
            f"{{{info.name!r}: 'topk:ratio=0.001'}}")
    return exchange


def compressible(compressor: Compressor, info: TensorInfo) -> bool:
    """Whether a tensor travels compressed at all once the warm-up is over, by its size."""
    if compressor.name == "none":
        return compressor.exchange != "auto"
    sent = compressor.summed_bytes(info) if compressor.allreduced else compressor.payload_bytes(info)
    return info.numel >= compressor.min_numel and sent < 4 * info.numel


def gathered_bytes(exchange: str, payload: int, world: int) -> int:
    """Bytes that the largest collective of an exchange leaves on each worker."""
    return {"allgather": payload * world, "sra": payload}.get(exchange, 0)


def sent_bytes(exchange: str, payload: float, world: int) -> float:
    """Bytes that one worker sends to the others for a payload of that many bytes.

    A ring allreduce sends 2 P (n - 1) / n, and so does "sra": P (n - 1) / n to the owners and as much of what was reduced.
    A ring allgather sends P (n - 1); sparse gradients are allgathered.
    """
    if exchange in ("allgather", "sparse"):
        return payload * (world - 1)
    return 2 * payload * (world - 1) / world


def refuse_join() -> NoReturn:
    """Where a worker is out of batches, Horovod sends zeros in its place, which are no payloads.

    Raises:
        ValueError: saying what to do.
    """
    raise ValueError("hvd.join() can't be combined with compressed exchanges: give all workers the same number of batches, or train "
                     "with compression='none'")


__all__ = ["MPI_COUNT_LIMIT", "choose", "compressible", "gathered_bytes", "ranges", "refuse_join", "sent_bytes"]
