"""Builds the native kernels for the frameworks that are installed, as Horovod's own build does.

HVD_QUANT_WITHOUT_TORCH=1 leaves PyTorch's out, HVD_QUANT_WITHOUT_TENSORFLOW=1 TensorFlow's. The rest of the project's
description is in pyproject.toml.
"""

import json
import os
import subprocess
import sys
from glob import glob
from importlib.util import find_spec

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Workers must compute the same bits whatever their processors: nothing here may depend on the machine that builds
# (-march=native), or let the compiler reorder or fuse floating-point operations.
COMPILE_ARGS = ["-O3", "-ffp-contract=off", "-fno-fast-math", "-fvisibility=hidden"]
KERNELS = {"depends": glob("csrc/kernels/*.h")}
# PyTorch's parallel_for is compiled into the caller, and without this into a loop on one thread.
OPENMP = ["-fopenmp"]


def wanted(framework: str) -> bool:
    if os.environ.get(f"HVD_QUANT_WITHOUT_{framework.upper()}") == "1":
        return False
    if find_spec(framework):
        return True
    print(f"hvd_quant is built without its native kernels for {framework}, which is not installed here: pip needs "
          "--no-build-isolation to see it.")
    return False


def torch_extension() -> Extension:
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(
        "hvd_quant._torch_ops",
        ["csrc/torch_ops.cc"],
        include_dirs=["csrc"],
        extra_compile_args=COMPILE_ARGS + OPENMP,
        extra_link_args=OPENMP,
        **KERNELS,
    )


def tensorflow_extension() -> Extension:
    # In a process of its own, whose import does not write to this one's output.
    ask = "import json, tensorflow.sysconfig as s; print(json.dumps([s.get_compile_flags(), s.get_link_flags()]))"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit("TensorFlow is installed but can't be imported; HVD_QUANT_WITHOUT_TENSORFLOW=1 leaves its kernels "
                         f"out:\n{answer.stderr}")
    compile_flags, link_flags = json.loads(answer.stdout.splitlines()[-1])
    # Its headers are full of warnings, and newer ones deprecate functions whose replacements older ones lack.
    quiet = [flag.replace("-I", "-isystem", 1) for flag in compile_flags] + ["-Wno-deprecated-declarations"]
    return Extension(
        "hvd_quant._tensorflow_ops",
        ["csrc/tensorflow_ops.cc"],
        include_dirs=["csrc"],
        extra_compile_args=COMPILE_ARGS + quiet,
        extra_link_args=link_flags,
        **KERNELS,
    )


extensions, command = [], build_ext
if wanted("torch"):
    from torch.utils.cpp_extension import BuildExtension

    class BuildWithTorch(BuildExtension):
        """PyTorch's flags for its own extension alone: its C++ library's ABI may not be TensorFlow's."""

        def build_extensions(self) -> None:
            every = self.extensions
            self.extensions = every[:1]
            super().build_extensions()
            self.extensions = every[1:]
            build_ext.build_extensions(self)
            self.extensions = every

    extensions.append(torch_extension())
    command = BuildWithTorch.with_options(use_ninja=False)
if wanted("tensorflow"):
    extensions.append(tensorflow_extension())
setup(ext_modules=extensions, cmdclass={"build_ext": command})
