"""The PyTorch frontend on several workers: the invariants for each compressor, and everything horovod.torch has."""

import dataclasses
import io
import os
import random
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import horovod.torch as stock
import numpy as np
import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import Compression, Compressor, TensorInfo, exchange, registry, wire
from hvd_quant.ops import generic
from hvd_quant.torch.reducer import Reducer
from tests.conftest import CODECS, ERROR_FEEDBACK

RANK, WORLD = hvd.rank(), hvd.size()
TOPK = "topk:ratio=0.1,min_numel=0"


def every(codecs):
    return pytest.mark.parametrize("compressor", codecs.values(), ids=list(codecs))


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 30))


def wrap(model, compression=TOPK, optimizer=None, **kwargs):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, **kwargs)


def backward(model, step, scale=1.0):
    """The gradients of a step: another batch on each worker, the same in every run."""
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + RANK))
    (((model(x) - x) ** 2).mean() * scale).backward()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_all(tensor):
    """The workers' values of a tensor, one row a worker."""
    return hvd.allgather(tensor.detach().reshape(1, -1).contiguous(), name="on_all")


def assert_same_everywhere(tensor):
    rows = on_all(tensor)
    assert torch.equal(rows, rows[:1].expand_as(rows))


def test_the_workers_have_the_kernels_that_this_launch_wants():
    levels = hvd.allgather_object(torch.ops.hvd_quant.simd_level())
    if os.environ["HVD_QUANT_TEST_WORKER"] == "mixed":
        assert levels[1] == "plain"
    else:
        assert len(set(levels)) == 1


# ------------------------------------------------------------------------------------------------------ the invariants

@every(CODECS)
def test_replicas_are_bit_identical(compressor):
    model = network()
    optimizer = wrap(model, compressor)
    start = flat(model)
    train(model, optimizer, range(6))
    assert_same_everywhere(flat(model))
    assert not torch.equal(start, flat(model))


@every(CODECS)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_the_same_as_a_simulation_of_all_workers(compressor, op):
    """Every worker computes every worker's gradients, and the NumPy specification does the rest."""
    model, shapes = network(), {}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    reducer = Reducer(list(model.named_parameters()), lambda name: compressor, op, 1.0, hvd.global_process_set)
    infos = [{n: TensorInfo.whole(n, s, rank=r, world=WORLD) for n, s in shapes.items()} for r in range(WORLD)]
    dense = {n: exchange.choose(compressor, infos[0][n]) != "allgather" for n in shapes}
    state = [{n: {k: np.zeros(s, np.float32) for k, s in compressor.state_shapes(i).items()} for n, i in by.items()}
             for by in infos]
    given, received = {n: 0 for n in shapes}, {n: 0 for n in shapes}
    for step in range(5):
        gradients = [{n: torch.randn(s, generator=torch.Generator().manual_seed(97 * step + 7 * r)) for n, s in shapes.items()}
                     for r in range(WORLD)]
        own = {n: g.clone() for n, g in gradients[RANK].items()}
        for one in [reducer.start(n, g) for n, g in own.items()]:
            one.finish()
        for name in shapes:
            flats = [g[name].reshape(-1).numpy() for g in gradients]
            if dense[name]:
                expected = np.sum(flats, axis=0)
            else:
                payloads = []
                for r in range(WORLD):
                    info = dataclasses.replace(infos[r][name], step=step)
                    params = compressor.measure(generic, flats[r], state[r][name], info)
                    payloads.append(compressor.encode(generic, flats[r], state[r][name], params, info))
                expected = compressor.decode_sum(generic, payloads, infos[0][name])
            expected = expected / (WORLD if op == hvd.Average else 1)
            tolerance = 2e-3 if compressor.name == "fp16" else 3e-6
            np.testing.assert_allclose(own[name].reshape(-1).numpy(), expected, rtol=tolerance, atol=tolerance)
            given[name] += np.mean(flats, axis=0)
            received[name] += own[name].reshape(-1).numpy() / (1 if op == hvd.Average else WORLD)
    if compressor in ERROR_FEEDBACK.values():  # nothing is lost: what arrived and what is still kept is what was given
        for name, slot in reducer._slots.items():
            kept = on_all(slot.state["residual"]).mean(0).numpy() if slot.state else 0
            np.testing.assert_allclose(received[name] + kept, given[name], atol=1e-5)


