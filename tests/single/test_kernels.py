"""The native kernels against the specification: the same bytes, residuals and sums."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("hvd_quant.ops.torch", exc_type=ImportError)

from hvd_quant import wire  # noqa: E402
from hvd_quant.ops import generic  # noqa: E402

SIZES = [0, 1, 7, 8, 9, 31, 33, 255, 256, 257, 2047, 2048, 2049, 16383, 16384, 16385, 70001]
LEVELS = ["plain", "avx2", "avx512"]


class Codec:
    """One code with its settings. Thresholds come from the native sample, which has its own test."""

    def __init__(self, name, ratio=0.02, tau=2.0, block_size=256, zeros=False, values="float32"):
        self.name, self.ratio, self.tau = name, ratio, tau
        self.block_size, self.zeros, self.values = block_size, zeros, values

    def __repr__(self):
        return f"{self.name}-{self.block_size}{'-zeros' * self.zeros}" if self.name == "onebit" else (
            f"{self.name}-{self.ratio}-{self.values}")

    def encode(self, backend, grad, residual, step=3):
        slots = generic.slots_for(self.ratio, grad.numel())
        if self.name == "onebit":
            return backend.onebit_encode(grad, residual, self.block_size, self.zeros)
        if self.name == "threshold":
            return backend.threshold_encode(grad, residual, self.tau, slots, step)
        if self.name == "adaptive":
            return backend.adaptive_encode(grad, residual, ops.adaptive_measure(grad, residual, self.ratio, step), slots, step)
        return backend.topk_encode(grad, residual, ops.topk_measure(grad, residual, self.ratio, step), slots, self.values, step)

    def decode_sum(self, backend, payloads, numel, out=None):
        slots = generic.slots_for(self.ratio, numel)
        if self.name == "onebit":
            return backend.onebit_decode_sum(payloads, numel, self.block_size, self.zeros, out=out)
        if self.name == "topk":
            return backend.topk_decode_sum(payloads, numel, slots, self.values, out=out)
        return getattr(backend, f"{self.name}_decode_sum")(payloads, numel, slots, out=out)

    def levels(self, numel):
        """The bytes of a payload that hold levels computed as means."""
        if self.name == "onebit":
            return slice(32, 32 + 8 * -(-numel // self.block_size))
        return slice(40, 40 + 8 * generic.units_of(numel)) if self.name == "adaptive" else slice(0, 0)


CODECS = [
    Codec("onebit"), Codec("onebit", block_size=2048), Codec("onebit", zeros=True), Codec("onebit", block_size=64),
    Codec("threshold"), Codec("threshold", tau=0.5),  # the second has more candidates than slots
    Codec("adaptive"), Codec("adaptive", ratio=0.4),
    Codec("topk"), Codec("topk", values="float16"), Codec("topk", ratio=1.0),
]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def normal(numel, seed=0, scale=1.0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def sprinkled(numel, values, base=None):
    """A vector with ``values`` at places all over it."""
    v = normal(numel) if base is None else base
    for i in range(0, numel, 5):
        v[i] = values[i // 5 % len(values)]
    return v


INPUTS = {
    "normal": normal,
    "constant": lambda n: torch.full((n,), 3.25),
    "zero": torch.zeros,
    "positive": lambda n: normal(n).abs(),
    "negative": lambda n: -normal(n).abs(),
    "signed zeros": lambda n: sprinkled(n, [-0.0, 0.0]),
    "subnormal": lambda n: sprinkled(n, [1e-45, -3e-42, 2e-40], normal(n, scale=1e-39)),
    "huge": lambda n: sprinkled(n, [3e38, -3e38, 1e30], torch.zeros(n)),
    "beyond fp16": lambda n: sprinkled(n, [7e4, -65519.0, 65520.0, 6e-8, -2.9e-8]),
    "non-finite": lambda n: sprinkled(n, [math.nan, math.inf, -math.inf, 1.0, 2.0, 0.5, -3.0]),
    "sparse": lambda n: sprinkled(n, [0.0] * 99 + [5.0], torch.zeros(n)),
}


def bits(x):
    return x.view(torch.int32)


def assert_same_payload(codec, numel, found, expected):
    """Equal but for levels, which may differ by 1e-6, and so the checksum."""
    assert found.shape == expected.shape
    levels = codec.levels(numel)
    torch.testing.assert_close(found[levels].clone().view(torch.float32), expected[levels].clone().view(torch.float32),
                               rtol=1e-6, atol=3e-45)
    if torch.equal(found[levels], expected[levels]):
        assert torch.equal(found, expected)
    found, expected = found.clone(), expected.clone()
    for part in (levels, slice(24, 32)):
        found[part] = expected[part] = 0
    assert torch.equal(found, expected)


def assert_same(codec, grad, residual, step=3):
    numel = grad.numel()
    residuals = [None if residual is None else residual.clone() for _ in range(2)]
    found = codec.encode(ops, grad, residuals[0], step)
    # Thresholds depend on the residual, which encode changes: the second residual is still the first's old value.
    expected = codec.encode(generic, grad, residuals[1], step)
    assert_same_payload(codec, numel, found, expected)
    if residual is not None:
        scale = float(residuals[1].abs().max()) if numel else 0.0
        atol = 2e-6 * scale if codec.levels(numel).stop else 0.0
        torch.testing.assert_close(residuals[0], residuals[1], rtol=0, atol=atol)
    return found


@pytest.mark.parametrize("kind", INPUTS)
@each_codec
def test_same_as_generic(codec, kind):
    for numel in SIZES if kind == "normal" else (0, 9, 2049, 16385):
        grad = INPUTS[kind](numel)
        payloads = [assert_same(codec, grad, residual, step)
                    for step, residual in enumerate((None, torch.zeros(numel), normal(numel, 1, 0.3)))]
        torch.testing.assert_close(bits(codec.decode_sum(ops, payloads, numel)),
                                   bits(codec.decode_sum(generic, payloads, numel)), rtol=0, atol=0)


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
@each_codec
def test_nothing_is_lost(codec, numel):
    residual, sent, given = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(50):
        grad = normal(numel, step)
        given += grad
        sent += codec.decode_sum(ops, [codec.encode(ops, grad, residual, step)], numel)
    torch.testing.assert_close(sent + residual, given, rtol=0, atol=2e-4)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.name != "onebit" and c.ratio < 0.4], ids=repr)
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", INPUTS)
def test_casts(kind, dtype):
    for numel in (1, 3, 8, 4097):
        payloads = [ops.cast_encode(grad, dtype, "some") for grad in (INPUTS[kind](numel), normal(numel))]
        assert torch.equal(payloads[0], generic.cast_encode(INPUTS[kind](numel), dtype, "some"))
        found, expected = (b.cast_decode_sum(payloads, numel, dtype, "some") for b in (ops, generic))
        assert torch.equal(bits(found), bits(expected))


def digest():
    """A hash of payloads, residuals and sums, for comparing processes."""
    digest = hashlib.sha256()
    for codec in CODECS:
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


@pytest.mark.parametrize("call, message", [
    (lambda g, e: ops.onebit_encode(g.double(), e, 64), "grad is Double, expected Float"),
    (lambda g, e: ops.onebit_encode(g.view(2, -1), e, 64), r"grad has 2 dimensions, expected a flat vector"),
    (lambda g, e: ops.onebit_encode(g[::2], None, 64), "grad has stride 2, expected a contiguous vector"),
    (lambda g, e: ops.onebit_encode(g, e[1:], 64), "residual has 99 entries, expected as many as grad: 100"),
    (lambda g, e: ops.onebit_encode(g, e.half(), 64), "residual is Half, expected Float"),
    (lambda g, e: ops.onebit_encode(g, e, 100), "block_size is 100, expected a positive multiple of 64"),
    (lambda g, e: ops.threshold_encode(g, e, 0.0, 8, 0), "tau is 0, expected a positive number"),
    (lambda g, e: ops.threshold_encode(g, e, 1.0, 12, 0), "slots is 12, expected a positive multiple of 8"),
    (lambda g, e: ops.topk_encode(g, e, torch.ones(2), 8, "float32", 0), r"thresholds is \(1, 1\), expected a positive and"),
    (lambda g, e: ops.topk_encode(g, e, torch.ones(3), 8, "float32", 0), "thresholds has 3 entries, expected 2"),
    (lambda g, e: ops.topk_encode(g, e, torch.tensor([1.0, -1.0]), 8, "int8", 0), "values is int8, expected float32 or float16"),
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
