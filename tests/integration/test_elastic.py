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
SPEC = "topk:ratio=0.01,min_numel=0,warmup=2"
TORCH = f"""
import torch
import hvd_quant.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression="{SPEC}")

def kept():
    slot = optimizer._reducer.state.slots["weight"]
    return {{"residual": slot.state["residual"].double().sum().item(), "counted": slot.step, "flying": len(optimizer._reducer._flying)}}

def begin(step):
    optimizer.zero_grad()
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))
    ((model(x) - x) ** 2).mean().backward()

def end(step):
    optimizer.step()

def total():
    own = model.weight.detach().double().sum()
    return own.item(), hvd.allreduce(own, name="total").item()

State = hvd.elastic.TorchState
"""
KERAS = f"""
import keras
import numpy as np
import tensorflow as tf
import hvd_quant.keras as hvd

hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((100,)), keras.layers.Dense(100, use_bias=False)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="{SPEC}")
optimizer.build(model.trainable_variables)

def kept():
    (slot,) = optimizer.compression_state_dict()["tensors"].values()
    return {{"residual": slot["state"]["residual"].sum(dtype=float), "counted": slot["step"], "flying": 0}}

@tf.function
def train_on(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - x) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

def begin(step):  # the others' exchange waits for the worker that dies
    pass

def end(step):
    train_on(tf.constant(np.random.default_rng([step, hvd.rank()]).normal(size=(16, 100)), tf.float32))

def total():
    own = model.get_weights()[0].sum(dtype=float)
    return own, float(hvd.allreduce(tf.constant(own, tf.float64), name="total"))

State = hvd.elastic.KerasState
"""
WORKER = """
import json, os, socket, sys, time

folder, dies, joins, steps = sys.argv[1], *map(int, sys.argv[2:])
host = os.environ["HOROVOD_HOSTNAME"]

def note(what, **more):
    with open(f"{folder}/log", "a") as file:
        file.write(json.dumps({"what": what, "host": host, "rank": hvd.rank(), "size": hvd.size(), "step": state.step, **more}) + "\\n")

@hvd.elastic.run
def train(state):
    note("begins", **kept())
    while state.step < steps:
        begin(state.step)
        if state.step == dies and host == "localhost" and not os.path.exists(f"{folder}/died"):
            open(f"{folder}/died", "w").close()
            note("dies")
            os._exit(1)  # amid an exchange
        end(state.step)
        state.step += 1
        if state.step == joins and hvd.size() == 1:
            with open(f"{folder}/hosts", "a") as file:
                file.write(f"{socket.gethostname()}:1\\n")
        if state.step >= joins and hvd.size() == 1:
            time.sleep(1)  # until the driver has found it
            state.step = joins
        note("commits", **kept())
        state.commit()
    own, mean = total()
    note("ends", own=own, mean=mean, **kept())

state = State(model=model, optimizer=optimizer, step=0)
train(state)
"""


@pytest.mark.parametrize("framework, worker", [("torch", TORCH), ("tensorflow", KERAS)], ids=["TorchState", "KerasState"])
def test_a_worker_dies_amid_an_exchange_and_another_joins(framework, worker, tmp_path):
    horovod = importlib.util.find_spec("horovod")
    if not horovod or not list(Path(horovod.origin).parent.glob(f"{framework}/mpi_lib*.so")):
        pytest.skip(f"Horovod is not built for {framework}")
    (tmp_path / "worker.py").write_text(worker + WORKER)
    (tmp_path / "hosts").write_text(f"{STAYS}:1\n{LEAVES}:1\n")
    (tmp_path / "discover").write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    (tmp_path / "discover").chmod(0o755)
    command = [str(HOROVODRUN), "-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(tmp_path / "discover"),
               "--gloo", sys.executable, str(tmp_path / "worker.py"), str(tmp_path), str(DIES), str(JOINS), str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()] if (tmp_path / "log").exists() else []
    assert run.returncode == 0, f"{lines}\n{run.stdout[-6000:]}\n{run.stderr[-6000:]}"
    begins = [line for line in lines if line["what"] == "begins"]
    assert [(line["size"], line["step"]) for line in begins if line["host"] == STAYS] == [(2, 0), (1, DIES), (2, JOINS)]
    survivor = [line for line in begins if line["host"] == STAYS]
    committed = {line["step"]: line for line in lines if line["what"] == "commits" and line["host"] == STAYS}
    # It keeps what it had committed. In PyTorch, alone it leaves nothing out, so that goes along then.
    assert survivor[0]["residual"] == 0 != survivor[1]["residual"] == committed[DIES]["residual"]
    assert survivor[2]["residual"] == (0 if framework == "torch" else committed[DIES]["residual"])
    (newcomer,) = [line for line in begins if line["host"] == COMES]
    assert newcomer["residual"] == 0 and newcomer["counted"] == survivor[2]["counted"] >= JOINS  # and tells its count
    ends = [line for line in lines if line["what"] == "ends"]
    assert {line["host"] for line in ends} == {STAYS, COMES}
    assert all(line["own"] == line["mean"] and line["flying"] == 0 for line in ends)
