"""What memories make of gradients, and where: in memory that is free by then."""

import numpy as np
import pytest

from hvd_quant import get_compressor
from hvd_quant.compressors import TensorInfo, memory
from hvd_quant.compressors.merge import local_part
from hvd_quant.ops import generic
from tests.single.codes import bits, normal

BACKENDS = {"numpy": np.array, "torch": lambda x: pytest.importorskip("torch").tensor(x)}
SPECS = ["topk:momentum=0.9", "topk:momentum=0.9,nesterov=true", "topk:memory=ef21", "topk:memory=ef21,eta=0.5"]


def address(x):
    return x.data_ptr() if hasattr(x, "data_ptr") else x.ctypes.data


@pytest.mark.parametrize("make", BACKENDS.values(), ids=list(BACKENDS))
@pytest.mark.parametrize("numel", [0, 5, 2**18, 2**18 + 3])
def test_stretch_by_stretch_is_the_same(numel, make):
    x, average = normal(numel, 1), normal(numel, 2)
    found = generic.moving_average(make(average), make(x), 0.25)
    assert np.array_equal(bits(found), bits(np.float32(0.75) * average + np.float32(0.25) * x))
    assert np.array_equal(bits(generic.moving_average(make(0 * average), make(x), 0.25)), bits(x))  # that is where it starts
    sent = np.where(average > 1, average, np.float32(0))
    found = make(sent)
    assert generic.zero_where(found, make(x)) is found
    assert np.array_equal(bits(found), bits(np.where(average > 1, np.float32(0), x)))


@pytest.mark.parametrize("make", BACKENDS.values(), ids=list(BACKENDS))
@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_allocated_to_settle(spec, make):
    one, n = memory.of(get_compressor(spec)), 1000
    state = {key: make(normal(n, i)) for i, key in enumerate(one.shapes(TensorInfo.whole("w", (n,)), "worker"), 3)}
    before = {key: np.asarray(value).copy() for key, value in state.items()}
    grad = make(normal(n, 1))
    vector, kept, spare = one.prepare(generic, grad, state, make(normal(n, 9)), 2, False)
    assert all(np.array_equal(bits(value), bits(before[key])) for key, value in state.items())  # a void step leaves no trace
    assert np.array_equal(bits(grad), bits(normal(n, 1)))

    sent, mean = np.where(np.asarray(vector) > 1, np.asarray(vector), np.float32(0)), normal(n, 8)
    values = {key: np.asarray(value).copy() for key, value in kept.items()}
    spare[:] = make(sent)
    given = make(mean)
    free = {address(x) for x in (spare, given, *kept.values())}
    reduced, after = one.settle(generic, state, kept, spare, given)
    assert {address(x) for x in (reduced, *after.values())} <= free
    if "velocity" in before:
        assert np.array_equal(bits(reduced), bits(mean))
        assert np.array_equal(bits(after["velocity"]), bits(np.where(sent != 0, np.float32(0), values["velocity"])))
    else:
        assert np.array_equal(bits(after["estimate"]), bits(before["estimate"] + sent))
        assert np.array_equal(bits(after["mean"]), bits(before["mean"] + mean)) and reduced is after["mean"]


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_the_local_part_of_a_merge(factor):
    gradient, kept = normal(100, 1), normal(100, 2)
    sent = np.where(gradient > 0, gradient, np.float32(0))
    given, free, factor = (gradient.copy(), kept.copy()), sent.copy(), np.float32(factor)
    assert local_part("replace", gradient, free, kept, factor) is free
    assert np.array_equal(bits(free), bits((gradient - sent) * factor))
    assert np.array_equal(local_part("sum", gradient, None, kept, factor), gradient * factor)
    assert np.array_equal(local_part("error", gradient, None, kept, factor), kept * factor)
    assert np.array_equal(given, (gradient, kept))
