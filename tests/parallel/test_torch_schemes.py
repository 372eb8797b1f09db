"""Memories and merges, on several workers: the same as a simulation from the formulas, and what else can be told of them."""

import copy
import dataclasses
import functools
import math
import warnings

import numpy as np
import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import get_compressor
from hvd_quant.exchange import hosts
from hvd_quant.ops import generic
from hvd_quant.torch.cargo import Cargo
from tests.parallel import simulation
from tests.parallel.torch_workers import RANK, WORLD, assert_same_everywhere, backward, flat, network, on_all, train, wrap

two = pytest.mark.skipif(WORLD > 2, reason="two workers tell as much")


@functools.cache
def simulated(scheme, workers=WORLD):
    return simulation.train(scheme, workers, 20)


@pytest.mark.parametrize("scheme, op", simulation.runs(WORLD), ids=lambda x: getattr(x, "spec", x))
def test_the_same_as_a_simulation_from_the_formulas(scheme, op, monkeypatch):
    """In what is sent, what optimizers get, and what is kept."""
    encode, payloads = Cargo._encode, []

    def encode_and_note(cargo, vector, state, params, info):
        payload = encode(cargo, vector, state, params, info)
        if info.phase == 0:
            payloads.append((info, payload.numpy().copy(), cargo.compressor))
        return payload

    monkeypatch.setattr(Cargo, "_encode", encode_and_note)
    history, simulations = simulated(scheme)
    factor, op = (1, hvd.Average) if op == "average" else (WORLD, hvd.Sum)
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in simulation.shapes_of(scheme).items()}
    sgd = torch.optim.SGD(parameters.values(), lr=0.1 / factor)
    optimizer = hvd.DistributedOptimizer(sgd, parameters.items(), scheme.spec, op=op)
    for step, (gradients, results, after, sent) in enumerate(history):
        payloads.clear()
        for name, p in parameters.items():
            p.grad = torch.from_numpy(gradients[name][RANK].copy()).view(p.shape)
        optimizer.step()
        decoded = {name: np.zeros(p.numel(), np.float32) for name, p in parameters.items() if sent[name]}
        for info, payload, compressor in payloads:
            compressor.decode_sum(generic, [payload], info, decoded[info.name][slice(*info.range)])
        for name, vector in decoded.items():
            expected = sent[name][RANK]
            np.testing.assert_allclose(vector, expected, rtol=0, atol=0 if scheme.exact else 2e-6 * abs(expected).max(),
                                       err_msg=f"sent of {name} in step {step}")
        for name, p in parameters.items():
            expected, at = results[name][RANK] * np.float32(factor), f"{name} in step {step}"
            scale = abs(expected).max()
            np.testing.assert_allclose(p.grad.view(-1), expected, rtol=0, atol=0 if scheme.exact else 2e-6 * scale, err_msg=at)
            np.testing.assert_allclose(p.detach().view(-1), after[name][RANK], rtol=0, atol=4e-6 * scale, err_msg=at)
    state = optimizer.compression_state_dict()["tensors"]
    for name, one in simulations.items():
        expected = one.states[RANK] | {"owner.residual": one.owned[RANK]}
        for key, value in state[name]["state"].items():
            np.testing.assert_allclose(value, expected[key], rtol=0, atol=0 if scheme.exact else 1e-5, err_msg=f"{key} of {name}")


