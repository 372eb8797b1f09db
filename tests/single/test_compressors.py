"""What every compressor has to keep, on every backend that is installed."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from hvd_quant import TensorInfo, exchange, get_compressor, registry, wire
from hvd_quant.ops import generic, layout
from tests.conftest import CODECS

BACKENDS = {"generic": (generic, np.array)}
try:
    import torch

    from hvd_quant.ops import torch as torch_ops

    BACKENDS["torch"] = (torch_ops, lambda x: torch.from_numpy(np.array(x)))
except ImportError:
    pass

MORE = [get_compressor(f"topk:min_numel=0,{knobs}") for knobs in (
    "ratio=0.1,values=sign", "ratio=0.2,values=sign,mean=tensor", "ratio=0.1,scope=model")]
CODECS = {**CODECS, **{c.spec: c for c in MORE}}
ERROR_FEEDBACK = {spec: c for spec, c in CODECS.items() if c.memory == "error_feedback"}
SIZES = [0, 1, 7, 8, 9, 31, 33, 255, 256, 257, 5000, 40_000]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def every(codecs):
    return pytest.mark.parametrize("compressor", codecs.values(), ids=list(codecs))


class Worker:
    """One worker's state and steps, without a network."""

    def __init__(self, compressor, backend, numel, rank=0, world=1):
        self.compressor, (self.ops, self.array) = compressor, backend
        self.info = TensorInfo.whole("w", (numel,), rank=rank, world=world)
        self.state = {k: self.array(np.zeros(s, np.float32)) for k, s in compressor.state_shapes(self.info).items()}

    def encode(self, g):
        g = self.array(g)
        params = self.compressor.measure(self.ops, g, self.state, self.info)
        payload = self.compressor.encode(self.ops, g, self.state, params, self.info)
        self.info = dataclasses.replace(self.info, step=self.info.step + 1)
        return payload

    def decode(self, *payloads, out=None):
        return np.asarray(self.compressor.decode_sum(self.ops, list(payloads), self.info, out))

    @property
    def residual(self):
        return np.asarray(self.state["residual"]) if self.state else 0


def normal(numel, seed=0):
    return np.random.default_rng(seed).normal(size=numel).astype(np.float32)


def special(numel):
    x = normal(numel)
    return {"normal": x, "zero": x * 0, "negative zero": np.full(numel, -0.0, np.float32), "equal": x * 0 + 0.25,
            "one sign": -np.abs(x), "subnormal": np.full(numel, 1e-42, np.float32), "tiny": x * 1e-7,
            "huge": np.sign(x) * np.float32(2e38), "sparse": np.where(np.arange(numel) % 97 == 0, x, 0)}


@every(CODECS)
@pytest.mark.parametrize("numel", SIZES)
def test_payload_has_the_stated_size_at_every_step(compressor, backend, numel):
    worker = Worker(compressor, backend, numel)
    sizes = {int(worker.encode(normal(numel, step)).shape[0]) for step in range(3)}
    assert sizes == {compressor.payload_bytes(worker.info)}


@every(ERROR_FEEDBACK)
@pytest.mark.parametrize("numel", SIZES)
def test_nothing_is_lost(compressor, backend, numel):
    worker = Worker(compressor, backend, numel)
    given, sent = np.zeros(numel), np.zeros(numel)
    for step in range(8):
        g = normal(numel, step)
        sent += worker.decode(worker.encode(g))
        given += g
    np.testing.assert_allclose(sent + worker.residual, given, atol=2e-5)


@every(CODECS)
@pytest.mark.parametrize("kind", special(1))
def test_special_values(compressor, backend, kind):
    g = special(5000)[kind]
    worker = Worker(compressor, backend, g.size)
    total = np.zeros(g.size)
    with np.errstate(over="ignore"):
        for _ in range(3):
            payload = worker.encode(g)
            if payload[3] & wire.NONFINITE:
                assert kind == "huge"
                return
            total += worker.decode(payload)
    if compressor in ERROR_FEEDBACK.values():
        np.testing.assert_allclose(total + worker.residual, 3 * g.astype(np.float64), rtol=0, atol=1e-6 * abs(g).max() + 1e-44)
    if kind in ("zero", "negative zero"):
        assert (total == 0).all()


