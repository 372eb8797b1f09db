"""Model averaging among workers, against a simulation of all of them in NumPy."""

import io
import re
import warnings
from pathlib import Path

import pytest
import torch

import hvd_quant.torch as hvd
from tests.parallel import averaging_in_numpy as simulation
from tests.parallel.torch_workers import (
    RANK,
    WORLD,
    assert_same_everywhere,
    backward,
    flat,
    network,
    on_all,
    train,
    wrap,
)

ONEBIT, SRA = (f"onebit:min_numel=0,block_size={simulation.BLOCK},exchange={exchange}" for exchange in ("allgather", "sra"))
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def averaging(model, every=4, optimizer=None, /, **how):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.ModelAveragingOptimizer(optimizer, model.named_parameters(), every=every, **how)


def diloco(params):
    return torch.optim.SGD(params, **NESTEROV)


def mean_of(tensor):
    return on_all(tensor).mean(0)


def bits(state):
    """A checkpoint as bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize("setting", simulation.SETTINGS.values(), ids=list(simulation.SETTINGS))
def test_as_in_numpy(setting):
    model = torch.nn.Linear(simulation.INPUTS, simulation.OUTPUTS, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(simulation.weight()))
    inner = torch.optim.SGD(model.parameters(), lr=setting.get("lr", 0.5), momentum=setting.get("momentum", 0.0))
    if setting.get("adamw"):
        inner = torch.optim.AdamW(model.parameters(), setting["lr"], simulation.BETAS, simulation.EPSILON, simulation.DECAY)
    lr, momentum = setting.get("outer", (1.0, 0.0))
    outer = (lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=True)) if "outer" in setting else None
    optimizer = averaging(model, setting["every"], inner, outer=outer, average_state=setting.get("average_momentum", False),
                          compression=ONEBIT if setting.get("compressed") else "none")
    for step in range(20):
        x, y = map(torch.from_numpy, simulation.batch(step, RANK))
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    expected = torch.from_numpy(simulation.simulate(WORLD, 20, **setting)[RANK])
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-6 if setting.get("compressed") else 1e-12)
    averagings = simulation.averagings(setting["every"], 20)
    assert optimizer.compression_stats()["steps"] == len(averagings)
    if averagings[-1] == 20:
        assert_same_everywhere(flat(model))


@pytest.mark.parametrize("code", simulation.CODES)
def test_what_a_code_leaves_of_the_way_is_kept(code):
    """What models are off their mean by is, on average, what the workers keep; that of the averaging before has arrived."""
    model = network()
    optimizer, before = averaging(model, 100, compression=code), 0
    for steps in (range(2), range(2, 5)):
        train(model, optimizer, steps)
        mean = mean_of(flat(model))
        optimizer.average()
        assert_same_everywhere(flat(model))
        kept = optimizer.compression_state_dict()["tensors"]
        residuals = [kept[name]["state"].get("residual", torch.zeros(p.numel())) for name, p in model.named_parameters()]
        after = mean_of(torch.cat(residuals))
        assert after.any() and not torch.allclose(flat(model), mean, atol=1e-5)
        torch.testing.assert_close(flat(model) - mean, after - before, rtol=0, atol=1e-6)
        before = after


def test_every_step_is_sgd_on_mean_gradients():
    model, reference = network(), network()
    train(model, averaging(model, 1, torch.optim.SGD(model.parameters(), lr=0.1)), range(10))
    train(reference, wrap(reference, "none", torch.optim.SGD(reference.parameters(), lr=0.1)), range(10))
    torch.testing.assert_close(flat(model), flat(reference))
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("compression", ["none", SRA, "topk:ratio=0.1,min_numel=0,exchange=allgather"])
def test_an_outer_optimizer(compression):
    """A function, and an optimizer of the same parameters; SGD with learning rate 1 is averaging."""
    results = []
    for make in (None, lambda params: torch.optim.SGD(params, lr=1.0), diloco, "instance"):
        model = network()
        outer = diloco(model.parameters()) if make == "instance" else make
        optimizer = averaging(model, 3, compression=compression, outer=outer)
        train(model, optimizer, range(7))
        assert not torch.equal(*on_all(flat(model))[:2])  # amid an interval
        optimizer.average()
        assert_same_everywhere(flat(model))
        results.append(flat(model))
    assert torch.equal(results[0], results[1]) and torch.equal(results[2], results[3])
    assert not torch.allclose(results[0], results[2], atol=1e-3)
    assert next(iter(outer.state.values()))["momentum_buffer"].shape == model[0].weight.shape
    assert_same_everywhere(outer.param_groups[0]["params"][0])


def test_intervals():
    model = network()
    optimizer = averaging(model, lambda step: 1 if step < 2 else 3)  # averages after steps 1, 2, 5, 8
    taken = []
    for step in range(9):
        train(model, optimizer, [step])
        taken.append(optimizer.compression_stats()["steps"])
    assert taken == [1, 2, 2, 2, 3, 3, 3, 4, 4]
    mean = mean_of(flat(model))
    for _ in range(2):
        optimizer.average()  # the second time, there is nothing to do
        torch.testing.assert_close(flat(model), mean)
        assert optimizer.compression_stats()["steps"] == 5
    train(model, optimizer, range(9, 11))
    assert optimizer.compression_stats()["steps"] == 5 and optimizer.compression_stats()["local_steps"] == 11
    train(model, optimizer, range(11, 12))
    assert optimizer.compression_stats()["steps"] == 6  # three steps after the last one


def test_bytes():
    sent = {}
    for every in (1, 16):
        model = network()
        optimizer = averaging(model, every)
        train(model, optimizer, range(32))
        sent[every] = optimizer.compression_stats()["wire_bytes"]
    entries = flat(model).numel()
    assert sent[1] == 16 * sent[16] == round(32 * 2 * 4 * entries * (WORLD - 1) / WORLD)
    model = network()
    optimizer = averaging(model, 16, average_state=True)
    train(model, optimizer, range(32))
    assert optimizer.compression_stats()["wire_bytes"] == 2 * sent[16]


def test_statistics_of_batch_normalisation():
    torch.manual_seed(0)
    with_model, without = (torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30)) for _ in range(2))
    without.load_state_dict(with_model.state_dict())
    optimizers = averaging(with_model, 2, model=with_model), averaging(without, 2)
    for model, optimizer in zip((with_model, without), optimizers):
        train(model, optimizer, range(1))
        model.double().float()  # which makes new buffers
        train(model, optimizer, range(1, 2))
    own = without[1].running_mean
    assert not torch.equal(*on_all(own)[:2])
    assert_same_everywhere(torch.cat([with_model[1].running_mean, with_model[1].running_var]))
    torch.testing.assert_close(with_model[1].running_mean, mean_of(own))
    assert with_model[1].num_batches_tracked.dtype == torch.int64 and with_model[1].num_batches_tracked == 2


@pytest.mark.parametrize("at", [8, 10], ids=["average", "amid"])
@pytest.mark.parametrize("compression", [ONEBIT, SRA])
def test_a_resumed_run_is_the_same_bit_for_bit(compression, at):
    def made(seed):
        model = network(seed)
        return model, averaging(model, 4, outer=diloco, compression=compression, average_state=True)

    (model, optimizer), (other, resumed) = made(0), made(1)
    train(model, optimizer, range(at))
    file = io.BytesIO(bits([model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()]))
    for target, state in zip((other, resumed), loaded := torch.load(file, weights_only=True)):
        target.load_state_dict(state)
    torch.optim.SGD(other.parameters(), lr=0.1).load_state_dict(loaded[1])  # the stock layout
    resumed.load_compression_state_dict(loaded[2])
    assert bits(resumed.compression_state_dict()) == bits(optimizer.compression_state_dict())
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, range(at, 21))
    assert torch.equal(flat(model), flat(other))
    assert bits(resumed.compression_state_dict()) == bits(optimizer.compression_state_dict())
    assert resumed.compression_state_dict()["averaging"]["due"] == 24


def test_a_foreign_or_damaged_state_changes_nothing():
    model = network()
    optimizer = averaging(model, 4, outer=diloco, compression=ONEBIT)
    train(model, optimizer, range(6))
    good = optimizer.compression_state_dict()
    kept = good["averaging"]
    bad = {
        f"of worker {WORLD}": {**good, "rank": WORLD},
        "none of a ModelAveragingOptimizer": {key: value for key, value in good.items() if key != "averaging"},
        "or damaged": {**good, "averaging": {**kept, "due": None}},
        "has no such parameter": {**good, "averaging": {**kept, "anchors": {**kept["anchors"], "x": torch.zeros(2)}}},
        "different number of parameter groups": {**good, "averaging": {**kept, "outer": {"state": {}, "param_groups": []}}},
    }
    for sentence, state in bad.items():
        with pytest.raises(ValueError, match=sentence):
            optimizer.load_compression_state_dict(state)
        assert bits(optimizer.compression_state_dict()) == bits(good)
    train(model, optimizer, range(6, 8))
    assert_same_everywhere(flat(model))


def test_schedulers_hooks_and_closures():
    model, plain = network(), network()
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = averaging(model, 4, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(optimizer, torch.optim.SGD)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())  # after which PyTorch wraps step() anew
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for m, one in ((model, optimizer), (plain, inner)):
            scheduler = torch.optim.lr_scheduler.StepLR(one, step_size=2, gamma=0.5)
            for step in range(3):
                def closure():
                    one.zero_grad()
                    loss = ((m(x) - x) ** 2).mean()
                    loss.backward()
                    return loss

                x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + RANK))
                assert one.step(closure) > 0
                scheduler.step()
    assert torch.equal(flat(model), flat(plain)) and optimizer.param_groups[0]["lr"] == 0.05
    assert calls == ["after"] * 3


def test_broadcasting_the_optimizer_is_no_step():
    """Horovod takes one to make state where there is none."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if RANK == 0:
        train(model, inner, range(3))
    optimizer = averaging(model, 2, inner)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_same_everywhere(torch.cat([state["momentum_buffer"].reshape(-1) for state in optimizer.state.values()]))
    train(model, optimizer, range(2))
    assert optimizer.compression_stats()["local_steps"] == 2
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("make", [
    lambda params: torch.optim.SGD(params, lr=0.1), lambda params: torch.optim.Adam(params, lr=0.01),
    lambda params: torch.optim.Adam(params, lr=0.01, fused=True)], ids=["SGD", "Adam", "fused"])
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_on_one_worker(make, unscale):
    """Its scaler skips a step there, and the workers average after the same number of batches all the same."""
    model, plain = network(), network()
    optimizer, inner = averaging(model, 3, make(model.parameters())), make(plain.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(6):
        for m, one, scaler in zip((model, plain), (optimizer, inner), scalers):
            one.zero_grad()
            backward(m, step, scaler.scale(torch.tensor(float("inf") if step == 1 and RANK == WORLD - 1 else 1.0)))
            if unscale:
                scaler.unscale_(one)
            scaler.step(one)
            scaler.update()
        assert not hasattr(optimizer, "found_inf")
        if step < 2:
            torch.testing.assert_close(flat(model), flat(plain))
        elif step in (2, 5):
            assert_same_everywhere(flat(model))
            mean = mean_of(flat(plain))
            torch.testing.assert_close(flat(model), mean)
            torch.nn.utils.vector_to_parameters(mean, plain.parameters())
    assert scalers[0].get_scale() == (512 if RANK == WORLD - 1 else 1024)
    assert optimizer.compression_stats()["steps"] == 2


@pytest.mark.parametrize("every, first, others", [(10, 4, 3), (4, 4, 5), (4, 5, 4), (4, 1, 0), (4, 0, 1)])
def test_workers_that_have_taken_other_numbers_of_steps_are_told(every, first, others):
    """Also those that have averaged after their last step, or have taken none, and have nothing to average."""
    model = network()
    optimizer = averaging(model, every)
    train(model, optimizer, range(first if RANK == 0 else others))
    before = flat(model)
    with pytest.raises(ValueError, match=f"worker 1 has taken {others} steps and worker 0 {first}: call the wrapped optimizer"):
        optimizer.average()
    assert torch.equal(flat(model), before)


def test_workers_that_disagree_are_told():
    model = network(seed=RANK)
    optimizer = averaging(model, 1)
    with pytest.raises(ValueError, match="worker 1 started from other parameters than worker 0: broadcast them"):
        train(model, optimizer, range(1))
    model = network()
    optimizer = averaging(model, 1)
    model[0].bias.requires_grad_(RANK == 0)
    with pytest.raises(ValueError, match="worker 1 averages other parameters, optimizer state or compressors than worker 0"):
        train(model, optimizer, range(1))


@pytest.mark.parametrize("compression", ["none", ONEBIT])
def test_a_parameter_that_is_not_finite_changes_nothing(compression):
    model, last = network(), WORLD - 1
    optimizer = averaging(model, 4, outer=diloco, compression=compression)
    train(model, optimizer, range(7))
    before, state = flat(model), optimizer.compression_state_dict()
    if RANK == last:
        with torch.no_grad():
            model[2].weight[3, 4] = float("nan")
    with pytest.raises(FloatingPointError, match=rf"2.weight of worker {last} is not finite: nothing was averaged"):
        optimizer.average()
    if RANK != last:
        assert torch.equal(flat(model), before)
    assert bits(optimizer.compression_state_dict()) == bits(state)
    torch.nn.utils.vector_to_parameters(before, model.parameters())
    train(model, optimizer, range(7, 8))
    assert_same_everywhere(flat(model))


def test_frozen_parameters():
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = averaging(model, 4)
    train(model, optimizer, range(5))
    assert torch.equal(model[0].weight, before)
    sent = optimizer.compression_stats()["wire_bytes"]
    assert sent == round(2 * 4 * (40 * 30 + 30) * (WORLD - 1) / WORLD)
    model[0].requires_grad_(True)
    train(model, optimizer, range(5, 6))
    model[0].requires_grad_(False)  # again, before it was averaged
    train(model, optimizer, range(6, 8))
    assert not torch.equal(model[0].weight, before)
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    """What the outer optimizer does is kept in fp32, so that its steps add up where each is too small for the parameter."""
    model = network().to(dtype)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizer = averaging(model, 1, torch.optim.SGD(model.parameters(), lr=2 ** -5),
                          outer=lambda params: torch.optim.SGD(params, lr=2 ** -4))
    for _ in range(8):
        model[0].weight.grad = torch.full_like(model[0].weight, -1.0 if RANK == 0 else 0.0)
        optimizer.step()
    anchor = optimizer.compression_state_dict()["averaging"]["anchors"]["0.weight"]
    assert anchor.dtype == torch.float32 and (anchor == 1 + 8 * 2 ** -9 / WORLD).all()
    assert model[0].weight.dtype == dtype and torch.equal(model[0].weight, anchor.to(dtype))


def test_process_sets():
    sets = [hvd.add_process_set([r]) for r in range(WORLD)]
    try:
        model, plain = network(), network()
        optimizer = averaging(model, 2, process_set=sets[RANK])
        train(model, optimizer, range(4))
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), range(4))
        assert torch.equal(flat(model), flat(plain)) and optimizer.compression_stats()["wire_bytes"] == 0
        model, plain = network(), network()
        optimizer = averaging(model, 2, process_set=sets[0], outer=lambda params: torch.optim.SGD(params, lr=0.5))
        train(model, optimizer, range(2))
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), range(2))
        expected = (flat(network()) + flat(plain)) / 2 if RANK == 0 else flat(plain)
        torch.testing.assert_close(flat(model), expected)
        hvd.average_parameters(model, process_set=sets[0])
        torch.testing.assert_close(flat(model), expected)
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)


