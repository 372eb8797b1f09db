"""Overflows and loss scaling: a step that is not finite leaves no trace on any worker, and what is kept follows the scale."""

import contextlib
import copy
import math

import horovod.torch
import pytest
import torch

import hvd_quant.torch as hvd
from tests.conftest import CODECS, LINEAR
from tests.parallel.torch_workers import RANK, WORLD, assert_same_everywhere, backward, every, flat, network, train, wrap

pytestmark = [pytest.mark.filterwarnings("ignore:SGD has a momentum of its own"),
              pytest.mark.skipif(WORLD > 2, reason="two workers tell as much, and more may choose other exchanges for a twin")]
MEMORIES = ["topk:min_numel=0,ratio=0.1,momentum=0.9,clip_norm=0.1,weight_decay=0.01", "adaptive:min_numel=0,momentum=0.9,nesterov=true",
            "onebit:min_numel=0,memory=ef21", "topk:min_numel=0,memory=ef21,eta=0.3,exchange=sra", "qsgd:min_numel=0,memory=error_feedback",
            "topk:min_numel=0,ratio=0.1,scope=model", "topk:min_numel=0,ratio=0.1,merge=replace", "topk:min_numel=0,warmup=2",
            "adaptive:min_numel=0,ratio=0.1,exchange=sra", "powersgd:min_numel=0,merge=sum", "topk:ratio=0.1,min_numel=100"]
ALL = {**CODECS, **LINEAR, **{spec: spec for spec in MEMORIES}, "fp16 beside": {"*.bias": "fp16", "*": "topk:min_numel=0,ratio=0.1"}}
# Exact where they are scaled by a power of two, whatever their random numbers and sizes.
EXACT = {spec: c for spec, c in ALL.items() if "fp16" not in spec}
BAD = (float("inf"), float("-inf"), float("nan"))


def given(model, optimizer, step, scale=1.0, bad=None):
    """Gradients of a step; ``bad`` is one element of the last worker's, of a tensor that is neither the first nor the last."""
    optimizer.zero_grad()
    for i, p in enumerate(model.parameters()):
        p.grad = scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + 10 * i + RANK))
        if bad is not None and i == 2 and RANK == WORLD - 1:
            p.grad[3, 5] = bad


def states(optimizer):
    return copy.deepcopy(optimizer.compression_state_dict()["tensors"])


def values_of(tensors):
    return {(name, key): value for name, slot in tensors.items() for key, value in slot["state"].items()}


def assert_states(optimizer, before, tolerance=1e-5):
    after = states(optimizer)
    assert {name: slot["step"] for name, slot in after.items()} == {name: slot["step"] for name, slot in before.items()}
    for key, value in values_of(after).items():
        # What an encode took is put back to fp32 rounding; everything else was not touched.
        torch.testing.assert_close(value, values_of(before)[key], rtol=0, atol=tolerance if "residual" in key[1] else 0, msg=str(key))


@every(ALL)
def test_a_step_that_is_not_finite_is_void_for_all_tensors(compressor):
    model = network()
    optimizer = wrap(model, compressor)
    for steps in (0, 3):
        for step in range(steps):
            given(model, optimizer, step)
            optimizer.step()
        before = states(optimizer)
        kept = bool(values_of(before))  # where nothing is, there is nothing to be taken back
        for bad in BAD:
            given(model, optimizer, 10, bad=bad)
            optimizer.synchronize()
            assert not torch.isfinite(model[2].weight.grad).all()
            if kept:
                assert all(torch.isnan(p.grad).all() for p in model.parameters())
                assert_states(optimizer, before)
    given(model, optimizer, 4)
    optimizer.step()
    assert torch.isfinite(flat(model)).all()
    if "merge" not in str(compressor):
        assert_same_everywhere(flat(model))


def scaled_steps(model, optimizer, scaler, steps, overflow=(), clip=False, bad=None):
    """Train under a loss scaler, torch's own as the sentence that refuses it says; the scales that it had. In a step of
    ``overflow`` one worker's loss is infinite, or, where that is given, one element of its gradients is ``bad``."""
    scales, torchs = [], not isinstance(scaler, hvd.GradScaler)

    def spoil(grad):
        grad = grad.clone()
        grad[3, 5] = bad
        return grad

    for step in steps:
        optimizer.zero_grad()
        if torchs:
            optimizer.set_loss_scale(scaler.get_scale())
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + RANK))
        loss = ((model(x) - x) ** 2).mean()
        hook = model[2].weight.register_hook(spoil) if bad is not None and step in overflow and RANK == WORLD - 1 else None
        if bad is None and step in overflow and RANK == WORLD - 1:
            loss = loss * BAD[step % 3]
        scaler.scale(loss).backward()
        if hook is not None:
            hook.remove()
        scales.append(scaler.get_scale())
        if torchs:
            optimizer.synchronize()
        if clip or torchs:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize() if torchs else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()
    return scales


