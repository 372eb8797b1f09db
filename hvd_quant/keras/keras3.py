"""Distributed optimizers of Keras 3: classes derived from the optimizer's own, which reduce gradients, then clip them.

A gradient's way through a step::

    apply                       adds it up where there are backward_passes_per_step, and goes on once a window, with the
                                sum (for gradient_accumulation_steps, Keras does that in the next method)
    _backend_apply_gradients    notes the variables
    _clip_gradients             hands the gradients to the reducer, then lets Keras clip them and go on

Under a LossScaleOptimizer, ``apply_scaled`` takes the place of all three; ``hooks.py`` has Keras call it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from keras import ops

import hvd_quant.keras.hooks  # noqa: F401  wraps two methods of Keras
from hvd_quant.keras.averaging import Averaging, AveragingSettings
from hvd_quant.keras.reducing import Reducing, Scaling, Settings, copy_what_no_config_has, derived, undistributed
from hvd_quant.keras.window import add_up
from hvd_quant.tensorflow.reducer import Gradient
from hvd_quant.tensorflow.variables import plain

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer


def distribute(optimizer: keras.optimizers.Optimizer, settings: Settings) -> keras.optimizers.Optimizer:
    """A distributed optimizer with the configuration and the state of ``optimizer``.

    Raises:
        ValueError: for one that is distributed already or can't be.
    """
    undistributed(optimizer)
    if isinstance(optimizer, LossScaleOptimizer):
        if isinstance(optimizer.inner_optimizer, LossScaleOptimizer):
            raise ValueError("a LossScaleOptimizer around a LossScaleOptimizer can't be distributed: leave one out")
        config = {**optimizer.get_config(), "inner_optimizer": optimizer.inner_optimizer}
        cls = derived(Scaling, type(optimizer), _hvd_settings=settings, _hvd_distribute=staticmethod(distribute))
        made = cls(**config)
    else:
        mixin = Averaged if isinstance(settings, AveragingSettings) else Distributed
        made = derived(mixin, type(optimizer), _hvd_settings=settings).from_config(_config(optimizer))
        copy_what_no_config_has(optimizer, made)
    if optimizer.built:
        made.build(optimizer._trainable_variables)
    for new, old in zip(made.variables, optimizer.variables):
        new.assign(old)
    return made


def _config(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Its configuration, with a learning rate that is a schedule or another callable as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a lambda that can't be saved; it isn't
        config = optimizer.get_config()
    if not isinstance(optimizer._learning_rate, keras.Variable):
        config["learning_rate"] = optimizer._learning_rate
    return config


class Distributed(Reducing):
    """What a distributed optimizer's class has beside that of the optimizer it was made from."""

    _hvd_variables: Any = None
    _hvd_reduced = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        passes, steps = self._hvd_settings.passes, self.gradient_accumulation_steps
        if passes > 1 and steps:
            raise ValueError(f"backward_passes_per_step={passes} can't be combined with gradient_accumulation_steps="
                             f"{steps} of the optimizer: give one of them")

    def build(self, variables: list[Any]) -> None:
        """Make the optimizer's variables, as Keras does, and the compression state."""
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(f"the gradient of {variable.path} is its next value, as in float8 training, and can't "
                                 "be averaged over workers: use mixed_float16 or mixed_bfloat16")
        self._hvd_build(variables)

    def apply(self, grads: list[Gradient | None], trainable_variables: list[Any] | None = None) -> None:
        """Reduce the gradients and apply them; with ``backward_passes_per_step``, once a window, and their sum. Then average the
        variables, where that is due."""
        apply = super().apply
        if self._hvd_reduced or not grads:
            return apply(grads, trainable_variables)
        variables = self._hvd_known(trainable_variables)
        if len(variables) != len(grads):
            apply(grads, trainable_variables)  # which tells what is wrong
        elif self._hvd_settings.passes > 1:
            self._hvd_pass(grads, variables, apply)
        else:
            apply(self._hvd_filled(grads, variables), variables)
        self._hvd_average(due=True)

    def _backend_apply_gradients(self, grads: list[Gradient], trainable_variables: list[Any]) -> None:
        vars(self)["_hvd_variables"] = trainable_variables
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: list[Gradient]) -> list[Gradient]:
        """Keras calls this with what it is about to apply, once a step, or with a window's mean once a window."""
        if not self._hvd_reduced:
            grads = self._hvd_reduce(grads, self._hvd_variables)
        return super()._clip_gradients(grads)

    def apply_scaled(self, scaler: LossScaleOptimizer, grads: list[Gradient | None], variables: list[Any]) -> None:
        """Reduce the gradients and apply them if they are finite, as the LossScaleOptimizer around this does.

        Whether they are finite is asked once they are reduced, so that all workers find the same. Where gradients are
        added up, that is once a window: the scale stays as it is within one, and an overflow makes the whole of it
            void.
        """
        def apply(grads: list[Gradient | None], variables: list[Any]) -> None:
            # An exchange that isn't finite is void by itself; one that is may be beside gradients that aren't exchanged.
            kept = [(variable, tf.identity(variable)) for variable in self._hvd_kept()] if self._hvd_local else []
            reduced = self._hvd_reduce(grads, variables, scaler.dynamic_scale)

            def void() -> None:
                scaler._stateful_handle_non_finite_grads()
                self._iterations.assign_sub(self._hvd_passes() - 1)
                for variable, before in kept:
                    variable.assign(before)

            vars(self)["_hvd_reduced"] = True
            try:
                tf.cond(self._hvd_finite(scaler, reduced),
                        lambda: scaler._stateful_handle_finite_grads(reduced, variables), void)
            finally:
                vars(self)["_hvd_reduced"] = False

        if self._hvd_passes() == 1:
            apply(grads, variables)
        else:
            self._hvd_pass(grads, variables, apply)
        self._hvd_average(due=True)

    def _hvd_passes(self) -> int:
        """Passes between two exchanges."""
        return self.gradient_accumulation_steps or self._hvd_settings.passes

    def _hvd_finite(self, scaler: LossScaleOptimizer, grads: list[Gradient | None]) -> tf.Tensor:
        finite = scaler.check_finite(grads)
        if not self._hvd_local:
            return finite
        # Each worker has gradients of its own among these.
        everywhere = mpi_ops._allreduce(tf.cast(finite, tf.int32), op=mpi_ops.Min,
                                        process_set=self._hvd_settings.process_set)
        return tf.cast(everywhere, tf.bool)

    def _hvd_pass(self, grads: list[Gradient | None], variables: list[Any], apply: Callable[..., None]) -> None:
        """One pass of a window, whose last pass calls ``apply`` with what was added up."""
        settings, window = self._hvd_settings, self._hvd_window
        # Where Keras adds up, its own accumulators are used, and it divides by their number when it applies.
        sums = self._accumulated_gradients if window is None else window.sums
        count = self._iterations % self.gradient_accumulation_steps if window is None else window.count

        def between() -> None:
            self._iterations.assign_add(1)
            if window is not None:
                window.count.assign_add(1)

        def last(total: list[tf.Tensor | None]) -> None:
            if window is not None:
                window.count.assign(0)
            apply(_each(ops.divide, total, settings.passes) if settings.average_passes else total, variables)

        sums, grads = [plain(sums[self._get_variable_index(v)]) for v in variables], self._hvd_filled(grads, variables)
        add_up(grads, sums, tf.equal(count, self._hvd_passes() - 1), between, last)

    def _hvd_known(self, trainable_variables: list[Any] | None) -> list[Any]:
        """The variables that gradients are for; they build the optimizer if it isn't."""
        if trainable_variables is None:
            return self._trainable_variables
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        return list(trainable_variables)


