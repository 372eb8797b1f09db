"""``hvd-quant doctor``: what works here, what doesn't, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

import hvd_quant
from hvd_quant.cli import output

OK, WARNING, ERROR = "ok", "warning", "error"
OLDEST = {"torch": (2, 1), "tensorflow": (2, 18), "keras": (3, 5)}
NEWEST = {"torch": (2, 13), "tensorflow": (2, 21), "keras": (3, 15)}
"""The newest versions that the tests have run with."""
NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras"}
SECONDS = 120
NETWORKS = Path("/sys/class/net")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**36)}

PROBE = """
import contextlib, importlib, io, json, os, sys
framework, found = sys.argv[1], {}

def attempt(name, action):
    try:
        found[name] = action()
    except BaseException as error:
        found[name + "_error"] = f"{type(error).__name__}: {error}"

def version():
    return importlib.import_module(framework).__version__

def level():
    return importlib.import_module(f"hvd_quant.ops.{framework}").simd_level()

def horovod():
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init
    found["horovod_version"] = importlib.import_module("horovod").__version__
    return {name: bool(getattr(hvd, name + "_built")()) for name in ("gloo", "mpi", "nccl")}

def gpu():
    module = importlib.import_module(framework)
    return module.cuda.is_available() if framework == "torch" else bool(module.config.list_physical_devices("GPU"))

def keras():
    if os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):
        return ["tf_keras", importlib.import_module("tf_keras").__version__, "tensorflow"]
    module = importlib.import_module("keras")
    return ["keras", module.__version__, module.backend.backend()]

with contextlib.redirect_stdout(io.StringIO()):  # horovod.torch prints when its library is missing
    attempt("version", version)
    if "version" in found:
        attempt("kernels", level)
        attempt("horovod", horovod)
        attempt("gpu", gpu)
        if framework == "tensorflow":
            attempt("keras", keras)
