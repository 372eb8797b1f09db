"""``tf.IndexedSlices``: compressed by row, with error feedback by row, or dense where that is smaller."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
import hvd_quant.tensorflow.keras as hvd_keras
from hvd_quant import get_compressor
from hvd_quant.compressors import OneBit
from hvd_quant.exchange.rows import Table
from hvd_quant.tensorflow.reducer import Reducer
from tests.parallel.sparse_in_numpy import CODES, ROWS, WIDTH, Workers, given, of_all_rows
from tests.parallel.tensorflow_workers import RANK, WORLD, assert_same_everywhere, every
from tests.parallel.test_tensorflow_exchanges import Own

ONEBIT = "onebit:min_numel=0,exchange=allgather"


def reducer_of(compression, dtype=tf.float32, in_graph=True, **how):
    """A reducer, and a step that it makes of a gradient's indices and values."""
    p = tf.Variable(tf.zeros([ROWS, WIDTH], dtype), name="p")
    reducer = Reducer(compression, [p], name="test", **how)

    def reduce(indices, values):
        return reducer.reduce([tf.IndexedSlices(values, indices, tf.constant([ROWS, WIDTH]))], [p])[0]

    run = tf.function(reduce, [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, WIDTH], dtype)]) if in_graph else reduce

    def step(gradient):
        grad = run(tf.constant(gradient[0], tf.int32), tf.cast(gradient[1], dtype))
        assert grad.dtype == dtype and (not isinstance(grad, tf.IndexedSlices) or grad.indices.dtype == tf.int32)
        return tf.cast(tf.convert_to_tensor(grad), tf.float32).numpy()

    return reducer, step


def residual(reducer):
    return reducer.state_dict()["tensors"]["p"]["state"]["residual"].reshape(ROWS, WIDTH)


@every({**{name: CODES[name] for name in ("fp16", "onebit", "qsgd", "topk", "model")}, "own": Own(min_numel=0, exchange="allgather")})
def test_rows_are_compressed_as_numpy_does_it(compressor):
    op = hvd.Sum if compressor.name == "onebit" else hvd.Average
    reducer, step = reducer_of(compressor, op=op, in_graph=compressor.name != "qsgd")
    workers = Workers(compressor, "p", WORLD)
    for i in range(4):
        expected = workers.reduce([given(i, rank) for rank in range(WORLD)], i) / (WORLD if op == hvd.Average else 1)
        grad = step(given(i, RANK))
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-5)
        assert_same_everywhere(grad)
    if compressor.memory == "error_feedback":
        np.testing.assert_allclose(residual(reducer), workers.kept[RANK], rtol=1e-5, atol=1e-5)
    stats = reducer.stats()
    assert stats["exchanges"] == {"sparse": ["p"]} and stats["wire_bytes"] == workers.wire_bytes[RANK]
    (bucket,) = stats["buckets"].values()
    assert bucket["compressor"].startswith(compressor.name)


@pytest.mark.parametrize("spec", [ONEBIT, "onebit:min_numel=0,exchange=sra"])
def test_more_rows_than_a_dense_gradient_is_worth_travel_dense(spec):
    compressor = get_compressor(spec)
    reducer, step = reducer_of(compressor)
    workers = Workers(compressor, "p", WORLD)
    for i in (0, 1, 2):
        gradients = [of_all_rows(i, rank) if i == 1 else given(i, rank) for rank in range(WORLD)]
        expected = workers.reduce(gradients, i, dense=i == 1) / WORLD
        grad = step(gradients[RANK])
        assert_same_everywhere(grad)
        if i != 1 or compressor.exchange != "sra":  # what an owner keeps is not in there
            np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-5)
        if compressor.exchange == "allgather":
            counted = workers.wire_bytes[RANK] + ((8 + compressor.payload_bytes(workers.info)) * (WORLD - 1) if i else 0)
            assert reducer.stats()["wire_bytes"] == counted
            np.testing.assert_allclose(residual(reducer), workers.kept[RANK], rtol=1e-5, atol=1e-5)


def flipped(payload):
    payload[40] ^= 4
    return payload


pack = Table.pack
DAMAGE = {
    "outside": (lambda self, rows: pack(self, rows + ROWS), f"the tensor has {ROWS}"),
    "flipped": (lambda self, rows: flipped(pack(self, rows)), "checksum"),
}


@pytest.mark.parametrize("how, in_graph", [*((how, True) for how in (*DAMAGE, "encode", "values", "index")), ("values", False)])
def test_damage_and_failures_are_told_by_all_and_nothing_has_changed(how, in_graph, monkeypatch):
    reducer, step = reducer_of(ONEBIT, in_graph=in_graph)
    step(given(0, RANK))
    before, (indices, values), encode = residual(reducer), given(1, RANK), OneBit.encode

    def changed(*arguments):
        if not tf.executing_eagerly():
            return encode(*arguments)  # of the dense way, which is traced too
        if how == "encode":
            raise MemoryError("no room")
        return tf.constant(flipped(encode(*arguments).numpy()))

    told = {"encode": f"worker {WORLD - 1} failed to encode its gradient: MemoryError: no room", "values": "checksum",
            "index": f"worker {WORLD - 1} failed to encode its gradient: ValueError: the gradient has a row {ROWS}, the tensor has"}
    with monkeypatch.context() as patch:
        if RANK != WORLD - 1:
            pass
        elif how in ("encode", "values"):
            patch.setattr(OneBit, "encode", changed)
        elif how == "index":
            indices = np.append(indices[1:], ROWS)
        else:
            patch.setattr(Table, "pack", DAMAGE[how][0])
        with pytest.raises(tf.errors.DataLossError) as caught:
            step((indices, values))
    sentence = re.search(r"(p: .*?)(\n|\t|$| \[\[| \[Op)", str(caught.value)).group(1)
    assert (told.get(how) or DAMAGE[how][1]) in sentence
    assert len(set(hvd.allgather_object(sentence, name="sentence"))) == 1
    np.testing.assert_array_equal(residual(reducer), before)
    assert_same_everywhere(step(given(1, RANK)))


