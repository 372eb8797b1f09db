"""TensorFlow's operations against the other backends: the same bytes, residuals, sums and sentences."""

import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
ops = pytest.importorskip("hvd_quant.ops.tensorflow", exc_type=ImportError)

from hvd_quant import wire  # noqa: E402
from hvd_quant.ops import generic  # noqa: E402
from hvd_quant.ops.layout import sample_size  # noqa: E402
from tests.single.codes import (CASTS, CODECS, FUZZED, INPUTS, SIZES, Codec, assert_same_payload,  # noqa: E402
                                assert_same_residual, bits, mutations, normal, zeros)

try:
    import torch

    from hvd_quant.ops import torch as torch_ops
except ImportError:
    torch = None

each_codec = pytest.mark.parametrize("codec", CODECS + CASTS, ids=repr)
with_residual = pytest.mark.parametrize("codec", CODECS, ids=repr)


def variable(values):
    return tf.Variable(values, trainable=False)


def native(function, *arrays):
    """What ``function`` returns for NumPy arrays, whose memory it may change, as PyTorch tensors."""
    return function(*(None if a is None else torch.from_numpy(a) for a in arrays)).numpy()


class Others:
    """The other backends, each with a residual of its own, which must do as TensorFlow does with ``self.variable``."""

    def __init__(self, codec, residual):
        self.codec, self.variable = codec, None if residual is None else variable(residual)
        self._generic, self._torch = (None if residual is None else residual.copy() for _ in range(2))

    def check_encode(self, payload, grad, step):
        codec, numel = self.codec, len(grad)
        assert_same_payload(codec, numel, payload, codec.encode(generic, grad, self._generic, step))
        if self.variable is not None:
            assert_same_residual(codec, numel, self.variable, self._generic)
            self._generic[:] = self.variable.numpy()  # small differences must not add up
        if torch:
            expected = native(lambda g, e: codec.encode(torch_ops, g, e, step), grad, self._torch)
            np.testing.assert_array_equal(payload, expected)
            if self.variable is not None:
                np.testing.assert_array_equal(bits(self.variable), bits(self._torch))

    def check_sum(self, total, payloads, scale):
        expected = self.codec.decode_sum(generic, [np.asarray(p) for p in payloads], len(total), scale=scale)
        np.testing.assert_array_equal(bits(total), bits(expected))


# ----------------------------------------------------------------------------------------------------- what is computed

@pytest.mark.parametrize("kind", INPUTS)
@each_codec
def test_same_as_the_others(codec, kind):
    for numel in SIZES if kind == "normal" else (0, 9, 2049, 16385):
        grad, payloads = INPUTS[kind](numel), []
        for residual in (None, normal(numel, 1, 0.3)):
            others = Others(codec, residual)
            for step in (0, 7) if kind == "normal" else (3,):
                payloads.append(codec.encode(ops, grad, others.variable, step))
                others.check_encode(payloads[-1], grad, step)
        others.check_sum(codec.decode_sum(ops, payloads, numel, scale=1 / 3), payloads, 1 / 3)


@each_codec
def test_in_a_function(codec):
    numel = 17_001
    others = Others(codec, zeros(numel) if codec in CODECS else None)

    @tf.function
    def exchange(grad, step, scale, world):
        payload = codec.encode(ops, grad, others.variable, step)
        payload.shape.assert_is_fully_defined()
        gathered = ops.Payloads(tf.tile(payload, [world]), world, "w")
        total = codec.decode_sum(ops, gathered, numel, out=grad, scale=scale)
        assert total.shape == grad.shape
        return payload, total, ops.flags(gathered, codec.name, numel)

    for step, kind in enumerate(("normal", "constant", "subnormal", "normal", "huge")):
        grad = INPUTS[kind](numel)
        payload, total, flags = exchange(grad, tf.constant(step, tf.int64), tf.constant(0.2), tf.constant(3))
        others.check_encode(payload, grad, step)
        others.check_sum(total, [payload] * 3, 0.2)
        assert int(flags) == int(payload[3])
    assert exchange.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("kind", INPUTS)
