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

# All hosts are this machine, by names that Horovod takes for local. The first has all workers that stay, the others have one.
STAYS, LEAVES, COMES = "127.0.0.1", "localhost", socket.gethostname()
TORCH = """
import torch
import hvd_quant.torch as hvd
from hvd_quant.torch.cargo import Cargo

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=spec)

def kept():
    slot = optimizer.compression_state_dict()["tensors"]["weight"]
    weights = torch.linspace(-1, 1, 10000, dtype=torch.float64)  # onebit's residuals add up to nearly 0
    residual, owned = (slot["state"].get(key, torch.zeros(0)).double() for key in ("residual", "owner.residual"))
    return {"residual": (residual @ weights).item(), "owned": (owned @ weights[slice(*slot["owned"])]).item(), "counted": slot["step"],
            "flying": len(optimizer._reducer._flying)}

def dies(step):
    if "exchange=sra" in spec:
        Cargo.reduce = lambda *_: os._exit(1)  # between the two collectives
    else:
        model.weight.register_hook(lambda _: os._exit(1))  # before it has sent all that the others wait for
    begin(step)
    end(step)

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
WITH_KERAS = """
import keras
import numpy as np
import tensorflow as tf
import hvd_quant.tensorflow as hvd

hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((100,)), keras.layers.Dense(100, use_bias=False)])

def kept():
    (slot,) = state_dict()["tensors"].values()
    return {"residual": slot["state"]["residual"].sum(dtype=float), "owned": 0, "counted": slot["step"], "flying": 0}

def dies(step):
    os._exit(1)  # the others' exchange waits for it

@tf.function
def train_on(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - x) ** 2)
    update(tape, loss)

def begin(step):
    pass

def end(step):
    train_on(tf.constant(np.random.default_rng([step, hvd.rank()]).normal(size=(16, 100)), tf.float32))

def total():
    own = model.get_weights()[0].sum(dtype=float)
    return own, float(hvd.allreduce(tf.constant(own, tf.float64), name="total"))
"""
KERAS = WITH_KERAS + """
from hvd_quant.keras import DistributedOptimizer
from hvd_quant.keras.elastic import KerasState as State

optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01), compression=spec)
optimizer.build(model.trainable_variables)
state_dict = optimizer.compression_state_dict

def update(tape, loss):
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
"""
TAPE = WITH_KERAS + """
from hvd_quant import get_compressor

State = hvd.elastic.TensorFlowKerasState
optimizer = keras.optimizers.SGD(0.01)
compression = get_compressor(spec).bind(model.trainable_variables)
state_dict = compression.state_dict

def update(tape, loss):
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
"""
ARGUMENTS = """
import json, os, socket, sys, time

folder, spec, alone, die_at, join_at, steps = *sys.argv[1:3], *map(int, sys.argv[3:])
host, place = os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]
"""
LOOP = """
def note(what, **more):
    with open(f"{folder}/log", "a") as file:
        file.write(json.dumps({"what": what, "host": host, "place": place, "size": hvd.size(), "step": state.step, **more}) + "\\n")

@hvd.elastic.run
def train(state):
    note("begins", **kept())
    while state.step < steps:
        if state.step == die_at and host == "localhost" and not os.path.exists(f"{folder}/died"):
            open(f"{folder}/died", "w").close()
            dies(state.step)
        begin(state.step)
        end(state.step)
        state.step += 1
        if state.step == join_at and hvd.size() == alone and hvd.rank() == 0:
            with open(f"{folder}/hosts", "a") as file:
                file.write(f"{socket.gethostname()}:1\\n")
        if state.step >= join_at and hvd.size() == alone:
            time.sleep(1)  # until the driver has found it
            state.step = join_at
        note("commits", **kept())
        state.commit()
    own, mean = total()
    note("ends", own=own, mean=mean, **kept())

state = State(model=model, optimizer=optimizer, step=0)
train(state)
"""


@pytest.mark.parametrize("framework, worker, stay, spec", [
    ("torch", TORCH, 1, "topk:ratio=0.01,min_numel=0,warmup=2"),
    ("torch", TORCH, 2, "onebit:min_numel=0,exchange=sra"),
    ("tensorflow", KERAS, 1, "topk:ratio=0.01,min_numel=0,warmup=2"),
    ("tensorflow", TAPE, 1, "topk:ratio=0.01,min_numel=0")], ids=["TorchState, 2-1-2", "TorchState, 3-2-3", "KerasState, 2-1-2", "TensorFlowKerasState, 2-1-2"])
def test_a_worker_dies_amid_an_exchange_and_another_joins(framework, worker, stay, spec, tmp_path):
    horovod = importlib.util.find_spec("horovod")
    if not horovod or not list(Path(horovod.origin).parent.glob(f"{framework}/mpi_lib*.so")):
        pytest.skip(f"Horovod is not built for {framework}")
    (tmp_path / "worker.py").write_text(ARGUMENTS + worker + LOOP)
    (tmp_path / "hosts").write_text(f"{STAYS}:{stay}\n{LEAVES}:1\n")
    (tmp_path / "discover").write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    (tmp_path / "discover").chmod(0o755)
    command = [str(HOROVODRUN), "-np", str(stay + 1), "--min-np", "1", "--max-np", "3", "--host-discovery-script",
               str(tmp_path / "discover"), "--gloo", sys.executable, str(tmp_path / "worker.py"), str(tmp_path), spec,
               *map(str, (stay, DIES, JOINS, STEPS))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()] if (tmp_path / "log").exists() else []
    assert run.returncode == 0 and (tmp_path / "died").exists(), f"{lines}\n{run.stdout[-6000:]}\n{run.stderr[-6000:]}"
    begins = [line for line in lines if line["what"] == "begins"]
    for place in map(str, range(stay)):
        survivor = [line for line in begins if (line["host"], line["place"]) == (STAYS, place)]
        assert [(line["size"], line["step"]) for line in survivor] == [(stay + 1, 0), (stay, DIES), (stay + 1, JOINS)]
        committed = {line["step"]: line for line in lines if (line["what"], line["host"], line["place"]) == ("commits", STAYS, place)}
        # It keeps what it had committed; of a range that it doesn't own any more, what the mean of as many workers now would lack.
        assert survivor[0]["residual"] == 0 != survivor[1]["residual"]
        for begun, workers, before in ((survivor[1], stay, committed[DIES]), (survivor[2], stay + 1, committed[JOINS])):
            assert begun["owned"] == 0
            parts = before["residual"], workers * before["owned"]
            assert begun["residual"] == pytest.approx(sum(parts), abs=1e-5 * sum(map(abs, parts)))
        if framework == "torch" and stay == 1:  # alone it leaves nothing out, so what was kept went along then
            assert survivor[2]["residual"] == 0
        assert stay == 1 or committed[DIES]["owned"] != 0 != committed[JOINS]["owned"]
    (newcomer,) = [line for line in begins if line["host"] == COMES]
    assert newcomer["residual"] == newcomer["owned"] == 0
    if worker is not TAPE:  # which nobody tells the others' count
        assert newcomer["counted"] == survivor[2]["counted"] >= JOINS
    ends = [line for line in lines if line["what"] == "ends"]
    assert [line["host"] for line in ends].count(STAYS) == stay and {line["host"] for line in ends} == {STAYS, COMES}
    assert all(line["own"] == pytest.approx(line["mean"], rel=1e-12) and line["flying"] == 0 for line in ends)