@pytest.mark.skipif(WORLD != 4, reason="takes two hosts of two workers")
def test_hosts_are_the_workers_of_a_simulation(monkeypatch):
    """Where their own workers are averaged first; each of these has a piece of the state."""
    monkeypatch.setattr("hvd_quant.torch.network._places", lambda: [(rank // 2, rank % 2) for rank in range(WORLD)])
    for scheme in simulation.BY_HOST:
        history, simulations = simulated(scheme, 2)
        parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in simulation.SHAPES.items()}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), scheme.spec)
        for gradients, results, *_ in history:
            for name, p in parameters.items():
                p.grad = torch.from_numpy(gradients[name][RANK // 2] * np.float32(0.5 + RANK % 2)).view(p.shape)
            optimizer.step()
            for name, p in parameters.items():
                expected = results[name][0]
                np.testing.assert_allclose(p.grad.view(-1), expected, rtol=0, atol=2e-6 * abs(expected).max())
        for name, slot in optimizer._reducer.state.slots.items():
            whole = simulations[name].states[RANK // 2] | {"owner.residual": simulations[name].owners()}
            for key, value in slot.state.items():
                place = slice(*(slot.owned if key == "owner.residual" else slot.piece))
                np.testing.assert_allclose(value, whole[key][place], rtol=0, atol=1e-5, err_msg=f"{key} of {name}")
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]):
        hvd.remove_process_set(hosts.process_set_of(ranks))


KEPT = ["topk:ratio=0.1,momentum=0.9", "topk:ratio=0.1,momentum=0.9,nesterov=true,clip_norm=1,weight_decay=0.01,warmup=2",
        "onebit:memory=ef21,warmup=2", "onebit:memory=ef21,eta=0.5,exchange=sra", "topk:ratio=0.1,merge=replace,average_every=4",
        "onebit:merge=error,average_every=100"]
each = pytest.mark.parametrize("spec", KEPT)


def wrapped(spec, min_numel=0, **kwargs):
    model = network()
    compressor = get_compressor(f"{spec},min_numel={min_numel}")
    return model, wrap(model, compressor, torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)


def snapshot(optimizer):
    return {(name, key): value for name, slot in copy.deepcopy(optimizer.compression_state_dict())["tensors"].items()
            for key, value in slot["state"].items()}


@two
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("spec, way", [(spec, way) for spec in KEPT for way in ("compressed", "in a warm-up again", "small")
                                       if way != "small" or get_compressor(spec).has_momentum])  # of others nothing is kept then
def test_a_step_that_is_not_finite_leaves_no_trace(spec, way, steps):
    model, optimizer = wrapped(spec, 10**6 if way == "small" else 0)
    train(model, optimizer, range(steps))
    if way == "in a warm-up again":
        state, model = optimizer.compression_state_dict(), network()
        late = dataclasses.replace(get_compressor(spec), min_numel=0, warmup=99)
        optimizer = wrap(model, late, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.load_compression_state_dict(state)
    before = snapshot(optimizer)
    assert before
    optimizer.zero_grad()
    x = torch.randn(8, 30) * (math.nan if RANK == WORLD - 1 else 1)
    ((model(x) - x) ** 2).mean().backward()
    optimizer.synchronize()
    assert all(torch.isnan(p.grad).all() for p in model.parameters())
    for key, value in snapshot(optimizer).items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0 if "residual" not in key[1] else 1e-5, msg=str(key))


@two
@each
def test_training_resumes_bit_for_bit(spec, tmp_path):
    model, optimizer = wrapped(spec)
    train(model, optimizer, range(7))
    torch.save({"compression": optimizer.compression_state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "own.pt")
    resumed, optimizer_of_resumed = wrapped(spec)
    resumed.load_state_dict(model.state_dict())
    state = torch.load(tmp_path / "own.pt", weights_only=True)
    optimizer_of_resumed.load_state_dict(state["optimizer"])
    optimizer_of_resumed.load_compression_state_dict(state["compression"])
    train(model, optimizer, range(7, 14))
    train(resumed, optimizer_of_resumed, range(7, 14))
    assert torch.equal(flat(model), flat(resumed))


@two
@pytest.mark.parametrize("other, order, steps", [
    ("allgather", "ab", 0), ("sra", "ba", 0), ("sra", "ba", 2), ("sra,warmup=5", "ab", 1), ("sra,warmup=5", "ab", 3)])
def test_what_an_owner_has_kept_reaches_the_estimates(other, order, steps):
    """What all workers have summed up, and what owners have kept of it, is the mean of the estimates: also where a job goes on
    without owners, where others own a range, and after steps that go dense."""
    shapes = {"a": (70, 60), "b": (30, 60)}

    def made(exchange, names):
        named = [(name, torch.nn.Parameter(torch.zeros(shapes[name]))) for name in names]
        spec = f"onebit:block_size=64,memory=ef21,min_numel=0,exchange={exchange}"
        return named, hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named, spec)

    def go_on(named, optimizer, steps):
        for step in steps:
            for name, p in named:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + RANK))
            optimizer.step()
        return optimizer.compression_state_dict()

    def summed_up(kept):
        owned = torch.zeros_like(kept["state"]["estimate"])
        owned[slice(*kept["owned"])] = kept["state"].get("owner.residual", 0)
        return kept["state"]["mean"] + on_all(owned).sum(0), on_all(kept["state"]["estimate"]).mean(0)

    state = go_on(*made("sra", "ab"), range(4))
    assert all(kept["state"]["owner.residual"].any() for kept in state["tensors"].values())
    named, optimizer = made(other, order)
    optimizer.load_compression_state_dict(state)
    for kept in go_on(named, optimizer, range(4, 4 + steps))["tensors"].values():
        torch.testing.assert_close(*summed_up(kept), rtol=0, atol=1e-5)


