"""The PyTorch frontend in one process: imports that can't work say why, and world size 1 needs no launcher."""

import subprocess
import sys

import pytest

BLOCK = """
import importlib.util, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == {blocked!r} or name.startswith({blocked!r} + "."):
            if {blocked!r} == "hvd_quant._torch_ops":
                return None
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Blocker())
if {blocked!r} == "hvd_quant._torch_ops":
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == {blocked!r} else find(name, *a)
import hvd_quant.torch
"""


@pytest.mark.parametrize("blocked, sentence", [
    ("torch", "ImportError: hvd_quant.torch needs PyTorch: pip install torch"),
    ("horovod", "ImportError: hvd_quant.torch needs Horovod built for this PyTorch; this command builds it: hvd-quant build-horovod"),
    ("hvd_quant._torch_ops", "pip install --no-build-isolation"),
])
def test_a_missing_piece_is_named_with_the_command_that_brings_it(blocked, sentence):
    pytest.importorskip("horovod.torch", reason="Horovod is not built for PyTorch")
    run = subprocess.run([sys.executable, "-c", BLOCK.format(blocked=blocked)], capture_output=True, text=True)
    assert run.returncode == 1
    assert sentence in run.stderr.strip().splitlines()[-1]


def test_one_worker_without_a_launcher():
    torch = pytest.importorskip("torch")
    hvd = pytest.importorskip("hvd_quant.torch", reason="Horovod is not built for PyTorch")
    hvd.init()
    assert hvd.size() == 1
    momentum = {"topk:min_numel=0,momentum=0.9": {"momentum": 0.9}, "none:momentum=0.9": {"momentum": 0.9},
                "onebit:momentum=0.9,nesterov=true": {"momentum": 0.9, "nesterov": True}}
    average = {f"onebit:memory=ef21,eta=0.25,min_numel={n}": {"momentum": 0.75, "dampening": 0.75} for n in (0, 1000)}
    momentum |= average  # SGD's momentum with as much dampening, whose first step has none, is a moving average
    for compression in ("none", "fp16", "topk:min_numel=0", "topk:merge=replace", "onebit:memory=ef21", *momentum, {"*": "onebit"}):
        torch.manual_seed(0)
        model, plain = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
        plain.load_state_dict(model.state_dict())
        model.bias.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression)
        moved = momentum.get(compression, {}) if isinstance(compression, str) else {}  # momentum correction is part of training
        reference = torch.optim.SGD(plain.parameters(), lr=0.1, **moved)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for step in range(4):
            for m, opt in ((model, optimizer), (plain, reference)):
                m.bias.requires_grad_(step > 0)
                opt.zero_grad()
                (m(torch.ones(2, 20)) ** 2).sum().backward()
                opt.step()
        for p, expected in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p, expected, rtol=1e-5 if moved else 0, atol=1e-6 if moved else 0)
        optimizer.average_parameters()
        stats = optimizer.compression_stats()
        assert stats["wire_bytes"] == 0 and stats["compression_ratio"] is None
        optimizer.load_compression_state_dict(optimizer.compression_state_dict())
        before, scaler = model.weight.detach().clone(), hvd.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(2, 20)) ** 2).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(model.weight, before) == (factor != 1)
        assert scaler.get_scale() == 8


def test_one_worker_can_call_everything_and_sends_nothing(monkeypatch):
    torch = pytest.importorskip("torch")
    hvd = pytest.importorskip("hvd_quant.torch", reason="Horovod is not built for PyTorch")
    import horovod.torch as stock

    hvd.init()
    for name in ("mpi_ops.allreduce_async_", "mpi_ops.allgather_async", "mpi_ops.alltoall_async", "optimizer.allreduce_async_",
                 "optimizer.grouped_allreduce_async_", "optimizer.sparse_allreduce_async"):
        monkeypatch.delattr(f"horovod.torch.{name}")

    def ours(sgd, model):
        return hvd.DistributedOptimizer(sgd, model.named_parameters(), "topk:min_numel=0")

    def bound(sgd, model):
        compression = hvd.Compression.topk(min_numel=0).bind(model.named_parameters())
        return stock.DistributedOptimizer(sgd, model.named_parameters(), compression)

    for make in (ours, bound):
        for sparse in (False, True):
            model, plain = (torch.nn.Embedding(20, 30, sparse=sparse) for _ in range(2))
            plain.load_state_dict(model.state_dict())
            optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1), model)
            reference = torch.optim.SGD(plain.parameters(), lr=0.1)
            for step in range(3):
                for m, opt in ((model, optimizer), (plain, reference)):
                    opt.zero_grad()
                    (m(torch.tensor([step, step, 7])) ** 2).sum().backward()
                    assert m.weight.grad.is_sparse == sparse
                optimizer.synchronize()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
                reference.step()
            assert torch.equal(model.weight, plain.weight)
            assert hvd.join() == 0
    alone, grad = hvd.Compression.topk(min_numel=0).bind(model.named_parameters()), model.weight.grad
    assert alone.decompress(*alone.compress(grad)) is grad and alone.stats.as_dict()["wire_bytes"] == 0
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    momentum = hvd.DistributedOptimizer(sgd, model.named_parameters(), "topk:momentum=0.9")
    assert hvd.join() == 0 and momentum.compression_stats()["wire_bytes"] == 0


def test_a_hook_for_ddp_asks_horovod_for_nothing(monkeypatch):
    torch = pytest.importorskip("torch")
    hvd = pytest.importorskip("hvd_quant.torch", reason="Horovod is not built for PyTorch")
    for name in ("rank", "size", "mpi_enabled", "allreduce_async_", "allgather", "allgather_async", "alltoall_async", "broadcast_"):
        monkeypatch.delattr(f"horovod.torch.mpi_ops.{name}")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, plain = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
        plain.load_state_dict(model.state_dict())
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        hook = hvd.ddp_comm_hook("topk:min_numel=0,momentum=0.9", ddp)
        ddp.register_comm_hook(None, hook)
        for m, how in ((ddp, {}), (plain, {"momentum": 0.9})):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1, **how)
            for _ in range(3):
                optimizer.zero_grad()
                (m(torch.ones(2, 20)) ** 2).sum().backward()
                optimizer.step()
        torch.testing.assert_close(model.weight, plain.weight, rtol=1e-5, atol=1e-6)
        assert hook.compression_stats()["steps"] == 3
        hook.load_compression_state_dict(hook.compression_state_dict())
    finally:
        torch.distributed.destroy_process_group()
