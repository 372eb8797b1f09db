"""What is shipped: the files of an sdist, one version, and what ruff and mypy say."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import hvd_quant

ROOT = Path(__file__).parents[2]


def tracked():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout, so nothing says which files belong to it")
    return files.stdout.split()


def test_an_sdist_has_what_builds_and_nothing_else(tmp_path):
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    environment = {**os.environ, "HVD_QUANT_WITHOUT_TORCH": "1", "HVD_QUANT_WITHOUT_TENSORFLOW": "1"}  # which it doesn't depend on
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    assert path.name == f"hvd_quant-{hvd_quant.__version__}.tar.gz"
    with tarfile.open(path) as archive:
        files = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    made = {"PKG-INFO", "setup.cfg"} | {name for name in files if name.startswith("hvd_quant.egg-info/")}
    top = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    assert files - made == top | {name for name in tracked() if name.startswith(("hvd_quant/", "csrc/"))}
    assert "hvd_quant/py.typed" in files


def test_the_changelog_begins_with_this_version():
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == hvd_quant.__version__
    mentions = [name for name in tracked() if name.endswith((".py", ".toml", ".cff")) and not name.startswith("tests/")
                and hvd_quant.__version__ in re.findall(r'version\S* *[=:] *"?([\d.]+)', (ROOT / name).read_text())]
    assert mentions == ["hvd_quant/__init__.py"]


@pytest.mark.parametrize("tool", ["ruff", "clang-format"])
def test_pre_commit_has_the_tools_of_the_tests(tool):
    used = re.search(rf"^{tool}==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert re.search(rf"{tool}\n +rev: v{used} ", (ROOT / ".pre-commit-config.yaml").read_text().replace("-pre-commit", ""))


def test_mypy_checks_what_the_page_of_the_api_has():
    """But for what users only get handed, whose methods the page has."""
    checked = re.search(r"^files = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[1]
    for name in re.findall(r"^::: (hvd_quant(?:\.[a-z_]+)*)", (ROOT / "docs" / "api.md").read_text(), re.M):
        if name in ("hvd_quant.tensorflow.state", "hvd_quant.keras.reducing"):
            continue
        path = name.replace(".", "/")
        files = [f"{path}.py", f"{path}/__init__.py", f"{path.rpartition('/')[0]}.py", f"{path.rpartition('/')[0]}/__init__.py"]
        found = next(file for file in files if (ROOT / file).exists())
        assert f'"{found}"' in checked or f'"{found.rpartition("/")[0]}"' in checked, name


@pytest.mark.parametrize("tool, arguments", {
    "ruff": ["check", "--no-cache"], "mypy": ["--no-incremental"], "clang-format": ["--dry-run", "--Werror"]}.items())
def test_lint(tool, arguments):
    program = Path(sys.executable).with_name(tool)
    if not program.exists():
        pytest.skip(f"{tool} is not installed: pip install -e '.[dev]'")
    files = [name for name in tracked() if name.endswith((".cc", ".h"))] if tool == "clang-format" else []
    done = subprocess.run([program, *arguments, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
