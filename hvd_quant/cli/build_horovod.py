"""``hvd-quant build-horovod``: Horovod 0.28.1 for the frameworks of today.

Horovod's last release predates them, and needs the edits below. The program unpacks the released sources, applies the
edits, builds a wheel for the frameworks installed in this Python, and keeps it in the user's cache folder under a key
made of everything the wheel depends on, so that the next call takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import click
import platformdirs
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hvd_quant.cli import output

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change to Horovod's sources: `find` occurs exactly once in `file` and becomes `replace`."""

    file: str
    find: str
    replace: str
    reason: str
    url: str | None = None


EDITS = (
    Edit(
        file="CMakeLists.txt",
        find="set(CMAKE_CXX_STANDARD 14)",
        replace="set(CMAKE_CXX_STANDARD 17)",
        reason="PyTorch's headers need C++17 since 2.1, TensorFlow's since 2.10",
        url="https://github.com/horovod/horovod/pull/3998",
    ),
    Edit(
        file="horovod/torch/CMakeLists.txt",
        find="set(CMAKE_CXX_STANDARD 14)",
        replace="set(CMAKE_CXX_STANDARD 17)",
        reason="PyTorch's headers need C++17 since 2.1",
        url="https://github.com/horovod/horovod/pull/3998",
    ),
    Edit(
        file="horovod/tensorflow/CMakeLists.txt",
        find='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        replace="",
        reason="TensorFlow's wheel lacks headers that the XLA ops need (they are off by default anyway)",
        url="https://github.com/tensorflow/tensorflow/issues/90026",
    ),
    Edit(
        file="horovod/torch/CMakeLists.txt",
        find="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        replace="import sysconfig; print(sysconfig.get_path('include'))",
        reason="Python 3.12 has no distutils",
        url="https://peps.python.org/pep-0632/",
    ),
    Edit(
        file="horovod/runner/js_run.py",
        find="from distutils.spawn import find_executable",
        replace="from shutil import which as find_executable",
        reason="Python 3.12 has no distutils",
        url="https://peps.python.org/pep-0632/",
    ),
    Edit(
        file="third_party/gloo/CMakeLists.txt",
        find="cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)",
        replace="cmake_minimum_required(VERSION 3.13 FATAL_ERROR)",
        reason="CMake 4 refuses projects written for CMake before 3.5; Horovod itself asks for 3.13",
        url="https://github.com/NVIDIA/DALI/pull/5871",
    ),
    Edit(
        file="horovod/common/common.h",
        find="#include <memory>\n",
        replace="#include <memory>\n#include <stdexcept>\n",
        reason="GCC 13's standard headers no longer include <stdexcept>, for std::logic_error, by accident",
        url="https://gcc.gnu.org/gcc-13/porting_to.html",
    ),
    Edit(
        file="horovod/common/group_table.h",
        find="#include <queue>\n",
        replace="#include <queue>\n#include <string>\n",
        reason="GCC 13's standard headers no longer include <string> by accident",
        url="https://gcc.gnu.org/gcc-13/porting_to.html",
    ),
    Edit(
        file="third_party/gloo/gloo/types.h",
        find="#include <iostream>\n",
        replace="#include <cstdint>\n#include <iostream>\n",
        reason="GCC 15's standard headers no longer include <cstdint>, for std::uint8_t, by accident",
        url="https://github.com/pytorch/gloo/pull/508",
    ),
    Edit(
        file="third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        find="const size_type count_;",
        replace="size_type count_;",
        reason="GCC 14 rejects the assignment operator of a class with a const member",
        url="https://github.com/google/flatbuffers/pull/7227",
    ),
    Edit(
        file="horovod/common/gloo/gloo_controller.cc",
        find="global_ranks_.reserve(size_);",
        replace="global_ranks_.resize(size_);",
        reason="over Gloo the check for stalled workers took the list of all workers for empty, and never said or ended anything",
    ),
    Edit(
        file="cmake/Modules/FindNCCL.cmake",
        find='set(NCCL_LIBNAME "nccl")',
        replace="set(NCCL_LIBNAME nccl libnccl.so.2)",
        reason="NVIDIA's NCCL wheel, which PyTorch uses, has libnccl.so.2 without the libnccl.so link",
    ),
)


class BuildError(click.ClickException):
    """A step failed: exit code 1."""


class SetupError(click.ClickException):
    """Something the build needs is not there: exit code 2, like wrong usage."""

    exit_code = 2


