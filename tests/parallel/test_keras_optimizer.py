"""The arguments of DistributedOptimizer, and loss scaling, on gradients that are given one by one."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

if not tf.keras.layers.Layer.__module__.startswith("keras."):
    pytest.skip("not run: this launch is of tf_keras", allow_module_level=True)

import keras

import hvd_quant.keras as hvd
from tests.conftest import ERROR_FEEDBACK
from tests.parallel.keras_workers import (
    RANK,
    TOPK,
    WORLD,
    assert_same_everywhere,
    assert_what_is_unfrozen_late_is_reduced_or_refused,
    data,
    every,
    fit,
    flat,
    network,
    residuals,
)

MEAN = (WORLD + 1) / 2  # of RANK + 1


class Adding(keras.optimizers.Optimizer):
    """variable += gradient"""

    def __init__(self, learning_rate=1.0, **kwargs):
        super().__init__(learning_rate, **kwargs)

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(variable, gradient)


def variable(*shape, name="w"):
    return keras.Variable(np.zeros(shape, np.float32), name=name)


@pytest.mark.parametrize("how, expected", [
    ({}, MEAN), ({"op": hvd.Sum}, MEAN * WORLD), ({"gradient_predivide_factor": 4.0}, MEAN), ({"groups": 1}, MEAN),
    ({"num_groups": 2}, MEAN), ({"groups": "list"}, MEAN), ({"name": "other", "device_dense": "cpu"}, MEAN),
], ids=str)
@pytest.mark.parametrize("compression", ["none", "onebit:min_numel=0"])
def test_arguments(compression, how, expected):
    variables = [variable(7, name=name) for name in "abc"]
    if how.get("groups") == "list":
        how = {"groups": [[variables[0], variables[2].value]]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        optimizer = hvd.DistributedOptimizer(Adding(), compression=compression, **how)
    optimizer.apply([tf.fill([7], RANK + 1.0)] * 3, variables)
    for v in variables:
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)


def test_gradients_are_clipped_when_they_are_reduced():
    for kind, expected in (("clipnorm", 1.0), ("global_clipnorm", 1.0), ("clipvalue", 0.5)):
        v = variable(1)
        optimizer = hvd.DistributedOptimizer(Adding(**{kind: expected}))
        optimizer.apply([tf.constant([30.0 if RANK == 0 else -10.0])], [v])
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)  # -10 and 30, clipped first, would average to 0


@pytest.mark.parametrize("average", [True, False])
def test_passes_are_added_up_and_local_variables_stay_local(average):
    """As Horovod tests it: what passes since the last exchange added up to, reduced, and iterations counts passes."""
    x, y, local = variable(1, name="x"), variable(2, name="y"), variable(2, name="local")
    optimizer = hvd.DistributedOptimizer(Adding(), backward_passes_per_step=4, average_aggregated_gradients=average)
    optimizer.register_local_var(local)

    @tf.function
    def step():
        with tf.GradientTape() as tape:  # of tf.gather, tf.IndexedSlices
            loss = x.value + (RANK + 1.0) * (tf.gather(y.value, [0]) + tf.gather(local.value, [1]))
        optimizer.apply_gradients(zip(tape.gradient(loss, [x.value, y.value, local.value]), [x, y, local]))

    for i in range(10):
        step()
        factor = (i + 1) // 4 * (1 if average else 4)
        np.testing.assert_allclose(x.numpy(), [factor])
        np.testing.assert_allclose(y.numpy(), [factor * MEAN, 0])
        np.testing.assert_allclose(local.numpy(), [0, factor * (RANK + 1) / WORLD])
        assert int(optimizer.iterations) == i + 1
    assert optimizer.compression_stats()["exchanges"] == {"dense": ["x", "y"]}


def test_an_infinite_pass_is_gone_after_its_window():
    v = variable(1)
    optimizer = hvd.DistributedOptimizer(Adding(clipvalue=1.0), backward_passes_per_step=2)
    for i in range(4):
        optimizer.apply([tf.constant([float("inf") if i == 0 else 0.25])], [v])
    np.testing.assert_allclose(v.numpy(), [1.5])


@pytest.mark.parametrize("passes", [1, 2])
def test_a_gradient_that_is_missing_on_some_workers_counts_as_0(passes):
    found = []
    for given_as_zeros in (False, True):
        variables = [variable(500, name=name) for name in "abc"]
        optimizer = hvd.DistributedOptimizer(Adding(), compression=TOPK, backward_passes_per_step=passes)
        for step in range(4):
            x = given(step, 1.0)
            other = x if RANK == step % WORLD else tf.zeros(500) if given_as_zeros else None
            optimizer.apply([x, other, None], variables)
        found.append(np.stack([v.numpy() for v in variables]))
        assert_same_everywhere(found[-1])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("scale", [True, False])
def test_local_layers(scale):
    model = network()
    before = [w.numpy() for w in model.weights]
    optimizer = hvd.PartialDistributedOptimizer(Adding(), local_layers=model.layers[0], scale_local_gradients=scale)
    optimizer.apply([tf.fill(w.shape, RANK + 1.0) for w in model.trainable_variables], model.trainable_variables)
    for i, (w, old) in enumerate(zip(model.weights, before)):
        expected = (RANK + 1) / (WORLD if scale else 1) if i < 2 else MEAN
        np.testing.assert_allclose(w.numpy() - old, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="local_layers must be Keras layers; it holds 'dense'"):
        hvd.PartialDistributedOptimizer(Adding(), local_layers=["dense"])


def test_layers_that_are_unfrozen_late():
    assert_what_is_unfrozen_late_is_reduced_or_refused(
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TOPK))


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense):
    table = keras.layers.Embedding(50, 100, embeddings_initializer="zeros")
    table.build()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="natural:min_numel=0,exchange=allgather",
                                         sparse_as_dense=as_dense)
    rows = [[0, 0, 2], [2, 5]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table(tf.constant(rows[RANK % 2])))
            optimizer.apply(tape.gradient(loss, table.trainable_variables), table.trainable_variables)
    expected = np.zeros(50)
    for r in range(WORLD):
        np.subtract.at(expected, rows[r % 2], 2 / WORLD)
    np.testing.assert_allclose(table.embeddings.numpy(), np.tile(expected[:, None], 100), atol=1e-6)
    assert list(optimizer.compression_stats()["exchanges"]) == ["allgather" if as_dense else "sparse"]


def test_a_process_set():
    sets = [hvd.add_process_set([r]) for r in range(WORLD)]
    try:
        for process_set, expected in ((sets[RANK], RANK + 1), (sets[0], RANK + 1), (hvd.global_process_set, MEAN)):
            v = variable(7)
            optimizer = hvd.DistributedOptimizer(Adding(), compression="onebit:min_numel=0", process_set=process_set)
            optimizer.apply([tf.fill([7], RANK + 1.0)], [v])
            np.testing.assert_allclose(v.numpy(), expected)
            rank = process_set.rank() if process_set.included() else None
            assert optimizer.compression_state_dict()["rank"] == rank
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)


# ------------------------------------------------------------------------------------------------------- loss scaling

NESTINGS = {
    "inside": lambda optimizer, **how: hvd.DistributedOptimizer(_scaler(optimizer), compression=TOPK, **how),
    "outside": lambda optimizer, **how: _scaler(hvd.DistributedOptimizer(optimizer, compression=TOPK, **how)),
}


def _scaler(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0, dynamic_growth_steps=3)


def given(step, scale, bad=None):
    gradient = np.random.default_rng(10 * step + RANK).normal(size=500).astype(np.float32) * np.float32(scale)
    if bad is not None and RANK == WORLD - 1:
        gradient[3] = bad
    return tf.constant(gradient)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_an_overflow_on_one_worker_voids_the_step_on_all(nesting, bad):
    a, b, optimizer = variable(500, name="a"), variable(500, name="b"), NESTINGS[nesting](keras.optimizers.SGD(0.1))
    plain = variable(500, name="plain")
    reference = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TOPK)
    scales = []
    apply = tf.function(lambda x, y: optimizer.apply([x, y], [a, b]))
    optimizer.build([a, b])
    for step in range(8):
        scale = float(optimizer.dynamic_scale)
        scales.append(scale)
        before = a.numpy(), b.numpy(), int(optimizer.iterations)
        apply(given(step, scale, bad if step == 2 else None), given(step, scale))
        assert_same_everywhere([float(optimizer.dynamic_scale), float(optimizer.step_counter)])
        if step == 2:
            np.testing.assert_array_equal(before[:2], [a.numpy(), b.numpy()])
            assert int(optimizer.iterations) == before[2]
        else:
            reference.apply([given(step, 1.0)], [plain])
    assert_same_everywhere(np.concatenate([a.numpy(), b.numpy()]))
    # What is kept doesn't depend on the scale, so the steps that count are those without one.
    np.testing.assert_allclose(a.numpy(), plain.numpy(), atol=1e-5)
    np.testing.assert_allclose(b.numpy(), plain.numpy(), atol=1e-5)
    assert scales == [1024, 1024, 1024, 512, 512, 512, 1024, 1024]


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("passes", [False, True], ids=["steps", "passes"])
def test_an_overflow_in_one_pass_voids_its_window_on_all(nesting, passes):
    if passes:
        optimizer = NESTINGS[nesting](keras.optimizers.SGD(0.1), backward_passes_per_step=2,
                                      average_aggregated_gradients=True)
    else:
        optimizer = NESTINGS[nesting](keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    plain = variable(500, name="plain")
    reference = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TOPK)
    v, scales = variable(500), []
    apply = tf.function(lambda grad: optimizer.apply([grad], [v]))
    optimizer.build([v])
    for step in range(12):
        scale = float(optimizer.dynamic_scale)
        scales.append(scale)
        before = v.numpy()
        apply(given(step, scale, float("inf") if step == 2 else None))
        assert_same_everywhere(float(optimizer.dynamic_scale))
        if step % 2 == 0 or step == 3:
            np.testing.assert_array_equal(before, v.numpy())
        else:
            reference.apply([(given(step - 1, 1.0) + given(step, 1.0)) / 2], [plain])
    assert_same_everywhere(v.numpy())
    np.testing.assert_allclose(v.numpy(), plain.numpy(), atol=1e-5)
    assert scales == [1024] * 4 + [512] * 6 + [1024] * 2
    assert int(optimizer.iterations) == (10 if passes else 5)  # as if the void window had not been


def test_mixed_float16_makes_a_scaler_of_its_own():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=TOPK)
    x, y = (array.copy() for array in data())
    y[8 + RANK:8 + 2 * RANK] = 1e30  # in the second batch, on all workers but the first
    fit(model, optimizer, xy=(x, y), epochs=2)
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer and model.optimizer.inner_optimizer is optimizer
    assert_same_everywhere(flat(model))
    assert_same_everywhere([float(v.numpy()) for v in model.optimizer.variables if v.shape == ()])
    assert float(model.optimizer.dynamic_scale) == 2**13 and int(optimizer.iterations) == 6
    assert np.isfinite(flat(model)).all() and optimizer.compression_stats()["void_tensors"] > 0


def test_a_local_variable_that_overflows_voids_the_step_on_all():
    shared, local = variable(5, name="shared"), variable(5, name="local")
    optimizer = _scaler(hvd.DistributedOptimizer(Adding()))
    optimizer.inner_optimizer.register_local_var(local)
    optimizer.apply([tf.fill([5], 1024.0), tf.fill([5], float("inf") if RANK == 0 else 1024.0)], [shared, local])
    assert float(optimizer.dynamic_scale) == 512 and (shared.numpy() == 0).all() and (local.numpy() == 0).all()
    optimizer.apply([tf.fill([5], 512.0), tf.fill([5], 512.0)], [shared, local])
    np.testing.assert_allclose(shared.numpy(), 1)


@every(ERROR_FEEDBACK)
def test_a_void_step_returns_every_codes_state(compressor):
    a, b = variable(5000, name="a"), variable(5000, name="b")
    optimizer = hvd.DistributedOptimizer(_scaler(keras.optimizers.SGD(0.1)), compression=compressor)
    gradient = tf.tile(given(0, 1024.0), [10])
    optimizer.apply([gradient, gradient], [a, b])
    before = residuals(optimizer)
    assert any(residual.any() for residual in before.values())
    optimizer.apply([gradient * float("inf"), gradient], [a, b])
    norms = optimizer.compression_stats(residual_norms=True)["residual_norms"]
    for name, residual in residuals(optimizer).items():
        np.testing.assert_allclose(residual, before[name], atol=1e-6)
        np.testing.assert_allclose(norms[name], np.linalg.norm(residual), rtol=1e-5)