@every(CODECS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_nonfinite_gradient_is_seen_everywhere_and_poisons_nothing(compressor, bad):
    model = network()
    optimizer = wrap(model, compressor)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    x = torch.randn(8, 30) * (bad if RANK == WORLD - 1 else 1)
    ((model(x) - x) ** 2).mean().backward()
    optimizer.synchronize()
    for p in model.parameters():
        assert not torch.isfinite(p.grad).all()
        if exchange.choose(compressor, TensorInfo.whole("", p.shape, world=WORLD)) == "allgather":
            assert torch.isnan(p.grad).all()
    after = optimizer.compression_state_dict()
    for name, slot in after["tensors"].items():
        for value in slot["state"].values():
            assert torch.isfinite(value).all(), name
    optimizer.zero_grad()
    backward(model, 4)
    optimizer.step()
    assert torch.isfinite(flat(model)).all()
    assert_same_everywhere(flat(model))


@every(ERROR_FEEDBACK)
def test_a_void_step_returns_the_residual(compressor):
    name, shape = "w", (5000,)
    reducer = Reducer([(name, torch.zeros(shape))], lambda _: compressor, hvd.Average, 1.0, hvd.global_process_set)
    generator = torch.Generator().manual_seed(RANK)
    reducer.start(name, torch.randn(shape, generator=generator)).finish()
    before = reducer._slots[name].state["residual"].clone()
    gradient = torch.randn(shape, generator=generator)
    if RANK == 0:
        gradient[[3, 4000]] = float("inf")
    reducer.start(name, gradient).finish()
    assert torch.isnan(gradient).all()
    torch.testing.assert_close(reducer._slots[name].state["residual"], before, atol=1e-6, rtol=0)
    assert reducer.stats.void_tensors == 1


@every(CODECS)
def test_nothing_is_bypassed_in_silence(compressor):
    model = network()
    optimizer = wrap(model, dataclasses.replace(compressor, min_numel=1000))
    train(model, optimizer, range(2))
    stats = optimizer.compression_stats()
    names = {name for group in stats["exchanges"].values() for name in group}
    if compressor.name != "none":
        assert names == {name for name, _ in model.named_parameters()}
        assert set(stats["exchanges"].pop("dense")) == {"0.bias", "2.bias"}
        assert list(stats["exchanges"]) == ["allreduce" if compressor.linear else "allgather"]
    assert stats["steps"] == 2
    assert stats["dense_bytes"] == 2 * round(2 * 4 * flat(model).numel() * (WORLD - 1) / WORLD)
    assert stats["encode_seconds"] >= 0 and stats["wait_seconds"] > 0 and stats["decode_seconds"] >= 0


@every(CODECS)
def test_the_optimizers_own_state_keeps_its_layout(compressor):
    model, plain = network(), network()
    optimizer = wrap(model, compressor, torch.optim.Adam(model.parameters(), lr=0.01))
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    train(model, optimizer, range(2))
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    backward(plain, 0)
    reference.step()
    state = optimizer.state_dict()
    assert [*state] == [*reference.state_dict()]
    assert {k: [*v] for k, v in state["state"].items()} == {k: [*v] for k, v in reference.state_dict()["state"].items()}
    assert [*state["param_groups"][0]] == [*reference.state_dict()["param_groups"][0]]
    reference.load_state_dict(state)
    file = io.BytesIO()
    torch.save(optimizer.compression_state_dict(), file)
    file.seek(0)
    optimizer.load_compression_state_dict(torch.load(file, weights_only=True))


@every(CODECS)
def test_resuming_from_a_checkpoint_is_bit_for_bit(compressor):
    def fresh():
        model = network()
        return model, wrap(model, compressor, torch.optim.Adam(model.parameters(), lr=0.01))

    model, optimizer = fresh()
    train(model, optimizer, range(4))
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()], saved)
    train(model, optimizer, range(4, 8))
    resumed, other = fresh()
    train(resumed, other, range(2))  # something to be overwritten
    saved.seek(0)
    weights, state, compression = torch.load(saved, weights_only=True)
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    other.load_compression_state_dict(compression)
    train(resumed, other, range(4, 8))
    assert torch.equal(flat(model), flat(resumed))


def test_a_checkpoint_of_another_worker_or_shape(caplog):
    model = network()
    optimizer = wrap(model)
    train(model, optimizer, range(2))
    state = optimizer.compression_state_dict()
    with pytest.raises(ValueError, match=f"this is worker {RANK} of {WORLD}"):
        optimizer.load_compression_state_dict({**state, "rank": RANK + 1})
    with pytest.raises(ValueError, match=f"this is worker {RANK} of {WORLD}"):
        optimizer.load_compression_state_dict({**state, "world": WORLD + 1})
    with pytest.raises(ValueError, match="compression state is damaged: KeyError: 'step'"):
        optimizer.load_compression_state_dict({**state, "tensors": {"0.bias": {"compressor": "topk", "state": {}}}})
    assert optimizer.compression_state_dict()["tensors"]["0.bias"]["step"] == 2  # nothing was changed
    state["tensors"]["old"] = state["tensors"]["0.bias"]
    state["tensors"]["0.bias"] = {**state["tensors"]["0.bias"], "compressor": "onebit"}
    state["tensors"]["0.weight"]["state"]["residual"] = torch.zeros(3)
    optimizer.load_compression_state_dict(state)
    assert "residual of 0.weight starts at zero: the checkpoint has shape (3,), the model needs shape (1200,)" in caplog.text
    assert "compression state of old is dropped: the optimizer has no such parameter" in caplog.text
    assert "compression state of 0.bias was kept for onebit and goes on with topk:min_numel=0,ratio=0.1" in caplog.text


