"""What the Keras tests on several workers share, for whichever Keras tf.keras is: small models, batches, and looks at
the other workers."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.keras as hvd
from hvd_quant.tensorflow.variables import make_variables

keras = tf.keras
RANK, WORLD = hvd.rank(), hvd.size()
TOPK = "topk:ratio=0.1,min_numel=0"


def every(codecs):
    return pytest.mark.parametrize("compressor", codecs.values(), ids=list(codecs))


def network(seed=0):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([layers.Input((20,)), layers.Dense(30, activation="relu"), layers.Dense(20)])


def data(rank=RANK, batches=4, seed=0):
    """Another batch of 8 on each worker, the same in every run."""
    x = np.random.default_rng(100 * seed + rank).normal(size=(8 * batches, 20)).astype(np.float32)
    return x, np.roll(x, 1, axis=1)


def everyones(batches=4):
    """The batches of all workers, each in one batch of 8 * WORLD."""
    parts = [[array.reshape(batches, 8, 20) for array in data(rank, batches)] for rank in range(WORLD)]
    return [np.concatenate(arrays, axis=1).reshape(-1, 20) for arrays in zip(*parts)]


def fit(model, optimizer=None, batches=4, epochs=1, batch_size=8, xy=None, **kwargs):
    if optimizer is not None:
        model.compile(optimizer, "mse")
        make_variables(model.optimizer, model.trainable_variables)  # or else Keras would trace its function twice
    x, y = xy or data(batches=batches)
    return model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **kwargs)


def flat(model):
    return np.concatenate([np.asarray(w).ravel() for w in model.get_weights()])


def assert_what_is_unfrozen_late_is_reduced_or_refused(make):
    """With optimizers as ``make`` makes them: a layer that one knows, and a layer that it doesn't know."""
    model, optimizer = network(), make()
    make_variables(optimizer, model.trainable_variables)
    for trainable in (False, True):
        model.layers[0].trainable = trainable
        before = flat(model.layers[0])
        fit(model, optimizer, batches=2)
        assert np.array_equal(before, flat(model.layers[0])) != trainable
        assert_same_everywhere(flat(model))
    model, optimizer = network(), make()
    model.layers[0].trainable = False
    fit(model, optimizer, batches=1)
    model.layers[0].trainable = True
    before = flat(model)
    with pytest.raises(ValueError, match=r"dense\w*/kernel is none of the 2 variables that compression state was made for: give all "
                       r"variables that are trained when it is made \(to bind\(\), or to the optimizer\)"):
        fit(model, optimizer, batches=1)
    np.testing.assert_array_equal(flat(model), before)


def on_all(value):
    """The workers' values of an array, one row a worker."""
    value = np.asarray(value)
    return np.asarray(hvd.allgather(value.reshape(1, -1), name="on_all")).reshape(WORLD, *value.shape)


def assert_same_everywhere(value):
    rows = on_all(value)
    np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))


def residuals(optimizer):
    """name -> this worker's residual."""
    tensors = optimizer.compression_state_dict()["tensors"]
    return {name: kept["state"]["residual"] for name, kept in tensors.items() if kept["state"]}
