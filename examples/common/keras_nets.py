"""The nets of the examples as Keras models, and their optimizers, made to start and to step as PyTorch's do.

Keras is imported where it is needed, so that this package can be imported without a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def build(model: str, image_shape: tuple[int, int], classes: int) -> keras.Model:
    """A net that takes images of shape (batch, height, width) and gives logits."""
    from keras import Sequential, layers

    height, width = image_shape
    if model == "conv":
        return Sequential([
            layers.Input(image_shape), layers.Reshape((height, width, 1)),
            layers.Conv2D(10, 5, padding="same", **_uniform(25)), layers.MaxPooling2D(), layers.ReLU(),
            layers.Conv2D(20, 5, padding="same", **_uniform(250)), layers.MaxPooling2D(), layers.ReLU(),
            layers.Flatten(), layers.Dense(50, "relu", **_uniform(20 * (height // 4) * (width // 4))),
            layers.Dense(classes, **_uniform(50))])
    units = {"mlp": 1024, "mlp-4096": 4096}[model]
    return Sequential([
        layers.Input(image_shape), layers.Flatten(), layers.Dense(units, "relu", **_uniform(height * width)),
        layers.Dense(units, "relu", **_uniform(units)), layers.Dense(units, "relu", **_uniform(units)),
        layers.Dense(classes, **_uniform(units))])


def build_optimizer(name: str, lr: float) -> keras.optimizers.Optimizer:
    """An optimizer with PyTorch's defaults. (Its AdaGrad adds 1e-10 to the root, Keras's epsilon goes under it.)"""
    from keras.optimizers import SGD, Adagrad, Adam

    if name == "sgd":
        return SGD(lr)
    return Adam(lr, epsilon=1e-8) if name == "adam" else Adagrad(lr, initial_accumulator_value=0.0, epsilon=1e-20)


def _uniform(inputs: int) -> dict[str, Any]:
    """PyTorch's initial weights and biases of a unit with that many inputs."""
    from keras.initializers import RandomUniform

    limit = inputs ** -0.5
    return {"kernel_initializer": RandomUniform(-limit, limit), "bias_initializer": RandomUniform(-limit, limit)}