print("FOUND" + json.dumps(found))
"""


@dataclass(frozen=True)
class Finding:
    """What was found of one thing.

    Attributes:
        what: the thing.
        status: "ok", "warning" or "error".
        found: in words.
        fix: what to do, where something can be better.
    """

    what: str
    status: str
    found: str
    fix: str | None = None


def probe(framework: str) -> dict[str, Any]:
    """What a process of its own finds of a framework: one that is broken may end it."""
    try:
        run = subprocess.run([sys.executable, "-c", PROBE, framework], check=False, capture_output=True, text=True, timeout=SECONDS,
                             env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    except subprocess.TimeoutExpired:
        return {"version_error": f"importing it takes more than {SECONDS} seconds"}
    for line in run.stdout.splitlines():
        if line.startswith("FOUND"):
            return json.loads(line.removeprefix("FOUND"))
    last = (run.stderr.strip().splitlines() or ["no output"])[-1]
    how = f"was ended by signal {-run.returncode}" if run.returncode < 0 else f"ended with status {run.returncode}"
    return {"version_error": f"the process that imported it {how}: {last}"}


def frameworks() -> Iterator[Finding]:
    """Each framework with its kernels, its Horovod and its Keras."""
    missing = []
    for framework in ("torch", "tensorflow"):
        found, name = probe(framework), NAMES[framework]
        if "version" not in found:
            if found["version_error"].startswith("ModuleNotFoundError") and repr(framework) in found["version_error"]:
                missing.append(framework)
            else:
                yield Finding(name, ERROR, f"it can't be imported: {found['version_error']}",
                              f"pip install --force-reinstall {framework}")
            continue
        yield version_of(framework, found["version"])
        if "kernels" in found:
            yield Finding(f"kernels for {name}", OK, f"loaded, with {found['kernels']} instructions")
        else:
            yield Finding(f"kernels for {name}", ERROR, found["kernels_error"],
                          "in hvd_quant's source: pip install --no-build-isolation --force-reinstall --no-deps .")
        yield horovod_of(framework, found)
        if framework == "tensorflow":
            yield keras_of(found)
    if len(missing) == 2:
        yield Finding("frameworks", ERROR, "neither PyTorch nor TensorFlow is installed",
                      "pip install torch, or pip install tensorflow")
    for framework in missing if len(missing) == 1 else ():
        yield Finding(NAMES[framework], OK, "not installed, which is fine")


def version_of(package: str, version: str) -> Finding:
    """Whether a version is one that the tests run with."""
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    oldest, newest = (".".join(map(str, table[package])) for table in (OLDEST, NEWEST))
    if found < OLDEST[package]:
        return Finding(NAMES[package], ERROR, f"{version}; {oldest} is needed", f"pip install '{package}>={oldest}'")
    if found > NEWEST[package]:
        return Finding(NAMES[package], WARNING, f"{version}, which is newer than what the tests ran with",
                       f"where something fails: pip install '{package}=={newest}.*'")
    return Finding(NAMES[package], OK, version)


def horovod_of(framework: str, found: dict[str, Any]) -> Finding:
    what, build = f"Horovod for {NAMES[framework]}", "hvd-quant build-horovod"
    if "horovod" not in found:
        why = found["horovod_error"]
        if "No module named 'horovod'" in why:
            return Finding(what, ERROR, "Horovod is not installed", build)
        return Finding(what, ERROR, f"it can't be imported: {why}", f"{build} --force")
    built = [name for name, there in found["horovod"].items() if there]
    if not built:
        return Finding(what, ERROR, "it was built without Gloo, MPI and NCCL, so workers can't talk", f"{build} --force")
    names = ", ".join({"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}[name] for name in built)
    said = f"{found['horovod_version']}, built with {names}"
    if found.get("gpu") and "nccl" not in built:
        return Finding(what, WARNING, f"{said}; there is a GPU, whose gradients travel by the host's memory without NCCL",
                       f"{build} --gpu nccl")
    return Finding(what, OK, said)


def keras_of(found: dict[str, Any]) -> Finding:
    if "keras" not in found:
        return Finding("Keras", ERROR, found["keras_error"],
                       "pip install 'keras>=3.5', or unset TF_USE_LEGACY_KERAS where it is set")
    package, version, backend = found["keras"]
    if package == "tf_keras":
        return Finding("Keras", OK, f"tf_keras {version}, by TF_USE_LEGACY_KERAS")
    if backend != "tensorflow":
        return Finding("Keras", ERROR, f"{version}, whose backend is {backend}", "export KERAS_BACKEND=tensorflow")
    return version_of("keras", version)


def launcher() -> Finding:
    """What starts workers."""
    found = {name: shutil.which(name) for name in ("horovodrun", "mpirun")}
    beside = Path(sys.executable).parent / "horovodrun"
    if found["horovodrun"]:
        return Finding("launcher", OK, ", ".join(path for path in found.values() if path))
    if beside.exists():
        return Finding("launcher", WARNING, f"horovodrun is {beside}, and not in PATH", f"export PATH={beside.parent}:$PATH")
    if found["mpirun"]:
        return Finding("launcher", WARNING, f"{found['mpirun']} alone; horovodrun is not in PATH", "hvd-quant build-horovod")
    return Finding("launcher", ERROR, "neither horovodrun nor mpirun is in PATH", "hvd-quant build-horovod")


def interfaces(folder: Path = NETWORKS) -> dict[str, int | None]:
    """The network interfaces that are up, with Mbit/s where they tell; without loopback and those of containers and bridges."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        try:
            up = (path / "operstate").read_text().strip() in ("up", "unknown")
            kind = int((path / "type").read_text())
        except (OSError, ValueError):
            continue
        ethernet = kind == 1 and not re.match(r"docker|br-|veth|virbr|cni|flannel|ifb|dummy|tap|lo$", path.name)
        if up and (ethernet or kind == 32):  # InfiniBand
            try:
                speed = int((path / "speed").read_text())
            except (OSError, ValueError):
                speed = -1
            found[path.name] = speed if speed > 0 else None
    return found


def network(folder: Path = NETWORKS) -> Finding:
    """Which interfaces there are, and the fastest of several."""
    found = interfaces(folder)
    if not found:
        return Finding("network", WARNING, "no interface is up but loopback",
                       "to reach workers on other hosts, bring one up: `ip -brief link` lists what there is")
    listed = ", ".join(f"{name} ({f'{speed / 1000:g} Gbit/s' if speed else 'speed unknown'})" for name, speed in found.items())
    best = max(found, key=lambda name: found[name] or 0)
    if len(found) == 1:
        return Finding("network", OK, listed)
    return Finding("network", WARNING, f"{listed}; Horovod may choose any that all hosts share",
                   f"horovodrun --network-interface {best} ...")


