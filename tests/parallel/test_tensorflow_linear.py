"""Random-k and PowerSGD among workers, in graphs and eagerly: as their formulas say, and what happens where something goes
wrong."""

import dataclasses
import time

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
from hvd_quant import get_compressor, registry
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.reducer import Reducer
from tests.conftest import LINEAR
from tests.linear import MERGING, assert_close, assert_sent, gradient, noting, results, simulation
from tests.parallel.tensorflow_workers import RANK, WORLD, assert_same_everywhere, every

KEEPING = {spec: c for spec, c in LINEAR.items() if c.memory == "error_feedback"}
SHAPES = {"w": (24, 5, 7), "v": (40, 30), "b": (33,)}


def variables(shapes=SHAPES, dtype=tf.float32):
    return [tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in shapes.items()]


def step_of(compressor, in_graph=True, op=hvd.Average):
    """A reducer, and a function that reduces the gradients of a step, by name, changed by ``change``."""
    weights = variables()
    reducer = Reducer(compressor, weights, name="linear", op=op)

    def reduce(grads):
        return reducer.reduce(grads, weights)

    run = tf.function(reduce) if in_graph else reduce

    def exchange(step, change=lambda grads: None):
        grads = [gradient(step, RANK, shape) for shape in SHAPES.values()]
        change(dict(zip(SHAPES, grads)))
        return dict(zip(SHAPES, (g.numpy() for g in run([tf.constant(g) for g in grads]))))

    return reducer, exchange


def states(reducer):
    return {name: {key: value.numpy() for key, value in slot.state.items()} for name, slot in reducer.state.slots.items()}


def assert_same_states(found, expected):
    for name in expected:
        assert found[name].keys() == expected[name].keys()
        for key in expected[name]:
            np.testing.assert_array_equal(found[name][key], expected[name][key])


@every(LINEAR | MERGING)
@pytest.mark.parametrize("op, in_graph", [(hvd.Average, True), (hvd.Sum, False)], ids=["average", "sum"])
def test_twenty_steps_are_the_formulas(compressor, op, in_graph, monkeypatch):
    """In what is added up, what optimizers get, and what is kept."""
    (reducer, exchange), sent = step_of(compressor, in_graph, op), {}

    def note(name, vector):
        def keep(array):
            sent.setdefault(name, []).append(array.copy().ravel())
            return array.size

        tf.numpy_function(keep, [vector], tf.int64)

    monkeypatch.setattr(type(compressor), "rounds", noting(type(compressor).rounds, note))
    simulated = {name: simulation(compressor, name, shape, WORLD) for name, shape in SHAPES.items()}
    if compressor.name == "powersgd":
        del simulated["b"]
    for step in range(20):
        sent.clear()
        reduced = exchange(step)
        assert sent.keys() == simulated.keys()
        for name, expected in simulated.items():
            if compressor.merge == "none":
                assert_same_everywhere(reduced[name])
            mean = results(expected, [gradient(step, rank, SHAPES[name]) for rank in range(WORLD)])[RANK]
            assert_sent(expected, RANK, sent[name])
            assert_close(compressor, reduced[name], mean * np.float32(1 if op == hvd.Average else WORLD), exact=WORLD == 2)
    for name, state in states(reducer).items():
        assert state.keys() == (simulated[name].state(RANK).keys() if name in simulated else set())
        for key, value in state.items():
            assert_close(compressor, value, simulated[name].state(RANK)[key], exact=WORLD == 2)
    stats = reducer.stats()
    assert set(stats["exchanges"]["allreduce"]) == simulated.keys()
    assert stats["dense_bytes"] == round(20 * 8 * (840 + 1200 + 33) * (WORLD - 1) / WORLD)


@every(KEEPING)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_on_one_worker_makes_the_step_void_on_all(compressor, bad):
    (reducer, exchange), (untouched, undisturbed) = step_of(compressor), step_of(compressor)
    for step in range(2):
        exchange(step)
        undisturbed(step)

    def spoil(grads):
        if RANK == WORLD - 1:
            grads["v"][3, 3] = bad

    assert all(np.isnan(grad).all() for grad in exchange(2, spoil).values())
    assert_same_states(states(reducer), states(untouched))
    assert reducer.stats()["void_tensors"] == 1
    np.testing.assert_equal(exchange(3), undisturbed(3))  # all is as if that step had not been


