"""The compression state of an optimizer's parameters, and one gradient's way through memory, encode, exchange and decode."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, ProcessSet, Sum

from hvd_quant import exchange, wire
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange.checkpoint import restored, saved
from hvd_quant.exchange.stats import Stats
from hvd_quant.ops import torch as ops

_REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclasses.dataclass
class Slot:
    """What is kept for one parameter: its compressor, its fp32 state, and the number of exchanges so far."""

    compressor: Compressor
    info: TensorInfo
    state: dict[str, torch.Tensor]
    step: int = 0


class Reducer:
    """Starts exchanges for named gradients and owns their state.

    Arguments:
        named_parameters: (name, parameter) pairs, in the same order on all workers.
        select: from a name to its compressor.
        op: Average or Sum.
        predivide: Horovod's gradient_predivide_factor, for dense gradients.
        process_set: the workers to reduce over.

    Raises:
        TypeError: for a parameter that is not real floating point.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]], select: Callable[[str], Compressor],
                 op: int, predivide: float, process_set: ProcessSet) -> None:
        self.op, self.predivide, self.process_set, self.stats = op, predivide, process_set, Stats()
        self._select = select
        self._slots: dict[str, Slot] = {}
        self._warned: set[str] = set()
        if process_set.included():
            for name, p in named_parameters:
                self.add(name, p)

    def add(self, name: str, p: torch.Tensor) -> None:
        """Make room for the state of one more parameter."""
        if p.dtype not in _REAL:
            raise TypeError(f"parameter {name} is {p.dtype}; gradients of {', '.join(map(str, _REAL))} can be reduced: "
                            "leave it out of the optimizer, or use compression='none'")
        compressor, info = self._select(name), TensorInfo.whole(name, p.shape)
        # An elastic job that starts with one worker may get more, and after the warm-up state is needed.
        later = dataclasses.replace(info, step=compressor.warmup, world=max(2, self.process_set.size()))
        compressed = exchange.choose(compressor, later, mpi_ops.mpi_enabled()) != "dense"
        shapes = compressor.state_shapes(info) if compressed else {}
        state = {key: torch.zeros(shape, dtype=torch.float32, device=p.device) for key, shape in shapes.items()}
        self._slots[name] = Slot(compressor, info, state)

    def start(self, name: str, grad: torch.Tensor) -> Exchange:
        """Start reducing a dense gradient; ``finish()`` of what this returns leaves the result in ``grad``."""
        slot, info, kind = self._next(name)
        started = {"dense": Dense, "allreduce": AllReduce, "allgather": AllGather}[kind](self, slot, info, grad)
        slot.step += 1
        return started

    def start_unless_dense(self, name: str, grad: torch.Tensor) -> Exchange | None:
        """Like :meth:`start`, but leave what goes dense to somebody else's allreduce and return None."""
        slot, info, kind = self._next(name)
        if kind != "dense":
            return self.start(name, grad)
        self.stats.count(name, "dense", info.numel, grad.numel() * grad.element_size(), info.world)
        slot.step += 1
        return None

    def _next(self, name: str) -> tuple[Slot, TensorInfo, str]:
        """What is known of the next exchange of ``name``, and its kind; elastic jobs change their size between steps."""
        slot = self._slots[name]
        info = dataclasses.replace(slot.info, step=slot.step, rank=self.process_set.rank(), world=self.process_set.size())
        return slot, info, exchange.choose(slot.compressor, info, mpi_ops.mpi_enabled())

    def start_sparse(self, name: str, grad: torch.Tensor) -> Exchange:
        """Start reducing a sparse gradient, which is not compressed."""
        slot, info, _ = self._next(name)
        if slot.compressor.name != "none" and name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"the gradient of {name} is sparse and is exchanged uncompressed; pass sparse_as_dense=True to "
                          "compress it as a dense one", stacklevel=2)
        started = Sparse(self, slot, info, grad)
        slot.step += 1
        return started

    def state_dict(self) -> dict[str, Any]:
        """Residuals and step counts by parameter name, and whose they are."""
        return saved(self._slots, torch.clone, **self._whose())

    def _whose(self) -> dict[str, int | None]:
        if not self.process_set.included():
            return {"rank": None, "world": None}
        return {"rank": self.process_set.rank(), "world": self.process_set.size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned; what no longer fits is reset, with a line in the log.

        Raises:
            ValueError: if it is of another worker, number of workers, or format; then nothing is changed.
        """
        for slot, step, values in restored(state, self._slots, **self._whose()):
            slot.step = step
            for key, value in slot.state.items():
                value.copy_(values[key]) if key in values else value.zero_()


def drain(exchanges: list[Exchange]) -> None:
    """Finish exchanges in order. After an error, the others are waited for and taken back, so that none stays in flight and
    no residual lacks what was not received; then the error is raised."""
    failure: Exception | None = None
    for one in exchanges:
        try:
            if failure is None:
                one.finish()
            else:
                one.cancel()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


class Exchange:
    """One gradient on its way. Making it starts a collective, named after the parameter, and does not wait.

    Attributes:
        grad: the gradient; after :meth:`finish`, the reduced one, in the same memory.
    """

    def __init__(self, reducer: Reducer, slot: Slot, info: TensorInfo, grad: torch.Tensor) -> None:
        self._reducer, self._slot, self._info, self.grad = reducer, slot, info, grad
        self._handle: Any = None
        self._horovod_writes = False
        self._start()
        self._version = grad._version

    def _start(self) -> None:
        raise NotImplementedError

    def wait(self) -> torch.Tensor:
        """Wait for the collective in flight and return its result."""
        with self._reducer.stats.timed("wait"):
            result = mpi_ops.synchronize(self._handle)
        if result is None:
            raise self._lost()
        return result

    def _lost(self) -> Exception:
        return mpi_ops.HorovodInternalError(f"the exchange of {self._info.name} was lost when Horovod was reset")

    def finish(self) -> None:
        """Wait and write the reduced gradient into ``grad``."""
        raise NotImplementedError

    def _wait_untouched(self) -> torch.Tensor:
        """Wait, and refuse a gradient that was changed meanwhile: the change would be lost, or reduced on some workers only.

        Raises:
            RuntimeError: saying what to do instead.
        """
        result = self.wait()
        # Where Horovod takes a GPU's gradient through the host, its own copy back counts as a change.
        if self.grad._version != self._version and not (self._horovod_writes and self.grad.is_cuda):
            raise RuntimeError(
                f"the gradient of {self._info.name} was modified (unscaled, clipped, zeroed) after backward had started its "
                "exchange: call optimizer.synchronize() first, then modify gradients, then step() inside "
                "optimizer.skip_synchronize()")
        return result

    def cancel(self) -> None:
        """Wait, and leave gradient and state as if this had not been started; a lost collective is no error here."""
        try:
            self.wait()
        except mpi_ops.HorovodInternalError:
            pass

    def _allreduce(self, tensor: torch.Tensor, name: str, op: int, prescale: float = 1.0, postscale: float = 1.0) -> None:
        self._horovod_writes = tensor.data_ptr() == self.grad.data_ptr()
        self._handle = mpi_ops.allreduce_async_(tensor, name=name, op=op, prescale_factor=prescale,
                                                postscale_factor=postscale, process_set=self._reducer.process_set)

    def _count(self, kind: str, payload: int) -> None:
        self._reducer.stats.count(self._info.name, kind, self._info.numel, payload, self._info.world)

    def _flatten(self) -> torch.Tensor:
        """The gradient as a flat fp32 vector: its own memory where it is contiguous fp32, else a copy."""
        return self.grad.detach().contiguous().view(-1).float()

    def _land(self, flat: torch.Tensor) -> None:
        """Bring a flat vector made by :meth:`_flatten` back into the gradient."""
        if flat.data_ptr() == self.grad.data_ptr():
            return
        flat = flat.view(self.grad.shape)
        if any(stride == 0 and length > 1 for stride, length in zip(self.grad.stride(), self.grad.shape)):
            self.grad.set_(flat.to(self.grad.dtype))  # entries that share memory can't take different values
        else:
            self.grad.copy_(flat)


class Dense(Exchange):
    """Horovod's allreduce of the gradient as it is."""

    def _start(self) -> None:
        # Horovod can't reduce bf16, and sums of fp16 overflow where the mean doesn't; fp32 holds both.
        tensor = self.grad.detach().contiguous()
        self._sent = tensor.float() if tensor.element_size() == 2 else tensor
        predivide = self._reducer.predivide
        self._allreduce(self._sent, self._info.name, self._reducer.op, 1 / predivide, predivide)
        self._count("dense", self._sent.numel() * self._sent.element_size())

    def finish(self) -> None:
        self._wait_untouched()
        self._land(self._sent.view(-1))


class Sparse(Exchange):
    """Horovod's exchange of a sparse gradient: an allgather of its indices and one of its values."""

    def _start(self) -> None:
        self._finish = mpi_ops.sparse_allreduce_async(self.grad, self._info.name, self._reducer.op,
                                                      self._reducer.process_set)
        self._count("sparse", sparse_bytes(self.grad))

    def wait(self) -> torch.Tensor:
        with self._reducer.stats.timed("wait"):
            try:
                return self._finish()
            except (TypeError, AttributeError) as error:  # Horovod returns None for handles from before a reset
                raise self._lost() from error

    def finish(self) -> None:
        self.grad = self.wait()


class AllReduce(Exchange):
    """A linear code: what it yields is summed by Horovod's allreduce, round by round."""

    def _start(self) -> None:
        self._flat = self._flatten()
        self._rounds = self._slot.compressor.rounds(ops, self._flat, self._slot.state, self._info, self._flat)
        self._round = 0
        self._send(None)

    def _send(self, total: torch.Tensor | None) -> bool:
        """Hand the last round's sum to the code and send what it yields; whether there was anything."""
        try:
            with self._reducer.stats.timed("encode" if total is None else "decode"):
                tensor = self._rounds.send(total)
        except StopIteration as end:
            self._flat = end.value
            return False
        self._allreduce(tensor, f"hvd_quant.{self._info.name}.{self._round}", Sum)
        self._count("allreduce", tensor.numel() * tensor.element_size())
        self._round += 1
        return True

    def finish(self) -> None:
        total = self._wait_untouched()
        while self._send(total):
            total = self.wait()
        if self._reducer.op == Sum:
            self._flat.mul_(self._info.world)
        self._land(self._flat)


class AllGather(Exchange):
    """Every worker gets every payload and adds them up in rank order, so that all have the same bits."""

    def _start(self) -> None:
        with self._reducer.stats.timed("encode"):
            self._payload, self._error = self._encode()
        try:
            self._handle = mpi_ops.allgather_async(self._payload, name=f"hvd_quant.{self._info.name}",
                                                   process_set=self._reducer.process_set)
        except Exception:
            self._version = self.grad._version
            self._undo()
            raise
        self._count("allgather", self._payload.numel())

    def _encode(self) -> tuple[torch.Tensor, Exception | None]:
        """The payload; a worker that can't make one sends the reason, so that the others don't wait for it."""
        compressor, state = self._slot.compressor, self._slot.state
        try:
            self._flat = self._flatten()
            params = compressor.measure(ops, self._flat, state, self._info)
            payload = compressor.encode(ops, self._flat, state, params, self._info)
            if not (isinstance(payload, torch.Tensor) and payload.dtype == torch.uint8 and payload.dim() == 1):
                raise TypeError(f"{compressor.name}.encode returned {_kind(payload)}, expected a 1-D uint8 tensor")
            return payload.contiguous(), None
        except Exception as error:
            payload = wire.failure(compressor.name, self._info.numel, self._info.rank, f"{type(error).__name__}: {error}")
            return torch.from_numpy(payload).to(self.grad.device), error

    def _undo(self) -> None:
        if self._error is None and self.grad._version == self._version:
            self._slot.compressor.undo(ops, self._flat, self._slot.state, self._payload, self._info)

    def cancel(self) -> None:
        super().cancel()
        self._undo()

    def finish(self) -> None:
        gathered = self._wait_untouched()
        with self._reducer.stats.timed("decode"):
            try:
                self._decode(wire.split(gathered, self._info.world))
            except wire.PayloadError as error:
                raise wire.PayloadError(f"{self._info.name}: {error}") from self._error
            self._land(self._flat)

    def _decode(self, payloads: list[torch.Tensor]) -> None:
        compressor, info = self._slot.compressor, self._info
        flags = [wire.parse_header(wire.host_bytes(payload[:wire.HEADER_BYTES]), payload.numel(), compressor.name,
                                   info.numel).flags for payload in payloads]
        for flag, payload in zip(flags, payloads):
            if flag & wire.FAILED:
                self._undo()
                wire.check(payload, compressor.name, info.numel, 0)  # raises the reason
        if any(flag & wire.NONFINITE for flag in flags):
            # The step is void for this tensor: nothing was sent, so nothing may leave the residual.
            self._undo()
            self._reducer.stats.void_tensors += 1
        if self._reducer.op == Average:
            compressor.decode_mean(ops, payloads, info, self._flat)
        else:
            compressor.decode_sum(ops, payloads, info, self._flat)


def sparse_bytes(grad: torch.Tensor) -> int:
    """Bytes of a sparse gradient's indices and values."""
    return sum(t.numel() * t.element_size() for t in (grad._indices(), grad._values()))


def _kind(x: Any) -> str:
    return f"a {x.dim()}-D {x.dtype} tensor" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
