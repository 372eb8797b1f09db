"""Compressors of one's own, failing workers and damaged bytes, in graphs and eagerly."""

import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
from hvd_quant import Compressor, get_compressor, registry
from hvd_quant.tensorflow import agreement
from hvd_quant.tensorflow.codes import Hosted, Traced
from tests.parallel.tensorflow_workers import RANK, WORLD, Network, assert_same_everywhere, batch, every, on_all, train


@pytest.fixture
def own(monkeypatch):
    """The README's compressor in array operations."""
    monkeypatch.setattr(registry, "_registry", {name: c for name, c in registry._registry.items() if name != "sign"})
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.S)
    namespace = {"__name__": "readme"}
    exec(next(block for block in blocks if "class Sign(Compressor)" in block), namespace)
    return namespace["Sign"]


@contextmanager
def raised_in_time(match=None):
    """All workers raise within 5 seconds."""
    hvd.allgather_object(0, name="start")
    start = time.monotonic()
    with pytest.raises(tf.errors.DataLossError, match=match) as caught:
        yield caught
    assert time.monotonic() - start < 5


def same_sentence(error):
    """The part of an error's message that tells what happened, checked to be the same on all workers."""
    sentence = re.search(r"(\d/\w+: .*?)(\n|\t|$| \[\[)", str(error)).group(1)
    assert len(set(hvd.allgather_object(sentence, name="sentence"))) == 1
    return sentence


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_compressor_of_ones_own(own, in_graph):
    network = Network()
    state = own(min_numel=0).bind(network.variables)
    train(network, range(5), in_graph=in_graph, compression=state)
    assert_same_everywhere(network.flat())
    assert list(state.stats()["exchanges"]) == ["allgather"]
    before = state.state_dict()["tensors"]
    assert all(np.any(slot["state"]["residual"]) for slot in before.values())
    _, grads = train(network, [5], in_graph=in_graph, lr=0.0, compression=state,
                     scale=lambda step: np.float32(np.nan if RANK == 0 else 1))
    assert all(np.isnan(g).all() for g in grads)
    for name, slot in state.state_dict()["tensors"].items():
        np.testing.assert_allclose(slot["state"]["residual"], before[name]["state"]["residual"], atol=1e-6)


def test_a_worker_that_sleeps_is_waited_for():
    compressor, network, twin = get_compressor("onebit:min_numel=0,exchange=sra"), Network(), Network()
    how = {"compression": compressor.bind(network.variables)}
    train(network, [0], **how)
    if RANK == WORLD - 1:
        time.sleep(2)
    train(network, [1], **how)
    train(twin, range(2), compression=compressor.bind(twin.variables))
    np.testing.assert_array_equal(network.flat(), twin.flat())


def test_a_native_compressor_that_is_subclassed_runs_on_the_host():
    """It may have array operations."""
    given = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(registry.compressor_class("onebit")):
        def encode(self, ops, grad, state, params, info):
            given.append((type(grad), info.name, info.step))
            return super().encode(ops, grad, state, params, info)

    network = Network()
    train(network, range(3), compression=Watched(min_numel=1000))
    assert sorted(given, key=lambda call: call[1:]) == [(np.ndarray, f"{layer}/kernel", step) for layer in (0, 1) for step in range(3)]
    assert_same_everywhere(network.flat())


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_worker_that_can_not_encode_is_named_by_all(own, monkeypatch, in_graph):
    encode = own.encode

    def fails(self, ops, grad, state, params, info):
        if info.rank == WORLD - 1 and info.step == 1 and info.name == "1/kernel":
            state["residual"][:] = 7  # must not last
            raise MemoryError("no room for the bits")
        return encode(self, ops, grad, state, params, info)

    monkeypatch.setattr(own, "encode", fails)
    network = Network()
    state = own(min_numel=0).bind(network.variables)
    train(network, [0], in_graph=in_graph, compression=state)
    before = state.state_dict()["tensors"]
    with raised_in_time() as caught:
        train(network, [1], in_graph=in_graph, compression=state)
    assert same_sentence(caught.value) == (f"1/kernel: worker {WORLD - 1} failed to encode its gradient: MemoryError: no room for the "
                                           "bits")
    for name, slot in state.state_dict()["tensors"].items():
        np.testing.assert_allclose(slot["state"]["residual"], before[name]["state"]["residual"], atol=1e-6)
    monkeypatch.setattr(own, "encode", encode)
    train(network, range(2, 4), in_graph=in_graph, compression=state)  # nothing is in flight: training can go on


@pytest.mark.parametrize("spec", ["topk:ratio=0.1,min_numel=0,exchange=allgather",
                                  "terngrad:clip=2.5,min_numel=0,exchange=sra,memory=error_feedback"])
def test_a_worker_whose_native_code_can_not_encode_is_named_by_all(monkeypatch, spec):
    compressor = get_compressor(spec)
    measure = type(compressor).measure

    def fails(self, ops, grad, state, info):
        measured, bad = measure(self, ops, grad, state, info), RANK == WORLD - 1 and info.name == "1/kernel"
        return tf.where(info.step == 1, -tf.ones_like(measured), measured) if bad else measured

    monkeypatch.setattr(type(compressor), "measure", fails)
    network = Network()
    state = compressor.bind(network.variables)
    train(network, [0], compression=state)
    before = state.state_dict()["tensors"]
    with raised_in_time() as caught:
        train(network, [1], compression=state, bucket_bytes=1000)  # nothing of the other buckets' state changes either
    expected = rf"1/kernel: worker {WORLD - 1} failed to encode its gradient: \w+ is .*-1.*, expected .*"
    assert re.fullmatch(expected, same_sentence(caught.value))
    for name, slot in state.state_dict()["tensors"].items():
        assert slot["step"] == 1
        for key, kept in slot["state"].items():
            np.testing.assert_allclose(kept, before[name]["state"][key], atol=1e-6)
    monkeypatch.undo()
    train(network, range(2, 4), compression=state)


