"""Distributed optimizers of either Keras whose workers' variables differ until they are averaged."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.keras as hvd
from hvd_quant.tensorflow.variables import plain
from tests.parallel.keras_workers import RANK, WORLD, assert_same_everywhere, data, fit, flat, keras, network, on_all

SGD = keras.optimizers.SGD
LEGACY = not keras.layers.Layer.__module__.startswith("keras.")
MERGE = "topk:ratio=0.05,min_numel=0,merge=replace,average_every=3"


def distributed(optimizer=None, compression=MERGE, **kwargs):
    return hvd.DistributedOptimizer(optimizer or SGD(0.1), compression=compression, **kwargs)


def same(model):
    rows = on_all(flat(model))
    return bool((rows == rows[:1]).all())


class Watch(keras.callbacks.Callback):
    """After which batches, or what else, the workers' models are the same."""

    def __init__(self, *when):
        super().__init__()
        self.same = []
        for what in when:
            setattr(self, what, lambda *args, **kwargs: self.same.append(same(self.model)))


@pytest.mark.parametrize("make, expected", [
    (lambda: distributed(), [False, False, True] * 2 + [False]),
    (lambda: distributed(backward_passes_per_step=2), [True, False, False, False, False, True, True, False]),
    *([(lambda: distributed(keras.optimizers.legacy.SGD(0.1)), [False, False, True, False])] if LEGACY else [
        (lambda: distributed(keras.optimizers.LossScaleOptimizer(SGD(0.1))), [False, False, True, False]),
        (lambda: distributed(SGD(0.1, gradient_accumulation_steps=2)), [True, False, False, False, False, True, True, False])]),
], ids=lambda x: "" if callable(x) else str(len(x)))
def test_variables_are_averaged_when_it_is_time(make, expected):
    model, optimizer, watch, sent = network(), make(), Watch("on_train_batch_end"), [0]
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **logs: sent.append(optimizer.compression_stats()["wire_bytes"]))
    fit(model, optimizer, batches=len(expected), callbacks=[watch, look])
    assert watch.same == expected
    dense = 8 * flat(model).size * (WORLD - 1) // WORLD  # is what an averaging takes
    exchanges = optimizer.compression_stats()["steps"]
    averaged = [now and not before for before, now in zip([True, *expected], expected)]
    assert [after - before > dense for before, after in zip(sent, sent[1:])] == averaged
    mean = on_all(flat(model)).mean(0)
    optimizer.average_parameters()
    np.testing.assert_allclose(flat(model), mean, atol=1e-6)
    stats = optimizer.compression_stats()
    assert same(model) and stats["wire_bytes"] - sent[-1] == dense and stats["dense_bytes"] == exchanges * dense
    for weight in model.weights:
        weight.assign_add(tf.fill(weight.shape, float(RANK)))
    optimizer.average_parameters()  # no step since, so nothing is left to do
    assert not same(model) and optimizer.compression_stats() == stats


SCHEMES = {"plain": "", "momentum": ",momentum=0.9", "nesterov": ",momentum=0.9,nesterov=true,clip_norm=1,weight_decay=0.1",
           "warmup": ",warmup=2", "dgc": ",momentum=0.9,warmup=1,schedule=dgc,schedule_steps=2", "ef21": ",memory=ef21",
           "merge": ",merge=replace,average_every=2"}
WINDOWS = {"passes": (SGD, {"backward_passes_per_step": 2}),
           **({"old": (keras.optimizers.legacy.SGD, {"backward_passes_per_step": 2})} if LEGACY else
              {"accumulation": (lambda rate: SGD(rate, gradient_accumulation_steps=2), {})})}


@pytest.mark.parametrize("make, how", WINDOWS.values(), ids=list(WINDOWS))
def test_a_window_is_one_step_of_every_scheme(make, how):
    """Momenta, warm-ups, stages and averagings go by exchanges, and see the sum of the gradients, or Keras's mean."""
    compression = {name: f"topk:ratio=0.01,min_numel=0{knobs}" for name, knobs in SCHEMES.items()}
    once, twice = ([tf.Variable(tf.ones([30, 41]), name=name) for name in compression] for _ in range(2))
    a, b = distributed(SGD(0.1), compression), distributed(make(0.1), compression, **how)
    for step in range(6):
        parts = np.random.default_rng([step, RANK]).normal(size=(2, 30, 41)).astype(np.float32)
        a.apply_gradients([(tf.constant(parts[1] + parts[0]) * (1.0 if how else 0.5), v) for v in once])
        for part in parts:
            b.apply_gradients([(tf.constant(part), v) for v in twice])
        for v, w in zip(once, twice):
            np.testing.assert_array_equal(v.numpy(), w.numpy(), err_msg=v.name)
        assert a.compression_stats()["wire_bytes"] == b.compression_stats()["wire_bytes"]
    assert {kept["step"] for kept in b.compression_state_dict()["tensors"].values()} == {6}
    np.testing.assert_equal(b.compression_state_dict(), a.compression_state_dict())


def test_the_count_is_part_of_checkpoints(tmp_path):
    model, optimizer = network(), distributed()
    fit(model, optimizer, batches=4)
    state, path = optimizer.compression_state_dict(), tf.train.Checkpoint(optimizer).write(str(tmp_path / f"of-{RANK}"))
    assert {kept["averaged"] for kept in state["tensors"].values()} == {3}
    for load in (lambda other: tf.train.Checkpoint(other).read(path), lambda other: other.load_compression_state_dict(state)):
        resumed, watch = network(), Watch("on_train_batch_end")
        other = distributed()
        resumed.compile(other, "mse")
        fit(resumed, batches=1)
        load(other)
        fit(resumed, batches=4, callbacks=[watch])
        assert watch.same == [False, True, False, False]


def test_the_callback_averages_what_differs_and_statistics():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((20,)), keras.layers.BatchNormalization(), keras.layers.Dense(30), keras.layers.Dense(20)]
    model, optimizer = keras.Sequential(layers), distributed(compression=MERGE.replace("average_every=3", "average_every=100"))
    local = model.layers[-1].kernel
    optimizer.register_local_var(local)
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append([(id(plain(v)), on_all(v.numpy())) for v in self.model.weights])

        on_epoch_end = on_train_batch_end = lambda self, step, logs=None: self.on_test_begin()

    fit(model, optimizer, batches=2, epochs=2, callbacks=[hvd.callbacks.AverageParametersCallback(), Seen()],
        validation_data=data(rank=99))
    assert len(seen) == 8  # 2 batches, a validation and the end of an epoch
    for i, values in enumerate(seen):
        for variable, rows in values:
            if variable == id(plain(local)):
                assert not (rows == rows[:1]).all()
            elif i % 4 > 1:
                np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))
    assert not all((rows == rows[:1]).all() for variable, rows in seen[1] if variable != id(plain(local)))
    assert_same_everywhere(np.concatenate([v.numpy().ravel() for v in model.weights if plain(v) is not plain(local)]))


def test_the_callback_averages_over_the_workers_of_the_process_set():
    sets = [hvd.add_process_set([r]) for r in range(WORLD)]
    try:
        keras.utils.set_random_seed(RANK)
        model = keras.Sequential([keras.layers.Input((20,)), keras.layers.BatchNormalization(), keras.layers.Dense(20)])
        fit(model, distributed(process_set=sets[RANK]), batches=2)
        before = flat(model)
        (callback := hvd.callbacks.AverageParametersCallback()).set_model(model)
        callback.on_epoch_end(0)
        np.testing.assert_array_equal(flat(model), before)
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)
