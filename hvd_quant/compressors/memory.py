"""What is made of a gradient before it is encoded, and what is kept of it afterwards.

Error feedback (v = g + e) is done by encoders as they read the gradient, since a pass of its own would take as long as they do.
The memories here stand before that. They work with any array that has operators, and change no state themselves: what
they want to be kept becomes the state once the exchange is over, so a step that is void leaves no trace.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

MEMORIES = ("error_feedback", "none", "ef21")

Array = Any


class Prepared(NamedTuple):
    """What a memory makes of a gradient.

    Attributes:
        vector: what is encoded, or sent as it is where nothing is compressed; fp32.
        state: what the state becomes if it is exchanged, by name.
        spare: an array in the vector's shape that nobody reads once the exchange is over, or None.
    """

    vector: Array
    state: dict[str, Array]
    spare: Array | None = None


class Memory:
    """Nothing but what encoders do: error feedback, or none.

    Arguments:
        residual: whether there is error feedback.
    """

    active = False
    """Whether the other methods do anything."""
    starts_anew = False
    """Whether a step that goes uncompressed makes up for all that was kept, owners' residuals too, which are 0 then."""

    def __init__(self, residual: bool) -> None:
        self._residual = residual

    def shapes(self, info: Any, role: str) -> dict[str, tuple[int, ...]]:
        """Name and shape of the state of a range, as :meth:`hvd_quant.Compressor.state_shapes` returns them."""
        return {"residual": (info.numel,)} if self._residual else {}

    def always(self, info: Any) -> dict[str, tuple[int, ...]]:
        """Those that are needed also where a tensor is never compressed."""
        return {}

    def prepare(self, ops: Any, grad: Array, state: Mapping[str, Array], parameter: Array, world: Any, dense: bool) -> Prepared:
        """Before a gradient is exchanged.

        Arguments:
            grad: fp32, shape [numel]; not modified. Where it goes uncompressed, state may become it, so it has to stay what it is
                until :meth:`settle`.
            state: the worker's.
            parameter: the values that the gradient is of, in its shape.
            world: the number of workers.
            dense: whether it goes uncompressed.
        """
        return Prepared(grad, {})

    def settle(self, ops: Any, state: Mapping[str, Array], kept: dict[str, Array], sent: Array | None, mean: Array
               ) -> tuple[Array, dict[str, Array]]:
        """After it: the mean gradient, and what the state becomes.

        Arguments:
            kept: of what :meth:`prepare` returned.
            sent: what this worker's own payload decodes to; None where it went uncompressed.
            mean: what all workers' payloads decode to, on average. Memory of both is used for what is returned.
        """
        return mean, kept


class MomentumCorrection(Memory):
    """Momentum before dropping: u = m u + g and v = v + u, of which a part is sent, and u and v are 0 there; with Nesterov's
    momentum, u = m (u + g) and v = v + u + g.

    What is accumulated is then what the momentum of an optimizer would have made of the gradients. v is the residual of error
    feedback, to which u comes as the gradient. A tensor or step that goes uncompressed sends u, and keeps it; so do the codes that
    keep no v, since nothing but rounding is left out.

    Source: Lin, Han, Mao, Wang, Dally 2018 ("Deep gradient compression"). They clip by the norm of the whole model's gradient;
    here each tensor's is clipped by its own, so that the first may leave while backward makes the next.
    """

    active = True

    def __init__(self, momentum: float, nesterov: bool, clip_norm: float, weight_decay: float, sparse: bool, residual: bool) -> None:
        super().__init__(residual)
        self._momentum, self._nesterov, self._clip_norm, self._weight_decay = momentum, nesterov, clip_norm, weight_decay
        self._sparse = sparse  # a code that sends something of every entry would leave no momentum

    def shapes(self, info, role):
        return super().shapes(info, role) | (self.always(info) if role == "worker" else {})

    def always(self, info):
        return {"velocity": (info.numel,)}

    def prepare(self, ops, grad, state, parameter, world, dense):
        if self._clip_norm:
            grad = ops.clip_norm(grad, self._clip_norm, world)
        if self._weight_decay:
            decayed = self._weight_decay * parameter
            decayed += grad
            grad = decayed
        before = state["velocity"]
        if not self._nesterov:
            u = self._momentum * before
            u += grad
            return Prepared(u, {"velocity": u}, spare=before)
        u = before + grad
        u *= self._momentum
        return Prepared(u + grad, {"velocity": u}, spare=before)

    def settle(self, ops, state, kept, sent, mean):
        if sent is not None and self._sparse:
            kept = {"velocity": ops.zero_where(sent, kept["velocity"])}
        return mean, kept


class EF21(Memory):
    """A running estimate of the gradient: what is encoded is g - h, and h grows by what that decodes to, on every worker; all
    follow the mean of the estimates, which is the reduced gradient, by adding the mean of what was decoded.

    Steps that go uncompressed, of which the first is always one, set h = g. With eta below 1 a moving average
    w = (1 - eta) w + eta g takes the place of g in all steps, compressed or not; it starts from the first g that isn't 0.

    Source: Richtárik, Sokolov, Fatkhullin 2021; the average, Fatkhullin, Tyurin, Richtárik 2023 ("EF21-SGDM").
    """

    active = True
    starts_anew = True

    def __init__(self, eta: float) -> None:
        super().__init__(residual=False)
        self._eta = eta

    def shapes(self, info, role):
        if role == "owner":
            return {"residual": (info.numel,)}
        return {"estimate": (info.numel,), "mean": (info.numel,), **self.always(info)}

    def always(self, info):
        return {"average": (info.numel,)} if self._eta < 1 else {}

    def prepare(self, ops, grad, state, parameter, world, dense):
        w, kept = grad, {}
        if self._eta < 1:
            w = ops.moving_average(state["average"], grad, self._eta)
            kept["average"] = w
        if dense:
            return Prepared(w, {**kept, "estimate": w})
        difference = w - state["estimate"]
        return Prepared(difference, kept, spare=difference)

    def settle(self, ops, state, kept, sent, mean):
        if sent is None:
            return mean, {**kept, "mean": mean}
        sent += state["estimate"]
        mean += state["mean"]
        return mean, {**kept, "estimate": sent, "mean": mean}


@functools.cache
def of(compressor: Any) -> Memory:
    """The memory that a compressor asks for."""
    if compressor.memory == "ef21":
        return EF21(compressor.eta)
    residual = compressor.memory == "error_feedback"
    if compressor.momentum:
        return MomentumCorrection(compressor.momentum, compressor.nesterov, compressor.clip_norm, compressor.weight_decay,
                                  compressor.sparse, residual)
    return Memory(residual)
