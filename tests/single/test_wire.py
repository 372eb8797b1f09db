"""The payload header: every field is checked, every bit counts."""

import numpy as np
import pytest

from hvd_quant import wire
from hvd_quant.ops import generic


@pytest.fixture
def payload():
    return generic.pack("topk", 5, np.True_, np.arange(13, dtype=np.uint8))


def test_layout(payload):
    assert payload.size == wire.HEADER_BYTES + 16
    assert bytes(payload[:4]) == b"HQ" + bytes([wire.WIRE_VERSION, 0])
    assert int.from_bytes(bytes(payload[4:8]), "little") == 0x73CDA5EC == wire.codec_id("topk")
    assert int.from_bytes(bytes(payload[8:16]), "little") == 5
    assert int.from_bytes(bytes(payload[16:24]), "little") == 16
    words = np.frombuffer(payload.tobytes(), "<u4").astype(object)
    words[6:8] = 0
    expected = sum(int(w) * (2 * j + 1) for j, w in enumerate(words)) % 2**64  # the sum, in Python's whole numbers
    assert int.from_bytes(bytes(payload[24:32]), "little") == expected
    body, finite = generic.unpack(payload, "topk", 5, 13)
    assert finite and list(body) == list(range(13))


def test_every_flipped_bit_is_found(payload):
    for bit in range(payload.size * 8):
        damaged = payload.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(wire.PayloadError):
            generic.unpack(damaged, "topk", 5, 13)


def test_every_truncation_and_extension_is_found(payload):
    for length in list(range(payload.size)):
        with pytest.raises(wire.PayloadError):
            generic.unpack(payload[:length], "topk", 5, 13)
    for more in (1, 4, 8, 100):
        with pytest.raises(wire.PayloadError, match="says its body has 16 bytes"):
            generic.unpack(np.concatenate([payload, np.zeros(more, np.uint8)]), "topk", 5, 13)


@pytest.mark.parametrize("at, value, sentence", [
    (0, 0, "payload starts with 0051, expected 4851"),
    (2, 9, "payload has wire version 9, this worker reads 1: install the same hvd_quant on all workers"),
    (3, 0x80, "payload has unknown flags 0x80"),
    (8, 6, "payload holds 6 entries, expected 5"),
    (16, 8, "payload says its body has 8 bytes, it has 16"),
    (40, 0xFF, "its bytes give"),
])
def test_each_field_has_its_sentence(payload, at, value, sentence):
    payload[at] = value
    with pytest.raises(wire.PayloadError) as caught:
        generic.unpack(payload, "topk", 5, 13)
    assert sentence in str(caught.value)


def test_codec_and_settings_must_match(payload):
    with pytest.raises(wire.PayloadError, match=r"expected 0x[0-9a-f]{8} \(onebit\): use the same compression on all"):
        generic.unpack(payload, "onebit", 5, 13)
    with pytest.raises(wire.PayloadError, match="body of 16 bytes, expected 24 for 5 entries: use the same compression settings"):
        generic.unpack(payload, "topk", 5, 20)
    with pytest.raises(wire.PayloadError, match="padding is not zero"):
        generic.unpack(payload, "topk", 5, 11)


def test_nonfinite_flag():
    payload = generic.pack("topk", 5, np.False_, np.zeros(8, np.uint8))
    assert payload[3] & wire.NONFINITE
    assert generic.unpack(payload, "topk", 5, 8)[1] is False
    clean = generic.without_flags(payload)
    assert generic.unpack(clean, "topk", 5, 8)[1] is True
    assert payload[3] & wire.NONFINITE  # the original is untouched


@pytest.mark.parametrize("reason", ["", "out of memory", "größer als 1 ✓", "x" * 10_000, "é" * 10_000])
def test_a_failed_worker_is_quoted(reason):
    payload = wire.failure("topk", 5, 3, reason)
    assert payload.size % 8 == 0
    with pytest.raises(wire.PayloadError) as caught:
        wire.check(payload, "topk", 5, 16)
    assert str(caught.value).startswith("worker 3 failed to encode its gradient: " + reason[:2000])
    with pytest.raises(wire.PayloadError):
        wire.check(payload[:-8], "topk", 5, 16)


def test_a_failure_may_be_damaged_itself():
    assert wire.failure_of(bytes(wire.HEADER_BYTES + 4)) == (-1, "its reason is damaged")
    assert "its reason is damaged" in wire.failure_message(bytes(wire.HEADER_BYTES))


def test_split_by_headers(payload):
    short, long = wire.failure("topk", 5, 1, "no"), wire.failure("topk", 5, 1, "n" * 9)
    assert payload.size == short.size == long.size - 8
    for given in ([payload] * 3, [payload, long, payload], [short[:0]] * 0 + [long]):
        found = wire.split(np.concatenate(given), len(given))
        assert [p.tobytes() for p in found] == [p.tobytes() for p in given]
    # lengths that differ but add up to the same as even ones
    less = generic.pack("topk", 5, np.True_, np.arange(8, dtype=np.uint8))
    assert [p.size for p in wire.split(np.concatenate([payload, less, long]), 3)] == [48, 40, 56]
    damaged = payload.copy()
    damaged[16] = 8  # its own idea of its length: cut evenly, so that the check can say so
    parts = wire.split(np.concatenate([damaged, payload]), 2)
    with pytest.raises(wire.PayloadError, match="says its body has 8 bytes, it has 16"):
        wire.check(parts[0], "topk", 5, 16)
    for damaged in (payload[:10], np.concatenate([payload, long[:45]]), np.concatenate([payload, long, payload[:-3]])):
        with pytest.raises(wire.PayloadError, match="whose headers tell other lengths"):
            wire.split(damaged, 2)
