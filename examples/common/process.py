"""Settings of a worker's process, the same for every compressor."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next allocation instead of giving it back to the kernel.

    Gradients are freed and allocated anew in every step. By default glibc maps large blocks one by one and unmaps them
    when they are freed, so the kernel has to bring in and clear the same pages in the next step: 37,000 of them with
    layers of 4096 units, which takes a third of the processor time. Elsewhere than on glibc this does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def threads_per_worker(local_size: int) -> int:
    """Threads for one of ``local_size`` workers on this host: their share of the cores, unless OMP_NUM_THREADS says it."""
    wished = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(wished) if wished.isdigit() else max(1, len(os.sched_getaffinity(0)) // local_size)


def share_machine_in_tensorflow(workers: int) -> None:
    """Give this worker's TensorFlow its share of the cores, and no GPU: several workers would each take all of its memory."""
    import tensorflow as tf

    threads = threads_per_worker(workers)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.set_visible_devices([], "GPU")
