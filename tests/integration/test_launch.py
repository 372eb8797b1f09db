"""Launch the tests of tests/parallel under horovodrun: one launch for each framework, controller and number of workers."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOROVODRUN = Path(sys.executable).with_name("horovodrun")

# Four workers run what two don't tell. Not the hook for DDP: its tests compare it with Horovod's optimizer, and four workers that use both in
# one process have hung in about every second run, in a broadcast of Horovod's until Gloo gave up after 30 seconds. Why is not known.
LAUNCHES = {
    "pytorch-gloo": ("torch", "gloo", 2, "same", "torch_*", {}),
    "pytorch-mpi": ("torch", "mpi", 2, "same", "torch_[efh]*", {}),  # not everything: Horovod may have been built without
    "pytorch-4": ("torch", "gloo", 4, "mixed", "torch_[aefhls]*", {}),
    "tensorflow-mpi": ("tensorflow", "mpi", 2, "same", "tensorflow_[efhm]*", {}),
    "tensorflow-gloo": ("tensorflow", "gloo", 2, "same", "tensorflow_[!am]*", {}),
    "tensorflow-4": ("tensorflow", "gloo", 4, "mixed", "tensorflow_[at]*", {}),
    "tensorflow-4-exchanges": ("tensorflow", "gloo", 4, "mixed", "tensorflow_[els]*", {}),
    "keras": ("tensorflow", "gloo", 2, "same", "keras_*", {}),
    "keras-4": ("tensorflow", "gloo", 4, "mixed", "keras_a*", {}),
    "tf_keras": ("tensorflow", "gloo", 2, "same", "keras_[aclm]*", {"TF_USE_LEGACY_KERAS": "1"}),
}


def what_failed(output, workers):
    """The end of each worker's report, without its progress: the first to fail is seldom worker 0."""
    said = [""] * workers
    pieces = re.split(r"\[(?:1,)?(\d+)\]<std(?:out|err)>:", output)  # mpirun tags pieces of lines
    for worker, piece in zip(pieces[1::2], pieces[2::2]):
        said[int(worker)] += piece
    return "\n\n".join(f"worker {worker}:\n" + "\n".join([line for line in text.splitlines() if line.strip(" .sEF") and "%]" not in line][-60:])
                       for worker, text in enumerate(said))


@pytest.mark.parametrize("framework, controller, workers, kind, tests, environment", LAUNCHES.values(), ids=list(LAUNCHES))
def test_launch(framework, controller, workers, kind, tests, environment):
    horovod = importlib.util.find_spec("horovod")
    if not horovod or not list(Path(horovod.origin).parent.glob(f"{framework}/mpi_lib*.so")):
        pytest.skip(f"Horovod is not built for {framework}")
    if controller == "mpi" and not shutil.which("mpirun"):
        pytest.skip("no mpirun: Horovod runs on Gloo alone here")
    if "TF_USE_LEGACY_KERAS" in environment and not importlib.util.find_spec("tf_keras"):
        pytest.skip("tf_keras is not installed")
    files = [str(f) for f in sorted(ROOT.glob(f"tests/parallel/test_{tests}.py")) if "gpu" not in f.name]
    yielding = ["--mpi-args=--mca mpi_yield_when_idle 1"] if controller == "mpi" else []  # MPI spins while it waits
    command = [str(HOROVODRUN), "-np", str(workers), f"--{controller}", *yielding, sys.executable, "-m", "pytest", "-x", "-q", "--color=no", "--tb=short",
               "-p", "no:cacheprovider", *files]
    environment = {**os.environ, **environment, "HVD_QUANT_TEST_WORKER": kind, "HVD_QUANT_TEST_FRAMEWORK": framework,
                   "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if workers > 2:  # Horovod fuses what happens to be ready, so among more than two workers fp32 sums vary between runs
        environment["HOROVOD_FUSION_THRESHOLD"] = "0"
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    passed = re.findall(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and len(passed) == workers, f"{what_failed(run.stdout, workers)}\n{run.stderr[-3000:]}"
    print(f"{passed[0]} tests passed on each of {workers} workers over {controller}")
