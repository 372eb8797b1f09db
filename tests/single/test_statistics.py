"""The codes that round at random: their numbers, that their means are right, and how much noise they make."""

import dataclasses
import itertools

import numpy as np
import pytest

from hvd_quant import TensorInfo, get_compressor
from hvd_quant.ops import generic
from tests.randomness import number

try:
    import torch

    from hvd_quant.ops import torch as ops

    def array(x):
        return torch.from_numpy(np.array(x))
except ImportError:
    ops, array = generic, np.array

TIMES = 10_000
ENTRIES = 64


@pytest.mark.parametrize("draw", [(0, 0, 0, 0, 0), (-5, 64, 7, 3, 1), (2**63 - 1, 2**32 - 128, 10**12, 1000, 0)])
def test_numbers(draw):
    stream, first, *rest = draw
    expected = [number(stream, place, *rest) for place in range(first, first + 300)]
    assert generic.noise(300, np.zeros(1), *draw).tolist() == expected
    if ops is not generic:
        assert generic.noise(300, array([0.0]), *draw).tolist() == expected


def numbers(numel=2**18, stream=11, first=0, step=5, rank=2, phase=0):
    return generic.noise(numel, np.zeros(1), stream, first, step, rank, phase)


def test_numbers_are_spread_evenly():
    x = numbers()
    for shift in (0, 8, 16, 24):  # 256 cells of as many numbers each: chi-square with 255 degrees of freedom
        cells = np.bincount(x >> shift & 255, minlength=256)
        assert 255 - 5 * 510**0.5 < ((cells - len(x) / 256) ** 2).sum() / (len(x) / 256) < 255 + 5 * 510**0.5
    pairs = np.bincount((x[:-1] >> 28) * 16 + (x[1:] >> 28), minlength=256)
    assert ((pairs - len(x) / 256) ** 2).sum() / (len(x) / 256) < 255 + 5 * 510**0.5


def correlations(x, y, shifts=range(-32, 33)):
    """Correlations of x and shifted y, in standard errors."""
    x, y = ((z - z.mean()) / z.std() for z in (x.astype(float), y.astype(float)))
    n = len(x) - 32
    return [abs((x[max(0, -s):][:n] * y[max(0, s):][:n]).mean()) * n**0.5 for s in shifts]


@pytest.mark.parametrize("other", [{"stream": 12}, {"step": 6}, {"rank": 3}, {"phase": 1}, {"first": 2**32}, {"first": 2**33},
                                   {"step": 2, "rank": 5}], ids=str)
def test_streams_have_nothing_in_common(other):
    x, y = numbers(), numbers(**other)
    assert max(correlations(x, y)) < 5 and max(correlations(x & 0xFFFF, y & 0xFFFF)) < 5
    assert np.isin(x[:4096], y[:4096]).mean() < 0.001  # a permutation would have the same numbers


def test_a_stream_has_nothing_in_common_with_itself_shifted():
    assert max(correlations(numbers(), numbers(), [s for s in range(-32, 33) if s])) < 5


def draws():
    info = TensorInfo.whole("w", (1000,))
    for name, seed, step, rank, phase in itertools.product(("w", "v"), (0, 1), (0, 1), (0, 1), (0, 1)):
        yield get_compressor(f"qsgd:seed={seed}"), info.at(name=name, step=step, rank=rank, phase=phase)


def test_all_that_is_in_the_key_changes_the_payload():
    g = array(np.random.default_rng(0).normal(size=1000).astype(np.float32))
    payloads = [np.asarray(c.encode(ops, g, {}, None, info)) for c, info in draws()]
    assert len({p.tobytes() for p in payloads}) == len(payloads) == 32
    seeded = [np.asarray(get_compressor("qsgd").encode(ops, g, {}, None, info.at(seed=7))) for _, info in draws()]
    assert not {p.tobytes() for p in payloads} & {p.tobytes() for p in seeded}


@pytest.mark.parametrize("spec", ["qsgd:block_size=64", "terngrad:clip=2.5", "natural"])
def test_ranges_have_the_numbers_of_the_whole(spec):
    compressor, g = get_compressor(spec), array(np.random.default_rng(0).normal(size=4096).astype(np.float32))
    whole = TensorInfo.whole("w", (4096,), step=3)
    params = compressor.measure(ops, g, {}, whole)
    expected = np.asarray(compressor.decode_sum(ops, [compressor.encode(ops, g, {}, params, whole)], whole))
    for cuts in ((0, 256, 4096), (0, 1024, 1280, 3840, 4096)):
        for a, b in reversed([*itertools.pairwise(cuts)]):
            part = whole.part(a, b)
            decoded = compressor.decode_sum(ops, [compressor.encode(ops, g[a:b], {}, params, part)], part)
            np.testing.assert_array_equal(np.asarray(decoded), expected[a:b])


def vector():
    """Values of many sizes, zeros, and the largest of its block."""
    v = np.random.default_rng(3).normal(size=ENTRIES).astype(np.float32)
    v[::8] *= 1e-3
    v[5::16] = 0
    return v