def apply_edits(source: Path, edits: Iterable[Edit] = EDITS) -> None:
    for edit in edits:
        path = source / edit.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (found := text.count(edit.find)) != 1:
            raise BuildError(
                f"The edit of {edit.file} ({edit.reason}) expects {edit.find!r} once and found it {found} times; "
                f"are these the sources of Horovod {VERSION}?"
            )
        path.write_text(text.replace(edit.find, edit.replace), encoding="utf-8")


# --- What there is to build for


@dataclass(frozen=True)
class Target:
    """Everything the wheel depends on; its hash names the wheel's folder in the cache."""

    horovod: str
    edits: str
    torch: str | None
    tensorflow: str | None
    mpi: str | None
    options: dict[str, str]
    python: str
    platform: str
    cpu: str

    @property
    def key(self) -> str:
        return digest(json.dumps(asdict(self), sort_keys=True))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def edits_digest(edits: Iterable[Edit] = EDITS) -> str:
    return digest(repr([(edit.file, edit.find, edit.replace) for edit in edits]))


def torch_versions() -> tuple[str | None, str | None]:
    """The versions of PyTorch (with its +cpu or +cu126) and of its CUDA, read without the seconds of an import."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*=\s*'([^']+)'", text, re.MULTILINE))
    return found["__version__"], found.get("cuda")


def tensorflow_version() -> str | None:
    # The distribution has many names: tensorflow, tensorflow-cpu, tf-nightly ...
    names = importlib.metadata.packages_distributions().get("tensorflow")
    return importlib.metadata.version(names[0]) if names else None


def mpi_version(environ: Mapping[str, str]) -> str | None:
    if environ.get("HOROVOD_WITHOUT_MPI") == "1" or not shutil.which("mpicxx"):
        return None
    command = ["mpirun" if shutil.which("mpirun") else "mpicxx", "--version"]
    said = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    # Open MPI's first line tells its version; MPICH's is a title.
    return next((line.strip() for line in said.splitlines() if re.search(r"\d", line)), "MPI")


def cpu_features() -> str:
    """The instruction sets Horovod's build looks for: a home folder may be shared by unlike machines."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return " ".join(name for name in ("avx", "f16c", "fma") if name in flags)


# What a user may set to shape the build; the rest of HOROVOD_* is for running.
BUILD_OPTION = re.compile(
    r"HOROVOD_(WITH|SKIP_COMPILE|DEBUG|BUILD_|CPU_OPERATIONS|GPU|ALLOW_MIXED|CUDA_|NCCL_(HOME|INCLUDE|LIB|LINK)|NVTX_)"
)


def build_options(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if BUILD_OPTION.match(name)}


# --- GPUs


# Debian and Ubuntu keep libraries in lib/x86_64-linux-gnu, Red Hat in lib64.
LIBRARY_FOLDERS = ("lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}")
SYSTEM_PREFIXES = (Path("/usr"), Path("/usr/local"))


def find_cuda(environ: Mapping[str, str]) -> Path:
    homes = [Path(environ[name]) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if environ.get(name)]
    if nvcc := shutil.which("nvcc", path=environ.get("PATH")):
        homes.append(Path(nvcc).resolve().parent.parent)
    homes += [prefix / "cuda" for prefix in SYSTEM_PREFIXES]
    for home in homes:
        if (home / "bin" / "nvcc").exists():
            return home.resolve()  # /usr/local/cuda is a link whose target names the version.
    raise SetupError(
        "--gpu nccl needs nvcc and found none in $CUDA_HOME, $PATH or /usr/local/cuda: install the CUDA toolkit."
    )


def find_nccl(environ: Mapping[str, str], cuda: Path) -> tuple[Path, Path]:
    """The folders of nccl.h and libnccl.so: the user's choice, else pip's, which PyTorch loads, else the system's."""
    candidates: list[tuple[Path, list[Path]]] = []

    def add_prefix(prefix: Path) -> None:
        candidates.append((prefix / "include", [prefix / folder for folder in LIBRARY_FOLDERS]))

    chosen = {name: environ.get(f"HOROVOD_NCCL_{name}") for name in ("HOME", "INCLUDE", "LIB")}
    if any(chosen.values()):
        home = Path(chosen["HOME"] or "/usr")
        libraries = [Path(chosen["LIB"])] if chosen["LIB"] else [home / folder for folder in LIBRARY_FOLDERS]
        candidates.append((Path(chosen["INCLUDE"] or home / "include"), libraries))
    else:
        if find_spec("nvidia") and (wheel := find_spec("nvidia.nccl")):
            add_prefix(Path(next(iter(wheel.submodule_search_locations))))
        for prefix in (*SYSTEM_PREFIXES, cuda):
            add_prefix(prefix)

    for include, libraries in candidates:
        for library in libraries:
            if (include / "nccl.h").exists() and next(library.glob("libnccl.so*"), None):
                return include, library
    tried = ", ".join(str(include) for include, _ in candidates)
    raise SetupError(
        f"--gpu nccl needs nccl.h and libnccl.so and found no such pair beside {tried}: install libnccl-dev or "
        "pip's nvidia-nccl-cu12, or set HOROVOD_NCCL_HOME."
    )


