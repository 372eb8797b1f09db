"""What outlives a step: saved models and checkpoints, learning rates, elastic state, batch normalization's averages."""

import re

import numpy as np
import pytest
import tensorflow as tf

if not tf.keras.layers.Layer.__module__.startswith("keras."):
    pytest.skip("not run: this launch is of tf_keras", allow_module_level=True)

import keras

import hvd_quant.keras as hvd
from hvd_quant import get_compressor
from hvd_quant.tensorflow import DistributedGradientTape
from hvd_quant.tensorflow.state import slots_of
from tests.parallel.allocation import allocated
from tests.parallel.keras_workers import (
    RANK,
    TOPK,
    WORLD,
    assert_same_everywhere,
    data,
    fit,
    flat,
    network,
    on_all,
    residuals,
)


def values(optimizer):
    return [v.numpy() for v in optimizer.variables]


def assert_same_values(a, b):
    for x, y in zip(values(a), values(b), strict=True):
        np.testing.assert_array_equal(x, y)


class Own(keras.optimizers.RMSprop):
    """An optimizer that Keras doesn't know."""


@pytest.mark.parametrize("make", [keras.optimizers.Adam, Own])
def test_models_are_saved_for_those_who_have_the_plugin_and_those_who_have_not(make, tmp_path):
    model = network()
    fit(model, hvd.DistributedOptimizer(make(0.01), compression=TOPK))
    model.save(tmp_path / "with.keras")
    own = {"custom_objects": {"Own": Own}} if make is Own else {}
    plain = keras.models.load_model(tmp_path / "with.keras", **own)
    assert type(plain.optimizer) is make and not hasattr(plain.optimizer, "compression_stats")
    assert_same_values(plain.optimizer, model.optimizer)
    plain.save(tmp_path / "without.keras")
    objects = [{"custom_optimizers": [Own]},
               {"custom_objects": {"Own": lambda **kwargs: hvd.DistributedOptimizer(Own(**kwargs), compression=TOPK)}}]
    for how in objects if make is Own else [{}]:
        for name in ("with", "without"):
            again = hvd.load_model(tmp_path / f"{name}.keras", compression=TOPK, **how)
            assert type(again.optimizer) is not make and isinstance(again.optimizer, make)
            assert_same_values(again.optimizer, model.optimizer)
            assert again.loss == "mse"
    fit(again, epochs=2)
    assert_same_everywhere(flat(again))
    assert again.optimizer.compression_stats()["compression_ratio"] > 2
    again.optimizer.learning_rate = 0.125
    again.save(tmp_path / "again.keras")
    assert keras.models.load_model(tmp_path / "again.keras", **own).optimizer.get_config()["learning_rate"] == 0.125


def test_a_model_that_one_worker_loads_is_broadcast(tmp_path):
    """The others have layers of other names, and optimizers without variables."""
    model = network()
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    model.save(tmp_path / "model.keras")
    if RANK == 0:
        again = hvd.load_model(tmp_path / "model.keras", compression=TOPK)
    else:
        network(seed=1)
        again = network(seed=2)
        again.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9), compression=TOPK), "mse")
    fit(again, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_same_everywhere(flat(again))
    for value in values(again.optimizer):
        assert_same_everywhere(value)
    assert int(again.optimizer.iterations) == 8 and float(again.optimizer.learning_rate) == np.float32(0.1)


def test_weights_files_hold_what_the_plain_optimizer_keeps(tmp_path):
    model, plain = network(), network()
    fit(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=TOPK, backward_passes_per_step=2))
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    plain.compile(keras.optimizers.Adam(0.5), "mse")
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(path)
    np.testing.assert_array_equal(flat(plain), flat(model))
    for a, b in zip(values(plain.optimizer), values(model.optimizer), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_built_optimizer_keeps_its_state():
    model = network()
    for scaled in (False, True):
        optimizer = keras.optimizers.Adam(0.01, clipnorm=1.0)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        fit(model, keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0) if scaled else optimizer)
        distributed = hvd.DistributedOptimizer(model.optimizer, compression=TOPK)
        assert_same_values(distributed, model.optimizer)
        assert isinstance(distributed, type(model.optimizer)) and distributed.built
        inner = distributed.inner_optimizer if scaled else distributed
        assert inner._exclude_from_weight_decay_pattern == optimizer._exclude_from_weight_decay_pattern
        fit(model, distributed)
        assert int(distributed.iterations) == 8