def test_workers_that_draw_different_entries_are_told():
    reducer, exchange = step_of(get_compressor("randomk:min_numel=0"))
    exchange(0)
    if RANK == 0:
        for slot in reducer.state.slots.values():
            slot.step.assign_add(1)
    with pytest.raises(tf.errors.DataLossError, match="the workers drew different entries"):
        exchange(1)
    hvd.allgather_object(0, name="after")


class OwnHalf(registry.compressor_class("fp16")):
    """A user's, which TensorFlow calls on the host and which travels in payloads for that."""


class OwnSums(registry.compressor_class("randomk")):
    """One that has no payloads."""


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_worker_that_can_not_go_on_is_named_by_all(in_graph, monkeypatch):
    reducer, exchange = step_of(OwnHalf(min_numel=0), in_graph)
    exchange(0)

    def fails(self, ops, grad, state, params, info):
        if info.rank == WORLD - 1 and info.name == "v":
            raise MemoryError("no room")
        return super(OwnHalf, self).encode(ops, grad, state, params, info)

    hvd.allgather_object(0, name="before")
    start = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(OwnHalf, "encode", fails)
        with pytest.raises(tf.errors.DataLossError,
                           match=f"v: worker {WORLD - 1} failed to encode its gradient: MemoryError: no room"):
            exchange(1)
    assert time.monotonic() - start < 5
    for name, grad in exchange(2).items():
        assert_same_everywhere(grad)
        mean = np.mean([gradient(2, rank, SHAPES[name]) for rank in range(WORLD)], axis=0)
        np.testing.assert_allclose(grad, mean, rtol=2e-3, atol=0.05)
    assert hvd.allgather_object(int(reducer.state.slots["v"].step), name="steps") == [2] * WORLD


def test_sums_of_ones_own_that_have_no_payloads_are_told_by_all():
    exchange = step_of(OwnSums(min_numel=0))[1]
    with pytest.raises(tf.errors.DataLossError,
                       match="failed to encode its gradient: NotImplementedError: OwnSums does not implement enc"):
        exchange(0)
    hvd.allgather_object(0, name="after")


@pytest.mark.skipif(WORLD > 2, reason="the launches with two workers run this")
@every(KEEPING)
def test_types_shapes_and_the_warm_up(compressor):
    shapes = {str(i): shape for i, shape in enumerate([(), (0,), (3, 0), (1,), (9,), (64, 9), (8, 8, 3, 3)])}
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        weights = variables(shapes, dtype)
        reducer = Reducer(dataclasses.replace(compressor, warmup=1), weights, name="warm")
        for step in range(2):
            results = reducer.reduce([tf.fill(v.shape, tf.cast(RANK + 1.0, dtype)) for v in weights], weights)
            assert [(result.dtype, result.shape) for result in results] == [(dtype, v.shape) for v in weights]
            whole = tf.concat([tf.reshape(tf.cast(result, tf.float32), [-1]) for result in results], 0)
            assert_same_everywhere(whole)
            if step == 0:
                np.testing.assert_allclose(whole, np.full(whole.shape, (WORLD + 1) / 2))
        assert set(reducer.stats()["exchanges"]) == {"dense", "allreduce"}


def test_in_a_graph_of_tensorflow_1():
    for compressor in KEEPING.values():
        expected = simulation(compressor, "v", SHAPES["v"], WORLD)
        with tf.Graph().as_default():
            weight = tf.compat.v1.get_variable("v", SHAPES["v"], use_resource=True)
            reducer, given = Reducer(compressor, [weight], name="linear"), tf.compat.v1.placeholder(tf.float32, SHAPES["v"])
            (reduced,) = reducer.reduce([given], [weight])
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for step in range(3):
                    found = session.run(reduced, {given: gradient(step, RANK, SHAPES["v"])})
                    mean = expected.reduce([gradient(step, rank, SHAPES["v"]) for rank in range(WORLD)])
                    assert_close(compressor, found, mean, exact=WORLD == 2)


def test_hosts_do_not_matter(monkeypatch):
    if WORLD != 4:
        pytest.skip("the launch with four workers runs this")
    monkeypatch.setattr(network, "_places", lambda: [(rank % 2, rank // 2) for rank in range(WORLD)])
    for spec in ("randomk:min_numel=0", "powersgd:min_numel=0"):
        (flat, flatly), (hosted, by_host) = step_of(get_compressor(spec)), step_of(get_compressor(f"{spec},hierarchical=true"))
        for step in range(2):
            expected, found = flatly(step), by_host(step)
            for name in SHAPES:
                np.testing.assert_array_equal(found[name], expected[name])
        assert_same_states(states(hosted), states(flat))
