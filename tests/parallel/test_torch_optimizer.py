"""The options and the life cycle of DistributedOptimizer: accumulation, groups, sparse, types, layouts, frozen layers."""

import gc
import random
import warnings
import weakref

import horovod.torch as stock
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hvd_quant.torch as hvd
from hvd_quant import Compression, exchange, registry
from hvd_quant.torch.network import start
from hvd_quant.torch.reducer import Reducer
from tests.conftest import CODECS, ERROR_FEEDBACK, LINEAR
from tests.parallel.torch_workers import (
    RANK,
    TOPK,
    WORLD,
    assert_same_everywhere,
    backward,
    every,
    flat,
    network,
    train,
    wrap,
)


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


ACCUMULATED = {"plain": "", "momentum": ",momentum=0.9", "nesterov": ",momentum=0.9,nesterov=true,clip_norm=1,weight_decay=0.1",
               "warmup": ",warmup=2", "dgc": ",momentum=0.9,warmup=1,schedule=dgc,schedule_steps=2", "ef21": ",memory=ef21",
               "merge": ",merge=replace,average_every=2"}


def test_several_backward_passes_are_one_step_of_every_scheme():
    """Momenta, warm-ups, stages and averagings go by exchanges, and see the sum of the gradients."""
    compression = {name: f"topk:ratio=0.01,min_numel=0{knobs}" for name, knobs in ACCUMULATED.items()}

    def made(passes):
        parameters = {name: torch.nn.Parameter(torch.ones(30, 41)) for name in compression}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        return parameters, hvd.DistributedOptimizer(optimizer, parameters.items(), compression, backward_passes_per_step=passes)

    (once, a), (several, b) = made(1), made(3)
    for step in range(7):
        gradients = torch.randn(3, 30, 41, generator=torch.Generator().manual_seed(10 * step + RANK))
        for parameters, optimizer, parts in ((once, a, [(gradients[0] + gradients[1]) + gradients[2]]), (several, b, gradients)):
            optimizer.zero_grad()
            for part in parts:
                sum((p * part).sum() for p in parameters.values()).backward()
            optimizer.step()
        for name in compression:
            assert torch.equal(once[name], several[name]), name
        assert a.compression_stats()["wire_bytes"] == b.compression_stats()["wire_bytes"]
    kept = [optimizer.compression_state_dict()["tensors"] for optimizer in (a, b)]
    for name in compression:
        assert kept[0][name]["step"] == kept[1][name]["step"] == 7
        for key, value in kept[0][name]["state"].items():
            assert torch.equal(value, kept[1][name]["state"][key]), (name, key)


@pytest.fixture
def started(monkeypatch):
    """The collectives that gradients travel in: by their names, how many entries each had."""
    sizes = {}

    def noted(kind, tensor, name, *arguments, **how):
        sizes.setdefault(name, []).append(tensor.numel())
        return start(kind, tensor, name, *arguments, **how)

    monkeypatch.setattr("hvd_quant.torch.network.start", noted)
    return sizes


@pytest.mark.parametrize("compression", [
    TOPK, TOPK + ",momentum=0.9", "onebit:min_numel=0,exchange=sra", "onebit:min_numel=0,memory=ef21", "powersgd:min_numel=0",
    "randomk:min_numel=0", "fp16", "none"])
