"""model.fit with a distributed Keras 3 optimizer: replicas stay the same, and gradients are what they should be."""

import gc
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

if not tf.keras.layers.Layer.__module__.startswith("keras."):
    pytest.skip("not run: this launch is of tf_keras", allow_module_level=True)

import keras

import hvd_quant.keras as hvd
from hvd_quant import register, registry
from tests.conftest import CODECS
from tests.parallel.keras_workers import (
    RANK,
    TOPK,
    WORLD,
    assert_same_everywhere,
    data,
    every,
    everyones,
    fit,
    flat,
    network,
    residuals,
)


@pytest.fixture(scope="module")
def reference():
    """One worker that trains on everybody's batches."""
    model = network()
    fit(model, keras.optimizers.SGD(0.1, momentum=0.9), xy=everyones(), batch_size=8 * WORLD)
    return flat(model)


@every(CODECS)
def test_replicas_that_see_different_data_stay_the_same(compressor, reference):
    model = network()
    before = flat(model)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=compressor)
    fit(model, optimizer)
    assert_same_everywhere(flat(model))
    if compressor.name in ("none", "fp16", "bf16"):
        tolerance = {"none": 1e-6, "fp16": 1e-3, "bf16": 5e-3}[compressor.name]
        np.testing.assert_allclose(flat(model), reference, atol=tolerance)
    assert np.abs(flat(model) - reference).mean() < np.abs(before - reference).mean()
    stats = optimizer.compression_stats()
    assert stats["steps"] == 4 and stats["dense_bytes"] == 4 * round(2 * 4 * flat(model).size * (WORLD - 1) / WORLD)
    assert sum(map(len, stats["exchanges"].values())) == 4
    assert (stats["compression_ratio"] > 1.5) == (compressor.name != "none")


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_float16"])
def test_models_in_half_precision_train(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = network()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.2), compression="topk:ratio=0.3,min_numel=0")
    losses = fit(model, optimizer, epochs=12).history["loss"]
    assert_same_everywhere(flat(model).astype(np.float32))
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    assert optimizer.compression_stats()["compression_ratio"] > 1.5


def test_a_compressor_of_ones_own(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    namespace = {"__name__": "own", "register": register}
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    exec(next(block for block in blocks if "class Sign(Compressor)" in block), namespace)
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=namespace["Sign"](min_numel=0))
    losses = fit(model, optimizer, epochs=3).history["loss"]
    assert_same_everywhere(flat(model))
    assert losses[-1] < losses[0] and optimizer.compression_stats()["compression_ratio"] > 5


def test_eagerly_in_a_loop_and_with_a_train_step_of_ones_own():
    class Custom(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(x)

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            weights = self.inner.trainable_variables
            grads = tape.gradient(loss, [v.value for v in weights])
            self.optimizer.apply(grads, weights)
            return {"loss": loss}

    plain, eager, looped, custom = network(), network(), network(), Custom(network())
    for model, how in ((plain, {}), (eager, {"run_eagerly": True}), (looped, {"steps_per_execution": 2}), (custom, {})):
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TOPK), "mse", **how)
        fit(model)
    assert_same_everywhere(flat(plain))
    np.testing.assert_allclose(flat(eager), flat(plain), atol=1e-6)
    np.testing.assert_allclose(flat(looped), flat(plain), atol=1e-6)
    np.testing.assert_allclose(flat(custom.inner), flat(plain), atol=1e-6)


@pytest.mark.parametrize("passes", [False, True], ids=["steps", "passes"])
@pytest.mark.parametrize("spec, momentum", [
    (TOPK, 0.9), (f"{TOPK},momentum=0.9", 0.0), ("topk:ratio=0.02,min_numel=0,schedule=dgc,schedule_steps=1,warmup=1", 0.9)])
def test_a_window_is_exchanged_once_and_is_a_larger_batch(spec, momentum, passes):
    """gradient_accumulation_steps and backward_passes_per_step with the mean differ in what iterations counts."""
    once, window = network(), network()
    a = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=momentum), compression=spec)
    fit(once, a, batch_size=16)
    how = {"backward_passes_per_step": 2, "average_aggregated_gradients": True} if passes else {}
    plain = keras.optimizers.SGD(0.1, momentum=momentum, gradient_accumulation_steps=None if passes else 2)
    b = hvd.DistributedOptimizer(plain, compression=spec, **how)
    fit(window, b)
    np.testing.assert_allclose(flat(window), flat(once), atol=1e-6)
    assert_same_everywhere(flat(window))
    assert a.compression_stats()["wire_bytes"] == b.compression_stats()["wire_bytes"]
    assert (a.compression_stats()["steps"], b.compression_stats()["steps"]) == (2, 2)
    assert int(b.iterations) == (4 if passes else 2)
    plain.build(window.trainable_variables)
    assert [v.path for v in b.variables] == [v.path for v in plain.variables]