# ------------------------------------------------------------------------------------- the stock optimizer and Horovod

@every(CODECS)
@pytest.mark.parametrize("how", [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 3.0}, {"groups": 2},
                                 {"backward_passes_per_step": 2}], ids=str)
def test_the_stock_optimizer_gives_the_same_numbers(compressor, how):
    ours, theirs = network(), network()
    optimizer = wrap(ours, compressor, **how)
    bound = compressor.bind(theirs.named_parameters())
    other = stock.DistributedOptimizer(torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), theirs.named_parameters(),
                                       compression=bound, **how)
    for step in range(4):
        for model, opt in ((ours, optimizer), (theirs, other)):
            opt.zero_grad()
            for i in range(how.get("backward_passes_per_step", 1)):
                backward(model, 10 * step + i)
            opt.step()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-6, atol=1e-6)
    if how.get("gradient_predivide_factor") is None:
        assert torch.equal(flat(ours), flat(theirs))
    assert_same_everywhere(flat(theirs))


def test_the_stock_optimizer_on_a_process_set():
    if WORLD == 2:
        pytest.skip("of two workers, both are the global process set; the launch with four runs this")
    half = hvd.add_process_set([0, 1])
    try:
        ours, theirs = network(), network()
        optimizer = wrap(ours, TOPK, process_set=half)
        bound = hvd.Compression.topk(ratio=0.1, min_numel=0).bind(theirs.named_parameters(), half) if half.included() else None
        other = stock.DistributedOptimizer(torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9),
                                           theirs.named_parameters(), process_set=half,
                                           **({"compression": bound} if bound else {}))
        for model, opt in ((ours, optimizer), (theirs, other)):
            train(model, opt, range(3))
        if half.included():
            assert torch.equal(flat(ours), flat(theirs))
            rows = hvd.allgather(flat(ours).reshape(1, -1), name="in_set", process_set=half)
            assert torch.equal(rows[0], rows[1])
        state = optimizer.compression_state_dict()
        assert state["rank"] == (RANK if half.included() else None)
        optimizer.load_compression_state_dict(state)
        wrap(network(), "none", process_set=half).compression_state_dict()
        Compression.topk().bind(network().named_parameters(), half).state_dict()
    finally:
        hvd.remove_process_set(half)


def test_an_unbound_compressor_in_the_stock_optimizer_says_so():
    model = network()
    optimizer = stock.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                           compression=Compression.topk(min_numel=0))
    with pytest.raises(ValueError, match=r"topk:min_numel=0 keeps state by parameter.*compressor.bind\(model.named_parameters"):
        backward(model, 0)
    del optimizer


def test_a_bound_compressor_refuses_what_it_does_not_know():
    model = network()
    bound = Compression.onebit(min_numel=0).bind(model.named_parameters())
    with pytest.raises(ValueError, match=r"shape \(5,\) is not the gradient of a parameter"):
        bound.compress(torch.zeros(5))
    with pytest.raises(ValueError, match="op=Adasum can't be combined with onebit"):
        bound.compress(model[0].weight)
    with pytest.raises(ValueError, match="bind takes .name, parameter. pairs"):
        Compression.onebit().bind(model.parameters())
    with pytest.raises(ValueError, match="nothing in it"):
        Compression.onebit().bind([])
    with pytest.raises(ValueError, match="a PyTorch tensor is expected, not a builtins.int"):
        Compression.onebit().bind([("a", 1)])


def test_ready_made_compressors_in_horovods_functions():
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        got = hvd.allreduce(torch.full((5,), 40000.0), name="a", compression=compression)
        assert torch.equal(got, torch.full((5,), 40000.0))
        total = hvd.allreduce(torch.full((5,), 2.0), name="b", compression=compression, op=hvd.Sum)
        assert torch.equal(total, torch.full((5,), 2.0 * WORLD))
        assert torch.equal(hvd.allreduce(torch.tensor([3]), name="c", compression=compression, op=hvd.Sum), torch.tensor([3 * WORLD]))
    with pytest.raises(ValueError, match="bf16 exchanges its payloads by the parameters' names, so Horovod's own functions"):
        hvd.allreduce(torch.zeros(3), name="d", compression=hvd.Compression.bf16)


def test_the_whole_public_api_of_horovod_is_there():
    for name in dir(stock):
        assert hasattr(hvd, name), name
        if name not in ("Compression", "DistributedOptimizer", "optimizer") and not name.startswith("__"):
            assert getattr(hvd, name) is getattr(stock, name), name


def test_submodules_of_horovod_are_found_by_name():
    import hvd_quant.torch.elastic
    from hvd_quant.torch.elastic.sampler import ElasticSampler
    from hvd_quant.torch.mpi_ops import poll

    assert hvd_quant.torch.elastic is stock.elastic
    assert (ElasticSampler, poll) == (stock.elastic.ElasticSampler, stock.poll)