def test_a_window_that_is_cut_short_is_a_step(compression, started):
    """As at the end of an epoch: what there is of it is exchanged once, also where workers have had other numbers of passes."""
    model, twin, plain = network(), network(), network()
    optimizer = wrap(model, compression, torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=3)
    reference = wrap(twin, compression, torch.optim.SGD(twin.parameters(), lr=0.1))
    for step, passes in enumerate([3, 2, 3, 1 + RANK, 3]):
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        plain.zero_grad()
        started.clear()
        for number in range(passes):
            assert not started and optimizer.compression_stats()["steps"] == step
            backward(model, 10 * step + number)
            backward(plain, 10 * step + number)
        optimizer.step()
        of_window = sorted(started.values())
        started.clear()
        for p, own in zip(twin.parameters(), plain.parameters()):
            p.grad = own.grad.clone()
        reference.step()
        assert of_window == sorted(started.values())
        assert torch.equal(flat(model), flat(twin))
    assert_same_everywhere(flat(model))
    stats, expected = optimizer.compression_stats(), reference.compression_stats()
    assert (stats["steps"], stats["wire_bytes"], stats["exchanges"]) == (5, expected["wire_bytes"], expected["exchanges"])


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
    """One that is refused changes nothing: all is as in a twin that wasn't asked."""
    model, twin = network(), network()
    optimizer, left_alone = wrap(model, compression), wrap(twin, compression)
    train(twin, left_alone, range(3))
    for step, argument in enumerate([(), (True,), (False,)]):
        backward(model, step)
        with pytest.raises(AssertionError, match="zero_grad.. was called after loss.backward"):
            optimizer.zero_grad(*argument)
        optimizer.step()
        optimizer.zero_grad(*argument)
        gone = [p.grad is None for p in model.parameters()]
        assert all(gone) if argument != (False,) else not any(gone)
        assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.compression_stats()["steps"] == 3
    assert torch.equal(flat(model), flat(twin))
    kept, expected = (one.compression_state_dict()["tensors"] for one in (optimizer, left_alone))
    assert kept.keys() == expected.keys()
    for name, slot in expected.items():
        assert kept[name]["step"] == slot["step"] == 3
        assert all(torch.equal(value, kept[name]["state"][key]) for key, value in slot["state"].items())


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
    with pytest.raises(RuntimeError, match=r"gradient of [02]\.(weight|bias) was modified .* call optimizer.synchronize\(\) first"):
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
    reducer.complete([reducer.start("w", gradient)])
    sent = gradient != 0
    assert sent.any()
    torch.testing.assert_close(gradient[sent], torch.full_like(gradient[sent], (WORLD + 1) / 2))


MISSING = CODECS | LINEAR | {spec: spec for spec in (
    TOPK + ",momentum=0.9", TOPK + ",momentum=0.9,nesterov=true,weight_decay=0.01,exchange=sra",
    TOPK + ",memory=ef21,eta=0.5,exchange=sra", "onebit:min_numel=0,memory=ef21")}


@every(MISSING)
def test_gradients_that_are_missing_on_some_workers_count_as_zero(compressor):
    """Set order differs between processes, so it must not decide which collective meets which."""
    def trained(zeros):
        torch.manual_seed(0)
        branches = torch.nn.ModuleDict({f"b{i}": torch.nn.Linear(20 + i, 20) for i in range(12)})
        optimizer = wrap(branches, compressor, torch.optim.SGD(branches.parameters(), lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            used = random.Random(100 * step + RANK).sample(range(12), 5)
            outputs = {i: branches[f"b{i}"](torch.ones(1, 20 + i)).sum() for i in (range(12) if zeros else used)}
            sum(output * (i in used) for i, output in outputs.items()).backward()
            optimizer.step()
        return flat(branches)

    missing = trained(zeros=False)
    assert_same_everywhere(missing)
    assert torch.equal(missing, trained(zeros=True))


@pytest.mark.parametrize("spec", ["onebit:min_numel=0", "topk:ratio=0.1,min_numel=0,exchange=sra", {"*": "fp16", "0.*": "none"}], ids=str)
def test_optimizers_of_the_same_names(spec):
    """A generator and a discriminator of one class, whose gradients come from one backward pass."""
    models = [network(seed) for seed in (0, 1)]
    optimizers = [wrap(model, spec) for model in models]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + RANK))
        sum(((model(x) - x) ** 2).mean() for model in models).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    for seed, model in enumerate(models):
        alone = network(seed)
        train(alone, wrap(alone, spec), range(3))
        assert torch.equal(flat(model), flat(alone))


