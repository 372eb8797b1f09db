"""Two workers train on the GPU (one each, or the same one)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_two_workers():
    hvd = pytest.importorskip("horovod.torch", reason="Horovod is not built for PyTorch")
    if not (hvd.cuda_built() or hvd.nccl_built()):
        pytest.skip("not run: Horovod was built without CUDA; `hvd-quant build-horovod --gpu nccl` builds it with")
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable, "-m", "pytest", "-x", "-q",
               "-p", "no:cacheprovider", "tests/parallel/test_torch_gpu.py"]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "HVD_QUANT_TEST_WORKER": "gpu"}, capture_output=True, text=True,
                         timeout=300)
    assert run.returncode == 0, f"{run.stdout[-15000:]}\n{run.stderr[-3000:]}"
