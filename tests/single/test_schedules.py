"""Ratio warm-ups against the papers' formulas."""

import dataclasses

import numpy as np
import pytest

from hvd_quant import Compression, TensorInfo, get_compressor

EACH = [Compression.topk, Compression.adaptive]


def kept(compressor, steps):
    """What is kept in each step; all of it where that goes dense."""
    return np.array([1.0 if c is None else c.ratio for c in map(compressor.at, range(steps))])


def test_without_a_schedule():
    topk = get_compressor("topk")
    assert topk.stages() == ((0, topk),)
    late = get_compressor("onebit:warmup=3")
    assert late.stages() == ((0, None), (3, late)) and late.at(2) is None and late.at(3) == late.at(10**9) == late


@pytest.mark.parametrize("make", EACH)
@pytest.mark.parametrize("ratio", [0.001, 0.004, 0.01, 0.3])
@pytest.mark.parametrize("warmup", [0, 7])
def test_dgc(make, ratio, warmup):
    compressor = make(ratio=ratio, schedule="dgc", schedule_steps=5, warmup=warmup)
    stages = [r for r in 0.25 ** np.arange(1, 4) if r > ratio] + [0.004] * (0.004 > ratio)
    expected = [1.0] * warmup + [r for r in stages for _ in range(5)] + [ratio] * 20
    np.testing.assert_array_equal(kept(compressor, len(expected)), expected)


@pytest.mark.parametrize("make", EACH)
@pytest.mark.parametrize("ratio", [1e-5, 0.001, 1 / 64, 0.09, 0.2, 1.0])
@pytest.mark.parametrize("steps, warmup", [(1000, 0), (300, 7), (4, 0), (1, 0)])
def test_merging(make, ratio, steps, warmup):
    compressor = make(ratio=ratio, schedule="merging", schedule_steps=steps, warmup=warmup)
    found = kept(compressor, warmup + steps + 3)
    assert (found[:warmup] == 1).all() and (found[warmup + steps:] == ratio).all()
    found = found[warmup:warmup + steps]
    formula = 1 - (1 - ratio) ** (steps / np.arange(1, steps + 1))
    # Where a value lies on an edge, either side of it will do.
    edge = np.abs(formula / 0.1 - 1) < 1e-9
    np.testing.assert_array_equal((found == 1)[~edge], (formula > 0.1)[~edge])
    sent = formula <= 0.1
    j = 2 * np.log2(found[sent] / ratio)
    np.testing.assert_allclose(j, np.round(j), atol=1e-9)
    assert (found[sent] >= formula[sent] * (1 - 1e-9)).all() and (found[sent] <= formula[sent] * 2**0.5 * (1 + 1e-9)).all()
    assert len(np.unique(found)) <= 2 + np.ceil(max(0, 2 * np.log2(0.1 / ratio)))


@pytest.mark.parametrize("make", EACH)
def test_a_stage_is_the_compressor_with_another_ratio(make):
    compressor = make(ratio=0.01, schedule="dgc", schedule_steps=2, warmup=3, min_numel=0, exchange="allgather")
    for first, stage in compressor.stages()[1:]:
        assert stage == dataclasses.replace(compressor, ratio=stage.ratio, schedule="none", schedule_steps=1000, warmup=0)
        assert stage.stages() == ((0, stage),)
        for role in ("worker", "owner"):
            info = TensorInfo.whole("w", (5000,))
            assert stage.state_shapes(info, role) == compressor.state_shapes(info, role)