class Averaged(Averaging, Distributed):
    """What a model-averaging optimizer's class has beside that of the optimizer it was made from."""

    def apply(self, grads: list[Gradient | None], trainable_variables: list[Any] | None = None) -> None:
        """Take a step with this worker's gradients, and average where it is time."""
        if self._hvd_reduced:
            return super().apply(grads, trainable_variables)
        variables = self._hvd_known(trainable_variables)
        self._hvd_averager.begin()
        super().apply(grads, variables)
        self._hvd_averager.count()

    def add_variable_from_reference(self, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a variable that is kept for one of the model's, as Keras does."""
        return self._hvd_note(reference_variable, super().add_variable_from_reference(reference_variable, *args, **kwargs))

    def apply_scaled(self, scaler: LossScaleOptimizer, grads: list[Gradient | None], variables: list[Any]) -> None:
        """Take a step if this worker's gradients are finite, as the LossScaleOptimizer around this does, and count it
        anyway: all workers have to average together."""
        self._hvd_averager.begin()
        vars(self)["_hvd_reduced"] = True
        try:
            tf.cond(scaler.check_finite(grads), lambda: scaler._stateful_handle_finite_grads(grads, variables),
                    scaler._stateful_handle_non_finite_grads)
        finally:
            vars(self)["_hvd_reduced"] = False
        self._hvd_averager.count()


def _each(operation: Callable, grads: list[Gradient | None], factor: Any) -> list[Gradient | None]:
    return [None if grad is None else operation(grad, factor) for grad in grads]
