"""Elastic jobs: what ``TorchState`` does with compression state. Here workers stay; tests/integration/test_elastic.py has them come and go."""

import pytest
import torch
from horovod.torch import mpi_ops

import hvd_quant.torch as hvd
from tests.parallel.allocation import allocated
from tests.parallel.torch_workers import RANK, assert_same_everywhere, backward, flat, network, on_all, train, wrap

COUNTED = ["onebit:warmup=2", "topk:schedule=dgc", "topk:merge=sum", "onebit:average_every=9", "onebit:memory=ef21", "randomk",
           "randomk:memory=none"]


@pytest.fixture(autouse=True)
def elastic(monkeypatch):
    monkeypatch.setattr("hvd_quant.torch.network.ELASTIC", True)


def kept(optimizer):
    return {(name, key): value.clone() for name, slot in optimizer._reducer.state.slots.items() for key, value in slot.state.items()}


def counts(optimizer):
    return {slot["step"] for slot in optimizer.compression_state_dict()["tensors"].values()}


def of_a_veteran(spec, **kwargs):
    """A model and its optimizer, which on worker 0 has trained before; the others are newcomers."""
    model = network(seed=RANK)
    optimizer = wrap(model, spec, torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)
    if RANK == 0:
        for slot in optimizer._reducer.state.slots.values():
            slot.step, slot.averaged, slot.kept = 7, 5, True
            for value in slot.state.values():
                value += 0.5
    return model, optimizer


@pytest.mark.parametrize("spec", COUNTED)
def test_what_goes_by_counts_needs_a_state_that_tells_newcomers(spec):
    for model in (network(), torch.nn.Sequential(torch.nn.Linear(30, 100), torch.nn.Linear(100, 30))):  # too small to be compressed, or not
        optimizer = wrap(model, spec)
        with pytest.raises(ValueError, match=f"{spec}: a worker that joins an elastic job .* hvd.elastic.TorchState"):
            backward(model, 0)
        hvd.elastic.TorchState(model=model, optimizer=optimizer).sync()
        train(model, optimizer, range(2))
        wrap(model, "topk:momentum=0.9", torch.optim.SGD(model.parameters(), lr=0.1))


def test_newcomers_take_the_counts_and_keep_nothing():
    model, optimizer = of_a_veteran("topk:ratio=0.1,min_numel=0,warmup=3")
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=20 + RANK)
    state.sync()
    assert_same_everywhere(flat(model))
    assert state.batch == 20 and counts(optimizer) == {7}
    assert all((value == (0.5 if RANK == 0 else 0)).all() for value in kept(optimizer).values())
    train(model, optimizer, range(2))
    assert_same_everywhere(flat(model))
    assert optimizer.compression_stats()["exchanges"].keys() == {"allgather"}  # the warm-up was over


def test_ef21_begins_anew():
    model, optimizer = of_a_veteran("topk:ratio=0.1,min_numel=0,memory=ef21")
    hvd.elastic.TorchState(model=model, optimizer=optimizer).sync()
    assert counts(optimizer) == {0} and not any(value.any() for value in kept(optimizer).values())
    assert {slot["averaged"] for slot in optimizer.compression_state_dict()["tensors"].values()} == {0}  # from which average_every counts
    train(model, optimizer, range(3))
    means = torch.cat([value.reshape(-1) for (_, key), value in kept(optimizer).items() if key == "mean"])
    estimates = torch.cat([value.reshape(-1) for (_, key), value in kept(optimizer).items() if key == "estimate"])
    torch.testing.assert_close(on_all(estimates).mean(0), means)
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("amid", [False, True], ids=["between steps", "amid an exchange"])
@pytest.mark.parametrize("spec", ["topk:ratio=0.1,min_numel=0", "onebit:min_numel=0,exchange=sra", "topk:min_numel=0,momentum=0.9", "none"])
def test_a_failure_goes_back_to_the_last_commit(spec, amid):
    model = network()
    optimizer = wrap(model, spec, torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    state.sync()
    train(model, optimizer, range(3))
    state.batch = 3
    state.save()
    committed = flat(model), kept(optimizer) if spec != "none" else {}
    train(model, optimizer, range(3, 5))
    ahead = flat(model)
    if amid:
        optimizer.zero_grad()
        backward(model, 5)
        if spec == "none":  # Horovod's own optimizer has no way back from amid an exchange
            optimizer.synchronize()
    state.restore()
    assert state.batch == 3 and torch.equal(flat(model), committed[0])
    for key, value in (kept(optimizer) if spec != "none" else {}).items():
        assert torch.equal(value, committed[1][key]), key
    train(model, optimizer, range(3, 5))
    assert torch.equal(flat(model), ahead)  # the same once more, so nothing was lost and nothing is left
    assert not optimizer._handles


def test_fifty_resets_leave_nothing_behind():
    weight, payload, seen = torch.nn.Parameter(torch.zeros(1024, 1024)), 1024 * 1024 // 8, []
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1e-3), [("weight", weight)], "onebit:exchange=sra")
    state = hvd.elastic.TorchState(optimizer=optimizer, batch=0)
    state.sync()
    for reset in range(60):
        optimizer.zero_grad()
        weight.sum().backward()
        state.restore()  # amid an exchange
        state.sync()
        assert not mpi_ops._handle_map and not optimizer._reducer._flying
        if reset in (9, 59):
            seen.append(allocated())
    assert seen[1] - seen[0] < 50 * payload / 4, seen
