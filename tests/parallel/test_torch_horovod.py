"""Horovod's stock optimizer with our compressors, and Horovod's own API through our import."""

import dataclasses
import warnings

import horovod.torch as stock
import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import Compression
from tests.conftest import CODECS
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


@every(CODECS)
@pytest.mark.parametrize("how", [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 3.0}, {"groups": 2},
                                 {"backward_passes_per_step": 2}], ids=str)
def test_the_stock_optimizer_gives_the_same_numbers(compressor, how):
    if WORLD > 2 and compressor.name not in ("onebit", "qsgd", "topk"):
        pytest.skip("two workers tell as much")
    if WORLD > 2 and not compressor.linear:
        compressor = dataclasses.replace(compressor, exchange="sra")  # so that nothing is measured
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
    # Ours sums the tensors of a bucket in one vector, whose parts Horovod adds up from other workers on.
    same_sums = WORLD == 2 or not compressor.linear
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-6, atol=1e-6 if same_sums else 5e-5)
    if how.get("gradient_predivide_factor") is None and same_sums:
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


def test_averages_divide_by_the_size_of_the_process_set():
    """The workers outside keep their own gradients. All in one test, since Horovod is slow while there are process sets."""
    if WORLD < 4:
        pytest.skip("needs four workers")
    pair = hvd.add_process_set([1, 3])
    try:
        onebit = "onebit:min_numel=0,exchange="
        for compression in (onebit + "allgather", onebit + "sra", "fp16", "none", "bound"):
            weight = torch.nn.Parameter(torch.zeros(100, 60))
            sgd = torch.optim.SGD([weight], lr=1.0)
            if compression == "bound":
                bound = Compression.onebit(min_numel=0).bind([("w", weight)], pair)
                optimizer = stock.DistributedOptimizer(sgd, [("w", weight)], bound, process_set=pair)
                stats = bound.stats.as_dict
            else:
                optimizer = hvd.DistributedOptimizer(sgd, [("w", weight)], compression, process_set=pair)
                stats = optimizer.compression_stats
            weight.grad = torch.full((100, 60), RANK + 1.0)
            optimizer.step()
            assert (weight.grad == (3 if pair.included() else RANK + 1)).all(), (compression, weight.grad)
            assert torch.equal(weight.detach(), -weight.grad)
            assert bool(stats()["wire_bytes"]) == pair.included()
    finally:
        hvd.remove_process_set(pair)


@pytest.mark.parametrize("op, factor", [(stock.Average, 1), (stock.Sum, (WORLD + 2) / WORLD)])
def test_the_states_of_another_number_of_workers_are_shared_out_by_the_op_that_is_told(op, factor):
    bound = Compression.topk(min_numel=0).bind([("w", torch.nn.Parameter(torch.zeros(300)))])
    own, share = bound.state_dict(), lambda: bound.state_dict()["tensors"]["w"]["state"]["residual"]
    states = [{**own, "rank": rank, "world": WORLD + 2, "tensors": {"w": {**own["tensors"]["w"], "state": {
        "residual": torch.full((300,), 2.0 * rank)}}}} for rank in range(WORLD + 2)]
    with pytest.raises(ValueError, match="averaged or summed: say load_state_dict"):
        bound.load_state_dict(states)
    assert not share().any()
    bound.load_state_dict(states, op=op)
    torch.testing.assert_close(share(), torch.full((300,), float((WORLD + 1) * factor)))


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
    with pytest.raises(ValueError, match="bind was given no parameters"):
        Compression.onebit().bind([])
    with pytest.raises(ValueError, match="a PyTorch tensor or a TensorFlow tensor or variable is expected, not a builtins.int"):
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
        if name not in ("Compression", "DistributedOptimizer", "join", "optimizer") and not name.startswith("__"):
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


def test_join_is_refused_where_gradients_are_compressed(monkeypatch):
    monkeypatch.setattr("hvd_quant.torch.state._states", set())  # as if there had been no tests before
    optimizers = [wrap(network(), compression) for compression in ("none", {"*": "none"}, {"*": "onebit"})]  # all tensors are small
    assert hvd.join() in range(WORLD)
    model, twin = network(), network()
    optimizers += [wrap(each, TOPK + ",exchange=allgather") for each in (model, twin)]
    train(twin, optimizers[-1], range(3))
    for step in range(3):  # as if nobody had asked, amid exchanges and between them
        optimizers[-2].zero_grad()
        backward(model, step)
        with pytest.raises(ValueError, match=r"hvd.join\(\) can't be combined with compressed exchanges: give all workers the "
                           "same number"):
            hvd.join()
        optimizers[-2].step()
        assert optimizers[-2].compression_stats()["steps"] == step + 1
    assert torch.equal(flat(model), flat(twin))
