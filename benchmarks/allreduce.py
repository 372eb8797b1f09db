"""The exchange of gradients by itself: Horovod, PyTorch DDP and hvd_quant between 2 to 8 hosts of 1 Gb/s and more.

Timed is the way from "the gradients are there" to "the reduced gradients are there", without backward pass and optimizer.
The workers, one a host of a `Cluster`, start together behind a barrier; an iteration takes as long as its slowest worker.
Gradients are random normal, others on each worker and in each iteration, and written before the clock starts.

Horovod and hvd_quant: the gradients are in `p.grad`, and `optimizer.synchronize()` is timed, which starts all exchanges and
waits for them. DDP exchanges inside a backward pass and builds its buckets only there. So it gets a backward pass in which
nothing is computed: one autograd function hands over all gradients at once, reads the clock as it does, and the end of
backward() stops it. What is timed is DDP's own: gradients into buckets, comm hook, waiting, and the buckets become the
gradients (`gradient_as_bucket_view`, which saves DDP a copy). Nothing is subtracted.

Frameworks are launched one after the other, since Horovod's thread would talk while DDP is timed. The rates of the links
are changed while the workers wait for commands, which come through a Unix socket.

    python benchmarks/allreduce.py run --json docs/benchmarks/allreduce.json         # under an hour on 2 cores; --resume goes on
    python benchmarks/allreduce.py run --workers 4 --rates 1gbit --workloads 4096x4096 --rows 'Horovod*' 'topk*' --json x.json
    python benchmarks/allreduce.py report docs/benchmarks/allreduce.json             # tables and plots beside the file
"""

import argparse
import dataclasses
import fnmatch
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from io import StringIO
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cluster import CONTROLLERS, HEADERS, Cluster, ClusterError, bits_per_second
from rich import box
from rich.console import Console
from rich.table import Table

from hvd_quant import Compressor, get_compressor
from hvd_quant.compressors import TensorInfo
from hvd_quant.exchange import sent_bytes
from hvd_quant.ops import torch as ops

Shapes = list[tuple[int, ...]]
Point = dict[str, Any]

# ------------------------------------------------------------------------------------------------------------ the grid


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


def entries(workload: str) -> int:
    return sum(torch.Size(shape).numel() for shape in WORKLOADS[workload])


def variants(spec: str, *exchanges: str) -> list[str]:
    return [f"{spec}{',' if ':' in spec else ':'}exchange={exchange}" for exchange in exchanges]


BASELINE, HOROVOD_FP16 = "Horovod fp32", "Horovod fp16"
DDP_FP32, DDP_FP16, POWERSGD = "DDP fp32", "DDP fp16", "DDP PowerSGD rank 4"
IDEAL = "ideal "  # before a spec: the same with streaming passes in the place of its kernels
TAU = 6.0  # gradients have deviation 1: a random walk leaves +-6 once in 36 steps, and there is room for one entry in 32
CODES = ("onebit", "adaptive", "topk", f"threshold:tau={TAU:g}")
COMPRESSED = [row for code in CODES for row in variants(code, "allgather", "sra")]
MAIN = [BASELINE, HOROVOD_FP16, DDP_FP32, DDP_FP16, POWERSGD, *COMPRESSED[:6], "auto:onebit", "auto:adaptive", "auto:topk"]
ROWS = [*MAIN, *COMPRESSED[6:], "none", *variants("none", "allreduce", "allgather", "sra"),
        *variants("fp16", "allreduce", "allgather", "sra"), *variants("bf16", "allgather", "sra"),
        *(IDEAL + row for row in COMPRESSED)]
DETAILED = ("1024x1024", "4096x4096")


def in_default_grid(workers: int, rate: str, workload: str, row: str) -> bool:
    """Whether a point is one of those for which an hour has room on two cores.

    4 workers get the main rows on all workloads, the largest two not on all links, and all rows on two workloads; 2 and 8 get the
    main rows on these two, and on ResNet-50's at 1 Gb/s. The rest is left out unless one asks for all.
    """
    main, detailed = row in MAIN, workload in DETAILED
    if workload == "8192x8192":
        return main and workers == 4 and rate == "1gbit"
    if workload == "transformer":
        return main and workers == 4 and rate != "unlimited"
    if workers == 4:
        return main or detailed
    return main and (detailed or workload == "resnet50" and rate == "1gbit")


class Key(NamedTuple):
    """What makes a point."""

    workers: int
    rate: str
    workload: str
    row: str

    @classmethod
    def of(cls, point: Point) -> "Key":
        return cls(*(point[name] for name in cls._fields))


