"""Ranges, buckets, hosts and costs: plain Python, without a framework."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_quant import TensorInfo, exchange, get_compressor
from hvd_quant.exchange import buckets, checkpoint, cost, hosts
from tests.conftest import CODECS

SIZES = [0, 1, 7, 255, 256, 257, 5000, 70000, 1_000_003]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8, 1000])
@pytest.mark.parametrize("multiple", [64, 256, 16384])
def test_ranges_make_up_the_tensor(numel, parts, multiple):
    for index in (0, 1, 5, parts):
        ranges = exchange.ranges(numel, multiple, parts, index)
        assert len(ranges) == parts
        inside = sorted(cut for cut in ranges if cut[0] < cut[1])
        assert [0, *(b for _, b in inside)] == [*(a for a, _ in inside), numel]
        assert all(a % multiple == 0 for a, _ in inside)
        lengths = [b - a for a, b in ranges]
        assert max(lengths) - min(lengths) < 2 * multiple  # the last one also ends with the tensor
        assert ranges[index % parts] == exchange.ranges(numel, multiple, parts, 0)[2 * index % parts]


def test_what_is_left_over_is_spread_over_the_owners():
    owners = [[cut[0] < cut[1] for cut in exchange.ranges(100, 256, 4, index)].index(True) for index in range(8)]
    assert owners == [0, 3, 2, 1, 0, 3, 2, 1]


def test_buckets():
    assert buckets.fill({}) == []
    sizes = {"a": 10, "b": 10, "c": 15, "d": 100, "e": 1, "f": 0}
    assert buckets.fill(sizes, 20) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert buckets.fill(sizes, 1) == [["a"], ["b"], ["c"], ["d"], ["e", "f"]]
    assert buckets.fill(sizes, 10**6) == [list(sizes)]
    filled = buckets.fill(sizes, 20, [["d", "a"], ["f"]])
    assert filled == [["b"], ["c"], ["a", "d"], ["e"], ["f"]]


def test_hosts():
    grid = hosts.grid([(7, 0), (7, 1), (3, 1), (3, 0)])
    assert grid.hosts == [[0, 1], [2, 3]] and grid.columns == [[0, 2], [1, 3]]
    assert hosts.grid([(0, 0), (1, 0)]) == ([[0], [1]], [[0, 1]])
    with pytest.raises(ValueError, match="the same number of workers on each host; the hosts have 2, 1"):
        hosts.grid([(0, 0), (0, 1), (1, 0)])


def network(second_per_byte=8e-9, latency=1e-3, world=4):
    ring = (world - 1) / world
    hops = {"allreduce": 2 * ring, "allreduce_fp16": 4 * ring, "allgather": world - 1, "alltoall": ring}
    return cost.Costs({kind: ((1000, latency), (1001000, latency + 1e6 * second_per_byte * hop)) for kind, hop in hops.items()})


def test_seconds_of_a_collective_are_interpolated():
    costs = cost.Costs({"allgather": ((1000, 1.0), (2000, 3.0), (4000, 4.0))})
    assert [costs.collective("allgather", n) for n in (10, 1000, 1500, 3000, 6000)] == [1.0, 1.0, 2.0, 3.5, 5.0]
    falling = cost.Costs({"allgather": ((1000, 2.0), (2000, 1.0))})  # noise
    assert falling.collective("allgather", 10**9) == 1.0


@pytest.mark.parametrize("world, numel, expected", [
    (2, 10**7, "allgather"),  # both send as much, and an allgather does it at once
    (8, 10**7, "sra"), (64, 10**7, "sra"),
    (8, 4096, "allgather"),  # too small for two collectives
])
def test_the_exchange_of_a_dense_code(world, numel, expected):
    infos = [TensorInfo.whole("w", (numel,), world=world)]
    assert cost.decide(get_compressor("onebit"), infos, network(world=world)).exchange == expected
    assert exchange.choose(get_compressor(f"onebit:exchange={expected}"), infos[0]) == expected


def test_what_was_measured_without_fp16_serves_for_it_too():
    """One process may have an optimizer with "topk", then another with "auto"."""
    infos = [TensorInfo.whole("w", (10**6,), world=4)]
    collectives = {kind: points for kind, points in network().collectives.items() if kind != "allreduce_fp16"}
    assert cost.decide(get_compressor("auto"), infos, cost.Costs(collectives)).name == "topk"


@pytest.mark.parametrize("second_per_byte, expected", [(8e-8, "topk"), (8e-9, "topk"), (1e-11, "none")])
def test_only_if_faster(second_per_byte, expected):
    infos = [TensorInfo.whole("w", (10**6,), world=4)]
    costs = dataclasses.replace(network(second_per_byte), rates={"topk": cost.Rates(2e-9, 2e-9, 1e-9)})
    compressor = get_compressor("topk:only_if_faster=true,warmup=7,min_numel=11")
    decided = cost.decide(compressor, infos, costs)
    assert decided.name == expected and decided.warmup == 7 and decided.min_numel == 11
    assert cost.decide(get_compressor("topk"), infos, costs).name == "topk"


@pytest.mark.parametrize("spec, policy, expected", [
    ("onebit", "allgather", ("onebit", "allgather")), ("onebit", "sra", ("onebit", "sra")),
    ("onebit", "none", ("onebit", "sra")),  # which is no choice without only_if_faster
    ("auto:onebit", "none", ("none", "auto")), ("auto:onebit", "fp16", ("fp16", "allreduce")),
    ("onebit:exchange=sra", "allgather", ("onebit", "sra")),  # which the user has chosen
])
def test_a_policy_is_followed_where_it_may_be(spec, policy, expected):
    infos = [TensorInfo.whole("w", (10**7,), world=8)]
    decided = cost.decide(get_compressor(spec), infos, network(world=8), policy=policy)
    assert (decided.name, decided.exchange) == expected


@pytest.mark.parametrize("spec, world, numel, expected", [
    ("onebit", 8, 10**7, {"cheapest"}),  # an allgather is more than twice as dear
    ("onebit", 3, 10**6, {"cheapest", "sra"}),
    ("onebit:exchange=sra", 3, 10**6, {"cheapest"}),
    ("auto:onebit", 3, 10**7, {"cheapest", "allgather"}),  # and so is sending everything
    ("auto:onebit", 3, 5000, {"cheapest", "fp16", "none"}),
])
def test_what_may_be_the_fastest_is_tried(spec, world, numel, expected):
    together = [(get_compressor(spec), [TensorInfo.whole("w", (numel,), world=world)])]
    assert set(cost.worth_a_trial(together, lambda _: network(world=world))) == expected


def test_a_collective_beyond_the_counts_of_mpi_is_not_chosen():
    info = TensorInfo.whole("w", (2**29,), world=8)
    cheap = cost.Costs({**network().collectives, "allgather": ((0, 0.0), (1, 0.0))})
    assert cost.decide(get_compressor("onebit"), [info], cheap).exchange == "allgather"
    assert cost.decide(get_compressor("bf16"), [info], cheap, mpi=True).exchange == "sra"


def test_every_compressor_has_a_key_for_its_code_alone():
    for compressor in CODECS.values():
        other = dataclasses.replace(compressor, exchange="sra", warmup=3, min_numel=1, only_if_faster=True)
        assert cost.key_of(other) == cost.key_of(compressor)
    assert cost.key_of(get_compressor("topk:ratio=0.1,memory=none")) == "topk:memory=none,ratio=0.1"


class Fake:
    """Four workers, the slowest of which takes twice as long as this one."""

    def __init__(self):
        self.calls = []

    def collective(self, kind, nbytes):
        self.calls.append((kind, nbytes))
        return 1e-3 + nbytes * 1e-8

    def rates(self, compressor, entries):
        return cost.Rates(*(seconds * (2 if entries < 10**6 else 1) for seconds in (1e-9, 2e-9, 3e-9)))

    def slowest(self, seconds):
        return [2 * s for s in seconds]


def test_measuring_stops_where_collectives_take_long():
    fake = Fake()
    costs = cost.measure(fake, [get_compressor("topk:only_if_faster=true")])
    assert set(costs.collectives) == set(cost.COLLECTIVES) and set(costs.rates) == {"topk", "fp16"}
    for kind, points in costs.collectives.items():
        assert 1e6 < max(nbytes for k, nbytes in fake.calls if k == kind) < 8e6
        assert all(seconds == pytest.approx(2e-3 + nbytes * 2e-8) for nbytes, seconds in points)
        assert costs.collective(kind, 10**8) == pytest.approx(2.002, rel=1e-3)
    assert costs.rates["topk"] == cost.Rates(2e-9, 4e-9, 6e-9, pytest.approx(4096 * 12e-9))
    line = cost.describe(costs)
    assert "allreduce 2.0" in line and "400 Mbit/s" in line and "topk 2.00 + 4.00 ns an entry" in line


def test_auto_is_a_spec():
    assert get_compressor("auto").spec == "topk:only_if_faster=true"
    assert get_compressor("auto:onebit:block_size=1024").spec == "onebit:only_if_faster=true,block_size=1024"
    assert get_compressor(get_compressor("auto:adaptive").spec) == get_compressor("auto:adaptive")
    with pytest.raises(ValueError, match="there is no compressor 'nothing'"):
        get_compressor("auto:nothing")


@pytest.mark.parametrize("fits, kept", [
    ({}, {"residual", "owner.residual"}), ({"owned": (4096, 8192)}, {"residual"}), ({"piece": (4096, 8192)}, {"owner.residual"}),
    ({"piece": (4096, 8192), "owned": (4096, 8192)}, set()), ({"shape": (64, 64)}, set()),
    ({"name": "other"}, set())], ids=str)
def test_state_is_restored_where_it_is_of_the_same_entries(fits, kept, caplog):
    """A vector's length doesn't tell: which entries a worker has depends on the parameter's shape, and on its place among all."""
    def slot(piece=(0, 4096), owned=(0, 4096), name="w", shape=(4096,)):
        state = {"residual": np.ones(shape), "owner.residual": np.ones(4096)}
        return {name: SimpleNamespace(compressor=get_compressor("onebit"), state=state, step=3, piece=piece, owned=owned)}

    state = checkpoint.saved(slot(), np.copy, rank=1, world=2)
    ((_, step, values),) = checkpoint.restored(state, slot(**fits), rank=1, world=2)
    assert set(values) == kept and step == (0 if "name" in fits else 3)
    told = {record.getMessage().split()[2] for record in caplog.records if "starts at zero" in record.getMessage()}
    assert told == {"residual", "owner.residual"} - kept


