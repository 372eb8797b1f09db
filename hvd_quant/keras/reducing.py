"""What distributed optimizers of Keras 3 and of tf_keras have in common: settings, a reducer, and its state."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet, size

from hvd_quant.exchange.buckets import by
from hvd_quant.exchange.stats import Stats
from hvd_quant.keras.window import Window
from hvd_quant.tensorflow.averaging import average
from hvd_quant.tensorflow.reducer import Gradient, Reducer, local_gradient
from hvd_quant.tensorflow.state import Slot
from hvd_quant.tensorflow.variables import plain


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of DistributedOptimizer, but for the optimizer."""

    name: str | None
    device: str
    compression: Any
    sparse_as_dense: bool
    predivide: float
    op: int
    passes: int
    average_passes: bool
    groups: int | list[list[Any]] | None
    process_set: ProcessSet
    scale_local: bool
    bucket_bytes: int
    verify_every: int | None


class Reducing:
    """The methods that a distributed optimizer has beside its own.

    Attributes with ``_hvd`` go to the instance's ``__dict__``: optimizers track or convert what is assigned to them.
    """

    _hvd_settings: Settings
    _hvd_reducer: Reducer | None = None
    _hvd_window: Window | None = None
    _hvd_local: frozenset[int] = frozenset()

    def register_local_var(self, var: Any) -> None:
        """Leave a variable's gradient as it is on this worker, but for what ``scale_local_gradients`` asks for."""
        vars(self)["_hvd_local"] = self._hvd_local | {id(plain(var))}

    def average_parameters(self) -> None:
        """Set the variables that differ between workers, because of a compressor's ``merge``, to their means, as is to be done
        before evaluation and checkpoints. All workers call this together; without steps in between, once is enough."""
        self._hvd_average()

    def compression_stats(self, residual_norms: bool = False) -> dict[str, Any]:
        """What the exchanges cost so far on this worker; see :class:`hvd_quant.exchange.stats.Stats`.

        Arguments:
            residual_norms: add the 2-norm of what is kept of each variable's gradients, which takes a pass over it.
        """
        return Stats().as_dict() if self._hvd_reducer is None else self._hvd_reducer.stats(residual_norms)

    def compression_state_dict(self) -> dict[str, Any]:
        """This worker's compression state (residuals as NumPy arrays, step counts), for a checkpoint a worker.

        Raises:
            ValueError: before the optimizer is built.
        """
        return self._hvd_built().state_dict()

    def load_compression_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take up the state that :meth:`compression_state_dict` returned on the same worker, or a list of those of all workers, which
        may have been another number: what would have reached the optimizer is kept, in equal shares.

        Raises:
            ValueError: before the optimizer is built, and for a state that is another worker's or damaged.
        """
        self._hvd_built().load_state_dict(state)

    def _hvd_built(self) -> Reducer:
        if self._hvd_reducer is None:
            raise ValueError("an optimizer has compression state once it knows its variables: call "
                             "optimizer.build(model.trainable_variables) or train a step first")
        return self._hvd_reducer

    def _hvd_build(self, variables: Iterable[Any]) -> None:
        """Make the reducer, which checkpoints of the optimizer then hold as "compression", and the window of passes."""
        settings = self._hvd_settings
        vars(self)["_hvd_reducer"] = reducer = Reducer(
            settings.compression, variables, name=settings.name or f"Distributed{type(self).__name__}", op=settings.op,
            predivide=settings.predivide, groups=settings.groups, sparse_as_dense=settings.sparse_as_dense,
            process_set=settings.process_set, bucket_bytes=settings.bucket_bytes, synced=True,  # by a KerasState
            verify_every=settings.verify_every, agree_on=self._hvd_agree_on())
        self._track_trackable(reducer.state, "compression", overwrite=True)
        if settings.passes > 1:
            vars(self)["_hvd_window"] = Window(variables)
            self._track_trackable(self._hvd_window, "window", overwrite=True)

    def _hvd_agree_on(self) -> dict[str, Any]:
        """Arguments that the reducer doesn't have and that have to be the same on all workers."""
        return {"backward_passes_per_step": self._hvd_settings.passes,
                "average_aggregated_gradients": self._hvd_settings.average_passes,
                "gradient_accumulation_steps": getattr(self, "gradient_accumulation_steps", None)}

    def _hvd_reduce(self, grads: Iterable[Gradient | None], variables: Iterable[Any], scale: Any = None) -> list[Gradient | None]:
        """The reduced gradients; those of local variables divided by the number of workers if that was asked for.

        Arguments:
            scale: of the loss that they are of.
        """
        settings, grads, variables = self._hvd_settings, list(grads), list(variables)
        shared = self._hvd_shared(variables)
        if settings.scale_local:
            grads = [grad if i in shared else local_gradient(grad, settings.process_set)
                     for i, grad in enumerate(grads)]
        with tf.device(settings.device):
            reduced = self._hvd_reducer.reduce([grads[i] for i in shared], [variables[i] for i in shared], scale)
        for i, grad in zip(shared, reduced):
            grads[i] = grad
        return grads

    def _hvd_filled(self, grads: Iterable[Gradient | None], variables: Iterable[Any]) -> list[Gradient | None]:
        """The gradients, with zeros where a shared one is missing on this worker and not on all, as :meth:`Reducer.filled` makes
        them; Keras leaves out what is None."""
        grads, variables = list(grads), list(variables)
        shared = self._hvd_shared(variables)
        for i, grad in zip(shared, self._hvd_reducer.filled([grads[i] for i in shared], [variables[i] for i in shared])):
            grads[i] = grad
        return grads

    def _hvd_shared(self, variables: list[Any]) -> list[int]:
        """Where those are that aren't local; the reducer is made for the variables if there is none yet."""
        if self._hvd_reducer is None:
            self._hvd_build(variables)
        return [i for i, v in enumerate(variables) if id(plain(v)) not in self._hvd_local]

    def _hvd_average(self, due: bool = False) -> None:
        """Average variables whose compressors have a merge, or ``average_every``.

        Arguments:
            due: only where so many steps are over.
        """
        reducer, settings = self._hvd_reducer, self._hvd_settings
        slots = [] if reducer is None else reducer.state.by_place
        slots = [slot for slot in slots if slot.averaged is not None and id(slot.variable) not in self._hvd_local]
        for every, members in by(slots, lambda slot: slot.compressor.averaging).items():
            def average_all(members: list[Slot] = members) -> None:
                reducer.state.count_averaging(nbytes for _, nbytes in average([s.variable for s in members], settings.process_set))
                for slot in members:
                    slot.averaged.assign(slot.step)

            since = tf.stack([slot.step - slot.averaged for slot in members])
            tf.cond(tf.reduce_any(since >= (every if due else 1)), average_all, lambda: None)

    def _hvd_kept(self) -> list[tf.Variable]:
        """The variables of the compression state that an exchange changes."""
        return [variable for slot in self._hvd_reducer.state.slots.values() for variable in (*slot.state.values(), slot.step)]


