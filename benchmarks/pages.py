"""The sections of pages in docs/ that benchmarks write: between two marks, which the page has to have."""

from __future__ import annotations

from pathlib import Path

END = "<!-- up to here -->"


def begin(command: str) -> str:
    """The first mark of what a command writes."""
    return f"<!-- what follows is written by `{command}` -->"


def write(page: Path, mark: str, text: str) -> None:
    """Replace what is between ``mark``, of which :func:`begin` makes one, and ``END``.

    Raises:
        ValueError: if the page lacks one of them.
    """
    before, found, rest = page.read_text().partition(mark)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"{page} lacks the lines {mark!r} and {END!r} between which the report goes")
    page.write_text(f"{before}{mark}\n\n{text.strip()}\n\n{END}{after}")
