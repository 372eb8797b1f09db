"""Random-k and PowerSGD: the workers of a world in one process, against their formulas."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from hvd_quant import Compression, TensorInfo, exchange, get_compressor, wire
from hvd_quant.compressors.base import conclude
from hvd_quant.ops import generic
from tests.conftest import LINEAR
from tests.linear import assert_close, drawn, gradient, simulation

# functions, to their arrays and back, to their state
BACKENDS = {"generic": (generic, np.array, np.asarray, np.array)}
try:
    import torch

    from hvd_quant.ops import torch as torch_ops

    BACKENDS["torch"] = (torch_ops, lambda x: torch.from_numpy(np.array(x)), np.asarray, lambda x: torch.from_numpy(np.array(x)))
except ImportError:
    pass
try:
    import tensorflow as tf

    from hvd_quant.ops import tensorflow as tensorflow_ops

    BACKENDS["tensorflow"] = (tensorflow_ops, tf.constant, np.asarray, tf.Variable)
except ImportError:
    pass


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def every(codecs):
    return pytest.mark.parametrize("compressor", codecs.values(), ids=list(codecs))


class World:
    """Workers that exchange one tensor."""

    def __init__(self, compressor, backend, shape, world):
        self.compressor, self.world, (self.ops, self.array, self.numpy, variable) = compressor, world, backend
        self.infos = [TensorInfo.whole("w", shape, rank=rank, world=world) for rank in range(world)]
        self.states = [{key: variable(np.zeros(size, np.float32)) for key, size in compressor.state_shapes(info).items()}
                       for info in self.infos]

    def start(self, gradients, step=0):
        flats = [self.array(g.ravel()) for g in gradients]
        return [self.compressor.rounds(self.ops, flat, state, info.at(step=step), flat)
                for flat, state, info in zip(flats, self.states, self.infos)]

    def sums(self, codes):
        """All rounds but for what the last sum leads to."""
        totals = [None] * self.world
        for _ in range(self.compressor.allreduces):
            sent = [self.numpy(code.send(total)).copy() for code, total in zip(codes, totals)]
            with np.errstate(invalid="ignore", over="ignore"):
                total = sum(sent[1:], sent[0])
            totals = [self.array(total.copy()) for _ in codes]
        return totals

    def step(self, gradients, step=0):
        """What each worker gets, and whether it counts."""
        codes = self.start(gradients, step)
        ends = [conclude(code, total) for code, total in zip(codes, self.sums(codes))]
        return [self.numpy(mean) for mean, _ in ends], [bool(counts) for _, counts in ends]

    def kept(self):
        return [{key: np.array(self.numpy(value)) for key, value in state.items()} for state in self.states]


@every(LINEAR)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_twenty_steps_are_the_formulas(compressor, backend, world):
    shape = (24, 5, 7)
    workers, expected = World(compressor, backend, shape, world), simulation(compressor, "w", shape, world)
    for step in range(20):
        gradients = [gradient(step, rank, shape) for rank in range(world)]
        means, counts = workers.step(gradients, step)
        assert all(counts)
        for mean in means:
            np.testing.assert_array_equal(mean, means[0])
        assert_close(compressor, means[0], expected.reduce(gradients))
        for rank, kept in enumerate(workers.kept()):
            assert kept.keys() == expected.state(rank).keys()
            for name, value in kept.items():
                assert_close(compressor, value, expected.state(rank)[name])


@pytest.mark.parametrize("compressor, bad", [(c, bad) for c in LINEAR.values() for bad in (np.nan, np.inf, -np.inf, 3e38)
                                             if bad != 3e38 or c.memory == "error_feedback"], ids=str)
def test_a_value_that_is_not_finite_makes_the_step_void_for_all(compressor, backend, bad):
    """Also one that isn't drawn, and one that is too large in the sum with the residual."""
    workers, shape = World(compressor, backend, (30, 40), 2), (30, 40)
    workers.step([gradient(0, rank, shape) for rank in range(2)])
    if bad == 3e38:
        residual = np.zeros(1200, np.float32)
        residual[17] = bad
        workers.states[0]["residual"] = backend[3](residual)
    before, gradients = workers.kept(), [gradient(1, rank, shape) for rank in range(2)]
    gradients[0].ravel()[17] = bad
    means, counts = workers.step(gradients, 1)
    assert counts == [False, False] and all(np.isnan(mean).all() for mean in means)
    for kept, old in zip(workers.kept(), before):
        for name in kept:
            np.testing.assert_array_equal(kept[name], old[name])