def test_an_optimizer_for_each_layer():
    model, whole = network(), network()
    layers = [wrap(layer, "onebit:min_numel=0", torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in (model[0], model[2])]
    for step in range(3):
        for optimizer in layers:
            optimizer.zero_grad()
        backward(model, step)
        for optimizer in layers:
            optimizer.step()
    train(whole, wrap(whole, "onebit:min_numel=0", torch.optim.SGD(whole.parameters(), lr=0.1)), range(3))
    assert torch.equal(flat(model), flat(whole))


def test_a_tied_parameter_in_groups_without_names():
    def trained(**names):
        model = torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(2)])
        for i, p in enumerate(model.parameters()):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(i))
        model[1].weight = model[0].weight
        groups = [{"params": [model[0].weight]}, {"params": [model[0].bias, model[1].bias], "lr": 0.05}]
        named = model.named_parameters() if names else None
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), named, "onebit:min_numel=0")
        train(model, optimizer, range(3))
        stats = optimizer.compression_stats()
        return flat(model), stats["wire_bytes"], sum(map(len, stats["exchanges"].values()))

    (named, *counts), (nameless, *same) = trained(names=True), trained()
    assert torch.equal(named, nameless) and counts == same and counts[1] == 3


def test_nothing_is_left_of_an_optimizer_that_is_gone():
    """The hooks of one wrapped earlier would exchange gradients beside the next one's, until garbage is collected."""
    model, sent = network(), []
    gc.disable()
    try:
        for _ in range(4):
            optimizer = wrap(model)
            train(model, optimizer, range(2))
            sent.append(optimizer.compression_stats()["wire_bytes"])
            gone = weakref.ref(optimizer)
            del optimizer
            assert gone() is None
    finally:
        gc.enable()
    assert len(set(sent)) == 1 and sent[0]
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    plain, model = network(), network()
    train(plain, wrap(plain), range(3))
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + RANK)).requires_grad_()
        ((checkpoint(model, x, use_reentrant=use_reentrant) - x) ** 2).mean().backward()
        optimizer.step()
    assert torch.equal(flat(model), flat(plain))


def test_what_a_collective_moves_stays_within_the_counts_of_mpi(monkeypatch):
    model = network()
    optimizer = wrap(model, "onebit:min_numel=0,exchange=allgather", groups=[list(model.parameters())])
    train(model, optimizer, [0])
    (together,) = optimizer.compression_stats()["buckets"].values()
    limit = together["wire_bytes"] // (WORLD - 1) * WORLD * 2 // 3
    monkeypatch.setattr(exchange, "MPI_COUNT_LIMIT", limit)
    optimizer = wrap(model, "onebit:min_numel=0,exchange=allgather", groups=[list(model.parameters())])
    train(model, optimizer, [0])
    parts = [bucket["wire_bytes"] // (WORLD - 1) * WORLD for bucket in optimizer.compression_stats()["buckets"].values()]
    assert len(parts) == 2 and max(parts) < limit


@pytest.mark.parametrize("way", ["allgather", "sra", "auto"])
def test_a_payload_beyond_the_counts_of_mpi_is_refused_by_all(way, started, monkeypatch):
    monkeypatch.setattr("hvd_quant.torch.network.mpi_enabled", lambda: True)
    monkeypatch.setattr(exchange, "MPI_COUNT_LIMIT", 150)  # less than one payload of a weight, more than two of a bias
    model = network()
    optimizer = wrap(model, f"onebit:min_numel=0,exchange={way}")
    with pytest.raises(ValueError, match=rf"[02]\.weight: payloads of \d+ bytes from {WORLD} workers are more than the 2\^31 "
                       r"bytes that an \w+ over MPI can move; use Gloo, or choose a smaller payload for it") as caught:
        backward(model, 0)
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1
    assert not started and not optimizer.compression_stats()["wire_bytes"]


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
                                         "natural:min_numel=0,exchange=allgather", op=op, sparse_as_dense=as_dense)
    used = [[0, 0, 2], [2, 5], [49], []]  # duplicates, overlap, and a worker with no row
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor(used[RANK % 4], dtype=torch.int64)).sum().backward()
            optimizer.step()
    expected = torch.zeros(50)
    for r in range(WORLD):
        for row in used[r % 4]:
            expected[row] -= 2 / (WORLD if op == hvd.Average else 1)
    torch.testing.assert_close(table.weight.detach(), expected[:, None].expand(50, 100))
    assert optimizer.compression_stats()["exchanges"] == {"allgather" if as_dense else "sparse": ["weight"]}


