"""A job of which a worker dies or stalls amid an exchange ends soon, as with plain Horovod; where it only sleeps, all go on."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
SOON = 30  # seconds

TRAINING = """
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), **how)
for step in range(1000):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 100)).square().mean()
    if step == 3:
        before_backward()
    loss.backward()
    optimizer.step()
"""

DIES = """
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
how, before_backward = {"compression": "onebit:exchange=sra"}, lambda: None
""" + TRAINING

STALLS = """
import sys, time
import torch
if len(sys.argv) > 2:
    import hvd_quant.torch as hvd
else:
    import horovod.torch as hvd

def before_backward():
    if hvd.rank() == 1:
        with open(sys.argv[1], "w") as file:
            file.write(str(time.time()))
        time.sleep(1000)

how = {"compression": sys.argv[2]} if len(sys.argv) > 2 else {}
""" + TRAINING


SLEEPS = {"torch": """
import hashlib, time
import torch
import hvd_quant.torch as hvd
from hvd_quant.torch.cargo import Cargo

hvd.init()
reduce = Cargo.reduce

def trained(seconds):
    def sleeps(cargo, arrived):
        if hvd.rank() == 1 and cargo.info.step == 3:
            time.sleep(seconds)  # between the two collectives of an exchange
        return reduce(cargo, arrived)

    Cargo.reduce = sleeps
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression="onebit:exchange=sra")
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(16, 100, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        ((model(x) - x) ** 2).mean().backward()
        optimizer.step()
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())
""", "tensorflow": """
import hashlib, time
import numpy as np
import tensorflow as tf
import hvd_quant.tensorflow as hvd

hvd.init()

def trained(seconds):
    weight = tf.Variable(tf.zeros((100, 100)), name="weight")
    state = hvd.Compression.onebit(exchange="sra").bind([weight])

    @tf.function
    def train_on(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weight - x) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=state)
        weight.assign_sub(tape.gradient(loss, [weight])[0])

    for step in range(6):
        if hvd.rank() == 1 and step == 3:
            time.sleep(seconds)
        train_on(tf.constant(np.random.default_rng(10 * step + hvd.rank()).normal(size=(16, 100)).astype(np.float32)))
    return weight.numpy().tobytes()
"""}
HASHES = """
print("hashes:", *(hashlib.sha256(trained(seconds)).hexdigest() for seconds in (4, 0)), flush=True)
"""


def job(script, folder, *arguments, framework="torch", **environment):
    """A job of two workers that has ended."""
    horovod = importlib.util.find_spec("horovod")
    if not horovod or not list(Path(horovod.origin).parent.glob(f"{framework}/mpi_lib*.so")):
        pytest.skip(f"Horovod is not built for {framework}")
    (folder / "worker.py").write_text(script)
    command = [str(HOROVODRUN), "-np", "2", "--gloo", sys.executable, str(folder / "worker.py"), str(folder / "happened"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def launch(script, folder, *arguments, **environment):
    """What a job of two workers said, and after how many seconds since the event that it notes."""
    run = job(script, folder, *arguments, **environment)
    ended, said = time.time(), f"{run.stdout}\n{run.stderr}"
    assert (folder / "happened").exists() and run.returncode != 0, said
    return said, ended - float((folder / "happened").read_text())


def test_a_worker_that_dies_amid_an_exchange_ends_the_job(tmp_path):
    said, seconds = launch(DIES, tmp_path)
    assert seconds < SOON, said


@pytest.mark.parametrize("compression", [[], ["onebit:exchange=sra"]], ids=["plain Horovod", "compressed"])
def test_a_worker_that_stalls_is_named_and_ends_the_job_where_horovod_is_told_to(compression, tmp_path):
    """Over Gloo Horovod 0.28.1 as released does neither; hvd-quant build-horovod mends that."""
    said, seconds = launch(STALLS, tmp_path, *compression, HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3")
    assert "are waiting for remainder of ranks for more than 1 seconds" in said and "1!: [" in said, said
    assert seconds < SOON, said


@pytest.mark.parametrize("framework", SLEEPS)
def test_a_worker_that_sleeps_past_the_limit_is_named_and_waited_for(framework, tmp_path):
    """All end with the bits of a training in which nobody sleeps."""
    run = job(SLEEPS[framework] + HASHES, tmp_path, framework=framework, HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    said = f"{run.stdout}\n{run.stderr}"
    assert run.returncode == 0, said
    assert "are waiting for remainder of ranks for more than 1 seconds" in said and "1: [" in said, said
    hashes = re.findall(r"hashes: (\w{64}) (\w{64})", said)
    assert len(hashes) == 2 and len({one for pair in hashes for one in pair}) == 1, said