def test_thresholds(kind):
    for numel in (1, 7, 4097):
        grad = INPUTS[kind](numel)
        for residual in (None, normal(numel, 1)):
            for ratio in (0.001, 0.05, 1.0):
                for name in ("topk_measure", "adaptive_measure"):
                    held = None if residual is None else variable(residual)
                    found = getattr(ops, name)(grad, held, ratio, 11)
                    np.testing.assert_array_equal(bits(found), bits(getattr(generic, name)(grad, residual, ratio, 11)))


@pytest.mark.parametrize("kind", INPUTS)
def test_a_threshold_for_the_whole_model(kind):
    sizes, ratio = [9000, 4097, 0, 12], 0.01
    held = [[variable(x) for x in (zeros(n), zeros(sample_size(n)), zeros(2))] for n in sizes]
    expected = [[x.numpy() for x in of_one] for of_one in held]
    measure = tf.function(lambda i, g, step: ops.model_measure(g, held[i][0], ratio, step, *held[i][1:]))

    @tf.function
    def decide():
        ops.model_threshold([(m, t, n) for (_, m, t), n in zip(held, sizes)], ratio)

    decide()
    assert not any(t.numpy().any() for _, _, t in held)
    for step in range(3):
        for i, n in enumerate(sizes):
            grad = INPUTS[kind](n) * np.float32(0.5 + i)
            found = measure(i, tf.constant(grad), tf.constant(step, tf.int64))
            np.testing.assert_array_equal(bits(found), bits(generic.model_measure(grad, expected[i][0], ratio, step, *expected[i][1:])))
        decide()
        generic.model_threshold([(m, t, n) for (_, m, t), n in zip(expected, sizes)], ratio)
        for of_one, same in zip(held, expected):
            for x, y in zip(of_one, same):
                np.testing.assert_array_equal(bits(x), bits(y))


def test_lengths_that_are_unknown_when_traced():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def encode(grad):
        payload = ops.onebit_encode(grad, None, 64)
        assert payload.shape.rank == 1 and payload.shape[0] is None
        return payload

    expected = generic.onebit_encode(normal(100), None, 64)
    assert_same_payload(Codec("onebit", block_size=64), 100, encode(normal(100)), expected)


@with_residual
def test_restore_takes_an_encode_back(codec):
    for kind in INPUTS:
        grad, before = INPUTS[kind](3000), normal(3000, 1)
        residual, expected = variable(before), before.copy()
        payload = codec.encode(ops, grad, residual)
        clean = ops.without_flags(payload)
        np.testing.assert_array_equal(clean, generic.without_flags(payload.numpy()))
        own = codec.decode_sum(ops, [clean], 3000)
        expected[:] = residual.numpy()
        generic.restore(expected, own.numpy(), grad)
        ops.restore(residual, own, grad)
        np.testing.assert_array_equal(bits(residual), bits(expected))


def test_linear_codes():
    total, half = tf.constant(normal(999)), tf.constant(normal(999), tf.float16)
    for world in (3, tf.constant(3)):
        np.testing.assert_array_equal(ops.divide(total, world), total.numpy() / np.float32(3))
        np.testing.assert_array_equal(ops.divide_to_half(total, world), generic.divide_to_half(total.numpy(), 3))
    np.testing.assert_array_equal(ops.widen(half), half.numpy().astype(np.float32))


# -------------------------------------------------------------------------------------------------------------- ranges

CUTS = [(16_384, 20_000), (2048, 2048), (0, 2048), (2048, 16_384)]  # of 20,000 entries, in the order of their owners; one is empty


