"""The specification against the papers' formulas, written out entry by entry, on NumPy and on PyTorch."""

import math

import numpy as np
import pytest

from hvd_quant import wire
from hvd_quant.ops import generic
from hvd_quant.ops.layout import BLOCK, UNIT, slots_for

try:
    import torch
except ImportError:
    torch = None

LIBRARIES = ["numpy"] + (["torch"] if torch else [])
SIZES = [1, 7, 8, 9, 31, 33, 255, 256, 257, 2049, 5000]


@pytest.fixture(params=LIBRARIES)
def array(request):
    """NumPy array -> a copy in the library under test."""
    return np.array if request.param == "numpy" else lambda x: torch.from_numpy(np.array(x))


def normal(numel, seed=0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=numel) * scale).astype(np.float32)


def hash_of(step):
    return step * 0x9E3779B1 % 2**32


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("zeros", [False, True])
def test_onebit(array, numel, zeros):
    g, e0 = normal(numel), normal(numel, 1, 0.1)
    g[::5] = e0[::5] = 0
    e = array(e0)
    payload = generic.onebit_encode(array(g), e, 64, zeros)
    decoded = np.asarray(generic.onebit_decode_sum([payload], numel, 64, zeros))
    v = g + e0
    for start in range(0, numel, 64):
        block, got = v[start:start + 64], decoded[start:start + 64]
        up, down = (block > 0 if zeros else block >= 0), block < 0
        for mask in (up, down):
            if mask.any():
                np.testing.assert_allclose(got[mask], block[mask].astype(np.float64).mean(), rtol=1e-6)
        if zeros:
            assert (got[block == 0] == 0).all()
    np.testing.assert_array_equal(np.asarray(e), v - decoded)


DRAW = (5, 128, 3, 1, 0)


def uniform(numel):
    return (generic.noise(numel, np.zeros(1), *DRAW) >> 8 | 1) / 2.0**24


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bits, norm", [(2, "max"), (4, "l2"), (8, "max")])
def test_qsgd(array, numel, bits, norm):
    g, e0, s, u = normal(numel), normal(numel, 1, 0.1), 2 ** (bits - 1) - 1, uniform(numel)
    e = array(e0)
    payload = generic.qsgd_encode(array(g), e, bits, norm, 64, *DRAW)
    decoded = np.asarray(generic.qsgd_decode_sum([payload], numel, bits, 64))
    v = g + e0
    for start in range(0, numel, 64):
        block = v[start:start + 64].astype(np.float64)
        unit = (abs(block).max() if norm == "max" else np.sqrt((block**2).sum())) / s
        x = abs(block) / unit
        expected = np.sign(block) * unit * (np.floor(x) + (x - np.floor(x) > u[start:start + 64]))
        np.testing.assert_allclose(decoded[start:start + 64], expected, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(e), v - decoded)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("clip", [0, 1.5])
def test_terngrad(array, numel, clip):
    g, e0 = normal(numel), normal(numel, 1, 0.1)
    v, e = g + e0, array(e0)
    largest = generic.terngrad_measure(array(g), e, clip)
    wide = v.astype(np.float64)
    s = min(abs(wide).max(), max(clip * wide.std(), abs(wide.mean()))) if clip else abs(wide).max()
    np.testing.assert_allclose(np.asarray(largest), [s], rtol=1e-6)
    decoded = np.asarray(generic.terngrad_decode_sum([generic.terngrad_encode(array(g), e, largest, *DRAW)], numel))
    np.testing.assert_allclose(decoded, np.sign(v) * s * (np.minimum(abs(wide) / s, 1) > uniform(numel) * (abs(wide) < s)), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(e), v - decoded)


@pytest.mark.parametrize("numel", SIZES)
def test_natural(array, numel):
    g = normal(numel)
    decoded = np.asarray(generic.natural_decode_sum([generic.natural_encode(array(g), None, *DRAW)], numel))
    low = 2.0 ** np.floor(np.log2(abs(g)))
    up = (generic.noise(numel, np.zeros(1), *DRAW) >> 9) / 2.0**23 >= 1 - (abs(g) / low - 1)
    np.testing.assert_array_equal(decoded, np.sign(g) * np.where(up, 2 * low, low))