@every(CODECS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_values_are_seen_by_all_and_leave_no_trace(compressor, backend, bad):
    sick, well = Worker(compressor, backend, 5000), Worker(compressor, backend, 5000)
    for worker in (sick, well):
        worker.encode(normal(5000))
    before = np.array(sick.residual), np.array(well.residual)
    g = normal(5000, 1)
    g[[0, 77, 4999]] = bad
    payloads = sick.encode(g), well.encode(normal(5000, 2))
    assert payloads[0][3] & wire.NONFINITE and not payloads[1][3] & wire.NONFINITE
    assert np.isnan(sick.decode(*payloads)).all() and np.isnan(well.decode(*payloads[::-1])).all()
    assert np.isfinite(sick.residual).all()
    sick.compressor.undo(sick.ops, sick.array(g), sick.state, payloads[0], sick.info)
    well.compressor.undo(well.ops, well.array(normal(5000, 2)), well.state, payloads[1], well.info)
    np.testing.assert_allclose(sick.residual, before[0], atol=1e-6)
    np.testing.assert_allclose(well.residual, before[1], atol=1e-6)


@every(ERROR_FEEDBACK)
@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_a_void_step_with_huge_values_leaves_no_noise(compressor, backend, scale):
    worker = Worker(compressor, backend, 5000)
    worker.encode(normal(5000) * np.float32(0.01))
    before = np.array(worker.residual)
    g = normal(5000, 1) * np.float32(0.01)
    g[:40] *= np.float32(scale)
    g[99] = np.inf
    payload = worker.encode(g)
    worker.compressor.undo(worker.ops, worker.array(g), worker.state, payload, worker.info)
    # Beside huge values rounding may take the residual away, but must put nothing in its place.
    allowed = np.abs(before) + 1e-6 * (1 if scale > 1e5 else scale)
    assert (np.abs(worker.residual) <= allowed).all()
    if compressor.name == "threshold" or compressor.name == "topk" and "float" in compressor.values:  # no entry shares a level with a huge one
        np.testing.assert_allclose(worker.residual[40:], before[40:], atol=1e-6)


@every(ERROR_FEEDBACK)
def test_a_sum_that_overflows_into_the_residual_is_flagged(compressor, backend):
    worker = Worker(compressor, backend, 300)
    worker.state["residual"][:] = 3e38
    assert worker.encode(np.full(300, 3e38, np.float32))[3] & wire.NONFINITE
    assert np.isfinite(worker.residual).all()


@every(CODECS)
@pytest.mark.parametrize("numel", SIZES)
def test_decoding_adds_in_order_and_writes_in_place(compressor, backend, numel):
    workers = [Worker(compressor, backend, numel, rank, 3) for rank in range(3)]
    payloads = [w.encode(normal(numel, i)) for i, w in enumerate(workers)]
    expected = np.zeros(numel, np.float32)
    for w, p in zip(workers, payloads):
        expected += w.decode(p)
    out = workers[0].array(np.full(numel, 7, np.float32))
    np.testing.assert_array_equal(workers[0].decode(*payloads, out=out), expected)
    np.testing.assert_array_equal(np.asarray(out), expected)
    mean = compressor.decode_mean(workers[0].ops, payloads, workers[0].info, out)
    np.testing.assert_array_equal(np.asarray(mean), expected * np.float32(1 / 3))


@every(ERROR_FEEDBACK)
def test_ranges_are_encoded_separately(compressor, backend):
    numel, cut = 40_000, compressor.range_multiple * (20_000 // compressor.range_multiple)
    whole = Worker(compressor, backend, numel)
    g = whole.array(normal(numel))
    params = compressor.measure(whole.ops, g, whole.state, whole.info)
    decoded = []
    for start, stop in ((0, cut), (cut, numel)):
        info = whole.info.part(start, stop)
        state = {k: v[start:stop] for k, v in whole.state.items()}
        payload = compressor.encode(whole.ops, g[start:stop], state, params, info)
        decoded.append(np.asarray(compressor.decode_sum(whole.ops, [payload], info)))
    np.testing.assert_allclose(np.concatenate(decoded) + whole.residual, normal(numel), atol=1e-6)


@pytest.mark.parametrize("spec", [*ERROR_FEEDBACK, "qsgd:bits=2", "qsgd", "qsgd:bits=8", "qsgd:bits=8,norm=l2,block_size=1024",
                                  "terngrad:clip=2.5", "terngrad", "natural", "blockwise8", "signsgd"])
@pytest.mark.parametrize("memory", ["error_feedback", "ef21"])
def test_what_is_kept_does_not_grow_without_end(spec, memory):
    """With gradients that have nothing in common, a residual settles; with one that stays the same, an estimate comes nearer."""
    compressor = dataclasses.replace(get_compressor(spec), memory=memory)
    worker, kept, g = Worker(compressor, BACKENDS.get("torch", BACKENDS["generic"]), 2048), 0, normal(2048)
    for step in range(200):
        if memory == "error_feedback":
            worker.encode(normal(2048, step))
        else:
            kept = kept + worker.decode(worker.encode(g - kept))
    error = worker.residual if memory == "error_feedback" else g - kept
    assert np.linalg.norm(error) < (30 if memory == "error_feedback" else 1) * np.linalg.norm(g)


@pytest.mark.parametrize("knobs", ["bits=2,norm=l2", "norm=l2,block_size=64", "bits=8,norm=l2,block_size=16384"])
@pytest.mark.parametrize("memory", ["error_feedback", "ef21"])
def test_a_memory_that_would_grow_without_end_is_refused(knobs, memory):
    assert get_compressor(f"qsgd:{knobs}").memory == "none"
    with pytest.raises(ValueError, match=f"qsgd: norm='l2' is not accepted; give 'max' beside memory='{memory}'"):
        get_compressor(f"qsgd:{knobs},memory={memory}")


@every(ERROR_FEEDBACK)
def test_without_memory_the_first_step_is_the_same_and_nothing_is_kept(compressor, backend):
    forgetful = dataclasses.replace(compressor, memory="none")
    assert "residual" not in forgetful.state_shapes(TensorInfo.whole("w", (5000,)))
    assert forgetful.stateful == forgetful.across_tensors
    keeping, worker = Worker(compressor, backend, 5000), Worker(forgetful, backend, 5000)
    g = normal(5000)
    np.testing.assert_array_equal(worker.decode(worker.encode(g)), keeping.decode(keeping.encode(g)))
    worker.info = dataclasses.replace(worker.info, step=0)
    np.testing.assert_array_equal(worker.decode(worker.encode(g)), worker.decode(Worker(forgetful, backend, 5000).encode(g)))


@pytest.mark.parametrize("spec", ["signsgd", "onebit:zeros=true", "qsgd", "terngrad", "natural", "blockwise8",
                                  "blockwise8:code=linear"])
def test_a_zero_stays_zero(backend, spec):
    worker = Worker(get_compressor(spec), backend, 5000)
    zero = np.arange(5000) % 3 == 0
    for step in range(3):
        assert (worker.decode(worker.encode(np.where(zero, np.float32(0), normal(5000, step))))[zero] == 0).all()


@pytest.mark.parametrize("spec, least", [
    ("signsgd:zeros=false", 31), ("signsgd", 15), ("qsgd:bits=2", 15), ("qsgd", 7.8), ("qsgd:bits=8", 3.9), ("terngrad", 15.9),
    ("natural", 3.9), ("blockwise8", 3.9)])
def test_sizes(spec, least):
    assert 4 * 2**20 / get_compressor(spec).payload_bytes(info(2**20)) > least


def test_signs_decode_to_the_mean_magnitude(backend):
    g = normal(3000)
    g[::2] = 0
    for spec, counted in (("signsgd", g != 0), ("signsgd:zeros=false", np.isfinite(g))):
        worker = Worker(get_compressor(spec), backend, 3000)
        decoded = worker.decode(worker.encode(g))
        for a, b in ((0, 2048), (2048, 3000)):
            mean = abs(g[a:b][counted[a:b]]).mean(dtype=np.float64)
            np.testing.assert_allclose(decoded[a:b], mean * np.where(g < 0, -1, np.where(counted, 1, 0))[a:b], rtol=1e-6)


def test_the_dynamic_code():
    code = np.array(layout.dynamic_code())
    assert code[0] == 0 and code[128] == 1 and (np.diff(code[:129]) > 0).all() and len(set(code)) == 256
    np.testing.assert_array_equal(code[:128:-1], -code[1:128])
    for i in range(7):  # each decade has twice the values of the one below, evenly spaced, in the middle of its steps
        decade = code[2**i:2**(i + 1)]
        assert 10.0 ** (i - 7) < decade[0] and decade[-1] < 10.0 ** (i - 6)
        np.testing.assert_allclose(decade, 10.0 ** (i - 6) * (0.1 + 0.9 * (np.arange(2**i) + 0.5) / 2**i), rtol=1e-12)


def test_blocks_of_eight_bits_are_rounded_to_nearest(backend):
    g = normal(5000) * np.float32(10) ** np.random.default_rng(1).integers(-6, 1, 5000).astype(np.float32)
    for code, values in (("linear", np.arange(-127, 128) / 127), ("dynamic", np.array(sorted(layout.dynamic_code())))):
        worker = Worker(get_compressor(f"blockwise8:code={code},memory=none"), backend, 5000)
        decoded = worker.decode(worker.encode(g))
        for a in range(0, 5000, 2048):
            block, largest = g[a:a + 2048].astype(np.float64), float(abs(g[a:a + 2048]).max())
            nearest = abs(block[:, None] / largest - values).min(1)
            assert (abs(block - decoded[a:a + 2048]) <= (nearest * (1 + 1e-6) + 2e-7 * abs(block / largest)) * largest).all()


@every(CODECS)
def test_the_gradient_is_not_modified(compressor, backend):
    worker = Worker(compressor, backend, 5000)
    g = worker.array(normal(5000))
    params = compressor.measure(worker.ops, g, worker.state, worker.info)
    compressor.encode(worker.ops, g, worker.state, params, worker.info)
    np.testing.assert_array_equal(np.asarray(g), normal(5000))


@every(CODECS)
def test_payloads_of_other_settings_are_refused(compressor, backend):
    worker = Worker(compressor, backend, 5000)
    payload = worker.encode(normal(5000))
    for other in CODECS.values():
        stranger = Worker(other, backend, 5000)
        if other.name != compressor.name or other.payload_bytes(worker.info) != compressor.payload_bytes(worker.info):
            with pytest.raises(wire.PayloadError, match="use the same compression"):
                stranger.decode(payload)
    with pytest.raises(wire.PayloadError, match="holds 5000 entries, expected 4999"):
        Worker(compressor, backend, 4999).decode(payload)
    with pytest.raises(wire.PayloadError, match="worker 1 failed to encode its gradient: no memory"):
        failed = wire.failure(compressor.name, 5000, 1, "no memory")
        worker.decode(payload, failed if backend[0] is generic else worker.array(failed))


@pytest.mark.skipif("torch" not in BACKENDS, reason="PyTorch is not installed")
@every(CODECS)
def test_encoding_on_a_device_never_reads_values_back(compressor):
    """Meta tensors have no values: whatever would make the host wait for a GPU raises here."""
    record = TensorInfo.whole("w", (40_000,))
    g = torch.empty(40_000, device="meta")
    state = {k: torch.empty(s, device="meta") for k, s in compressor.state_shapes(record).items()}
    payload = compressor.encode(generic, g, state, compressor.measure(generic, g, state, record), record)
    assert payload.device.type == "meta" and payload.shape == (compressor.payload_bytes(record),)
    compressor.between_steps(generic, [(record, state), (record, state)])
    with pytest.raises((RuntimeError, NotImplementedError)):  # a decoder checks, so it has to read
        compressor.decode_sum(generic, [payload], record)


class Model:
    """Tensors of one worker with one threshold, and the threshold as the definition has it."""

    def __init__(self, backend, sizes, ratio):
        self.backend, self.sizes, self.ratio = backend, sizes, ratio
        self.compressor = get_compressor(f"topk:min_numel=0,ratio={ratio},scope=model")
        self.tensors = [Worker(self.compressor, backend, numel) for numel in sizes]

    def step(self, grads):
        """What each tensor sends of its gradient, None taking no part; and what v was."""
        sent = []
        for tensor, g in zip(self.tensors, grads):
            if g is not None:
                v = g + np.array(tensor.residual)
                sent.append((tensor.decode(tensor.encode(g)), v))
        self.compressor.between_steps(self.backend[0], [(t.info, t.state) for t in self.tensors])
        return sent

    def expected(self, vs, step):
        """The threshold: samples are taken as many times as they stand for, here in 2^20ths."""
        samples = [abs(np.asarray(generic.sample(v, None, step))) for v in vs]
        weights = np.concatenate([np.full(s.size, v.size * 2**20 // s.size) for s, v in zip(samples, vs)])
        magnitudes = np.concatenate(samples)
        for t in sorted(set(magnitudes), reverse=True):
            if weights[magnitudes >= t].sum() > self.ratio * weights.sum():
                return np.nextafter(t, np.float32(np.inf))
        return np.nextafter(np.float32(0), np.float32(1))

    @property
    def thresholds(self):
        return [np.asarray(t.state["threshold"])[0] for t in self.tensors]


@pytest.mark.parametrize("ratio", [0.003, 0.1, 1.0])
def test_a_threshold_for_the_whole_model(backend, ratio):
    sizes, scales = [60_000, 5000, 300, 1], np.float32([0.01, 1, 0.1, 0.3])
    model = Model(backend, sizes, ratio)
    assert model.thresholds == [0] * 4
    tau = None
    for step in range(4):
        sent = model.step([normal(n, 10 * step + n) * scale for n, scale in zip(sizes, scales)])
        if tau:  # that of the step before
            for decoded, v in sent:
                beyond = abs(v) >= tau
                if ratio < 1 and 0 < beyond.sum() <= generic.slots_for(min(1, 2 * ratio), v.size):
                    np.testing.assert_array_equal(decoded != 0, beyond)
        tau = model.expected([v for _, v in sent], step)
        assert model.thresholds == [tau] * 4
    if ratio == 0.1:  # of 65,301 entries, 5300 are larger than most others
        assert sum((decoded != 0).sum() for decoded, _ in sent) < 0.13 * sum(sizes)
        assert (sent[1][0] != 0).mean() == pytest.approx(0.2, abs=0.01)  # all that there is room for


def test_the_threshold_of_a_model_without_some_of_its_tensors(backend):
    model = Model(backend, [5000, 300, 70], 0.05)
    model.step([None] * 3)
    assert model.thresholds == [0] * 3  # nothing was sampled, as in a warm-up
    (_, v), = model.step([normal(5000), None, None])
    tau = model.expected([v], 0)
    assert model.thresholds == [tau] * 3
    (_, other), = model.step([None, normal(300) * np.float32(100), None])  # the first stands for what it had
    assert model.thresholds[0] == model.thresholds[2] > tau
    bad = normal(5000, 1)
    bad[:] = np.nan
    model.step([bad, None, None])
    assert np.isfinite(model.thresholds).all() and np.isfinite(np.asarray(model.tensors[0].state["magnitudes"])).all()


@pytest.mark.parametrize("kind", special(1))
def test_backends_agree_on_the_threshold_of_a_model(kind):
    sizes, found = [70_000, 4097, 12], []
    for backend in BACKENDS.values():
        model = Model(backend, sizes, 0.01)
        for _ in range(2):
            with np.errstate(over="ignore"):
                model.step([special(n)[kind] * np.float32(i + 1) for i, n in enumerate(sizes)])
            found.append(np.array([np.asarray(x).view(np.int32) for x in model.thresholds]))
    np.testing.assert_array_equal(found, [found[0], found[1]] * (len(found) // 2))


def test_an_owner_has_a_threshold_of_its_own():
    model, tensor = get_compressor("topk:scope=model"), get_compressor("topk")
    assert model.state_shapes(info(5000), "owner") == tensor.state_shapes(info(5000), "owner") == {"residual": (5000,)}
    assert model.state_shapes(info(5000)) == {"residual": (5000,), "magnitudes": (4096,), "threshold": (2,)}
    assert not tensor.across_tensors and tensor.between_steps(generic, []) is None
    assert model.payload_bytes(info(2**20)) > 1.8 * tensor.payload_bytes(info(2**20))


def info(numel, world=2, **known):
    return TensorInfo.whole("w", (numel,), world=world, **known)


def test_choice_of_exchange():
    choose = exchange.choose
    assert choose(get_compressor("none"), info(10**6)) == "dense"
    assert choose(get_compressor("fp16"), info(10)) == "allreduce"
    assert choose(get_compressor("bf16"), info(10**6)) == "allgather"
    assert choose(get_compressor("fp16:exchange=allgather"), info(10**6)) == "allgather"
    assert choose(get_compressor("none:exchange=allgather"), info(10**6)) == "allgather"
    assert choose(get_compressor("topk"), info(10**6)) == "allgather"
    assert choose(get_compressor("topk"), info(4095)) == "dense"
    assert choose(get_compressor("topk:min_numel=0"), info(4095)) == "allgather"
    assert choose(get_compressor("topk:min_numel=0"), info(8)) == "dense"  # the payload would be larger
    assert choose(get_compressor("topk:min_numel=0"), info(0)) == "dense"
    assert choose(get_compressor("topk"), info(10**6, world=1)) == "dense"
    assert choose(get_compressor("topk:warmup=5"), info(10**6, step=4)) == "dense"
    assert choose(get_compressor("topk:warmup=5"), info(10**6, step=5)) == "allgather"
    assert choose(get_compressor("onebit"), info(10**7, world=8)) == "sra"
    assert choose(get_compressor("onebit:exchange=allgather"), info(10**7, world=8)) == "allgather"


def test_an_allgather_beyond_mpis_counts_is_refused():
    with pytest.raises(ValueError, match=r"w: payloads of \d+ bytes from 128 workers are more than the 2\^31 bytes"):
        exchange.choose(get_compressor("bf16:exchange=allgather"), info(2**24, world=128), mpi=True)
    assert exchange.choose(get_compressor("bf16:exchange=allgather"), info(2**24, world=128)) == "allgather"
    assert exchange.choose(get_compressor("onebit:exchange=allgather"), info(2**24, world=128), mpi=True) == "allgather"
    assert exchange.choose(get_compressor("bf16"), info(2**24, world=128), mpi=True) == "sra"


def test_sent_bytes():
    assert exchange.sent_bytes("allreduce", 100, 2) == exchange.sent_bytes("allgather", 100, 2) == 100
    assert exchange.sent_bytes("allreduce", 100, 4) == 150
    assert exchange.sent_bytes("allgather", 100, 4) == exchange.sent_bytes("sparse", 100, 4) == 300
    assert exchange.sent_bytes("sra", 100, 4) == 150
    assert exchange.sent_bytes("allgather", 100, 1) == exchange.sent_bytes("dense", 100, 1) == 0


def test_the_sizes_in_the_readme_are_those_of_a_large_tensor():
    rows = re.findall(r"^\| `(\w+)((?::[^`]*)?)` \|[^|]*\| 1/(\d+) \|", (Path(__file__).parents[2] / "README.md").read_text(), re.M)
    own = {name for name in registry.list_compressors() if registry.compressor_class(name).__module__.startswith("hvd_quant.")}
    assert {name for name, _, _ in rows} == own - {"none"}
    for name, knobs, size in rows:
        compressor = get_compressor(name + knobs.replace("tau=T", "tau=1"))
        assert round(4 * 2**24 / compressor.payload_bytes(TensorInfo.whole("w", (4096, 4096)))) == int(size), name
