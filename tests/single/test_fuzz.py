"""Damaged and hostile payloads: a clear error or, where they are well-formed all the same, what the specification decodes."""

import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("hvd_quant.ops.torch", exc_type=ImportError)

from hvd_quant import wire  # noqa: E402
from hvd_quant.ops import generic  # noqa: E402
from tests.single.codes import FUZZED, mutations, normal  # noqa: E402

MUTATIONS = 10_000  # a codec
COMPARED = 15  # every 15th of those that reach the body is decoded by the specification too, which takes a hundred times longer


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
