"""Gradients that travel together, by way of owners or not, on a network that was measured, and inside hosts first."""

import dataclasses
import hashlib
import logging
import re
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow import mpi_ops

import hvd_quant.tensorflow as hvd
from hvd_quant import Compressor, exchange, get_compressor, wire
from hvd_quant.exchange import cost, ranges
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.reducer import Reducer
from tests.conftest import CODECS
from tests.parallel.bench_on_workers import what_bench_finds
from tests.parallel.tensorflow_workers import RANK, WORLD, Network, assert_same_everywhere, every, on_all, routes

SIZES = [(1,), (7,), (255,), (257,), (50, 100), (70_000,)]
ROUTES = {**routes(CODECS), **{spec: get_compressor(spec) for spec in (
    "none:exchange=allreduce", "none:exchange=sra", "fp16:exchange=sra", "fp16:exchange=allgather")}}
SRA = "topk:ratio=0.1,min_numel=0,exchange=sra"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Compressor):
    """Signs and a mean, in array operations."""

    name = "own"

    def payload_bytes(self, info):
        return wire.HEADER_BYTES + wire.padded(4 + -(-info.numel // 8))

    def encode(self, ops, grad, state, params, info):
        v, finite = ops.accumulate(grad, state["residual"])
        level = np.float32(abs(v).mean())[None]
        state["residual"][:] = v - np.where(v >= 0, level, -level)
        return ops.pack(self.name, info.numel, finite, level, ops.pack_bits(v >= 0))

    def decode(self, ops, payload, info):
        body, finite = ops.unpack(payload, self.name, info.numel, 4 + -(-info.numel // 8))
        level = ops.as_floats(body[:4])
        return np.where(ops.unpack_bits(body[4:], info.numel), level, -level), finite


OWN = Own(min_numel=0, exchange="sra")


def variables(sizes=SIZES):
    return [tf.Variable(tf.zeros(size), name=f"v{i}") for i, size in enumerate(sizes)]


def gradients(step, rank=RANK, sizes=SIZES):
    random = np.random.default_rng([step, rank])
    return [random.normal(size=size).astype(np.float32) for size in sizes]


def steps_of(reducer, weights):
    """A step in a graph."""
    return tf.function(lambda grads: reducer.reduce(grads, weights))


def states(reducer):
    return {name: kept["state"] for name, kept in reducer.state_dict()["tensors"].items()}


def assert_same_states(found, expected, atol=1e-5):
    for name, state in found.items():
        for key, value in state.items():
            np.testing.assert_allclose(value, expected[name][key], atol=atol, err_msg=f"{name} {key}")


def sentence_of(error):
    """The part of an error's message that tells what happened, checked to be the same on all workers."""
    sentence = re.search(r"(v\d: .*?)(\n|\t|$| \[\[)", str(error)).group(1)
    assert len(set(hvd.allgather_object(sentence, name="sentence"))) == 1
    return sentence


@every({**ROUTES, "own": OWN})
def test_replicas_are_bit_identical_whatever_the_shapes(compressor):
    weights = variables()
    step = steps_of(Reducer(compressor, weights, name="test"), weights)
    for i in range(3):
        for grad, size in zip(step([tf.constant(g) for g in gradients(i)]), SIZES):
            assert grad.shape == size and np.isfinite(grad).all()
            assert_same_everywhere(grad)
    assert step.experimental_get_tracing_count() == 1


@every(routes({"onebit": get_compressor("onebit:min_numel=0"), "topk": get_compressor("topk:min_numel=0")}) | {"own": OWN})
def test_replicas_of_three_of_four_workers(compressor):
    if WORLD != 4:
        pytest.skip("the launch with four workers runs this")
    three = hvd.add_process_set([0, 2, 3])
    try:
        weights = variables()
        reducer = Reducer(compressor, weights, name="test", process_set=three)
        for i in range(3):
            reduced = reducer.reduce([tf.constant(g) for g in gradients(i)], weights)
            for given, grad in zip(gradients(i), reduced):
                rows = on_all(grad)
                np.testing.assert_array_equal(rows[0], rows[2])
                np.testing.assert_array_equal(rows[0], rows[3])
                if RANK == 1:
                    np.testing.assert_array_equal(grad, given)
    finally:
        hvd.remove_process_set(three)


@every({spec: c for spec, c in ROUTES.items() if c.exchange == "sra" and c.memory == "error_feedback"} | {"own": OWN})
def test_nothing_is_lost_by_way_of_owners(compressor):
    weights = variables()
    reducer = Reducer(compressor, weights, name="test", op=hvd.Sum)
    given, received = ([np.zeros(size, np.float64) for size in SIZES] for _ in range(2))
    for i in range(5):
        reduced = reducer.reduce([tf.constant(g) for g in gradients(i)], weights)
        for j, grad in enumerate(reduced):
            received[j] += grad.numpy() / WORLD
            given[j] += np.mean([gradients(i, rank)[j] for rank in range(WORLD)], axis=0)
    kinds = reducer.stats()["exchanges"]
    assert "v5" in kinds["sra"]
    for j, slot in enumerate(reducer.state.by_place):
        kept = np.zeros(given[j].size)
        if compressor.memory == "error_feedback" and slot.state:
            kept += on_all(slot.state["residual"]).mean(0)
            for (a, b), owned in hvd.allgather_object((slot.owned, slot.state["owner.residual"].numpy()), name="owned"):
                kept[a:b] += owned
        tolerance = {"bf16": 0.1, "fp16": 0.02}.get(compressor.name, 1e-4)
        np.testing.assert_allclose(received[j].ravel() + kept, given[j].ravel(), atol=tolerance)


@pytest.mark.skipif(WORLD > 2, reason="the launches with two workers run this")
@pytest.mark.parametrize("spec", ["onebit:exchange=sra", "topk:ratio=0.01,exchange=allgather"])
def test_nothing_is_lost_of_a_large_layer(spec):
    numel = 17_000_000
    weight = tf.Variable(tf.zeros([numel]))
    reducer = Reducer(spec, [weight], name="test", op=hvd.Sum)
    gradient = tf.constant(np.random.default_rng(RANK).standard_normal(numel, np.float32))
    (reduced,) = reducer.reduce([gradient], [weight])
    (slot,) = reducer.state.by_place
    kept = slot.state["residual"].numpy()
    if slot.owner_state:  # of the mean
        kept[slice(*slot.owned)] += WORLD * slot.owner_state["residual"].numpy()
    given, left = (hvd.allreduce(tf.constant(x), op=hvd.Sum, name=name).numpy() for name, x in (("given", gradient), ("left", kept)))
    assert np.abs(reduced.numpy() + left - given).max() < 1e-5 < np.abs(left).max()
    (digest,) = set(hvd.allgather_object(hashlib.sha256(reduced.numpy()).hexdigest(), name="digest"))
    assert reducer.stats()["wire_bytes"] < numel


@every({spec: c for spec, c in ROUTES.items() if c.exchange == "sra" and c.memory == "error_feedback"} | {"own": OWN})
def test_a_range_that_is_not_finite_voids_the_whole_step(compressor):
    weights = variables()
    reducer = Reducer(compressor, weights, name="test")
    step = steps_of(reducer, weights)
    for i in range(2):
        step([tf.constant(g) for g in gradients(i)])
    before, given = states(reducer), gradients(2)
    if RANK == WORLD - 1:
        given[5][:3] = np.nan, -np.inf, 1  # in one range alone
    reduced = step([tf.constant(g) for g in given])
    assert all(np.isnan(grad).all() for grad in reduced)
    assert_same_states(states(reducer), before)
    assert reducer.stats()["void_tensors"] == 1
    for grad in step([tf.constant(g) for g in gradients(3)]):
        assert np.isfinite(grad).all()
        assert_same_everywhere(grad)


def damaged(monkeypatch, collective, sender, change):
    """Let ``change`` work on what one worker gives to a collective of tensors, or on the part of it that goes to worker 0."""
    real = getattr(mpi_ops, collective)

    def changed(data, splits):
        first, *others = np.split(data, np.cumsum(splits)[:-1])
        parts = [change(first), *others]
        return np.concatenate(parts), np.array([len(part) for part in parts], np.int32)

    def call(tensor, *splits, **kwargs):
        if RANK == sender and tensor.dtype == tf.uint8:
            tensor, sizes = tf.numpy_function(changed, [tensor, splits[0] if splits else tf.size(tensor)[None]], [tf.uint8, tf.int32])
            tensor, splits = tf.ensure_shape(tensor, [None]), [tf.ensure_shape(sizes, [WORLD]) for _ in splits]
        return real(tensor, *splits, **kwargs)

    monkeypatch.setattr(mpi_ops, collective, call)


def flipped(data):
    data = data.copy()
    data[40] ^= 4
    return data


DAMAGE = {"flip": flipped, "truncate": lambda data: data[:-8], "extend": lambda data: np.concatenate([data, data[:8]]),
          "random": lambda data: np.random.default_rng(0).integers(0, 256, len(data)).astype(np.uint8)}


@pytest.mark.parametrize("compressor, damage", [
    (get_compressor(SRA), "flip"), *((compressor, damage) for compressor in (get_compressor("onebit:min_numel=0,exchange=sra"), OWN)
                                     for damage in DAMAGE)], ids=lambda x: getattr(x, "spec", x))
@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
def test_damage_that_one_owner_sees_is_told_by_all(monkeypatch, compressor, damage, collective):
    weights = variables([(5000,), (70_000,)])
    reducer = Reducer(compressor, weights, name="test")
    grads = [tf.constant(g) for g in gradients(0, sizes=[(5000,), (70_000,)])]
    reducer.reduce(grads, weights)
    before = states(reducer)
    with monkeypatch.context() as patch:
        damaged(patch, collective, WORLD - 1, DAMAGE[damage])
        again = tf.function(lambda: reducer._exchange_all(grads, (0, 1), (0, 0)), autograph=False).get_concrete_function()
        hvd.allgather_object(0, name="start")
        start = time.monotonic()
        with pytest.raises(tf.errors.DataLossError) as caught:
            again()
        assert time.monotonic() - start < 5
    sentence = sentence_of(caught.value)
    told = r"payload (has checksum|is damaged)" if damage == "flip" else r"(\d+ payloads came as \d+ bytes|payload) .*"
    assert re.match(f"v1: (worker 0 failed to encode its gradient: )?{told}", sentence)
    assert ("worker 0 failed" in sentence) == (collective == "alltoall")
    assert_same_states({"v1": states(reducer)["v1"]}, before)
    reducer.reduce(grads, weights)  # nothing is in flight: training can go on


@pytest.mark.parametrize("where", ["worker", "owner"])
def test_a_worker_that_can_not_encode_is_named_by_all(monkeypatch, where):
    weights, at = variables([(5000,), (70_000,)]), WORLD - 1
    reducer = Reducer(OWN, weights, name="test")
    grads = [tf.constant(g) for g in gradients(0, sizes=[(5000,), (70_000,)])]
    reducer.reduce(grads, weights)
    before, encode, calls = states(reducer), Own.encode, []

    def fails(self, ops, grad, state, params, info):
        if info.rank == at and info.name == "v0" and info.step == 1:
            calls.append(info.range)
            if len(calls) == (2 if where == "worker" else WORLD + 1):  # an owner encodes once it has sent all its ranges
                state["residual"][:] = 7  # must not last
                raise MemoryError("no room for the bits")
        return encode(self, ops, grad, state, params, info)

    monkeypatch.setattr(Own, "encode", fails)
    with pytest.raises(tf.errors.DataLossError) as caught:
        reducer.reduce(grads, weights)
    assert sentence_of(caught.value) == f"v0: worker {at} failed to encode its gradient: MemoryError: no room for the bits"
    assert_same_states({"v0": states(reducer)["v0"]}, before)
    monkeypatch.setattr(Own, "encode", encode)
    reducer.reduce(grads, weights)


@every({spec: c for spec, c in ROUTES.items() if c.exchange == "sra" and c.memory == "error_feedback"} | {"own": OWN})
def test_a_checkpoint_holds_what_owners_keep(compressor, tmp_path):
    weights = variables()

    def run(reducer, steps):
        return [grad.numpy() for i in steps for grad in reducer.reduce([tf.constant(g) for g in gradients(i)], weights)]

    straight, first, second = (Reducer(compressor, weights, name="test") for _ in range(3))
    expected = run(straight, range(4))[-len(weights):]
    run(first, range(2))
    path = tf.train.Checkpoint(state=first.state).save(str(tmp_path / f"of-{RANK}"))
    tf.train.Checkpoint(state=second.state).restore(path).assert_consumed()
    for grad, value in zip(run(second, range(2, 4))[-len(weights):], expected):
        np.testing.assert_array_equal(grad, value)
    third = Reducer(compressor, weights, name="test")
    third.load_state_dict(first.state_dict())
    for grad, value in zip(run(third, range(2, 4))[-len(weights):], expected):
        np.testing.assert_array_equal(grad, value)


def test_a_range_that_another_worker_owns_now_is_not_taken_from_a_checkpoint(caplog):
    """Who owns what depends on a variable's place among all; shapes are the same."""
    new, old = tf.Variable(tf.zeros([10]), name="new"), tf.Variable(tf.zeros([8192]), name="old")
    reducer = Reducer("onebit:exchange=sra", [old], name="test")
    reducer.reduce([tf.constant(np.random.default_rng(RANK).normal(size=8192).astype(np.float32))], [old])
    state = reducer.state_dict()
    kept = state["tensors"]["old"]["state"]
    assert kept["owner.residual"].any()
    for ahead in ([], [new]):
        again = Reducer("onebit:exchange=sra", [*ahead, old], name="test")
        again.load_state_dict(state)
        loaded = again.state_dict()["tensors"]["old"]["state"]
        np.testing.assert_array_equal(loaded["residual"], kept["residual"])
        np.testing.assert_array_equal(loaded["owner.residual"], 0 if ahead else kept["owner.residual"])
        assert ("owner.residual of old starts at zero" in caplog.text) == bool(ahead)


# ------------------------------------------------------------------------------------------------------------- buckets

@pytest.mark.parametrize("compression", [SRA, "onebit:min_numel=0,exchange=allgather", "fp16", "none",
                                         "topk:ratio=0.1,min_numel=0,exchange=sra,warmup=2", "own"])
def test_the_size_of_buckets_changes_nothing_but_their_number(compression):
    results, tensors = {}, {}
    for bucket_bytes in (1, 25 * 2**20, 30_000):
        weights = variables()
        reducer = Reducer(OWN if compression == "own" else compression, weights, name="test", bucket_bytes=bucket_bytes)
        step = steps_of(reducer, weights)
        grads = [step([tf.constant(g) for g in gradients(i)]) for i in range(4)]
        results[bucket_bytes] = [g.numpy() for row in grads for g in row]
        stats = reducer.stats()
        tensors[bucket_bytes] = [bucket["tensors"] for bucket in stats["buckets"].values()]
        assert sum(bucket["wire_bytes"] for bucket in stats["buckets"].values()) == pytest.approx(stats["wire_bytes"], abs=20)
        assert stats["steps"] == 4
    for other in (1, 30_000):
        for grad, expected in zip(results[other], results[25 * 2**20]):
            # Gloo adds those of an allreduce up in an order that depends on their number.
            np.testing.assert_allclose(grad, expected, atol=4e-3 if compression == "fp16" else 1e-6)
    assert all(len(names) == 1 for names in tensors[1]) and len(tensors[1]) == len(SIZES)
    assert 1 <= len(tensors[25 * 2**20]) <= 2  # those that go dense by their size beside the others
    assert sorted(sum(tensors[30_000], [])) == [f"v{i}" for i in range(len(SIZES))]
    assert next(names for names in tensors[30_000] if {"v4", "v5"} & set(names)) == ["v5"]  # the last first


def test_what_owners_cost():
    weights = variables([(5000,), (70_000,)])
    reducer = Reducer(SRA, weights, name="test")
    for i in range(3):
        reducer.reduce([tf.constant(g) for g in gradients(i, sizes=[(5000,), (70_000,)])], weights)
    stats, payloads = reducer.stats(), 0
    for slot in reducer.state.by_place:
        cuts = ranges(slot.info.numel, slot.compressor.range_multiple, WORLD, slot.index)
        payloads += sum(slot.compressor.payload_bytes(slot.info.part(a, b)) for a, b in cuts if a < b)
    assert stats["wire_bytes"] == pytest.approx(3 * 2 * payloads * (WORLD - 1) / WORLD, abs=1)
    (bucket,) = stats["buckets"].values()
    assert bucket["exchange"] == "sra" and bucket["tensors"] == ["v1", "v0"] and bucket["wire_bytes"] == stats["wire_bytes"]
    for what in ("encode", "wait", "decode"):
        assert 0 < bucket[f"{what}_seconds"] < 60


def test_groups_travel_together():
    weights = variables()
    reducer = Reducer(SRA, weights, name="test", groups=[[weights[5], weights[2]], [weights[3], weights[4]]], bucket_bytes=1)
    reducer.reduce([tf.constant(g) for g in gradients(0)], weights)
    assert [b["tensors"] for b in reducer.stats()["buckets"].values() if len(b["tensors"]) > 1] == [["v4", "v3"], ["v5", "v2"]]
    reducer = Reducer(SRA, weights, name="test", groups=2)
    reducer.reduce([tf.constant(g) for g in gradients(0)], weights)
    tensors = [b["tensors"] for b in reducer.stats()["buckets"].values()]
    assert ["v5", "v4", "v3"] in tensors


@pytest.fixture
def over_mpi(monkeypatch):
    """Where collectives count so many bytes at most."""
    def limited(limit):
        monkeypatch.setattr(mpi_ops, "mpi_enabled", lambda: True)
        monkeypatch.setattr(exchange, "MPI_COUNT_LIMIT", limit)
        monkeypatch.setattr("hvd_quant.tensorflow.reducer.MPI_COUNT_LIMIT", limit)

    return limited


def test_what_a_collective_moves_stays_within_the_counts_of_mpi(over_mpi):
    sizes = [(5000,)] * 4
    found = []
    for limit in (2**31, 2000 * WORLD):  # of payloads of 656 bytes
        over_mpi(limit)
        weights = variables(sizes)
        reducer = Reducer("onebit:min_numel=0,exchange=allgather", weights, name="test")
        found.append(reducer.reduce([tf.constant(g) for g in gradients(0, sizes=sizes)], weights))
        moved = [bucket["wire_bytes"] // (WORLD - 1) * WORLD for bucket in reducer.stats()["buckets"].values()]
        assert len(moved) == (1 if limit == 2**31 else 2) and max(moved) < limit
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("way", ["allgather", "sra"])
def test_a_payload_beyond_the_counts_of_mpi_is_refused_by_all(way, in_graph, over_mpi, sent):
    over_mpi(300)  # less than one payload of v1, more than all of v0
    weights = variables([(64,), (5000,)])
    reducer = Reducer(f"onebit:min_numel=0,exchange={way}", weights, name="test")
    reduce = steps_of(reducer, weights) if in_graph else lambda grads: reducer.reduce(grads, weights)
    with pytest.raises(ValueError, match=rf"v1: payloads of \d+ bytes from {WORLD} workers are more than the 2\^31 bytes that an "
                       r"\w+ over MPI can move; use Gloo, or choose a smaller payload for it") as caught:
        reduce([tf.constant(g) for g in gradients(0, sizes=[(64,), (5000,)])])
    refusal = re.search(r"v1: payloads of .*", str(caught.value)).group()
    assert len(set(hvd.allgather_object(refusal, name="refusal"))) == 1
    assert not sent and not reducer.state.accounts


@pytest.fixture
def sent(monkeypatch):
    """The collectives that gradients have travelled in: by their names, how many entries each had."""
    sizes = {}

    def noted(collective):
        def call(tensor, *args, name, **how):
            def note(array):
                sizes.setdefault(name, []).append(array.size)
                return array

            if "test_" in name:
                tensor = tf.ensure_shape(tf.numpy_function(note, [tensor], tensor.dtype), tensor.shape)
            return collective(tensor, *args, name=name, **how)

        return call

    for collective in ("horovod_allreduce", "horovod_allgather", "horovod_alltoall"):
        monkeypatch.setattr(mpi_ops.MPI_LIB, collective, noted(getattr(mpi_ops.MPI_LIB, collective)))
    return sizes


@pytest.mark.parametrize("compression", [
    "topk:ratio=0.1,min_numel=0,exchange=allgather,warmup=2", f"{SRA},momentum=0.9,warmup=2", "powersgd:min_numel=0,warmup=2"])
def test_dense_collectives_and_compressed_ones_have_other_names(compression, sent):
    """So that nobody takes one for the other: what travels by a name has the same size in every step."""
    weights, names, sizes = variables([(40, 30)] * 2), [], {}
    reduce = steps_of(Reducer(compression, weights, name="test"), weights)
    for step in range(4):
        sent.clear()
        for grad in reduce([tf.constant(g) for g in gradients(step, sizes=[(40, 30)] * 2)]):
            assert_same_everywhere(grad)
        names.append(set(sent))
        for name, entries in sent.items():
            sizes.setdefault(name, set()).update(entries)
    dense, compressed = names[0] | names[1], names[2] | names[3]
    assert names[0] and names[2] and not dense & compressed
    assert all(len(entries) == 1 for entries in sizes.values())
    assert len(set(hvd.allgather_object(str(sorted(sizes)), name="names"))) == 1


@pytest.mark.parametrize("compression", ["none", "fp16", SRA, "onebit:min_numel=0,exchange=allgather", OWN], ids=str)
def test_gradients_that_are_ready_in_another_order_on_each_worker(compression):
    """As in a model with branches: each worker's first gradient is the other's last."""
    weights = variables([(3000,)] * 4)
    reducer = Reducer(compression, weights, name="test", bucket_bytes=1)
    slow = [0, 1] if RANK % 2 else [3, 2]

    @tf.function
    def step(grads):
        grads = list(grads)
        for i in slow:
            busy = grads[i]
            for _ in range(60):
                busy = tf.sort(busy * 1.0000001)
            with tf.control_dependencies([busy]):
                grads[i] = tf.identity(grads[i])
        return reducer.reduce(grads, weights)

    for i in range(4):
        for grad in step([tf.constant(g) for g in gradients(i, sizes=[(3000,)] * 4)]):
            assert_same_everywhere(grad)


def test_branches_of_a_graph_with_exchanges_by_way_of_owners():
    one, other = Network(0), Network(0)

    @tf.function
    def step(x, flag):
        with tf.GradientTape() as tape:
            loss = tf.cond(flag, lambda: one.loss(x), lambda: one.loss(2.0 * x))
        tape = hvd.DistributedGradientTape(tape, compression=SRA, bucket_bytes=1)
        for v, g in zip(one.variables, tape.gradient(loss, one.variables)):
            v.assign_sub(0.1 * g)

    for i in range(3):
        step(tf.random.normal([8, 30], seed=i), tf.constant(RANK % 2 == 0))
    assert_same_everywhere(one.flat())
    assert not np.array_equal(one.flat(), other.flat())


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "25 MB"])
def test_bucket_bytes_are_a_positive_number(bad):
    with pytest.raises(ValueError, match="bucket_bytes is .*; give a positive whole number of bytes"):
        hvd.DistributedGradientTape(tf.GradientTape(), bucket_bytes=bad)
    with pytest.raises(ValueError, match="bucket_bytes is .*; give a positive whole number of bytes"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), bucket_bytes=bad)


# --------------------------------------------------------------------------------------------- what costs the least time

def costs_of(spec, seconds, rate=1e-9):
    """A network on which each collective takes so many seconds a byte, and a code with that rate."""
    collectives = {kind: ((0, 0.0), (2**20, seconds[kind.partition("_")[0]] * 2**20)) for kind in cost.COLLECTIVES}
    return cost.Costs(collectives, {cost.key_of(get_compressor(spec)): cost.Rates(rate, rate, rate)})


@pytest.fixture
def measured(monkeypatch):
    """Take these costs for measured ones."""
    def take(costs):
        monkeypatch.setattr(network, "costs", lambda workers, compressors: costs)

    return take


def exchanges(compression, steps=2):
    weights = variables()
    reducer = Reducer(compression, weights, name="test")
    for i in range(steps):
        for grad in reducer.reduce([tf.constant(g) for g in gradients(i)], weights):
            assert_same_everywhere(grad)
    return reducer


def test_auto_takes_what_costs_less(measured):
    spec, fast = "onebit:min_numel=0", {"allreduce": 1e-9, "allgather": 1e-9, "alltoall": 1e-9}
    measured(costs_of(spec, {**fast, "allgather": 1e-6, "alltoall": 1e-9}))
    kinds = exchanges(spec).stats()["exchanges"]
    assert "v5" in kinds["sra" if WORLD > 2 else "allgather"]
    measured(costs_of(spec, {**fast, "alltoall": 1e-3}))
    assert "v5" in exchanges(spec).stats()["exchanges"]["allgather"]


def test_only_if_faster(measured):
    spec = "onebit:min_numel=0,only_if_faster=true"
    slow = {"allreduce": 1e-6, "allgather": 1e-6, "alltoall": 1e-7}
    measured(costs_of(spec, slow))
    assert "v5" in exchanges(spec).stats()["exchanges"]["allgather" if WORLD == 2 else "sra"]
    measured(costs_of(spec, slow, rate=1.0))  # a code that takes a second an entry
    reducer = exchanges(spec)
    assert "v5" in reducer.stats()["exchanges"]["allreduce"]
    measured(costs_of(spec, {kind: 1e-15 for kind in slow}))
    reducer = exchanges(spec)
    assert reducer.stats()["exchanges"] == {"dense": [f"v{i}" for i in range(len(SIZES))]}
    assert reducer.stats()["wire_bytes"] == reducer.stats()["dense_bytes"]


@pytest.mark.parametrize("now", ["dense", "fp16", "allgather"])
def test_what_was_kept_is_given_back_where_a_job_goes_on_in_another_way(measured, now):
    spec = "onebit:min_numel=0,only_if_faster=true"
    seconds = {"allreduce": {"dense": 1e-15, "fp16": 1e-6, "allgather": 1.0}[now], "allgather": 1e-15, "alltoall": 1.0}
    measured(costs_of(spec, seconds, rate=1e-12 if now == "allgather" else 1.0))
    weights = variables()
    reducer = Reducer(spec, weights, name="test")
    slot = reducer.state.by_place[5]
    for key, variable in slot.state.items():
        variable.assign(np.random.default_rng([RANK, len(key)]).normal(size=variable.shape).astype(np.float32))
    kept = on_all(slot.state["residual"]).mean(0)
    if WORLD > 2:
        for (a, b), owned in hvd.allgather_object((slot.owned, slot.state["owner.residual"].numpy()), name="owned"):
            kept[a:b] += owned
    given = np.mean([gradients(0, rank)[5] for rank in range(WORLD)], axis=0)
    reduced = reducer.reduce([tf.constant(g) for g in gradients(0)], weights)[5].numpy()
    left = on_all(slot.state["residual"]).mean(0)
    assert (now == "allgather") == left.any()
    assert WORLD == 2 or not slot.state["owner.residual"].numpy().any()
    np.testing.assert_allclose(reduced + left, given + kept, atol=0.01 if now == "fp16" else 1e-4)


def test_the_network_is_measured_once(caplog):
    network._measured.clear()
    spec = "onebit:min_numel=0,block_size=64,only_if_faster=true"
    with caplog.at_level(logging.INFO, logger="hvd_quant"):
        first, second = exchanges(spec), exchanges(spec)
    assert len([r for r in caplog.records if "exchanges were measured: allreduce" in r.getMessage()]) == 1
    (costs,) = network._measured.values()
    assert set(costs.rates) == {"onebit:block_size=64", "fp16"}
    assert all(rate.encode > 0 for rate in costs.rates.values())
    assert len(set(hvd.allgather_object(str(costs), name="costs"))) == 1
    assert first.stats()["exchanges"] == second.stats()["exchanges"]


def test_nothing_is_measured_where_there_is_nothing_to_choose(monkeypatch):
    monkeypatch.setattr(cost, "measure", lambda *args: pytest.fail("measured"))
    network._measured.clear()
    for spec in ("none", "fp16", SRA, "topk:min_numel=0,exchange=allgather", *(["onebit"] if WORLD == 2 else [])):
        exchanges(spec)


def test_elastic_jobs_gather_what_others_scatter(monkeypatch, caplog):
    """How tensors are cut must not depend on a number of workers that changes."""
    monkeypatch.setattr(network, "ELASTIC", True)
    monkeypatch.setattr(network, "_warned", [])
    reducer = exchanges(SRA)
    assert "v5" in reducer.stats()["exchanges"]["allgather"]
    assert not any(key.startswith("owner.") for state in states(reducer).values() for key in state)
    reducer = exchanges("onebit:min_numel=0,only_if_faster=true")
    assert "v5" in reducer.stats()["exchanges"]["allgather"]
    assert len([r for r in caplog.records if "only_if_faster has no effect in an elastic job" in r.getMessage()]) == 1


# --------------------------------------------------------------------------------------------------- inside hosts first

@pytest.fixture
def two_hosts(monkeypatch):
    """Take every second worker for one of another host."""
    if WORLD != 4:
        pytest.skip("the launch with four workers runs this")
    monkeypatch.setattr(network, "_places", lambda: [(rank % 2, rank // 2) for rank in range(WORLD)])


@every({spec: get_compressor(f"{spec},hierarchical=true") for spec in (
    "topk:ratio=0.1,min_numel=0,exchange=allgather", "onebit:min_numel=0,exchange=allgather", SRA,
    "onebit:block_size=64,min_numel=0,exchange=sra")} | {"own": dataclasses.replace(OWN, hierarchical=True)})
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_hosts_average_inside_and_exchange_ranges(two_hosts, compressor, op):
    """Nothing is lost, and all have the same bits."""
    weights = variables()
    reducer = Reducer(compressor, weights, name="test", op=op)
    step = steps_of(reducer, weights)
    given, received = ([np.zeros(size, np.float64) for size in SIZES] for _ in range(2))
    for i in range(4):
        for j, grad in enumerate(step([tf.constant(g) for g in gradients(i)])):
            assert_same_everywhere(grad)
            received[j] += grad.numpy() / (1 if op == hvd.Average else WORLD)
            given[j] += np.mean([gradients(i, rank)[j] for rank in range(WORLD)], axis=0)
    for j, slot in enumerate(reducer.state.by_place):
        kept = np.zeros(given[j].size)
        if slot.state:
            piece = slot.pieces[slot.workers.local[0]]
            owned = (slot.owned, slot.state["owner.residual"].numpy()) if compressor.exchange == "sra" else ((0, 0), 0)
            own = (piece, slot.state["residual"].numpy(), owned)
            for (first, last), residual, ((a, b), of_owner) in hvd.allgather_object(own, name="own"):
                kept[first:last] += residual / 2
                kept[a:b] += of_owner
        np.testing.assert_allclose(received[j].ravel() + kept, given[j].ravel(), atol=1e-4)
    before, bad = states(reducer), gradients(5)
    if RANK == 1:
        bad[5][-2:] = np.nan
    reduced = step([tf.constant(g) for g in bad])
    assert all(np.isnan(grad).all() for grad in reduced)
    assert_same_states(states(reducer), before)
    dense_bytes, stats = 2 * 4 * sum(slot.info.numel for slot in reducer.state.by_place) / 2, reducer.stats()
    assert stats["wire_bytes"] < 5 * dense_bytes / 4


def test_on_one_host_everything_is_dense():
    weights = variables([(5000,), (7, 3)])
    reducer = Reducer({"v0": "onebit:hierarchical=true", "*": "fp16:hierarchical=true"}, weights, name="test")
    rows = tf.IndexedSlices(tf.fill([1, 3], RANK + 1.0), tf.constant([2]), tf.constant([7, 3]))
    for second in (rows, tf.fill([7, 3], RANK + 1.0)):
        dense, other = reducer.reduce([tf.fill([5000], RANK + 1.0), second], weights)
        np.testing.assert_allclose(dense, np.full(5000, (WORLD + 1) / 2), rtol=1e-6)
        np.testing.assert_allclose(tf.convert_to_tensor(other)[2], np.full(3, (WORLD + 1) / 2), rtol=1e-6)
    stats = reducer.stats()
    assert list(stats["exchanges"]) == ["dense"] and not states(reducer)["v0"]
    assert stats["wire_bytes"] > 0


def test_hierarchical_exchange_is_refused_where_it_can_not_work(monkeypatch):
    def made(**how):
        return Reducer("onebit:hierarchical=true", variables(), name="test", **how)

    monkeypatch.setattr(network, "_places", lambda: [(0, 0), (0, 1), (0, 2), (1, 0)][4 - max(WORLD, 3):])
    with pytest.raises(ValueError, match="hierarchical=True needs the same number of workers on each host"):
        made()
    monkeypatch.undo()
    one = hvd.add_process_set([0]) if WORLD == 2 else hvd.add_process_set([0, 3])
    try:
        with pytest.raises(ValueError, match="hierarchical=True exchanges between all workers: leave process_set= out"):
            made(process_set=one)
    finally:
        hvd.remove_process_set(one)
    monkeypatch.setattr(network, "ELASTIC", True)
    with pytest.raises(ValueError, match="hierarchical=True can't be used in an elastic job"):
        made()
    monkeypatch.setattr(network, "ELASTIC", False)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="hierarchical=True needs TensorFlow 2"):
        network.workers_by_host(hvd.global_process_set)


def test_bench_measures_what_plan_predicts_by(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "hvd_quant.torch", None)  # it takes PyTorch where it can
    found = what_bench_finds(monkeypatch, tmp_path, RANK, WORLD, "powersgd")
    assert all(one["measured_seconds"] is None for one in found)


def test_what_exchanges_cost_is_where_a_user_looks():
    reducer = exchanges("topk:ratio=0.1,min_numel=0")
    assert hvd.compression_progress(reducer.stats()).startswith("sent ")
    assert "topk:" in hvd.compression_summary(reducer.stats()) and callable(hvd.log_compression)
