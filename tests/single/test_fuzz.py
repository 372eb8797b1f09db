"""Damaged and hostile payloads: a clear error or, where they are well-formed all the same, what the specification decodes."""

import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("hvd_quant.ops.torch", exc_type=ImportError)

from hvd_quant import wire  # noqa: E402
from hvd_quant.ops import generic  # noqa: E402

MUTATIONS = 10_000  # a codec
COMPARED = 30  # every 30th of those that reach the body is decoded by the specification too, which takes a hundred times longer
SLOTS = 64

ENCODE = {
    "onebit": lambda g: ops.onebit_encode(g, None, 128),
    "onebit zeros": lambda g: ops.onebit_encode(g, None, 128, True),
    "threshold": lambda g: ops.threshold_encode(g, None, 2.0, SLOTS, 1),
    "adaptive": lambda g: ops.adaptive_encode(g, None, torch.tensor([2.0, -2.0]), SLOTS, 1),
    "topk": lambda g: ops.topk_encode(g, None, torch.tensor([2.0, -2.0]), SLOTS, "float32", 1),
    "topk half": lambda g: ops.topk_encode(g, None, torch.tensor([2.0, -2.0]), SLOTS, "float16", 1),
    "fp16": lambda g: ops.cast_encode(g, "float16", "fp16"),
    "bf16": lambda g: ops.cast_encode(g, "bfloat16", "bf16"),
}
DECODE = {
    "onebit": lambda b, p, n: b.onebit_decode_sum(p, n, 128),
    "onebit zeros": lambda b, p, n: b.onebit_decode_sum(p, n, 128, True),
    "threshold": lambda b, p, n: b.threshold_decode_sum(p, n, SLOTS),
    "adaptive": lambda b, p, n: b.adaptive_decode_sum(p, n, SLOTS),
    "topk": lambda b, p, n: b.topk_decode_sum(p, n, SLOTS, "float32"),
    "topk half": lambda b, p, n: b.topk_decode_sum(p, n, SLOTS, "float16"),
    "fp16": lambda b, p, n: b.cast_decode_sum(p, n, "float16", "fp16"),
    "bf16": lambda b, p, n: b.cast_decode_sum(p, n, "bfloat16", "bf16"),
}


def mutate(rng: np.random.Generator, payload: np.ndarray) -> np.ndarray:
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
        payload[at:at + 4].view(np.uint32)[0] = rng.choice([0, 1, 0xFF, 0x7F800000, 0xFFFFFFFF, 0x80000000, 0x7FC00000, 0x01010101])
    elif kind == 6:
        at = rng.integers(wire.HEADER_BYTES, len(payload), size=2)
        payload[at] = payload[at[::-1]]
    else:
        at = rng.integers(wire.HEADER_BYTES, len(payload))
        payload[at:at + 1] += np.uint8(rng.choice([1, 255]))
    return payload


def outcome(codec, backend, payloads, numel):
    """The bits of the sum, or the error's sentence."""
    try:
        return DECODE[codec](backend, payloads, numel).view(torch.int32).numpy().tobytes()
    except wire.PayloadError as error:
        return str(error)


@pytest.mark.parametrize("codec", ENCODE)
def test_mutated_payloads(codec):
    rng = np.random.default_rng(zlib.crc32(codec.encode()))
    generator = torch.Generator().manual_seed(1)
    cases = []
    for numel in (600, 16_900):  # the second has two units
        good = ENCODE[codec](torch.randn(numel, generator=generator))
        cases.append((numel, good, outcome(codec, ops, [good], numel)))
    accepted = refused = 0
    for i in range(MUTATIONS):
        numel, good, expected = cases[i % 8 == 0]
        bad = mutate(rng, good.numpy())
        sealed = i % 2 == 0 and len(bad) >= wire.HEADER_BYTES and len(bad) % 4 == 0
        if sealed:
            if i % 4 == 0:  # a header that says what the length is, to reach what comes after that
                bad[16:24].view(np.int64)[0] = len(bad) - wire.HEADER_BYTES
            wire.seal(bad)
        payload = torch.from_numpy(bad)
        found = outcome(codec, ops, [payload, good] if i % 3 else [payload], numel)
        if isinstance(found, str):
            refused += 1
        else:
            accepted += 1
        if not sealed:
            assert isinstance(found, str) or np.array_equal(bad, good.numpy())
        elif i % COMPARED == 0:
            assert found == outcome(codec, generic, [payload, good] if i % 3 else [payload], numel)
    assert accepted > 50 and refused > MUTATIONS / 2
