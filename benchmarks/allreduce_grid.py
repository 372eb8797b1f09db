"""What the exchange benchmark measures: workloads, competitors, and the points that are measured unless one asks for others."""

import fnmatch
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

Shapes = list[tuple[int, ...]]
Point = dict[str, Any]


def resnet50() -> Shapes:
    """ResNet-50's parameters: convolutions without biases, each with a batch norm's scale and shift."""
    convolutions: Shapes = [(64, 3, 7, 7)]
    inputs = 64
    for blocks, planes in zip((3, 4, 6, 3), (64, 128, 256, 512)):
        for block in range(blocks):
            convolutions += [(planes, inputs, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            if block == 0:
                convolutions.append((4 * planes, inputs, 1, 1))
            inputs = 4 * planes
    return [shape for conv in convolutions for shape in (conv, conv[:1], conv[:1])] + [(1000, 2048), (1000,)]


def transformer() -> Shapes:
    """The base Transformer for translation (Vaswani et al. 2017): 32,000 tied embeddings, 6 + 6 layers; 60,522,496 entries."""
    d, ff = 512, 2048
    norm: Shapes = [(d,), (d,)]
    attention: Shapes = [(d, d), (d,)] * 4 + norm
    feed_forward: Shapes = [(ff, d), (ff,), (d, ff), (d,)] + norm
    return [(32000, d)] + 6 * (attention + feed_forward) + 6 * (2 * attention + feed_forward)


SQUARES = tuple(2**k for k in range(6, 14))
WORKLOADS: dict[str, Shapes] = {**{f"{n}x{n}": [(n, n)] for n in SQUARES}, "resnet50": resnet50(), "transformer": transformer()}
WORKERS = (2, 4, 8)
RATES = ("1gbit", "10gbit", "unlimited")


@functools.cache
def entries(workload: str) -> int:
    return sum(torch.Size(shape).numel() for shape in WORKLOADS[workload])


def variants(spec: str, *exchanges: str) -> list[str]:
    return [f"{spec}{',' if ':' in spec else ':'}exchange={exchange}" for exchange in exchanges]


BASELINE, HOROVOD_FP16 = "Horovod fp32", "Horovod fp16"
DDP_FP32, DDP_FP16, POWERSGD = "DDP fp32", "DDP fp16", "DDP PowerSGD rank 4"
IDEAL = "ideal "  # before a spec: the same with streaming passes in the place of its kernels
HOOK = "DDP with "  # before a spec: as DDP's communication hook
TAU = 6.0  # gradients have deviation 1: a random walk leaves +-6 once in 36 steps, and there is room for one entry in 32
CODES = ("onebit", "adaptive", "topk", f"threshold:tau={TAU:g}")
COMPRESSED = [row for code in CODES for row in variants(code, "allgather", "sra")]
MAIN = [BASELINE, HOROVOD_FP16, DDP_FP32, DDP_FP16, POWERSGD, *COMPRESSED[:6], "auto:onebit", "auto:adaptive", "auto:topk"]
ROWS = [*MAIN, *COMPRESSED[6:], "none", *variants("none", "allreduce", "allgather", "sra"),
        *variants("fp16", "allreduce", "allgather", "sra"), *variants("bf16", "allgather", "sra"),
        *(IDEAL + row for row in COMPRESSED), *(HOOK + row for row in variants("topk", "allgather", "sra"))]
HALVES = variants("fp16", "allgather", "sra") + variants("bf16", "allgather", "sra")
DETAILED = ("1024x1024", "4096x4096")
FEW = (*DETAILED, "resnet50")


def in_default_grid(workers: int, rate: str, workload: str, row: str) -> bool:
    """Whether a point is one of those for which an hour has room on two cores.

    4 workers get the main rows on all workloads, or on a few where links are unlimited; 2 and 8 on these few at 1 Gb/s and on
    one elsewhere, without Horovod's fp16, the slowest of all. The other rows are for one layer at 1 Gb/s, at 4 workers, and of
    them the dense codes at 8.
    """
    if row not in MAIN:
        return row in {4: ROWS, 8: HALVES}.get(workers, ()) and workload == "4096x4096" and rate == "1gbit"
    if workers == 4:
        return rate != "unlimited" or workload in FEW
    return row != HOROVOD_FP16 and workload in (FEW if rate == "1gbit" else ("4096x4096",))


class Key(NamedTuple):
    """What makes a point."""

    workers: int
    rate: str
    workload: str
    row: str

    @classmethod
    def of(cls, point: Point) -> "Key":
        return cls(*(point[name] for name in cls._fields))


def contests_of(keys: Iterable[Key]) -> list[list[Key]]:
    """Points that are measured in turn: of a workload, a code in all the ways in which it travels. What is not ours is measured
    alone."""
    contests: dict[Any, list[Key]] = {}
    for key in keys:
        code = key.row.removeprefix(IDEAL).removeprefix("auto:").partition(":")[0]
        contests.setdefault((*key[:3], code), []).append(key)
    return list(contests.values())


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def framework(row: str) -> str:
    return "ddp" if row.startswith("DDP") else "horovod"