@each_codec
def test_ranges_are_encoded_as_each_by_itself(codec):
    numel, residual = 20_000, None if codec in CASTS else variable(normal(20_000, 1, 0.3))
    grad, expected = normal(numel), None if residual is None else residual.numpy()
    cuts, measured = CUTS, codec.measure(ops, grad, residual)

    def parts(whole):
        return [ops.Part(whole, *cut) for cut in cuts]

    asked = [codec.encode(ops, part, residual, 3, part.start, part.stop - part.start, measured) for part in parts(tf.constant(grad))]
    encoded = ops.encode_parts(asked)
    payloads, at = [], 0
    for (first, last), size in zip(cuts, encoded.sizes.numpy()):
        if first == last:
            assert size == 0
            continue
        payloads.append(encoded.payload[at:at + size].numpy())
        at += size
        kept = None if expected is None else expected[first:last]
        of_range = codec.encode(generic, grad[first:last], kept, 3, first, measured=None if measured is None else measured.numpy())
        assert_same_payload(codec, last - first, payloads[-1], of_range)
    assert at == encoded.payload.shape[0]
    if residual is not None:
        assert_same_residual(codec, numel, residual, expected)

    # What each range's payload decodes to, and nothing of it once the encode is taken back.
    sizes = encoded.sizes.numpy()
    table = ops.locate(encoded.payload, len(cuts), 1, sizes)
    received = ops.Payloads(encoded.payload, len(cuts), "w", table)
    asked = [codec.decode_sum(ops, part, part.stop - part.start) for part in parts(received)]
    total = ops.decode_parts(asked, numel)
    rest = iter(payloads)
    for first, last in cuts:
        if first < last:
            np.testing.assert_array_equal(bits(total[first:last]), bits(codec.decode_sum(generic, [next(rest)], last - first)))
    assert ops.flags(received, codec.name, numel, [x for cut in cuts for x in cut]) == 0
    if residual is not None:
        before = residual.numpy()
        undo = [ops.restore(residual, codec.decode_sum(ops, [part], part.stop - part.start), grad_part)
                for part, grad_part in zip(parts(encoded.payload), parts(tf.constant(grad)))]
        ops.undo_parts(undo, tf.constant(0), encoded.payload)
        np.testing.assert_array_equal(residual, before)
        ops.undo_parts(undo, tf.constant(4), encoded.payload[:-8])  # it tells no more what was encoded
        np.testing.assert_array_equal(residual, before)
        ops.undo_parts(undo, tf.constant(1), encoded.payload)
        generic.restore(before, total.numpy(), grad)
        np.testing.assert_array_equal(bits(residual), bits(before))


def test_a_worker_that_can_not_encode_a_range_says_so_and_keeps_nothing_of_the_others():
    grad, residual = normal(1000), variable(normal(1000, 1))
    cuts, before = [(0, 100), (100, 1000)], residual.numpy()  # entries are drawn for by 64, so the second range is refused
    asked = [ops.natural_encode(ops.Part(tf.constant(grad), *cut), residual, 1, cut[0], 0, 0, 0) for cut in cuts]
    encoded = ops.encode_parts(asked, 3)
    for part, (a, b) in zip(np.split(encoded.payload, encoded.sizes[:1]), cuts):
        with pytest.raises(wire.PayloadError, match="worker 3 failed to encode its gradient: first is 100, expected a multiple of 64"):
            wire.check(part, "natural", b - a, 0)
    np.testing.assert_allclose(residual, before, atol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="first is 100"):
        ops.encode_parts(asked)
    np.testing.assert_allclose(residual, before, atol=1e-6)


def test_a_range_that_is_not_finite_makes_the_whole_nan():
    grad = normal(1000)
    grad[700] = np.nan
    cuts = [(0, 512), (512, 1000)]
    encoded = ops.encode_parts([ops.onebit_encode(ops.Part(tf.constant(grad), *cut), None, 64) for cut in cuts])
    received = ops.Payloads(encoded.payload, 2, "w", ops.locate(encoded.payload, 2))
    total = ops.decode_parts([ops.onebit_decode_sum(ops.Part(received, *cut), cut[1] - cut[0], 64) for cut in cuts], 1000)
    assert np.isnan(total).all()
    assert ops.flags(received, "onebit", 1000, [0, 512, 512, 1000]) == wire.NONFINITE


def test_ranges_of_different_codes_are_refused():
    grad = tf.zeros([1000])
    for other in (ops.onebit_encode(ops.Part(grad, 512, 1000), None, 128), grad):
        with pytest.raises(TypeError, match="has to encode and decode each range of a tensor with the same code of ops"):
            ops.encode_parts([ops.onebit_encode(ops.Part(grad, 0, 512), None, 64), other])


