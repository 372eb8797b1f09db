"""Training on GPUs: gradients stay on their device, hooks don't make the host wait, replicas stay bit-identical."""

import copy

import pytest
import torch

import hvd_quant.torch as hvd
from tests.conftest import CODECS

if not torch.cuda.is_available():
    pytest.skip("not run: this machine has no GPU that PyTorch can use", allow_module_level=True)


@pytest.mark.parametrize("compressor", CODECS.values(), ids=list(CODECS))
def test_training_on_gpus(compressor):
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 100)).cuda()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), compressor)
    torch.manual_seed(hvd.rank())
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = torch.randn(16, 100, device="cuda")
        loss = ((model(x) - x) ** 2).mean()
        torch.cuda.synchronize()
        if step > 2:  # caches are filled
            torch.cuda.set_sync_debug_mode("error")
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        assert all(p.grad.is_cuda for p in model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    rows = hvd.allgather(flat.reshape(1, -1), name="rows")
    assert torch.equal(rows[0], rows[1])


def test_horovods_sync_batch_norm_under_a_compressed_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), hvd.SyncBatchNorm(40), torch.nn.Linear(40, 30)).cuda()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                         "topk:ratio=0.1,min_numel=0")
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(16, 30, device="cuda")) ** 2).mean().backward()
        optimizer.step()
    state = torch.cat([t.detach().float().reshape(-1) for t in model.state_dict().values()])
    rows = hvd.allgather(state.reshape(1, -1), name="state")
    torch.testing.assert_close(rows[0], rows[1])


@pytest.mark.parametrize("compressor", ["topk:ratio=0.1,min_numel=0,exchange=sra", "powersgd:min_numel=0", "onebit:min_numel=0"])
def test_the_hook_for_ddp_gives_what_the_optimizer_gives(compressor, tmp_path_factory):
    """On NCCL, where each worker has a GPU of its own, and on Gloo."""
    dist, several = torch.distributed, torch.cuda.device_count() >= hvd.size()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    for backend in ["gloo"] + ["nccl"] * several:
        store = hvd.broadcast_object(str(tmp_path_factory.mktemp("torch_distributed") / "store"), name="store")
        dist.init_process_group(backend, init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size())
        try:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 100)).cuda()
            other = copy.deepcopy(model)
            ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
            ddp.register_comm_hook(None, hvd.ddp_comm_hook(compressor, ddp))
            plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
            sgd = torch.optim.SGD(other.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(sgd, other.named_parameters(), compressor)
            torch.manual_seed(hvd.rank())
            for _ in range(4):
                x = torch.randn(16, 100, device="cuda")
                for net, by in ((ddp, plain), (other, optimizer)):
                    by.zero_grad()
                    ((net(x) - x) ** 2).mean().backward()
                    by.step()
            for p, q in zip(model.parameters(), other.parameters()):
                torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
        finally:
            dist.destroy_process_group()