def test_what_the_stock_optimizer_reduces_densely_is_counted():
    model = network()
    bound = Compression.topk(ratio=0.1, min_numel=1000).bind(model.named_parameters())
    optimizer = stock.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), bound)
    backward(model, 0)
    optimizer.step()
    assert bound.stats.as_dict()["exchanges"] == {"dense": ["2.bias", "0.bias"], "allgather": ["2.weight", "0.weight"]}


def test_any_class_in_horovods_style_works():
    for compression in (stock.Compression.fp16, stock.Compression.none):
        ours, theirs = network(), network()
        optimizer = wrap(ours, compression)
        other = stock.DistributedOptimizer(torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9),
                                           theirs.named_parameters(), compression)
        train(ours, optimizer, range(3))
        train(theirs, other, range(3))
        assert torch.equal(flat(ours), flat(theirs))
        stats = optimizer.compression_stats()
        assert stats["steps"] == 3
        assert stats["compression_ratio"] == (2 if compression is stock.Compression.fp16 else 1)


def test_uncompressed_is_horovod_itself():
    for how in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}, {"num_groups": 2}):
        ours, theirs = network(), network()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            optimizer = wrap(ours, "none", **how)
            other = stock.DistributedOptimizer(torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9),
                                               theirs.named_parameters(), **how)
        train(ours, optimizer, range(3))
        train(theirs, other, range(3))
        assert torch.equal(flat(ours), flat(theirs))


def test_horovods_own_functions_and_layers():
    assert torch.equal(hvd.broadcast(torch.tensor([RANK]), 0, name="b"), torch.tensor([0]))
    assert hvd.allgather_object(RANK) == list(range(WORLD))
    received, _ = hvd.alltoall(torch.arange(WORLD), torch.ones(WORLD, dtype=torch.int32), name="a2a")
    assert torch.equal(received, torch.full((WORLD,), RANK))
    model = network()
    optimizer = wrap(model)
    train(model, optimizer, range(2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    residuals = {n: s["state"]["residual"].clone() for n, s in optimizer.compression_state_dict()["tensors"].items()}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for name, slot in optimizer.compression_state_dict()["tensors"].items():
        assert torch.equal(slot["state"]["residual"], residuals[name])  # each worker's own, not worker 0's
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    state.commit()
    train(model, optimizer, range(2, 3))
    state.restore()
    state.sync()
    train(model, optimizer, range(3, 5))
    assert_same_everywhere(flat(model))


# ---------------------------------------------------------------------------------------------- the optimizer's options

def test_gradients_are_accumulated_before_they_are_exchanged():
    once, twice = network(), network()
    a, b = wrap(once), wrap(twice, backward_passes_per_step=2)
    for step in range(3):
        a.zero_grad()
        b.zero_grad()
        backward(twice, 2 * step)
        assert b.compression_stats()["wire_bytes"] == a.compression_stats()["wire_bytes"]
        backward(twice, 2 * step + 1)
        b.step()
        x = [torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * (2 * step + i) + RANK)) for i in (0, 1)]
        sum(((once(y) - y) ** 2).mean() for y in x).backward()
        a.step()
    torch.testing.assert_close(flat(once), flat(twice))
    assert a.compression_stats()["wire_bytes"] == b.compression_stats()["wire_bytes"]


def test_too_many_backward_passes_name_the_parameter():
    model = network()
    optimizer = wrap(model)
    backward(model, 0)
    with pytest.raises(AssertionError, match=r"gradient of [02]\.(weight|bias) was computed more than backward_passes_per_step=1"):
        backward(model, 1)
    with pytest.raises(RuntimeError, match="was modified"):  # by the second backward, whose part was not sent
        optimizer.step()
    train(model, optimizer, range(2, 4))
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("how", [{"groups": 2}, {"num_groups": 2}, {"groups": "list"}], ids=str)
def test_groups(how):
    plain, grouped = network(), network()
    if how.get("groups") == "list":
        how = {"groups": [[grouped[0].weight, grouped[2].bias]]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        a, b = wrap(plain), wrap(grouped, **how)
    train(plain, a, range(4))
    train(grouped, b, range(4))
    assert torch.equal(flat(plain), flat(grouped))


@pytest.mark.parametrize("compression", [TOPK, "none", stock.Compression.fp16], ids=str)
def test_zero_grad(compression):
    model = network()
    optimizer = wrap(model, compression)
    for step, argument in enumerate([(), (True,), (False,)]):
        backward(model, step)
        with pytest.raises(AssertionError, match="zero_grad.. was called after loss.backward"):
            optimizer.zero_grad(*argument)
        optimizer.step()  # the refusal changed nothing: the step works
        optimizer.zero_grad(*argument)
        gone = [p.grad is None for p in model.parameters()]
        assert all(gone) if argument != (False,) else not any(gone)
        assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.compression_stats()["steps"] == 3
    assert_same_everywhere(flat(model))


@every(ERROR_FEEDBACK)
@pytest.mark.parametrize("skip", [True, False])
def test_clipping_between_synchronize_and_step(compressor, skip):
    """Reduced gradients are not sent a second time, also by a step() outside skip_synchronize, about which Horovod warns."""
    model = network()
    optimizer = wrap(model, compressor, torch.optim.SGD(model.parameters(), lr=1.0))
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step, scale=100.0)
        optimizer.synchronize()
        once = [p.grad.clone() for p in model.parameters()], optimizer.compression_stats()
        optimizer.synchronize()
        assert optimizer.compression_stats() == once[1] and all(map(torch.equal, once[0], (p.grad for p in model.parameters())))
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        before = flat(model)
        if skip:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            with pytest.warns(UserWarning, match="skip_synchronize"):
                optimizer.step()
        assert (flat(model) - before).norm() < 0.1001
    assert optimizer.compression_stats()["steps"] == 3
    assert_same_everywhere(flat(model))