@every(LINEAR)
def test_an_exchange_that_ends_early_leaves_gradient_and_state_alone(compressor, backend):
    workers, shape = World(compressor, backend, (30, 40), 2), (30, 40)
    workers.step([gradient(0, rank, shape) for rank in range(2)])
    before, gradients = workers.kept(), [gradient(1, rank, shape) for rank in range(2)]
    flat = workers.array(gradients[0].ravel())
    for rounds in range(compressor.allreduces):
        code = compressor.rounds(workers.ops, flat, workers.states[0], workers.infos[0].at(step=1), flat)
        sent = code.send(None)
        for _ in range(rounds):
            sent = code.send(sent)
        code.close()
    np.testing.assert_array_equal(flat, gradients[0].ravel())
    for kept, old in zip(workers.kept(), before):
        for name in kept:
            np.testing.assert_array_equal(kept[name], old[name])


# -------------------------------------------------------------------------------------------------------------- random-k

@pytest.mark.parametrize("numel, count", [(7, 1), (7, 3), (7, 6), (100, 10), (1000, 333)])
def test_each_entry_is_drawn_as_often(numel, count):
    """Also where the stretches differ in length."""
    times, steps, p = np.zeros(numel), 4000, count / numel
    for step in range(steps):
        index = generic.strata(np.empty(numel, np.float32), count, 12345678901234567, step)
        assert len(set(index.tolist())) == count
        times[index] += 1
    assert (np.abs(times - steps * p) < 4.5 * math.sqrt(steps * p * (1 - p))).all()


def test_draws_are_those_of_the_formula(backend):
    ops, array, numpy, _ = backend
    for numel, count, step in ((1200, 12, 0), (1_000_003, 77, 2**33 + 5)):
        index = numpy(ops.strata(array(np.zeros(numel, np.float32)), count, TensorInfo.whole("w", (numel,)).key(9), step))
        np.testing.assert_array_equal(index, drawn(9, "w", step, numel, count))


def test_without_memory_the_mean_is_unbiased():
    compressor, g = get_compressor("randomk:ratio=0.25,memory=none,min_numel=0"), gradient(0, 0, (40,))
    steps = 4000
    total = sum(World(compressor, BACKENDS["generic"], (40,), 1).step([g], step)[0][0].astype(np.float64) for step in range(steps))
    error = np.abs(g) * math.sqrt((1 / 0.25 - 1) / steps)
    assert (np.abs(total / steps - g) < 4.5 * error).all()


def test_workers_that_draw_different_entries_are_told(backend):
    workers = World(get_compressor("randomk"), backend, (5000,), 3)
    workers.infos[2] = dataclasses.replace(workers.infos[2], name="another")
    with pytest.raises(Exception, match="w: the workers drew different entries, which depend on the seed") as caught:
        workers.step([gradient(0, rank, (5000,)) for rank in range(3)])
    assert isinstance(caught.value, wire.PayloadError) or type(caught.value).__name__ == "DataLossError"


# -------------------------------------------------------------------------------------------------------------- PowerSGD

def orthonormal(backend, p):
    ops, array, numpy, _ = backend
    return numpy(ops.orthonormal(array(p.astype(np.float32))))


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 1e30])
def test_a_basis_is_orthonormal_and_the_same_everywhere(backend, scale):
    p = np.random.default_rng(0).normal(size=(2000, 6)) * scale
    p[:, 3] = p[:, 0] + 1e-5 * p[:, 3]
    basis = orthonormal(backend, p)
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-6)
    np.testing.assert_allclose(basis @ (basis.T @ p), p, atol=3e-6 * np.abs(p).max())
    np.testing.assert_array_equal(basis, orthonormal(BACKENDS["generic"], p))
    order = np.random.default_rng(1).permutation(2000)
    np.testing.assert_array_equal(orthonormal(backend, p[order]), basis[order])  # sums in any order


def test_columns_that_depend_on_others_are_left_out(backend):
    p = np.outer(np.random.default_rng(0).normal(size=50), [1, 0, -2, 1e-3])
    basis = orthonormal(backend, p)
    np.testing.assert_allclose(basis.T @ basis, np.diag([1, 0, *np.diag(basis.T @ basis)[2:]]), atol=1e-5)
    assert not orthonormal(backend, np.zeros((5, 3))).any()
    assert np.isnan(orthonormal(backend, np.array([[1, 2], [np.inf, 3], [4, 5]]))).all()


def test_a_gradient_of_less_than_the_rank_is_exact_and_the_rank_comes_back(backend):
    workers, shape = World(get_compressor("powersgd:min_numel=0,memory=none"), backend, (30, 40), 2), (30, 40)
    random = np.random.default_rng(0)
    for scale in (1.0, 1e-25, 1e15):  # neither is P, of M times Q, lost
        thin = np.float32(scale) * np.outer(random.normal(size=30), random.normal(size=40)).astype(np.float32)
        for step in range(3):
            means, _ = workers.step([thin, thin], step)
            np.testing.assert_allclose(means[0], thin.ravel(), atol=1e-5 * np.abs(thin).max())
    workers.step([np.zeros(shape, np.float32)] * 2)
    low = random.normal(size=(30, 4)).astype(np.float32) @ random.normal(size=(4, 40)).astype(np.float32)
    for step in range(2):
        means, _ = workers.step([low, low], step)
    np.testing.assert_allclose(means[0], low.ravel(), atol=1e-4 * np.abs(low).max())


