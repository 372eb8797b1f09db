"""`hvd-quant doctor` on machines that lack something."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import hvd_quant
from hvd_quant.cli import doctor, main

GOOD = {"torch": {"version": "2.9.1+cpu", "kernels": "avx2", "horovod": {"gloo": True, "mpi": False, "nccl": False},
                  "horovod_version": "0.28.1", "gpu": False},
        "tensorflow": {"version": "2.20.0", "kernels": "avx512", "horovod": {"gloo": True, "mpi": True, "nccl": True},
                       "horovod_version": "0.28.1", "gpu": True, "keras": ["keras", "3.12.1", "tensorflow"]}}
MISSING = {name: {"version_error": f"ModuleNotFoundError: No module named '{name}'"} for name in GOOD}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """One where all is well, whose parts a test changes."""
    parts = {name: dict(found) for name, found in GOOD.items()}
    (tmp_path / "bin").mkdir()
    interface(tmp_path, "eth0", speed=10000)
    for program in ("horovodrun", "ssh"):
        add_program(tmp_path, program)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setattr(doctor, "probe", parts.__getitem__)
    monkeypatch.setattr(doctor.network, "__defaults__", (tmp_path / "net",))
    for name in (*doctor.MALLOC, "HVD_QUANT_SIMD"):
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(parts=parts, folder=tmp_path)


def add_program(folder, name, script="exit 0"):
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def interface(folder, name, speed=None, state="up", kind=1):
    path = folder / "net" / name
    path.mkdir(parents=True)
    for file, text in {"operstate": state, "type": kind, "speed": -1 if speed is None else speed}.items():
        (path / file).write_text(f"{text}\n")


def diagnosis(*arguments, code=0):
    done = CliRunner().invoke(main, ["doctor", "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    result = json.loads(done.output)
    assert all(one["fix"] for one in result["findings"] if one["status"] != "ok")
    return {one["what"]: one for one in result["findings"]}


def test_a_machine_where_all_is_well(machine):
    found = diagnosis()
    assert {one["status"] for one in found.values()} == {"ok"}
    assert found["kernels for PyTorch"]["found"] == "loaded, with avx2 instructions"
    assert found["Horovod for TensorFlow"]["found"] == "0.28.1, built with Gloo, MPI, NCCL"
    assert found["network"]["found"] == "eth0 (10 Gbit/s)"
    assert "export MALLOC_MMAP_THRESHOLD_=" in found["memory"]["fix"]
    said = CliRunner().invoke(main, ["doctor"]).output
    assert "Horovod for PyTorch" in said and "memory: export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM" in said


@pytest.mark.parametrize("framework, changes, what, status, said, fix", [
    ("torch", {"version": "2.0.1"}, "PyTorch", "error", "2.0.1; 2.1 is needed", "pip install 'torch>=2.1'"),
    ("torch", {"version": "2.99.0"}, "PyTorch", "warning", "newer than what the tests", "pip install 'torch==2.13.*'"),
    ("torch", {"kernels": None, "kernels_error": "ImportError: built for another PyTorch"}, "kernels for PyTorch", "error",
     "built for another PyTorch", "pip install --no-build-isolation"),
    ("torch", {"horovod": None, "horovod_error": "ModuleNotFoundError: No module named 'horovod'"}, "Horovod for PyTorch", "error",
     "Horovod is not installed", "hvd-quant build-horovod"),
    ("torch", {"horovod": None, "horovod_error": "AttributeError: no init"}, "Horovod for PyTorch", "error",
     "can't be imported: AttributeError: no init", "hvd-quant build-horovod --force"),
    ("torch", {"horovod": dict.fromkeys(("gloo", "mpi", "nccl"), False)}, "Horovod for PyTorch", "error", "without Gloo", "--force"),
    ("torch", {"gpu": True}, "Horovod for PyTorch", "warning", "0.28.1, built with Gloo; there is a GPU, whose gradients travel by the host's",
     "hvd-quant build-horovod --gpu nccl"),
    ("torch", {"version": None, "version_error": "the process that imported it was ended by signal 11: "}, "PyTorch", "error",
     "ended by signal 11", "pip install --force-reinstall torch"),
    ("tensorflow", {"keras": ["keras", "3.4.0", "tensorflow"]}, "Keras", "error", "3.4.0; 3.5 is needed", "pip install 'keras>=3.5'"),
    ("tensorflow", {"keras": ["keras", "2.15.0", "tensorflow"]}, "Keras", "error", "2.15.0; 3.5 is needed", "pip install 'keras>=3.5'"),
    ("tensorflow", {"keras": ["keras", "3.9.0", "jax"]}, "Keras", "error", "backend is jax", "export KERAS_BACKEND=tensorflow"),
    ("tensorflow", {"keras": ["tf_keras", "2.20.1", "tensorflow"]}, "Keras", "ok", "tf_keras 2.20.1", ""),
    ("tensorflow", {"keras": None, "keras_error": "ImportError: no"}, "Keras", "error", "ImportError: no", "keras>=3.5"),
])
def test_what_is_wrong_with_a_framework(framework, changes, what, status, said, fix, machine):
    part = machine.parts[framework]
    part.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del part[key]
    one = diagnosis(code=int(status == "error"))[what]
    assert one["status"] == status and said in one["found"] and fix in (one["fix"] or "")


def test_one_framework_is_enough_and_none_is_not(machine):
    machine.parts["torch"] = MISSING["torch"]
    assert diagnosis()["PyTorch"]["found"] == "not installed, which is fine"
    machine.parts["tensorflow"] = MISSING["tensorflow"]
    assert diagnosis(code=1)["frameworks"]["fix"] == "pip install torch, or pip install tensorflow"


def test_launchers(machine, monkeypatch):
    (machine.folder / "bin" / "horovodrun").unlink()
    monkeypatch.setattr(doctor.sys, "executable", f"{machine.folder}/elsewhere/python")
    assert diagnosis(code=1)["launcher"]["fix"] == "hvd-quant build-horovod"
    add_program(machine.folder, "mpirun")
    assert "mpirun alone" in diagnosis()["launcher"]["found"]
    (machine.folder / "elsewhere").mkdir()
    (machine.folder / "elsewhere" / "horovodrun").touch()
    assert diagnosis()["launcher"]["fix"] == f"export PATH={machine.folder}/elsewhere:$PATH"


def test_of_several_networks_the_fastest_is_named(machine):
    interface(machine.folder, "ib0", speed=100000, kind=32)
    interface(machine.folder, "eth1", state="down", speed=400000)
    interface(machine.folder, "eth2", state="unknown")
    for name in ("lo", "docker0", "veth12", "br-3a"):
        interface(machine.folder, name, speed=10**6)
    one = diagnosis()["network"]
    assert one["found"].startswith("eth0 (10 Gbit/s), eth2 (speed unknown), ib0 (100 Gbit/s); ") and one["status"] == "warning"
    assert one["fix"] == "horovodrun --network-interface ib0 ..."


def test_a_network_that_tells_little(machine):
    (machine.folder / "net" / "eth0" / "speed").unlink()
    interface(machine.folder, "eth1")
    (machine.folder / "net" / "eth1" / "type").write_text("what?\n")
    assert diagnosis()["network"]["found"] == "eth0 (speed unknown)"


def test_memory_is_kept_where_malloc_is_told_to(machine, monkeypatch):
    assert diagnosis()["memory"]["fix"] == "export " + " ".join(f"{name}={value}" for name, value in doctor.MALLOC.items())
    for name, value in doctor.MALLOC.items():
        monkeypatch.setenv(name, str(value))
    assert diagnosis()["memory"]["found"] == "freed memory stays in the process"
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert diagnosis()["memory"]["found"] == "malloc isn't glibc's"


def test_a_machine_without_a_network(machine, monkeypatch):
    monkeypatch.setattr(doctor.network, "__defaults__", (machine.folder / "nowhere",))
    assert diagnosis()["network"]["status"] == "warning"


@pytest.mark.parametrize("script, status, said, fix", [
    ("echo 'a: Permission denied (publickey).' >&2; exit 255", "error", "Permission denied", "ssh-copy-id a"),
    ("echo 'Host key verification failed.' >&2; exit 255", "error", "Host key verification failed", "ssh-keyscan a >> ~/.ssh/known_hosts"),
    ("echo 'ssh: Could not resolve hostname a' >&2; exit 255", "error", "Could not resolve", "ssh a true"),
    ("echo 'ModuleNotFoundError: no hvd_quant' >&2; exit 1", "error", "has no hvd_quant there", "same path"),
    ("echo FOUND 3.1.4 0.0.1", "error", "Python 3.1.4 with hvd_quant 0.0.1, and here", "the same versions on all hosts"),
    (f"echo hello; echo FOUND {doctor.platform.python_version()} {hvd_quant.__version__}", "ok", "the same Python", ""),
])
def test_hosts_are_tried(script, status, said, fix, machine):
    """ssh is asked for one that doesn't ask anything."""
    add_program(machine.folder, "ssh", f'case "$*" in *BatchMode=yes*ConnectTimeout=5*) ;; *) exit 9 ;; esac\n{script}')
    found = diagnosis("--hosts", "a:2, b", code=int(status == "error"))
    assert found["host a"]["status"] == found["host b"]["status"] == status
    assert said in found["host a"]["found"] and fix in (found["host a"]["fix"] or "")