@two
def test_a_model_averaging_optimizer_is_not_distributed_again():
    model = network()
    averaging = hvd.ModelAveragingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), every=4)
    with pytest.raises(ValueError, match="give DistributedOptimizer the one that it was made from"):
        wrap(model, "none", averaging)


@two
def test_gradients_that_go_dense_have_the_momentum_of_an_optimizer():
    """Small tensors, all tensors in the warm-up, and those of codes that leave nothing out."""
    for spec, min_numel, nesterov, atol in (
            ("topk:momentum=0.9", 10**6, False, 1e-6), ("topk:momentum=0.9,nesterov=true,warmup=9", 0, True, 1e-6),
            ("none:momentum=0.9", 0, False, 1e-6), ("fp16:momentum=0.9,nesterov=true", 0, True, 1e-3),
            ("bf16:momentum=0.9", 0, False, 4e-3)):
        model, optimizer = wrapped(spec, min_numel)
        train(model, optimizer, range(5))
        other = network()
        train(other, wrap(other, "none", torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)), range(5))
        torch.testing.assert_close(flat(model), flat(other), rtol=0, atol=atol)


@two
@pytest.mark.parametrize("spec", [*KEPT, "topk:ratio=0.1,warmup=2", "topk:ratio=0.02,schedule=dgc,schedule_steps=1,warmup=1"])
def test_a_step_is_one_exchange_however_many_backward_passes_it_has(spec):
    (model, optimizer), (other, reference) = wrapped(spec, backward_passes_per_step=2), wrapped(spec)
    for step in range(6):
        optimizer.zero_grad()
        plain = network()
        plain.load_state_dict(other.state_dict())
        for batch in (2 * step, 2 * step + 1):
            backward(model, batch)
            backward(plain, batch)
        optimizer.step()
        for p, own in zip(other.parameters(), plain.parameters()):
            p.grad = own.grad
        reference.step()
    assert torch.equal(flat(model), flat(other))
    stats, expected = optimizer.compression_stats(), reference.compression_stats()
    assert (stats["steps"], stats["wire_bytes"]) == (6, expected["wire_bytes"])


@two
def test_gradients_that_go_dense_have_the_moving_average_of_ef21():
    for spec, min_numel in (("onebit:memory=ef21,eta=0.25", 10**6), ("onebit:memory=ef21,eta=0.25,warmup=9", 0)):
        p = torch.nn.Parameter(torch.zeros(40, 30))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [("w", p)], f"{spec},min_numel={min_numel}")
        average = None
        for step in range(5):
            p.grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(10 * step + RANK))
            mean = on_all(p.grad).mean(0)
            average = mean if average is None else 0.75 * average + 0.25 * mean
            optimizer.step()
            torch.testing.assert_close(p.grad.view(-1), average)