def nccl_options(environ: Mapping[str, str], torch: str | None, torch_cuda: str | None) -> dict[str, str]:
    if torch and not torch_cuda:
        raise SetupError(
            f"--gpu nccl needs a PyTorch with CUDA, and {torch} has none: install one, or use --without-torch."
        )
    cuda = find_cuda(environ)
    include, library = find_nccl(environ, cuda)
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(cuda),
        "CUDA_HOME": str(cuda),  # Horovod asks PyTorch whether it has CUDA, and PyTorch looks here.
        "HOROVOD_NCCL_INCLUDE": str(include),
        "HOROVOD_NCCL_LIB": str(library),
        "HOROVOD_NCCL_LINK": "SHARED",  # One NCCL in the process: the one PyTorch loads.
    }


# --- The build


@dataclass(frozen=True)
class Plan:
    """What to build, where it goes, and what the build's environment gets on top of the caller's."""

    target: Target
    folder: Path
    environment: dict[str, str]

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def wheel(self) -> Path | None:
        return next(self.folder.glob("*.whl"), None)


def cache_folder() -> Path:
    return platformdirs.user_cache_path("hvd_quant") / "horovod"


def default_jobs() -> int:
    """One job a core, as long as each has the 2 GB that a file with TensorFlow's headers takes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // 2_000_000_000))


def make_plan(
    environ: Mapping[str, str],
    *,
    without_torch: bool = False,
    without_tensorflow: bool = False,
    gpu: str | None = None,
    jobs: int | None = None,
) -> Plan:
    torch, torch_cuda = (None, None) if without_torch else torch_versions()
    tensorflow = None if without_tensorflow else tensorflow_version()
    if not torch and not tensorflow:
        raise SetupError(f"There is no framework to build for: install torch or tensorflow in {sys.prefix} first.")
    mpi = mpi_version(environ)

    scripts = sysconfig.get_path("scripts")
    search = scripts + os.pathsep + environ.get("PATH", "")
    cmake = shutil.which("cmake", path=search)
    if not cmake:
        raise SetupError("Horovod's build needs CMake: pip install cmake")

    parts = {"PYTORCH": torch, "TENSORFLOW": tensorflow, "MXNET": None, "MPI": mpi, "GLOO": True}
    options = build_options(environ)
    options |= {f"HOROVOD_{'WITH' if wanted else 'WITHOUT'}_{name}": "1" for name, wanted in parts.items()}
    if gpu == "nccl":
        options |= nccl_options(environ, torch, torch_cuda)
        search = str(Path(options["HOROVOD_CUDA_HOME"]) / "bin") + os.pathsep + search
    target = Target(
        horovod=VERSION,
        edits=edits_digest(),
        torch=torch,
        tensorflow=tensorflow,
        mpi=mpi,
        options=options,
        python=sysconfig.get_config_var("SOABI"),
        platform=sysconfig.get_platform(),
        cpu=cpu_features(),
    )
    environment = options | {
        "HOROVOD_CMAKE": cmake,
        "MAKEFLAGS": f"-j{jobs or default_jobs()}",
        "PATH": search,
    }
    return Plan(target, cache_folder() / target.key, environment)


def pip(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]


def download_command(folder: object) -> list[str]:
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--dest", folder]
    return pip("download", *options, f"horovod=={VERSION}")


def wheel_command(source: object, folder: object) -> list[str]:
    # -v: without it pip keeps make's progress to itself.
    return pip("wheel", "-v", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)


def install_commands(wheel: object) -> list[list[str]]:
    # The first replaces a Horovod of the same version built for something else, the second brings what it depends on.
    return [pip("install", "-q", "--no-deps", "--force-reinstall", wheel), pip("install", "-q", wheel)]


# Advice, and what its cause looks like in a log.
HINTS = {
    "There is no C++ compiler: apt-get install g++ make": r"No CMAKE_CXX_COMPILER could be found|g\+\+: not found",
    "There is no make: apt-get install make": r"CMAKE_MAKE_PROGRAM is not set|unable to find .* build program",
    "The machine ran out of memory: use --jobs 1": r"\bKilled\b|Cannot allocate memory|out of memory",
    "The disk is full: free some space, or set TMPDIR to a folder with 2 GB of it": r"No space left on device",
    "Python's headers are missing: apt-get install python3-dev": r"Python\.h: No such file",
    "The MPI compiler does not work: install libopenmpi-dev, or set HOROVOD_WITHOUT_MPI=1": r"Could NOT find MPI",
    "CMake did not find NCCL: set HOROVOD_NCCL_HOME to the folder with include/ and lib/": r"Could NOT find NCCL",
    "A build tool is missing: pip install setuptools wheel packaging": (
        r"No module named '(setuptools|wheel|packaging)|Cannot import 'setuptools|invalid command 'bdist_wheel'"
    ),
    f"The package index has no Horovod or is out of reach: pass the file horovod-{VERSION}.tar.gz with --sdist": (
        r"Could not find a version that satisfies|No matching distribution|Max retries exceeded"
    ),
}


def hint(log: str) -> str | None:
    return next((advice for advice, pattern in HINTS.items() if re.search(pattern, log)), None)


def run_step(
    what: str,
    command: list[str],
    log: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None] = lambda line: None,
) -> None:
    """Run a command, its output going to the log and line by line to `on_line`."""
    tail: deque[str] = deque(maxlen=40)
    with log.open("a", encoding="utf-8") as file:
        print("$", shlex.join(command), file=file, flush=True)
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process:
            for line in process.stdout:
                file.write(line)
                tail.append(line.rstrip("\n"))
                on_line(line)
    if process.returncode:
        message = [f"{what} failed with exit status {process.returncode}. The end of its log:\n", *tail]
        message.append(f"\nThe whole log: {log}")
        if advice := hint(log.read_text(encoding="utf-8")):
            message.append(f"Hint: {advice}.")
        raise BuildError("\n".join(message))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch_sdist(given: Path | None, plan: Plan) -> Path:
    """Horovod's sources, checked; a download is kept for the next build."""
    kept = cache_folder() / f"horovod-{VERSION}.tar.gz"
    if given is None and not kept.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            run_step("Downloading Horovod's sources", download_command(folder), plan.log, os.environ)
            fetched = Path(folder) / kept.name
            check_sdist(fetched)
            fetched.replace(kept)
    sdist = given or kept
    check_sdist(sdist)
    return sdist