def test_sparse_gradients_of_an_uncompressed_optimizer_are_counted():
    table = torch.nn.Embedding(50, 10, sparse=True)
    optimizer = wrap(table, "none", torch.optim.SGD(table.parameters(), lr=1.0))
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    stats = optimizer.compression_stats()
    assert stats["wire_bytes"] == (2 * 8 + 20 * 4) * (WORLD - 1) and stats["exchanges"] == {"sparse": ["weight"]}


def test_momentum_goes_on_in_rows_that_a_sparse_gradient_lacks():
    table = torch.nn.Embedding(50, 10, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = wrap(table, "none:momentum=0.5", torch.optim.SGD(table.parameters(), lr=1.0))
    for row in (1, 2):
        optimizer.zero_grad()
        table(torch.tensor([row])).sum().backward()
        optimizer.step()
    assert table.weight[1:4, 0].tolist() == [-1.5, -1.0, 0.0]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_sparse_gradient_missing_once(missing):
    """Also before this worker can know that it is sparse on others."""
    table = torch.nn.Embedding(50, 10, sparse=True)
    optimizer = wrap(table, TOPK, torch.optim.SGD(table.parameters(), lr=1.0))
    for step in range(3):
        optimizer.zero_grad()
        if step != missing or RANK != 0:
            table(torch.tensor([RANK])).sum().backward()
        optimizer.step()
    assert_same_everywhere(table.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every(CODECS)
def test_other_types_come_back_in_their_own(compressor, dtype):
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


@pytest.mark.parametrize("value", [1e-7, 2.0**-130])
@pytest.mark.parametrize("spec", ["none", "bf16", "onebit:min_numel=0", "topk:min_numel=0,ratio=1", "blockwise8:min_numel=0"])
def test_tiny_values_do_not_flush_away(spec, value):
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("w", weight)], spec)
    weight.grad = torch.full((64,), value)
    optimizer.step()
    kept = sum(slot["state"].get("residual", 0) for slot in optimizer.compression_state_dict()["tensors"].values()) if spec != "none" else 0
    torch.testing.assert_close(weight.grad + kept, torch.full((64,), value), rtol=4e-3 if spec == "bf16" else 1e-6, atol=0)


def test_sums_that_outgrow_fp32_are_seen():
    """What a threshold leaves grows step by step, which the statistics tell, until the step in which it would overflow is void."""
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("w", weight)], "threshold:tau=1,min_numel=0")
    norms = []
    for _ in range(4):
        weight.grad = torch.full((64,), 1e38)
        optimizer.step()
        norms.append(optimizer.compression_stats(residual_norms=True)["residual_norms"]["w"] / 8e38)
    assert norms[:3] == pytest.approx([1, 2, 3]) and norms[3] < 3.1 and torch.isnan(weight.grad).all()
    assert optimizer.compression_stats()["void_tensors"] == 1


def test_types_that_can_not_be_reduced():
    weight = torch.nn.Parameter(torch.zeros(5000, dtype=torch.complex64))
    with pytest.raises(TypeError, match="parameter w is torch.complex64; gradients of torch.float32, .* can be reduced"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], "topk")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_types_that_can_not_be_bound(dtype):
    weight = torch.zeros(5000, dtype=dtype)
    with pytest.raises(TypeError, match=f"parameter w is {dtype}; gradients of torch.float32, .* can be reduced: leave it out"):
        Compression.topk().bind([("w", weight)])


