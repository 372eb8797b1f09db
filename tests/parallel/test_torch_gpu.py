"""Training on GPUs: gradients stay on their device, hooks don't make the host wait, replicas stay bit-identical."""

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
