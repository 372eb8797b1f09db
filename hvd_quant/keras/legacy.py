"""Distributed optimizers of tf_keras, which has two kinds: classes derived from the optimizer's own.

A gradient is reduced where it is computed, as in Horovod: by ``minimize``, which ``fit`` calls, and by
``compute_gradients``. Two are reduced where they are applied, when tf_keras has its optimizers aggregate gradients over
replicas, which is before a LossScaleOptimizer asks whether they are finite: those that come from a tape of the user's,
and those that a LossScaleOptimizer around the optimizer has unscaled by then, so that what is kept between steps
doesn't depend on its scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import tf_keras

from hvd_quant.keras.averaging import Averaging, AveragingSettings
from hvd_quant.keras.reducing import Reducing, Scaling, Settings, copy_what_no_config_has, derived, undistributed
from hvd_quant.keras.window import add_up
from hvd_quant.tensorflow.variables import make_variables, scale_of, variables_of

OldOptimizer = tf_keras.optimizers.legacy.Optimizer
Pairs = Iterable[tuple[Any, Any]]


def distribute(optimizer: Any, settings: Settings) -> Any:
    """A distributed optimizer with the configuration and the state of ``optimizer``, which is one of tf_keras.

    Raises:
        ValueError: for one that is distributed already or can't be.
    """
    undistributed(optimizer)
    if isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer):
        config = {**optimizer.get_config(), "inner_optimizer": optimizer.inner_optimizer}
        cls = derived(Scaling, type(optimizer), _hvd_settings=settings, _hvd_distribute=staticmethod(distribute))
        made = cls(**config)
        for new, old in zip(scale_of(made), scale_of(optimizer)):
            new.assign(old)
        return made
    config, old_kind = optimizer.get_config(), isinstance(optimizer, OldOptimizer)
    learning_rate = optimizer._hyper["learning_rate"] if old_kind else optimizer._learning_rate
    if callable(learning_rate):  # a schedule, or another function, and not what its configuration makes of it
        config["learning_rate"] = learning_rate
    kinds = (AveragedNew, AveragedOld) if isinstance(settings, AveragingSettings) else (DistributedNew, DistributedOld)
    cls = derived(kinds[old_kind], type(optimizer), _hvd_settings=settings)
    made = cls.from_config(config)
    copy_what_no_config_has(optimizer, made)
    values, there = [v.numpy() for v in variables_of(optimizer)], variables_of(made)
    for variable, value in zip(there, values):
        variable.assign(value)
    vars(made)["_hvd_values"] = dict(list(enumerate(values))[len(there):])
    return made


class Distributed(Reducing):
    """What a distributed optimizer's class has beside that of the optimizer it was made from, in both kinds."""

    _hvd_reduced = False
    _hvd_values: dict[int, Any] = {}
    """By place, those of the variables that the optimizer had from which this was made and that this has yet to make."""

    def aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, Any]]:
        """Reduce gradients that are about to be applied and are not reduced yet."""
        grads_and_vars = list(grads_and_vars)
        if self._hvd_reduced or not grads_and_vars:
            return grads_and_vars
        grads, variables = zip(*grads_and_vars)
        return list(zip(self._hvd_reduce(grads, variables), variables))

    _aggregate_gradients = aggregate_gradients

    def apply_gradients(self, grads_and_vars: Pairs, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients, once they are reduced; with ``backward_passes_per_step``, once a window, and their sum. Then average the
        variables, where that is due."""
        apply, grads_and_vars = super().apply_gradients, list(grads_and_vars)
        try:
            if self._hvd_settings.passes == 1:
                result = apply(grads_and_vars, *args, **kwargs)
            else:
                result = self._hvd_pass(grads_and_vars, lambda pairs: apply(pairs, *args, **kwargs))
        finally:
            vars(self)["_hvd_reduced"] = False
        self._hvd_average(due=True)
        return result

    def _hvd_pass(self, grads_and_vars: Pairs, apply: Any) -> tf.Variable:
        if self._hvd_scaled():
            raise ValueError(f"backward_passes_per_step={self._hvd_settings.passes} can't be combined with tf_keras's "
                             "LossScaleOptimizer, whose scale may change between two passes: use Keras 3, or the "
                             "policy mixed_bfloat16")
        grads, variables = zip(*grads_and_vars)
        with tf.init_scope():
            make_variables(self, variables)
        grads = self._hvd_filled(grads, variables)
        window, settings = self._hvd_window, self._hvd_settings
        sums = [window.sums[self._hvd_reducer.state.place(v)] for v in variables]

        def between() -> None:
            window.count.assign_add(1)
            self.iterations.assign_add(1)

        def last(total: list[tf.Tensor | None]) -> None:
            window.count.assign(0)
            if settings.average_passes:
                total = [None if grad is None else grad / settings.passes for grad in total]
            vars(self)["_hvd_reduced"] = True
            apply(list(zip(self._hvd_reduce(total, variables), variables)))

        add_up(grads, sums, tf.equal(window.count, settings.passes - 1), between, last)
        return self.iterations

    def _hvd_computed(self, grads_and_vars: Pairs) -> list[tuple[Any, Any]]:
        """(gradient, variable) pairs that were just computed, reduced if that is to be done now."""
        if self._hvd_settings.passes > 1:
            return list(grads_and_vars)
        grads, variables = zip(*grads_and_vars)
        if self._hvd_scaled():  # the scaler leaves out what is None before it hands them on
            return list(zip(self._hvd_filled(grads, variables), variables))
        vars(self)["_hvd_reduced"] = True
        return list(zip(self._hvd_reduce(grads, variables), variables))

    def _hvd_scaled(self) -> bool:
        return getattr(self, "_is_wrapped_by_loss_scale_optimizer", False)

    def _hvd_take_values(self, variables: list[tf.Variable]) -> None:
        if self._hvd_values and max(self._hvd_values) < len(variables):
            for place, value in self._hvd_values.items():
                variables[place].assign(value)
            vars(self)["_hvd_values"] = {}


class DistributedNew(Distributed):
    """For ``tf_keras.optimizers.Optimizer``."""

    def build(self, var_list: Iterable[Any]) -> None:
        """Make the optimizer's variables, as tf_keras does, and the compression state."""
        var_list = list(var_list)
        super().build(var_list)
        self._hvd_take_values(self._variables)
        if self._hvd_reducer is None:
            self._hvd_build(var_list)

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """(gradient, variable) pairs, with reduced gradients."""
        return self._hvd_computed(super().compute_gradients(loss, var_list, tape))

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None,
                           tape: Any = None) -> list[tuple[Any, Any]]:
        return self.compute_gradients(loss, var_list, tape)


