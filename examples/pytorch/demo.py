"""What ``make demo`` runs: real MNIST on two workers, with dense and with compressed gradients, beside each other.

Where this machine lets it, the workers are on two hosts made of network namespaces, with a link of 1 Gb/s between them.

    python examples/pytorch/demo.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import cluster  # noqa: E402
from common import results  # noqa: E402
from common.datasets import DatasetError, prepare  # noqa: E402

EXAMPLE = Path(__file__).with_name("pytorch_mnist.py")
OUTPUT = Path("results", "demo")
COMPRESSIONS = ("none", "topk:ratio=0.01")
EPOCHS = 3
RATE = "1gbit"
_TAG = re.compile(rb"\[(1,)?\d+\]<std(out|err)>:")


def command(slow_link: bool) -> list[str]:
    """One job for all compressors: starting Horovod takes as long as some of the training."""
    training = [sys.executable, str(EXAMPLE), "--model=mlp", f"--epochs={EPOCHS}", f"--output={OUTPUT}",
                *(f"--compression={spec}" for spec in COMPRESSIONS)]
    if slow_link:
        return [sys.executable, str(ROOT / "benchmarks" / "cluster.py"), "--hosts=2", f"--rate={RATE}", "--env=OMP_NUM_THREADS=1",
                "--", *training]
    horovodrun = cluster.horovodrun()
    if horovodrun is None:
        sys.exit(f"demo.py: there is no horovodrun beside {sys.executable} or on the PATH; 'make demo' installs it")
    controller = [] if shutil.which("mpirun") else ["--gloo"]  # a Horovod with MPI would try mpirun and fail
    return [horovodrun, "-np", "2", *controller, *training]


def copy_untagged(source: BinaryIO, target: BinaryIO) -> None:
    """Copy what workers write as it comes, without the ``[1,0]<stderr>:`` that horovodrun puts before each piece."""
    rest = b""
    while chunk := os.read(source.fileno(), 65536):
        text = _TAG.sub(b"", rest + chunk)
        possible_tag = text.rfind(b"[", -24)  # may go on in the next chunk
        text, rest = (text, b"") if possible_tag < 0 else (text[:possible_tag], text[possible_tag:])
        target.write(text)
        target.flush()
    target.write(rest)
    target.flush()


def run(slow_link: bool) -> list[results.Run]:
    """Start the job, let its progress bars through, and read its results."""
    # The launcher looks at every framework it was built for, and TensorFlow greets at length.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    job = subprocess.Popen(command(slow_link), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    progress = threading.Thread(target=copy_untagged, args=(job.stderr, sys.stderr.buffer))
    progress.start()
    output = job.stdout.read().decode(errors="replace")
    progress.join()
    if job.wait():
        sys.exit(f"{output}\ndemo.py: the job failed with exit code {job.returncode}: {' '.join(job.args)}")
    return [results.Run.from_json(run) for run in json.loads((OUTPUT / "results.json").read_text())["runs"]]


def main() -> None:
    try:
        prepare("mnist")  # now: the hosts reach each other, and no mirror
    except DatasetError as error:
        sys.exit(f"demo.py: {error}")
    reason = cluster.unavailable()
    runs = run(slow_link=reason is None)
    console = Console()
    console.print(results.table(runs, f"MNIST, 3 x 1024 units, 2 workers, {EPOCHS} epochs"))
    if reason is None:
        dense, compressed = runs
        console.print(
            f"The workers were on two hosts made of network namespaces, with a link of 1 Gb/s between them: {compressed.compression} "
            f"took {dense.seconds / compressed.seconds:.1f} times less time.", highlight=False)
    else:
        seconds = ", ".join(f"{8 * run.wire_bytes / 1e9:.1f} s for {run.compression}" for run in runs)
        console.print(
            "[bold]Look at the bytes, not at the seconds.[/bold] Both workers talked over loopback, which isn't a network, since "
            f"{reason}. What a worker sent would take a link of 1 Gb/s at least {seconds}.", highlight=False)
    console.print(f"Picture: {OUTPUT / 'results.png'}\nFigures: {OUTPUT / 'results.json'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
