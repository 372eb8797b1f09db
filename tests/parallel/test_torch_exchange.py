"""Gradients that travel together: buckets, scatter-reduce-allgather, choices, hosts."""

import dataclasses
import io
import time

import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import Compression, TensorInfo, get_compressor, registry, wire
from hvd_quant.exchange import cost, hosts, ranges
from hvd_quant.ops import torch as ops
from hvd_quant.torch import network
from hvd_quant.torch.cargo import Cargo
from hvd_quant.torch.reducer import Reducer
from tests import stress
from tests.conftest import CODECS, ERROR_FEEDBACK
from tests.parallel.bench_on_workers import what_bench_finds
from tests.parallel.torch_workers import RANK, WORLD, assert_same_everywhere, every, flat, on_all, train, wrap
from tests.parallel.torch_workers import network as small_network

SHAPES = {"one": (1,), "seven": (7,), "byte": (255,), "more": (257,), "matrix": (50, 100), "large": (70000,), "image": (8, 4, 3, 3)}
COMPRESSED = {spec: c for spec, c in CODECS.items() if c.name != "none"}


def by(exchange, compressor):
    return dataclasses.replace(compressor, exchange=exchange)


def weights(shapes=SHAPES):
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


def gradients(step, rank=RANK, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def optimizer_of(parameters, compression, **kwargs):
    sgd = torch.optim.SGD(list(parameters.values()), lr=1.0)
    return hvd.DistributedOptimizer(sgd, list(parameters.items()), compression, **kwargs)


def step(optimizer, parameters, grads):
    for name, p in parameters.items():
        p.grad = grads[name].clone()
    optimizer.step()
    return {name: p.grad for name, p in parameters.items()}


def left(slot, workers=WORLD):
    """What is still to come of a mean, on all workers: the mean of what ``workers`` have kept, and what owners have of the mean."""
    whole = torch.zeros(slot.info.numel)
    if "residual" in slot.state:
        whole[slice(*slot.piece)] += slot.state["residual"] / workers
        whole[slice(*slot.owned)] += slot.state.get("owner.residual", 0)
    return on_all(whole).sum(0)


@every(CODECS)
@pytest.mark.parametrize("exchange", ["allgather", "sra", "allreduce"])
def test_replicas_are_bit_identical_however_they_are_exchanged(compressor, exchange):
    if exchange == "allreduce" and not compressor.linear:
        pytest.skip("only linear codes are allreduced")
    parameters = weights()
    optimizer = optimizer_of(parameters, by(exchange, compressor))
    for i in range(4):
        step(optimizer, parameters, gradients(i))
    for p in parameters.values():
        assert_same_everywhere(p)
    assert exchange in optimizer.compression_stats()["exchanges"]


def test_three_of_four_workers():
    """Ranges are uneven. All codes in one test, since Horovod is slow while there are process sets."""
    if WORLD < 4:
        pytest.skip("needs four workers")
    three = hvd.add_process_set([0, 1, 3])
    try:
        for compressor in CODECS.values():
            for exchange in ("allgather", "sra"):
                parameters = weights()
                optimizer = optimizer_of(parameters, by(exchange, compressor), process_set=three)
                for i in range(2):
                    step(optimizer, parameters, gradients(i))
                if three.included():
                    for p in parameters.values():
                        rows = hvd.allgather(p.detach().reshape(1, -1), name=f"three.{p.numel()}", process_set=three)
                        assert torch.equal(rows, rows[:1].expand_as(rows)), (compressor, exchange)
                    assert optimizer.compression_stats()["steps"] == 2
    finally:
        hvd.remove_process_set(three)


@every(COMPRESSED)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_sra_is_what_the_specification_says_and_loses_nothing(compressor, op):
    """One process plays all workers and all owners. (With the same kernels: means of few levels have ties, which the smallest
    difference decides.)"""
    compressor = by("sra", compressor)
    parameters = weights()
    optimizer = optimizer_of(parameters, compressor, op=op)
    states = {}

    def state_of(who, shapes):
        return {key: states.setdefault((*who, key), torch.zeros(shape)) for key, shape in shapes.items()}

    def played(name, flats, i):
        index, info = list(SHAPES).index(name), TensorInfo.whole(name, SHAPES[name], step=i, world=WORLD)
        if compressor.payload_bytes(info) >= 4 * info.numel:
            return torch.stack(flats).mean(0)
        kept = [state_of((name, rank), compressor.state_shapes(info)) for rank in range(WORLD)]
        params = [compressor.measure(ops, flats[r], kept[r], info) for r in range(WORLD)]
        mean = torch.zeros(info.numel)
        for rank, (a, b) in enumerate(ranges(info.numel, compressor.range_multiple, WORLD, index)):
            if a < b:
                part = info.part(a, b)
                payloads = [compressor.encode(ops, flats[r][a:b], {k: v[a:b] for k, v in kept[r].items()}, params[r],
                                              part.at(rank=r)) for r in range(WORLD)]
                reduced = compressor.decode_mean(ops, payloads, part)
                owner = state_of((name, rank, "owner"), compressor.state_shapes(part, role="owner"))
                again = compressor.encode(ops, reduced, owner, compressor.measure(ops, reduced, owner, part),
                                          part.at(rank=rank, phase=1))
                compressor.decode_sum(ops, [again], part, mean[a:b])
        return mean

    given, received = dict.fromkeys(SHAPES, 0), dict.fromkeys(SHAPES, 0)
    factor = WORLD if op == hvd.Sum else 1
    for i in range(4):
        reduced = step(optimizer, parameters, gradients(i))
        for name in SHAPES:
            flats = [gradients(i, rank)[name].reshape(-1) for rank in range(WORLD)]
            torch.testing.assert_close(reduced[name].reshape(-1), factor * played(name, flats, i), rtol=2e-6, atol=2e-6)
            given[name] = given[name] + torch.stack(flats).mean(0)
            received[name] = received[name] + reduced[name].reshape(-1) / factor
    if compressor.memory == "error_feedback":
        for name, slot in optimizer._reducer.state.slots.items():
            torch.testing.assert_close(received[name] + left(slot), given[name], atol=3e-5, rtol=0)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("travels", ["fp16", "none"])
def test_an_estimate_is_of_this_workers_own_gradient_whatever_it_travels_as(op, dtype, travels):
    w = torch.nn.Parameter(torch.zeros(40, 50, dtype=dtype))
    optimizer = optimizer_of({"w": w}, "topk:memory=ef21,min_numel=0", op=op)
    optimizer._reducer.plan.update()
    slot, own = optimizer._reducer.state.slots["w"], gradients(0, shapes={"w": (40, 50)})["w"].to(dtype)
    slot.travels = get_compressor(travels)  # as "only_if_faster" chooses
    step(optimizer, {"w": w}, {"w": own})
    assert torch.equal(slot.state["estimate"], own.reshape(-1).float())
    mean = on_all(slot.state["estimate"]).mean(0)
    torch.testing.assert_close(slot.state["mean"], mean, rtol=0, atol=2e-3)
    torch.testing.assert_close(w.grad.reshape(-1).float(), mean * (WORLD if op == hvd.Sum else 1), rtol=0, atol=1e-2)


@pytest.mark.parametrize("small", ["one", "all"])
@pytest.mark.parametrize("exchange", ["allgather", "sra"])
def test_values_below_a_threshold_wait_until_they_add_up_to_it(exchange, small):
    parameters = weights({"w": (5000,)})
    optimizer = optimizer_of(parameters, f"threshold:tau=1,capacity=1,min_numel=0,exchange={exchange}")
    of = {rank: 0.375 if small == "all" or rank == WORLD - 1 else 1.5 for rank in range(WORLD)}
    every_other = torch.arange(5000) % 2 == 0  # of all entries a payload would have no room for a few
    means, received = [], 0
    for _ in range(6):
        reduced = step(optimizer, parameters, {"w": every_other * of[RANK]})["w"].clone()
        assert_same_everywhere(reduced)
        assert torch.equal(reduced, every_other * reduced[0])
        means.append(reduced[0].item())
        received = received + reduced
    assert bool(means[0]) == (small == "one" and exchange == "allgather")  # an owner's mean is below it too
    if exchange == "allgather":
        sent = [0, 0, 1, 0, 0, 1]
        assert means == pytest.approx([one if small == "all" else (WORLD - 1 + one) / WORLD for one in sent])
    assert received.any()
    given = 6 * sum(of.values()) / WORLD
    torch.testing.assert_close(received + left(optimizer._reducer.state.slots["w"]), every_other * given)


ODD, LARGE = [(0,), (), (1,), (8,), (9,), (31,), (33,), (256,), (257,), (0, 4), (5, 0, 2)], [(17_000_000,)]


@pytest.mark.parametrize("spec, exchange, shapes", [
    *((spec, exchange, ODD) for exchange in ("allgather", "sra")
      for spec in ("onebit", "topk:ratio=0.01", "adaptive", "signsgd", "blockwise8", "topk:momentum=0.5")),
    ("onebit", "sra", LARGE), ("topk:ratio=0.01", "allgather", LARGE)])
def test_nothing_is_lost_of_odd_sizes_and_large_ones(spec, exchange, shapes):
    if WORLD > 2 and shapes is LARGE:
        pytest.skip("the launches with two workers run this")
    shapes = {str(shape): shape for shape in shapes}
    parameters = weights(shapes)
    optimizer = optimizer_of(parameters, by(exchange, get_compressor(f"{spec}{',' if ':' in spec else ':'}min_numel=0")))
    given, received = dict.fromkeys(shapes, 0), dict.fromkeys(shapes, 0)
    for i in range(2):
        grads = gradients(i, shapes=shapes)
        reduced = step(optimizer, parameters, grads)
        for name, shape in shapes.items():
            assert reduced[name].shape == shape
            given[name] = given[name] + hvd.allreduce(grads[name], name=f"given.{name}").reshape(-1)
            received[name] = received[name] + reduced[name].reshape(-1)
    for name, slot in optimizer._reducer.state.slots.items():
        assert_same_everywhere(parameters[name].reshape(-1))
        if not slot.compressor.momentum:
            torch.testing.assert_close(received[name] + left(slot), given[name], atol=3e-5, rtol=0)
    assert exchange in optimizer.compression_stats()["exchanges"]


@every(COMPRESSED)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_nonfinite_value_in_one_range_makes_the_step_void(compressor, bad):
    parameters = weights()
    optimizer = optimizer_of(parameters, by("sra", compressor))
    step(optimizer, parameters, gradients(0))
    before = optimizer.compression_state_dict()["tensors"]
    grads = gradients(1)
    if RANK == WORLD - 1:
        grads["large"][3] = bad
    reduced = step(optimizer, parameters, grads)
    kept = any(slot["state"] for slot in before.values())
    assert all(torch.isnan(reduced[name]).all() if kept or name == "large" else torch.isfinite(reduced[name]).all() for name in SHAPES)
    for name, slot in optimizer.compression_state_dict()["tensors"].items():
        torch.testing.assert_close(slot["state"], before[name]["state"], atol=1e-6, rtol=0)
    assert optimizer.compression_stats()["void_tensors"] == 1


def failing(monkeypatch, compressor, when, how):
    """Change what a worker has encoded, or fail to encode it where `how` is None, where `when(info)`."""
    cls = type(compressor)
    encode = cls.encode

    def encode_or_fail(self, ops, grad, state, params, info):
        if when(info):
            if how is None:
                raise MemoryError("no room")
            return how(encode(self, ops, grad, state, params, info))
        return encode(self, ops, grad, state, params, info)

    monkeypatch.setattr(cls, "encode", encode_or_fail)


def flip(payload):
    payload[40] ^= 4
    return payload


@pytest.mark.parametrize("how", [flip, lambda payload: payload[:-8], lambda payload: torch.cat([payload, payload[:8]]),
                                 lambda payload: torch.randint(256, payload.shape, dtype=torch.uint8)],
                         ids=["flip", "truncate", "extend", "random"])
@pytest.mark.parametrize("who", ["worker", "owner"])
def test_damage_that_one_owner_sees_is_told_by_all(monkeypatch, how, who):
    compressor = get_compressor("onebit:exchange=sra,min_numel=0")
    parameters = weights()
    optimizer = optimizer_of(parameters, compressor)
    step(optimizer, parameters, gradients(0))
    last = ranges(70000, 2048, WORLD, list(SHAPES).index("large"))[WORLD - 1]
    calls = []

    def when(info):
        hit = info.name == "large" and info.range == last and RANK == (0 if who == "worker" else WORLD - 1)
        calls.append(hit)
        return hit and sum(calls) == (1 if who == "worker" else 2)

    failing(monkeypatch, compressor, when, how)
    started = time.monotonic()
    with pytest.raises(wire.PayloadError) as caught:
        step(optimizer, parameters, gradients(1))
    assert time.monotonic() - started < 5
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1
    monkeypatch.undo()
    step(optimizer, parameters, gradients(2))
    for p in parameters.values():
        assert_same_everywhere(p)


@pytest.mark.parametrize("who", ["worker", "owner"])
def test_a_worker_that_can_not_encode_a_range_is_named_by_all_and_nothing_has_changed(monkeypatch, who):
    compressor = get_compressor("topk:ratio=0.1,exchange=sra,min_numel=0")
    parameters = weights()
    optimizer = optimizer_of(parameters, compressor)
    step(optimizer, parameters, gradients(0))
    before = optimizer.compression_state_dict()["tensors"]
    first = ranges(70000, 256, WORLD, list(SHAPES).index("large"))[0]
    calls = []

    def when(info):
        hit = info.name == "large" and info.range == first and RANK == (WORLD - 1 if who == "worker" else 0)
        calls.append(hit)
        return hit and sum(calls) == (1 if who == "worker" else 2)

    failing(monkeypatch, compressor, when, None)
    grads = gradients(1)
    with pytest.raises(wire.PayloadError) as caught:
        step(optimizer, parameters, grads)
    sentence = str(caught.value)
    worker = WORLD - 1 if who == "worker" else 0
    assert sentence == f"large: worker {worker} failed to encode its gradient: MemoryError: no room"
    assert len(set(hvd.allgather_object(sentence))) == 1
    for name, p in parameters.items():
        if before[name]["state"]:  # small ones had been reduced, dense
            assert torch.equal(p.grad, grads[name])
        for key, value in optimizer.compression_state_dict()["tensors"][name]["state"].items():
            torch.testing.assert_close(value, before[name]["state"][key], atol=1e-6, rtol=0)


@every(COMPRESSED)
@pytest.mark.parametrize("exchange", ["allgather", "sra"])
def test_the_size_of_buckets_does_not_change_the_numbers(compressor, exchange):
    results, collectives = [], []
    for bucket_bytes in (1, 30000, 2**30):
        parameters = weights()
        optimizer = optimizer_of(parameters, by(exchange, compressor), bucket_bytes=bucket_bytes)
        for i in range(3):
            step(optimizer, parameters, gradients(i))
        results.append(torch.cat([p.detach().reshape(-1) for p in parameters.values()]))
        stats = optimizer.compression_stats()
        assert {name for bucket in stats["buckets"].values() for name in bucket["tensors"]} == set(SHAPES)
        collectives.append(sum(bucket["exchange"] == exchange for bucket in stats["buckets"].values()))
        for what in ("dense_bytes", "wire_bytes"):
            # The buckets are made anew after the first of three steps.
            assert sum(bucket[what] for bucket in stats["buckets"].values()) == pytest.approx(stats[what] * 2 / 3, abs=len(SHAPES))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])
    assert collectives[0] > collectives[1] > collectives[2] == 1