# ------------------------------------------------------------------------------------------- another number of workers

def states_of(world, numel=4096, linear="residual", **more):
    """What each of so many workers has kept of a tensor, owners of ranges too, as random numbers."""
    rng, cuts = np.random.default_rng(world), np.linspace(0, numel, world + 1).astype(int).tolist()
    return [{"version": 1, "rank": rank, "world": world, "loss_scale": 1.0, "tensors": {"w": {
        "compressor": "onebit", "step": 7, "averaged": 3, "travels": "onebit:exchange=sra", "piece": [0, numel],
        "owned": cuts[rank:rank + 2], "state": {
            linear: rng.normal(size=numel).astype(np.float32), "velocity": rng.normal(size=numel).astype(np.float32),
            "owner.residual": rng.normal(size=cuts[rank + 1] - cuts[rank]).astype(np.float32), "q": np.arange(3.0),
            "mean": np.arange(numel, dtype=np.float32),
            "threshold": np.full(2, float(rank))}, **more}}} for rank in range(world)]


def reaches(states, average, linear="residual"):
    """What is still to reach the optimizer."""
    tensors = [state["tensors"]["w"] for state in states]
    total = np.sum([one["state"][linear] for one in tensors], 0, np.float64)
    for one in tensors:
        if "owner.residual" in one["state"]:
            total[slice(*one["owned"])] += (len(states) if linear == "residual" else -len(states)) * one["state"]["owner.residual"]
    return total / len(states) if average else total


