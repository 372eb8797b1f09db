"""A warning where Horovod's own Keras wrapper would do nothing."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import horovod._keras


def install_guard() -> None:
    """Make Horovod's wrapper warn, once, when it gets an optimizer of Keras 3, which never calls the methods that it
    replaces."""
    wrapper = horovod._keras.create_distributed_optimizer
    if hasattr(wrapper, "__wrapped__"):
        return

    @functools.wraps(wrapper)
    def create_distributed_optimizer(keras: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        keras3 = sys.modules.get("keras")
        if hasattr(keras3, "optimizers") and isinstance(optimizer, keras3.optimizers.Optimizer) and not warned:
            warned.append(True)
            warnings.warn("Horovod's own DistributedOptimizer does not reduce the gradients of a Keras 3 optimizer: "
                          "each worker would train a model of its own; write 'import hvd_quant.keras as hvd' in the "
                          "place of its import", stacklevel=3)
        return wrapper(keras, optimizer, *args, **kwargs)

    warned: list[bool] = []
    horovod._keras.create_distributed_optimizer = create_distributed_optimizer