class Scaling:
    """What a LossScaleOptimizer's class has in addition when DistributedOptimizer made it, around a distributed one."""

    _hvd_settings: Settings
    _hvd_distribute: Callable[[Any, Settings], Any]

    def __init__(self, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(self._hvd_distribute(inner_optimizer, self._hvd_settings), *args, **kwargs)

    def register_local_var(self, var: Any) -> None:
        """See :meth:`Reducing.register_local_var`."""
        self.inner_optimizer.register_local_var(var)

    def average_parameters(self) -> None:
        """See :meth:`Reducing.average_parameters`."""
        self.inner_optimizer.average_parameters()

    def compression_stats(self, residual_norms: bool = False) -> dict[str, Any]:
        """See :meth:`Reducing.compression_stats`."""
        return self.inner_optimizer.compression_stats(residual_norms)

    def compression_state_dict(self) -> dict[str, Any]:
        """See :meth:`Reducing.compression_state_dict`."""
        return self.inner_optimizer.compression_state_dict()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Reducing.load_compression_state_dict`."""
        self.inner_optimizer.load_compression_state_dict(state)


def reducing(optimizer: Any) -> Any:
    """The optimizer that reduces gradients: this one, or one inside the loss scaler that this is; None if there is
    none."""
    while optimizer is not None and not isinstance(optimizer, Reducing):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


def undistributed(optimizer: Any) -> None:
    """Check that an optimizer isn't distributed.

    Raises:
        ValueError: if gradients are reduced in this optimizer or in one inside it.
    """
    if reducing(optimizer) is not None:
        raise ValueError(f"this {type(optimizer).__name__} is distributed already: wrap the one that it was made from")


def copy_what_no_config_has(old: Any, new: Any) -> None:
    """Take over which variables have no weight decay."""
    for name, value in vars(old).items():
        if name.startswith("_exclude_from_weight_decay"):
            setattr(new, name, value)


def warn_if_not_reduced(model: Any) -> None:
    """Warn of a model whose workers train apart: copies of a distributed optimizer, and models that were loaded with it, are
    what they would be without this package."""
    if size() > 1 and model.optimizer is not None and reducing(model.optimizer) is None:
        warnings.warn(f"this model's optimizer, a {type(model.optimizer).__name__}, is not distributed, so each worker trains a "
                      "model of its own unless its train_step reduces gradients: compile it with "
                      "hvd.DistributedOptimizer(optimizer), or load it with hvd.load_model", stacklevel=2)


def derived(mixin: type, base: type, **attributes: Any) -> type:
    """A class that is ``base`` to users, configurations and saved models, with the methods of ``mixin`` in front."""

    class Same(type(base)):
        """Equal to the class it is derived from, since Keras looks up by class under which name an object is saved."""

        def __eq__(cls, other: Any) -> bool:
            return cls is other or base is other

        def __hash__(cls) -> int:
            return hash(base)

    # tf_keras has the names of its own classes in themselves.
    names = {key: value for key, value in vars(base).items() if key.startswith("_keras_api_names")}
    return Same(base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__,
                                               "__doc__": base.__doc__, **names, **attributes})