@every({**ALL, "none, clipped": "none", "topk, clipped": "topk:ratio=0.1,min_numel=0"})
def test_an_overflow_on_one_worker_under_a_scaler(compressor, request):
    clip = 0.01 if "clipped" in request.node.name else False
    model = network()
    optimizer, scaler = wrap(model, compressor), hvd.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    assert isinstance(scaler, torch.amp.GradScaler)
    scales = scaled_steps(model, optimizer, scaler, range(3), clip=clip)
    before, parameters = states(optimizer), flat(model)
    scales += scaled_steps(model, optimizer, scaler, [3], overflow=[3], clip=clip)
    assert torch.equal(flat(model), parameters)
    if values_of(before):
        assert_states(optimizer, before, tolerance=1e-2)  # these are in units of a loss times 2048
    scales += scaled_steps(model, optimizer, scaler, range(4, 8), clip=clip)
    assert scales == [1024, 1024, 2048, 2048, 1024, 1024, 2048, 2048]
    assert not torch.equal(flat(model), parameters) and torch.isfinite(flat(model)).all()
    if "merge" not in str(compressor):
        assert_same_everywhere(flat(model))


ONE_OF_EACH = {spec: spec for spec in (
    "none", "fp16", "topk:ratio=0.1,min_numel=0", "onebit:min_numel=0,exchange=sra", "qsgd:min_numel=0", "powersgd:min_numel=0",
    "adaptive:min_numel=0,momentum=0.9", "onebit:min_numel=0,memory=ef21")}


@every(ONE_OF_EACH)
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("scaler_of", [hvd.GradScaler, torch.amp.GradScaler], ids=["ours", "torchs"])
def test_one_element_that_is_not_finite_under_a_scaler(compressor, bad, scaler_of):
    model, twin = network(), network()
    optimizer, scaler = wrap(model, compressor), scaler_of("cpu", init_scale=1024.0, growth_interval=2)
    scales = scaled_steps(model, optimizer, scaler, range(3))
    before, parameters = states(optimizer), flat(model)
    scales += scaled_steps(model, optimizer, scaler, [3], overflow=[3], bad=bad)
    assert torch.equal(flat(model), parameters)
    if values_of(before):
        assert all(torch.isnan(p.grad).all() for p in model.parameters())
        assert_states(optimizer, before, tolerance=1e-2)  # these are in units of a loss times 2048
    else:
        assert not torch.isfinite(model[2].weight.grad).all()
    scales += scaled_steps(model, optimizer, scaler, range(4, 8))
    assert hvd.allgather_object(scales) == [[1024, 1024, 2048, 2048, 1024, 1024, 2048, 2048]] * WORLD
    assert_same_everywhere(flat(model))
    if compressor in ("none", "powersgd:min_numel=0"):  # nothing has to be taken back: all is as if that step had not been
        train(twin, wrap(twin, compressor), [0, 1, 2, 4, 5, 6, 7])
        assert torch.equal(flat(model), flat(twin))


@every(EXACT)
def test_what_is_kept_follows_the_scale(compressor):
    """With a scale that changes every other step, training is bit for bit what it is without one."""
    models = network(), network()
    optimizers = [wrap(model, compressor) for model in models]
    train(models[0], optimizers[0], range(7))
    scales = scaled_steps(models[1], optimizers[1], hvd.GradScaler("cpu", init_scale=64.0, growth_interval=2), range(7))
    assert scales == [64, 64, 128, 128, 256, 256, 512]
    assert torch.equal(flat(models[0]), flat(models[1]))
    plain, scaled = (values_of(states(optimizer)) for optimizer in optimizers)
    for key, value in plain.items():
        if key[1] not in ("q", "threshold"):  # of which the length of one, and an element of the other, is of no importance
            assert torch.equal(value * 512, scaled[key]), key