def test_learning_rates_of_all_kinds_are_kept():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    rates = [0.1]
    for given, expected in ((schedule, [0.1, 0.1 * 0.5**0.5]), (lambda: rates[0], [0.1, 0.1]), (0.1, [0.1, 0.1])):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(given), compression="none")
        assert given == 0.1 or optimizer._learning_rate is given
        v, previous = keras.Variable([0.0], name="w"), 0.0
        for rate in expected:
            optimizer.apply([tf.constant([1.0])], [v])
            np.testing.assert_allclose(previous - v.numpy()[0], rate, rtol=1e-5)
            previous = v.numpy()[0]


def test_from_config_makes_distributed_optimizers():
    for optimizer in (keras.optimizers.Adam(0.01), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))):
        distributed = hvd.DistributedOptimizer(optimizer, compression="none")
        config = distributed.get_config()
        for make in (distributed.from_config, distributed.__class__.from_config):
            copy = make(distributed.get_config())
            assert copy.get_config() == config == optimizer.get_config()
            v = keras.Variable([0.0, 0.0], name="w")
            copy.apply([tf.constant([1.0, 0.0] if RANK else [0.0, 1.0])], [v])
            assert_same_everywhere(v.numpy())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_checkpoint_a_worker_resumes_bit_for_bit(scaled, tmp_path):
    def fresh():
        model, optimizer = network(), keras.optimizers.SGD(0.1, momentum=0.9)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        return model, hvd.DistributedOptimizer(optimizer, compression=TOPK, backward_passes_per_step=2)

    model, optimizer = fresh()
    fit(model, optimizer, batches=5)  # the third window has begun
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / f"worker{RANK}")
    state = optimizer.compression_state_dict()
    fit(model, batches=3)
    for built in (False, True):
        again, other = fresh()
        if built:
            fit(again, other, batches=2)  # something to be overwritten
        checkpoint = tf.train.Checkpoint(model=again, optimizer=other)
        status = checkpoint.restore(path)
        if built:
            status.assert_consumed()
            fit(again, batches=3)
        else:
            fit(again, other, batches=3)
        np.testing.assert_array_equal(flat(again), flat(model))
    other.load_compression_state_dict(state)
    for now, before in zip(other.compression_state_dict()["tensors"].values(), state["tensors"].values(), strict=True):
        np.testing.assert_equal(now, before)  # the names are others, now that there are more models
    with pytest.raises(ValueError, match=f"this is worker {RANK} of {WORLD}"):
        other.load_compression_state_dict({**state, "rank": RANK + 1})
    with pytest.raises(ValueError, match="once it knows its variables: call optimizer.build"):
        fresh()[1].compression_state_dict()


def test_a_variable_that_has_changed_its_shape_starts_anew(caplog):
    """It alone, with one line in the log."""
    def built(units):
        layers = keras.layers
        model = keras.Sequential([layers.Input((20,)), layers.Dense(30, activation="relu"), layers.Dense(units)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TOPK)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    model, optimizer = built(20)
    fit(model, optimizer)
    other = built(21)[1]
    caplog.clear()
    other.load_compression_state_dict(optimizer.compression_state_dict())
    before, now = (list(residuals(one).values()) for one in (optimizer, other))  # the last bias is dense for its size
    assert len(before) == len(now) == 3 and all(residual.any() for residual in before)
    for i in range(2):
        np.testing.assert_array_equal(now[i], before[i])
    assert now[2].shape == (630,) and not now[2].any()
    assert {one["step"] for one in other.compression_state_dict()["tensors"].values()} == {4}
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hvd_quant"]
    assert re.match(r"compression state residual of .*/kernel starts at zero: the checkpoint has shape \(600,\) .* shape \(630,\)", line)


@pytest.mark.parametrize("op, share", [(hvd.Average, 2.0), (hvd.Sum, 6.0 / WORLD)])
def test_the_states_of_another_number_of_workers_are_shared_out(op, share):
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TOPK, op=op)
    optimizer.build(model.trainable_variables)
    kept = optimizer.compression_state_dict()
    states = [{**kept, "rank": rank, "world": 3, "tensors": {
        name: {**one, "state": {key: np.full_like(value, rank + 1.0) for key, value in one["state"].items()}, "step": 5}
        for name, one in kept["tensors"].items()}} for rank in range(3)]
    optimizer.load_compression_state_dict(states)
    assert residuals(optimizer) and all((value == np.float32(share)).all() for value in residuals(optimizer).values())
    assert {one["step"] for one in optimizer.compression_state_dict()["tensors"].values()} == {5}


