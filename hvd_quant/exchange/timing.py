"""How long codes take here, in one process and without Horovod."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.compressors.base import conclude
from hvd_quant.exchange import cost

_REPEATS = 5


class Backend(NamedTuple):
    """Where codes are timed.

    Attributes:
        name: of the framework.
        ops: one of ``hvd_quant.ops.{torch, tensorflow}``.
        random, zeros: new vectors, of a number of entries and of a shape; a code writes into the latter.
    """

    name: str
    ops: Any
    random: Callable[[int], Any]
    zeros: Callable[[tuple[int, ...]], Any]

    def can(self, compressor: Compressor) -> bool:
        """Whether its methods take this framework's arrays."""
        return self.name == "PyTorch" or compressor.native


def in_torch(device: Any = "cpu") -> Backend:
    """PyTorch's codes on a device.

    Raises:
        ImportError: without PyTorch, or kernels for it.
    """
    import torch

    from hvd_quant.ops import torch as ops
    generator = torch.Generator().manual_seed(0)
    return Backend("PyTorch", ops, lambda entries: torch.randn(entries, generator=generator).to(device),
                   lambda shape: torch.zeros(shape, device=device))


def in_tensorflow() -> Backend:
    """TensorFlow's codes on the CPU.

    Raises:
        ImportError: without TensorFlow, or kernels for it.
    """
    import numpy as np
    import tensorflow as tf

    from hvd_quant.ops import tensorflow as ops
    generator = np.random.default_rng(0)
    return Backend("TensorFlow", ops, lambda entries: tf.constant(generator.normal(size=entries).astype(np.float32)),
                   lambda shape: tf.Variable(tf.zeros(shape)))


def here() -> Backend | None:
    """A framework that is installed with its kernels, PyTorch first."""
    for name, make in {"torch": in_torch, "tensorflow": in_tensorflow}.items():
        if importlib.util.find_spec(name) is not None:
            try:
                return make()
            except ImportError:
                pass
    return None


def rates(compressor: Compressor, backend: Backend, entries: int, world: int, wait: Callable[[], None] = lambda: None
          ) -> cost.Rates:
    """Seconds an entry of encoding and decoding.

    Arguments:
        entries: of the vector on which they are timed; a power of 2.
        world: workers whose payloads are decoded.
        wait: returns when the device has done what it was told.
    """
    ops, rows = backend.ops, 2**(entries.bit_length() // 2)
    info = TensorInfo.whole("", (rows, entries // rows), world=world)
    grad, out = backend.random(entries), backend.random(entries)
    state = {key: backend.zeros(shape) for key, shape in compressor.state_shapes(info).items()}
    payload: Any = None

    def timed(action: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            action()
            wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times) / entries

    def encode() -> None:
        nonlocal payload
        payload = compressor.encode(ops, grad, state, compressor.measure(ops, grad, state, info), info)

    def reduce() -> None:
        code = compressor.rounds(ops, grad, state, info, out)
        total = next(code)
        for _ in range(compressor.allreduces - 1):
            total = code.send(_times(total, world))
        conclude(code, _times(total, world))

    if type(compressor).encode is Compressor.encode:  # it travels in sums alone
        return cost.Rates(timed(reduce), 0.0, 0.0)
    return cost.Rates(timed(encode), timed(lambda: compressor.decode_mean(ops, [payload] * world, info, out)),
                      timed(lambda: compressor.decode_sum(ops, [payload], info, out)))


def _times(vector: Any, world: int) -> Any:
    """The sum of workers that all have the same, in its memory where the framework has such a thing."""
    vector *= world
    return vector


def all_rates(compressors: Iterable[Compressor], backend: Backend, world: int, sample: int = cost.SAMPLE
              ) -> dict[str, cost.Rates]:
    """Those of each code, with what a call costs, as :class:`hvd_quant.exchange.cost.Costs` has them."""
    different = {cost.key_of(compressor): compressor for compressor in compressors}
    return {key: cost.with_call(*(rates(compressor, backend, n, world) for n in (sample, cost.LITTLE)))
            for key, compressor in different.items()}
