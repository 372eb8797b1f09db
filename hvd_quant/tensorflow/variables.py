"""The variables of models and optimizers, whichever Keras they are from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def plain(variable: Any) -> Any:
    """The tf.Variable inside a Keras 3 variable; others as they are."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def path_of(variable: Any) -> str:
    """A variable's name: ``path`` for Keras 3, else ``name`` without TensorFlow's ":0"."""
    path = getattr(variable, "path", None)
    return path if isinstance(path, str) else str(variable.name).removesuffix(":0")


def variables_of(optimizer: Any) -> list[Any]:
    """What an optimizer keeps, its loss scale included, but no compression state."""
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return [*variables, *scale_of(optimizer)]


def scale_of(optimizer: Any) -> list[tf.Variable]:
    """What a LossScaleOptimizer of tf_keras keeps beside its variables; in Keras 3 it is among these."""
    state = getattr(optimizer, "_loss_scale", None)
    return [state._current_loss_scale, state._counter] if hasattr(state, "_counter") else []


def sums_of(optimizer: Any) -> list[Any]:
    """Among an optimizer's variables, the gradients that Keras 3 adds up between its steps."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "_accumulated_gradients", None) or ())


def make_variables(optimizer: Any, variables: Iterable[Any]) -> None:
    """Give an optimizer its variables, for a model's ``variables``, if it has none yet."""
    if not hasattr(optimizer, "build"):
        optimizer._create_all_weights(list(variables))
    elif not getattr(optimizer, "built", False):  # that of tf_keras asks itself
        optimizer.build(list(variables))
