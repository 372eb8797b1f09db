"""What is shipped: the files of an sdist, one version, and what ruff and mypy say."""

import importlib.util
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


def test_pre_commit_has_the_ruff_of_the_tests():
    used = re.search(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert f"rev: v{used} " in (ROOT / ".pre-commit-config.yaml").read_text()


@pytest.mark.parametrize("command", [["ruff", "check", "--no-cache"], ["mypy", "--no-incremental"]], ids=lambda command: command[0])
def test_lint(command):
    if not importlib.util.find_spec(command[0]):
        pytest.skip(f"{command[0]} is not installed: pip install -e '.[dev]'")
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