@every({spec: c for spec, c in CODECS.items() if c.name != "none"})
@pytest.mark.parametrize("replace", [lambda grad: grad.clone(), lambda grad: None], ids=["clone", "none"])
def test_gradients_replaced_after_backward_are_reduced_all_the_same(compressor, replace):
    model, plain = network(), network()
    optimizer, reference = wrap(model, compressor), wrap(plain, compressor)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        for p in model.parameters():
            p.grad = replace(p.grad)
        optimizer.step()
    train(plain, reference, range(3))
    assert_same_everywhere(flat(model))
    torch.testing.assert_close(flat(model), flat(plain))


@every({spec: c for spec, c in CODECS.items() if c.name != "none"})
def test_gradients_modified_after_backward_are_refused(compressor):
    """Clipping or unscaling without synchronize() would be undone by the reduced gradient."""
    model = network()
    optimizer = wrap(model, compressor)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, 2)
    for p in model.parameters():
        p.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"gradient of 0.weight was modified .* call optimizer.synchronize\(\) first"):
        optimizer.step()
    train(model, optimizer, range(3, 5))
    assert_same_everywhere(flat(model))


def test_the_default_type_does_not_matter():
    for dtype in (torch.float64, torch.bfloat16):
        model = network()
        torch.set_default_dtype(dtype)
        try:
            optimizer = wrap(model)
            bound = Compression.topk(ratio=0.1, min_numel=0).bind(model.named_parameters())
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(v.dtype == torch.float32 for s in bound.state_dict()["tensors"].values() for v in s["state"].values())
        train(model, optimizer, range(2))
        assert_same_everywhere(flat(model))


def test_synchronizing_without_a_step_and_then_without_gradients():
    model = network()
    optimizer = wrap(model)
    backward(model, 0)
    optimizer.synchronize()
    optimizer.zero_grad()
    if RANK == 0:
        backward(model, 1)  # the others have no gradient this time
    optimizer.step()
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("frozen", ["0", "all"])
def test_a_layer_that_is_unfrozen_after_wrapping_is_reduced(frozen):
    model = network()
    (model if frozen == "all" else model[0]).requires_grad_(False)
    optimizer = wrap(model)
    if frozen != "all":
        train(model, optimizer, range(2))
    model.requires_grad_(True)
    train(model, optimizer, range(2, 5))
    assert_same_everywhere(flat(model))
    assert optimizer.compression_stats()["exchanges"]["allgather"].count("0.weight") == 1
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    for step in (5, 6):
        backward(model, step)
        with pytest.raises(ValueError, match=r"parameter of shape \(3,\) was added after the optimizer was wrapped"):
            optimizer.synchronize()
        optimizer.zero_grad()  # nothing is in flight


def test_a_layer_that_is_frozen_after_wrapping_stays_still():
    model = network()
    optimizer = wrap(model, "topk:ratio=0.01,min_numel=0")
    train(model, optimizer, range(3))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    residual = optimizer.compression_state_dict()["tensors"]["0.weight"]["state"]["residual"]
    assert residual.abs().max() > 0
    train(model, optimizer, range(3, 6))
    assert torch.equal(before, model[0].weight)
    assert torch.equal(residual, optimizer.compression_state_dict()["tensors"]["0.weight"]["state"]["residual"])
    model[0].requires_grad_(True)
    train(model, optimizer, range(6, 8))
    assert not torch.equal(before, model[0].weight)
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("spec", ["fp16", "topk:ratio=0.1,min_numel=0", "onebit:min_numel=0"])
def test_the_number_of_workers_may_change(spec, monkeypatch):
    """An elastic job goes on with the same optimizer."""
    everyone = hvd.global_process_set
    monkeypatch.setattr(everyone, "size", lambda: 1, raising=False)
    monkeypatch.setattr(everyone, "rank", lambda: 0, raising=False)
    reducer = Reducer([("w", torch.zeros(5000))], registry.selector(spec), hvd.Average, 1.0, everyone)
    monkeypatch.undo()
    gradient = torch.full((5000,), float(RANK + 1))
    reducer.start("w", gradient).finish()
    sent = gradient != 0
    assert sent.any()
    torch.testing.assert_close(gradient[sent], torch.full_like(gradient[sent], (WORLD + 1) / 2))


