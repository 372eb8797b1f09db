"""Distributed optimizers of tf_keras, both kinds: a launch of its own with TF_USE_LEGACY_KERAS=1."""

import os
import warnings

import numpy as np
import pytest
import tensorflow as tf

if os.environ.get("TF_USE_LEGACY_KERAS") != "1":
    pytest.skip("not run: TF_USE_LEGACY_KERAS is not set in this launch", allow_module_level=True)

import hvd_quant.keras as hvd
from hvd_quant.tensorflow.variables import make_variables
from tests.parallel.keras_workers import (
    RANK,
    TOPK,
    WORLD,
    assert_same_everywhere,
    assert_what_is_unfrozen_late_is_reduced_or_refused,
    everyones,
    fit,
    flat,
    keras,
    network,
    residuals,
)

MEAN = (WORLD + 1) / 2  # of RANK + 1
KINDS = {"new": keras.optimizers, "old": keras.optimizers.legacy}
both_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
Scaler = keras.mixed_precision.LossScaleOptimizer


@both_kinds
@pytest.mark.parametrize("compression", ["none", "fp16", TOPK])
def test_replicas_that_see_different_data_stay_the_same(kind, compression):
    model = network()
    optimizer = hvd.DistributedOptimizer(kind.SGD(0.1, momentum=0.9), compression=compression)
    fit(model, optimizer)
    assert_same_everywhere(flat(model))
    assert (optimizer.compression_stats()["compression_ratio"] > 1.5) == (compression != "none")
    if compression == "none":
        reference = network()
        fit(reference, kind.SGD(0.1, momentum=0.9), xy=everyones(), batch_size=8 * WORLD)
        np.testing.assert_allclose(flat(model), flat(reference), atol=1e-6)


@both_kinds
def test_gradients_of_a_tape_of_ones_own_are_reduced_when_they_are_applied(kind):
    v = tf.Variable(tf.zeros(3))
    optimizer = hvd.DistributedOptimizer(kind.SGD(1.0, clipvalue=1.0), compression="none")
    for in_graph in (False, True):
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v) * (30.0 if RANK == 0 else -29.0)
            optimizer.apply_gradients(zip(tape.gradient(loss, [v]), [v]))

        before = v.numpy()
        (tf.function(step) if in_graph else step)()
        mean = 30 - 59 * (WORLD - 1) / WORLD
        np.testing.assert_allclose(before - v.numpy(), np.clip(mean, -1, 1), rtol=1e-5)
    pairs = optimizer._compute_gradients(lambda: tf.reduce_sum(v) * (RANK + 1.0), [v])
    np.testing.assert_allclose(pairs[0][0], MEAN)
    before = v.numpy()
    optimizer.apply_gradients(pairs)  # not reduced again: op=Average would not tell
    np.testing.assert_allclose(before - v.numpy(), 1)
    assert optimizer.compression_stats()["steps"] == 3


@both_kinds
@pytest.mark.parametrize("average", [True, False])
def test_passes_are_added_up_and_local_variables_stay_local(kind, average):
    """As Horovod tests it."""
    x, y, unused = tf.Variable([0.0]), tf.Variable([0.0, 0.0]), tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(kind.SGD(1.0), sparse_as_dense=True, backward_passes_per_step=4,
                                         average_aggregated_gradients=average)
    optimizer.register_local_var(x)

    @tf.function
    def step():
        pairs = optimizer._compute_gradients(lambda: -(RANK + 1.0) * (x + tf.gather(y, [0])), [x, y, unused])
        optimizer.apply_gradients(pairs[:2])

    for i in range(10):
        step()
        factor = (i + 1) // 4 * (1 if average else 4)
        np.testing.assert_allclose(x.numpy(), [factor * (RANK + 1) / WORLD])
        np.testing.assert_allclose(y.numpy(), [factor * MEAN, 0])
        assert int(optimizer.iterations) == i + 1