def grid(args: argparse.Namespace) -> list[Key]:
    """The points that the options ask for, in the order in which they are measured."""
    return [Key(workers, rate, workload, row) for workers in args.workers for rate in args.rates
            for workload in WORKLOADS if matches(workload, args.workloads)
            for row in ROWS if matches(row, args.rows) and (args.all or in_default_grid(workers, rate, workload, row))]


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def framework(row: str) -> str:
    return "ddp" if row.startswith("DDP") else "horovod"


def unavailable(row: str) -> str | None:
    """Why this version of hvd_quant has no such row."""
    if row not in (BASELINE, HOROVOD_FP16, DDP_FP32, DDP_FP16, POWERSGD):
        try:
            get_compressor(row.removeprefix(IDEAL))
        except ValueError as error:
            return str(error)
    return None


# --------------------------------------------------------------------------------------------------------- competitors


def streaming(compressor: Compressor) -> Compressor:
    """The compressor with one pass over the data in the place of each kernel, and all else as it is.

    An encode reads gradient and residual and writes the residual, a decode writes its output. What travels are payloads that
    the compressor made of zeros, so they have its header and size. It computes nothing of use: it tells what is left of an
    exchange when kernels are as fast as memory.
    """
    if compressor.memory != "error_feedback":
        raise ValueError(f"{compressor.spec} keeps no residual, so there is nothing that its encode has to add up")
    payloads: dict[int, torch.Tensor] = {}

    @dataclass(frozen=True, kw_only=True)
    class Streaming(type(compressor)):
        def measure(self, ops, grad, state, info):
            return None

        def encode(self, ops, grad, state, params, info):
            torch.ops.hvd_quant.stream_add(state["residual"], grad, state["residual"])
            if info.numel not in payloads:
                zeros = torch.zeros_like(grad)
                nothing = {key: torch.zeros_like(value) for key, value in state.items()}
                params = compressor.measure(ops, zeros, nothing, info)
                payloads[info.numel] = compressor.encode(ops, zeros, nothing, params, info)
            return payloads[info.numel]

        def decode_sum(self, ops, payloads, info, out=None):
            out = ops.new_vector(info.numel, payloads[0]) if out is None else out
            torch.ops.hvd_quant.stream_fill(out, 0.0, info.numel >= 2**20)  # from there on the decoders pass the caches
            return out

        decode_mean = decode_sum

    return Streaming(**{field.name: getattr(compressor, field.name) for field in dataclasses.fields(compressor)})


class Pool:
    """Random normal gradients, prepared: each iteration takes another stretch of one long vector."""

    SHIFTS = 2**20

    def __init__(self, length: int, seed: int):
        self._values = torch.randn(length + self.SHIFTS, generator=torch.Generator().manual_seed(seed))

    def write(self, gradients: Iterable[torch.Tensor], iteration: int) -> None:
        start = 7919 * iteration % self.SHIFTS
        for gradient in gradients:
            gradient.copy_(self._values[start:start + gradient.numel()].view_as(gradient))
            start += gradient.numel()


def parameters(shapes: Shapes) -> list[torch.nn.Parameter]:
    """Parameters whose values are never read."""
    return [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]


class HorovodExchange:
    """Horovod's own optimizer, or hvd_quant's."""

    warm_up = 3

    def __init__(self, row: str, shapes: Shapes, number: int):
        self._parameters = parameters(shapes)
        for p in self._parameters:
            p.grad = torch.empty_like(p)
        self._numel = {f"{number}.{i}": p.numel() for i, p in enumerate(self._parameters)}  # by a name that is never used again
        named, sgd = zip(self._numel, self._parameters), torch.optim.SGD(self._parameters, lr=0.0)
        import horovod.torch as stock
        self._barrier, self._world = stock.barrier, stock.size()
        self._compressor = None
        if row in (BASELINE, HOROVOD_FP16):
            compression = stock.Compression.none if row == BASELINE else stock.Compression.fp16
            self._optimizer = stock.DistributedOptimizer(sgd, named_parameters=named, compression=compression)
            self._entry_bytes = 4 if row == BASELINE else 2
        else:
            import hvd_quant.torch as hvd
            self._compressor = get_compressor(row.removeprefix(IDEAL))
            compression = streaming(self._compressor) if row.startswith(IDEAL) else self._compressor
            self._optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compression)

    def iterate(self, pool: Pool, iteration: int) -> dict[str, float]:
        if self._compressor is not None:
            self._optimizer.zero_grad(set_to_none=False)  # or else the gradients count as reduced already
        pool.write((p.grad for p in self._parameters), iteration)
        before = self._stats()
        self._barrier()
        start = time.perf_counter()
        self._optimizer.synchronize()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, **{key: value - before[key] for key, value in self._stats().items()}}

    def _stats(self) -> dict[str, float]:
        if self._compressor is None:
            return {}
        stats = self._optimizer.compression_stats()
        return {key: stats[key] for key in ("encode_seconds", "wait_seconds", "decode_seconds", "wire_bytes")}

    def facts(self) -> dict[str, Any]:
        """How the tensors travelled, and what encode and decode have to read and write for that at least."""
        if self._compressor is None:
            return {"wire_bytes": sent_bytes("allreduce", self._entry_bytes * sum(self._numel.values()), self._world)}
        exchanges = self._optimizer.compression_stats()["exchanges"]
        encoded = {kind: sum(self._numel[name] for name in names) for kind, names in exchanges.items() if kind != "dense"}
        feedback = self._compressor.stateful
        return {"exchanges": {kind: len(names) for kind, names in exchanges.items()},
                "encode_bytes": sum((12 if feedback and kind != "allreduce" else 4) * n for kind, n in encoded.items()),
                "decode_bytes": sum(4 * n for n in encoded.values())}


