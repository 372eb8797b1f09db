"""The kernels by themselves, without a framework, as tests/native/run builds them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "native"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """One that has AddressSanitizer and UBSan."""
    compiler, program = os.environ.get("CXX", "g++"), tmp_path_factory.mktemp("compiler") / "program"
    command = [compiler, "-fsanitize=address,undefined", "-x", "c++", "-", "-o", str(program)]
    if not shutil.which(compiler) or subprocess.run(command, input=b"int main() {}", capture_output=True).returncode:
        pytest.skip(f"{compiler} has no sanitizers here")


def test_what_the_fuzzer_has_kept_is_decoded_without_a_finding(compiler):
    names = sorted(file.name for file in (NATIVE / "corpus").iterdir())
    run = subprocess.run([NATIVE / "run", "decode"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert [line.split(":")[0] for line in run.stdout.splitlines()] == names and len(names) == 12


def test_what_is_kept_is_small():
    assert sum(file.stat().st_size for file in (NATIVE / "corpus").iterdir()) < 500_000
