"""ModelAveragingOptimizer for every Keras optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from horovod.tensorflow.mpi_ops import Average, ProcessSet, global_process_set

from hvd_quant.exchange import averaging, buckets
from hvd_quant.exchange.agreement import checked_every
from hvd_quant.keras.optimizer import frontend
from hvd_quant.keras.reducing import Reducing, Settings, undistributed
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.arguments import checked_bucket_bytes
from hvd_quant.tensorflow.averaging import Averager, statistics
from hvd_quant.tensorflow.reducer import Gradient
from hvd_quant.tensorflow.variables import plain


def ModelAveragingOptimizer(
        optimizer: Any,
        *,
        every: averaging.Every,
        outer: Any = None,
        compression: Any = "none",
        model: Any = None,
        average_state: bool = False,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        bucket_bytes: int = buckets.BUCKET_BYTES,
        verify_every: int | None = None) -> Any:
    """An optimizer that applies this worker's own gradients as another does, and after every ``every`` steps averages
    the workers' variables.

    What is averaged is Δ = θ₀ − θ, the way from the variables θ₀ that the workers last had in common, with error
    feedback if it is compressed. θ₀ then moves by −mean Δ, or as ``outer`` moves it with mean Δ for a gradient, and all
    go on from there. The first θ₀ is what the variables are before the first step; a BroadcastGlobalVariablesCallback
    makes them the same.

    The result is an instance of the optimizer's own class, with its state; what is saved with it loads without it. In
    addition it has ``average()``, ``compression_stats()``, ``compression_state_dict()``,
    ``load_compression_state_dict()`` and ``register_local_var()``. A ``tf.train.Checkpoint`` that holds it holds all
    that averaging needs.

    A LossScaleOptimizer is each worker's own, inside or outside. A step that it skips on one worker counts there as on
    the others.

    Sources: Yu, Yang, Zhu 2019 (parallel restarted SGD); Douillard et al. 2023 (DiLoCo).

    Arguments:
        optimizer: the other one: of Keras 3 or of tf_keras.
        every: the local steps between two averagings, or a function from the steps taken so far to those until the next
            one. See :func:`averaging_bound`. (Each pass of ``gradient_accumulation_steps`` counts.)
        outer: an optimizer that no model has, such as ``keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)``.
        compression: a compressor, a spec string, or a mapping from patterns of variable paths to these.
        model: its statistics, such as those of batch normalisation, are averaged too, dense. Without it they stay each
            worker's own.
        average_state: average, dense, what the optimizer keeps of a variable in its shape: momentum and the like.
        name: starts the names of the collectives.
        process_set: the workers to average over.
        bucket_bytes: bytes that travel together.
        verify_every: averagings between two comparisons of the workers' variables, right after one, which raises an error
            on all of them if one differs.

    Raises:
        TypeError: for something else than Keras optimizers, or a compression that is none of the above.
        ValueError: for an optimizer that is distributed already, for a combination that can't work, and in elastic
            jobs.
    """
    compression = averaging.checked_compression(compression, network.ELASTIC)
    averaging.interval(every, 0)
    if outer is not None:
        frontend(outer, "outer=")
        undistributed(outer)
        if outer is optimizer or getattr(outer, "built", False):
            raise ValueError(f"outer={type(outer).__name__} is in use already: give another optimizer, which no model "
                             "has")
    return frontend(optimizer, "ModelAveragingOptimizer").distribute(optimizer, AveragingSettings(
        name, "", compression, False, 1.0, Average, 1, False, None, process_set, False,
        checked_bucket_bytes(bucket_bytes), None, every, outer, model, average_state,
        checked_every(verify_every, network.ELASTIC)))


@dataclasses.dataclass(frozen=True)
class AveragingSettings(Settings):
    """The arguments of ModelAveragingOptimizer, but for the optimizer; those of DistributedOptimizer are at their
    defaults."""

    every: averaging.Every
    outer: Any
    model: Any
    average_state: bool
    verify_averagings: int | None


class Averaging(Reducing):
    """What model-averaging optimizers have in front of what distributed ones have: gradients stay as they are."""

    _hvd_settings: AveragingSettings
    _hvd_averager: Averager | None = None
    _hvd_slots: dict[int, tuple[int, Any]] = {}
    """By their ids, what the optimizer keeps of a variable, behind that variable's id."""

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on this worker.

        Raises:
            ValueError: once the optimizer is built.
        """
        if self._hvd_averager is not None:
            raise ValueError("a variable is local from the start or not at all: register it before the optimizer is "
                             "built")
        super().register_local_var(var)

    def average(self) -> None:
        """Average now, before an evaluation or a checkpoint; all workers have to call it. It starts a new interval, and
        does nothing where no step was taken since the last one."""
        if self._hvd_averager is not None:
            self._hvd_averager.average()

    def compression_stats(self) -> dict[str, Any]:
        """See :meth:`Averager.stats`."""
        return super().compression_stats() if self._hvd_averager is None else self._hvd_averager.stats()

    def _hvd_built(self) -> Any:
        super()._hvd_built()
        return self._hvd_averager

    def _hvd_agree_on(self) -> dict[str, Any]:
        settings = self._hvd_settings
        return {"every": "a function" if callable(settings.every) else settings.every, "outer": type(settings.outer).__name__,
                "average_state": settings.average_state, "verify_every": settings.verify_averagings}

    def _hvd_build(self, variables: Iterable[Any]) -> None:
        settings = self._hvd_settings
        shared = [v for v in variables if id(plain(v)) not in self._hvd_local]
        super()._hvd_build(shared)
        shapes = {id(plain(v)): tuple(v.shape) for v in shared}

        def also() -> list[Any]:
            found = [] if settings.model is None else statistics(settings.model)
            if settings.average_state:
                # Sums of gradients, amid a window of gradient_accumulation_steps, are of this worker's batches.
                sums = {id(plain(v)) for v in getattr(self, "_accumulated_gradients", None) or ()}
                found += [v for of, v in self._hvd_slots.values() if tuple(v.shape) == shapes.get(of) and id(v) not in sums]
            return found

        assert self._hvd_reducer is not None  # it was just built
        vars(self)["_hvd_averager"] = Averager(self._hvd_reducer, shared, settings.every, settings.outer, also,
                                               settings.process_set, settings.verify_averagings)
        self._track_trackable(self._hvd_averager, "averaging", overwrite=True)

    def _hvd_note(self, variable: Any, kept: Any) -> Any:
        """Note that ``kept``, which is returned, is a variable of the optimizer's that belongs to one of the model's."""
        if plain(kept).dtype.is_floating:
            vars(self).setdefault("_hvd_slots", {})[id(plain(kept))] = id(plain(variable)), plain(kept)
        return kept

    def _hvd_reduce(self, grads: Iterable[Gradient | None], variables: Iterable[Any]) -> list[Gradient | None]:
        return list(grads)

    _hvd_filled = _hvd_reduce