def test_elastic_state():
    """As Horovod tests it, and compression state is each worker's own."""
    model = network(seed=RANK)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=TOPK)
    if RANK == 0:  # the others are newcomers, and this is the only worker
        optimizer.build(model.trainable_variables)
        for slot in optimizer._hvd_reducer.state.slots.values():
            slot.step.assign(7)
            for value in slot.state.values():
                value.assign(value + 0.5)
    state = hvd.elastic.KerasState(model, optimizer, batch=20 + RANK, epoch=10 + RANK)
    state.sync()
    assert_same_everywhere(flat(model))
    assert (state.batch, state.epoch) == (20, 10)
    kept = optimizer.compression_state_dict()["tensors"]
    assert {tensor["step"] for tensor in kept.values()} == {7}
    assert all((residual == (0.5 if RANK == 0 else 0)).all() for residual in residuals(optimizer).values())

    fit(model, optimizer)
    state.batch = 21
    state.commit()
    committed = flat(model), values(optimizer), residuals(optimizer)
    assert not np.array_equal(*on_all(next(iter(committed[2].values())))[:2])
    fit(model)
    state.batch = 22
    state.restore()
    assert state.batch == 21
    np.testing.assert_array_equal(flat(model), committed[0])
    for now, before in zip(values(optimizer), committed[1], strict=True):
        np.testing.assert_array_equal(now, before)
    np.testing.assert_equal(residuals(optimizer), committed[2])

    state.batch = state.epoch = 0
    model.compile(optimizer, "mse")
    fit(model, batches=4, epochs=2, callbacks=[
        hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2)])
    assert (state.batch, state.epoch) == (0, 2)
    after = flat(model)
    fit(model, batches=1)
    state.restore()
    np.testing.assert_array_equal(flat(model), after)
    with pytest.raises(ValueError, match="call model.build"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(2)]), optimizer)


def test_elastic_state_that_is_restored_and_synced_takes_no_more_memory():
    model = keras.Sequential([keras.layers.Input((256,)), keras.layers.Dense(512, use_bias=False)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=TOPK)
    state, seen = hvd.elastic.KerasState(model, optimizer, batch=0), []
    for i in range(60):
        state.restore()
        if i % 6 == 0:
            state.sync()  # which makes graphs
        if i in (19, 59):
            seen.append(allocated())
    assert seen[1] - seen[0] < 4 * 256 * 512 / 2, seen  # half a copy of one variable, in all


@pytest.mark.parametrize("bound", [False, True])
def test_elastic_state_of_what_a_tape_keeps(bound):
    model = network(seed=RANK)
    compression = get_compressor(TOPK).bind(model.trainable_variables) if bound else TOPK

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(data()[0]) ** 2) * (RANK + 1)
        tape = DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, model.trainable_variables)

    def kept():
        return {(slot.label, key): value.numpy() for slot in slots_of(model.variables) for key, value in slot.state.items()}

    state = hvd.elastic.KerasState(model, keras.optimizers.SGD(0.1))
    state.sync()  # newcomers have no such variables yet where it is unbound
    step()
    state.commit()
    before = kept()
    step()
    assert before and any((value != before[key]).any() for key, value in kept().items())
    state.restore()
    np.testing.assert_equal(kept(), before)


@pytest.mark.parametrize("how, inner", [({"backward_passes_per_step": 3}, {}), ({}, {"gradient_accumulation_steps": 3})],
                         ids=["passes", "Keras's"])
def test_elastic_state_amid_a_window(how, inner, monkeypatch):
    """Survivors keep what they have added up, newcomers begin with nothing, and the window ends on all together."""
    monkeypatch.setattr("hvd_quant.tensorflow.network.ELASTIC", True)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, **inner), compression="none", **how)
    optimizer.build(model.trainable_variables)
    sums = optimizer._accumulated_gradients if inner else optimizer._hvd_window.sums

    def one_pass():
        optimizer.apply([tf.fill(v.shape, RANK + 1.0) for v in model.trainable_variables])

    if RANK == 0:  # the others are newcomers
        one_pass()
    state = hvd.elastic.KerasState(model, optimizer)
    state.sync()
    one_pass()
    state.commit()
    before, committed = flat(model), [value.numpy() for value in sums]
    assert all((value == (2.0 if RANK == 0 else RANK + 1)).all() for value in committed)
    one_pass()
    assert_same_everywhere(flat(model))
    mean = (3 + sum(2.0 * (rank + 1) for rank in range(1, WORLD))) / WORLD
    np.testing.assert_allclose(before - flat(model), 0.1 * mean / (3 if inner else 1), rtol=1e-3)
    state.restore()
    np.testing.assert_array_equal(flat(model), before)
    for value, kept in zip(sums, committed):
        np.testing.assert_array_equal(value, kept)


