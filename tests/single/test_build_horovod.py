"""The program that builds Horovod, with a stand-in for pip: the true build is what `make test` itself stands on."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hvd_quant.cli import build_horovod as program
from hvd_quant.cli import main

# Taken before any test moves the cache.
RELEASED = program.cache_folder() / f"horovod-{program.VERSION}.tar.gz"

FAKE_PIP = """
import os, pathlib, sys
calls = pathlib.Path(__file__).with_suffix(".calls")
calls.open("a").write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "install":
    raise SystemExit
print("MAKEFLAGS is", os.environ.get("MAKEFLAGS"))
for percent in range(0, 101, 5):
    print(f"  [{percent:3}%] Building CXX object number{percent}.o")
folder = pathlib.Path(sys.argv[sys.argv.index("--wheel-dir") + 1])
(folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").write_bytes(b"")
"""

FAILING_PIP = """
for number in range(100):
    print(f"line {number}.")
print("c++: fatal error: Killed signal terminated program cc1plus")
raise SystemExit(1)
"""


@pytest.fixture
def source(tmp_path):
    """A tree with what the edits look for, among other lines."""
    root = tmp_path / f"horovod-{program.VERSION}"
    for edit in program.EDITS:
        path = root / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"before\n{edit.find}\nafter\n")
    return root


@pytest.fixture
def released(tmp_path):
    if not RELEASED.exists():
        pytest.skip(f"Horovod's sources are not in the cache: {RELEASED}")
    with tarfile.open(RELEASED) as archive:
        for member in archive:
            if re.search(r"\.(py|txt|cmake|h|cc)$", member.name):
                archive.extract(member, tmp_path)
    return tmp_path / f"horovod-{program.VERSION}"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty cache, and a machine with known frameworks and neither MPI, CUDA nor settings of Horovod's."""
    for name in program.build_options(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(program, "torch_versions", lambda: ("2.13.0+cu126", "12.6"))
    monkeypatch.setattr(program, "tensorflow_version", lambda: "2.21.0")
    monkeypatch.setattr(program, "SYSTEM_PREFIXES", (tmp_path / "usr",))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cmake").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "cmake").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.fixture
def sdist(source, tmp_path, monkeypatch):
    path = tmp_path / f"horovod-{program.VERSION}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, source.name)
    monkeypatch.setattr(program, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def use_pip(monkeypatch, folder, text):
    script = folder / "pip.py"
    script.write_text(text)
    monkeypatch.setattr(program, "pip", lambda *arguments: [sys.executable, str(script), *map(str, arguments)])
    return script.with_suffix(".calls")


def run(*arguments):
    return CliRunner().invoke(main, ["build-horovod", *map(str, arguments)])


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


# --- Edits


def test_edits_apply(source):
    program.apply_edits(source)
    for edit in program.EDITS:
        text = (source / edit.file).read_text()
        assert edit.replace in text
        assert edit.find not in text or edit.find in edit.replace


@pytest.mark.parametrize("edit", program.EDITS, ids=lambda edit: f"{edit.file}:{edit.find[:20].strip()}")
@pytest.mark.parametrize("copies", [0, 2])
def test_an_edit_that_does_not_match_once_is_an_error_that_names_it(source, edit, copies):
    path = source / edit.file
    path.write_text(path.read_text().replace(edit.find, edit.find * copies))
    with pytest.raises(program.BuildError, match=re.escape(edit.file)) as error:
        program.apply_edits(source)
    assert edit.reason in error.value.message
    assert f"{copies} times" in error.value.message


def test_an_edit_of_a_missing_file_is_an_error_that_names_it(source):
    (source / program.EDITS[-1].file).unlink()
    with pytest.raises(program.BuildError, match=re.escape(program.EDITS[-1].file)):
        program.apply_edits(source)


def test_edits_apply_to_the_released_sources(released):
    program.apply_edits(released)
    horovod = [path for path in released.rglob("*") if path.is_file() and "third_party" not in path.parts]
    text = "".join(path.read_text() for path in horovod)
    assert "distutils" not in text
    assert "CMAKE_CXX_STANDARD 14" not in text
    assert "xla_mpi_ops.cc" not in (released / "horovod/tensorflow/CMakeLists.txt").read_text()


def test_horovods_cmake_finds_the_nccl_of_pip(released, tmp_path):
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if not cmake:
        pytest.skip("there is no cmake")
    program.apply_edits(released)
    nccl = tmp_path / "nvidia" / "nccl"
    write(nccl / "include" / "nccl.h", "#define NCCL_MAJOR 2\n")
    library = write(nccl / "lib" / "libnccl.so.2")
    write(
        tmp_path / "project" / "CMakeLists.txt",
        "cmake_minimum_required(VERSION 3.13)\nproject(test NONE)\n"
        f'list(APPEND CMAKE_MODULE_PATH "{released}/cmake/Modules")\n'
        'find_package(NCCL REQUIRED)\nmessage("found ${NCCL_INCLUDE_DIRS} ${NCCL_LIBRARIES}")\n',
    )
    environment = {
        "HOROVOD_NCCL_INCLUDE": str(nccl / "include"),
        "HOROVOD_NCCL_LIB": str(nccl / "lib"),
        "HOROVOD_NCCL_LINK": "SHARED",
    }
    command = [cmake, "-S", tmp_path / "project", "-B", tmp_path / "build"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert f"found {nccl / 'include'} {library}" in done.stderr, done.stdout + done.stderr


# --- The cache's key

TARGET = program.Target(
    horovod="0.28.1",
    edits="e",
    torch="2.13.0+cpu",
    tensorflow="2.21.0",
    mpi="mpirun (Open MPI) 4.1.4",
    options={"HOROVOD_WITH_GLOO": "1"},
    python="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64",
    cpu="avx f16c fma",
)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(program.Target)])
def test_the_key_depends_on(field):
    other = {"HOROVOD_GPU_OPERATIONS": "NCCL"} if field == "options" else "other"
    assert dataclasses.replace(TARGET, **{field: other}).key != TARGET.key
    assert dataclasses.replace(TARGET).key == TARGET.key


def test_the_key_depends_on_what_an_edit_does_and_not_on_what_it_says():
    first, *rest = program.EDITS
    digest = program.edits_digest()
    assert program.edits_digest([dataclasses.replace(first, replace="other"), *rest]) != digest
    assert program.edits_digest([dataclasses.replace(first, reason="other", url=None), *rest]) == digest
    assert program.edits_digest(rest) != digest


def test_the_key_depends_on_the_settings_of_the_build_only(machine):
    environ = dict(os.environ)
    key = program.make_plan(environ).target.key
    assert program.make_plan({**environ, "HOROVOD_BUILD_ARCH_FLAGS": "-mavx2"}).target.key != key
    assert program.make_plan(environ, without_torch=True).target.key != key
    assert program.make_plan(environ, without_tensorflow=True).target.key != key
    assert program.make_plan({**environ, "HOROVOD_FUSION_THRESHOLD": "0"}).target.key == key
    assert program.make_plan(environ, jobs=7).target.key == key


def test_mpi_is_used_where_its_compiler_is(machine):
    assert program.make_plan(os.environ).environment["HOROVOD_WITHOUT_MPI"] == "1"
    write(machine / "bin" / "mpicxx", "#!/bin/sh\n")
    write(machine / "bin" / "mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    plan = program.make_plan(os.environ)
    assert plan.target.mpi == "mpirun (Open MPI) 4.1.4"
    assert plan.environment["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in plan.environment
    plan = program.make_plan({**os.environ, "HOROVOD_WITHOUT_MPI": "1"})
    assert plan.target.mpi is None
    assert "HOROVOD_WITH_MPI" not in plan.environment


@pytest.mark.parametrize("variable, name", [
    ("HOROVOD_WITHOUT_PYTORCH", "PYTORCH"), ("HVD_QUANT_WITHOUT_TORCH", "PYTORCH"),
    ("HOROVOD_WITHOUT_TENSORFLOW", "TENSORFLOW"), ("HVD_QUANT_WITHOUT_TENSORFLOW", "TENSORFLOW"),
])
def test_switches_leave_a_framework_out(machine, monkeypatch, variable, name):
    monkeypatch.setenv(variable, "1")
    environment = json.loads(run("--dry-run", "--json").stdout)["environment"]
    assert environment[f"HOROVOD_WITHOUT_{name}"] == "1"
    assert f"HOROVOD_WITH_{name}" not in environment


def test_frameworks_that_are_not_installed_have_no_version(monkeypatch):
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    monkeypatch.setattr(program.importlib.metadata, "packages_distributions", lambda: {"tensorflow": ["numpy"]})
    assert program.torch_versions() == (None, None)
    assert program.tensorflow_version() == program.importlib.metadata.version("numpy")  # of whatever distribution has it
    monkeypatch.setattr(program.importlib.metadata, "packages_distributions", dict)
    assert program.tensorflow_version() is None


def test_torchs_versions_are_those_it_tells_itself():
    torch = pytest.importorskip("torch")
    assert program.torch_versions() == (torch.__version__, torch.version.cuda)


# --- GPUs


def test_nccl_of_the_users_choice(machine, monkeypatch):
    nvcc = write(machine / "cuda-12.6" / "bin" / "nvcc")
    write(machine / "nccl" / "include" / "nccl.h")
    write(machine / "nccl" / "lib64" / "libnccl.so")
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda-12.6"))
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(machine / "nccl"))
    result = run("--gpu", "nccl", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    environment = json.loads(result.stdout)["environment"]
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_CUDA_HOME"] == environment["CUDA_HOME"] == str(machine / "cuda-12.6")
    assert environment["HOROVOD_NCCL_INCLUDE"] == str(machine / "nccl" / "include")
    assert environment["HOROVOD_NCCL_LIB"] == str(machine / "nccl" / "lib64")
    assert environment["HOROVOD_NCCL_LINK"] == "SHARED"
    assert str(nvcc.parent) in environment["PATH"].split(":")


def test_nccl_of_pip_goes_before_the_systems(machine, monkeypatch):
    write(machine / "usr" / "cuda" / "bin" / "nvcc")
    write(machine / "usr" / "include" / "nccl.h")
    write(machine / "usr" / "lib" / "libnccl.so")
    arguments = ["--gpu", "nccl", "--dry-run", "--json"]
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(machine / "site-packages")])
    environment = json.loads(run(*arguments).stdout)["environment"]
    assert environment["HOROVOD_NCCL_LIB"] == str(machine / "usr" / "lib")

    write(machine / "site-packages" / "nvidia" / "nccl" / "include" / "nccl.h")
    write(machine / "site-packages" / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    sys.path_importer_cache.clear()
    environment = json.loads(run(*arguments).stdout)["environment"]
    assert environment["HOROVOD_NCCL_LIB"] == str(machine / "site-packages" / "nvidia" / "nccl" / "lib")
    assert environment["HOROVOD_NCCL_INCLUDE"] == str(machine / "site-packages" / "nvidia" / "nccl" / "include")


def no_nvcc(machine, monkeypatch):
    return "nvcc"


def no_nccl(machine, monkeypatch):
    write(machine / "usr" / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(machine / "nowhere"))
    return str(machine / "nowhere")


def no_cuda_in_torch(machine, monkeypatch):
    monkeypatch.setattr(program, "torch_versions", lambda: ("2.13.0+cpu", None))
    return r"2.13.0+cpu has none"


@pytest.mark.parametrize("missing", [no_nvcc, no_nccl, no_cuda_in_torch])
def test_what_nccl_misses_is_said_in_one_sentence(machine, monkeypatch, missing):
    named = missing(machine, monkeypatch)
    result = run("--gpu", "nccl", "--dry-run")
    assert result.exit_code == 2
    assert named in result.output
    assert result.output.count("\n") == 1


def test_no_framework_is_said_in_one_sentence(machine):
    result = run("--without-torch", "--without-tensorflow")
    assert result.exit_code == 2
    assert "no framework" in result.output
    assert result.output.count("\n") == 1


# --- Building


def test_a_wheel_is_built_once(machine, sdist, monkeypatch):
    calls = use_pip(monkeypatch, machine, FAKE_PIP)
    arguments = ["--sdist", sdist, "--no-install", "--json", "--jobs", 3]
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    result = json.loads(first.stdout)
    assert result["built"]
    assert Path(result["wheel"]).parent == machine / "cache" / "hvd_quant" / "horovod" / result["key"]
    assert "MAKEFLAGS is -j3" in Path(result["log"]).read_text()
    assert [int(percent) for percent in re.findall(r"(\d+) %", first.stderr)] == list(range(10, 101, 10))

    assert not json.loads(run(*arguments).stdout)["built"]
    assert len(calls.read_text().splitlines()) == 1
    assert json.loads(run(*arguments, "--force").stdout)["built"]
    assert len(calls.read_text().splitlines()) == 2
    assert [path.name for path in Path(result["wheel"]).parent.iterdir() if path.is_dir()] == []


def test_sources_are_downloaded_once_and_checked(machine, sdist, monkeypatch):
    calls = use_pip(monkeypatch, machine, f"""
import shutil, sys
if sys.argv[1] == "download":
    shutil.copy({str(sdist)!r}, sys.argv[sys.argv.index("--dest") + 1])
{FAKE_PIP}""".replace('if sys.argv[1] == "install"', 'if sys.argv[1] in ("download", "install")'))
    for _ in range(2):
        result = run("--no-install", "--force")
        assert result.exit_code == 0, result.output
    assert [call.split()[0] for call in calls.read_text().splitlines()] == ["download", "wheel", "wheel"]
    monkeypatch.setattr(program, "SHA256", "0" * 64)  # what is kept may be damaged
    assert "is not Horovod" in run("--no-install", "--force").output


def test_a_build_without_cmake_says_so(machine, monkeypatch):
    (machine / "bin" / "cmake").unlink()
    monkeypatch.setattr(program.sysconfig, "get_path", lambda name: str(machine / "nowhere"))
    assert "Horovod's build needs CMake: pip install cmake" in run("--dry-run").output


def test_a_wheel_is_installed_once_and_tried_each_time(machine, sdist, monkeypatch):
    calls = use_pip(monkeypatch, machine, FAKE_PIP)
    monkeypatch.setattr(program, "import_command", lambda target, framework: [sys.executable, "-c", "print('tried')"])
    monkeypatch.setattr(program, "is_installed", lambda wheel: False)
    first = run("--sdist", sdist)
    assert first.exit_code == 0, first.output
    assert [call.split()[0] for call in calls.read_text().splitlines()] == ["wheel", "install", "install"]

    monkeypatch.setattr(program, "is_installed", lambda wheel: True)
    assert run("--sdist", sdist).exit_code == 0
    assert len(calls.read_text().splitlines()) == 3
    log = next((machine / "cache").rglob("build.log")).read_text()
    assert log.splitlines().count("tried") == 4  # Two frameworks, two calls.


def test_a_horovod_that_does_not_import_is_an_error(machine, sdist, monkeypatch):
    use_pip(monkeypatch, machine, FAKE_PIP)
    broken = [sys.executable, "-c", "raise SystemExit('undefined symbol')"]
    monkeypatch.setattr(program, "import_command", lambda target, framework: broken)
    result = run("--sdist", sdist)
    assert result.exit_code == 1
    assert "Importing horovod.torch failed" in result.output and "undefined symbol" in result.output


def test_a_wheel_is_known_by_its_contents(tmp_path, monkeypatch):
    wheel = write(tmp_path / "horovod.whl", "contents")
    record = {"url": "file:///elsewhere", "archive_info": {"hash": "sha256=" + program.sha256(wheel)}}
    distribution = SimpleNamespace(read_text=lambda name: json.dumps(record))
    monkeypatch.setattr(program.importlib.metadata, "distribution", lambda name: distribution)
    assert program.is_installed(wheel)
    write(wheel, "built again")
    assert not program.is_installed(wheel)

    def missing(name):
        raise program.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(program.importlib.metadata, "distribution", missing)
    assert not program.is_installed(wheel)


def test_what_is_tried_is_what_was_built(machine):
    """As Horovod tells it: a stand-in that has Gloo alone."""
    write(machine / "horovod" / "__init__.py")
    write(machine / "horovod" / "torch.py", "gloo_built = lambda: 1\nmpi_built = nccl_built = lambda: 0\n")
    target = program.make_plan(os.environ).target
    for mpi, code in ((None, 0), ("Open MPI 4", 1)):
        command = program.import_command(dataclasses.replace(target, mpi=mpi), "torch")
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(machine)}, capture_output=True, text=True)
        assert done.returncode == code and ("wanted: {'gloo': True, 'mpi': True" in done.stderr) == bool(code), done.stderr


def test_a_failure_shows_the_end_of_the_log_and_a_hint(machine, sdist, monkeypatch):
    use_pip(monkeypatch, machine, FAILING_PIP)
    result = run("--sdist", sdist)
    assert result.exit_code == 1
    assert "line 60." not in result.output
    assert "line 61." in result.output and "line 99." in result.output
    assert "Hint: The machine ran out of memory: use --jobs 1." in result.output
    log = Path(re.search(r"The whole log: (.*)", result.output)[1])
    assert "line 0." in log.read_text()
    assert not list(log.parent.glob("*.whl"))


LOGS = [
    ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "C++ compiler"),
    ('CMake was unable to find a build program corresponding to "Unix Makefiles".', "no make"),
    ("c++: fatal error: Killed signal terminated program cc1plus", "memory"),
    ("virtual memory exhausted: Cannot allocate memory", "memory"),
    ("fatal error: error writing to /tmp/cc.s: No space left on device", "disk is full"),
    ("pyconfig.h:3: fatal error: Python.h: No such file or directory", "Python's headers"),
    ("Could NOT find MPI_CXX (missing: MPI_CXX_WORKS)\nCould NOT find MPI (missing: MPI_CXX_FOUND)", "MPI compiler"),
    ("Could NOT find NCCL (missing: NCCL_INCLUDE_DIR NCCL_LIBRARY)", "HOROVOD_NCCL_HOME"),
    ("pip._vendor.pyproject_hooks.BackendUnavailable: Cannot import 'setuptools.build_meta'", "setuptools"),
    ("ModuleNotFoundError: No module named 'packaging'", "packaging"),
    ("ERROR: No matching distribution found for horovod==0.28.1", "--sdist"),
]


@pytest.mark.parametrize(("log", "expected"), LOGS)
def test_hints(log, expected):
    assert expected in program.hint(f"[ 42%] Building\n{log}\nerror: subprocess-exited-with-error\n")


def test_no_hint_for_what_is_unknown():
    assert program.hint("error: expected ';' before '}' token") is None


def test_other_sources_are_refused(machine, monkeypatch):
    calls = use_pip(monkeypatch, machine, FAKE_PIP)
    other = write(machine / f"horovod-{program.VERSION}.tar.gz", "something else")
    result = run("--sdist", other)
    assert result.exit_code == 1
    assert program.SHA256 in result.output and hashlib.sha256(b"something else").hexdigest() in result.output
    assert not calls.exists()