class Handover(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(ctx, gradients, clock, *_):
        ctx.gradients, ctx.clock = gradients, clock
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        ready = [gradient.detach() for gradient in ctx.gradients]  # nobody else's, so autograd makes them p.grad as they are
        ctx.clock.append(time.perf_counter())
        return None, None, *ready


class Model(torch.nn.Module):
    def __init__(self, shapes: Shapes):
        super().__init__()
        self.weights = torch.nn.ParameterList(parameters(shapes))
        self.gradients = [torch.empty(shape) for shape in shapes]

    def forward(self, clock: list[float]) -> torch.Tensor:
        return Handover.apply(self.gradients, clock, *self.weights)


class DDPExchange:
    """PyTorch's DistributedDataParallel on Gloo."""

    warm_up = 5  # it arranges its buckets anew after the first; PowerSGD starts with the third

    def __init__(self, row: str, shapes: Shapes, number: int):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        self._model = Model(shapes)
        numel = sum(p.numel() for p in self._model.weights)
        # One bucket for PowerSGD: with several, what it sends after a wait is in another order on each worker, which Gloo can't
        # tell apart, and a worker aborts.
        bucket = 4 * numel // 2**20 + 1 if row == POWERSGD else None
        self._ddp = torch.nn.parallel.DistributedDataParallel(self._model, gradient_as_bucket_view=True, init_sync=False,
                                                              bucket_cap_mb=bucket)
        entry_bytes = {DDP_FP32: 4, DDP_FP16: 2}.get(row)
        self._facts: dict[str, Any] = {}
        if entry_bytes:
            self._facts["wire_bytes"] = sent_bytes("allreduce", entry_bytes * numel, torch.distributed.get_world_size())
        if row == DDP_FP16:
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif row == POWERSGD:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def iterate(self, pool: Pool, iteration: int) -> dict[str, float]:
        self._ddp.zero_grad(set_to_none=True)
        pool.write(self._model.gradients, iteration)
        clock: list[float] = []
        loss = self._ddp(clock)
        torch.distributed.barrier()
        loss.backward()
        return {"seconds": time.perf_counter() - clock[0]}

    def facts(self) -> dict[str, Any]:
        return self._facts


# ------------------------------------------------------------------------------------------------------------- workers


class Worker:
    """What one worker does when it is told to; each method is a command, and what it returns goes back."""

    def __init__(self, framework: str):
        if framework == "ddp":
            rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
            torch.distributed.init_process_group("gloo", init_method="tcp://host0:29500", rank=rank, world_size=size)
            self.rank, self._kind = rank, DDPExchange
        else:
            import horovod.torch as hvd
            hvd.init()
            self.rank, self._kind = hvd.rank(), HorovodExchange
        self._number = self._iteration = 0
        self._exchange: Any = None

    def memory(self, seconds: float) -> dict[str, float]:
        """Bytes a second of reading two vectors and writing one, and of writing one, while the others do the same."""
        a, b = torch.ones(2**24), torch.ones(2**24)
        passes = {"encode": (12, lambda: torch.ops.hvd_quant.stream_add(a, b, a)),
                  "decode": (4, lambda: torch.ops.hvd_quant.stream_fill(b, 1.0, True))}
        rates = {}
        for name, (bytes_an_entry, run) in passes.items():
            count, start = 0, time.perf_counter()
            while count < 2 or time.perf_counter() - start < seconds:
                run()
                count += 1
            rates[name] = count * bytes_an_entry * a.numel() / (time.perf_counter() - start)
        return rates

    def pool(self, length: int) -> None:
        self._pool = Pool(length, seed=self.rank)

    def prepare(self, row: str, workload: str) -> float:
        """Set a competitor up and let it run a few times; the seconds of the last."""
        self._exchange = None
        gc.collect()
        self._number += 1
        self._exchange = self._kind(row, WORKLOADS[workload], self._number)
        return self.measure(self._exchange.warm_up)[0][-1]["seconds"]

    def measure(self, iterations: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
        samples = []
        for _ in range(iterations):
            samples.append(self._exchange.iterate(self._pool, self._iteration))
            self._iteration += 1
        return samples, self._exchange.facts()


def work(address: str, framework: str) -> None:
    """A worker's life: take commands until there are no more."""
    torch.set_num_threads(1)
    worker = Worker(framework)
    with Client(address) as parent:
        parent.send(worker.rank)
        while command := parent.recv():
            name, *arguments = command
            try:
                parent.send((getattr(worker, name)(*arguments), None))
            except Exception as error:
                parent.send((None, f"{type(error).__name__}: {error}"))


class BenchmarkError(RuntimeError):
    """Workers that didn't start, or one that failed where others did not."""


class PointError(RuntimeError):
    """What all workers failed with in the same words, so that they can go on with something else."""


class Workers:
    """The workers of one launch, as they are told what to do."""

    ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
           # Freed memory stays in the process: otherwise each large tensor is new pages, which cost more than what is measured.
           "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**36)}

    def __init__(self, cluster: Cluster, framework: str, controller: str):
        self._cluster, self._framework, self._controller, self._output = cluster, framework, controller, ""

    def __enter__(self) -> "Workers":
        self._folder = tempfile.TemporaryDirectory()
        self._address = f"{self._folder.name}/commands"
        count = len(self._cluster.hosts)
        self._listener = Listener(self._address, "AF_UNIX", backlog=count + 1)
        # A daemon: where this process fails, the cluster's end is the launch's, and nobody waits for it.
        self._launch = threading.Thread(target=self._run, daemon=True)
        self._launch.start()
        self._connections: dict[int, Connection] = {}
        while len(self._connections) < count:
            connection = self._listener.accept()
            try:
                self._connections[connection.recv()] = connection
            except EOFError:
                raise self._lost("the workers did not start") from None
        return self

    def _lost(self, what: str) -> BenchmarkError:
        for connection in self._connections.values():
            connection.close()  # the others end too, and then the launch
        self._launch.join(timeout=30)
        return BenchmarkError(f"{what}: {self._output or 'the launch has not ended'}")

    def _run(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "worker", self._address, self._framework]
        controller = "gloo" if self._framework == "ddp" else self._controller
        try:
            run = self._cluster.run(command, controller, self.ENV)
            self._output = (run.stdout + run.stderr)[-4000:]
        except ClusterError as error:
            self._output = str(error)
        try:
            Client(self._address).close()  # who waits for a worker is not to wait for ever
        except OSError:
            pass  # nobody waits

    def ask(self, *command: Any, timeout: float = 600) -> list[Any]:
        """Give all workers a command; their answers by rank.

        Raises:
            PointError: where all have failed alike.
            BenchmarkError: where some have failed and others haven't, or one is gone.
        """
        for connection in self._connections.values():
            connection.send(command)
        answers: dict[int, tuple[Any, str | None]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._connections):
            waiting = {c: rank for rank, c in self._connections.items() if rank not in answers}
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                try:
                    answers[waiting[connection]] = connection.recv()
                except EOFError:
                    raise self._lost(f"worker {waiting[connection]} ended during {command}") from None
            if time.monotonic() > deadline:
                failed = [error for _, error in answers.values() if error]
                raise BenchmarkError(f"no answer to {command} but from workers {sorted(answers)}, of which some failed: {failed}"
                                     if failed else f"no answer to {command} but from workers {sorted(answers)}")
        errors = {error for _, error in answers.values()}
        if errors == {None}:
            return [answers[rank][0] for rank in sorted(answers)]
        if len(errors) == 1:
            raise PointError(errors.pop())
        raise BenchmarkError(f"workers differ in {command}: {errors}")

    def __exit__(self, kind: Any, *_: Any) -> None:
        for connection in self._connections.values():
            if kind is None:
                connection.send(None)
            connection.close()
        self._listener.close()
        if kind is None:
            self._launch.join()
        self._folder.cleanup()


# ----------------------------------------------------------------------------------------------------------- measuring


def summary(answers: Sequence[tuple[list[dict[str, float]], dict[str, Any]]]) -> dict[str, Any]:
    """The figures of a point from what all workers measured in each iteration.

    An iteration's time is its slowest worker's, other figures are means over the workers; then medians over the iterations.
    """
    rounds = list(zip(*(samples for samples, _ in answers)))
    times = [max(sample["seconds"] for sample in samples) for samples in rounds]
    low, median, high = statistics.quantiles(times, n=4)
    figures = {"iterations": len(times), "seconds": median, "quartiles": [low, high], **answers[0][1]}
    for key in rounds[0][0].keys() - {"seconds"}:
        figures[key] = statistics.median(statistics.fmean(sample[key] for sample in samples) for samples in rounds)
    return figures


def measure(cluster: Cluster, workers: Workers, key: Key, seconds: float) -> Point:
    """One point: warm up, then for some ``seconds`` at least 5 and at most 200 iterations."""
    slowest = max(workers.ask("prepare", key.row, key.workload))
    iterations = max(5, min(200, round(seconds / slowest)))
    before = cluster.bytes_sent()
    answers = workers.ask("measure", iterations)
    link_bytes = statistics.fmean(after - first for after, first in zip(cluster.bytes_sent(), before)) / iterations
    return {**key._asdict(), **summary(answers), "link_bytes": link_bytes}


def machine() -> dict[str, Any]:
    """What the figures depend on, besides the settings and what else was running."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {name: importlib.metadata.version(name) for name in ("torch", "horovod", "hvd_quant")}
    return {"cpu": model, "cores": os.cpu_count(), "simd": torch.ops.hvd_quant.simd_level(), "kernel": platform.release(),
            "python": platform.python_version(), **versions}


def save(results: dict[str, Any], path: Path) -> None:
    """Write the file in one go, so that it is whole however this ends."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({**results, "points": None}, indent=1)[:-len("null\n}")] + "[\n  "
                   + ",\n  ".join(json.dumps(point) for point in results["points"]) + "\n ]\n}\n")
    os.replace(new, path)


def missing(keys: Iterable[Key], points: Iterable[Point]) -> list[Key]:
    """The points that have not been measured yet."""
    done = {Key.of(point) for point in points}
    return [key for key in keys if key not in done]


def begin(path: Path, resume: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """New results, or those in the file.

    Raises:
        ValueError: if there is a file that isn't to be resumed, or one of another machine, version or settings.
    """
    facts = {"settings": settings, "machine": machine()}
    if not path.exists():
        return {**facts, "points": []}
    if not resume:
        raise ValueError(f"{path} exists: give --resume to add what is missing in it, or another --json")
    results = json.loads(path.read_text())
    for name, value in facts.items():
        if differing := [key for key in value if results[name].get(key) != value[key]]:
            raise ValueError(f"{path} has other {name}: " + ", ".join(
                f"{key} is {results[name].get(key)!r} there and {value[key]!r} here" for key in differing))
    return results


def run(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """Measure what the file lacks, which is written after each point; all results, and the number of points that failed."""
    results = begin(args.json, args.resume, {"seconds": args.seconds, "controller": args.controller, "env": Workers.ENV})
    keys = grid(args)
    absent = {row: reason for row in dict.fromkeys(key.row for key in keys) if (reason := unavailable(row))}
    for row, reason in absent.items():
        console.print(f"left out: {row}: {reason}", highlight=False, markup=False)
    todo = missing([key for key in keys if key.row not in absent], results["points"])
    for workers in dict.fromkeys(key.workers for key in todo):
        with Cluster(hosts=workers) as cluster:
            for kind in ("horovod", "ddp"):
                if mine := [key for key in todo if key.workers == workers and framework(key.row) == kind]:
                    for point in launch(cluster, kind, mine, args, console):
                        results["points"].append(point)
                        save(results, args.json)
                        name, count = " ".join(map(str, Key.of(point))), len(results["points"])
                        console.print(f"{count:5} {name}: {ms(point['seconds'])} ms", highlight=False, markup=False)
    return results, len(missing(todo, results["points"]))


def launch(cluster: Cluster, kind: str, keys: list[Key], args: argparse.Namespace, console: Console) -> Iterator[Point]:
    """Start the workers of one framework and measure its points."""
    facts: dict[str, Any] = {"began": datetime.now(timezone.utc).isoformat(timespec="seconds"), "load": os.getloadavg()[0]}
    cluster.set_rate("unlimited")
    with Workers(cluster, kind, args.controller) as workers:
        memory = workers.ask("memory", 1.0)
        facts["memory"] = {name: statistics.fmean(rates[name] for rates in memory) for name in memory[0]}
        workers.ask("pool", max(entries(key.workload) for key in keys))
        for key in keys:
            if cluster.rate != key.rate:
                cluster.set_rate(key.rate)
            try:
                yield {**measure(cluster, workers, key, args.seconds), **facts}
            except PointError as failure:
                console.print(f"failed: {' '.join(map(str, key))}: {failure}", highlight=False, markup=False)


# -------------------------------------------------------------------------------------------------------------- report


def limit(point: Point) -> float:
    """Seconds that physics asks for: the worker's bytes through its link, then one streaming pass an encode and a decode."""
    rate = bits_per_second(point["rate"])
    wire = point.get("wire_bytes", point["link_bytes"]) * HEADERS * 8 / rate if rate else 0.0
    return wire + sum(point.get(f"{what}_bytes", 0) / point["memory"][what] for what in ("encode", "decode"))


def ms(seconds: float | None) -> str:
    return "" if seconds is None else digits(1e3 * seconds)


def mb(count: float | None) -> str:
    return "" if count is None else digits(count / 1e6)


def digits(value: float) -> str:
    """With three digits or more, two of them at most behind the point; or with the first that isn't zero."""
    if 0 < value < 0.095:
        return f"{value:.1g}"
    return f"{value:,.{2 - (value >= 9.995) - (value >= 99.95)}f}"


Index = dict[Key, Point]


def headed(first: str, rest: Iterable[str], style: box.Box, title: str | None) -> Table:
    table = Table(title=title, box=style)
    table.add_column(first, no_wrap=True)
    for heading in rest:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def overview(points: Index, workers: int, rate: str, style: box.Box = box.HEAVY_HEAD, title: str | None = None) -> Table:
    """Milliseconds of every competitor on every workload, and how many times faster than Horovod fp32 it is."""
    there = {(key.workload, key.row): point for key, point in points.items() if key[:2] == (workers, rate)}
    workloads = [workload for workload in WORKLOADS if any(workload == known for known, _ in there)]
    table = headed("ms (speed-up)", workloads, style, title)
    for row in (row for row in ROWS if any(row == known for _, known in there)):
        cells = []
        for workload in workloads:
            point, base = there.get((workload, row)), there.get((workload, BASELINE))
            gain = f" ({base['seconds'] / point['seconds']:.2f})" if point and base else ""
            cells.append(ms(point["seconds"]) + gain if point else "")
        table.add_row(row, *cells)
    return table


def details(points: Index, workers: int, rate: str, workload: str, style: box.Box = box.HEAVY_HEAD,
            title: str | None = None) -> Table:
    """One workload's competitors with all that was measured of them, and their limits."""
    columns = ("ms", "quartiles", "speed-up", "encode", "wait", "decode", "limit", "ideal", "MB sent", "on the link")
    table = headed(workload, columns, style, title)
    base = points.get(Key(workers, rate, workload, BASELINE))
    for row in ROWS:
        if not (point := points.get(Key(workers, rate, workload, row))):
            continue
        ideal = points.get(Key(workers, rate, workload, IDEAL + row))
        table.add_row(
            row, ms(point["seconds"]), " … ".join(map(ms, point["quartiles"])),
            f"{base['seconds'] / point['seconds']:.2f}" if base else "",
            *(ms(point.get(f"{what}_seconds")) for what in ("encode", "wait", "decode")),
            ms(limit(point)), ms(ideal["seconds"]) if ideal else "", mb(point.get("wire_bytes")), mb(point["link_bytes"]))
    return table


def tables(results: dict[str, Any], style: box.Box = box.HEAVY_HEAD) -> Iterator[tuple[str, Table]]:
    """All tables with their titles: an overview for each number of workers and rate, then the workloads measured in detail."""
    points = {Key.of(point): point for point in results["points"]}
    places = sorted({key[:2] for key in points}, key=lambda place: (place[0], bits_per_second(place[1]) or float("inf")))
    for workers, rate in places:
        yield f"{workers} workers, {rate}", overview(points, workers, rate, style)
    for workers, rate in places:
        for workload in DETAILED:
            table = details(points, workers, rate, workload, style)
            if table.row_count:
                yield f"{workload}, {workers} workers, {rate}, in detail", table


def exchanged_bytes(spec: str, numel: int, workers: int) -> float:
    """Bytes that one worker sends for a vector, by calculation; for an sra those of ranges, each with its header."""
    compressor, info = get_compressor(spec.partition(":exchange")[0].partition(",exchange")[0]), TensorInfo.whole("", (numel,))
    if spec.endswith("=allgather"):
        return (workers - 1) * compressor.payload_bytes(info)
    return 2 * (workers - 1) * compressor.payload_bytes(info.part(0, -(-numel // workers)))


def style_of(row: str) -> dict[str, Any]:
    """A line's colour by code, its dashes by exchange."""
    groups = ("Horovod fp16", "DDP fp32", "DDP fp16", "DDP PowerSGD", "onebit", "adaptive", "topk", "threshold")
    place = next((i for i, group in enumerate(groups) if group in row), len(groups))
    return {"color": f"C{place}", "linestyle": "--" if "sra" in row else ":" if row.startswith("auto") else "-", "label": row}


def plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what there are points for; the files that were written."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = {Key.of(point): point for point in results["points"]}
    rates = sorted({key.rate for key in points if key.workers == 4}, key=lambda rate: bits_per_second(rate) or float("inf"))
    written = []

    def finish(figure: Any, name: str) -> None:
        written.append(folder / name)
        figure.savefig(written[-1], dpi=110)
        pyplot.close(figure)

    def panels(height: float) -> tuple[Any, Any]:
        figure, axes = pyplot.subplots(1, len(rates), figsize=(2 + 4.5 * len(rates), height), layout="constrained", sharey=True,
                                       squeeze=False)
        for axis, rate in zip(axes[0], rates):
            axis.set_title(f"4 workers, {rate}")
            axis.grid(alpha=0.3)
        return figure, axes[0]

    bases = {key[1:3]: point["seconds"] for key, point in points.items() if key.workers == 4 and key.row == BASELINE}
    if bases:
        figure, axes = panels(5.5)
        for axis, rate in zip(axes, rates):
            for row in MAIN[1:]:
                line = {n: bases[rate, f"{n}x{n}"] / points[key]["seconds"] for n in SQUARES
                        if (rate, f"{n}x{n}") in bases and (key := Key(4, rate, f"{n}x{n}", row)) in points}
                if line:
                    axis.plot(line.keys(), line.values(), marker="o", markersize=3, **style_of(row))
            axis.axhline(1.0, color="black", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_xlabel("n, of an n × n layer")
        axes[0].set_ylabel("times faster than Horovod fp32")
        lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(lines.values(), lines.keys(), loc="outside right center", fontsize=8)
        finish(figure, "speedup.png")

    # Without the dense ones, beside whose bars the others' parts could not be seen.
    shown = [*COMPRESSED, *(row for row in MAIN if row.startswith("auto")), POWERSGD]
    rows = [row for one in shown for row in (one, IDEAL + one)
            if any(key.workers == 4 and key[2:] == ("4096x4096", row) for key in points)]
    if rows:
        figure, axes = panels(1.5 + 0.27 * len(rows))
        for axis, rate in zip(axes, rates):
            for height, row in enumerate(reversed(rows)):
                if not (point := points.get(Key(4, rate, "4096x4096", row))):
                    continue
                left = 0.0
                for what, color in (("encode", "C0"), ("wait", "C1"), ("decode", "C2"), ("rest", "0.7")):
                    width = max(0.0, point["seconds"] - left) if what == "rest" else point.get(f"{what}_seconds", 0.0)
                    axis.barh(height, 1e3 * width, left=1e3 * left, color=color, label=what)
                    left += width
                axis.plot(1e3 * limit(point), height, "k|", markersize=10, label="limit")
            axis.set_yticks(range(len(rows)), reversed(rows), fontsize=8)
            axis.set_xlabel("ms, 4096 × 4096")
        legend = dict(zip(*reversed(axes[0].get_legend_handles_labels())))
        figure.legend(legend.values(), legend.keys(), loc="outside right center")
        finish(figure, "breakdown.png")

    counts = [2**k for k in range(1, 11)]
    figure, axis = pyplot.subplots(figsize=(10, 5), layout="constrained")
    numel = 4096**2
    axis.plot(counts, [sent_bytes("allreduce", 4 * numel, n) / 1e6 for n in counts], color="black", label=BASELINE)
    for row in COMPRESSED:
        axis.plot(counts, [exchanged_bytes(row, numel, n) / 1e6 for n in counts], **style_of(row))
    for row in (BASELINE, *COMPRESSED):
        sent = {key.workers: point["link_bytes"] / 1e6 for key, point in points.items() if key[1:] == (rates[0], "4096x4096", row)
                } if rates else {}
        axis.plot(sent.keys(), sent.values(), "o", color="black" if row == BASELINE else style_of(row)["color"])
    axis.set(xlabel="workers", ylabel="MB sent by a worker, 4096 × 4096", title="by calculation; dots: measured at the link")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    finish(figure, "bytes.png")
    return written


BEGIN, END = "<!-- what follows is written by `benchmarks/allreduce.py report` -->", "<!-- up to here -->"
CAPTIONS = {"speedup.png": "Times faster than Horovod fp32, by layer",
            "breakdown.png": "Where the time of a 4096 × 4096 layer goes", "bytes.png": "Bytes a worker sends"}


def markdown(results: dict[str, Any], images: Iterable[Path]) -> str:
    """The report's section of a Markdown page."""
    facts, controller, loads = results["machine"], results["settings"]["controller"], [p["load"] for p in results["points"]]
    lines = [f"{facts['cores']} cores of {facts['cpu']}, {facts['simd']}; PyTorch {facts['torch']}, Horovod {facts['horovod']} "
             f"on {controller}, hvd_quant {facts['hvd_quant']}, Python {facts['python']}. Load averages before the launches: "
             f"{min(loads):.1f} to {max(loads):.1f}.", ""]
    for image in images:
        lines += [f"![{CAPTIONS[image.name]}]({image.name})", ""]
    for title, table in tables(results, box.MARKDOWN):
        text = StringIO()
        Console(file=text, width=10000, color_system=None).print(table)
        head, _, *rows = (line.strip() for line in text.getvalue().strip().splitlines())
        lines += [f"### {title}", "", head, "|---|" + "---:|" * (len(table.columns) - 1), *rows, ""]
    return "\n".join(lines)


def report(path: Path, page: Path) -> None:
    """Write tables into the page, between its marks, and plots beside it.

    Raises:
        ValueError: if the page has no marks, or the file no points.
    """
    results, text = json.loads(path.read_text()), page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} lacks the lines {BEGIN!r} and {END!r} between which the report goes")
    if not results["points"]:
        raise ValueError(f"{path} has no points")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(results, plots(results, page.parent))}\n{END}{after}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|report")
    measuring = commands.add_parser("run", help="measure")
    measuring.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), metavar="N", help="one a host (2 4 8)")
    measuring.add_argument("--rates", nargs="+", default=list(RATES), metavar="RATE", help=f"in tc's syntax ({' '.join(RATES)})")
    measuring.add_argument("--workloads", nargs="+", default=["*"], metavar="PATTERN", help=f"of {' '.join(WORKLOADS)}")
    measuring.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help=f"of {', '.join(ROWS)}")
    measuring.add_argument("--all", action="store_true", help="also points that take hours, or much memory")
    measuring.add_argument("--seconds", type=float, default=1.0, help="of a point, by 5 to 200 iterations (%(default)s)")
    measuring.add_argument("--controller", choices=CONTROLLERS, default="gloo", help="of Horovod (%(default)s)")
    measuring.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the figures go, after each point")
    measuring.add_argument("--resume", action="store_true", help="measure what the file lacks")
    reporting = commands.add_parser("report", help="tables and plots from the figures")
    reporting.add_argument("json", type=Path, metavar="FILE")
    reporting.add_argument("--page", type=Path, help="Markdown with marks for the tables (README.md beside the file)")
    working = commands.add_parser("worker")
    working.add_argument("address")
    working.add_argument("framework", choices=("horovod", "ddp"))
    args = parser.parse_args(arguments)
    if args.command == "run":
        try:
            for rate in args.rates:
                bits_per_second(rate)
        except ValueError as error:
            parser.error(str(error))
        if not grid(args):
            parser.error("no point of the grid matches; --all has more")
    args.error = parser.error
    return args


def main() -> None:
    args, console = parse(), Console(width=max(170, Console().width))  # where it is narrower, the tables say nothing
    try:
        if args.command == "worker":
            work(args.address, args.framework)
        elif args.command == "run":
            results, failed = run(args, console)
            for title, table in tables(results):
                table.title = title
                console.print(table)
            if failed:
                raise BenchmarkError(f"{failed} points failed, see above; --resume tries them again")
        else:
            report(args.json, args.page or args.json.parent / "README.md")
    except (ClusterError, BenchmarkError, ValueError, OSError) as error:
        args.error(str(error))


if __name__ == "__main__":
    main()