@every(CODECS)
def test_gradients_that_are_missing_on_some_workers_count_as_zero(compressor):
    """Set order differs between processes, so it must not decide which collective meets which."""
    torch.manual_seed(0)
    branches = torch.nn.ModuleDict({f"b{i}": torch.nn.Linear(20 + i, 20) for i in range(12)})
    optimizer = wrap(branches, compressor)
    expected = {n: torch.zeros_like(p) for n, p in branches.named_parameters()}
    for step in range(3):
        optimizer.zero_grad()
        used = [random.Random(100 * step + r).sample(range(12), 5) for r in range(WORLD)]
        sum(branches[f"b{i}"](torch.ones(1, 20 + i)).sum() for i in used[RANK]).backward()
        optimizer.synchronize()
        for i in range(12):
            share = sum(i in u for u in used) / WORLD
            expected[f"b{i}.bias"] += share
            if compressor.name in ("none", "fp16", "bf16"):
                torch.testing.assert_close(branches[f"b{i}"].weight.grad, torch.full((20, 20 + i), share), rtol=0.01, atol=0)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_same_everywhere(flat(branches))


def test_workers_in_opposite_branches():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"x": torch.nn.Linear(30, 30), "y": torch.nn.Linear(30, 30)})
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad()
        model["x" if (RANK + step) % 2 else "y"](torch.ones(2, 30)).sum().backward()
        optimizer.step()
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_sparse_gradients(as_dense, op):
    table = torch.nn.Embedding(50, 100, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(),
                                         "topk:ratio=0.1,min_numel=0", op=op, sparse_as_dense=as_dense)
    used = [[0, 0, 2], [2, 5], [49], []]  # duplicates, overlap, and a worker with no row
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor(used[RANK % 4], dtype=torch.int64)).sum().backward()
            optimizer.step()
    expected = torch.zeros(50)
    for r in range(WORLD):
        for row in used[r % 4]:
            expected[row] -= 2 / (WORLD if op == hvd.Average else 1)
    torch.testing.assert_close(table.weight.detach(), expected[:, None].expand(50, 100))
    sentence = "the gradient of weight is sparse and is exchanged uncompressed"
    assert sum(sentence in str(w.message) for w in warned) == (0 if as_dense else 1)
    assert optimizer.compression_stats()["exchanges"] == {"allgather" if as_dense else "sparse": ["weight"]}


def test_sparse_gradients_of_an_uncompressed_optimizer_are_counted():
    table = torch.nn.Embedding(50, 10, sparse=True)
    optimizer = wrap(table, "none", torch.optim.SGD(table.parameters(), lr=1.0))
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    stats = optimizer.compression_stats()
    assert stats["wire_bytes"] == (2 * 8 + 20 * 4) * (WORLD - 1) and stats["exchanges"] == {"sparse": ["weight"]}


def test_a_sparse_gradient_missing_once():
    table = torch.nn.Embedding(50, 10, sparse=True)
    optimizer = wrap(table, TOPK, torch.optim.SGD(table.parameters(), lr=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            optimizer.zero_grad()
            if step != 1 or RANK != 0:
                table(torch.tensor([RANK])).sum().backward()
            optimizer.step()
    assert_same_everywhere(table.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every(CODECS)
def test_other_types_come_back_in_their_own(compressor, dtype):
    if compressor.name == "none" and dtype == torch.bfloat16:
        pytest.skip("uncompressed is Horovod itself, which can't reduce bf16")
    model = network().to(dtype)
    optimizer = wrap(model, compressor)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(step * 10 + RANK)).to(dtype)
        ((model(x) - x) ** 2).mean().backward()
        optimizer.step()
        assert all(p.grad.dtype == dtype for p in model.parameters())
    assert_same_everywhere(flat(model).float())
    assert torch.isfinite(flat(model)).all()


def test_small_bf16_tensors_go_dense_too():
    weight = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], "topk")
    (weight * (RANK + 1)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach().float(), torch.full((10,), -(WORLD + 1) / 2))


@pytest.mark.parametrize("spec", ["topk", "fp16", "onebit:min_numel=0"])
def test_fp16_gradients_of_40000_average_to_40000(spec):
    weight = torch.nn.Parameter(torch.zeros(64, dtype=torch.float16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], spec)
    weight.grad = torch.full((64,), 40000.0, dtype=torch.float16)
    optimizer.synchronize()
    assert torch.equal(weight.grad, torch.full((64,), 40000.0, dtype=torch.float16))


def test_types_that_can_not_be_reduced():
    weight = torch.nn.Parameter(torch.zeros(5000, dtype=torch.complex64))
    with pytest.raises(TypeError, match="parameter w is torch.complex64; gradients of torch.float32, .* can be reduced"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], "topk")


