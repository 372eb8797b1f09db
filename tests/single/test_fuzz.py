"""Damaged and hostile payloads: a clear error or, where they are well-formed all the same, what the specification decodes."""

import zlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("hvd_quant.ops.torch", exc_type=ImportError)

from hvd_quant import wire  # noqa: E402
from hvd_quant.ops import generic  # noqa: E402
from tests.single.codes import FUZZED, Codec, mutations, normal  # noqa: E402

MUTATIONS = 10_000  # a codec
COMPARED = 15  # every 15th of those that reach the body is decoded by the specification too, which takes a hundred times longer
CORPUS = Path(__file__).parents[1] / "native" / "corpus"
SETTINGS = {  # those of tests/native/codes.h, in its order
    "onebit": [Codec("onebit", block_size=128), Codec("onebit", block_size=2048, zeros=True)],
    "signsgd": [Codec("signsgd", block_size=128, zeros=True), Codec("signsgd", block_size=2048)],
    "qsgd": [Codec("qsgd", bits=2, block_size=128), Codec("qsgd", block_size=512), Codec("qsgd", bits=8, norm="l2", block_size=512)],
    "terngrad": [Codec("terngrad")], "natural": [Codec("natural")],
    "blockwise8": [Codec("blockwise8"), Codec("blockwise8", code="linear", block_size=2048)],
    "threshold": [Codec("threshold", ratio=0.05)], "adaptive": [Codec("adaptive", ratio=0.05)],
    "topk": [Codec("topk", ratio=0.05, values=values) for values in ("float32", "float16", "sign", "tensor_sign", "2bit")],
    "none": [Codec("none")], "fp16": [Codec("fp16")], "bf16": [Codec("bf16")],
}


def outcome(codec, backend, payloads, numel):
    """The bits of the sum, or the error's sentence."""
    try:
        return codec.decode_sum(backend, payloads, numel).view(torch.int32).numpy().tobytes()
    except wire.PayloadError as error:
        return str(error)


@pytest.mark.parametrize("codec", FUZZED, ids=repr)
def test_mutated_payloads(codec):
    rng = np.random.default_rng(zlib.crc32(repr(codec).encode()))
    accepted = refused = 0
    for numel, share in ((600, 7), (16_900, 1)):  # the second has two units
        good = codec.encode(ops, torch.from_numpy(normal(numel)), None)
        for i, (bad, sealed) in enumerate(mutations(rng, good.numpy(), MUTATIONS * share // 8)):
            payloads = [torch.from_numpy(bad)] + [good] * (i % 3 > 0)
            found = outcome(codec, ops, payloads, numel)
            if isinstance(found, str):
                refused += 1
            else:
                accepted += 1
            if not sealed:
                assert isinstance(found, str) or np.array_equal(bad, good.numpy())
            elif i // 2 % COMPARED == 0:
                assert found == outcome(codec, generic, payloads, numel)
    assert accepted > 50 and refused > MUTATIONS / 2


def kept(name):
    """Codec, payloads and number of entries of each input in tests/native/corpus, as tests/native/fuzz.cc reads it."""
    data = (CORPUS / name).read_bytes()
    while data:
        length = 4 + int.from_bytes(data[:4], "little")
        head, payload, data = data[4:length][:8], np.frombuffer(data[4:length][8:], np.uint8).copy(), data[length:]
        if len(head) < 8:
            continue
        numel, codec = int.from_bytes(head[:3], "little") % (3 * 16384 + 1), SETTINGS[name][head[3] % len(SETTINGS[name])]
        fits = head[5] & 1 and len(payload) >= wire.HEADER_BYTES
        if fits:
            payload[:32] = wire.pack_header(name, numel, len(payload) - wire.HEADER_BYTES, payload[3])
            wire.seal(payload[:len(payload) // 4 * 4])
        good = [codec.encode(ops, torch.from_numpy(normal(numel, 7)), None)] * (head[4] % 3)
        yield codec, [torch.from_numpy(payload), *good], numel


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_fuzzer_has_kept_decodes_as_specified(name):
    refused = total = 0
    for codec, payloads, numel in kept(name):
        found = outcome(codec, ops, payloads, numel)
        assert found == outcome(codec, generic, payloads, numel)
        refused, total = refused + isinstance(found, str), total + 1
    assert 0 < refused < total
