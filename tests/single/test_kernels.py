"""The native kernels against the specification: the same bytes, residuals and sums."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("hvd_quant.ops.torch", exc_type=ImportError)

from hvd_quant import wire  # noqa: E402
from hvd_quant.ops import generic  # noqa: E402
from tests.single import codes  # noqa: E402
from tests.single.codes import CASTS, CODECS, SIZES, Codec, assert_same_payload, assert_same_residual  # noqa: E402

LEVELS = ["plain", "avx2", "avx512"]
INPUTS = {kind: lambda n, make=make: torch.from_numpy(make(n)) for kind, make in codes.INPUTS.items()}
each_codec = pytest.mark.parametrize("codec", CODECS + CASTS, ids=repr)


def normal(numel, seed=0, scale=1.0):
    return torch.from_numpy(codes.normal(numel, seed, scale))


def bits(x):
    return x.view(torch.int32)


def assert_same(codec, grad, residual, step=3):
    numel = grad.numel()
    residuals = [None if residual is None else residual.clone() for _ in range(2)]
    found, expected = (codec.encode(backend, grad, e, step) for backend, e in zip((ops, generic), residuals))
    assert_same_payload(codec, numel, found, expected)
    if residual is not None:
        assert_same_residual(codec, numel, *residuals)
    return found


@pytest.mark.parametrize("kind", INPUTS)
@each_codec
def test_same_as_generic(codec, kind):
    for numel in SIZES if kind == "normal" else (0, 9, 2049, 16385):
        grad = INPUTS[kind](numel)
        payloads = [assert_same(codec, grad, residual, step)
                    for step, residual in enumerate((None, torch.zeros(numel), normal(numel, 1, 0.3)))]
        found, expected = (bits(codec.decode_sum(backend, payloads, numel, scale=1 / 3)) for backend in (ops, generic))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.at_random], ids=repr)
def test_beyond_the_entry_2_to_the_32(codec):
    """Places in the whole tensor count, of which a kernel hashes the upper bits apart."""
    for first in (2**32 - 256, 5 * 2**32 - 256):
        grad = normal(700)
        expected, found = (codec.encode(backend, grad, None, first=first) for backend in (generic, ops))
        assert torch.equal(found, expected)
    assert not torch.equal(found, codec.encode(ops, grad, None, first=2**32 - 256))


@pytest.mark.parametrize("codec", [c for c in CODECS if c.name == "blockwise8"], ids=repr)
def test_values_at_and_beside_every_mark(codec):
    """Half-way between all neighbouring values of a code, and an ulp to either side."""
    codec = Codec("blockwise8", code=codec.code, block_size=2048)
    values = torch.tensor(sorted(generic.dynamic_code()) if codec.code == "dynamic" else [k / 127 for k in range(-127, 128)])
    marks = (values[1:] + values[:-1]) * 0.5
    up, down = torch.full_like(marks, 2.0), torch.full_like(marks, -2.0)
    grad = torch.cat([torch.ones(1), values, marks, torch.nextafter(marks, up), torch.nextafter(marks, down)])
    payload = assert_same(codec, grad, torch.zeros_like(grad))
    decoded = codec.decode_sum(ops, [payload], grad.numel())
    nearest = (grad[:, None] - values).abs().min(1).values
    assert ((grad - decoded).abs() <= nearest * (1 + 1e-6) + 1e-7).all()


@each_codec
def test_a_large_tensor(codec):
    numel = 2**20 + 77  # from here on decoders write past the caches
    payloads = [assert_same(codec, normal(numel, seed), normal(numel, 9), step=seed) for seed in range(2)]
    expected = bits(codec.decode_sum(generic, payloads, numel))
    room = torch.empty(numel + 1)
    for out in (room[:numel], room[1:]):
        codec.decode_sum(ops, payloads, numel, out)
        assert torch.equal(bits(out), expected)


@each_codec
def test_views_at_any_address(codec):
    numel, room = 5000, torch.empty(5003)
    for shift in range(4):
        grad, residual, out = (torch.empty_like(room)[shift:shift + numel] for _ in range(3))
        grad.copy_(normal(numel))
        residual.copy_(normal(numel, 1))
        payload = assert_same(codec, grad, residual)
        shifted = torch.empty(payload.numel() + 3, dtype=torch.uint8)[shift:][:payload.numel()]
        shifted.copy_(payload)
        codec.decode_sum(ops, [shifted, shifted], numel, out)
        assert torch.equal(bits(out), bits(codec.decode_sum(generic, [payload, payload], numel)))


@pytest.mark.parametrize("numel", [16, 3000, 70001])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_nothing_is_lost(codec, numel):
    residual, sent, given = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(50):
        grad = normal(numel, step)
        given += grad
        sent += codec.decode_sum(ops, [codec.encode(ops, grad, residual, step)], numel)
    torch.testing.assert_close(sent + residual, given, rtol=0, atol=2e-4)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.sparse and c.ratio < 0.4], ids=repr)
@pytest.mark.parametrize("numel", [3000, 16400, 50000])
def test_no_place_is_starved(codec, numel):
    """Under a constant gradient everything is a candidate; which entries get the slots moves with the step."""
    codec = Codec(codec.name, codec.ratio, tau=1.0, values=codec.values)
    residual, sent = torch.zeros(numel), torch.zeros(numel, dtype=torch.bool)
    steps = 0
    while not sent.all() and steps < 1000:
        sent |= codec.decode_sum(ops, [codec.encode(ops, torch.ones(numel), residual, steps)], numel) != 0
        steps += 1
    assert steps <= 6 * numel / generic.slots_for(codec.ratio, numel)


@pytest.mark.parametrize("kind, numel", [*((kind, numel) for kind in INPUTS for numel in (1, 7, 4095, 4097)),
                                         ("normal", 70001), ("normal", 3_000_000)])
def test_thresholds(kind, numel):
    grad, step = INPUTS[kind](numel), 11
    for residual in (None, normal(numel, 1)):
        for ratio in (0.001, 0.05, 1.0):
            for name in ("topk_measure", "adaptive_measure"):
                found, expected = (getattr(b, name)(grad, residual, ratio, step) for b in (ops, generic))
                assert torch.equal(bits(found), bits(expected)), (name, ratio)


def digest():
    """A hash of payloads, residuals and sums, for comparing processes."""
    digest = hashlib.sha256()
    for codec in CODECS + CASTS:
        for kind, numel in [*((kind, 700) for kind in INPUTS), ("normal", 50_001), ("constant", 50_001)]:
            residual = normal(numel, 5)
            payload = codec.encode(ops, INPUTS[kind](numel), residual)
            for x in (payload, bits(residual), bits(codec.decode_sum(ops, [payload, payload], numel))):
                digest.update(x.numpy().tobytes())
    return digest.hexdigest()


def in_process(level):
    code = ("import torch; torch.set_num_threads(1)\n"
            "from tests.single import test_kernels as t; print(torch.ops.hvd_quant.simd_level(), t.digest())")
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "HVD_QUANT_SIMD": level},
                          cwd=Path(__file__).parents[2], capture_output=True, text=True)


@pytest.mark.parametrize("level", LEVELS)
def test_processors_give_the_same_bytes(level):
    done = in_process(level)
    if "not supported by this processor" in done.stderr:
        pytest.skip(f"this processor has no {level}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [level, digest()]


def test_an_unknown_level_is_refused():
    assert "HVD_QUANT_SIMD=sse is unknown, expected plain, avx2 or avx512" in in_process("sse").stderr


def test_threads_give_the_same_bytes():
    before = torch.get_num_threads()
    try:
        found = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(digest())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@each_codec
def test_flushing_denormals_changes_nothing(codec):
    """TensorFlow's threads flush denormals and PyTorch's don't; a kernel must not care, nor change its caller's mode."""
    grad, residual = INPUTS["subnormal"](3000), normal(3000, 1, 1e-39)
    expected = codec.encode(ops, grad, residual.clone())
    try:
        assert torch.set_flush_denormal(True)
        assert torch.equal(codec.encode(ops, grad, residual.clone()), expected)
        assert float(torch.tensor([1e-39]) * 1) == 0
    finally:
        torch.set_flush_denormal(False)


@each_codec
def test_out_is_untouched_by_a_damaged_payload(codec):
    good, out = codec.encode(ops, normal(3000), None), torch.ones(3000)
    bad = good.clone()
    bad[-1] ^= 1
    with pytest.raises(wire.PayloadError, match="its bytes give"):
        codec.decode_sum(ops, [good, bad], 3000, out)
    assert (out == 1).all()


@each_codec
def test_a_failed_worker(codec):
    reason = "no memory, \N{SNOWMAN} and then some"
    failed = torch.from_numpy(wire.failure(codec.name, 100, 3, reason))
    good = codec.encode(ops, normal(100), None)
    with pytest.raises(wire.PayloadError, match=f"worker 3 failed to encode its gradient: {reason}"):
        codec.decode_sum(ops, [good, failed], 100)


@pytest.mark.parametrize("reason", [b"", b"plain", b"\xff", b"\xe2\x98", b"\xe2\x98x\xc0\xaf", b"\xed\xa0\x80\xf4\x90\x80\x80",
                                    b"\xf0\x9f\x98\x80\xf0\x9f\x98"])
def test_reasons_that_are_not_utf8(reason):
    failed = wire.failure("onebit", 9, 1, "x" * len(reason))
    failed[40:40 + len(reason)] = list(reason)
    payload = torch.from_numpy(wire.seal(failed))
    errors = []
    for backend in (ops, generic):
        with pytest.raises(wire.PayloadError) as error:
            backend.onebit_decode_sum([payload], 9, 64)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


DRAW = (0, 0, 0, 0, 0)


@pytest.mark.parametrize("call, message", [
    (lambda g, e: ops.onebit_encode(g.double(), e, 64), "grad is Double, expected Float"),
    (lambda g, e: ops.onebit_encode(g.view(2, -1), e, 64), r"grad has 2 dimensions, expected a flat vector"),
    (lambda g, e: ops.onebit_encode(g[::2], None, 64), "grad has stride 2, expected a contiguous vector"),
    (lambda g, e: ops.onebit_encode(g, e[1:], 64), "residual has 99 entries, expected as many as grad: 100"),
    (lambda g, e: ops.onebit_encode(g, e.half(), 64), "residual is Half, expected Float"),
    (lambda g, e: ops.onebit_encode(g, e, 100), "block_size is 100, expected a positive multiple of 64"),
    (lambda g, e: ops.signsgd_encode(g, e, 100, True), "block_size is 100, expected a positive multiple of 64"),
    (lambda g, e: ops.qsgd_encode(g, e, 3, "max", 64, *DRAW), "bits is 3, expected 2, 4 or 8"),
    (lambda g, e: ops.qsgd_encode(g, e, 4, "l1", 64, *DRAW), "norm is l1, expected max or l2"),
    (lambda g, e: ops.qsgd_encode(g, e, 4, "max", 32, *DRAW), "block_size is 32, expected a positive multiple of 64"),
    (lambda g, e: ops.natural_encode(g, e, 0, 65, 0, 0, 0), "first is 65, expected a multiple of 64"),
    (lambda g, e: ops.terngrad_measure(g, e, -1.0), "clip is -1, expected a number of standard deviations, 0 for none"),
    (lambda g, e: ops.terngrad_encode(g, e, g, *DRAW), "largest has 100 entries, expected 1"),
    (lambda g, e: ops.terngrad_encode(g, e, torch.tensor([-1.0]), *DRAW), "largest is -1, expected a finite number of at least 0"),
    (lambda g, e: ops.blockwise8_encode(g, e, "log", 64), "code is log, expected linear or dynamic"),
    (lambda g, e: ops.threshold_encode(g, e, 0.0, 8, 0), "tau is 0, expected a positive number"),
    (lambda g, e: ops.threshold_encode(g, e, 1.0, 12, 0), "slots is 12, expected a positive multiple of 8"),
    (lambda g, e: ops.topk_encode(g, e, torch.ones(2), 8, "float32", 0), r"thresholds is \(1, 1\), expected a positive and"),
    (lambda g, e: ops.topk_encode(g, e, torch.ones(3), 8, "float32", 0), "thresholds has 3 entries, expected 2"),
    (lambda g, e: ops.topk_encode(g, e, torch.tensor([1.0, -1.0]), 8, "int8", 0), "values is int8, expected float32, float16, sign,"),
    (lambda g, e: ops.model_measure(g, e, 0.0, 0, e, torch.zeros(2)), "ratio is 0, expected 0 < ratio <= 1"),
    (lambda g, e: ops.model_measure(g, e, 0.1, 0, e[1:], torch.zeros(2)), "magnitudes has 99 entries, expected 100"),
    (lambda g, e: ops.model_measure(g, e, 0.1, 0, e, torch.zeros(1)), "threshold has 1 entries, expected 2"),
    (lambda g, e: ops.cast_encode(g, "int8", "x"), "dtype is int8, expected float32, float16 or bfloat16"),
    (lambda g, e: ops.topk_measure(g, e, 1.5, 0), "ratio is 1.5, expected 0 < ratio <= 1"),
    (lambda g, e: ops.onebit_decode_sum([torch.zeros(40)], 9, 64), "payload is Float, expected Byte"),
    (lambda g, e: ops.onebit_decode_sum([torch.zeros(40).byte()], 9, 64, out=g), r"out has shape \(100,\), expected \(9,\)"),
])
def test_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal(100), torch.zeros(100))


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "hvd_quant.ops.torch")
    with pytest.raises(ImportError, match="pip install --no-build-isolation"):
        __import__("hvd_quant.ops.torch")