@pytest.mark.parametrize("what", ["module", "optimizer", "pairs", "dict"])
def test_average_parameters(what, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3).bfloat16(), torch.nn.BatchNorm1d(3).double())
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(RANK + 1)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # its entries in another order
    given = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "pairs": model.named_parameters(),
             "dict": model.state_dict()}[what]
    calls, allreduce = [], hvd.mpi_ops.allreduce_async_
    monkeypatch.setattr(hvd.mpi_ops, "allreduce_async_", lambda *a, **how: calls.append(how["name"]) or allreduce(*a, **how))
    hvd.average_parameters(given)
    for tensor in model.parameters():
        assert (tensor == (WORLD + 1) / 2).all()
    statistics = (WORLD + 1) / 2 if what in ("module", "dict") else RANK + 1
    assert (model[2].running_mean == statistics).all() and model[2].num_batches_tracked == RANK + 1
    assert len(calls) == 2  # of fp32 and bf16, and of fp64


def test_the_example_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "schemes" / "model_averaging.md").read_text()
    names = {}
    exec(next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "hvd_quant.torch" in block), names)
    assert_same_everywhere(torch.cat([flat(names["model"]), names["model"][1].running_var]))
    assert names["loss"] < 10 and names["optimizer"].compression_stats()["steps"] == 3
