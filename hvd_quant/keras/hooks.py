"""Two methods of Keras 3 that have to know of distributed optimizers; both are wrapped when this is imported.

``LossScaleOptimizer.apply`` tests the gradients that it is given, those of one worker, and calls its inner optimizer
inside a conditional on the outcome: after an overflow on one worker, the others would wait for it in their exchange,
for ever. And ``model.compile`` makes such an optimizer by itself under the policy mixed_float16. So it hands its step
over to an inner optimizer that is distributed.

``jit_compile="auto"`` comes out as True where there are GPUs, but XLA can't contain Horovod's collectives. So it comes
out as False for a model with a distributed optimizer.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from hvd_quant.keras.reducing import Reducing, reducing

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer


def _apply(keras_apply: Any) -> Any:
    @functools.wraps(keras_apply)
    def apply(self: LossScaleOptimizer, grads: Any, trainable_variables: Any = None) -> None:
        inner = self.inner_optimizer
        if reducing(inner) is None:
            return keras_apply(self, grads, trainable_variables)
        if not isinstance(inner, Reducing):
            raise ValueError("a LossScaleOptimizer around a LossScaleOptimizer can't be distributed: leave one out")
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        return inner.apply_scaled(self, list(grads), list(variables))

    return apply


def _resolve_auto_jit_compile(keras_resolve: Any) -> Any:
    @functools.wraps(keras_resolve)
    def resolve(self: keras.Model) -> bool:
        return reducing(self.optimizer) is None and keras_resolve(self)

    return resolve


LossScaleOptimizer.apply = _apply(LossScaleOptimizer.apply)
_Trainer = next(cls for cls in keras.Model.__mro__ if "_resolve_auto_jit_compile" in vars(cls))
_Trainer._resolve_auto_jit_compile = _resolve_auto_jit_compile(_Trainer._resolve_auto_jit_compile)
