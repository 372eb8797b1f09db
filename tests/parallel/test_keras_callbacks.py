"""Callbacks under model.fit; this file runs with Keras 3, and again with tf_keras where TF_USE_LEGACY_KERAS is set."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.keras as hvd
from hvd_quant.tensorflow.variables import variables_of
from tests.parallel.keras_workers import (
    RANK,
    TOPK,
    WORLD,
    assert_same_everywhere,
    data,
    fit,
    flat,
    keras,
    network,
    on_all,
)

SGD = keras.optimizers.SGD
KERAS3 = keras.layers.Layer.__module__.startswith("keras.")
MAKERS = [SGD] if KERAS3 else [SGD, keras.optimizers.legacy.SGD]


class Recorder(keras.callbacks.Callback):
    """The learning rate of each batch, and the logs of each epoch."""

    def __init__(self):
        super().__init__()
        self.rates, self.logs = [], []

    def on_batch_end(self, batch, logs=None):
        self.rates.append(float(tf.convert_to_tensor(self.model.optimizer.learning_rate)))

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("make", MAKERS, ids=["new", "old"][:len(MAKERS)])
def test_learning_rates_are_warmed_up_and_scheduled_and_metrics_averaged(make, capsys):
    model, recorder = network(), Recorder()
    optimizer = hvd.DistributedOptimizer(make(1.0, momentum=0.9), compression=TOPK)
    history = fit(model, optimizer, batches=4, epochs=7, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(0.08, multiplier=0.5, start_epoch=2, end_epoch=4),
        hvd.callbacks.LearningRateScheduleCallback(0.08, lambda epoch: epoch / 100, start_epoch=4, staircase=False),
        recorder])
    warm_up = [0.08 / WORLD * ((i + 1) / 4 * (WORLD - 1) / 2 + 1) for i in range(8)]
    staircase = [0.08] * 4 + [0.04] * 4
    smooth = [0.08 * (i / 4) / 100 for i in range(16, 28)]
    np.testing.assert_allclose(recorder.rates, warm_up + staircase + smooth, rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], recorder.rates[3::4], rtol=1e-6)
    for epoch in recorder.logs:
        assert_same_everywhere(epoch["loss"])
    x, y = data(batches=4)
    own = model.evaluate(x, y, verbose=0)
    assert on_all(own).std() > 0  # each worker has losses of its own
    assert ("finished gradual learning rate warmup to 0.08" in capsys.readouterr().out) == (RANK == 0)
    endless = tf.data.Dataset.from_tensors((x, y)).filter(lambda x, y: True)  # of unknown length, as far as Keras knows
    with pytest.raises(ValueError, match="give steps_per_epoch to LearningRateWarmupCallback"):
        model.fit(endless, verbose=0, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1)])
    with pytest.raises(ValueError, match="initial_lr is None"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.1)


@pytest.mark.parametrize("make", MAKERS, ids=["new", "old"][:len(MAKERS)])
@pytest.mark.parametrize("correction", [True, False])
def test_momentum_is_corrected_when_the_learning_rate_changes(make, correction):
    """As if the momentum had been multiplied by the same factor for one step: m' = 0.9 * factor * m - lr * g."""
    class One(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(), initializer="zeros", name="w")

        def call(self, x):
            return x + self.w

    model = keras.Sequential([keras.layers.Input((1,)), One()])
    model.compile(hvd.DistributedOptimizer(make(0.1, momentum=0.9)), lambda y, p: tf.reduce_mean(p))  # of gradient 1
    x = np.zeros((8, 1), np.float32)
    model.fit(x, x, epochs=4, batch_size=8, verbose=0, callbacks=[hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: [1, 4, 4, 0.5][epoch], momentum_correction=correction)])
    m = w = 0.0
    for rate, factor in ((0.1, 1), (0.4, 4), (0.4, 1), (0.05, 0.125)):
        m = 0.9 * (factor if correction else 1) * m - rate
        w += m
    np.testing.assert_allclose(flat(model), [w], rtol=1e-5)


def test_broadcasting_leaves_local_variables_and_random_states_alone():
    root = WORLD - 1
    start = keras.initializers.Constant(RANK + 1.0)
    model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dropout(0.5, seed=RANK),
                              *(keras.layers.Dense(20, kernel_initializer=start, trainable=False) for _ in range(2))])
    model.compile(hvd.DistributedOptimizer(SGD(0.1 * (RANK + 1))), "mse")
    local = model.layers[-1].weights
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root, local_variables=local[0])
    callback.register_local_var(local[1])
    callback.set_model(model)
    seeds = [v.numpy() for v in model.variables if "seed" in v.name]
    callback.on_train_begin()
    np.testing.assert_array_equal(model.layers[-2].get_weights()[0], np.full((20, 20), root + 1.0))
    np.testing.assert_array_equal(local[0].numpy(), np.full((20, 20), RANK + 1.0))
    if KERAS3:  # where it is one of the optimizer's variables
        assert_same_everywhere(float(tf.convert_to_tensor(model.optimizer.learning_rate)))
    np.testing.assert_array_equal(seeds, [v.numpy() for v in model.variables if "seed" in v.name])
    with pytest.raises(ValueError, match="local_variables must be variables; it holds 1"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1])


