"""What the benchmarks of kernels measure: native codes for PyTorch and TensorFlow, and the machine's limits, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from hvd_quant.ops import torch as ops

LIMIT = "limit: read two vectors, write one"
READ = "limit: read one vector"
FILL = "limit: write one vector"
BASELINE = "topk 1 % encode with torch.topk"
IN_TENSORFLOW = ", TensorFlow"
WORKERS = 4
BLOCK_SIZE = 2048
NAMES = ("onebit", "signsgd", "threshold", "adaptive 1/64", "topk 1 %", "blockwise8", "qsgd 4 bits", "terngrad", "natural")
WITHOUT_RESIDUAL = NAMES[-3:]
TAU = 10.0  # gradients have deviation 1: a random walk leaves +-10 once in a hundred steps


def topk_with_torch(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k with error feedback as it is usually written."""
    residual += grad
    _, index = torch.topk(residual.abs(), k, sorted=False)
    values = residual[index]
    residual[index] = 0.0
    return index, values


def encoder(backend: Any, name: str, residual: Any) -> Callable[[Any, Any], Any]:
    """The code ``name`` as a function of a gradient and a step."""
    def onebit(grad: Any, step: Any) -> Any:
        return backend.onebit_encode(grad, residual, BLOCK_SIZE)

    def threshold(grad: Any, step: Any) -> Any:
        return backend.threshold_encode(grad, residual, TAU, ops.slots_for(1 / 64, grad.shape[0]), step)

    def adaptive(grad: Any, step: Any) -> Any:
        thresholds = backend.adaptive_measure(grad, residual, 1 / 64, step)
        return backend.adaptive_encode(grad, residual, thresholds, ops.slots_for(1 / 64, grad.shape[0]), step)

    def topk(grad: Any, step: Any) -> Any:
        thresholds = backend.topk_measure(grad, residual, 0.01, step)
        return backend.topk_encode(grad, residual, thresholds, ops.slots_for(0.01, grad.shape[0]), "float32", step)

    def signsgd(grad: Any, step: Any) -> Any:
        return backend.signsgd_encode(grad, residual, BLOCK_SIZE, True)

    def blockwise8(grad: Any, step: Any) -> Any:
        return backend.blockwise8_encode(grad, residual, "dynamic", BLOCK_SIZE)

    def qsgd(grad: Any, step: Any) -> Any:
        return backend.qsgd_encode(grad, None, 4, "max", 512, *draw(step))

    def terngrad(grad: Any, step: Any) -> Any:
        return backend.terngrad_encode(grad, None, backend.terngrad_measure(grad, None, 2.5), *draw(step))

    def natural(grad: Any, step: Any) -> Any:
        return backend.natural_encode(grad, None, *draw(step))

    def draw(step: Any) -> tuple[Any, ...]:
        return 1, 0, step, 0, 0

    return dict(zip(NAMES, (onebit, signsgd, threshold, adaptive, topk, blockwise8, qsgd, terngrad, natural)))[name]


def decoder(backend: Any, name: str, n: int) -> Callable[[Any, Any], Any]:
    """The sum of payloads of the code ``name`` as a function of these and of where it goes."""
    few, fewer = ops.slots_for(1 / 64, n), ops.slots_for(0.01, n)
    return {
        "onebit": lambda payloads, out: backend.onebit_decode_sum(payloads, n, BLOCK_SIZE, out=out),
        "signsgd": lambda payloads, out: backend.signsgd_decode_sum(payloads, n, BLOCK_SIZE, True, out=out),
        "blockwise8": lambda payloads, out: backend.blockwise8_decode_sum(payloads, n, "dynamic", BLOCK_SIZE, out=out),
        "qsgd 4 bits": lambda payloads, out: backend.qsgd_decode_sum(payloads, n, 4, 512, out=out),
        "terngrad": lambda payloads, out: backend.terngrad_decode_sum(payloads, n, out=out),
        "natural": lambda payloads, out: backend.natural_decode_sum(payloads, n, out=out),
        "threshold": lambda payloads, out: backend.threshold_decode_sum(payloads, n, few, out=out),
        "adaptive 1/64": lambda payloads, out: backend.adaptive_decode_sum(payloads, n, few, out=out),
        "topk 1 %": lambda payloads, out: backend.topk_decode_sum(payloads, n, fewer, "float32", out=out),
    }[name]