def test_an_owner_passes_on_what_is_wrong():
    good, failed = ops.onebit_encode(normal(300), None, 64).numpy(), wire.failure("onebit", 300, 5, "no memory, \N{SNOWMAN}")
    flipped = good.copy()
    flipped[40] ^= 1

    def reduced(*parts):
        data = tf.constant(np.concatenate(parts))
        asked = ops.onebit_decode_sum(ops.Part(ops.Payloads(data, len(parts), "w", ops.locate(data, len(parts))), 0, 300), 300, 64)
        return ops.decode_as_owner(asked * 0.5, 300, 7)

    decoded = reduced(good, good)
    assert decoded.failure.shape == [0]
    np.testing.assert_array_equal(decoded.sum, ops.onebit_decode_sum([good, good], 300, 64, scale=0.5))
    np.testing.assert_array_equal(ops.instead(good, decoded.failure), good)
    decoded = reduced(good, failed)
    assert not decoded.sum.numpy().any()
    np.testing.assert_array_equal(ops.instead(good, decoded.failure), failed)
    for bad, reason in (((flipped, good), "payload has checksum"), ((good, failed[:-8]), "payload"),
                        ((good[:-8], good[:21]), "2 payloads came as .* bytes whose headers tell other lengths")):
        payload = reduced(*bad).failure.numpy()
        with pytest.raises(wire.PayloadError, match=f"worker 7 failed to encode its gradient: {reason}"):
            wire.check(payload, "onebit", 300, 0)


