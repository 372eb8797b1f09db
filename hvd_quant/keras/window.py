"""Gradients that add up over several passes before they are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_quant.tensorflow.reducer import Gradient


class Window(tf.Module):
    """What is added up between two exchanges.

    Attributes:
        sums: of the gradients so far, one for each variable of the optimizer.
        count: passes so far; it doesn't follow from the optimizer's iterations, which may differ between workers until
            those of one are broadcast.
    """

    def __init__(self, variables: list[Any]) -> None:
        super().__init__()
        with tf.init_scope():  # (A tf.Variable would make tf.function trace twice.)
            self.sums = [ResourceVariable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]
            self.count = ResourceVariable(0, trainable=False)


def add_up(grads: list[Gradient | None], sums: list[tf.Variable], is_last: tf.Tensor, between: Callable[[], Any],
           last: Callable[[list[tf.Tensor | None]], Any]) -> None:
    """One pass of a window: add to ``sums`` and call ``between``, or call ``last`` with all that was added up.

    Arguments:
        grads: this pass's.
        sums: of the passes before, a variable for each gradient; zeros once ``last`` is called.
        is_last: whether the window ends; the same on all workers.
    """
    dense = {i: tf.convert_to_tensor(grad) for i, grad in enumerate(grads) if grad is not None}

    def add() -> None:
        for i, grad in dense.items():
            sums[i].assign_add(tf.cast(grad, sums[i].dtype))
        between()

    def finish() -> None:
        total: list[tf.Tensor | None] = [None] * len(grads)
        for i, grad in dense.items():
            total[i] = grad + tf.cast(sums[i], grad.dtype)
            sums[i].assign(tf.zeros_like(sums[i]))
        last(total)

    tf.cond(is_last, finish, add)