def test_two_optimizers_in_one_step():
    """A generator and a discriminator whose layers have the same names; one compressor object for both. Each is as it is alone."""
    compressor = hvd.Compression.topk(ratio=0.1, min_numel=0)
    models = []
    for seed in (0, 1):
        keras.backend.clear_session()
        models.append(network(seed))
    assert [v.path for v in models[0].variables] == [v.path for v in models[1].variables]
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor) for _ in models]
    traces = []

    @tf.function
    def step(x, y):
        traces.append(1)
        for model, optimizer in zip(models, optimizers):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    for model, optimizer in zip(models, optimizers):
        optimizer.build(model.trainable_variables)
    x, y = data(batches=10)
    for i in range(50):
        step(x[8 * (i % 10):][:8], y[8 * (i % 10):][:8])
    assert len(traces) == 1
    for seed, model in enumerate(models):
        assert_same_everywhere(flat(model))
        alone = network(seed)
        fit(alone, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor), batches=10, epochs=5)
        np.testing.assert_allclose(flat(model), flat(alone), atol=1e-5)
    kept = [residuals(optimizer) for optimizer in optimizers]
    assert kept[0].keys() == kept[1].keys() and not any(np.array_equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize("bound", [False, True])
def test_an_optimizer_for_each_layer(bound):
    """All together are as one, also with one state that is bound to all variables, which another model's have no place in."""
    model, whole = network(), network()
    compression = hvd.Compression.topk(ratio=0.1, min_numel=0)
    if bound:
        compression = compression.bind(model.trainable_variables)
    layers = {layer: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=compression) for layer in model.layers}
    for layer, optimizer in layers.items():
        optimizer.build(layer.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, [layer.trainable_variables for layer in layers])
        for (layer, optimizer), of_layer in zip(layers.items(), grads):
            optimizer.apply(of_layer, layer.trainable_variables)

    x, y = data()
    for i in range(0, len(x), 8):
        step(x[i:i + 8], y[i:i + 8])
    fit(whole, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=TOPK))
    np.testing.assert_allclose(flat(model), flat(whole), atol=1e-6)
    assert_same_everywhere(flat(model))
    if bound:
        assert compression.stats()["steps"] == 4 and sum(map(len, compression.stats()["exchanges"].values())) == 4
        other = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
        with pytest.raises(ValueError, match="is none of the 4 variables that compression state was made for"):
            other.apply([tf.zeros(v.shape) for v in whole.trainable_variables], whole.trainable_variables)


def test_nothing_is_left_of_an_optimizer_that_is_gone():
    model, gone, sent = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(20)]), [], []
    hvd.broadcast_variables(model.variables, root_rank=0)
    for _ in range(3):
        fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TOPK), batches=2)
        assert_same_everywhere(flat(model))
        stats = model.optimizer.compression_stats()
        sent.append((stats["steps"], stats["wire_bytes"]))
        gone.append(weakref.ref(model.optimizer._hvd_reducer))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    gc.collect()
    assert [reducer() for reducer in gone] == [None] * 3
    assert len(set(sent)) == 1 and sent[0][0] == 2 and sent[0][1] > 0


def test_a_variable_without_a_gradient_is_left_out():
    used, unused = (keras.Variable(np.ones(500, np.float32), name=name) for name in ("used", "unused"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=TOPK)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients([(None, unused), (tf.fill([500], RANK + 1.0), used)])
    assert optimizer.compression_stats()["exchanges"] == {"allgather": ["used"]}
    assert (unused.numpy() == 1).all() and (used.numpy() < 1).any()


def test_xla_is_refused_where_it_was_asked_for_and_not_chosen_where_it_was_not(monkeypatch):
    model, SGD = network(), keras.optimizers.SGD
    with pytest.raises(ValueError, match="XLA can't contain Horovod's collectives: pass jit_compile=False"):
        model.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse", jit_compile=True)
        fit(model)
    devices = [*tf.config.list_physical_devices(), tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda: devices)
    scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(SGD(0.1)))
    for optimizer, compiled in ((SGD(0.1), True), (hvd.DistributedOptimizer(SGD(0.1)), False), (scaled, False)):
        model.compile(optimizer, "mse", jit_compile="auto")
        assert model.jit_compile == compiled