def test_memory_layouts():
    """channels_last on some workers, transposed and expanded gradients: positions mean the same entries everywhere."""
    torch.manual_seed(0)
    reference = torch.randn(16, 8, 3, 3)
    layouts = [reference.clone(), reference.clone().to(memory_format=torch.channels_last),
               reference.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)]
    gradient = layouts[RANK % 3]
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], "topk:ratio=0.5,min_numel=0")
    weight.grad = gradient
    strides = gradient.stride()
    optimizer.step()
    assert weight.grad.stride() == strides
    kept = weight.grad.contiguous() != 0
    assert 0.4 < kept.float().mean() <= 0.5
    torch.testing.assert_close(weight.grad[kept], reference[kept])
    rows = on_all(weight.detach().contiguous())
    assert torch.equal(rows, rows[:1].expand_as(rows))

    for compression in ("topk:ratio=1.0,min_numel=0,exchange=allgather", "onebit:min_numel=0"):
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression)
        weight.grad = torch.full((1, 1), float(RANK + 1)).expand(64, 64)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((64, 64), -(WORLD + 1) / 2))


def test_decoding_writes_into_the_gradients_own_memory():
    model = network()
    optimizer = wrap(model)
    backward(model, 0)
    where = [p.grad.data_ptr() for p in model.parameters()]
    optimizer.step()
    assert where == [p.grad.data_ptr() for p in model.parameters()]


def test_warm_up_is_dense_and_then_compressed():
    model = network()
    optimizer = wrap(model, TOPK + ",warmup=2")
    seen = []
    for step in range(4):
        train(model, optimizer, [step])
        seen.append("allgather" in optimizer.compression_stats()["exchanges"])
    assert seen == [False, False, True, True]
    assert_same_everywhere(flat(model))


def test_patterns_of_names():
    model = network()
    optimizer = wrap(model, {"*.bias": "none", "2.*": "fp16", "*": "onebit:min_numel=0"})
    train(model, optimizer, range(2))
    assert optimizer.compression_stats()["exchanges"] == {"dense": ["2.bias", "0.bias"], "allreduce": ["2.weight"],
                                                          "allgather": ["0.weight"]}
    assert_same_everywhere(flat(model))
    with pytest.warns(UserWarning, match=r"the pattern 'embeding.\*' in compression= matches no parameter; the names are 0.bias, "):
        wrap(network(), {"embeding.*": "topk", "*": "onebit"})