@pytest.mark.parametrize("shift", range(3))
def test_memory_layouts(shift):
    """channels_last on some workers, transposed gradients on others: positions mean the same entries everywhere."""
    torch.manual_seed(0)
    reference = torch.randn(16, 8, 3, 3)
    layouts = [reference.clone(), reference.clone().to(memory_format=torch.channels_last),
               reference.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)]
    gradient = layouts[(RANK + shift) % 3]
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], "topk:ratio=0.5,min_numel=0")
    weight.grad = gradient
    strides = gradient.stride()
    optimizer.step()
    assert weight.grad.stride() == strides
    kept = weight.grad.contiguous() != 0
    assert 0.4 < kept.float().mean() <= 0.5
    torch.testing.assert_close(weight.grad[kept], reference[kept])
    assert_same_everywhere(weight.detach().contiguous())


@pytest.mark.parametrize("compression", ["topk:ratio=1.0,min_numel=0,exchange=allgather", "onebit:min_numel=0"])
def test_gradients_whose_entries_share_memory(compression):
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


@pytest.mark.parametrize("compression", [
    TOPK + ",warmup=2", TOPK + ",momentum=0.9,warmup=2", "onebit:min_numel=0,exchange=sra,warmup=2",
    "powersgd:min_numel=0,warmup=2", "randomk:min_numel=0,warmup=2",
    {"v": "powersgd:min_numel=0,warmup=2", "*": TOPK + ",warmup=2"}], ids=str)
def test_dense_collectives_and_compressed_ones_have_other_names(compression, started):
    """So that nobody takes one for the other: what travels by a name has the same size in every step."""
    parameters = {name: torch.nn.Parameter(torch.zeros(40, 30)) for name in "wv"}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), compression)
    names, sizes = [], {}
    for step in range(4):
        started.clear()
        for p in parameters.values():
            p.grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(10 * step + RANK))
        optimizer.step()
        names.append(set(started))
        for name, entries in started.items():
            sizes.setdefault(name, set()).update(entries)
    dense, compressed = names[0] | names[1], names[2] | names[3]
    assert dense and compressed and not dense & compressed
    assert all(len(entries) == 1 for entries in sizes.values())
    assert len(set(hvd.allgather_object(str(sorted(sizes))))) == 1
    assert_same_everywhere(parameters["w"])


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
        optimizer = wrap(model, compression, op=hvd.Adasum, verify_every=1)
        train(model, optimizer, range(2))
        assert_same_everywhere(flat(model))
        assert optimizer.compression_stats()["steps"] == 2


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_state_of_another_number_of_workers_reaches_the_optimizer(op):
    """In a step without gradients, dense, so that all of it does."""
    numel, before = 4096, WORLD + 1
    draw = torch.Generator().manual_seed(1)
    kept, cuts = torch.randn(before, numel, generator=draw), [numel * i // before for i in range(before + 1)]
    of_owners = torch.randn(numel, generator=draw)
    states = [{"version": 1, "rank": rank, "world": before, "tensors": {"w": {
        "compressor": "onebit", "step": 3, "piece": [0, numel], "owned": cuts[rank:rank + 2],
        "state": {"residual": kept[rank], "owner.residual": of_owners[cuts[rank]:cuts[rank + 1]]}}}} for rank in range(before)]
    w = torch.nn.Parameter(torch.zeros(numel))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], "onebit:min_numel=0,exchange=sra,warmup=9", op=op)
    optimizer.load_compression_state_dict(states)
    (w * 0).sum().backward()
    optimizer.step()
    expected = kept.mean(0) + of_owners
    torch.testing.assert_close(-w.detach(), expected if op == hvd.Average else before * expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="give one of each worker"):
        optimizer.load_compression_state_dict(states[1:])