def memory() -> Finding:
    """Whether large tensors come as new pages each time, as with glibc's malloc unless it is told otherwise."""
    if platform.libc_ver()[0] != "glibc":
        return Finding("memory", OK, "malloc isn't glibc's")
    if all(os.environ.get(name) for name in MALLOC):
        return Finding("memory", OK, "freed memory stays in the process")
    return Finding("memory", OK, "freed memory goes back to the system, so large tensors come as new pages, which takes time on CPUs",
                   "export " + " ".join(f"{name}={value}" for name, value in MALLOC.items()))


def host(name: str) -> Finding:
    """Whether ssh gets there without a question, as horovodrun needs it, to the same Python and hvd_quant."""
    what = f"host {name}"
    if not re.fullmatch(r"[\w.@:\[\]-]+", name) or name.startswith("-"):
        return Finding(what, ERROR, "that is no host's name", "give names as ssh takes them: --hosts a,b")
    if not shutil.which("ssh"):
        return Finding(what, ERROR, "ssh is not installed here", "apt-get install openssh-client")
    check = "import hvd_quant, platform; print('FOUND', platform.python_version(), hvd_quant.__version__)"
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", name, f'{sys.executable} -c "{check}"']
    try:
        run = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
    except subprocess.TimeoutExpired:
        return Finding(what, ERROR, "ssh has not ended after 30 seconds", f"ssh {name} true")
    said = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
    if run.returncode == 255:
        known = {"denied": f"ssh-copy-id {name}", "verification": f"ssh-keyscan {name} >> ~/.ssh/known_hosts"}
        fix = next((fix for word, fix in known.items() if word in said), f"see that this works without a question: ssh {name} true")
        return Finding(what, ERROR, f"ssh can't get there: {said}", fix)
    found = re.search(r"FOUND (\S+) (\S+)", run.stdout)
    if not found:
        return Finding(what, ERROR, f"{sys.executable} has no hvd_quant there: {said}",
                       "install the same environment at the same path there")
    here = (platform.python_version(), hvd_quant.__version__)
    if found.groups() != here:
        return Finding(what, ERROR, "Python {} with hvd_quant {}, and here it is {} with {}".format(*found.groups(), *here),
                       "install the same versions on all hosts")
    return Finding(what, OK, "reached, with the same Python and hvd_quant")


def diagnose(hosts: list[str]) -> Iterator[Finding]:
    """All findings, in the order in which one thing builds on another."""
    yield Finding("hvd_quant", OK, f"{hvd_quant.__version__} on Python {platform.python_version()}, {platform.machine()}")
    yield from frameworks()
    yield launcher()
    yield network()
    yield memory()
    for name in hosts:
        yield host(name)


@click.command("doctor", epilog=output.examples(
    "hvd-quant doctor", "hvd-quant doctor --hosts worker1,worker2", "hvd-quant doctor --json"))
@click.option("--hosts", default="", metavar="A,B", help="Other hosts that are to take part: tries to reach them by ssh.")
@output.json_option
def command(hosts: str, as_json: bool) -> None:
    """Look for what is missing or doesn't fit together, and say what to do about it.

    Each framework is imported in a process of its own, so this takes some seconds.

    Exit codes: 0 there is no error, 1 there is one, 2 the usage is wrong.
    """
    findings = list(diagnose([name.strip().partition(":")[0] for name in hosts.split(",") if name.strip()]))
    worst = max([OK, WARNING, ERROR].index(finding.status) for finding in findings)
    if as_json:
        output.show_json({"status": [OK, WARNING, ERROR][worst], "findings": [asdict(finding) for finding in findings]})
    else:
        rows = output.table("", "what", "found")
        for one in findings:
            rows.add_row(one.status, one.what, one.found, style={OK: None, WARNING: "yellow", ERROR: "red"}[one.status])
        output.show(rows, *(f"{one.what}: {one.fix}" for one in findings if one.fix))  # whole, so that it can be copied
    sys.exit(worst == 2)