@pytest.mark.parametrize("linear", ["residual", "estimate"])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("before, now", [(4, 2), (4, 8), (3, 1), (1, 3)])
def test_what_has_not_reached_the_optimizer_is_kept_by_another_number_of_workers(before, now, average, linear):
    states = states_of(before, linear=linear)
    shares = [checkpoint.of_this_worker(states[::-1], average, rank, now) for rank in range(now)]
    np.testing.assert_allclose(reaches(shares, average, linear), reaches(states, average, linear), rtol=0, atol=1e-5)
    for rank, share in enumerate(shares):
        one = share["tensors"]["w"]
        assert (share["rank"], share["world"], one["step"], one["averaged"], one["travels"]) == (rank, now, 7, 3, "none")
        assert one["state"].keys() == {linear, "velocity", "q", "mean"} | ({"threshold"} if before == 1 else set())
        # The reduced gradient that EF21 goes on from: a mean as it was, and as large a sum.
        np.testing.assert_allclose(one["state"]["mean"] * (1 if average else now / before), np.arange(4096), rtol=1e-6)
        np.testing.assert_allclose(one["state"]["velocity"] * (1 if average else now / before),
                                   np.mean([state["tensors"]["w"]["state"]["velocity"] for state in states], 0), atol=1e-6)


def test_shares_that_depend_on_what_is_not_known_are_refused():
    with pytest.raises(ValueError, match=r"2 workers take up of 4 .* averaged or summed: say load_state_dict\(states, op=hvd.Average\)"):
        checkpoint.of_this_worker(states_of(4), checkpoint.averaged(None), 0, 2)
    assert checkpoint.of_this_worker(states_of(4), None, 3, 4)["rank"] == 3
    assert [checkpoint.averaged(op) for op in (0, 1)] == [True, False]
    with pytest.raises(ValueError, match="op=2 is none whose state can be shared out: give hvd.Average or hvd.Sum"):
        checkpoint.averaged(2)


