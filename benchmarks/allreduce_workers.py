"""The workers of the exchange benchmark: the competitors, a worker's commands, and who gives them.

Horovod and hvd_quant: the gradients are in `p.grad`, and `optimizer.synchronize()` is timed, which starts all exchanges and
waits for them. DDP exchanges inside a backward pass and builds its buckets only there. So it gets a backward pass in which
nothing is computed: one autograd function hands over all gradients at once, reads the clock as it does, and the end of
backward() stops it. What is timed is DDP's own: gradients into buckets, comm hook, waiting, and the buckets become the
gradients (`gradient_as_bucket_view`, which saves DDP a copy). Nothing is subtracted. hvd_quant's hook for DDP is timed like this,
too.

Commands come through a Unix socket to `python allreduce_workers.py SOCKET FRAMEWORK`, which a `Workers` starts on each host.
"""

import ctypes
import dataclasses
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
from allreduce_grid import BASELINE, DDP_FP16, DDP_FP32, HOOK, HOROVOD_FP16, IDEAL, POWERSGD, WORKLOADS, Shapes
from cluster import Cluster, ClusterError

import hvd_quant.ops.torch  # noqa: F401 - for its native operations
from hvd_quant import Compressor, get_compressor
from hvd_quant.exchange import sent_bytes

# --------------------------------------------------------------------------------------------------------- competitors


def unavailable(row: str) -> str | None:
    """Why this version of hvd_quant has no such row."""
    if row not in (BASELINE, HOROVOD_FP16, DDP_FP32, DDP_FP16, POWERSGD):
        try:
            get_compressor(row.removeprefix(IDEAL).removeprefix(HOOK))
        except ValueError as error:
            return str(error)
    return None


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


def warm_up(row: str) -> int:
    """Iterations until all goes as it will go on: connections made, memory there, and what depends on them decided."""
    if row == POWERSGD:
        return 5  # plain until the third
    if row in (BASELINE, HOROVOD_FP16):
        return 2
    # DDP arranges its buckets anew after the first. hvd_quant does so too, and has decided then as what each travels.
    return 3


class Costs:
    """What an optimizer or a hook of hvd_quant counts."""

    KEYS = ("encode_seconds", "wait_seconds", "decode_seconds", "wire_bytes")

    def __init__(self, compressor: Compressor, counting: Any, numel: dict[str, int]):
        self._compressor, self._counting, self._numel = compressor, counting, numel
        self._before = dict.fromkeys(self.KEYS, 0.0)

    def of_iteration(self) -> dict[str, float]:
        """Since this was asked last."""
        before, stats = self._before, self._counting.compression_stats()
        self._before = {key: stats[key] for key in self.KEYS}
        return {key: value - before[key] for key, value in self._before.items()}

    def facts(self) -> dict[str, Any]:
        """How the tensors travelled, and what encode and decode have to read and write for that at least."""
        exchanges = self._counting.compression_stats()["exchanges"]
        encoded = {kind: sum(self._numel[name] for name in names) for kind, names in exchanges.items() if kind != "dense"}
        feedback = self._compressor.stateful
        return {"exchanges": {kind: len(names) for kind, names in exchanges.items()},
                "encode_bytes": sum((12 if feedback and kind != "allreduce" else 4) * n for kind, n in encoded.items()),
                "decode_bytes": sum(4 * n for n in encoded.values())}


