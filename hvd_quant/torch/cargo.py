"""One gradient on its way: through memory, encode, decode and merge, and back where it doesn't count."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from horovod.torch.mpi_ops import Average

from hvd_quant import wire
from hvd_quant.compressors import Compressor, TensorInfo, memory
from hvd_quant.compressors.merge import local_part
from hvd_quant.exchange import ranges
from hvd_quant.exchange.hosts import Workers
from hvd_quant.ops import torch as ops
from hvd_quant.torch.state import Slot


class Cargo:
    """One gradient on its way.

    Attributes:
        slot: what is kept for its parameter.
        compressor: as what it travels.
        places: the workers of this host that exchange different parts of it.
        info: what is known of the whole tensor at this step.
        grad: the gradient; after the flight, the reduced one, in the same memory.
        flat: the gradient as a flat fp32 vector: its own memory where it is contiguous fp32, else a copy.
        memory: what is made of it before it is encoded.
    """

    def __init__(self, slot: Slot, compressor: Compressor, places: int, scale: float, info: TensorInfo, grad: torch.Tensor,
                 version: int) -> None:
        self.slot, self.compressor, self.places = slot, compressor.scaled(scale), places
        self.info, self.grad, self._version = info, grad, version
        self.error: Exception | None = None
        self.memory = memory.of(slot.compressor.scaled(scale))
        self._had_kept = slot.kept
        self._kept: dict[str, torch.Tensor] = {}  # what becomes of the state once the exchange is over
        self._spare: torch.Tensor | None = None  # memory that is free by then
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # of state that only the code knows, what it was
        self._encoded: list[Encoded] = []
        self._own: list[Encoded] = []  # of those, what was encoded of this worker's own gradient

    def flatten(self) -> torch.Tensor:
        self.flat = self.grad.detach().contiguous().view(-1).float()
        return self.flat

    def prepare_to_encode(self) -> None:
        """:meth:`flatten`; what goes wrong is told to the others in the place of what would be encoded."""
        try:
            self.flatten()
        except Exception as error:
            self.error, self.flat = error, self.grad.new_zeros(self.info.numel, dtype=torch.float32)

    def require_untouched(self, horovod_writes: bool = False) -> None:
        """Refuse a gradient that was changed meanwhile: the change would be lost, or reduced on some workers only.

        Arguments:
            horovod_writes: into the gradient itself. Where Horovod takes a GPU's gradient through the host, its own copy back
                counts as a change.

        Raises:
            RuntimeError: saying what to do instead.
        """
        if self.grad._version != self._version and not (horovod_writes and self.grad.is_cuda):
            raise RuntimeError(
                f"the gradient of {self.info.name} was modified (unscaled, clipped, zeroed) after backward had started its "
                "exchange: call optimizer.synchronize() first, then modify gradients, then step() inside "
                "optimizer.skip_synchronize()")

    def holds(self, vector: torch.Tensor) -> bool:
        """Whether a vector is the gradient's own memory."""
        return not self.grad.is_sparse and vector.data_ptr() == self.grad.data_ptr()

    def after_the_host(self, flat: torch.Tensor) -> None:
        """Go on with the average of the host's workers. Had the gradient been changed, all are to be told."""
        try:
            self.require_untouched(horovod_writes=True)
        except RuntimeError as error:
            self.error = error
        self.flat, self._version = flat, self.grad._version

    def land(self, flat: torch.Tensor) -> None:
        """Bring a flat vector back into the gradient."""
        if flat.data_ptr() == self.grad.data_ptr():
            return
        flat = flat.view(self.grad.shape)
        if any(stride == 0 and length > 1 for stride, length in zip(self.grad.stride(), self.grad.shape)):
            self.grad.set_(flat.to(self.grad.dtype))  # entries that share memory can't take different values
        else:
            self.grad.copy_(flat)

    # ------------------------------------------------------------------------------------- memory, encode, decode, undo

    def uncompressed(self, world: int) -> torch.Tensor:
        """What travels where nothing is compressed: the gradient as it is, or what memory makes of it and what was kept of earlier
        ones, as a flat fp32 vector of its own."""
        kept = self.slot.state.get("residual") if self.slot.kept else None
        if kept is None and not self.memory.active:
            return self.grad.detach().contiguous()
        vector = self._prepared(self.flatten(), world, dense=True).clone()
        if kept is not None:
            first, last = self.slot.piece
            vector[first:last].add_(kept, alpha=self.places)  # of a host's workers, which are averaged otherwise
            self._kept["residual"] = torch.zeros(1, device=kept.device).expand(kept.shape)
        return vector

    def whole(self, world: int) -> torch.Tensor:
        """What a linear code makes of the gradient, flat: one with a residual adds that itself."""
        flat = self.flatten()
        return flat if self.compressor.memory == "error_feedback" else self.uncompressed(world).view(-1).float()

    def landed_uncompressed(self, total: torch.Tensor, op: int, world: int) -> None:
        """Bring what was reduced of :meth:`uncompressed` into the gradient, and let the state become what follows from it."""
        if self._kept:
            mean = total if op == Average else total / world
            mean = self._settle(None, mean.view(-1))
            total = mean if op == Average else mean * world
            self.slot.kept = False
            if self.memory.starts_anew:
                for value in self.slot.owner_state.values():
                    value.zero_()
        self.land(total)

    def _prepared(self, flat: torch.Tensor, world: int, dense: bool = False) -> torch.Tensor:
        parameter = self.slot.parameter.detach().reshape(-1).float() if self.memory.active else None
        vector, self._kept, self._spare = self.memory.prepare(ops, flat, self.slot.worker_state, parameter, world, dense)
        return vector

    def _settle(self, sent: torch.Tensor | None, mean: torch.Tensor) -> torch.Tensor:
        state = self.slot.worker_state
        mean, kept = self.memory.settle(ops, state, self._kept, sent, mean)
        for key in kept.keys() & state.keys():
            state[key].copy_(kept[key])
        return mean

    def cut(self, workers: Workers, scatter: bool) -> None:
        """Decide which entries travel from whom: ``cuts[i][j]`` is what worker j of those that exchange with the i-th worker
        of each host sends in the last collective."""
        numel, multiple, index = self.info.numel, self.compressor.range_multiple, self.slot.index
        place, places = workers.local
        self.cuts = []
        for first, last in ranges(numel, multiple, places, index):
            cuts = ranges(last - first, multiple, self.info.world, index) if scatter else [(0, last - first)] * self.info.world
            self.cuts.append([(first + a, first + b) for a, b in cuts])
        self.own = self.cuts[place]
        self._piece = min(a for a, _ in self.own), max(b for _, b in self.own)

    def encode(self) -> list[torch.Tensor]:
        """The payloads of the entries that this worker has for each owner, or for all. A worker that can't make one sends the
        reason, so that the others don't wait for it."""
        state, (first, last) = self.slot.worker_state, self._piece
        cuts = [cut for cut in dict.fromkeys(self.own) if entries(cut)]
        if not cuts:
            return []
        try:
            if self.error is not None:
                raise self.error
            vector = self._prepared(self.flat[first:last], self.info.world)
            params = self._measure(vector, state, self.info.part(first, last))
            for a, b in cuts:
                part = {key: v[a - first:b - first] if v.shape == (last - first,) else v for key, v in state.items()}
                self._encode(vector[a - first:b - first], part, params, self.info.part(a, b))
            self._own = list(self._encoded)
            self.slot.kept = True
            return [one.payload for one in self._own]
        except Exception as error:
            self.undo()
            self.error = error
            reason = f"{type(error).__name__}: {error}"
            return [self.failure(b - a, self.info.rank, reason) for a, b in cuts]

    def reduce(self, arrived: list[tuple[torch.Tensor, bytes]]) -> torch.Tensor:
        """As the owner of a range: its mean over the workers, encoded again with a residual of its own.

        Arguments:
            arrived: all workers' payloads of the range, with their headers.
        """
        a, b = self.own[self.info.rank]
        info = self.info.part(a, b)
        try:
            for payload, head in arrived:
                if wire.parse_header(head, payload.numel(), self.compressor.name, info.numel).flags & wire.FAILED:
                    return self.failure(info.numel, *wire.failure_of(payload))
            payloads = [payload for payload, _ in arrived]
            mean = self.compressor.decode_mean(ops, payloads, info, ops.new_vector(info.numel, payloads[0]))
            state = self.slot.owner_state
            params = self._measure(mean, state, info.at(phase=1))
            return self._encode(mean, state, params, info.at(phase=1))
        except Exception as error:
            self.error = error
            return self.failure(info.numel, self.info.rank, str(error) if isinstance(error, wire.PayloadError) else
                                 f"{type(error).__name__}: {error}")

    def _measure(self, vector: torch.Tensor, state: dict[str, torch.Tensor], info: TensorInfo) -> Any:
        known = self.memory.shapes(info, "owner" if info.phase else "worker")
        self._before += [(value, value.clone()) for key, value in state.items() if key not in known]
        return self.compressor.measure(ops, vector, state, info)

    def _encode(self, vector: torch.Tensor, state: dict[str, torch.Tensor], params: Any, info: TensorInfo) -> torch.Tensor:
        payload = self.compressor.encode(ops, vector, state, params, info)
        if not (isinstance(payload, torch.Tensor) and payload.dtype == torch.uint8 and payload.dim() == 1):
            raise TypeError(f"{self.compressor.name}.encode returned {_kind(payload)}, expected a 1-D uint8 tensor")
        self._encoded.append(Encoded(vector, state, payload.contiguous(), info))
        return self._encoded[-1].payload

    def failure(self, numel: int, rank: int, reason: str) -> torch.Tensor:
        """What is sent in the place of a payload, and why."""
        return torch.from_numpy(wire.failure(self.compressor.name, numel, rank, reason)).to(self.grad.device)

    def undo(self) -> None:
        """Return all state to what it was before the gradient was encoded, unless the gradient itself is lost."""
        if self.grad._version == self._version:
            for vector, state, payload, info in reversed(self._encoded):
                try:
                    self.compressor.undo(ops, vector, state, payload, info)
                except wire.PayloadError:
                    pass  # a code that has made what can't be decoded; all workers are about to be told
        for value, before in self._before:
            value.copy_(before)
        self._encoded.clear()
        self._before.clear()
        self.slot.kept = self._had_kept

    def done(self) -> None:
        """It has landed: nothing of it is taken back any more, whatever becomes of the others."""
        self._encoded.clear()
        self._before.clear()
        self._had_kept = self.slot.kept

    def void(self) -> None:
        """Let the exchange count for nothing: all state is as before it, and the gradient NaN throughout, so that nobody takes
        for reduced what is still kept."""
        self.undo()
        self.slot.step -= 1
        self.grad.fill_(math.nan)

    def flags(self, arrived: list[tuple[TensorInfo, torch.Tensor, bytes]]) -> int:
        """The flags of all payloads together.

        Raises:
            hvd_quant.wire.PayloadError: with the reason, if one is of a worker that failed; and for a header that is wrong.
        """
        flags = 0
        for info, payload, head in arrived:
            own = wire.parse_header(head, payload.numel(), self.compressor.name, info.numel).flags
            if own:  # before it voids a step of all tensors, the whole payload has to be sound
                wire.check(payload, self.compressor.name, info.numel, payload.numel() - wire.HEADER_BYTES)
            flags |= own
        return flags

    def decode(self, arrived: list[tuple[TensorInfo, torch.Tensor, bytes]], mean: bool) -> None:
        """Write what payloads hold into ``flat``: their sum, or mean, where several are of the same entries, in the order of
        ranks."""
        decode = self.compressor.decode_mean if mean else self.compressor.decode_sum
        for (a, b), same in itertools.groupby(arrived, key=lambda one: one[0].range):
            payloads = [(info, payload) for info, payload, _ in same]
            decode(ops, [payload for _, payload in payloads], payloads[0][0], self.flat[a:b])

    def before_merge(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The gradient and what was kept before, where a merge needs them after a linear code."""
        merges = self.slot.compressor.merge != "none" and self.compressor.stateful
        return (self.flat.clone(), self.slot.state["residual"].clone()) if merges else None

    def local_part(self, factor: float, gradient: torch.Tensor | None = None, before: torch.Tensor | None = None
                   ) -> torch.Tensor | None:
        """What is added of this worker's own gradient to the reduced one, or None.

        Arguments:
            factor: of it.
            gradient, before: from :meth:`before_merge`; without them it is to be asked before payloads are decoded.
        """
        merge = self.slot.compressor.merge
        if merge == "none":
            return None
        kept, sent = self.slot.state["residual"], None
        if merge == "replace":
            sent = self._sent() if gradient is None else (gradient + before).sub_(kept)
        return local_part(merge, self.flat if gradient is None else gradient, sent, kept, factor)

    def add_local(self, reduced: torch.Tensor, part: torch.Tensor) -> None:
        """Add what :meth:`local_part` returned to the reduced gradient; with "error" that is all that was kept."""
        reduced.add_(part)
        if self.slot.compressor.merge == "error":
            self.slot.state["residual"].zero_()

    def settle(self) -> None:
        """Let the state become what follows from the mean, which ``flat`` holds, and the mean what memory makes of it."""
        if self.memory.active:
            self.flat = self._settle(self._sent(self._spare), self.flat)

    def _sent(self, sent: torch.Tensor | None = None) -> torch.Tensor:
        """What this worker's own payloads decode to, in memory that may be given."""
        sent = ops.new_vector(self.info.numel, self.flat) if sent is None else sent
        for one in self._own:
            self.compressor.decode_sum(ops, [ops.without_flags(one.payload)], one.info, sent[slice(*one.info.range)])
        return sent


class Encoded(NamedTuple):
    """What was encoded: a vector with its state, into a payload."""

    vector: torch.Tensor
    state: dict[str, torch.Tensor]
    payload: torch.Tensor
    info: TensorInfo


def entries(cut: tuple[int, int]) -> int:
    """How many there are from the first to before the one past the last."""
    return cut[1] - cut[0]


def _kind(x: Any) -> str:
    return f"a {x.dim()}-D {x.dtype} tensor" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
