"""Builds the native kernels for the frameworks that are installed, as Horovod's own build does.

HVD_QUANT_WITHOUT_TORCH=1 leaves PyTorch's out; TensorFlow has none yet. The rest of the project's description is in
pyproject.toml.
"""

import os
from glob import glob
from importlib.util import find_spec

from setuptools import setup

# Workers must compute the same bits whatever their processors: nothing here may depend on the machine that builds
# (-march=native), or let the compiler reorder or fuse floating-point operations.
COMPILE_ARGS = ["-O3", "-ffp-contract=off", "-fno-fast-math", "-fvisibility=hidden"]
# PyTorch's parallel_for is compiled into the caller, and without this into a loop on one thread.
OPENMP = ["-fopenmp"]


def torch_extension() -> dict:
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    extension = CppExtension(
        "hvd_quant._torch_ops",
        ["csrc/torch_ops.cc"],
        include_dirs=["csrc"],
        depends=glob("csrc/kernels/*.h"),
        extra_compile_args=COMPILE_ARGS + OPENMP,
        extra_link_args=OPENMP,
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=False)}}


if find_spec("torch") and os.environ.get("HVD_QUANT_WITHOUT_TORCH") != "1":
    setup(**torch_extension())
else:
    print("hvd_quant is built without its native PyTorch kernels: pip needs --no-build-isolation to see PyTorch.")
    setup()
