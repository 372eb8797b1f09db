"""The Keras and TensorFlow code of README.md and docs runs on all workers."""

import shutil
import tempfile

import horovod.tensorflow as horovod
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.keras as hvd
from hvd_quant import registry
from tests import docs


def meet():
    horovod.broadcast_object(None, name="met")


@pytest.fixture
def folder(monkeypatch):
    """One for the files of all workers, which leave it, and the registry, as they were."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    path = horovod.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, name="folder")
    with monkeypatch.context() as inside:
        inside.chdir(path)
        yield
    meet()
    if hvd.rank() == 0:
        shutil.rmtree(path)


def prepare(code, names):
    """A block that distributes an optimizer or a tape gets a model of its own."""
    if "Optimizer(" in code or "Tape(" in code or "model" not in names:
        keras.utils.set_random_seed(0)
        names["model"] = keras.Sequential([keras.layers.Input((784,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        names["optimizer"] = keras.optimizers.SGD(0.01)
        names["tape"], names["compression"] = tf.GradientTape(), "topk:ratio=0.01"
    names["y"] = np.eye(10, dtype=np.float32)[names["labels"]] if 'loss="mse"' in code else names["labels"]
    return code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", docs.pages("keras", "tensorflow"), ids=docs.name_of)
def test_a_page(page, folder):
    x, y = np.random.default_rng(hvd.rank()).random((32, 784), np.float32), np.arange(32) % 10
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    names = {"keras": keras, "tf": tf, "np": np, "hvd": hvd, "x": x, "labels": y, "dataset": [(x, y)] * 2, "loss_object": loss,
             "loss_of": loss}
    docs.run(page, ("keras", "tensorflow"), names, prepare, meet)