def check_sdist(sdist: Path) -> None:
    found = sha256(sdist)
    if found != SHA256:
        raise BuildError(f"{sdist} is not Horovod {VERSION} as released: its SHA-256 is {found}, expected {SHA256}.")


def build(plan: Plan, given: Path | None, on_line: Callable[[str], None]) -> Path:
    plan.folder.mkdir(parents=True, exist_ok=True)
    plan.log.unlink(missing_ok=True)
    sdist = fetch_sdist(given, plan)
    environment = {**os.environ, **plan.environment}
    with tempfile.TemporaryDirectory(prefix="horovod-") as scratch, tempfile.TemporaryDirectory(dir=plan.folder) as out:
        shutil.unpack_archive(sdist, scratch)
        source = Path(scratch) / f"horovod-{VERSION}"
        apply_edits(source)
        run_step("Horovod's build", wheel_command(source, out), plan.log, environment, on_line)
        # Moved last and in one step: what is in the cache is whole, whatever interrupts or runs beside this.
        wheel = next(Path(out).glob("*.whl"))
        return wheel.replace(plan.folder / wheel.name)


def is_installed(wheel: Path) -> bool:
    try:
        origin = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return json.loads(origin or "{}").get("archive_info", {}).get("hash") == f"sha256={sha256(wheel)}"


def install(plan: Plan, wheel: Path) -> None:
    if not is_installed(wheel):
        for command in install_commands(wheel):
            run_step("Installing Horovod", command, plan.log, os.environ)
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    for framework in ("torch", "tensorflow"):
        if getattr(plan.target, framework):
            run_step(f"Importing horovod.{framework}", import_command(plan.target, framework), plan.log, quiet)


def import_command(target: Target, framework: str) -> list[str]:
    wanted = {"gloo": True, "mpi": target.mpi is not None, "nccl": "HOROVOD_GPU_OPERATIONS" in target.options}
    code = (
        f"import horovod.{framework} as hvd; wanted = {wanted}; "
        "built = {name: bool(getattr(hvd, name + '_built')()) for name in wanted}; "
        "assert built == wanted, f'built: {built}, wanted: {wanted}'"
    )
    return [sys.executable, "-c", code]


# --- The command