def test_other_errors_than_horovods_leave_an_elastic_run():
    def fails(state):
        raise tf.errors.UnknownError(None, None, "the disk is full")

    state = hvd.elastic.KerasState(network(), keras.optimizers.SGD(0.1))
    with pytest.raises(tf.errors.UnknownError, match="the disk is full"):
        hvd.elastic.run(fails)(state)


@pytest.mark.parametrize("masked", [False, True])
def test_sync_batch_normalization(masked):
    """Against one worker with all the data; the workers' batches are of different sizes."""
    def batch(rank):
        random = np.random.default_rng(rank)
        x = (random.normal(size=(3 + 2 * rank, 4, 6)) * (1 + rank) + 100).astype(np.float32)
        return x, random.random(x.shape[:2]) < (0.6 if masked else 2)

    def run(layer, x, mask):
        x = tf.Variable(x)
        with tf.GradientTape() as tape:
            y = layer(x, training=True, mask=tf.constant(mask) if masked else None)
            loss = tf.reduce_sum(y**3 * tf.cast(mask, tf.float32)[..., None])
        return [y.numpy(), *(g.numpy() for g in tape.gradient(loss, [x, layer.gamma.value, layer.beta.value]))]

    sync, plain = hvd.SyncBatchNormalization(momentum=0.5), keras.layers.BatchNormalization(momentum=0.5)
    parts = [batch(rank) for rank in range(WORLD)]
    y, dx, dgamma, dbeta = run(sync, *parts[RANK])
    expected = run(plain, *(np.concatenate(arrays) for arrays in zip(*parts)))
    start = sum(len(x) for x, _ in parts[:RANK])
    here = slice(start, start + len(y))
    np.testing.assert_allclose(y, expected[0][here], atol=1e-3)
    np.testing.assert_allclose(dx, expected[1][here], atol=1e-3)
    np.testing.assert_allclose(on_all(dgamma).sum(0), expected[2], rtol=1e-3)
    np.testing.assert_allclose(on_all(dbeta).sum(0), expected[3], rtol=1e-3, atol=1e-2)
    for a, b in zip((sync.moving_mean, sync.moving_variance), (plain.moving_mean, plain.moving_variance)):
        assert_same_everywhere(a.numpy())
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4)
    with pytest.raises(ValueError, match="fused=True is not supported"):
        hvd.SyncBatchNormalization(fused=True)


def test_sync_batch_normalization_in_a_saved_model(tmp_path):
    model = keras.Sequential([keras.layers.Input((20,)), hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization(),
                              keras.layers.Dense(20)])
    for w in model.weights:
        w.assign(np.ones(w.shape))
    x, y = data()
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TOPK), xy=(x + RANK, y))
    assert_same_everywhere(flat(model))
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(flat(keras.models.load_model(tmp_path / "model.keras")), flat(model))


def test_horovods_functions():
    value = np.full((2, 3), RANK + 1.0, np.float32)
    np.testing.assert_allclose(hvd.allreduce(value, name="a"), np.full((2, 3), (WORLD + 1) / 2))
    np.testing.assert_allclose(hvd.allreduce(value, name="b", op=hvd.Sum, compression=hvd.Compression.fp16),
                               np.full((2, 3), WORLD * (WORLD + 1) / 2))
    np.testing.assert_allclose(hvd.broadcast(keras.Variable(value), 0, name="c"), np.ones((2, 3)))
    assert hvd.allgather(value, name="d").shape == (2 * WORLD, 3)
    scattered = hvd.reducescatter(np.full(WORLD, RANK + 1.0), name="e", op=hvd.Sum)
    np.testing.assert_allclose(scattered, [WORLD * (WORLD + 1) / 2])
    variables = [keras.Variable(value), tf.Variable(value)]
    hvd.broadcast_variables(variables, root_rank=0)
    for v in variables:
        np.testing.assert_array_equal(v.numpy(), np.ones((2, 3)))
