"""The native kernels against the machine's limits, in one run.

An encode with error feedback must read the gradient, and read and write the residual: its limit is one pass that reads two
vectors and writes one. A decode must write its output: its limit is filling a vector. Both are taken as the best way found
to do them here. All rows take turns in each round, so that what else the machine does falls on all of them alike; what is
printed are medians over the rounds, and the quartiles. With one thread it is its processor time that counts, which leaves
out when others had the core.

    python benchmarks/kernels.py --entries 16777216 --threads 1 --rounds 15
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hvd_quant.ops import torch as ops

LIMIT = "limit: read two vectors, write one"
FILL = "limit: write one vector"
BASELINE = "topk 1 % encode with torch.topk"
WORKERS = 4
BLOCK_SIZE = 2048
TAU = 10.0  # gradients have deviation 1: a random walk leaves +-10 once in a hundred steps


def topk_with_torch(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k with error feedback as it is usually written."""
    residual += grad
    _, index = torch.topk(residual.abs(), k, sorted=False)
    values = residual[index]
    residual[index] = 0.0
    return index, values


class Bench:
    """Callables by row name; each takes the round's number, as the step and to choose a gradient."""

    def __init__(self, entries: int):
        generator = torch.Generator().manual_seed(0)
        self.grads = [torch.randn(entries, generator=generator) for _ in range(4)]
        self.out = torch.zeros(entries)
        self.entries = entries
        self.encode = {
            "onebit": self._onebit(),
            "threshold": self._threshold(),
            "adaptive 1/64": self._adaptive(1 / 64),
            "topk 1 %": self._topk(0.01),
        }
        # What four workers would send: the codecs' payloads of four rounds.
        self.payloads = {name: [encode(step) for step in range(WORKERS)] for name, encode in self.encode.items()}

    def grad(self, step: int) -> torch.Tensor:
        return self.grads[step % len(self.grads)]

    def _residual(self) -> torch.Tensor:
        # As after many steps of a walk that starts again from 0 where it leaves +-TAU.
        return (torch.rand(self.entries) - torch.rand(self.entries)) * TAU

    def _onebit(self) -> Callable[[int], torch.Tensor]:
        residual = torch.zeros(self.entries)
        return lambda step: ops.onebit_encode(self.grad(step), residual, BLOCK_SIZE)

    def _threshold(self) -> Callable[[int], torch.Tensor]:
        residual, slots = self._residual(), ops.slots_for(1 / 64, self.entries)
        return lambda step: ops.threshold_encode(self.grad(step), residual, TAU, slots, step)

    def _adaptive(self, ratio: float) -> Callable[[int], torch.Tensor]:
        residual, slots = self._residual(), ops.slots_for(ratio, self.entries)

        def encode(step: int) -> torch.Tensor:
            thresholds = ops.adaptive_measure(self.grad(step), residual, ratio, step)
            return ops.adaptive_encode(self.grad(step), residual, thresholds, slots, step)
        return encode

    def _topk(self, ratio: float) -> Callable[[int], torch.Tensor]:
        residual, slots = self._residual(), ops.slots_for(ratio, self.entries)

        def encode(step: int) -> torch.Tensor:
            thresholds = ops.topk_measure(self.grad(step), residual, ratio, step)
            return ops.topk_encode(self.grad(step), residual, thresholds, slots, "float32", step)
        return encode

    def rows(self, baseline: bool) -> dict[str, Callable[[int], object]]:
        n, out, payloads = self.entries, self.out, self.payloads
        total, residual = torch.zeros(n), self._residual()
        add, fill = torch.ops.hvd_quant.stream_add, torch.ops.hvd_quant.stream_fill
        rows = {
            f"{LIMIT} (in place)": lambda step: add(total, self.grad(step), total),
            f"{LIMIT} (elsewhere)": lambda step: add(total, self.grad(step), out),
            f"{FILL} (through the caches)": lambda step: fill(out, 1.0, False),
            f"{FILL} (past the caches)": lambda step: fill(out, 1.0, True),
            **{f"{name} encode": encode for name, encode in self.encode.items()},
            f"onebit decode_sum of {WORKERS}":
                lambda step: ops.onebit_decode_sum(payloads["onebit"], n, BLOCK_SIZE, out=out),
            f"threshold decode_sum of {WORKERS}":
                lambda step: ops.threshold_decode_sum(payloads["threshold"], n, ops.slots_for(1 / 64, n), out=out),
            f"adaptive 1/64 decode_sum of {WORKERS}":
                lambda step: ops.adaptive_decode_sum(payloads["adaptive 1/64"], n, ops.slots_for(1 / 64, n), out=out),
            f"topk 1 % decode_sum of {WORKERS}":
                lambda step: ops.topk_decode_sum(payloads["topk 1 %"], n, ops.slots_for(0.01, n), "float32", out=out),
        }
        if baseline:
            rows[BASELINE] = lambda step: topk_with_torch(self.grad(step), residual, ops.slots_for(0.01, n))
        return rows


def measure(rows: dict[str, Callable[[int], object]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each row in each round, after two rounds that aren't counted."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for step in range(WORKERS, WORKERS + 2 + rounds):
        for name, row in rows.items():
            start = clock()
            row(step)
            seconds[name].append(clock() - start)
    return {name: taken[2:] for name, taken in seconds.items()}


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians, quartiles, and the fraction of the row's limit that is reached."""
    figures = {}
    for name, taken in seconds.items():
        low, median, high = statistics.quantiles(taken, n=4)
        figures[name] = {"ms": 1e3 * median, "quartiles_ms": [1e3 * low, 1e3 * high]}

    def best(prefix: str) -> float:
        return min(row["ms"] for name, row in figures.items() if name.startswith(prefix))

    for name, row in figures.items():
        row["of_limit"] = best(FILL if "decode" in name or name.startswith(FILL) else LIMIT) / row["ms"]
    if BASELINE in figures:
        figures[BASELINE]["topk_speedup"] = figures[BASELINE]["ms"] / figures["topk 1 % encode"]["ms"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=2**24, help="of each vector (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds, at least 2 (%(default)s)")
    parser.add_argument("--no-baseline", action="store_true", help="leave torch.topk out: it takes most of the time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}, expected at least 2")

    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    figures = summary(measure(Bench(args.entries).rows(not args.no_baseline), args.rounds, clock))
    level = torch.ops.hvd_quant.simd_level()
    table = Table(title=f"{args.entries} fp32 entries, {args.threads} thread(s), {args.rounds} rounds, {level}")
    for column in ("row", "median ms", "quartiles", "GB/s", "of its limit"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for name, row in figures.items():
        moved = args.entries * (4 if "decode" in name or name.startswith(FILL) else 12)
        low, high = row["quartiles_ms"]
        table.add_row(name, f"{row['ms']:.2f}", f"{low:.2f} … {high:.2f}", f"{moved / row['ms'] / 1e6:.1f}",
                      f"{row['of_limit']:.2f}")
    console = Console()
    console.print(table)
    if BASELINE in figures:
        console.print(f"topk encode is {figures[BASELINE]['topk_speedup']:.1f} times faster than with torch.topk")
    if args.json:
        args.json.write_text(json.dumps({"entries": args.entries, "threads": args.threads, "rounds": args.rounds, "simd": level,
                                         "rows": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
