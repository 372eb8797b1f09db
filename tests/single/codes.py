"""What the tests of the backends share, in NumPy: codes with their settings, inputs, ways to damage a payload."""

import math

import numpy as np

from hvd_quant import wire
from hvd_quant.ops import layout

SIZES = [0, 1, 7, 8, 9, 31, 33, 255, 256, 257, 2047, 2048, 2049, 16383, 16384, 16385, 70001]

EXTREMES = [0, 1, 0xFF, 0x7F800000, 0xFFFFFFFF, 0x80000000, 0x7FC00000, 0x01010101]

_DTYPES = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}


_SPARSE = ("threshold", "adaptive", "topk")
_SIGNS = ("onebit", "signsgd")


class Codec:
    """One code with its settings."""

    def __init__(self, name, ratio=0.02, tau=2.0, block_size=256, zeros=False, values="float32", bits=4, norm="max", clip=2.5,
                 code="dynamic"):
        self.name, self.ratio, self.tau = name, ratio, tau
        self.block_size, self.zeros, self.values = block_size, zeros, values
        self.bits, self.norm, self.clip, self.code = bits, norm, clip, code
        self.sparse, self.at_random = name in _SPARSE, name in ("qsgd", "terngrad", "natural")

    def __repr__(self):
        settings = {"onebit": [self.block_size, "zeros" * self.zeros], "signsgd": [self.block_size, "zeros" * self.zeros],
                    "qsgd": [self.bits, self.norm, self.block_size], "terngrad": [self.clip],
                    "blockwise8": [self.code, self.block_size], **{name: [self.ratio, self.values] for name in _SPARSE}}
        return "-".join(map(str, filter(bool, [self.name, *settings.get(self.name, [])])))

    def measure(self, backend, grad, residual, step=3):
        """What is decided for a whole tensor."""
        if self.name in ("adaptive", "topk"):
            return getattr(backend, f"{self.name}_measure")(grad, residual, self.ratio, step)
        return backend.terngrad_measure(grad, residual, self.clip) if self.name == "terngrad" else None

    def encode(self, backend, grad, residual, step=3, first=0, numel=None, measured=None):
        """The payload of a range that begins at ``first`` and has ``numel`` entries, all of ``grad`` where None."""
        measured = self.measure(backend, grad, residual, step) if measured is None else measured
        slots, draw = layout.slots_for(self.ratio, grad.shape[0] if numel is None else numel), (-77, first, step, 1, 0)
        settings = {
            "onebit": (self.block_size, self.zeros), "signsgd": (self.block_size, self.zeros),
            "qsgd": (self.bits, self.norm, self.block_size, *draw), "terngrad": (measured, *draw), "natural": draw,
            "blockwise8": (self.code, self.block_size), "threshold": (self.tau, slots, step), "adaptive": (measured, slots, step),
            "topk": (measured, slots, self.values, step)}
        if self.name in _DTYPES:
            return backend.cast_encode(grad, _DTYPES[self.name], self.name)
        return getattr(backend, f"{self.name}_encode")(grad, residual, *settings[self.name])

    def decode_sum(self, backend, payloads, numel, out=None, scale=1.0):
        slots = layout.slots_for(self.ratio, numel)
        settings = {
            "onebit": (self.block_size, self.zeros), "signsgd": (self.block_size, self.zeros), "qsgd": (self.bits, self.block_size),
            "blockwise8": (self.code, self.block_size), "threshold": (slots,), "adaptive": (slots,), "topk": (slots, self.values)}
        if self.name in _DTYPES:
            return backend.cast_decode_sum(payloads, numel, _DTYPES[self.name], self.name, out=out, scale=scale)
        return getattr(backend, f"{self.name}_decode_sum")(payloads, numel, *settings.get(self.name, ()), out=out, scale=scale)

    def levels(self, numel):
        """The bytes of a payload that hold levels computed as means."""
        if self.name in _SIGNS:
            return slice(32, 32 + (8 if self.name == "onebit" else 4) * -(-numel // self.block_size))
        pairs = layout.topk_levels(numel, self.values) if self.name == "topk" else (self.name == "adaptive") * layout.units_of(numel)
        return slice(40, 40 + 8 * pairs) if pairs else slice(0, 0)


DENSE = [
    Codec("signsgd"), Codec("signsgd", zeros=True, block_size=2048), Codec("qsgd"), Codec("qsgd", bits=2, block_size=64),
    Codec("qsgd", bits=8, norm="l2", block_size=512), Codec("terngrad"), Codec("terngrad", clip=0), Codec("natural"),
    Codec("blockwise8"), Codec("blockwise8", code="linear", block_size=2048),
]
CODECS = [
    Codec("onebit"), Codec("onebit", block_size=2048), Codec("onebit", zeros=True), Codec("onebit", block_size=64),
    Codec("threshold"), Codec("threshold", tau=0.5),  # the second has more candidates than slots
    Codec("adaptive"), Codec("adaptive", ratio=0.4),
    Codec("topk"), Codec("topk", values="float16"), Codec("topk", ratio=1.0),
    Codec("topk", values="sign"), Codec("topk", values="tensor_sign"),
    Codec("topk", values="2bit"), Codec("topk", ratio=1.0, values="2bit"), *DENSE,
]
CASTS = [Codec("none"), Codec("fp16"), Codec("bf16")]
FUZZED = [  # with unused slots and more than one block
    Codec("onebit", block_size=128), Codec("onebit", block_size=128, zeros=True),
    Codec("threshold", ratio=0.1), Codec("adaptive", ratio=0.1), Codec("topk", ratio=0.1),
    *(Codec("topk", ratio=0.1, values=values) for values in ("float16", "sign", "tensor_sign", "2bit")),
    *CASTS,
    Codec("signsgd", block_size=128, zeros=True), Codec("qsgd", block_size=128), Codec("qsgd", bits=2), Codec("terngrad"),
    Codec("natural"), Codec("blockwise8"), Codec("blockwise8", code="linear"),
]


def normal(numel, seed=0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=numel) * scale).astype(np.float32)


def sprinkled(numel, values, base=None):
    """A vector with ``values`` at places all over it."""
    v = normal(numel) if base is None else base
    v[::5] = np.resize(np.float32(values), len(v[::5]))
    return v


def zeros(numel):
    return np.zeros(numel, np.float32)


INPUTS = {
    "normal": normal,
    "constant": lambda n: np.full(n, 3.25, np.float32),
    "zero": zeros,
    "positive": lambda n: abs(normal(n)),
    "negative": lambda n: -abs(normal(n)),
    "signed zeros": lambda n: sprinkled(n, [-0.0, 0.0]),
    "subnormal": lambda n: sprinkled(n, [1e-45, -3e-42, 2e-40], normal(n, scale=1e-39)),
    "huge": lambda n: sprinkled(n, [3e38, -3e38, 1e30], zeros(n)),
    "beyond fp16": lambda n: sprinkled(n, [7e4, -65519.0, 65520.0, 6e-8, -2.9e-8]),
    "beyond bf16": lambda n: sprinkled(n, [3.39e38, -3.3961776e38, 3.396177e38]),
    "non-finite": lambda n: sprinkled(n, [math.nan, math.inf, -math.inf, 1.0, 2.0, 0.5, -3.0]),
    "sparse": lambda n: sprinkled(n, [0.0] * 99 + [5.0], zeros(n)),
}


def bits(x):
    """The bits of a float array, so that -0 differs from 0 and NaN equals NaN."""
    return np.asarray(x).view(np.int32)


def assert_same_payload(codec, numel, found, expected):
    """Equal but for levels, which may differ by 1e-6, and so the checksum."""
    found, expected = np.asarray(found).copy(), np.asarray(expected).copy()
    assert found.shape == expected.shape
    levels = codec.levels(numel)
    np.testing.assert_allclose(found[levels].view(np.float32), expected[levels].view(np.float32), rtol=1e-6, atol=3e-45)
    if not np.array_equal(found[levels], expected[levels]):
        for part in (levels, slice(24, 32)):
            found[part] = expected[part] = 0
    np.testing.assert_array_equal(found, expected)


def assert_same_residual(codec, numel, found, expected):
    """Equal but for what the levels may differ by."""
    expected = np.asarray(expected)
    atol = 2e-6 * float(abs(expected).max()) if numel and codec.levels(numel).stop else 0.0
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=atol)