@both_kinds
@pytest.mark.parametrize("passes, scaled", [(1, False), (2, False), (1, True)], ids=["steps", "passes", "scaled"])
def test_a_gradient_that_is_missing_on_some_workers_counts_as_0(kind, passes, scaled):
    found = []
    for given_as_zeros in (False, True):
        a, b, unused = (tf.Variable(tf.zeros(500)) for _ in range(3))
        optimizer = hvd.DistributedOptimizer(kind.SGD(1.0), compression=TOPK, backward_passes_per_step=passes)
        if scaled:
            optimizer = Scaler(optimizer, dynamic=False, initial_scale=2.0)
        for step in range(4):
            x = tf.constant(np.random.default_rng([step, RANK]).normal(size=500).astype(np.float32))
            weight = 1.0 if RANK == step % WORLD else 0.0 if given_as_zeros else None
            if scaled:
                optimizer.minimize(lambda x=x, weight=weight: tf.reduce_sum(a * x) + (
                    0.0 if weight is None else tf.reduce_sum(b * x * weight)), [a, b, unused])
            else:
                optimizer.apply_gradients([(x, a), (None if weight is None else x * weight, b), (None, unused)])
        found.append(np.stack([a, b, unused]))
        assert_same_everywhere(found[-1])
    np.testing.assert_array_equal(*found)


@both_kinds
@pytest.mark.parametrize("nesting", ["inside", "outside"])
@pytest.mark.parametrize("in_graph, bad", [(False, float("nan")), (True, float("inf")), (True, float("-inf"))])
def test_an_overflow_on_one_worker_voids_the_step_on_all(kind, nesting, in_graph, bad):
    def scaler(optimizer):
        return Scaler(optimizer, initial_scale=1024.0, dynamic_growth_steps=3)

    inner = kind.SGD(0.1)
    optimizer = (hvd.DistributedOptimizer(scaler(inner), compression=TOPK) if nesting == "inside"
                 else scaler(hvd.DistributedOptimizer(inner, compression=TOPK)))
    reference = hvd.DistributedOptimizer(kind.SGD(0.1), compression=TOPK)
    a, b, plain = (tf.Variable(tf.zeros(500)) for _ in range(3))

    def step(x, weight):
        optimizer.minimize(lambda: tf.reduce_sum(a * x * weight) + tf.reduce_sum(b * x), [a, b])

    run, scales = tf.function(step) if in_graph else step, []
    for i in range(8):
        scales.append(float(optimizer.loss_scale))
        before = a.numpy(), b.numpy(), residuals(optimizer.inner_optimizer) if i else None
        x = tf.constant(np.random.default_rng(10 * i + RANK).normal(size=500).astype(np.float32))
        run(x, tf.tensor_scatter_nd_update(tf.ones(500), [[3]], [bad if i == 2 and RANK == WORLD - 1 else 1.0]))
        assert_same_everywhere(np.array([optimizer.loss_scale, optimizer.dynamic_counter], np.float32))
        if i == 2:
            np.testing.assert_array_equal(before[:2], [a.numpy(), b.numpy()])
            for name, residual in residuals(optimizer.inner_optimizer).items():
                np.testing.assert_allclose(residual, before[2][name], atol=1e-6)
        else:
            reference.minimize(lambda: tf.reduce_sum(plain * x), [plain])
    assert_same_everywhere(np.concatenate([a.numpy(), b.numpy()]))
    np.testing.assert_allclose(a.numpy(), plain.numpy(), atol=1e-5)
    assert scales == [1024, 1024, 1024, 512, 512, 512, 1024, 1024]


@both_kinds
def test_layers_that_are_unfrozen_late(kind):
    assert_what_is_unfrozen_late_is_reduced_or_refused(lambda: hvd.DistributedOptimizer(kind.SGD(0.1), compression=TOPK))


@both_kinds
def test_models_are_saved_for_those_who_have_the_plugin_and_those_who_have_not(kind, tmp_path):
    model = network()
    fit(model, hvd.DistributedOptimizer(kind.Adam(0.01), compression=TOPK))
    names = ["model.h5"] + ["model.keras"] * (kind is keras.optimizers)
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that .h5 is an old format
            model.save(tmp_path / name)
        plain = keras.models.load_model(tmp_path / name)
        assert not hasattr(plain.optimizer, "compression_stats") and isinstance(plain.optimizer, kind.Adam)
        again = hvd.load_model(tmp_path / name, compression=TOPK, legacy_opts=kind is not keras.optimizers)
        for optimizer in (plain.optimizer, again.optimizer):
            for ours, theirs in zip(optimizer.variables(), model.optimizer.variables(), strict=True):
                np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
        fit(again)
        assert_same_everywhere(flat(again))
        assert again.optimizer.compression_stats()["compression_ratio"] > 2


