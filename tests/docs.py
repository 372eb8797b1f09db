"""The code in README.md and docs, as tests run it: the Python of a page by frameworks, and the commands in its shell blocks."""

import contextlib
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from hvd_quant.registry import get_compressor, register

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Whole examples, which test_torch_averaging.py, test_keras_averaging.py and test_torch_ddp.py run.
ELSEWHERE = {"docs/schemes/model_averaging.md", "docs/ddp.md"}

MARKS = {"keras": r"\bkeras\b", "tensorflow": r"hvd_quant\.tensorflow|\btf\.|train_step", "torch": r"\btorch\b|hvd\.|\bray\b|optimizer\."}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def framework_of(code: str) -> str:
    """Whose code it is: "keras", "tensorflow", "torch", or "none" of them."""
    return next((framework for framework, mark in MARKS.items() if re.search(mark, code)), "none")


def pages(*frameworks: str) -> list[Path]:
    """The pages that have Python code of these."""
    return [page for page in PAGES if name_of(page) not in ELSEWHERE
            and any(framework_of(code) in frameworks for code in fenced(page, "python"))]


def pieces(code: str) -> Iterator[str]:
    """A block's parts between lines of ``...``, which stand for something between them, each fit to be executed."""
    for part in re.split(r"^\.\.\.\n", code, flags=re.M):
        if part.strip():
            yield textwrap.dedent(part)


def run(page: Path, frameworks: tuple[str, ...], names: dict[str, Any], prepare: Callable[[str, dict[str, Any]], str],
        meet: Callable[[], object]) -> None:
    """Execute a page's blocks one after another, those that are of no framework among them.

    Arguments:
        names: what the page takes for granted.
        prepare: called with each block and these names before it runs; returns the block as it can be run here.
        meet: called after each piece, so that a worker doesn't read what another has yet to write.
    """
    names |= {"__name__": "docs", "register": register}
    for number, code in enumerate(fenced(page, "python")):
        if framework_of(code) not in (*frameworks, "none"):
            continue
        for piece in pieces(prepare(code, names)):
            exec(compile(piece, f"{name_of(page)}, block {number}", "exec"), names)
            meet()
        given = names.get("compression")
        for spec in given.values() if isinstance(given, Mapping) else [given]:
            if isinstance(spec, str):
                get_compressor(spec)


@contextlib.contextmanager
def fake_ray() -> Iterator[None]:
    """Modules ray and horovod.ray, whose executor calls a function here. What else is imported meanwhile stays."""
    executor = mock.MagicMock(run=lambda function: function())
    modules = {"ray": mock.MagicMock(), "horovod.ray": types.SimpleNamespace(RayExecutor=mock.MagicMock(return_value=executor))}
    known = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in known.items():
            sys.modules.pop(name) if module is None else sys.modules.__setitem__(name, module)
