"""Sparse gradients by row: the payload of row numbers, what is refused, sums, and when rows are worth it."""

import struct
import zlib

import numpy as np
import pytest

from hvd_quant import get_compressor, wire
from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.exchange.rows import Table, goes_by_row, goes_whole
from hvd_quant.ops import generic
from tests.conftest import CODECS, LINEAR

ROWS, WIDTH = 100, 6
NUMBERS = np.array([0, 7, 99])
FORGETFUL = "onebit:min_numel=0,memory=none"


def table(spec="onebit:min_numel=0", rows=ROWS, **known):
    return Table(get_compressor(spec), TensorInfo.whole("t", (rows, WIDTH), **{"world": 2, **known}), rows)


def message(one, rows, values):
    info = one.part(len(rows))
    return np.concatenate([one.pack(rows), one.compressor.encode(generic, values, {}, None, info)])


def test_layout():
    payload = table().pack(NUMBERS)
    assert bytes(payload[:24]) == b"HQ" + struct.pack("<BBIQQ", 1, 0, zlib.crc32(b"rows"), 3, 16)
    assert bytes(payload[32:]) == struct.pack("<iiii", 0, 7, 99, 0)
    assert bytes(table(rows=2**31 + 8).pack(np.array([2**31]))[32:]) == struct.pack("<q", 2**31)
    assert bytes(table(rows=2**31).pack(np.array([2**31 - 1]))[32:36]) == struct.pack("<i", 2**31 - 1)


@pytest.mark.parametrize("rows", [[], [5], [0, 7, 99]])
def test_numpy_and_torch_have_the_same_bytes_and_read_them(rows):
    torch = pytest.importorskip("torch")
    one, numbers = table(), np.array(rows, np.int64)
    payload = one.pack(numbers)
    in_torch = one.pack(torch.tensor(rows, dtype=torch.int64))
    np.testing.assert_array_equal(in_torch.numpy(), payload)
    np.testing.assert_array_equal(one.unpack(payload, len(rows)), numbers)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), in_torch])[1:]
    np.testing.assert_array_equal(one.unpack(shifted, len(rows)), numbers)


def test_every_flipped_bit_is_found():
    one, payload = table(), table().pack(NUMBERS)
    for bit in range(8 * len(payload)):
        damaged = payload.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(wire.PayloadError):
            one.unpack(damaged, 3)


@pytest.mark.parametrize("rows, told, sentence", [
    ([7, 0, 99], 3, "its rows don't ascend"), ([0, 7, 7], 3, "its rows don't ascend"),
    ([0, 7, 100], 3, "it has a row 100, the tensor has 100"), ([-1, 0], 2, "it has a row -1, the tensor has 100"),
    ([0, 7], 3, "payload holds 2 entries, expected 3")])
def test_what_no_worker_would_send_is_refused(rows, told, sentence):
    with pytest.raises(wire.PayloadError, match=sentence):
        table().unpack(table().pack(np.array(rows)), told)


@pytest.mark.parametrize("told", [101, -2, 2**62])
def test_a_count_of_rows_that_can_not_be_is_refused(told):
    with pytest.raises(wire.PayloadError, match=f"worker 1 says that its gradient has {told} rows, the tensor has 100"):
        table().parts(np.zeros(0, np.uint8), [0, told])
    assert not table().is_smaller_dense([0, told], "allgather", table().compressor)


def test_bytes_and_counts_that_do_not_fit_together_are_refused():
    one, values = table(FORGETFUL), np.ones(3 * WIDTH, np.float32)
    sent = message(one, NUMBERS, values)
    assert len(one.parts(sent, [0, 3])[1]) == 1
    for told, sentence in {(3, 3): "4 payloads came as", (0, 0): "0 payloads came as", (0, 2): "holds 18 entries, expected 12"}.items():
        with pytest.raises(wire.PayloadError, match=sentence):
            one.parts(sent, told)
    other = message(table("signsgd:min_numel=0,memory=none"), NUMBERS, values)
    with pytest.raises(wire.PayloadError, match="payload is of codec"):
        one.parts(other, [0, 3])



@pytest.mark.parametrize("told", [3, -1])
def test_a_worker_that_failed_is_quoted(told):
    one = table(FORGETFUL, rank=1)
    sent = np.concatenate([message(one, NUMBERS, np.ones(3 * WIDTH, np.float32)), one.failure(told, MemoryError("no room"))])
    with pytest.raises(wire.PayloadError, match="worker 1 failed to encode its gradient: MemoryError: no room"):
        one.parts(sent, [3, told])


def test_rows_of_other_tensors_are_refused():
    table().require(NUMBERS)
    table().require(NUMBERS[:0])
    for wrong in (-1, 100):
        with pytest.raises(ValueError, match=f"the gradient has a row {wrong}, the tensor has 100"):
            table().require(np.array([0, wrong]))


@pytest.mark.parametrize("flags, mean", [(0, True), (0, False), (wire.NONFINITE, True)])
def test_sums_by_row(flags, mean):
    terms = [(np.array([1, 5]), np.arange(12, dtype=np.float32)), (np.array([5, 9]), np.ones(12, np.float32))]
    rows, values = table().add_up(terms, flags, mean, np.zeros(0, np.float32))
    np.testing.assert_array_equal(rows, [1, 5, 9])
    expected = np.array([np.arange(6), np.arange(7, 13), np.ones(6)]) / (2 if mean else 1)
    np.testing.assert_array_equal(values, np.full((3, 6), np.nan) if flags else expected)
    rows, values = table().add_up([], 0, mean, np.zeros(0, np.float32))
    assert len(rows) == 0 and values.shape == (0, WIDTH)


def test_rows_are_sent_as_long_as_they_are_fewer_bytes():
    onebit = get_compressor("onebit:min_numel=0")
    dense = onebit.payload_bytes(table().info)
    for told in ([0, 0], [1, 1], [40, 40], [100, 0], [100, 100]):
        by_row = sum(64 + wire.padded(4 * n) + onebit.payload_bytes(table().part(n)) - 32 for n in told if n)
        assert table().is_smaller_dense(told, "allgather", onebit) == (dense < by_row / 2)
    assert not table().is_smaller_dense([1, 1], "allgather", onebit) and table().is_smaller_dense([100, 100], "allgather", onebit)
    assert not table().is_smaller_dense([100, -1], "allgather", onebit)  # which has failed


def test_which_codes_go_by_row():
    class Own(Compressor):
        name = "own"

        def encode(self, ops, grad, state, params, info):
            return grad

        def state_shapes(self, info, role="worker"):
            return {"average": (info.numel,)}

    info = table().info
    assert all(goes_by_row(compressor, info) and not goes_whole(compressor) for compressor in CODECS.values())
    assert goes_by_row(get_compressor("topk:scope=model"), info)
    assert not any(goes_by_row(compressor, info) for compressor in [*LINEAR.values(), get_compressor("onebit:hierarchical=true"), Own()])
    assert all(map(goes_whole, map(get_compressor, ["topk:momentum=0.9", "topk:memory=ef21", "topk:merge=sum"])))