def mutate(rng, payload):
    """A payload with some of its bytes, bits, words or its length changed."""
    payload = payload.copy()
    kind = rng.integers(8)
    if kind == 0:
        payload[rng.integers(wire.HEADER_BYTES)] = rng.integers(256)
    elif kind == 1:
        payload = payload[:rng.integers(len(payload))]
    elif kind == 2:
        payload = np.concatenate([payload, rng.integers(256, size=rng.integers(1, 17), dtype=np.uint8)])
    elif kind == 3:
        payload[rng.integers(len(payload), size=rng.integers(1, 4))] ^= np.uint8(1 << rng.integers(8))
    elif kind == 4:
        payload[wire.HEADER_BYTES:] = rng.integers(256, size=len(payload) - wire.HEADER_BYTES, dtype=np.uint8)
    elif kind == 5:  # extreme numbers where counts, positions, levels and values are
        at = wire.HEADER_BYTES + 4 * rng.integers((len(payload) - wire.HEADER_BYTES) // 4)
        payload[at:at + 4].view(np.uint32)[0] = rng.choice(EXTREMES)
    elif kind == 6:
        at = rng.integers(wire.HEADER_BYTES, len(payload), size=2)
        payload[at] = payload[at[::-1]]
    else:
        at = rng.integers(wire.HEADER_BYTES, len(payload))
        payload[at:at + 1] += np.uint8(rng.choice([1, 255]))
    return payload


def mutations(rng, good, count):
    """``count`` pairs of a mutated payload and whether it was sealed again, to reach what comes after the checksum."""
    for i in range(count):
        bad = mutate(rng, good)
        sealed = i % 2 == 0 and len(bad) >= wire.HEADER_BYTES and len(bad) % 4 == 0
        if sealed:
            if i % 4 == 0:  # a header that says what the length is
                bad[16:24].view(np.int64)[0] = len(bad) - wire.HEADER_BYTES
            wire.seal(bad)
        yield bad, sealed
