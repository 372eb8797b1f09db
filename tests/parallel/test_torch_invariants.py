"""The invariants, for each compressor: replicas, nothing lost, nothing bypassed, nothing poisoned, state."""

import dataclasses
import io
import os

import numpy as np
import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import Compression, TensorInfo, exchange, get_compressor
from hvd_quant.ops import generic
from hvd_quant.torch.reducer import Reducer
from tests.conftest import CODECS, ERROR_FEEDBACK, LINEAR
from tests.parallel.torch_workers import (
    RANK,
    WORLD,
    assert_same_everywhere,
    backward,
    every,
    flat,
    network,
    on_all,
    train,
    wrap,
)


def test_the_workers_have_the_kernels_that_this_launch_wants():
    levels = hvd.allgather_object(torch.ops.hvd_quant.simd_level())
    if os.environ["HVD_QUANT_TEST_WORKER"] == "mixed":
        assert levels[1] == "plain"
    else:
        assert len(set(levels)) == 1


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
        reducer.complete([reducer.start(n, g) for n, g in own.items()])
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
        for name, slot in reducer.state.slots.items():
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
    reducer.complete([reducer.start(name, torch.randn(shape, generator=generator))])
    before = reducer.state.slots[name].state["residual"].clone()
    gradient = torch.randn(shape, generator=generator)
    if RANK == 0:
        gradient[[3, 4000]] = float("inf")
    reducer.complete([reducer.start(name, gradient)])
    assert torch.isnan(gradient).all()
    torch.testing.assert_close(reducer.state.slots[name].state["residual"], before, atol=1e-6, rtol=0)
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
    assert min(stats["encode_seconds"], stats["wait_seconds"], stats["decode_seconds"]) >= 0  # nothing to wait for, maybe
    assert all(bucket["flight_seconds"] > 0 for bucket in stats["buckets"].values())


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


@every(CODECS | LINEAR)
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
    assert "residual of 0.weight starts at zero: the checkpoint has shape (3,) of entries (0, 1200), the model needs shape (1200,)" in caplog.text
    assert "compression state of old is dropped: there is no such parameter" in caplog.text
    assert "compression state of 0.bias was kept for onebit and goes on with topk:min_numel=0,ratio=0.1" in caplog.text


@pytest.mark.parametrize("spec", [
    "topk:ratio=0.1,min_numel=0", "onebit:min_numel=0,exchange=sra", "randomk:min_numel=0", "powersgd:min_numel=0",
    "topk:ratio=0.1,min_numel=0,momentum=0.9", "onebit:min_numel=0,memory=ef21"])
def test_a_parameter_that_has_changed_its_shape_starts_anew(spec, caplog):
    """It alone, with a line in the log for each tensor that was kept of it; all others go on where they were."""
    def made(rows):
        parameters = {"before": torch.nn.Parameter(torch.zeros(40, 30)), "changed": torch.nn.Parameter(torch.zeros(rows, 50)),
                      "after": torch.nn.Parameter(torch.zeros(30, 40))}
        return parameters, hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), spec)

    def train_on(parameters, optimizer, steps):
        for step in steps:
            for p in parameters.values():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + RANK))
            optimizer.step()

    parameters, optimizer = made(60)
    train_on(parameters, optimizer, range(3))
    saved = optimizer.compression_state_dict()
    parameters, optimizer = made(61)
    train_on(parameters, optimizer, range(1))  # something to be overwritten
    optimizer.load_compression_state_dict(saved)
    kept = optimizer.compression_state_dict()["tensors"]
    assert kept["changed"]["state"] and not any(value.any() for value in kept["changed"]["state"].values())
    for name in ("before", "after"):
        assert kept[name]["step"] == 3 and kept[name]["state"].keys() == saved["tensors"][name]["state"].keys()
        assert any(value.any() for value in kept[name]["state"].values())
        for key, value in kept[name]["state"].items():
            assert torch.equal(value, saved["tensors"][name]["state"][key]), (name, key)
    lines = [record.getMessage() for record in caplog.records if record.name == "hvd_quant"]
    assert sorted(line.partition(" starts at zero: ")[0] for line in lines) == [
        f"compression state {key} of changed" for key in sorted(kept["changed"]["state"])]
    train_on(parameters, optimizer, range(3, 6))
    for p in parameters.values():
        assert p.any()
        assert_same_everywhere(p)
    assert any(value.any() for value in optimizer.compression_state_dict()["tensors"]["changed"]["state"].values())


@pytest.mark.parametrize("schedule", ["", ",schedule=dgc,schedule_steps=2"])
def test_a_threshold_for_the_whole_model_is_that_of_the_step_before(schedule):
    """Every worker's own, from all its tensors, as in a simulation with the NumPy specification; a checkpoint holds it. It is for
    what the next step keeps."""
    model, compressor = network(), get_compressor(f"topk:ratio=0.05,min_numel=100,scope=model,exchange=allgather{schedule}")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    infos = {n: TensorInfo.whole(n, s, world=WORLD) for n, s in shapes.items()}
    large = [n for n in shapes if exchange.compressible(compressor, infos[n])]
    state = [{n: {k: np.zeros(s, np.float32) for k, s in compressor.state_shapes(infos[n]).items()} for n in large}
             for _ in range(WORLD)]

    def reducer():
        return Reducer(list(model.named_parameters()), lambda name: compressor, hvd.Average, 1.0, hvd.global_process_set)

    reduces, scales = reducer(), dict(zip(shapes, (1.0, 0.3, 0.1, 0.3)))
    for step in range(6):
        gradients = [{n: scales[n] * torch.randn(s, generator=torch.Generator().manual_seed(97 * step + 7 * r))
                      for n, s in shapes.items()} for r in range(WORLD)]
        for n in shapes:
            reduces.ready(n, gradients[RANK][n].clone())
        reduced = reduces.finish()
        payloads = {n: [] for n in large}
        for r in range(WORLD):
            for n in large:
                info, g = dataclasses.replace(infos[n], step=step, rank=r), gradients[r][n].reshape(-1).numpy()
                params = compressor.at(step).measure(generic, g, state[r][n], info)
                payloads[n].append(compressor.at(step).encode(generic, g, state[r][n], params, info))
            compressor.at(step + 1).between_steps(generic, [(infos[n], state[r][n]) for n in large])
        for n in large:
            np.testing.assert_array_equal(reduced[n].reshape(-1), compressor.at(step).decode_mean(generic, payloads[n], infos[n]))
            for key, value in state[RANK][n].items():
                np.testing.assert_array_equal(reduces.state_dict()["tensors"][n]["state"][key], value)
        if step == 2:
            kept, reduces = reduces.state_dict(), reducer()
            reduces.load_state_dict(kept)
    assert len({float(state[RANK][n]["threshold"][0]) for n in large}) == 1
    for n, norm in reduces.state.residual_norms().items():
        assert norm == pytest.approx(np.linalg.norm(state[RANK][n]["residual"]), rel=1e-5)
    with pytest.raises(ValueError, match="merging, averaging and a model's threshold"):
        Compression.topk(scope="model").bind(model.named_parameters())
