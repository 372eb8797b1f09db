"""Horovod fuses collectives that happen to be ready at the same time: what comes out doesn't depend on that."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
SPECS = ["none", "fp16", "onebit:exchange=sra", "topk:ratio=0.1", "powersgd", "randomk", "qsgd"]
TORCH = """
import hashlib, sys
import torch
import hvd_quant.torch as hvd

hvd.init()
for spec in sys.argv[1:]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(80, 80) for _ in range(6)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), spec)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(16, 80, generator=torch.Generator().manual_seed(2 * step + hvd.rank()))).square().mean().backward()
        optimizer.step()
    print(spec, hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(), flush=True)
"""
TENSORFLOW = """
import hashlib, sys
import numpy as np
import tensorflow as tf
import hvd_quant.tensorflow as hvd

hvd.init()
for spec in sys.argv[1:]:
    weights = [tf.Variable(tf.random.stateless_normal((80, 80), (i, 0)), name=f"w{i}") for i in range(6)]
    for step in range(10):
        x = tf.random.stateless_normal((16, 80), (step, hvd.rank()))
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=spec) as tape:
            y = x
            for w in weights:
                y = tf.tanh(y @ w)
            loss = tf.reduce_mean(y ** 2)
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)
    print(spec, hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest(), flush=True)
"""


@pytest.mark.parametrize("framework, script", [("torch", TORCH), ("tensorflow", TENSORFLOW)], ids=["torch", "tensorflow"])
def test_fusion_changes_no_bit(framework, script, tmp_path):
    """Of two workers: among more, fp32 sums of dense gradients depend on what Horovod adds up together."""
    horovod = importlib.util.find_spec("horovod")
    if not horovod or not list(Path(horovod.origin).parent.glob(f"{framework}/mpi_lib*.so")):
        pytest.skip(f"Horovod is not built for {framework}")
    (tmp_path / "worker.py").write_text(script)
    found = []
    for threshold in ({}, {"HOROVOD_FUSION_THRESHOLD": "0"}):
        command = [str(HOROVODRUN), "-np", "2", "--gloo", sys.executable, str(tmp_path / "worker.py"), *SPECS]
        environment = {**os.environ, **threshold, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        found.append({line.partition(">:")[2] for line in run.stdout.splitlines() if ">:" in line})
    assert found[0] == found[1] and len(found[0]) == len(SPECS)  # the same on both workers too
