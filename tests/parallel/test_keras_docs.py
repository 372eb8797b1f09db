"""The Keras and TensorFlow code of README.md and docs runs on all workers."""

import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.keras as hvd
from hvd_quant import registry
from tests import docs


@pytest.fixture
def together(monkeypatch):
    """A folder for the files of all workers; they leave the registry as it was."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.chdir(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, root_rank=0, name="folder"))
    yield
    hvd.broadcast_object(None, root_rank=0, name="left")


def prepare(code, names):
    if "Optimizer(" in code or "Tape(" in code or "model" not in names:
        keras.utils.set_random_seed(0)
        names["model"] = keras.Sequential([keras.layers.Input((784,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        names["optimizer"] = keras.optimizers.SGD(0.01)
        names["tape"], names["compression"] = tf.GradientTape(), "topk:ratio=0.01"
    names["y"] = names["labels"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", docs.pages("keras", "tensorflow"), ids=docs.name_of)
def test_a_page(page, together):
    x, y = np.random.default_rng(hvd.rank()).random((32, 784), np.float32), np.arange(32) % 10
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    names = {"keras": keras, "tf": tf, "np": np, "hvd": hvd, "x": x, "labels": y, "dataset": [(x, y)] * 2, "loss_object": loss,
             "loss_of": loss}
    docs.run(page, ("keras", "tensorflow"), names, prepare, lambda: hvd.broadcast_object(None, root_rank=0, name="met"))