@both_kinds
def test_a_checkpoint_a_worker_resumes_bit_for_bit(kind, tmp_path):
    def fresh():
        return network(), hvd.DistributedOptimizer(kind.SGD(0.1, momentum=0.9), compression=TOPK)

    model, optimizer = fresh()
    fit(model, optimizer)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / f"worker{RANK}")
    fit(model)
    again, other = fresh()
    tf.train.Checkpoint(model=again, optimizer=other).restore(path)
    fit(again, other)
    np.testing.assert_array_equal(flat(again), flat(model))


@both_kinds
def test_what_an_optimizer_was_given_is_kept(kind):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    v = tf.Variable([0.0])
    for rate, expected in ((schedule, [0.1, 0.15]), (0.1, [0.1, 0.2])):
        optimizer = hvd.DistributedOptimizer(kind.SGD(rate), compression="none")
        assert optimizer.get_config()["name"] == "SGD"
        v.assign([0.0])
        for total in expected:
            optimizer.minimize(lambda: tf.reduce_sum(v), [v])
            np.testing.assert_allclose(-v.numpy(), total, rtol=1e-5)
        copy = optimizer.__class__.from_config(optimizer.get_config())
        assert hasattr(copy, "compression_stats") and copy.get_config()["name"] == "SGD"


@both_kinds
def test_elastic_state_amid_a_window(kind):
    model = network()
    optimizer = hvd.DistributedOptimizer(kind.SGD(0.1), compression=TOPK, backward_passes_per_step=3)
    if RANK == 0:  # the others are newcomers
        make_variables(optimizer, model.trainable_variables)
        optimizer._hvd_window.count.assign(2)
        optimizer._hvd_window.sums[0].assign_add(tf.ones([20, 30]))
    hvd.elastic.KerasState(model, optimizer).sync()
    assert int(optimizer._hvd_window.count) == 2 and (optimizer._hvd_window.sums[0].numpy() == (1 if RANK == 0 else 0)).all()


@both_kinds
def test_elastic_state(kind):
    model = network(seed=RANK)
    optimizer = hvd.DistributedOptimizer(kind.SGD(0.1, momentum=0.9), compression=TOPK)
    model.compile(optimizer, "mse")
    state = hvd.elastic.KerasState(model, batch=20 + RANK)
    state.sync()
    assert_same_everywhere(flat(model))
    assert state.batch == 20
    fit(model, callbacks=[hvd.elastic.CommitStateCallback(state, 2), hvd.elastic.UpdateBatchStateCallback(state)])
    state.commit()
    committed, kept = flat(model), residuals(optimizer)
    fit(model)
    state.restore()
    np.testing.assert_array_equal(flat(model), committed)
    for name, residual in residuals(optimizer).items():
        np.testing.assert_array_equal(residual, kept[name])


def test_what_can_not_work_is_refused_in_one_sentence():
    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD())
    for again in (distributed, Scaler(distributed)):
        with pytest.raises(ValueError, match="is distributed already"):
            hvd.DistributedOptimizer(again)
    v = tf.Variable([0.0])
    scaled = hvd.DistributedOptimizer(Scaler(keras.optimizers.SGD()), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="backward_passes_per_step=2 can't be combined with tf_keras's LossScaleOptim"):
        scaled.minimize(lambda: v * 1.0, [v])


def test_layers():
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

    assert hvd.SyncBatchNormalization is SyncBatchNormalization
    local = network()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[local.layers[-1]])
    fit(local, optimizer, batches=1)
    assert_same_everywhere(np.concatenate([w.ravel() for w in local.layers[0].get_weights()]))
    assert len(optimizer.compression_stats()["exchanges"]["dense"]) == 2


@both_kinds
def test_a_checkpoint_that_is_restored_before_the_first_step_counts_on(kind, tmp_path):
    def compiled():
        model = network()
        model.compile(hvd.DistributedOptimizer(kind.Adam(0.01), compression=TOPK), "mse")
        return model

    straight, first, second = compiled(), compiled(), compiled()
    for model, epochs in ((straight, 2), (first, 1)):
        fit(model, epochs=epochs)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).write(str(tmp_path / f"of-{RANK}"))
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).read(path)
    fit(second)
    assert int(second.optimizer.iterations) == int(straight.optimizer.iterations) == 8
    np.testing.assert_array_equal(flat(second), flat(straight))


def test_what_has_no_weight_decay_still_has_none():
    model = network()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    distributed = hvd.DistributedOptimizer(optimizer)
    distributed.build(model.trainable_variables)
    assert [distributed._use_weight_decay(v) for v in model.trainable_variables] == [True, False, True, False]
