"""Elastic jobs under horovodrun: a worker dies amid an exchange, another joins, and training goes on."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
DIES, JOINS, STEPS = 5, 12, 20

# Each host has one worker; all hosts are this machine, by names that Horovod takes for local.
STAYS, LEAVES, COMES = "127.0.0.1", "localhost", socket.gethostname()
WORKER = """
import json, os, socket, sys, time
import torch
import hvd_quant.torch as hvd

folder, dies, joins, steps = sys.argv[1], *map(int, sys.argv[2:])
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression="topk:ratio=0.01,min_numel=0,warmup=2")
host = os.environ["HOROVOD_HOSTNAME"]

def residual():
    return optimizer._reducer._slots["weight"].state["residual"]

def note(what, **more):
    with open(f"{folder}/log", "a") as file:
        file.write(json.dumps({"what": what, "host": host, "rank": hvd.rank(), "size": hvd.size(), "step": state.step, **more}) + "\\n")

@hvd.elastic.run
def train(state):
    note("begins", residual=residual().norm().item(), counted=optimizer._reducer._slots["weight"].step)
    while state.step < steps:
        optimizer.zero_grad()
        x = torch.randn(16, 100, generator=torch.Generator().manual_seed(1000 * state.step + hvd.rank()))
        ((model(x) - x) ** 2).mean().backward()
        if state.step == dies and host == "localhost" and not os.path.exists(f"{folder}/died"):
            open(f"{folder}/died", "w").close()
            note("dies")
            os._exit(1)  # its exchange has begun
        optimizer.step()
        state.step += 1
        if state.step == joins and hvd.size() == 1:
            with open(f"{folder}/hosts", "a") as file:
                file.write(f"{socket.gethostname()}:1\\n")
        if state.step >= joins and hvd.size() == 1:
            time.sleep(1)  # until the driver has found it
            state.step = joins
        state.commit()
    total = hvd.allreduce(model.weight.detach().double().sum(), name="total")
    note("ends", mean=total.item(), own=model.weight.detach().double().sum().item(), flying=len(optimizer._reducer._flying))

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
train(state)
"""


def test_a_worker_dies_amid_an_exchange_and_another_joins(tmp_path):
    horovod = importlib.util.find_spec("horovod")
    if not horovod or not list(Path(horovod.origin).parent.glob("torch/mpi_lib*.so")):
        pytest.skip("Horovod is not built for torch")
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "hosts").write_text(f"{STAYS}:1\n{LEAVES}:1\n")
    (tmp_path / "discover").write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    (tmp_path / "discover").chmod(0o755)
    command = [str(HOROVODRUN), "-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(tmp_path / "discover"),
               "--gloo", sys.executable, str(tmp_path / "worker.py"), str(tmp_path), str(DIES), str(JOINS), str(STEPS)]
    run = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()] if (tmp_path / "log").exists() else []
    assert run.returncode == 0, f"{lines}\n{run.stdout[-6000:]}\n{run.stderr[-6000:]}"
    begins = [line for line in lines if line["what"] == "begins"]
    assert [(line["size"], line["step"]) for line in begins if line["host"] == STAYS] == [(2, 0), (1, DIES), (2, JOINS)]
    survivor = [line for line in begins if line["host"] == STAYS]
    # It keeps what it had; alone it leaves nothing out, so that goes along then.
    assert survivor[0]["residual"] == survivor[2]["residual"] == 0 < survivor[1]["residual"]
    (newcomer,) = [line for line in begins if line["host"] == COMES]
    assert newcomer["residual"] == 0 and newcomer["counted"] == survivor[2]["counted"] >= JOINS  # and tells its count
    ends = [line for line in lines if line["what"] == "ends"]
    assert {line["host"] for line in ends} == {STAYS, COMES}
    assert all(line["own"] == line["mean"] and line["flying"] == 0 for line in ends)
