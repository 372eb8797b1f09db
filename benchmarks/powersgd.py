"""Where PowerSGD's time goes: the matrix products' share of encoding and decoding, and what it needs of memory, in one process.

The two products with the gradient make P and Q; the product P Q' gives the gradient and the residual. Nothing is exchanged.

    python benchmarks/powersgd.py --rows 4096 --columns 4096 --rank 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hvd_quant import Compression, TensorInfo
from hvd_quant.compressors.base import conclude
from hvd_quant.ops import torch as ops

PARTS = {"powersgd_left": "P = M Q", "orthonormal": "orthonormal P", "powersgd_right": "Q = M' P", "powersgd_decode": "P Q', residual"}


class Timed:
    """``ops``, with the seconds of each function of ``PARTS``."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def __getattr__(self, name: str) -> Any:
        function: Callable[..., Any] = getattr(ops, name)
        if name not in PARTS:
            return function

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[name] += time.perf_counter() - start
            return result

        return timed


def step(timed: Timed, compressor: Any, grad: torch.Tensor, state: dict[str, torch.Tensor], info: TensorInfo) -> float:
    """Seconds of one step, as of one worker alone."""
    start = time.perf_counter()
    code = compressor.rounds(timed, grad, state, info, grad)
    first = next(code)
    second = code.send(first.clone())
    conclude(code, second.clone())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 4096, "columns": 4096, "rank": 4, "steps": 15, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compressor = Compression.powersgd(rank=arguments.rank)
    info = TensorInfo.whole("w", (arguments.rows, arguments.columns), world=1)
    state = {key: torch.zeros(shape) for key, shape in compressor.state_shapes(info).items()}
    gradient = torch.randn(info.numel)
    times: dict[str, list[float]] = {}
    for _ in range(arguments.steps):
        grad, timed = gradient.clone(), Timed()
        whole = step(timed, compressor, grad, state, info)
        for name, seconds in {**timed.seconds, "step": whole}.items():
            times.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(seconds[2:]) for name, seconds in times.items()}
    table = Table(title=f"PowerSGD, rank {arguments.rank}, {arguments.rows} x {arguments.columns}, threads: {arguments.threads}")
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in medians.items():
        table.add_row(PARTS.get(name, "all"), f"{1e3 * seconds:.1f}", f"{seconds / medians['step']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
