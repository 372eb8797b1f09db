"""Model averaging among workers, with Keras 3 and again with tf_keras, against a simulation of all of them in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.keras as hvd
from hvd_quant.tensorflow.variables import make_variables
from tests.parallel import averaging_in_numpy as simulation
from tests.parallel.keras_workers import RANK, WORLD, assert_same_everywhere, data, fit, flat, keras, network, on_all

KERAS3 = keras.layers.Layer.__module__.startswith("keras.")
SGD = keras.optimizers.SGD
MAKERS = [SGD] if KERAS3 else [SGD, keras.optimizers.legacy.SGD]
ONEBIT, SRA = (f"onebit:min_numel=0,block_size={simulation.BLOCK},exchange={exchange}" for exchange in ("allgather", "sra"))
NESTEROV = {"momentum": 0.9, "nesterov": True}
makers = pytest.mark.parametrize("make", MAKERS, ids=["new", "old"][:len(MAKERS)])


def averaging(every=4, optimizer=None, /, **how):
    return hvd.ModelAveragingOptimizer(optimizer or SGD(0.1, momentum=0.9), every=every, **how)


def mean_of(value):
    return on_all(value).mean(0)


class Product(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(simulation.OUTPUTS, simulation.INPUTS), initializer="zeros", name="w")

    def call(self, x):
        return tf.matmul(x, tf.convert_to_tensor(self.w), transpose_b=True)


class Counting(keras.Sequential):
    traces = 0

    def train_step(self, *args):
        self.traces += 1
        return super().train_step(*args)


def linear():
    """The model that is simulated, in float64."""
    model = Counting([keras.layers.Input((simulation.INPUTS,), dtype="float64"), Product(dtype="float64")])
    model.set_weights([simulation.weight()])
    return model


@makers
@pytest.mark.parametrize("setting", simulation.SETTINGS.values(), ids=list(simulation.SETTINGS))
def test_as_in_numpy(setting, make):
    model = linear()
    lr, momentum = setting.get("outer", (1.0, 0.0))
    optimizer = averaging(setting["every"], make(setting.get("lr", 0.5), momentum=setting.get("momentum", 0.0)),
                          outer=make(lr, momentum=momentum, nesterov=True) if "outer" in setting else None,
                          average_state=setting.get("average_momentum", False),
                          compression=ONEBIT if setting.get("compressed") else "none")
    x, y = map(np.concatenate, zip(*(simulation.batch(step, RANK) for step in range(20))))
    fit(model, optimizer, xy=(x, y))
    expected = simulation.simulate(WORLD, 20, **setting)[RANK]
    np.testing.assert_allclose(model.get_weights()[0], expected, atol=1e-6)
    assert model.traces == 1
    if 20 % setting["every"] == 0:
        assert_same_everywhere(flat(model))
    assert optimizer.compression_stats()["steps"] == 20 // setting["every"]
