"""A job of which a worker dies amid an exchange ends soon, as one with plain Horovod does."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
SOON = 30  # seconds

WORKER = """
import os, sys, time
import torch
import hvd_quant.torch as hvd
from hvd_quant.torch.cargo import Cargo

reduce = Cargo.reduce

def dies(cargo, arrived):
    if hvd.rank() == 1 and cargo.info.step == 3:
        with open(sys.argv[1], "w") as file:
            file.write(str(time.time()))
        os._exit(7)  # between the two collectives of an exchange: the other worker waits for the second
    return reduce(cargo, arrived)

Cargo.reduce = dies
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), "onebit:exchange=sra")
for step in range(1000):
    optimizer.zero_grad()
    model(torch.randn(16, 100)).square().mean().backward()
    optimizer.step()
"""


def test_a_worker_that_dies_amid_an_exchange_ends_the_job(tmp_path):
    horovod = importlib.util.find_spec("horovod")
    if not horovod or not list(Path(horovod.origin).parent.glob("torch/mpi_lib*.so")):
        pytest.skip("Horovod is not built for torch")
    (tmp_path / "worker.py").write_text(WORKER)
    command = [str(HOROVODRUN), "-np", "2", "--gloo", sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "died")]
    run = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200)
    ended = time.time()
    assert (tmp_path / "died").exists(), f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    assert run.returncode != 0 and ended - float((tmp_path / "died").read_text()) < SOON
