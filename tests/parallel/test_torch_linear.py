"""Random-k and PowerSGD among workers: as their formulas say, and what happens where something goes wrong."""

import dataclasses

import numpy as np
import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import get_compressor, registry, wire
from hvd_quant.exchange import hosts
from hvd_quant.torch import exchanges, network
from hvd_quant.torch.reducer import Reducer
from tests.conftest import LINEAR
from tests.linear import MERGING, assert_close, assert_sent, gradient, noting, results, simulation
from tests.parallel.torch_workers import RANK, WORLD, assert_same_everywhere, every

SHAPES = {"w": (24, 5, 7), "v": (40, 30), "b": (33,)}


def reducer_of(compressor, op=hvd.Average, shapes=SHAPES, dtype=torch.float32):
    return Reducer([(name, torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()], lambda name: compressor, op, 1.0,
                   hvd.global_process_set)


def exchange(reducer, step, change=lambda name, grad: None):
    """All gradients of a step, reduced, by name; those of a bucket in one vector."""
    grads = {name: torch.from_numpy(gradient(step, RANK, SHAPES[name])) for name in SHAPES}
    for name, grad in grads.items():
        change(name, grad)
        reducer.ready(name, grad)
    return reducer.finish()


def states(reducer):
    return {name: {key: value.clone() for key, value in slot.state.items()} for name, slot in reducer.state.slots.items()}


def assert_same_states(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=0, rtol=0)


@every(LINEAR | MERGING)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_twenty_steps_are_the_formulas(compressor, op, monkeypatch):
    """In what is added up, what optimizers get, and what is kept."""
    reducer, sent = reducer_of(compressor, op), {}
    noted = noting(type(compressor).rounds, lambda name, vector: sent.setdefault(name, []).append(vector.numpy().copy().ravel()))
    monkeypatch.setattr(type(compressor), "rounds", noted)
    simulated = {name: simulation(compressor, name, shape, WORLD) for name, shape in SHAPES.items()}
    if compressor.name == "powersgd":
        del simulated["b"]
    for step in range(20):
        sent.clear()
        reduced = exchange(reducer, step)
        assert sent.keys() == simulated.keys()
        for name, expected in simulated.items():
            if compressor.merge == "none":
                assert_same_everywhere(reduced[name])
            mean = results(expected, [gradient(step, rank, SHAPES[name]) for rank in range(WORLD)])[RANK]
            assert_sent(expected, RANK, sent[name])
            assert_close(compressor, reduced[name], mean * np.float32(1 if op == hvd.Average else WORLD), exact=WORLD == 2)
    for name, state in states(reducer).items():
        assert state.keys() == (simulated[name].state(RANK).keys() if name in simulated else set())
        for key, value in state.items():
            assert_close(compressor, value, simulated[name].state(RANK)[key])
    stats = reducer.stats.as_dict()
    assert set(stats["exchanges"].get("dense", [])) == SHAPES.keys() - simulated.keys()
    assert set(stats["exchanges"]["allreduce"]) == simulated.keys()
    assert stats["dense_bytes"] == round(20 * 8 * (840 + 1200 + 33) * (WORLD - 1) / WORLD)


@every(LINEAR)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_on_one_worker_makes_the_step_void_on_all(compressor, bad):
    reducer, untouched = reducer_of(compressor), reducer_of(compressor)
    for step in range(2):
        exchange(reducer, step)
        exchange(untouched, step)

    def spoil(name, grad):
        if name == "v" and RANK == WORLD - 1:
            grad[3, 3] = bad

    reduced = exchange(reducer, 2, spoil)
    # Where nothing is kept between steps, there is nothing to be taken back, and tensors are NaN that have such a value.
    kept = any(states(untouched).values())
    assert all(torch.isnan(grad).all() if kept or name == "v" else torch.isfinite(grad).all() for name, grad in reduced.items())
    assert reducer.stats.void_tensors == 1
    torch.testing.assert_close(states(reducer), states(untouched), atol=0, rtol=0)
    if kept:  # all is as if that step had not been
        torch.testing.assert_close(exchange(reducer, 3), exchange(untouched, 3), atol=0, rtol=0)


@every(LINEAR)
@pytest.mark.parametrize("everyone", [True, False], ids=["all", "one"])
def test_an_exchange_that_is_cancelled_leaves_everything_as_it_was(compressor, everyone):
    """Also on one worker alone: it goes through all rounds, so that the others don't wait for it."""
    reducer = reducer_of(compressor)
    exchange(reducer, 0)
    before = states(reducer)
    grads = {name: torch.from_numpy(gradient(1, RANK, SHAPES[name])) for name in SHAPES}
    for name, grad in grads.items():
        reducer.ready(name, grad)
    if everyone or RANK == 0:
        reducer.cancel()
        assert_same_states(states(reducer), before)
        assert np.array_equal(grads["w"], gradient(1, RANK, SHAPES["w"]))
    else:
        reducer.finish()
        assert any(not torch.equal(value, before["w"][key]) for key, value in states(reducer)["w"].items()) == compressor.stateful
    hvd.barrier()  # nothing is in flight
    exchange(reducer, 2)


def same_sentence(error):
    assert len(set(hvd.allgather_object(str(error)))) == 1
    return str(error)


@pytest.mark.parametrize("spec, function", [("randomk:min_numel=0", "strata"), ("powersgd:min_numel=0", "powersgd_left"),
                                            ("powersgd:min_numel=0", "powersgd_right")])
def test_a_worker_that_can_not_go_on_is_named_by_all(monkeypatch, spec, function):
    compressor = get_compressor(spec)
    reducer = reducer_of(compressor)
    exchange(reducer, 0)
    before = states(reducer)

    def fails(*arguments):
        raise MemoryError("no room")

    if RANK == WORLD - 1:
        monkeypatch.setattr(exchanges.ops, function, fails)
    with pytest.raises(wire.PayloadError) as caught:
        exchange(reducer, 1)
    assert same_sentence(caught.value).startswith(f"worker {WORLD - 1} failed to encode its gradient: ")
    assert str(caught.value).endswith(": MemoryError: no room")
    assert_same_states(states(reducer), before)
    monkeypatch.undo()
    exchange(reducer, 2)
    for state in states(reducer).values():
        if "q" in state:
            assert_same_everywhere(state["q"])
    everywhere = [slot.step for slot in reducer.state.slots.values()]
    assert hvd.allgather_object(everywhere) == [everywhere] * WORLD


def test_where_all_fail_each_says_why(monkeypatch):
    monkeypatch.setattr(exchanges.ops, "strata", lambda *arguments: [][RANK])
    with pytest.raises(IndexError):
        exchange(reducer_of(get_compressor("randomk:min_numel=0")), 0)


def test_a_gradient_that_changes_between_the_rounds_is_told_to_all():
    reducer = reducer_of(get_compressor("powersgd:min_numel=0"), shapes={"v": (40, 30)})
    grad = torch.from_numpy(gradient(0, RANK, SHAPES["v"]))
    reducer.ready("v", grad)
    if RANK == 0:
        grad.mul_(2)
    with pytest.raises(wire.PayloadError, match="worker 0 failed to encode its gradient: v: RuntimeError: the gradient of v was modi"):
        reducer.finish()
    assert not any(value.any() for value in states(reducer)["v"].values())


def test_workers_of_other_sizes_are_told_by_horovod():
    reducer = reducer_of(get_compressor(f"randomk:min_numel=0,ratio={0.1 if RANK else 0.2}"))
    with pytest.raises(hvd.mpi_ops.HorovodInternalError if hasattr(hvd, "mpi_ops") else RuntimeError, match="ismatched"):
        exchange(reducer, 0)
    hvd.barrier()


def test_workers_that_draw_different_entries_are_told():
    reducer = reducer_of(get_compressor("randomk:min_numel=0"))
    exchange(reducer, 0)
    if RANK == 0:
        for slot in reducer.state.slots.values():
            slot.step += 1
    with pytest.raises(wire.PayloadError, match="the workers drew different entries"):
        exchange(reducer, 1)


@every(LINEAR)
def test_types_shapes_and_the_warm_up(compressor):
    shapes = {str(shape): shape for shape in [(), (0,), (3, 0), (1,), (9,), (64, 9), (8, 8, 3, 3)]}
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        warm = dataclasses.replace(compressor, warmup=1)
        reducer = reducer_of(warm, shapes=shapes, dtype=dtype)
        for step in range(3):
            given = {name: torch.full(shape, float(RANK + 1), dtype=dtype) for name, shape in shapes.items()}
            for name, grad in given.items():
                reducer.ready(name, grad)
            for name, grad in reducer.finish().items():
                assert grad is given[name] and grad.dtype == dtype
                assert_same_everywhere(grad.float())
                if step == 0:
                    torch.testing.assert_close(grad.float(), torch.full(shapes[name], (WORLD + 1) / 2))
        assert set(reducer.stats.as_dict()["exchanges"]) == {"dense", "allreduce"}


def test_what_is_kept_is_given_back_to_a_dense_exchange(monkeypatch):
    """As where an elastic job goes on with one worker."""
    for compressor in (c for c in LINEAR.values() if c.memory == "error_feedback"):
        reducer = reducer_of(compressor, shapes={"v": (40, 30)})
        grads = [torch.from_numpy(gradient(step, RANK, (40, 30))) for step in range(2)]
        given = sum(on_mean(grad) for grad in grads)
        received = torch.zeros(40, 30)
        for step, grad in enumerate(grads):
            if step == 1:
                monkeypatch.setattr(reducer.plan, "kind", lambda slot, info: "dense")
            reducer.complete([reducer.start("v", grad)])
            received += grad
        torch.testing.assert_close(received, given, atol=2e-5, rtol=0)
        assert not reducer.state.slots["v"].state["residual"].any()


def on_mean(tensor):
    return hvd.allreduce(tensor, name="mean", op=hvd.Average)


def test_hosts_do_not_matter(monkeypatch):
    if WORLD < 4:
        pytest.skip("needs four workers")
    monkeypatch.setattr(network, "_places", lambda: [(rank // 2, rank % 2) for rank in range(WORLD)])
    for spec in ("randomk:min_numel=0", "powersgd:min_numel=0"):
        reducers = [reducer_of(get_compressor(s)) for s in (spec, f"{spec},hierarchical=true")]
        for step in range(2):
            flatly, by_host = (exchange(reducer, step) for reducer in reducers)
            for name in SHAPES:
                assert torch.equal(flatly[name], by_host[name])
        assert_same_states(*map(states, reducers))
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]):
        hvd.remove_process_set(hosts.process_set_of(ranks))


def test_the_norms_are_those_of_residuals():
    reducer = reducer_of(get_compressor("powersgd:min_numel=0"))
    exchange(reducer, 0)
    norm = float(reducer.state.slots["v"].state["residual"].norm())
    assert reducer.state.residual_norms()["v"] == pytest.approx(norm, rel=1e-5) and norm > 0


def test_a_linear_code_of_ones_own_that_miscounts_its_rounds(monkeypatch):
    cls = registry.compressor_class("powersgd")
    monkeypatch.setattr(cls, "allreduces", 1)
    with pytest.raises(TypeError, match="yields more vectors than the compressor's allreduces says"):
        exchange(reducer_of(get_compressor("powersgd:min_numel=0")), 0)