class Bench:
    """Callables by row name; each takes the round's number, as the step and to choose a gradient.

    Arguments:
        entries: of each vector.
        tensorflow: the module, for its operations to run too.
    """

    def __init__(self, entries: int, tensorflow: Any = None):
        generator = torch.Generator().manual_seed(0)
        self.grads = [torch.randn(entries, generator=generator) for _ in range(4)]
        self.out = torch.zeros(entries)
        self.entries = entries
        self._tf = tensorflow
        # What four workers would send: the codecs' payloads of four rounds.
        self.payloads = {}

    def grad(self, step: int) -> torch.Tensor:
        return self.grads[step % len(self.grads)]

    def _residual(self, name: str) -> torch.Tensor:
        if name not in ("threshold", "adaptive 1/64", "topk 1 %"):
            return torch.zeros(self.entries)
        # As after many steps of a walk that starts again from 0 where it leaves +-TAU.
        return (torch.rand(self.entries) - torch.rand(self.entries)) * TAU

    def _in_torch(self, name: str) -> dict[str, Callable[[int], object]]:
        encode, decode = encoder(ops, name, self._residual(name)), decoder(ops, name, self.entries)
        payloads = self.payloads[name] = [encode(self.grad(step), step) for step in range(WORKERS)]
        return {f"{name} encode": lambda step: encode(self.grad(step), step),
                f"{name} decode_sum of {WORKERS}": lambda step: decode(payloads, self.out)}

    def _in_tensorflow(self, name: str) -> dict[str, Callable[[int], object]]:
        from hvd_quant.ops import tensorflow as tf_ops
        tf = self._tf
        grads = [tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(grad)) for grad in self.grads]
        encode = tf.function(encoder(tf_ops, name, tf.Variable(self._residual(name).numpy(), trainable=False)))
        decode = tf.function(decoder(tf_ops, name, self.entries))
        gathered = tf_ops.Payloads(tf.constant(torch.cat(self.payloads[name]).numpy()), WORKERS)
        return {f"{name} encode{IN_TENSORFLOW}":
                lambda step: encode(grads[step % len(grads)], tf.constant(step, tf.int64)),
                f"{name} decode_sum of {WORKERS}{IN_TENSORFLOW}": lambda step: decode(gathered, None)}

    def rows(self, baseline: bool) -> dict[str, Callable[[int], object]]:
        n, out = self.entries, self.out
        total, residual = torch.zeros(n), self._residual("topk 1 %")
        add, fill = torch.ops.hvd_quant.stream_add, torch.ops.hvd_quant.stream_fill
        rows = {
            f"{LIMIT} (in place)": lambda step: add(total, self.grad(step), total),
            f"{LIMIT} (elsewhere)": lambda step: add(total, self.grad(step), out),
            READ: lambda step: torch.ops.hvd_quant.stream_read(self.grad(step)),
            f"{FILL} (through the caches)": lambda step: fill(out, 1.0, False),
            f"{FILL} (past the caches)": lambda step: fill(out, 1.0, True),
        }
        for name in NAMES:
            rows.update(self._in_torch(name))
            if self._tf:
                rows.update(self._in_tensorflow(name))
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
        limit = FILL if "decode" in name or name.startswith(FILL) else READ if name.startswith(READ) else LIMIT
        row["of_limit"] = best(limit) / row["ms"]
        if "encode" in name and name.startswith(WITHOUT_RESIDUAL):
            row["of_reading"] = best(READ) / row["ms"]
        if name.endswith(IN_TENSORFLOW):
            row["of_torch"] = row["ms"] / figures[name.removesuffix(IN_TENSORFLOW)]["ms"]
    if BASELINE in figures:
        figures[BASELINE]["topk_speedup"] = figures[BASELINE]["ms"] / figures["topk 1 % encode"]["ms"]
    return figures


def clock(threads: int) -> Callable[[], float]:
    """Of one thread, processor time counts, which leaves out when others had the core."""
    return time.process_time if threads == 1 else time.perf_counter


def table(figures: dict[str, dict[str, float]], entries: int, title: str) -> Table:
    """What :func:`summary` found."""
    with_tensorflow = any("of_torch" in row for row in figures.values())
    rows = Table(title=title)
    columns = ["row", "median ms", "quartiles", "GB/s", "of its limit", "of reading"]
    for column in columns + ["times PyTorch's"] * with_tensorflow:
        rows.add_column(column, justify="left" if column == "row" else "right")
    for name, row in figures.items():
        moved = entries * (4 if "decode" in name or name.startswith((FILL, READ)) or "of_reading" in row else 12)
        low, high = row["quartiles_ms"]
        fractions = [f"{row[key]:.2f}" if key in row else ""
                     for key in ("of_limit", "of_reading", *(["of_torch"] if with_tensorflow else []))]
        rows.add_row(name, f"{row['ms']:.2f}", f"{low:.2f} … {high:.2f}", f"{moved / row['ms'] / 1e6:.1f}", *fractions)
    return rows
