"""Tests in this folder run inside every worker of a launch (tests/integration/test_launch.py makes them)."""

import os

import pytest

if "HVD_QUANT_TEST_WORKER" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
else:
    import horovod.torch

    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    horovod.torch.init()
    # A process with the plain kernels beside others with the machine's best: all have to get the same bits.
    if os.environ["HVD_QUANT_TEST_WORKER"] == "mixed" and horovod.torch.rank() == 1:
        os.environ["HVD_QUANT_SIMD"] = "plain"


@pytest.fixture(autouse=True)
def together():
    """Workers start each test together, so that a collective of one can't meet the next one's."""
    import horovod.torch

    horovod.torch.barrier()