def cyclic(numel, step):
    """All entries in the order in which the step takes them, as docs/payloads.md has it."""
    units = -(-numel // UNIT)
    first_unit, x = divmod(hash_of(step) * units, 2**32)
    for u in range(units):
        unit = (first_unit + u) % units
        blocks = min(64, -(-(numel - unit * UNIT) // BLOCK))
        first_block, y = divmod(x * blocks, 2**32)
        for b in range(blocks):
            block = unit * 64 + (first_block + b) % blocks
            entries = min(BLOCK, numel - block * BLOCK)
            for i in range(entries):
                yield block * BLOCK + (y * entries // 2**32 + i) % entries


def kept_of(candidates, slots, step):
    kept, in_block = [], {}
    for i in cyclic(len(candidates), step):
        if candidates[i] and len(kept) < slots and in_block.get(i // BLOCK, 0) < 255:
            in_block[i // BLOCK] = in_block.get(i // BLOCK, 0) + 1
            kept.append(i)
    mask = np.zeros(len(candidates), bool)
    mask[kept] = True
    return mask


@pytest.mark.parametrize("numel", [*SIZES, 2 * UNIT + 300])
@pytest.mark.parametrize("step", [0, 1, 7, 1000003])
def test_threshold(array, numel, step):
    g, e0, slots = normal(numel), normal(numel, 1, 0.1), slots_for(1 / 32, numel)
    e = array(e0)
    payload = generic.threshold_encode(array(g), e, 1.5, slots, step)
    decoded = np.asarray(generic.threshold_decode_sum([payload], numel, slots))
    v = g + e0
    kept = kept_of(np.abs(v) >= 1.5, slots, step)
    expected = np.where(kept, np.where(v > 0, 1.5, -1.5), 0).astype(np.float32)
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(np.asarray(e), v - expected)


@pytest.mark.parametrize("numel", SIZES[:-1])
@pytest.mark.parametrize("values", ["float32", "float16"])
def test_topk_of_a_fully_sampled_tensor_is_exact(array, numel, values):
    g, slots = normal(numel), slots_for(0.05, numel)
    e = array(np.zeros(numel, np.float32))
    thresholds = generic.topk_measure(array(g), e, 0.05, 3)
    payload = generic.topk_encode(array(g), e, thresholds, slots, values, 3)
    decoded = np.asarray(generic.topk_decode_sum([payload], numel, slots, values))
    k = math.ceil(0.05 * numel)
    kept = np.zeros(numel, bool)
    kept[np.argsort(-np.abs(g))[:k]] = True
    np.testing.assert_array_equal(decoded, np.where(kept, g.astype(values).astype(np.float32), 0))
    np.testing.assert_array_equal(np.asarray(e), g - decoded)


@pytest.mark.parametrize("numel", [9, 257, 4000])
def test_adaptive_of_a_fully_sampled_tensor_is_exact(array, numel):
    g, slots = normal(numel), slots_for(0.1, numel) + 8
    g[::3] = 0
    e = array(np.zeros(numel, np.float32))
    thresholds = generic.adaptive_measure(array(g), e, 0.1, 3)
    payload = generic.adaptive_encode(array(g), e, thresholds, slots, 3)
    decoded = np.asarray(generic.adaptive_decode_sum([payload], numel, slots))
    expected = np.zeros(numel)
    for sign in (1, -1):
        order = np.argsort(-sign * g)[:max(1, math.ceil(0.1 * (sign * g > 0).sum()))]
        expected[order] = g[order].astype(np.float64).mean()
    np.testing.assert_allclose(decoded, expected, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(e), g - decoded)


def test_adaptive_means_are_those_of_each_unit(array):
    numel = 2 * UNIT + 100
    g = normal(numel)
    slots = slots_for(1 / 64, numel)
    thresholds = array(np.array([2.2, -2.3], np.float32))
    payload = generic.adaptive_encode(array(g), None, thresholds, slots, 0)
    decoded = np.asarray(generic.adaptive_decode_sum([payload], numel, slots))
    kept = kept_of((g >= np.float32(2.2)) | (g <= np.float32(-2.3)), slots, 0)
    np.testing.assert_array_equal(decoded != 0, kept)
    for start in range(0, numel, UNIT):
        part, mask = g[start:start + UNIT], kept[start:start + UNIT]
        for sign in (1, -1):
            chosen = mask & (sign * part > 0)
            if chosen.any():
                np.testing.assert_allclose(decoded[start:start + UNIT][chosen], part[chosen].mean(), rtol=1e-6)


@pytest.mark.parametrize("numel", [31, 257, 2 * UNIT + 100])
@pytest.mark.parametrize("values", ["sign", "tensor_sign", "2bit"])
def test_topk_sends_means_of_magnitudes(array, numel, values):
    """Signs with a mean of each unit or one of all, or with the means of what lies on either side of the unit's mean."""
    g, e0, slots = normal(numel), normal(numel, 1, 0.1), slots_for(0.1, numel)
    e = array(e0)
    payload = generic.topk_encode(array(g), e, array(np.array([1.3, -1.3], np.float32)), slots, values, 3)
    decoded = np.asarray(generic.topk_decode_sum([payload], numel, slots, values))
    v = g + e0
    kept = kept_of(np.abs(v) >= np.float32(1.3), slots, 3)
    np.testing.assert_array_equal(decoded != 0, kept)
    expected, stretch = np.zeros(numel), numel if values == "tensor_sign" else UNIT
    for start in range(0, numel, stretch):
        part = np.arange(start, min(numel, start + stretch))[kept[start:start + stretch]]
        larger = np.abs(v[part]) > np.abs(v[part]).astype(np.float64).mean()
        for group in (part[larger], part[~larger]) if values == "2bit" else (part,):
            expected[group] = np.sign(v[group]) * np.abs(v[group]).astype(np.float64).mean() if len(group) else 0
    np.testing.assert_allclose(decoded, expected, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(e), v - decoded)


def test_levels_of_magnitudes_cannot_overflow(array):
    g = np.full(600, 3e38, np.float32)
    for values in ("sign", "tensor_sign", "2bit"):
        payload = generic.topk_encode(array(g), None, array(np.array([1, -1], np.float32)), 600, values, 0)
        decoded = np.asarray(generic.topk_decode_sum([payload], 600, 600, values))
        assert not payload[3] & wire.NONFINITE
        np.testing.assert_array_equal(decoded, np.where(kept_of(np.ones(600, bool), 600, 0), g, 0))


def test_thresholds_without_samples_of_a_sign(array):
    def measure(x):
        return np.asarray(generic.adaptive_measure(array(np.array(x, np.float32)), None, 0.5, 0)).tolist()

    assert measure([1, 2, 3, 4]) == [3, -3]  # a sign without a sample mirrors the other
    assert measure([-1, -2, 0, 0]) == [2, -2]
    assert measure([0, 0]) == [generic.TINY, -generic.TINY]
    assert measure([]) == [generic.TINY, -generic.TINY]


@pytest.mark.parametrize("numel", [100, 5000, 70001, 3_000_000])
def test_sample_takes_one_entry_of_each_stretch(array, numel):
    index = array(np.arange(numel, dtype=np.float32))  # exact up to 2^24
    seen = [np.asarray(generic.sample(index, None, step)).astype(int) for step in (0, 1)]
    count = min(numel, max(4096, numel // 512))
    for s in seen:
        assert s.size == count and s.max() < numel
        assert ((s >= np.arange(count) * numel // count) & (s < (np.arange(count) + 1) * numel // count)).all()
    assert numel < 2 * count or (seen[0] != seen[1]).mean() > 0.3


def test_sampled_ratio_is_close(array):
    g = array(normal(2**20))
    thresholds = np.asarray(generic.topk_measure(g, None, 0.01, 0))
    assert 0.006 < (np.abs(np.asarray(g)) >= thresholds[0]).mean() < 0.014


def test_topk_takes_ties_when_nothing_exceeds(array):
    for step in range(3):
        g = array(np.full(5000, -0.5, np.float32))
        e = array(np.zeros(5000, np.float32))
        payload = generic.topk_encode(g, e, generic.topk_measure(g, e, 0.01, step), 56, "float32", step)
        decoded = np.asarray(generic.topk_decode_sum([payload], 5000, 56, "float32"))
        np.testing.assert_array_equal(decoded, np.where(kept_of(np.ones(5000, bool), 56, step), np.float32(-0.5), 0))


def test_no_place_starves_when_every_entry_wants_a_slot(array):
    for numel in (200, 1000, 20_000):
        slots, sent = slots_for(0.01, numel), np.zeros(numel)
        e = array(np.zeros(numel, np.float32))
        steps = 8 * numel // slots
        for step in range(steps):
            payload = generic.threshold_encode(array(np.ones(numel, np.float32)), e, 0.5, slots, step)
            sent += np.asarray(generic.threshold_decode_sum([payload], numel, slots)) != 0
        assert sent.min() >= 3, (numel, sent.min())  # 8 on average; a short last unit may be sent more often


@pytest.mark.parametrize("dtype, name, bits", [("float16", "fp16", 16), ("bfloat16", "bf16", 16), ("float32", "none", 32)])
def test_cast_rounds_to_nearest_even(array, dtype, name, bits):
    halves = np.array([0, -0.0, 1, 1.5, 1e-7, 6e-8, 1e-30, 40000, -65504, 3.14159, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12], np.float32)
    g = np.concatenate([halves, normal(100)])
    payload = generic.cast_encode(array(g), dtype, name)
    decoded = np.asarray(generic.cast_decode_sum([payload], g.size, dtype, name))
    assert payload.shape[0] == wire.HEADER_BYTES + wire.padded(g.size * bits // 8)
    if dtype == "bfloat16":
        wide = g.view(np.uint32).astype(np.uint64)
        expected = (((wide + 0x7FFF + (wide >> 16 & 1)) >> 16 << 16).astype(np.uint32)).view(np.float32)
    else:
        expected = g.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(decoded, expected + np.float32(0))
    assert not payload[3] & wire.NONFINITE


def test_values_beyond_a_half_type_are_flagged(array):
    for dtype, name, value in (("float16", "fp16", 65520.0), ("bfloat16", "bf16", 3.4e38)):
        payload = generic.cast_encode(array(np.array([1, value], np.float32)), dtype, name)
        assert payload[3] & wire.NONFINITE
        assert np.isnan(np.asarray(generic.cast_decode_sum([payload], 2, dtype, name))).all()


def test_fp16_values_of_topk_are_clamped_and_the_rest_stays(array):
    g, e = array(np.array([1e6, 1, 2], np.float32)), array(np.zeros(3, np.float32))
    payload = generic.topk_encode(g, e, array(np.array([10, -10], np.float32)), 8, "float16", 0)
    assert np.asarray(generic.topk_decode_sum([payload], 3, 8, "float16")).tolist() == [65504, 0, 0]
    assert np.asarray(e).tolist() == [1e6 - 65504, 1, 2]