def test_a_gradient_that_is_not_finite_makes_all_rows_nan_and_leaves_no_trace():
    reducer, step = reducer_of(ONEBIT)
    step(given(0, RANK))
    before, (indices, values) = residual(reducer), given(2, RANK)
    values[:1, 3] = np.inf
    grad = step((indices, values))
    touched = sorted({row for rank in range(WORLD) for row in given(2, rank)[0]})
    assert np.isnan(grad[touched]).all() and np.isnan(grad).sum() == len(touched) * WIDTH
    np.testing.assert_array_equal(residual(reducer), before)
    assert reducer.stats()["void_tensors"] == 1


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float64])
def test_other_types(dtype):
    _, step = reducer_of(ONEBIT, dtype)
    _, reference = reducer_of(ONEBIT)
    for i in range(2):
        indices, values = given(i, RANK)
        values = tf.cast(tf.cast(values, dtype), tf.float32)
        np.testing.assert_allclose(step((indices, values)), reference((indices, values)), atol=1e-5 if dtype == tf.float64 else 0.05)


@pytest.mark.parametrize("n", [0, 1])
def test_rows_of_one_worker_and_of_none(n):
    _, step = reducer_of(ONEBIT)
    for _ in range(2):
        grad = step(([7] * n, np.ones((n, WIDTH))) if RANK == WORLD - 1 else ([], np.zeros((0, WIDTH))))
        np.testing.assert_allclose(grad[7], np.full(WIDTH, n / WORLD), rtol=1e-6)
        assert np.count_nonzero(grad) == n * WIDTH


def test_steps_of_a_warm_up_go_as_they_are_and_leave_nothing():
    reducer, step = reducer_of(f"{ONEBIT},warmup=2")
    for i in range(3):
        grad, exact = step(given(i, RANK)), np.zeros((ROWS, WIDTH))
        for rank in range(WORLD):
            np.add.at(exact, given(i, rank)[0], given(i, rank)[1] / WORLD)
        assert np.allclose(grad, exact, atol=1e-5) == (i < 2) and residual(reducer).any() == (i == 2 and RANK % 4 != 3)


def test_what_another_code_has_kept_of_rows_goes_along(monkeypatch):
    reducer, step = reducer_of(ONEBIT)
    slot = reducer.state.slots["p"]
    slot.state["residual"].assign(tf.fill([ROWS * WIDTH], 0.5))
    monkeypatch.setattr(reducer.state, "decide", lambda slots: object.__setattr__(slot, "travels", get_compressor("fp16")))
    grad, kept = step(([RANK], np.ones((1, WIDTH)))), residual(reducer)
    np.testing.assert_allclose(grad[:WORLD], np.full((WORLD, WIDTH), 1.5 / WORLD), rtol=1e-6)
    assert not grad[WORLD:].any() and not kept[RANK].any() and np.count_nonzero(kept) == (ROWS - 1) * WIDTH


def test_codes_of_whole_tensors_are_not_used_which_is_warned_about_once():
    reducer, step = reducer_of("powersgd:min_numel=0", in_graph=False)
    with pytest.warns(UserWarning, match="the gradient of p is sparse and is exchanged uncompressed, since"):
        step(given(0, RANK))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(given(1, RANK))
    assert reducer.stats()["exchanges"] == {"sparse": ["p"]}
    assert [bucket["compressor"] for bucket in reducer.stats()["buckets"].values()] == ["none"]


@pytest.mark.parametrize("knobs", ["momentum=0.5", "memory=ef21"])
def test_what_goes_on_in_all_rows_needs_a_dense_gradient(knobs):
    spec = f"topk:ratio=0.1,min_numel=0,exchange=allgather,{knobs}"
    (reducer, step), (_, as_dense) = reducer_of(spec), reducer_of(spec, sparse_as_dense=True)
    for i in range(3):
        np.testing.assert_array_equal(step(given(i, RANK)), as_dense(given(i, RANK)))
    assert "sparse" not in reducer.stats()["exchanges"]


def test_replicas_of_a_model_with_a_table_stay_identical():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Embedding(ROWS, WIDTH), keras.layers.Flatten(), keras.layers.Dense(4)])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.5), compression=ONEBIT)
    model.compile(optimizer, "mse")
    words = np.random.default_rng(RANK).integers(0, 60, (320, 1))
    target = np.random.default_rng(9).normal(size=(ROWS, 4))[words[:, 0]]
    losses = model.fit(words, target, batch_size=16, epochs=2, verbose=0, shuffle=False).history["loss"]
    for weight in model.get_weights():
        assert_same_everywhere(weight)
    assert losses[1] < losses[0] and "sparse" in optimizer.compression_stats()["exchanges"]