class HorovodExchange:
    """Horovod's own optimizer, or hvd_quant's."""

    def __init__(self, row: str, shapes: Shapes, number: int):
        self._parameters = parameters(shapes)
        for p in self._parameters:
            p.grad = torch.empty_like(p)
        self._numel = {f"{number}.{i}": p.numel() for i, p in enumerate(self._parameters)}  # by a name that is never used again
        named, sgd = zip(self._numel, self._parameters), torch.optim.SGD(self._parameters, lr=0.0)
        import horovod.torch as stock
        self._barrier, self._world = stock.barrier, stock.size()
        self._costs = None
        if row in (BASELINE, HOROVOD_FP16):
            compression = stock.Compression.none if row == BASELINE else stock.Compression.fp16
            self._optimizer = stock.DistributedOptimizer(sgd, named_parameters=named, compression=compression)
            self._entry_bytes = 4 if row == BASELINE else 2
        else:
            import hvd_quant.torch as hvd
            compressor = get_compressor(row.removeprefix(IDEAL))
            compression = streaming(compressor) if row.startswith(IDEAL) else compressor
            self._optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compression)
            self._costs = Costs(compressor, self._optimizer, self._numel)

    def iterate(self, pool: Pool, iteration: int) -> dict[str, float]:
        if self._costs:
            self._optimizer.zero_grad(set_to_none=False)  # or else the gradients count as reduced already
        pool.write((p.grad for p in self._parameters), iteration)
        self._barrier()
        start = time.perf_counter()
        self._optimizer.synchronize()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, **(self._costs.of_iteration() if self._costs else {})}

    def facts(self) -> dict[str, Any]:
        if self._costs:
            return self._costs.facts()
        return {"wire_bytes": sent_bytes("allreduce", self._entry_bytes * sum(self._numel.values()), self._world)}


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
        self._costs = None
        if entry_bytes:
            self._facts["wire_bytes"] = sent_bytes("allreduce", entry_bytes * numel, torch.distributed.get_world_size())
        if row == DDP_FP16:
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif row == POWERSGD:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif row.startswith(HOOK):
            import hvd_quant.torch as hvd
            hook = hvd.ddp_comm_hook(row.removeprefix(HOOK), self._ddp)
            self._ddp.register_comm_hook(None, hook)
            names = {name: p.numel() for name, p in self._model.named_parameters()}
            self._costs = Costs(get_compressor(row.removeprefix(HOOK)), hook, names)

    def iterate(self, pool: Pool, iteration: int) -> dict[str, float]:
        self._ddp.zero_grad(set_to_none=True)
        pool.write(self._model.gradients, iteration)
        clock: list[float] = []
        loss = self._ddp(clock)
        torch.distributed.barrier()
        loss.backward()
        seconds = time.perf_counter() - clock[0]
        return {"seconds": seconds, **(self._costs.of_iteration() if self._costs else {})}

    def facts(self) -> dict[str, Any]:
        return self._costs.facts() if self._costs else self._facts


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
        self._exchanges: list[Any] = []

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

    def forget(self) -> None:
        """The links have changed, and with them what was measured of them, which is otherwise measured once for a process."""
        if self._kind is HorovodExchange:
            from hvd_quant.torch import measuring
            measuring.measured.clear()

    def pool(self, length: int) -> None:
        self._pool = Pool(length, seed=self.rank)

    def clear(self) -> None:
        """Drop the competitors that were prepared, and give their memory back: in what is kept of freed memory, tensors of other
        sizes leave gaps, until workers that share a machine run out of it."""
        self._exchanges = []
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)

    def prepare(self, row: str, workload: str) -> float:
        """Set one more competitor up and let it run a few times; the seconds of the last."""
        self._number += 1
        self._exchanges.append(self._kind(row, WORKLOADS[workload], self._number))
        return self.measure(len(self._exchanges) - 1, warm_up(row))[-1]["seconds"]

    def measure(self, index: int, iterations: int) -> list[dict[str, float]]:
        """Let a competitor run."""
        samples = []
        for _ in range(iterations):
            samples.append(self._exchanges[index].iterate(self._pool, self._iteration))
            self._iteration += 1
        return samples

    def facts(self, index: int) -> dict[str, Any]:
        return self._exchanges[index].facts()


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
        command = [sys.executable, str(Path(__file__).resolve()), self._address, self._framework]
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


if __name__ == "__main__":
    work(*sys.argv[1:])