@two
@pytest.mark.parametrize("merge", ["sum", "replace", "error"])
def test_parameters_differ_until_they_are_averaged(merge):
    model, optimizer = wrapped(f"topk:ratio=0.05,merge={merge},average_every=4")

    def same():
        rows = on_all(flat(model))
        return torch.equal(rows, rows[:1].expand_as(rows))

    seen, sent = [], [0]
    for i in range(9):
        train(model, optimizer, [i])
        seen.append(same())
        sent.append(optimizer.compression_stats()["wire_bytes"])
    assert seen == [False, False, False, True] * 2 + [False]
    mean = on_all(flat(model)).mean(0)
    optimizer.average_parameters()
    torch.testing.assert_close(flat(model), mean)
    assert same()
    values, stats = flat(model), optimizer.compression_stats()
    optimizer.average_parameters()  # nothing is left to do
    assert torch.equal(values, flat(model)) and optimizer.compression_stats() == stats
    dense = 8 * values.numel() * (WORLD - 1) // WORLD  # is what an averaging takes
    assert np.diff([*sent, stats["wire_bytes"]]).tolist() == ([sent[1]] * 3 + [sent[1] + dense]) * 2 + [sent[1], dense]
    assert stats["dense_bytes"] == 9 * dense


@two
@pytest.mark.parametrize("merge", ["replace", "error"])
@pytest.mark.parametrize("code", ["topk", "adaptive", "onebit", "threshold:tau=0.5", "randomk:ratio=0.1", "powersgd:rank=2"])
def test_nothing_of_a_gradient_waits(code, merge):
    """In the first step nothing was kept before: what the optimizers get is on average the mean gradient."""
    parameters = {"w": torch.nn.Parameter(torch.zeros(60, 70))}
    spec = f"{code}{',' if ':' in code else ':'}min_numel=0,merge={merge}"
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=1.0), parameters.items(), spec)
    given = torch.randn(60, 70, generator=torch.Generator().manual_seed(RANK))
    parameters["w"].grad = given.clone()
    optimizer.step()
    got = parameters["w"].grad
    assert not torch.equal(got, on_all(given).mean(0).view(60, 70))
    torch.testing.assert_close(on_all(got).mean(0), on_all(given).mean(0), rtol=0, atol=1e-5)
    kept = optimizer.compression_state_dict()["tensors"]["w"]["state"]["residual"]
    assert kept.any() == (merge == "replace")


@two
def test_parameters_that_are_the_same_are_not_sent():
    model, optimizer = wrapped("topk:ratio=0.05")
    train(model, optimizer, range(2))
    assert not optimizer._reducer.state.to_average(all=True)
    assert_same_everywhere(flat(model))


@two
def test_a_second_momentum_is_warned_about():
    for optimizer in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p)):
        model = network()
        with pytest.warns(UserWarning, match="has a momentum of its own, and compression=topk:momentum=0.9 adds another"):
            wrap(model, "topk:momentum=0.9", optimizer(model.parameters()))
    model = network()
    with pytest.warns(UserWarning, match="has a weight decay of its own, and compression=topk:momentum=0.9,weight_decay=0.1 adds"):
        wrap(model, "topk:momentum=0.9,weight_decay=0.1", torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    with pytest.warns(UserWarning, match="momentum of some parameters, and 0.bias, 2.bias train without any"):
        wrap(model, {"*.weight": "topk:momentum=0.9"}, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped("topk:momentum=0.9")


@two
@each
def test_what_horovods_optimizer_has_no_place_for_is_refused(spec):
    with pytest.raises(ValueError, match="Horovod's own optimizers have no place for momentum correction, ef21, merging"):
        get_compressor(spec).bind(network().named_parameters())


@two
def test_messages_shrink_from_stage_to_stage():
    model, optimizer = wrapped("topk:ratio=0.01,schedule=dgc,schedule_steps=2")
    sent = [0]
    for i in range(10):
        train(model, optimizer, [i])
        sent.append(optimizer.compression_stats()["wire_bytes"])
    sizes = np.diff(sent).reshape(5, 2)  # by stage: 25, 6.25, 1.5625 and 1 %, and still 1 %
    assert all(sizes[:, 0] == sizes[:, 1]) and all(np.diff(sizes[:4, 0]) < 0) and all(sizes[4] == sizes[3])
    assert_same_everywhere(flat(model))