def optimizers():
    return sorted(name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)
                  and issubclass(getattr(torch.optim, name), torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS"))


@pytest.mark.parametrize("name", optimizers())
def test_every_optimizer_of_torch(name):
    torch.manual_seed(0)
    model = torch.nn.Embedding(30, 30, sparse=True) if name == "SparseAdam" else torch.nn.Linear(30, 30, bias=name != "Muon")
    optimizer = wrap(model, TOPK, getattr(torch.optim, name)(model.parameters(), lr=0.01))
    before = flat(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randint(30, (8,)) if name == "SparseAdam" else torch.randn(8, 30)
            (model(x) ** 2).mean().backward()
            optimizer.step()
    assert not torch.equal(before, flat(model))
    assert_same_everywhere(flat(model))


def test_what_can_not_work_is_refused():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for arguments, error, sentence in [
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, ValueError, "LBFGS can't be distributed: its closure"),
        ({"op": hvd.Adasum}, ValueError, "op=Adasum can't be combined with compression=topk"),
        ({"op": hvd.Adasum, "compression": {"*": "fp16"}}, ValueError, "op=Adasum can't be combined"),
        ({"op": hvd.Min}, ValueError, "give Average or Sum"),
        ({"compression": Compression.onebit().bind(named)}, TypeError, "pass the compressor itself: compression='onebit'"),
        ({"compression": 3}, TypeError, "compression=3 is not accepted: give a compressor such as"),
        ({"compression": None}, TypeError, "compression=None is not accepted"),
        ({"compression": "tpok"}, ValueError, "did you mean 'topk'"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "gradient_predivide_factor not supported"),
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step must be > 0"),
        ({"named_parameters": named[:-1]}, ValueError, "were not named"),
        ({"named_parameters": [("a", p) for _, p in named]}, ValueError, "must be unique"),
        ({"groups": -1}, ValueError, "groups should be"),
    ]:
        with pytest.raises(error) as caught:
            hvd.DistributedOptimizer(**{"optimizer": sgd, "named_parameters": named, "compression": "topk", **arguments})
        assert sentence in str(caught.value)


def test_adasum_with_uncompressed_and_fp16_gradients():
    if not hvd.mpi_enabled():
        pytest.skip("Horovod has Adasum on MPI and NCCL only")
    for compression in ("none", "fp16"):
        model = network()
        optimizer = wrap(model, compression, op=hvd.Adasum)
        train(model, optimizer, range(2))
        assert_same_everywhere(flat(model))
        assert optimizer.compression_stats()["steps"] == 2


# ------------------------------------------------------------------------------------- compressors of one's own, faults

@pytest.fixture
def own(monkeypatch):
    """The README's compressor in array operations."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.S)
    namespace = {"__name__": "readme"}
    exec(next(block for block in blocks if "class Sign(Compressor)" in block), namespace)
    return namespace["Sign"]


def test_a_compressor_of_ones_own(own):
    model = network()
    optimizer = wrap(model, "sign:min_numel=0")
    train(model, optimizer, range(5))
    assert_same_everywhere(flat(model))
    assert optimizer.compression_stats()["exchanges"] == {"allgather": [n for n, _ in model.named_parameters()][::-1]}
    resumed = optimizer.compression_state_dict()
    assert all(torch.isfinite(s["state"]["residual"]).all() and s["step"] == 5 for s in resumed["tensors"].values())
    optimizer.zero_grad()
    ((model(torch.ones(2, 30) * (float("nan") if RANK == 0 else 1))) ** 2).mean().backward()
    optimizer.synchronize()
    assert all(torch.isnan(p.grad).all() for p in model.parameters())
    for name, slot in optimizer.compression_state_dict()["tensors"].items():
        torch.testing.assert_close(slot["state"]["residual"], resumed["tensors"][name]["state"]["residual"], atol=1e-6, rtol=0)


def test_a_worker_that_can_not_encode_is_named_by_all(own, monkeypatch):
    encode = own.encode

    def fails(self, ops, grad, state, params, info):
        if info.rank == WORLD - 1 and info.step == 1:
            raise MemoryError("no room for the bits")
        return encode(self, ops, grad, state, params, info)

    monkeypatch.setattr(own, "encode", fails)
    model = network()
    optimizer = wrap(model, own(min_numel=0))
    train(model, optimizer, [0])
    optimizer.zero_grad()
    backward(model, 1)
    with pytest.raises(wire.PayloadError) as caught:
        optimizer.step()
    sentence = str(caught.value)
    assert sentence.endswith("MemoryError: no room for the bits")
    assert f"worker {WORLD - 1} failed to encode its gradient" in sentence
    assert len(set(hvd.allgather_object(sentence))) == 1
    optimizer.zero_grad()  # nothing is in flight: training could go on
    backward(model, 2)
    optimizer.step()
    assert_same_everywhere(flat(model))


def test_after_a_failure_the_other_tensors_are_as_before(own, monkeypatch):
    encode = own.encode

    def fails(self, ops, grad, state, params, info):
        if info.rank == 0 and info.step == 2 and info.name == "0.weight":
            raise OSError("no")
        return encode(self, ops, grad, state, params, info)

    monkeypatch.setattr(own, "encode", fails)
    model = network()
    optimizer = wrap(model, own(min_numel=0))
    train(model, optimizer, range(2))
    before = optimizer.compression_state_dict()["tensors"]
    optimizer.zero_grad()
    backward(model, 2)
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(wire.PayloadError):
        optimizer.step()
    for (name, p), gradient in zip(model.named_parameters(), gradients):
        after = optimizer.compression_state_dict()["tensors"][name]["state"]["residual"]
        torch.testing.assert_close(after, before[name]["state"]["residual"], atol=1e-6, rtol=0)
        assert torch.equal(p.grad, gradient)


def test_loading_a_checkpoint_between_backward_and_step():
    model = network()
    optimizer = wrap(model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    backward(model, 2)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    train(model, optimizer, range(3, 5))
    assert_same_everywhere(flat(model))


def test_damaged_bytes_raise_the_same_sentence_everywhere(monkeypatch):
    for damage in ("flip", "truncate", "extend", "random"):
        model = network()
        optimizer = wrap(model, "onebit:min_numel=0")
        encode = registry.compressor_class("onebit").encode

        def bad(self, ops, grad, state, params, info):
            payload = encode(self, ops, grad, state, params, info)
            if RANK == 0 and info.name == "2.weight":
                if damage == "flip":
                    payload[40] ^= 4
                elif damage == "truncate":
                    payload = payload[:-8]
                elif damage == "extend":
                    payload = torch.cat([payload, payload[:8]])
                else:
                    payload = torch.randint(256, payload.shape, dtype=torch.uint8)
            return payload

        monkeypatch.setattr(registry.compressor_class("onebit"), "encode", bad)
        backward(model, 0)
        with pytest.raises(wire.PayloadError, match="2.weight: ") as caught:
            optimizer.step()
        monkeypatch.undo()
        assert len(set(hvd.allgather_object(str(caught.value)))) == 1


def test_a_compressor_that_returns_no_payload_is_told():
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Compressor):
        name = "wrong"

        def payload_bytes(self, info):
            return 40

        def encode(self, ops, grad, state, params, info):
            return grad

    model = network()
    optimizer = wrap(model, Wrong(min_numel=0))
    backward(model, 0)
    with pytest.raises(wire.PayloadError, match="TypeError: wrong.encode returned a 1-D torch.float32 tensor, expected a 1-D uint8"):
        optimizer.step()