def test_a_checkpoint_holds_the_scale():
    def fresh():
        model = network()
        return model, wrap(model, "threshold:tau=0.001,min_numel=0"), hvd.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    model, optimizer, scaler = fresh()
    scaled_steps(model, optimizer, scaler, range(4))
    saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, scaler)] + [optimizer.compression_state_dict()])
    assert saved[-1]["loss_scale"] == 128
    scaled_steps(model, optimizer, scaler, range(4, 8))
    resumed, other, second = fresh()
    for part, state in zip((resumed, other, second), saved):
        part.load_state_dict(state)
    other.load_compression_state_dict(saved[-1])
    scaled_steps(resumed, other, second, range(4, 8))
    assert torch.equal(flat(model), flat(resumed))
    # One that has been told its scale keeps to it.
    other.set_loss_scale(4.0)
    other.load_compression_state_dict(saved[-1])
    for key, value in values_of(states(other)).items():
        assert torch.equal(value, values_of(saved[-1]["tensors"])[key] / 32)


@pytest.mark.parametrize("off", [False, True], ids=["no scaler", "a scaler that is off"])
def test_a_checkpoint_of_a_scaled_loss_goes_on_unscaled(off):
    spec = "threshold:tau=0.01,min_numel=0"
    model, twin = network(), network()
    optimizer, reference = wrap(model, spec), wrap(twin, spec)
    scaled_steps(model, optimizer, hvd.GradScaler("cpu", init_scale=64.0), range(4))
    train(twin, reference, range(4))
    assert torch.equal(flat(model), flat(twin))
    resumed = network()
    other = wrap(resumed, spec)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    other.load_compression_state_dict(optimizer.compression_state_dict())
    if off:
        scaled_steps(resumed, other, hvd.GradScaler("cpu", enabled=False), range(4, 8))
    else:
        train(resumed, other, range(4, 8))
    train(twin, reference, range(4, 8))
    assert torch.equal(flat(resumed), flat(twin))


def test_a_scaler_that_is_off_leaves_a_scale_that_was_told():
    model, twin = network(), network()
    optimizer, reference = wrap(model, "threshold:tau=0.01,min_numel=0"), wrap(twin, "threshold:tau=0.01,min_numel=0")
    scaler = hvd.GradScaler("cpu", enabled=False)
    optimizer.set_loss_scale(1024.0)
    for i in range(3):
        optimizer.zero_grad()
        backward(model, i, scale=1024.0)
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad /= 1024
        scaler.step(optimizer)
        scaler.update()
    train(twin, reference, range(3))
    assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize("compressor", ["topk:ratio=0.1,min_numel=0", "none"])
@pytest.mark.parametrize("unscale", [False, True])
def test_torchs_own_scaler(compressor, unscale):
    """It is refused, on all workers, until it is used as the sentence says."""
    models = [network(), network()]
    optimizers = [wrap(model, compressor) for model in models]
    ours, torchs = hvd.GradScaler("cpu", init_scale=64.0, growth_interval=2), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    with pytest.raises(RuntimeError, match=r"(?s)call optimizer.set_loss_scale\(scaler.get_scale\(\)\) before backward, and after it "
                       r"optimizer.synchronize\(\), scaler.unscale_\(optimizer\), and scaler.step\(optimizer\) inside "
                       r"optimizer.skip_synchronize\(\); or use hvd_quant.torch.GradScaler"):
        torchs.scale((models[1](torch.ones(2, 30)) * (math.inf if RANK == 0 else 1)).sum()).backward()
        if unscale:
            torchs.unscale_(optimizers[1])
        torchs.step(optimizers[1])
    try:
        optimizers[1].synchronize()
    except RuntimeError as error:
        assert unscale and "was modified" in str(error)
    models[1] = network()
    optimizers[1], torchs = wrap(models[1], compressor), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    expected = scaled_steps(models[0], optimizers[0], ours, range(6), overflow=[3])
    scales = scaled_steps(models[1], optimizers[1], torchs, range(6), overflow=[3])
    assert scales == expected == [64, 64, 128, 128, 64, 64]
    assert torch.equal(flat(models[0]), flat(models[1]))


