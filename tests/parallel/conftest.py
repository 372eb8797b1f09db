"""Tests in this folder run inside every worker of a launch (tests/integration/test_launch.py makes them).

HVD_QUANT_TEST_WORKER says what kind of launch it is, HVD_QUANT_TEST_FRAMEWORK whose Horovod it runs: a process can start one.
"""

import functools
import os
import sys
import threading
import time

import pytest


def traced(make):
    """``tf.numpy_function`` or its like, whose function coverage.py sees in TensorFlow's threads too; from Python 3.12 on it would."""
    def made(function, *arguments, **keywords):
        @functools.wraps(function)
        def call(*inputs):
            if sys.gettrace() is None:
                sys.settrace(threading.gettrace())
            return function(*inputs)
        return make(call, *arguments, **keywords)
    return made


if "HVD_QUANT_TEST_WORKER" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
else:
    if os.environ.get("HVD_QUANT_TEST_FRAMEWORK") == "tensorflow":
        import horovod.tensorflow as horovod
        import tensorflow as tf

        if threading.gettrace():
            tf.numpy_function, tf.py_function = traced(tf.numpy_function), traced(tf.py_function)
    else:
        import horovod.torch as horovod

    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    horovod.init()
    # A process with the plain kernels beside others with the machine's best: all have to get the same bits.
    if os.environ["HVD_QUANT_TEST_WORKER"] == "mixed" and horovod.rank() == 1:
        os.environ["HVD_QUANT_SIMD"] = "plain"


@pytest.fixture(autouse=True, scope="session")
def brief():
    """What "auto" measures before it chooses takes a fraction of the seconds that it takes elsewhere: speed isn't judged here."""
    from hvd_quant.exchange import cost

    cost._REHEARSING, cost.SAMPLE = 0.1, 2**16


@pytest.fixture(autouse=True)
def together():
    """Workers start each test together, so that a collective of one can't meet the next one's."""
    if hasattr(horovod, "poll"):
        import torch

        handle = horovod.allgather_async(torch.zeros(1), name="together")
        while not horovod.poll(handle):
            time.sleep(1e-3)  # a barrier would take the processor from the worker that is waited for
        horovod.synchronize(handle)
    elif hasattr(horovod, "barrier"):
        horovod.barrier()
    else:
        horovod.broadcast_object(None, name="together")