@pytest.mark.parametrize("compressor", ["onebit", "own"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "random"])
def test_damaged_bytes_raise_the_same_sentence_everywhere(own, monkeypatch, damage, compressor):
    compressor = own(min_numel=0) if compressor == "own" else get_compressor("onebit:min_numel=0")
    code = Traced if compressor.native else Hosted
    encode = code.encode

    def bad(payload):
        if damage == "truncate":
            return payload[:-8]
        if damage == "extend":
            return np.concatenate([payload, payload[:8]])
        if damage == "random":
            return np.random.default_rng(0).integers(0, 256, len(payload) + 4).astype(np.uint8)
        payload = payload.copy()
        payload[40] ^= 4
        return payload

    def encode_badly(self, vector, state, info, cuts):
        encoded = encode(self, vector, state, info, cuts)
        if RANK != 0 or info.name != "1/kernel":
            return encoded
        return encoded._replace(payload=tf.ensure_shape(tf.numpy_function(bad, [encoded.payload], tf.uint8), [None]))

    network = Network()
    state = compressor.bind(network.variables)
    train(network, range(2), compression=state)
    before = state.state_dict()["tensors"]["1/kernel"]["state"]["residual"]
    monkeypatch.setattr(code, "encode", encode_badly)
    with raised_in_time() as caught:
        train(network, [2], compression=state)
    assert "payload" in same_sentence(caught.value)
    if RANK != 0:  # worker 0's own bytes tell no more what it took out of its residual
        after = state.state_dict()["tensors"]["1/kernel"]["state"]["residual"]
        np.testing.assert_allclose(after, before, atol=1e-6)


def test_settings_that_differ_are_told_by_all(monkeypatch):
    """Also where they come to differ after workers have compared them."""
    monkeypatch.setattr(agreement, "compare", lambda *given: None)
    network = Network()
    with raised_in_time() as caught:
        train(network, [0], compression=f"topk:ratio={0.1 if RANK else 0.2},min_numel=0")
    hvd.allgather_object(0, name="after")
    assert "use the same compression settings on all workers" in str(caught.value)


def test_a_compressor_that_returns_no_payload_is_told():
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Compressor):
        name = "wrong"

        def payload_bytes(self, info):
            return 40

        def encode(self, ops, grad, state, params, info):
            return grad

    with raised_in_time(match="TypeError: wrong.encode returned a 1-D float32 array, expected a 1-D uint8"):
        train(Network(), [0], compression=Wrong(min_numel=0))


def test_optimiser_leaves_workers_in_step_when_a_gradient_is_unused():
    """The collectives of a gradient that nobody uses are dropped from the graph on all workers alike."""
    network = Network()
    state = hvd.Compression.topk(ratio=0.1, min_numel=0).bind(network.variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = network.loss(x)
        return hvd.DistributedGradientTape(tape, compression=state).gradient(loss, network.variables)[0]

    for i in range(3):
        step(tf.constant(np.full((8, 30), i + RANK, np.float32)))
    assert_same_everywhere(step(tf.ones([8, 30])))
    assert on_all(int(state.slot(network.variables[3]).step)).ravel().tolist() == [4] * WORLD


SCALED = ["threshold:tau=0.005,min_numel=0", "topk:ratio=0.1,min_numel=0,momentum=0.9,clip_norm=0.05,weight_decay=0.01",
          "onebit:min_numel=0,memory=ef21", "powersgd:min_numel=0", "topk:ratio=0.1,min_numel=0,scope=model", "none"]


@every({spec: spec for spec in SCALED})
def test_what_is_kept_does_not_depend_on_the_scale_that_a_tape_is_told(compressor):
    """With a scale that changes at each step, and one entry on one worker that is not finite for three steps, training is bit for
    bit what it is without."""
    def trained(scales):
        network, scale = Network(), tf.Variable(1.0)
        state = get_compressor(compressor).bind(network.variables)

        @tf.function
        def run(x, entry):
            with tf.GradientTape() as tape:
                loss = network.loss(x) * scale + tf.reshape(network.variables[0], [-1])[0] * entry
            tape = hvd.DistributedGradientTape(tape, compression=state)
            tape.set_loss_scale(scale)
            gradients = tape.gradient(loss, network.variables)
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
            for v, g in zip(network.variables, gradients):
                v.assign_sub(tf.where(finite, 0.1 * g / scale, 0.0))
            return finite

        for step, value in enumerate(scales):
            scale.assign(value)
            if step == 3 and value > 1:
                before = state.state_dict()["tensors"]
                for bad in (np.inf, -np.inf, np.nan):
                    assert not run(tf.constant(batch(50)), tf.constant(bad if RANK == WORLD - 1 else 0.0, tf.float32))
                    for name, slot in state.state_dict()["tensors"].items():
                        assert slot["step"] == before[name]["step"] or compressor == "none"
                        for key, kept in slot["state"].items():
                            np.testing.assert_allclose(kept, before[name]["state"][key], atol=1e-6)
                    state.load_state_dict({**state.state_dict(), "tensors": before})
            assert run(tf.constant(batch(step)), tf.constant(0.0))
        return network.flat()

    scaled = trained([64, 128, 32, 1024, 512, 1024])
    np.testing.assert_array_equal(scaled, trained([1] * 6))
    assert_same_everywhere(scaled)