def test_as_many_workers_take_their_own_state():
    states = states_of(3)
    assert checkpoint.of_this_worker(states[::-1], True, 1, 3) is states[1] and checkpoint.of_this_worker(states[1], True, 1, 3) is states[1]


@pytest.mark.parametrize("change, sentence", [
    (lambda states: states[:3], "3 compression states are of the workers 0 of 4, 1 of 4, 2 of 4; give one of each"),
    (lambda states: [*states[:3], states[2]], "4 compression states are of the workers 0 of 4, 1 of 4, 2 of 4, 2 of 4; give"),
    (lambda states: [*states[:3], {**states[3], "rank": None}], "0 of 4, 1 of 4, 2 of 4, None of 4; give"),
    (lambda states: [*states[:3], [1, 2]], "a list of dict, list is not one of compression states; give what each worker saved"),
    (lambda states: [*states[:3], {**states[3], "tensors": {}}], "worker 3 is of other parameters than worker 0's"),
    (lambda states: [*states[:3], {**states[3], "tensors": None}], "the compression state is damaged"),
    (lambda states: [{**state, "tensors": {"w": {key: state["tensors"]["w"][key] for key in ("compressor", "step", "state")}}}
                     for state in states], "w doesn't say of which entries it is"),
    (lambda states: [*states[:3], states_of(4, piece=[0, 99])[3]], "the compression state of w is of hierarchical exchange")])
def test_states_that_cannot_be_shared_out(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        checkpoint.of_this_worker(change(states_of(4)), True, 0, 2)