def test_a_bucket_size_that_is_none():
    for size in (0, -1, 2.5, True, "25MB"):
        with pytest.raises(ValueError, match="bucket_bytes=.* is not accepted; give a whole number of bytes"):
            optimizer_of(weights(), "topk", bucket_bytes=size)


class Branches(torch.nn.Module):
    """Four layers, of which a worker uses two at a time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x, order):
        for i in order:
            x = self.layers[i](x)
        return x


@pytest.mark.parametrize("exchange", ["allgather", "sra"])
def test_workers_in_opposite_branches_of_a_model(exchange):
    """Their buckets are complete in other orders, and some only in synchronize()."""
    model = Branches()
    optimizer = wrap(model, f"topk:ratio=0.1,min_numel=0,exchange={exchange}", bucket_bytes=4 * 64 * 65)
    for i in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * i + RANK))
        model(x, [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1], [2, 3]][(RANK + i) % 4]).square().mean().backward()
        optimizer.step()
        assert_same_everywhere(flat(model))


@pytest.mark.parametrize("exchange", ["allgather", "sra"])
def test_a_layer_frozen_during_one_of_two_backward_passes(exchange):
    """As critics are while actors learn; worker 0 gets some gradients only in synchronize()."""
    model, plain = Branches(), Branches()
    optimizer = wrap(model, f"topk:ratio=0.1,min_numel=0,exchange={exchange}")
    reference = wrap(plain, f"topk:ratio=0.1,min_numel=0,exchange={exchange}")
    for i in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * i + RANK))
        for each, opt in ((model, optimizer), (plain, reference)):
            opt.zero_grad()
            if each is model:
                each.layers[3].requires_grad_(False)
            each(x, [0, 1] if RANK == 0 else [0, 1, 2]).square().mean().backward()
            each.layers[3].requires_grad_(True)
            each(x, [3]).square().mean().backward()
            opt.step()
    assert_same_everywhere(flat(model))
    torch.testing.assert_close(flat(model), flat(plain))


def test_layers_that_are_unfrozen_while_some_workers_have_no_gradient():
    model = Branches()
    model.layers[1].requires_grad_(False)
    optimizer = wrap(model, "topk:ratio=0.1,min_numel=0")
    for i in range(4):
        model.layers[1].requires_grad_(i >= 2)
        optimizer.zero_grad()
        if RANK == 0 or i != 2:
            model(torch.ones(4, 64) * (RANK + i), [0, 1, 2, 3]).square().mean().backward()
        optimizer.step()
        assert_same_everywhere(flat(model))


def test_an_error_amid_one_exchange_leaves_the_others_whole(monkeypatch):
    """It may show while another exchange is waited for, and belongs to its own all the same."""
    parameters = weights({"a": (5000,), "b": (5000,), "c": (5000,)})
    shapes = {name: p.shape for name, p in parameters.items()}
    optimizer = optimizer_of(parameters, "topk:ratio=0.1,min_numel=0,exchange=sra", bucket_bytes=1)
    step(optimizer, parameters, gradients(0, shapes=shapes))
    before = optimizer.compression_state_dict()["tensors"]
    reduce = Cargo.reduce

    def broken(self, arrived):
        return None if self.info.name == "b" else reduce(self, arrived)

    monkeypatch.setattr(Cargo, "reduce", broken)
    with pytest.raises((TypeError, AttributeError)):
        step(optimizer, parameters, gradients(1, shapes=shapes))
    monkeypatch.undo()
    assert not optimizer._reducer._flying
    for key, value in optimizer.compression_state_dict()["tensors"]["b"]["state"].items():
        torch.testing.assert_close(value, before["b"]["state"][key], atol=1e-6, rtol=0)
    for i in (2, 3):
        step(optimizer, parameters, gradients(i, shapes=shapes))
    for p in parameters.values():
        assert_same_everywhere(p)


def test_what_was_kept_of_a_range_that_another_worker_owns_now_is_given_back():
    shapes = {"a": (70000,), "b": (70000,)}
    parameters = weights(shapes)
    optimizer = optimizer_of(parameters, "topk:exchange=sra")
    for i in range(2):
        step(optimizer, parameters, gradients(i, shapes=shapes))
    state = optimizer.compression_state_dict()
    reordered = {name: parameters[name] for name in ("b", "a")}
    other = optimizer_of(reordered, "topk:exchange=sra")
    other.load_compression_state_dict(state)
    for name, now in other.compression_state_dict()["tensors"].items():
        before, (a, b) = state["tensors"][name], state["tensors"][name]["owned"]
        assert now["owned"] != before["owned"] and before["state"]["owner.residual"].any()
        assert not now["state"]["owner.residual"].any()
        expected = before["state"]["residual"].clone()
        expected[a:b] += WORLD * before["state"]["owner.residual"]
        assert torch.equal(now["state"]["residual"], expected)
    step(other, reordered, gradients(3, shapes=shapes))


def test_only_if_faster_is_refused_where_nothing_can_be_measured():
    with pytest.raises(ValueError, match="topk:only_if_faster=true can't be bound: Horovod's optimizer has no place"):
        get_compressor("auto").bind(small_network().named_parameters())


class Slow(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.3)
        return grad


def test_both_phases_progress_during_backward_and_hooks_do_not_wait(monkeypatch):
    model = Branches()
    optimizer = wrap(model, "onebit:min_numel=0,exchange=sra", bucket_bytes=1)
    for i in range(2):
        optimizer.zero_grad()
        x = model.layers[3](torch.ones(4, 64))
        for layer in (2, 1, 0):
            x = model.layers[layer](Slow.apply(x))
        x.square().mean().backward()
        flights = optimizer._reducer._flying
        assert len(flights) == 8
        assert sum(flight.landing for flight in flights) >= 4  # what was left to do for these is to decode
        assert not any(flight.done for flight in flights)
        optimizer.step()
    assert_same_everywhere(flat(model))
    shares = [bucket["hidden_share"] for bucket in optimizer.compression_stats()["buckets"].values()]
    assert max(shares) > 0.5


def test_the_order_of_gradients_is_that_of_one_worker_after_the_first_step():
    model = Branches()
    optimizer = wrap(model, "topk:ratio=0.1,min_numel=0", bucket_bytes=1)
    order = [2, 0, 3, 1] if RANK == 0 else [0, 1, 2, 3]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 64), order).square().mean().backward()
        optimizer.step()
    planned = [slot.info.name for slot in optimizer._reducer.plan.bucket_of]
    assert [int(name.split(".")[1]) for name in planned if "weight" in name] == [1, 3, 0, 2]
    assert len(set(map(tuple, hvd.allgather_object(planned)))) == 1


@every(COMPRESSED)
def test_resuming_with_owners_is_bit_for_bit(compressor):
    def fresh():
        parameters = weights()
        return parameters, optimizer_of(parameters, by("sra", compressor))

    parameters, optimizer = fresh()
    for i in range(3):
        step(optimizer, parameters, gradients(i))
    file = io.BytesIO()
    torch.save([optimizer.compression_state_dict(), {k: p.detach() for k, p in parameters.items()}], file)
    for i in range(3, 6):
        step(optimizer, parameters, gradients(i))
    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    resumed, other = fresh()
    with torch.no_grad():
        for name, p in resumed.items():
            p.copy_(values[name])
    other.load_compression_state_dict(state)
    for i in range(3, 6):
        step(other, resumed, gradients(i))
    assert all(torch.equal(parameters[name], resumed[name]) for name in SHAPES)


@every(ERROR_FEEDBACK)
def test_what_owners_kept_is_not_lost_when_the_exchange_changes(compressor):
    """It comes from a checkpoint here; measuring the network, or workers that come and go, do the same."""
    parameters = weights({"w": (70000,)})
    optimizer = optimizer_of(parameters, by("sra", compressor))
    given = received = 0
    for i in range(3):
        grads = gradients(i, shapes={"w": (70000,)})
        given = given + on_all(grads["w"]).mean(0)
        received = received + step(optimizer, parameters, grads)["w"]
    state = optimizer.compression_state_dict()
    parameters = weights({"w": (70000,)})
    optimizer = optimizer_of(parameters, by("allgather", compressor))
    optimizer.load_compression_state_dict(state)
    for i in range(3, 5):
        grads = gradients(i, shapes={"w": (70000,)})
        given = given + on_all(grads["w"]).mean(0)
        received = received + step(optimizer, parameters, grads)["w"]
    residual = optimizer.compression_state_dict()["tensors"]["w"]["state"]
    assert list(residual) == ["residual"]
    torch.testing.assert_close(received + on_all(residual["residual"]).mean(0), given, atol=3e-5, rtol=0)


def network_of(seconds_per_byte, latency, rates):
    """Costs of a network with the same hops as the real collectives."""
    ring = (WORLD - 1) / WORLD
    hops = {"allreduce": 2 * ring, "allreduce_fp16": 4 * ring, "allgather": WORLD - 1, "alltoall": ring}
    return cost.Costs({kind: ((0, latency), (2**20, latency + hop * 2**20 * seconds_per_byte)) for kind, hop in hops.items()}, rates)


@pytest.mark.parametrize("seconds_per_byte, latency, code, expected", [
    (1e-12, 1e-6, 1e-9, "dense"),  # a fast network: compressing takes longer than sending
    (1e-6, 1e-6, 1e-9, "allgather" if WORLD == 2 else "sra"),  # a slow one
], ids=["fast", "slow"])
def test_only_if_faster(monkeypatch, seconds_per_byte, latency, code, expected):
    seen = []

    def costs(workers, compressors, device):
        seen.append([c.spec for c in compressors])
        rates = cost.Rates(code, code, code)
        return network_of(seconds_per_byte, latency, {cost.key_of(c): rates for c in [*compressors, get_compressor("fp16")]})

    monkeypatch.setattr(network, "costs", costs)
    monkeypatch.setattr(cost, "worth_a_trial", lambda *args: [cost.CHEAPEST])  # this network can't be rehearsed on
    parameters = weights({"w": (70000,), "small": (10,)})
    optimizer = optimizer_of(parameters, "topk:only_if_faster=true")
    travelled = []
    for i in range(3):
        step(optimizer, parameters, gradients(i, shapes={"w": (70000,), "small": (10,)}))
        travelled.append(next(e for e, names in optimizer.compression_stats()["exchanges"].items() if "w" in names))
    assert travelled == ["dense", expected, expected]
    assert seen == [["topk:only_if_faster=true"]]
    assert_same_everywhere(parameters["w"])


def test_what_was_kept_goes_along_when_gradients_go_dense(monkeypatch):
    shapes = {"w": (70000,)}
    parameters = weights(shapes)
    optimizer = optimizer_of(parameters, "topk:only_if_faster=true,exchange=sra")
    optimizer._reducer.state.slots["w"].resumed = get_compressor("topk:only_if_faster=true,exchange=sra")
    given = received = 0
    monkeypatch.setattr(network, "costs", lambda workers, compressors, device: network_of(1e-12, 1e-6, {}))
    for i in range(4):
        grads = gradients(i, shapes=shapes)
        given = given + on_all(grads["w"]).mean(0)
        received = received + step(optimizer, parameters, grads)["w"]
        if i == 1:
            assert "sra" in optimizer.compression_stats()["exchanges"]
            optimizer._reducer.state.slots["w"].resumed, optimizer._reducer.plan.made_for = None, None
    assert list(optimizer.compression_stats()["exchanges"]) == ["dense"]
    assert optimizer.compression_stats(residual_norms=True)["residual_norms"].get("w", 0) == 0
    torch.testing.assert_close(received, given, atol=3e-5, rtol=0)


def test_the_network_and_the_machine_are_measured():
    model = torch.nn.Linear(300, 300)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = wrap(model, "auto:onebit")
    for i in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * i + RANK))).square().mean().backward()
        optimizer.step()
    assert_same_everywhere(flat(model))
    (workers, costs), = optimizer._reducer.plan.costs.items()
    assert len(set(hvd.allgather_object(str(costs)))) == 1
    for kind in cost.COLLECTIVES:
        sizes, seconds = zip(*costs.collectives[kind])
        assert list(sizes) == sorted(sizes) and min(seconds) > 0
    *an_entry, call = dataclasses.astuple(costs.rates["onebit"])
    assert all(0 < seconds < 1e-6 for seconds in an_entry) and 0 <= call < 0.1
    started = time.monotonic()
    network.costs(workers, [get_compressor("auto:onebit")], torch.device("cpu"))
    assert time.monotonic() - started < 0.1  # it is remembered


@pytest.fixture
def two_hosts(monkeypatch):
    if WORLD < 4:
        pytest.skip("needs four workers")
    monkeypatch.setattr(network, "_places", lambda: [(rank // 2, rank % 2) for rank in range(WORLD)])
    yield
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]):
        hvd.remove_process_set(hosts.process_set_of(ranks))


HIERARCHICAL = [("fp16", "allreduce", hvd.Sum), ("onebit:min_numel=0,block_size=128", "sra", hvd.Sum),
                ("adaptive:min_numel=0", "sra", hvd.Average), ("topk:min_numel=0,ratio=0.1,values=float16", "allgather", hvd.Average)]


def test_hierarchical(two_hosts):
    """Workers of a host are averaged first, and exchange the parts of the tensor between hosts."""
    for spec, exchange, op in HIERARCHICAL:
        check_hierarchical(get_compressor(spec), exchange, op)


def check_hierarchical(compressor, exchange, op):
    compressor = dataclasses.replace(compressor, exchange=exchange, hierarchical=True)
    parameters = weights()
    optimizer = optimizer_of(parameters, compressor, op=op)
    given, received = dict.fromkeys(SHAPES, 0), dict.fromkeys(SHAPES, 0)
    for i in range(2):
        grads = gradients(i)
        reduced = step(optimizer, parameters, grads)
        for name in SHAPES:
            given[name] = given[name] + on_all(grads[name]).mean(0)
            received[name] = received[name] + reduced[name].reshape(-1) / (WORLD if op == hvd.Sum else 1)
    for p in parameters.values():
        assert_same_everywhere(p)
    assert exchange in optimizer.compression_stats()["exchanges"]
    if compressor.stateful and compressor.memory == "error_feedback" and compressor.name != "threshold":
        for name, slot in optimizer._reducer.state.slots.items():
            torch.testing.assert_close(received[name] + left(slot, workers=2), given[name], atol=3e-5, rtol=0)


def test_hierarchical_where_it_can_not_work(monkeypatch, two_hosts):
    network.workers_by_host(hvd.global_process_set)
    monkeypatch.setattr(network, "_places", lambda: [(0, 0), (0, 1), (0, 2), (1, 0)])
    with pytest.raises(ValueError, match="the same number of workers on each host; the hosts have 3, 1"):
        optimizer_of(weights(), "topk:hierarchical=true")
    pair = hosts.process_set_of([0, 1])
    if pair.included():
        with pytest.raises(ValueError, match="leave process_set= out"):
            Reducer(list(weights().items()), registry.selector("topk:hierarchical=true"), hvd.Average, 1.0, pair)


def test_on_one_host_hierarchical_is_dense():
    if WORLD > 2:
        pytest.skip("two workers show it")
    parameters = weights()
    optimizer = optimizer_of(parameters, Compression.topk(hierarchical=True, min_numel=0))
    reduced = step(optimizer, parameters, gradients(0))
    assert list(optimizer.compression_stats()["exchanges"]) == ["dense"]
    mean = torch.stack([gradients(0, rank)["large"] for rank in range(WORLD)]).mean(0)
    torch.testing.assert_close(reduced["large"], mean)


def test_residual_norms_on_request():
    model = small_network()
    optimizer = wrap(model, "topk:ratio=0.01,min_numel=0")
    train(model, optimizer, range(2))
    norms = optimizer.compression_stats(residual_norms=True)["residual_norms"]
    state = optimizer.compression_state_dict()["tensors"]["0.weight"]["state"]["residual"]
    assert norms["0.weight"] == pytest.approx(float(state.norm()), rel=1e-5)
    assert "residual_norms" not in optimizer.compression_stats()


@pytest.mark.parametrize("fastest", ["allgather", "sra"])
def test_the_exchange_that_was_the_fastest_in_a_rehearsal_is_taken(fastest, monkeypatch):
    """And the rehearsal leaves nothing behind: what is kept of earlier gradients is as if it had not been."""
    if WORLD < 4:
        pytest.skip("needs four workers: two have no choice")
    policies = ["allgather", "sra"]
    monkeypatch.setattr(cost, "worth_a_trial", lambda *args: policies)
    slowest, tried = network.slowest, []

    def timed(seconds, process_set):
        if len(seconds) == len(policies):
            tried.append(all(second > 0 for second in slowest(seconds, process_set)))
            return [0.1 if policy == fastest else 0.2 for policy in policies]
        return slowest(seconds, process_set)

    monkeypatch.setattr(network, "slowest", timed)
    parameters, total = weights({"large": (70000,), "rows": (5, 3)}), 0
    optimizer = optimizer_of(parameters, {"large": "onebit:block_size=128"})
    for i in range(3):
        sparse = {"rows": torch.sparse_coo_tensor([[RANK]], torch.ones(1, 3), (5, 3))}  # which is not rehearsed
        step(optimizer, parameters, gradients(i, shapes={"large": (70000,)}) | sparse)
        total += sum(gradients(i, rank, {"large": (70000,)})["large"] for rank in range(WORLD)) / WORLD
    assert len(tried) > 4 and all(tried)
    assert optimizer.compression_stats()["exchanges"][fastest] == ["large"]
    state = optimizer.compression_state_dict()["tensors"]["large"]
    kept = on_all(state["state"]["residual"]).mean(0)
    if fastest == "sra":
        for (a, b), owned in zip(hvd.allgather_object(state["owned"]), hvd.allgather_object(state["state"]["owner.residual"])):
            kept[a:b] += owned
    torch.testing.assert_close(-parameters["large"].detach() + kept, total, rtol=0, atol=1e-5)  # lr=1: nothing is lost
    assert_same_everywhere(parameters["large"])


def test_tensors_of_random_sizes_that_arrive_in_random_orders():
    """A round of `make stress`."""
    if WORLD < 4:
        pytest.skip("the launch with four workers runs it")
    exchanges, worst = stress.stress_round(seed=2, number=0)
    assert exchanges == 240 and worst <= 1


def test_bench_measures_what_plan_predicts_by(monkeypatch, tmp_path):
    found = what_bench_finds(monkeypatch, tmp_path, RANK, WORLD, "randomk")
    assert all(one["measured_seconds"] > 0 for one in found)


def test_what_exchanges_cost_is_where_a_user_looks():
    class Writer:
        def add_scalar(self, name, value, step):
            written[name] = value, step

    written, writer, parameters = {}, Writer(), weights()
    optimizer = optimizer_of(parameters, "topk:ratio=0.1,min_numel=0")
    for i in range(2):
        step(optimizer, parameters, gradients(i))
    hvd.log_compression(optimizer, writer, 2)
    stats = optimizer.compression_stats()
    assert written["compression/wire_bytes"] == (stats["wire_bytes"] / 2, 2)
    assert written["compression/compression_ratio"] == (stats["dense_bytes"] / stats["wire_bytes"], 2)
    assert 0 <= written["compression/hidden_share"][0] <= 1
    assert hvd.compression_progress(optimizer).startswith("sent ") and hvd.compression_progress(optimizer).endswith(" % hidden")
    lines = hvd.compression_summary(optimizer).splitlines()
    assert lines[1].startswith("2 steps") and sum("topk:" in line for line in lines) == 1