class Display:
    """The build's progress, from make's ``[ 42%]``: a bar on a terminal, a line every tenth elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console, self.percent = console, 0
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("Horovod", total=100)

    def line(self, line: str) -> None:
        if (match := re.search(r"\[\s*(\d+)%\]", line)) is None:
            return
        before, self.percent = self.percent, max(self.percent, int(match[1]))
        self.bar.update(self.task, completed=self.percent)
        if not self.console.is_terminal and self.percent // 10 > before // 10:
            self.console.print(f"Horovod: {self.percent} %", highlight=False)


def describe(target: Target) -> str:
    versions = {"PyTorch": target.torch, "TensorFlow": target.tensorflow}
    frameworks = " and ".join(f"{name} {version}" for name, version in versions.items() if version)
    transports = filter(None, [target.mpi, "Gloo", target.options.get("HOROVOD_GPU_OPERATIONS")])
    return f"Horovod {target.horovod} for {frameworks}, with {', '.join(transports)}"


def print_plan(plan: Plan, sdist: Path | None, wanted: bool, as_json: bool) -> None:
    commands = [] if sdist else [download_command(cache_folder())]
    commands.append(wheel_command(f"horovod-{VERSION}", plan.folder))
    if wanted:
        commands += install_commands(plan.folder / "horovod.whl")
    if as_json:
        click.echo(json.dumps({"environment": plan.environment, "commands": commands}, indent=2))
    else:
        for name, value in plan.environment.items():
            click.echo(f"export {name}={shlex.quote(value)}")
        for command in commands:
            click.echo(shlex.join(command))


@click.command("build-horovod", epilog=output.examples(
    "hvd-quant build-horovod", "hvd-quant build-horovod --gpu nccl",
    "hvd-quant build-horovod --without-tensorflow --no-install --json",
    f"hvd-quant build-horovod --sdist horovod-{VERSION}.tar.gz     # where the package index is out of reach"))
@click.option(
    "--sdist",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"Use this horovod-{VERSION}.tar.gz instead of downloading it.",
)
@click.option(
    "--without-torch",
    is_flag=True,
    envvar=["HVD_QUANT_WITHOUT_TORCH", "HOROVOD_WITHOUT_PYTORCH"],
    help="Leave PyTorch out, though it is installed.",
)
@click.option(
    "--without-tensorflow",
    is_flag=True,
    envvar=["HVD_QUANT_WITHOUT_TENSORFLOW", "HOROVOD_WITHOUT_TENSORFLOW"],
    help="Leave TensorFlow out, though it is installed.",
)
@click.option("--gpu", type=click.Choice(["nccl"]), help="Exchange CUDA tensors through NCCL; needs nvcc and NCCL.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compile this many files at once; by cores and memory if unset."
)
@click.option(
    "--install/--no-install", "wanted", default=True, help="Install the wheel (the default), or only build it."
)
@click.option("--force", is_flag=True, help="Build again, though the cache has the wheel.")
@click.option("--dry-run", is_flag=True, help="Print the environment and the commands, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    sdist: Path | None,
    without_torch: bool,
    without_tensorflow: bool,
    gpu: str | None,
    jobs: int | None,
    wanted: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Build Horovod for the PyTorch and TensorFlow of this Python, and install it.

    The wheel is kept in the cache folder, so that a second call takes seconds. MPI is used where mpicxx is found, Gloo
    always. Horovod's own build variables (HOROVOD_WITHOUT_MPI=1, HOROVOD_BUILD_ARCH_FLAGS ...) are passed on.

    Exit codes: 0 done, 1 a step failed, 2 something is missing or the usage is wrong.
    """
    started = time.monotonic()
    plan = make_plan(os.environ, without_torch=without_torch, without_tensorflow=without_tensorflow, gpu=gpu, jobs=jobs)
    if dry_run:
        print_plan(plan, sdist, wanted, as_json)
        return

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    wheel = None if force else plan.wheel
    built = wheel is None
    if wheel is None:
        console.print(f"Building {describe(plan.target)}; this takes some minutes. Log: {plan.log}")
        display = Display(console)
        with display.bar:
            wheel = build(plan, sdist, display.line)
    if wanted:
        install(plan, wheel)

    if as_json:
        result = {
            "wheel": str(wheel),
            "log": str(plan.log),
            "key": plan.target.key,
            "built": built,
            "installed": wanted,
            "seconds": round(time.monotonic() - started, 1),
            "target": asdict(plan.target),
        }
        click.echo(json.dumps(result, indent=2))
    else:
        click.echo(f"{describe(plan.target)}: {'installed from ' if wanted else ''}{wheel}")