@pytest.mark.parametrize("make", MAKERS, ids=["new", "old"][:len(MAKERS)])
def test_a_model_that_is_built_by_its_first_batch_is_broadcast_after_it(make):
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.layers.Dense(20)])
    model.compile(hvd.DistributedOptimizer(make(0.1 * (RANK + 1), momentum=0.9), compression="none"), "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    assert not callback.broadcast_done
    x, y = data()
    model.train_on_batch(x, y)
    callback.on_batch_end(0)
    callback.on_batch_end(1)
    assert_same_everywhere(flat(model))
    for variable in variables_of(model.optimizer):
        assert_same_everywhere(np.asarray(tf.convert_to_tensor(variable), np.float64))


def test_what_was_sent_is_in_the_logs(capsys):
    model, recorder = network(), Recorder()
    optimizer = hvd.DistributedOptimizer(SGD(0.1), compression=TOPK)
    callbacks = [hvd.callbacks.CompressionStatsCallback(verbose=1), recorder]
    history = fit(model, optimizer, epochs=3, callbacks=callbacks).history
    stats = optimizer.compression_stats()
    assert sum(history["wire_bytes"]) == stats["wire_bytes"] and len(set(history["wire_bytes"])) == 1
    np.testing.assert_allclose(history["compression_ratio"], stats["compression_ratio"], rtol=1e-3)
    assert recorder.logs[-1]["wire_bytes"] == history["wire_bytes"][-1]
    printed = capsys.readouterr().out
    assert (f"worker 0 sent {stats['wire_bytes'] / 1e6:.6g} MB in 12 steps" in printed) == (RANK == 0)


def test_what_was_sent_is_written_for_tensorboard_and_summed_up(capsys, tmp_path):
    model, optimizer = network(), hvd.DistributedOptimizer(SGD(0.1), compression=TOPK)
    fit(model, optimizer, epochs=2, callbacks=[hvd.callbacks.CompressionStatsCallback(verbose=2, log_dir=tmp_path)])
    assert ("8 steps: sent" in capsys.readouterr().out) == (RANK == 0) == bool(list(tmp_path.iterdir()))
    assert hvd.compression_progress(model.optimizer).startswith("sent ")
    if RANK == 0:
        records = tf.data.TFRecordDataset([str(file) for file in tmp_path.iterdir()])
        events = [tf.compat.v1.Event.FromString(record.numpy()) for record in records]
        written = [float(tf.make_ndarray(v.tensor)) for e in events for v in e.summary.value if v.tag == "compression/wire_bytes"]
        assert written == [pytest.approx(optimizer.compression_stats()["wire_bytes"] / 8)] * 2


@pytest.mark.parametrize("only_weights", [False, True])
def test_the_best_model_is_kept(only_weights, tmp_path):
    model, callback = network(), hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=only_weights)
    optimizer = hvd.DistributedOptimizer(SGD(0.01))
    with pytest.raises(ValueError, match="set callback.filepath before training"):
        fit(model, optimizer, callbacks=[callback])
    callback.filepath = str(tmp_path / ("best.weights.h5" if only_weights else "best.keras"))
    fit(model, epochs=2, callbacks=[callback])
    assert isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_best_only
    best = network(seed=1)
    if only_weights:
        best.load_weights(callback.filepath)
    else:
        best = keras.models.load_model(callback.filepath)
    np.testing.assert_array_equal(flat(best), flat(model))


def test_workers_with_other_metrics_are_told_of_on_all_of_them():
    model = network()
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse", metrics=["mae" if RANK == 0 else "mape"])
    with pytest.raises(ValueError, match="can't average different metrics: worker 0 has loss, ma.*; worker 1 has loss, ma"):
        fit(model, callbacks=[hvd.callbacks.MetricAverageCallback()])


def test_a_copy_of_a_model_that_trains_apart_is_warned_about():
    model = network()
    model.compile(SGD(0.1), "mse")
    with pytest.warns(UserWarning, match="optimizer, a SGD, is not distributed, so each worker trains a model of its own"):
        fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
