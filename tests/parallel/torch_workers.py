"""What the PyTorch tests on several workers share: a small model, its batches, and looks at the other workers."""

import pytest
import torch

import hvd_quant.torch as hvd

RANK, WORLD = hvd.rank(), hvd.size()
TOPK = "topk:ratio=0.1,min_numel=0"


def every(codecs):
    return pytest.mark.parametrize("compressor", codecs.values(), ids=list(codecs))


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 30))


def wrap(model, compression=TOPK, optimizer=None, **kwargs):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, **kwargs)


def backward(model, step, scale=1.0):
    """The gradients of a step: another batch on each worker, the same in every run."""
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + RANK))
    (((model(x) - x) ** 2).mean() * scale).backward()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_all(tensor):
    """The workers' values of a tensor, one row a worker."""
    # Horovod forgets what it has cached of a name when the size changes, which it doesn't always survive beside process sets.
    return hvd.allgather(tensor.detach().reshape(1, -1).contiguous(), name=f"on_all.{tensor.numel()}.{tensor.dtype}")


def assert_same_everywhere(tensor):
    rows = on_all(tensor)
    assert torch.equal(rows, rows[:1].expand_as(rows))
