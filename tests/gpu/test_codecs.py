"""The codecs on CUDA tensors: the same bytes, on the gradient's device and stream, without making the host wait."""

import dataclasses

import numpy as np
import pytest

from hvd_quant import TensorInfo
from hvd_quant.ops import generic
from tests.conftest import CODECS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parametrize("compressor", CODECS.values(), ids=list(CODECS))

NUMEL = 70_001


def encode(compressor, g, state, step):
    from hvd_quant.ops import torch as ops

    info = TensorInfo.whole("w", (NUMEL,), step=step)
    return compressor.encode(ops, g, state, compressor.measure(ops, g, state, info), info)


def on_gpu(compressor):
    info = TensorInfo.whole("w", (NUMEL,))
    return {k: torch.zeros(s, device="cuda") for k, s in compressor.state_shapes(info).items()}


def test_bytes_and_sums_are_those_of_numpy(compressor):
    from hvd_quant.ops import torch as ops

    info = TensorInfo.whole("w", (NUMEL,))
    host = {k: np.zeros(s, np.float32) for k, s in compressor.state_shapes(info).items()}
    device = on_gpu(compressor)
    for step in range(3):
        g = np.random.default_rng(step).normal(size=NUMEL).astype(np.float32)
        record = dataclasses.replace(info, step=step)
        expected = compressor.encode(generic, g, host, compressor.measure(generic, g, host, record), record)
        payload = encode(compressor, torch.from_numpy(g).cuda(), device, step)
        assert payload.device.type == "cuda" and payload.shape == expected.shape
        decoded = compressor.decode_sum(ops, [payload, payload], info)
        assert decoded.device.type == "cuda"
        np.testing.assert_allclose(decoded.cpu(), compressor.decode_sum(generic, [expected, expected], info), rtol=1e-6)
        # what the CPU's native code makes of the GPU's bytes has the same bits
        native = compressor.decode_sum(ops, [payload.cpu(), payload.cpu()], info)
        assert torch.equal(native, decoded.cpu())


def test_encoding_does_not_make_the_host_wait(compressor):
    g, state = torch.randn(NUMEL, device="cuda"), on_gpu(compressor)
    encode(compressor, g, state, 0)  # the first call copies the header's template to the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        encode(compressor, g, state, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_encoding_follows_the_stream_that_makes_the_gradient(compressor):
    expected = encode(compressor, torch.full((NUMEL,), 3.0, device="cuda"), on_gpu(compressor), 0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        state, g = on_gpu(compressor), torch.zeros(NUMEL, device="cuda")
        torch.cuda._sleep(200_000_000)  # the gradient is late on this stream
        g += 3.0
        payload = encode(compressor, g, state, 0)
    stream.synchronize()
    assert torch.equal(payload, expected)