class DistributedOld(Distributed):
    """For ``tf_keras.optimizers.legacy.Optimizer``."""

    @property
    def variables(self) -> list[tf.Variable]:
        """The optimizer's variables; may be called, as in tf_keras, or not, as in Horovod."""
        return _CallableList(self._weights)

    def _create_all_weights(self, var_list: Iterable[Any]) -> None:
        """Make the optimizer's variables, as tf_keras does, and the compression state."""
        super()._create_all_weights(var_list)
        self._hvd_take_values(self._weights)
        if self._hvd_reducer is None:
            self._hvd_build(var_list)

    def apply_gradients(self, grads_and_vars: Pairs, name: str | None = None, experimental_aggregate_gradients: bool = True) -> Any:
        """As :meth:`Distributed.apply_gradients`; this kind leaves out what is None before it aggregates."""
        grads_and_vars = list(grads_and_vars)
        if experimental_aggregate_gradients and self._hvd_settings.passes == 1 and not self._hvd_reduced and grads_and_vars:
            grads, variables = zip(*grads_and_vars)
            grads_and_vars = list(zip(self._hvd_filled(grads, variables), variables))
        return super().apply_gradients(grads_and_vars, name, experimental_aggregate_gradients=experimental_aggregate_gradients)

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None,
                           tape: Any = None) -> list[tuple[Any, Any]]:
        tape = tf.GradientTape() if tape is None else tape
        return self._hvd_computed(super()._compute_gradients(loss, var_list, grad_loss, tape))

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """(gradient, variable) pairs, with reduced gradients."""
        return self._compute_gradients(loss, var_list, None, tape)


class Averaged(Averaging):
    """What a model-averaging optimizer's class has in front of that, in both kinds."""

    def apply_gradients(self, grads_and_vars: Pairs, *args: Any, **kwargs: Any) -> Any:
        """Take a step with this worker's gradients, and average where it is time."""
        if self._hvd_scaled():
            raise ValueError("ModelAveragingOptimizer can't be combined with tf_keras's LossScaleOptimizer, which "
                             "skips a step on some workers only: use Keras 3, or the policy mixed_bfloat16")
        grads_and_vars = list(grads_and_vars)
        variables = [variable for _, variable in grads_and_vars]
        with tf.init_scope():
            make_variables(self, variables)
        self._hvd_averager.begin()
        result = super().apply_gradients(grads_and_vars, *args, **kwargs)
        self._hvd_averager.count()
        return result


class AveragedNew(Averaged, DistributedNew):
    """For ``tf_keras.optimizers.Optimizer``."""

    def add_variable_from_reference(self, model_variable: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a variable that is kept for one of the model's, as tf_keras does."""
        return self._hvd_note(model_variable, super().add_variable_from_reference(model_variable, *args, **kwargs))


class AveragedOld(Averaged, DistributedOld):
    """For ``tf_keras.optimizers.legacy.Optimizer``."""

    def add_slot(self, var: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a variable that is kept for one of the model's, as tf_keras does."""
        return self._hvd_note(var, super().add_slot(var, *args, **kwargs))


class _CallableList(list):
    def __call__(self) -> list[tf.Variable]:
        return self
