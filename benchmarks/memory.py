"""How much memory a compressor takes beside parameters and gradients, in PyTorch or TensorFlow on two workers.

    python benchmarks/memory.py                       # a table in Markdown
    python benchmarks/memory.py --framework tensorflow
    python benchmarks/memory.py --specs onebit topk --entries 33554432

For each compressor a worker wraps one parameter and takes some steps. *Kept* is what stays between steps; *peak* the most that a worker had
at any moment beyond parameter and gradient, Horovod's and the framework's buffers included, by the operating system's count. Both are
bytes for each byte of fp32 parameters. They are the same for many parameters, but for tensors that travel in one bucket.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

SPECS = ["none", "fp16", "bf16", "onebit", "onebit:exchange=sra", "signsgd", "threshold:tau=1", "adaptive", "adaptive:exchange=sra", "topk",
         "topk:exchange=sra", "topk:values=2bit", "blockwise8", "blockwise8:exchange=sra", "natural", "qsgd", "terngrad", "randomk", "powersgd",
         "topk:momentum=0.9", "topk:memory=ef21", "topk:memory=ef21,eta=0.5", "topk:merge=replace"]
STEPS = 4


def resident(what: str) -> int:
    """Bytes that the process has in memory now ("VmRSS"), or has had at most ("VmHWM")."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def settle() -> int:
    """Give back what is free, and forget the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def measure_torch(spec: str, entries: int, number: int) -> tuple[float, float]:
    """What is kept, and the peak, on this worker."""
    import torch

    import hvd_quant.torch as hvd

    columns = 1024
    p = torch.nn.Parameter(torch.zeros(entries // columns, columns))
    p.grad = torch.empty_like(p)
    for row in p.grad:
        row.normal_()
    before = settle()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), [(f"p{number}", p)], spec)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for row in p.grad:
            row.normal_()
        optimizer.synchronize()
    peak = resident("VmHWM") - before  # now: what follows makes copies
    states = optimizer.compression_state_dict()["tensors"].values()
    kept = sum(value.numel() * value.element_size() for state in states for value in state["state"].values())
    return kept / (4 * entries), peak / (4 * entries)


def measure_tensorflow(spec: str, entries: int, number: int) -> tuple[float, float]:
    """As :func:`measure_torch`, with a function as a tape's user makes it: the gradient is there while it is reduced."""
    import tensorflow as tf

    from hvd_quant.tensorflow.reducer import Reducer

    columns = 1024
    v, grad = (tf.Variable(tf.zeros([entries // columns, columns]), name=f"p{number}") for _ in range(2))
    before = settle()
    reducer = Reducer(spec, [v], name=f"memory{number}")

    @tf.function
    def step() -> None:
        with tf.control_dependencies(reducer.reduce([grad.read_value()], [v])):
            pass

    for _ in range(STEPS):
        for first in range(0, entries // columns, 256):
            rows = tf.range(first, min(first + 256, entries // columns))
            grad.scatter_nd_update(rows[:, None], tf.random.normal([rows.shape[0], columns]))
        step()
    peak = resident("VmHWM") - before  # now: what follows makes copies
    states = reducer.state_dict()["tensors"].values()
    kept = sum(value.nbytes for state in states for value in state["state"].values())
    return kept / (4 * entries), peak / (4 * entries)


def work(arguments: argparse.Namespace) -> None:
    hvd = importlib.import_module(f"hvd_quant.{arguments.framework}")
    measure = {"torch": measure_torch, "tensorflow": measure_tensorflow}[arguments.framework]
    hvd.init()
    measure("onebit", 2**20, -1)  # libraries and connections
    if hvd.rank() == 0:
        print("| compressor | kept | peak |\n|---|---:|---:|", flush=True)
    for number, spec in enumerate(arguments.specs):
        each = hvd.allgather_object(measure(spec, arguments.entries, number), name=f"measured.{number}")
        kept, peak = (sum(one) / len(each) for one in zip(*each))
        if hvd.rank() == 0:
            print(f"| `{spec}` | {kept:.2f} | {peak:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["torch", "tensorflow"], default="torch")
    parser.add_argument("--specs", nargs="+", default=SPECS, metavar="SPEC")
    parser.add_argument("--entries", type=int, default=2**24, help="of the parameter, a multiple of 1024 (16,777,216)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", "--gloo", sys.executable, __file__, "--worker", *sys.argv[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr[-4000:])
    print("\n".join(line.partition(">:")[2] for line in run.stdout.splitlines() if line.startswith("[0]<stdout>:|")))
    return None


if __name__ == "__main__":
    main()