@pytest.mark.parametrize("make", [
    lambda model, sgd: horovod.torch.DistributedOptimizer(sgd, model.named_parameters()),
    lambda model, sgd: horovod.torch.DistributedOptimizer(
        sgd, model.named_parameters(), hvd.Compression.topk(ratio=0.1, min_numel=0).bind(model.named_parameters())),
    lambda model, sgd: hvd.DistributedOptimizer(sgd, model.named_parameters(), backward_passes_per_step=1, groups=1)],
    ids=["horovods", "bound", "uncompressed"])
def test_the_scaler_with_horovods_optimizer(make):
    model = network()
    optimizer = make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scales = scaled_steps(model, optimizer, hvd.GradScaler("cpu", init_scale=64.0, growth_interval=2), range(6), overflow=[1, 4])
    assert scales == [64, 64, 32, 32, 64, 32]
    assert torch.isfinite(flat(model)).all()
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("make", [hvd.DistributedOptimizer, horovod.torch.DistributedOptimizer])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_that_is_off_reduces_in_the_same_places(make, unscale):
    def trained(scaler):
        model = network()
        optimizer = make(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            if not scaler:
                optimizer.synchronize()
            elif unscale:  # so that what has been reduced is clipped
                scaler.unscale_(optimizer)
            if unscale:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
        return flat(model)

    found = trained(hvd.GradScaler("cpu", enabled=False))
    assert torch.equal(found, trained(None))
    assert_same_everywhere(found)


def test_one_scaler_for_two_optimizers_and_one_without():
    """Each follows the scaler whose loss its gradients are of."""
    models, references = [network(seed) for seed in range(3)], [network(seed) for seed in range(3)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), [
        (f"{i}.{name}", p) for name, p in model.named_parameters()], "threshold:tau=0.001,min_numel=0") for i, model in enumerate(models)]
    for model in references:
        train(model, wrap(model, "threshold:tau=0.001,min_numel=0"), range(4))
    scaler = hvd.GradScaler("cpu", init_scale=32.0, growth_interval=1)
    for step in range(4):
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + RANK))
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [((model(x) - x) ** 2).mean() for model in models]
        for loss in scaler.scale(losses[:2]):
            loss.backward()
        losses[2].backward()
        for optimizer in optimizers[:2]:
            scaler.step(optimizer)
        optimizers[2].step()
        scaler.update()
    for model, reference in zip(models, references):
        assert torch.equal(flat(model), flat(reference))


def test_gradients_that_add_up_under_a_scaler():
    models = network(), network()
    optimizers = [wrap(model, "topk:ratio=0.1,min_numel=0", backward_passes_per_step=2) for model in models]
    scaler = hvd.GradScaler("cpu", init_scale=32.0, growth_interval=1)
    for step in range(3):
        for model, optimizer, scale, take in zip(models, optimizers, (lambda x: x, scaler.scale), (lambda x: x.step(), scaler.step)):
            optimizer.zero_grad()
            for half in range(2):
                x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + 10 * half + RANK))
                scale(((model(x) - x) ** 2).mean()).backward()
            take(optimizer)
        scaler.update()
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_what_is_no_scale_is_refused():
    model = network()
    optimizer = wrap(model)
    for scale in (0, -1.0, math.inf, math.nan, "2", True):
        with pytest.raises(ValueError, match="a loss scale of .* is not accepted; give a finite number above 0"):
            optimizer.set_loss_scale(scale)
    optimizer.set_loss_scale(8)
    model(torch.ones(2, 30)).sum().backward()
    with pytest.raises(RuntimeError, match="can't become 16 now, since gradients of a loss times 8 are being exchanged: call set_loss_sc"):
        optimizer.set_loss_scale(16)
    optimizer.set_loss_scale(8)
    optimizer.step()
    optimizer.set_loss_scale(16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@every({spec: spec for spec in ("onebit:min_numel=0", "topk:ratio=0.3,min_numel=0,memory=ef21", "none")})
def test_models_in_half_precision_train(compressor, autocast, dtype):
    model = network()
    if not autocast:
        model = model.to(dtype)
    optimizer = wrap(model, compressor, torch.optim.SGD(model.parameters(), lr=0.3))
    scaler = hvd.GradScaler("cpu", init_scale=2.0**10, enabled=autocast and dtype == torch.float16)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        x = torch.randn(64, 30, generator=torch.Generator().manual_seed(1000 * step + RANK))
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            loss = ((model(x if autocast else x.to(dtype)) - x) ** 2).mean()
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert_same_everywhere(flat(model).float())