def test_the_product_is_exact(backend):
    """So that it depends on no order of sums, and on no processor."""
    ops, array, numpy, _ = backend
    random = np.random.default_rng(0)
    p, q = (random.normal(size=size).astype(np.float32) * 10.0 ** random.uniform(-9, 3, size) for size in ((50, 7), (7, 90)))
    p, q = p.astype(np.float32), q.astype(np.float32)
    left, right = (numpy(x) for x in ops.exact_factors(array(p), array(q)))
    np.testing.assert_allclose(left, p, rtol=0, atol=2.0**-24 * np.abs(p).max())
    np.testing.assert_allclose(right, q, rtol=0, atol=2.0**-23 * np.abs(q).max())
    exact = [[sum((Fraction(x) * Fraction(y) for x, y in zip(row, column)), Fraction()) for column in right.T] for row in left]
    assert (numpy(array(left) @ array(right)) == np.array(exact, np.float64)).all()
    assert all(Fraction(float(x)) == x for row in exact for x in row)
    assert not numpy(ops.exact_factors(array(0 * p), array(q))[0]).any()


# -------------------------------------------------------------------------------------------------------------- both

@every(LINEAR | {name: get_compressor(f"{name}:min_numel=0") for name in ("none", "fp16")})
def test_sending_on_a_device_never_reads_values_back_and_is_of_the_stated_size(compressor):
    torch = pytest.importorskip("torch")
    info = TensorInfo.whole("w", (30, 40), world=2)
    state = {key: torch.empty(size, device="meta") for key, size in compressor.state_shapes(info).items()}
    flat = torch.empty(1200, device="meta")
    code, total = compressor.rounds(generic, flat, state, info, flat), None
    sent = 0
    for _ in range(compressor.allreduces):
        total = code.send(total)
        sent += total.element_size() * total.numel()
    assert sent == compressor.summed_bytes(info)
    assert sent == compressor.payload_bytes(info) or compressor not in LINEAR.values()  # which have no payloads


def test_what_goes_dense():
    def way(spec, *shape, **known):
        return exchange.choose(get_compressor(spec), TensorInfo.whole("w", shape, **{"world": 2, **known}))

    assert way("powersgd", 64, 64) == way("randomk", 4096) == way("randomk:exchange=allreduce", 64, 64) == "allreduce"
    assert way("powersgd", 64, 3, 3, 3) == way("randomk", 4095) == way("powersgd", 10**6) == "dense"
    for spec in ("powersgd:min_numel=0", "randomk:min_numel=0"):
        for shape in ((), (0,), (0, 5), (5, 0), (1,), (2,), (1, 1)):
            assert way(spec, *shape) == "dense", (spec, shape)
    assert way("powersgd:min_numel=0,rank=2", 4, 4) == "dense" and way("powersgd:min_numel=0,rank=2", 5, 4) == "allreduce"
    assert way("powersgd:min_numel=0,rank=2", 64, 3, 3, 3) == "allreduce"
    assert way("randomk:min_numel=0,ratio=1", 5000) == "dense"
    assert way("powersgd", 64, 64, world=1) == way("powersgd:warmup=3", 64, 64, step=2) == "dense"


@pytest.mark.parametrize("spec, sentence", [
    ("randomk:ratio=0", "randomk: ratio=0.0 is not accepted; give a number above 0 and up to 1"),
    ("randomk:ratio=1.5", "randomk: ratio=1.5 is not accepted"),
    ("randomk:seed=x", "randomk: seed=x is not a whole number"),
    ("randomk:exchange=sra", "randomk: exchange='sra' is not accepted; give 'auto' or 'allreduce'"),
    ("auto:powersgd", "powersgd: only_if_faster=True is not accepted; give False"),
    ("powersgd:rank=0", "powersgd: rank=0 is not accepted; give a whole number of columns, 1 or more"),
    ("powersgd:exchange=allgather", "powersgd: exchange='allgather' is not accepted; give 'auto' or 'allreduce'"),
])
def test_knobs_that_are_not_accepted(spec, sentence):
    with pytest.raises(ValueError) as caught:
        get_compressor(spec)
    assert sentence in str(caught.value)


def test_specs():
    for compressor in LINEAR.values():
        assert get_compressor(compressor.spec) == compressor and compressor.linear and compressor.allreduced
    assert Compression.powersgd(rank=2, seed=5).spec == "powersgd:rank=2,seed=5"