def rounded(spec, v, workers=1):
    """A fixed vector, encoded and decoded ``TIMES`` times over by each worker, and averaged: one row each time."""
    compressor, tensor = get_compressor(spec), np.tile(v, TIMES)
    info = TensorInfo.whole("w", tensor.shape, world=workers)
    g = array(tensor)
    params = compressor.measure(ops, g, {}, info)
    payloads = [compressor.encode(ops, g, {}, params, info.at(rank=rank)) for rank in range(workers)]
    return np.asarray(compressor.decode_mean(ops, payloads, info)).astype(np.float64).reshape(TIMES, -1)


def mean_of(spec, v):
    """What the mean of an encoding should be: the vector itself, or with "terngrad" the clipped one."""
    clip = getattr(get_compressor(spec), "clip", 0)
    bound = clip * v.std(dtype=np.float64) if clip else np.inf
    return v.clip(-bound, bound)


def variances(spec, v):
    """The variance of each entry by theory: of a choice between two neighbours."""
    compressor, a = get_compressor(spec), abs(v.astype(np.float64))
    if compressor.name == "natural":
        low = 2.0 ** np.floor(np.log2(np.where(a > 0, a, 1)))
        return np.where(a > 0, (a - low) * (2 * low - a), 0)
    if compressor.name == "terngrad":
        return a.max() * a - a**2
    s = 2 ** (compressor.bits - 1) - 1
    unit = (a.max() if compressor.norm == "max" else np.sqrt((a**2).sum())) / s
    share = a / unit - np.floor(a / unit + 1e-6)
    return unit**2 * (share * (1 - share)).clip(0)


UNBIASED = [*(f"qsgd:block_size={ENTRIES},bits={bits},norm={norm}" for bits in (2, 4, 8) for norm in ("max", "l2")),
            "terngrad:clip=0", "terngrad:clip=1", "natural"]


@pytest.mark.parametrize("spec", UNBIASED)
def test_means_are_right_and_variances_within_the_papers_bounds(spec):
    given = vector()
    v = mean_of(spec, given)
    assert (v != given).any() == ("clip=1" in spec)
    square, expected = float((v.astype(np.float64) ** 2).sum()), variances(spec, v)
    for workers in (1, 8):
        found = rounded(spec, given, workers)
        error = abs(found.mean(0) - v)
        assert (error <= 4 * np.sqrt(expected / workers / TIMES) + 1e-6 * abs(v)).all()
        # Eight workers that drew the same numbers would make as much noise together as one.
        assert ((found - v) ** 2).sum(1).mean() == pytest.approx(expected.sum() / workers, rel=0.03)
    compressor = get_compressor(spec)
    if compressor.name == "qsgd":
        s = 2 ** (compressor.bits - 1) - 1
        assert expected.sum() <= min(ENTRIES / s**2, ENTRIES**0.5 / s) * square
    elif compressor.name == "natural":
        assert expected.sum() <= square / 8


@pytest.mark.parametrize("spec", ["qsgd:block_size=64", "terngrad:clip=0", "natural"])
def test_means_over_steps_are_right(spec):
    compressor, v = get_compressor(spec), vector()
    info, g, total = TensorInfo.whole("w", v.shape), array(v), np.zeros(ENTRIES)
    params = compressor.measure(ops, g, {}, info)
    for step in range(2000):
        at = info.at(step=step)
        total += np.asarray(compressor.decode_sum(ops, [compressor.encode(ops, g, {}, params, at)], at))
    assert (abs(total / 2000 - v) <= 4 * np.sqrt(variances(spec, v) / 2000) + 1e-6 * abs(v)).all()


def test_terngrad_clips_to_deviations_about_the_mean():
    g = np.random.default_rng(0).normal(1, 2, size=100_000).astype(np.float32)
    g[0] = 1000.0
    compressor, info = get_compressor("terngrad:clip=2.5"), TensorInfo.whole("w", g.shape)
    (largest,) = np.asarray(compressor.measure(ops, array(g), {}, info))
    assert largest == pytest.approx(2.5 * g.std(dtype=np.float64), rel=1e-6)
    assert dataclasses.replace(compressor, clip=0).measure(ops, array(g), {}, info)[0] == 1000
    decoded = np.asarray(compressor.decode_sum(ops, [compressor.encode(ops, array(g), {}, array([largest]), info)], info))
    assert set(np.unique(decoded)) == {-largest, 0, largest} and decoded[0] == largest
    constant = array(np.full(1000, -0.3, np.float32))  # which has no deviation
    assert compressor.measure(ops, constant, {}, info)[0] == pytest.approx(0.3)


def test_natural_beyond_its_range():
    compressor, info = get_compressor("natural"), TensorInfo.whole("w", (TIMES,))
    small = array(np.full(TIMES, 0.3 * 2.0**-62, np.float32))
    decoded = np.asarray(compressor.decode_sum(ops, [compressor.encode(ops, small, {}, None, info)], info))
    assert set(np.unique(decoded)) == {0, np.float32(2.0**-62)}
    assert (decoded > 0).mean() == pytest.approx(0.3, abs=4 * (0.21 / TIMES) ** 0.5)
    for value, finite in ((2.0**64, True), (-(2.0**64), True), (1.001 * 2.0**64, False)):
        payload = compressor.encode(ops, array(np.full(TIMES, value, np.float32)), {}, None, info)
        assert (payload[3] == 0) == finite
        decoded = np.asarray(compressor.decode_sum(ops, [payload], info))
        assert (decoded == value).all() if finite else np.isnan(decoded).all()
