"""Sparse gradients: compressed by row, with error feedback by row, or dense where that is smaller."""

import warnings

import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import get_compressor, wire
from hvd_quant.compressors import OneBit
from hvd_quant.exchange import cost
from hvd_quant.exchange.rows import Table
from hvd_quant.torch import network
from hvd_quant.torch.rows import SparseCargo
from tests.parallel.sparse_in_numpy import CODES, ROWS, WIDTH, Workers, given, of_all_rows
from tests.parallel.torch_workers import RANK, WORLD, assert_same_everywhere, every, flat

ONEBIT = "onebit:min_numel=0,exchange=allgather"


def optimizer_of(compression, dtype=torch.float32, shape=(ROWS, WIDTH), **kwargs):
    p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    return p, hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], compression, **kwargs)


def step(p, optimizer, gradient):
    indices, values = (torch.as_tensor(x) for x in gradient)
    lead = p.shape[:-1]
    indices = indices[None] if len(lead) == 1 else torch.stack([indices // lead[1], indices % lead[1]])
    p.grad = torch.sparse_coo_tensor(indices, values.to(p.dtype), p.shape, check_invariants=True)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert p.grad.is_sparse and p.grad.dtype == p.dtype and p.grad.sparse_dim() == len(lead)
    return p.grad.to_dense()


def residual(optimizer):
    return optimizer.compression_state_dict()["tensors"]["p"]["state"]["residual"].view(ROWS, WIDTH)


def close(found, expected, atol=1e-5):
    torch.testing.assert_close(found.float(), torch.as_tensor(expected), rtol=1e-5, atol=atol)


@every(CODES)
def test_rows_are_compressed_as_numpy_does_it(compressor):
    op = hvd.Sum if compressor.name == "onebit" else hvd.Average
    p, optimizer = optimizer_of(compressor, op=op)
    workers = Workers(compressor, "p", WORLD)
    for i in range(4):
        expected = workers.reduce([given(i, rank) for rank in range(WORLD)], i) / (WORLD if op == hvd.Average else 1)
        grad = step(p, optimizer, given(i, RANK))
        close(grad, expected)
        assert_same_everywhere(grad)
    if compressor.memory == "error_feedback":
        close(residual(optimizer), workers.kept[RANK])
    stats = optimizer.compression_stats()
    assert stats["exchanges"] == {"sparse": ["p"]} and stats["wire_bytes"] == workers.wire_bytes[RANK]


@pytest.mark.parametrize("spec, kind", [(ONEBIT, "allgather"), ("onebit:min_numel=0,exchange=sra", "sra"), ("fp16", "allreduce")])
def test_more_rows_than_a_dense_gradient_is_worth_travel_dense(spec, kind):
    compressor = get_compressor(spec)
    p, optimizer = optimizer_of(compressor)
    workers = Workers(compressor, "p", WORLD)
    for i in (0, 1, 2):
        gradients = [of_all_rows(i, rank) if i == 1 else given(i, rank) for rank in range(WORLD)]
        sent = optimizer.compression_stats()["wire_bytes"]
        expected = workers.reduce(gradients, i, dense=i == 1) / WORLD
        grad = step(p, optimizer, gradients[RANK])
        stats = optimizer.compression_stats()
        assert stats["exchanges"] == {kind if i == 1 else "sparse": ["p"]}
        assert_same_everywhere(grad)
        if i != 1 or kind != "sra":  # what an owner keeps is not in there
            close(grad, expected, atol=4e-3 if kind == "allreduce" else 1e-5)
        if kind == "allgather":
            payload = compressor.payload_bytes(workers.info)
            counted = workers.wire_bytes[RANK] + ((8 + payload) * (WORLD - 1) if i else 0)
            assert stats["wire_bytes"] == counted
            close(residual(optimizer), workers.kept[RANK])
        assert stats["wire_bytes"] > sent


pack = Table.pack


def flipped(payload):
    payload[40] ^= 4
    return payload


DAMAGE = {
    "unsorted": (lambda self, rows: pack(self, rows.flip(0)), "its rows don't ascend"),
    "twice": (lambda self, rows: pack(self, rows[:1].expand(len(rows))), "its rows don't ascend"),
    "outside": (lambda self, rows: pack(self, rows + ROWS), f"the tensor has {ROWS}"),
    "negative": (lambda self, rows: pack(self, rows - ROWS), f"the tensor has {ROWS}"),
    "fewer": (lambda self, rows: pack(self, rows[1:]), "entries, expected"),
    "flipped": (lambda self, rows: flipped(pack(self, rows)), "checksum"),
}


@pytest.mark.parametrize("how", [*DAMAGE, "encode", "merge", "count"])
def test_damage_and_failures_are_told_by_all_and_nothing_has_changed(how, monkeypatch):
    p, optimizer = optimizer_of(ONEBIT)
    step(p, optimizer, given(0, RANK))
    before, weights = residual(optimizer), p.detach().clone()
    merge = SparseCargo.merge

    def fails(*arguments):
        raise MemoryError("no room")

    def lies(self):
        merge(self)
        self.counted = ROWS + 1

    sentence = f"worker {WORLD - 1} failed to encode its gradient: MemoryError: no room"
    with monkeypatch.context() as patch:
        if RANK != WORLD - 1:
            pass
        elif how == "encode":
            patch.setattr(OneBit, "encode", fails)
        elif how == "merge":
            patch.setattr(Table, "require", fails)
        elif how == "count":
            patch.setattr(SparseCargo, "merge", lies)
        else:
            patch.setattr(Table, "pack", DAMAGE[how][0])
        with pytest.raises(wire.PayloadError) as caught:
            step(p, optimizer, given(1, RANK))
    told = {"count": f"worker {WORLD - 1} says that its gradient has {ROWS + 1} rows"}.get(how, DAMAGE.get(how, (None, sentence))[1])
    assert str(caught.value).startswith("p: ") and told in str(caught.value)
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1
    assert torch.equal(residual(optimizer), before) and torch.equal(p, weights)
    assert_same_everywhere(step(p, optimizer, given(1, RANK)))


def test_a_gradient_that_is_not_finite_makes_all_rows_nan_and_leaves_no_trace():
    p, optimizer = optimizer_of(ONEBIT)
    step(p, optimizer, given(0, RANK))
    before, (indices, values) = residual(optimizer), given(2, RANK)
    if len(indices):
        values[0, 3] = float("inf")
    grad = step(p, optimizer, (indices, values))
    touched = sorted({row for rank in range(WORLD) for row in given(2, rank)[0]})
    assert grad[touched].isnan().all() and grad.isnan().sum() == len(touched) * WIDTH
    assert torch.equal(residual(optimizer), before) and optimizer.compression_stats()["void_tensors"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compression", [ONEBIT, f"{ONEBIT},warmup=9"], ids=["compressed", "plain"])
def test_other_types_and_rows_of_two_indices(compression, dtype):
    p, optimizer = optimizer_of(compression)
    q, other = optimizer_of(compression, dtype, (40, ROWS // 40, WIDTH))
    for i in range(2):
        indices, values = given(i, RANK)
        rounded = indices, torch.as_tensor(values).to(dtype).float()
        expected, grad = step(p, optimizer, rounded), step(q, other, rounded).view(ROWS, WIDTH)
        close(grad, expected, atol=1e-5 if dtype in (torch.float32, torch.float64) else 0.05)
        assert_same_everywhere(grad.float())


@pytest.mark.parametrize("n", [0, 1])
def test_rows_of_one_worker_and_of_none(n):
    p, optimizer = optimizer_of(ONEBIT)
    for _ in range(2):
        grad = step(p, optimizer, ([7] * n, torch.ones(n, WIDTH)) if RANK == WORLD - 1 else ([], torch.zeros(0, WIDTH)))
        close(grad[7], torch.full((WIDTH,), n / WORLD))
        assert grad.count_nonzero() == n * WIDTH and len(p.grad.coalesce().indices()[0]) == n


def test_steps_of_a_warm_up_go_as_they_are_and_leave_nothing():
    p, optimizer = optimizer_of(f"{ONEBIT},warmup=2")
    for i in range(3):
        grad, exact = step(p, optimizer, given(i, RANK)), torch.zeros(ROWS, WIDTH)
        for rank in range(WORLD):
            indices, values = given(i, rank)
            exact.index_add_(0, torch.as_tensor(indices), torch.as_tensor(values) / WORLD)
        assert torch.allclose(grad, exact, atol=1e-5) == (i < 2) and bool(residual(optimizer).any()) == (i == 2 and RANK % 4 != 3)


def test_what_another_code_has_kept_of_rows_goes_along():
    p, optimizer = optimizer_of(ONEBIT)
    slot = optimizer._reducer.state.slots["p"]
    slot.state["residual"].fill_(0.5)
    slot.travels = get_compressor("fp16")
    grad, kept = step(p, optimizer, ([RANK], torch.ones(1, WIDTH))), residual(optimizer)
    close(grad[:WORLD], torch.full((WORLD, WIDTH), 1.5 / WORLD))
    assert not grad[WORLD:].any() and not kept[RANK].any() and kept.count_nonzero() == (ROWS - 1) * WIDTH


@pytest.mark.parametrize("spec", ["powersgd:min_numel=0", "randomk:min_numel=0"])
def test_codes_of_whole_tensors_are_not_used_which_is_warned_about_once(spec):
    p, optimizer = optimizer_of(spec)
    with pytest.warns(UserWarning, match="the gradient of p is sparse and is exchanged uncompressed, since"):
        step(p, optimizer, given(0, RANK))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(p, optimizer, given(1, RANK))
    assert optimizer.compression_stats()["exchanges"] == {"sparse": ["p"]}


@pytest.mark.parametrize("knobs", ["momentum=0.5", "memory=ef21", "merge=sum"])
def test_what_goes_on_in_all_rows_needs_a_dense_gradient(knobs):
    spec = f"topk:ratio=0.1,min_numel=0,exchange=allgather,{knobs}"
    (p, optimizer), (q, as_dense) = optimizer_of(spec), optimizer_of(spec, sparse_as_dense=True)
    for i in range(3):
        assert torch.equal(step(p, optimizer, given(i, RANK)), step(q, as_dense, given(i, RANK)))
    assert "sparse" not in optimizer.compression_stats()["exchanges"]


def test_a_process_set():
    members = [0] if WORLD == 2 else [0, 3]
    some = hvd.add_process_set(members)
    try:
        p, optimizer = optimizer_of(ONEBIT, process_set=some)
        for i in range(2):
            step(p, optimizer, given(i, RANK))
        if RANK in members:
            kinds = optimizer.compression_stats()["exchanges"]
            rows = hvd.allgather(p.detach().view(1, -1), name="of_the_set", process_set=some)
            assert kinds == {"sparse": ["p"]} and torch.equal(rows[0], rows[-1])
    finally:
        hvd.remove_process_set(some)


def test_a_gradient_that_is_changed_after_backward_is_refused():
    model = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), ONEBIT)
    model(torch.tensor([1, 2])).sum().backward()
    model.weight.grad.mul_(2)
    with pytest.raises(RuntimeError, match="was modified"):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_replicas_of_a_model_with_a_table_stay_identical(kind):
    torch.manual_seed(0)
    table = torch.nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
    model = torch.nn.Sequential(table, torch.nn.Linear(WIDTH, 4)) if kind is torch.optim.SGD else table
    optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.05), model.named_parameters(), ONEBIT,
                                         backward_passes_per_step=2)
    target, losses = torch.randn(ROWS, model(torch.zeros(1, 1, dtype=torch.int64)).shape[1]), []
    for i in range(10):
        optimizer.zero_grad()
        for j in range(2):
            words = torch.randint(60, (32, 1), generator=torch.Generator().manual_seed(100 * i + 10 * RANK + j))
            loss = ((model(words) - target[words[:, 0]]) ** 2).mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same_everywhere(flat(model))
    assert losses[-1] < 0.95 * losses[0] and "sparse" in optimizer.compression_stats()["exchanges"]


def test_a_first_step_of_sparse_gradients_alone_leaves_nothing_to_rehearse(monkeypatch):
    monkeypatch.setattr(network, "costs", lambda workers, compressors, device: cost.typical(WORLD))
    monkeypatch.setattr(cost, "worth_a_trial", lambda *arguments: ["allgather", "sra"])
    p, optimizer = optimizer_of("onebit:min_numel=0,only_if_faster=true")
    for i in range(2):
        assert_same_everywhere(step(p, optimizer, given(i, RANK)))
    assert optimizer.compression_stats()["exchanges"] == {"sparse": ["p"]}