def test_where_payloads_are():
    small, large = (ops.onebit_encode(normal(n), None, 64).numpy() for n in (10, 300))
    a, b = len(small), len(large)
    data = np.concatenate([small, large, small, large])
    expected = [[[0, a], [a, b]], [[a + b, a], [2 * a + b, b]]]
    for sizes in ([a, b], [a, b, a, b], [1, 2], []):  # as expected, or as headers tell
        np.testing.assert_array_equal(ops.locate(data, 2, 2, sizes), expected)
    np.testing.assert_array_equal(ops.locate(np.concatenate([small, large]), 2, 2, [0, a, b, 0]), [[[0, 0], [0, a]], [[a, b], [a + b, 0]]])
    np.testing.assert_array_equal(ops.locate(data[:-8], 2, 2, [a, b]), np.full((2, 2, 2), -1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="sizes has 3 entries, expected one for each of 2 columns or 4 payloads"):
        ops.locate(data, 2, 2, [a, b, a])


def test_payloads_owner_by_owner():
    one, two = np.arange(6, dtype=np.uint8), np.arange(10, 14, dtype=np.uint8)
    sent, splits = ops.by_owner([one, two], [np.array([2, 0, 4]), np.array([1, 3, 0])])
    np.testing.assert_array_equal(sent, [0, 1, 10, 11, 12, 13, 2, 3, 4, 5])
    np.testing.assert_array_equal(splits, [3, 3, 4])
    with pytest.raises(tf.errors.InvalidArgumentError, match="sizes add up to 3 bytes for 2 owners, there are 6"):
        ops.by_owner([one], [np.array([1, 2])])


def test_what_was_kept_is_given_back_once():
    grad, residual = normal(100), variable(normal(20, 1))
    expected = grad.copy()
    expected[30:50] += np.float32(3) * residual.numpy()
    bad = grad.copy()
    bad[7] = np.inf
    before = residual.numpy()
    np.testing.assert_array_equal(ops.give_back(bad, residual, 30, 3.0), bad)
    np.testing.assert_array_equal(residual, before)
    np.testing.assert_array_equal(ops.give_back(grad, residual, 30, 3.0), expected)
    assert not residual.numpy().any()
    np.testing.assert_array_equal(ops.give_back(grad, residual, 30, 3.0), grad)
    with pytest.raises(tf.errors.InvalidArgumentError, match="residual goes from 90 to 110 of 100"):
        ops.give_back(grad, residual, 90)


# ------------------------------------------------------------------------------------------------- variables and graphs

@with_residual
def test_a_value_that_was_read_stays(codec):
    residual = variable(zeros(3000))

    @tf.function
    def encode(grad):
        before = residual.read_value()
        payload = codec.encode(ops, grad, residual)
        return before, residual.read_value(), payload

    held = residual.read_value()
    for step in range(3):
        kept = residual.numpy().copy()
        before, after, _ = encode(normal(3000, step))
        np.testing.assert_array_equal(before, kept)
        np.testing.assert_array_equal(after, residual)
        assert not np.array_equal(before, after)
    np.testing.assert_array_equal(held, zeros(3000))


def address(tensor):
    """Where its memory is; ``numpy()`` would copy it."""
    return np.asarray(memoryview(tensor)).ctypes.data


def test_a_residual_is_updated_where_it_is():
    residual = variable(tf.random.normal([100_000]))
    ops.onebit_encode(normal(100_000), residual, 64)  # before, others may have held the memory
    before = address(residual.read_value())
    for step in range(3):
        ops.onebit_encode(normal(100_000, step), residual, 64)
        assert address(residual.read_value()) == before


def test_a_residual_that_was_scattered_into():
    """Sparse access makes TensorFlow copy what reads return instead of what writes change."""
    residual = variable(zeros(100))
    residual.scatter_nd_update([[3]], [1.0])
    held, expected = residual.read_value(), residual.numpy().copy()
    ops.onebit_encode(zeros(100), residual, 64)
    generic.onebit_encode(zeros(100), expected, 64)
    np.testing.assert_allclose(residual, expected, rtol=1e-6)
    assert held[3] == 1


def test_identical_encodes_both_happen():
    residual, expected = variable(zeros(1000)), zeros(1000)

    @tf.function
    def twice(grad):
        ops.threshold_encode(grad, residual, 1.0, 64, 0)  # nobody wants its payload
        return ops.threshold_encode(grad, residual, 1.0, 64, 0)

    for _ in range(2):
        payload = twice(normal(1000))
        for _ in range(2):
            last = generic.threshold_encode(normal(1000), expected, 1.0, 64, 0)
        np.testing.assert_array_equal(payload, last)
        np.testing.assert_array_equal(residual, expected)


def test_encodes_of_constants_happen_each_time():
    residual, grad = variable(zeros(1000)), tf.constant(normal(1000))

    @tf.function
    def measure_and_encode():
        thresholds = ops.topk_measure(grad, residual, 0.1, 0)
        ops.topk_encode(grad, residual, thresholds, 104, "float32", 0)
        return thresholds, ops.topk_measure(grad, residual, 0.1, 0)

    for _ in range(2):
        expected = generic.topk_measure(grad.numpy(), residual.numpy(), 0.1, 0)
        before, after = measure_and_encode()
        np.testing.assert_array_equal(before, expected)
        np.testing.assert_array_equal(after, generic.topk_measure(grad.numpy(), residual.numpy(), 0.1, 0))
        assert not np.array_equal(before, after)


def test_only_what_shares_a_residual_waits_for_each_other():
    residuals = [variable(zeros(100)) for _ in range(2)]

    @tf.function
    def step(grad):
        stateless = ops.onebit_encode(grad, None, 64)
        payloads = [ops.onebit_encode(grad, residual, 64) for residual in residuals]
        return stateless, payloads, [ops.onebit_decode_sum([p], 100, 64) for p in payloads], ops.now(grad)[1]

    graph = step.get_concrete_function(tf.TensorSpec([100], tf.float32)).graph
    ours = [op for op in graph.get_operations() if op.type.startswith("HvdQuant")]
    assert len(ours) == 8 and not any(op.control_inputs for op in ours)


def test_many_encodes_at_once():
    sizes = [1 + 997 * i for i in range(40)]
    grads = [normal(n, n) for n in sizes]
    pairs = [(CODECS[i % len(CODECS)], Others(CODECS[i % len(CODECS)], zeros(n))) for i, n in enumerate(sizes)]

    @tf.function
    def encode(step):
        return [codec.encode(ops, g, others.variable, step) for (codec, others), g in zip(pairs, grads)]

    for step in range(3):
        for payload, (_, others), g in zip(encode(tf.constant(step, tf.int64)), pairs, grads):
            others.check_encode(payload, g, step)


@each_codec
def test_out_is_left_alone_where_it_is_needed(codec):
    payload = codec.encode(ops, normal(3000), None)

    @tf.function
    def decode(out):
        return codec.decode_sum(ops, [payload], 3000, out=out), out, out + 1

    total, out, more = decode(tf.zeros([3000]))
    np.testing.assert_array_equal(total, codec.decode_sum(generic, [payload.numpy()], 3000))
    assert not out.numpy().any() and (more.numpy() == 1).all()


def test_memory_of_out_is_reused():
    payload, addresses = ops.onebit_encode(normal(2**20), None, 64), []

    @tf.function
    def decode(x):
        grad = x * 2
        with tf.control_dependencies([tf.numpy_function(lambda g: addresses.append(g.ctypes.data), [grad], [])]):
            return ops.onebit_decode_sum([payload], 2**20, 64, out=grad)

    assert address(decode(normal(2**20))) == addresses[0]


def test_now():
    @tf.function
    def times(x):
        product, first = ops.now(tf.linalg.matmul(x, x))
        (_, second), (_, constant) = ops.now(product), ops.now(tf.constant([1.0, 2.0]) * 2)
        return first, second, constant

    x = tf.random.normal([500, 500])
    for _ in range(3):
        start = time.perf_counter()
        first, second, constant = times(x)
        end = time.perf_counter()
        assert start <= first <= second <= end
        assert start <= constant <= end  # and not when the graph was made


def test_require():
    @tf.function
    def required(x, error):
        return ops.require(x * 2, error)

    np.testing.assert_array_equal(required(tf.constant([1, 2]), ""), [2, 4])
    with pytest.raises(tf.errors.DataLossError, match="w: it is \N{SNOWMAN}"):
        required(tf.constant([1, 2]), "w: it is \N{SNOWMAN}")


# -------------------------------------------------------------------------------------------------------------- errors

def outcome(codec, backend, gathered, world, numel):
    """The bits of the sum, or the error's sentence."""
    try:
        if backend is ops:
            return bits(codec.decode_sum(ops, ops.Payloads(gathered, world), numel)).tobytes()
        return bits(codec.decode_sum(generic, wire.split(gathered, world), numel)).tobytes()
    except wire.PayloadError as error:
        return str(error)
    except tf.errors.DataLossError as error:
        return re.fullmatch(r"\{\{function_node .*?\}\} (.*) \[Op:\w+\] name: ", error.message, re.DOTALL)[1]


@pytest.mark.parametrize("codec", FUZZED, ids=repr)
def test_mutated_payloads(codec):
    rng = np.random.default_rng(zlib.crc32(repr(codec).encode()))
    accepted = refused = 0
    for numel, count in ((600, 400), (16_900, 60)):  # the second has two units
        good = codec.encode(generic, normal(numel), None)
        for i, (bad, _) in enumerate(mutations(rng, good, count)):
            parts = [[bad], [good, bad], [bad, good]][i % 3]
            found = outcome(codec, ops, np.concatenate(parts), len(parts), numel)
            assert found == outcome(codec, generic, np.concatenate(parts), len(parts), numel)
            accepted, refused = accepted + (not isinstance(found, str)), refused + isinstance(found, str)
    assert accepted > 5 and refused > 200


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_gathered_bytes_are_cut_as_the_headers_tell(world):
    """What can't be cut, and failures, whose payloads are of any length."""
    codec = Codec("onebit")
    good, failed = codec.encode(generic, normal(300), None), wire.failure("onebit", 300, 1, "no memory, \N{SNOWMAN}")
    endless = good.copy()
    endless[16:24] = 255
    for parts in ([good] * world, [good] * (world - 1) + [failed], [failed] + [good] * (world - 1), [good[:-8]] * world,
                  [good[:20]], [endless] * world, [endless] + [good] * world, [good] * (world + 1), [good[:0]],
                  [good] + [failed] * 7):
        gathered = np.concatenate(parts)
        assert outcome(codec, ops, gathered, world, 300) == outcome(codec, generic, gathered, world, 300)


def test_errors_begin_with_the_name():
    payloads = ops.Payloads(tf.zeros([100], tf.uint8), 1, "dense/kernel")
    with pytest.raises(tf.errors.DataLossError, match="dense/kernel: payload starts with 0000, expected 4851"):
        ops.onebit_decode_sum(payloads, 9, 64)


def test_flags():
    good, infinite = (ops.onebit_encode(g, None, 64) for g in (normal(9), INPUTS["non-finite"](9)))
    failed = wire.failure("onebit", 9, 1, "no memory")
    for payloads, expected in (([good, good], 0), ([good, infinite], wire.NONFINITE), ([failed, good], wire.FAILED),
                               ([infinite, failed], wire.NONFINITE | wire.FAILED)):
        assert ops.flags(payloads, "onebit", 9) == expected
    flipped = good.numpy()
    flipped[40] ^= 1
    for payloads, codec, numel in (([good], "topk", 9), ([good], "onebit", 8), ([good[:-8]], "onebit", 9),
                                   ([good, flipped], "onebit", 9), ([good[:5]], "onebit", 9)):
        assert ops.flags(payloads, codec, numel) == ops.DAMAGED


G, E, DRAW = normal(100), variable(zeros(100)), (0, 0, 0, 0, 0)


@pytest.mark.parametrize("call, message", [
    (lambda: ops.onebit_encode(tf.constant(G, tf.float64), None, 64), "expected to be a float tensor but is a double"),
    (lambda: ops.onebit_encode(G.reshape(2, -1), None, 64),
     r"grad has 2 dimensions, expected a flat vector: pass tf.reshape\(grad, \[-1\]\)"),
    (lambda: ops.onebit_encode(G[1:], E, 64), "residual has 100 entries, expected as many as grad: 99"),
    (lambda: ops.onebit_encode(G, variable(np.zeros(100, np.float16)), 64), "residual is half, expected float"),
    (lambda: ops.onebit_encode(G, variable(zeros(100).reshape(2, -1)), 64), "residual has 2 dimensions"),
    (lambda: ops.onebit_encode(G, E, 100), "block_size is 100, expected a positive multiple of 64"),
    (lambda: ops.signsgd_encode(G, E, 100, True), "block_size is 100, expected a positive multiple of 64"),
    (lambda: ops.qsgd_encode(G, E, 3, "max", 64, *DRAW), "bits is 3, expected 2, 4 or 8"),
    (lambda: ops.qsgd_encode(G, E, 4, "l1", 64, *DRAW), "norm is l1, expected max or l2"),
    (lambda: ops.natural_encode(G, E, 0, 65, 0, 0, 0), "first is 65, expected a multiple of 64"),
    (lambda: ops.natural_encode(G, E, 0, 0, [0], 0, 0), r"step has shape \[1\], expected a scalar"),
    (lambda: ops.terngrad_measure(G, E, -1.0), "clip is -1, expected a number of standard deviations, 0 for none"),
    (lambda: ops.terngrad_encode(G, E, G, *DRAW), "largest has 100 entries, expected 1"),
    (lambda: ops.terngrad_encode(G, E, [-1.0], *DRAW), "largest is -1, expected a finite number of at least 0"),
    (lambda: ops.blockwise8_encode(G, E, "log", 64), "code is log, expected linear or dynamic"),
    (lambda: ops.threshold_encode(G, E, 0.0, 8, 0), "tau is 0, expected a positive number that fp32 holds"),
    (lambda: ops.threshold_encode(G, E, 1.0, 0, 0), "slots is 0, expected a positive multiple of 8"),
    (lambda: ops.threshold_encode(G, E, 1.0, 8, [0]), r"step has shape \[1\], expected a scalar"),
    (lambda: ops.topk_encode(G, E, np.ones(2, np.float32), 8, "float32", 0), r"thresholds is \(1, 1\), expected a"),
    (lambda: ops.topk_encode(G, E, np.ones(3, np.float32), 8, "float32", 0), "thresholds has 3 entries, expected 2"),
    (lambda: ops.topk_encode(G, E, [1.0, -1.0], 8, "int8", 0), "values is int8, expected float32, float16, sign,"),
    (lambda: ops.model_measure(G, E, 0.0, 0, E, variable(zeros(2))), "ratio is 0, expected 0 < ratio <= 1"),
    (lambda: ops.model_measure(G, E, 0.1, 0, E, variable(zeros(3))), "threshold has 3 entries, expected 2"),
    (lambda: ops.cast_encode(G, "int8", "x"), "dtype is int8, expected float32, float16 or bfloat16"),
    (lambda: ops.topk_measure(G, E, 1.5, 0), "ratio is 1.5, expected 0 < ratio <= 1"),
    (lambda: ops.onebit_decode_sum([np.zeros(40, np.uint8)], 9, 64, out=G), r"out has shape \[100\], expected \[9\]"),
    (lambda: ops.flags(ops.Payloads(np.zeros(40, np.uint8), 0), "x", 9), "world is 0, expected the number"),
    (lambda: ops.without_flags(np.zeros(30, np.uint8)), "payload has 30 bytes, expected a multiple of 4, at least 32"),
    (lambda: ops.restore(E, G[1:], G), "decoded has 99 entries, expected as many as grad: 100"),
])
def test_arguments(call, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        call()


@pytest.mark.parametrize("call, message", [
    (lambda g: ops.onebit_encode(g, E, 100), "block_size is 100, expected a positive multiple of 64"),
    (lambda g: ops.topk_encode(g, E, [1.0, -1.0], 12, "float32", 0), "slots is 12, expected a positive multiple of 8"),
    (lambda g: ops.onebit_encode(tf.reshape(g, [2, -1]), E, 64), "Shape must be rank 1 but is rank 2"),
])
def test_arguments_are_checked_when_traced(call, message):
    with pytest.raises(ValueError, match=message):
        tf.function(call).get_concrete_function(tf.TensorSpec([100], tf.float32))


def test_a_variable_without_a_value():
    with tf.Graph().as_default():
        residual = tf.compat.v1.get_variable("e", [100], use_resource=True)
        payload = ops.onebit_encode(tf.zeros([100]), residual, 64)
        with tf.compat.v1.Session() as session:
            with pytest.raises(tf.errors.InvalidArgumentError, match="residual is a variable without a value"):
                session.run(payload)


# --------------------------------------------------------------------------------------------------- in other processes

def digest():
    """A hash of payloads, residuals and sums, for comparing processes."""
    found = 0
    for codec in CODECS + CASTS:
        for kind, numel in [("subnormal", 3000), ("normal", 50_001), ("constant", 50_001)]:
            residual = variable(normal(numel, 5))
            payload = codec.encode(ops, INPUTS[kind](numel), residual)
            for x in (payload, bits(residual), bits(codec.decode_sum(ops, [payload, payload], numel))):
                found = zlib.crc32(np.asarray(x).tobytes(), found)
    return found


def in_process(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
                          cwd=Path(__file__).parents[2], capture_output=True, text=True)


def test_threads_give_the_same_bytes():
    done = in_process("import tensorflow as tf; tf.config.threading.set_intra_op_parallelism_threads(1)\n"
                      "from tests.single import test_tensorflow_ops as t; print(t.digest())")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == digest()


def test_an_exception_in_a_kernel_is_an_error_of_the_operation():
    done = in_process("import tensorflow as tf; from hvd_quant.ops import tensorflow as ops\n"
                      "try: ops.onebit_encode(tf.zeros([100_000]), None, 64)\n"
                      "except tf.errors.OpError as error: print(error.message)", HVD_QUANT_SIMD="sse")
    assert "HVD_QUANT_SIMD=sse is unknown, expected plain, avx2 or avx512" in done.stdout, done.stderr


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "hvd_quant.ops.tensorflow")
    with pytest.raises(ImportError, match="pip install --no-build-isolation"):
        __import__("hvd_quant.ops.tensorflow")


def test_with_the_extension_of_another_tensorflow(monkeypatch, tmp_path):
    """A library with a symbol that this TensorFlow lacks."""
    source, library = tmp_path / "other.cc", tmp_path / "other.so"
    source.write_text("void gone(); struct Calls { Calls() { gone(); } } calls;")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: type("Spec", (), {"origin": str(library)}))
    monkeypatch.delitem(sys.modules, "hvd_quant.ops.tensorflow")
    with pytest.raises(ImportError, match=f"built for another TensorFlow than {tf.__version__}: .*undefined symbol"):
        __import__("hvd_quant.ops.tensorflow")
