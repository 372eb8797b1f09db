"""Launch the tests of tests/parallel under horovodrun: one launch for each controller and number of workers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not built for PyTorch")

ROOT = Path(__file__).parents[2]
HOROVODRUN = Path(sys.executable).with_name("horovodrun")


@pytest.mark.parametrize("controller, workers, simd", [("mpi", 2, "same"), ("gloo", 2, "same"), ("gloo", 4, "mixed")])
def test_pytorch(controller, workers, simd):
    if controller == "mpi" and not shutil.which("mpirun"):
        pytest.skip("no mpirun: Horovod runs on Gloo alone here")
    files = [f"tests/parallel/test_torch_{part}.py" for part in ("invariants", "horovod", "optimizer", "faults")]
    command = [str(HOROVODRUN), "-np", str(workers), f"--{controller}", sys.executable, "-m", "pytest", "-x", "-q",
               "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "HVD_QUANT_TEST_WORKER": simd, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if workers > 2:  # Horovod fuses what happens to be ready, so among more than two workers fp32 sums vary between runs
        environment["HOROVOD_FUSION_THRESHOLD"] = "0"
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=420)
    passed = re.findall(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and len(passed) == workers, f"{run.stdout[-15000:]}\n{run.stderr[-3000:]}"
    print(f"{passed[0]} tests passed on each of {workers} workers over {controller}")