def test_a_host_can_not_be_an_option_and_ssh_may_be_missing(machine):
    assert diagnosis("--hosts", "-oProxyCommand=x", code=1)["host -oProxyCommand=x"]["found"] == "that is no host's name"
    (machine.folder / "bin" / "ssh").unlink()
    assert diagnosis("--hosts", "a", code=1)["host a"]["fix"] == "apt-get install openssh-client"


BROKEN = {"raises": "raise OSError('libcudart.so.12: cannot open shared object file')", "dies": "import os; os.kill(os.getpid(), 11)",
          "prints": "print('FOUND nothing'); __version__ = '2.9.0'", "ends": "import sys; sys.exit(3)"}


@pytest.mark.parametrize("how, key, said", [
    ("raises", "version_error", "OSError: libcudart.so.12"), ("dies", "version_error", "ended by signal 11"),
    ("prints", "version", "2.9.0"), ("ends", "version_error", "SystemExit: 3")])
def test_a_framework_that_breaks_is_a_finding(how, key, said, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(BROKEN[how])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    found = doctor.probe("torch")
    assert said in found[key]
    if key == "version":  # and a module that isn't PyTorch has neither kernels nor Horovod
        assert found["kernels_error"] and found["horovod_error"]


def test_a_framework_that_never_ends_its_import_is_a_finding(monkeypatch):
    def run(*arguments, **options):
        raise subprocess.TimeoutExpired(arguments, options["timeout"])

    monkeypatch.setattr(doctor.subprocess, "run", run)
    assert "more than 120 seconds" in doctor.probe("torch")["version_error"]
    assert "has not ended" in doctor.host("a").found


def test_what_is_tested_is_what_is_installed_for_the_tests():
    """constraints.txt has the versions that the tests pass with."""
    text = (doctor.Path(__file__).parents[2] / "constraints.txt").read_text()
    for package, name in {"torch": "torch", "tensorflow": "tensorflow-cpu", "keras": "keras"}.items():
        assert f"\n{name}=={'.'.join(map(str, doctor.NEWEST[package]))}." in text
