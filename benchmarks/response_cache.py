"""What a collective costs whose size changes from step to step, against one whose size stays the same.

Horovod remembers collectives by name, shape and type, and negotiates anew what differs from the last time.

    horovodrun -np 4 python benchmarks/response_cache.py
"""

import argparse
import statistics
import time

import horovod.torch as hvd
import torch

KINDS = {"constant": lambda step, i: 0, "changing": lambda step, i: 8 * ((step + i) % 7), "unnamed": lambda step, i: 0}


def seconds(kind: str, tensors: int, nbytes: int, step: int) -> float:
    """One step's allgathers, started together."""
    given = [torch.zeros(nbytes + KINDS[kind](step, i), dtype=torch.uint8) for i in range(tensors)]
    hvd.barrier()
    start = time.perf_counter()
    names = [None if kind == "unnamed" else f"{kind}.{nbytes}.{tensors}.{i}" for i in range(tensors)]
    for handle in [hvd.allgather_async(tensor, name=name) for tensor, name in zip(given, names)]:
        hvd.synchronize(handle)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="all kinds take turns in each (%(default)s)")
    parser.add_argument("--kib", type=int, default=1, help="of a tensor (%(default)s)")
    args = parser.parse_args()
    hvd.init()
    for tensors in (1, 8, 60):
        times = {kind: [] for kind in KINDS}
        for step in range(args.steps):
            for kind in KINDS:
                times[kind].append(seconds(kind, tensors, 1024 * args.kib, step))
        if hvd.rank() == 0:
            medians = {kind: 1e3 * statistics.median(of[5:]) for kind, of in times.items()}
            print(f"{tensors:3d} allgathers of {args.kib} KiB: " + ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in medians.items()))


if __name__ == "__main__":
    main()
