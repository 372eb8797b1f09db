"""The PyTorch code of README.md and docs runs on all workers."""

import shutil
import tempfile

import pytest
import torch

import hvd_quant.torch as hvd
from hvd_quant import registry
from tests import docs
from tests.parallel.torch_workers import RANK


@pytest.fixture
def folder(monkeypatch):
    """One for the files of all workers, which leave it, and the registry, as they were."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    path = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else "", root_rank=0, name="folder")
    with monkeypatch.context() as inside:
        inside.chdir(path)
        yield
    hvd.barrier()
    if RANK == 0:
        shutil.rmtree(path)


def prepare(code, names):
    """A block that distributes an optimizer gets one that isn't yet."""
    if "Optimizer(\n" in code or "Optimizer(optimizer" in code or "model" not in names:
        torch.manual_seed(0)
        names["model"] = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    if "optimizer.average_parameters()" in code:
        names["optimizer"] = hvd.DistributedOptimizer(names["optimizer"], names["model"].named_parameters())
    if "set_loss_scale" in code:
        names["scaler"] = torch.amp.GradScaler("cpu")
    if "range(4)" in code:  # what four workers would have left
        state = torch.load(f"compression-{RANK}.pt")
        hvd.barrier()
        for rank in range(RANK, 4, hvd.size()):
            torch.save({**state, "rank": rank, "world": 4}, f"compression-{rank}.pt")
        hvd.barrier()
    names["loss"] = names["loss_of"](names["model"](names["x"]), names["y"])
    return code if torch.cuda.is_available() else code.replace('"cuda"', '"cpu"')


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", docs.pages("torch"), ids=docs.name_of)
def test_a_page(page, folder):
    x, y = torch.rand(16, 784, generator=torch.Generator().manual_seed(RANK)), torch.arange(16) % 10
    names = {"torch": torch, "hvd": hvd, "x": x, "y": y, "loader": [(x, y)] * 2, "steps": 2,
             "loss_of": torch.nn.functional.cross_entropy}
    with docs.fake_ray():
        docs.run(page, ("torch",), names, prepare, hvd.barrier)
