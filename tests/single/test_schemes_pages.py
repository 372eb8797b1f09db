"""The pages of docs/schemes say what is so: knobs and their defaults, sizes, and something under each heading."""

import dataclasses
import re
from pathlib import Path

import pytest

from hvd_quant import Compressor, TensorInfo, get_compressor
from hvd_quant.registry import compressor_class, list_compressors

PAGES = Path(__file__).resolve().parents[2] / "docs" / "schemes"
COMMON = {field.name: field.default for field in dataclasses.fields(Compressor)}
OWN_CODES = [name for name in list_compressors() if compressor_class(name).__module__.startswith("hvd_quant.")]
HEADINGS = ["Formula", "When to use it", "Knobs", "State", "Wire size", "Source"]


def page_of(name):
    return PAGES / f"{'half' if name in ('none', 'fp16', 'bf16') else name}.md"


def knobs(text):
    """Names and defaults in the rows of tables: ``| `a`, `b` | `1`, `2` | ...``."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (\(must be given\)|`[^|]*`) \|", text, re.M)
    return {name: default for names, defaults in rows
            for name, default in zip(re.findall(r"`(\w+)`", names), re.findall(r"`([^`]*)`", defaults) or [None] * 9)}


@pytest.mark.parametrize("name", OWN_CODES)
def test_each_code_has_a_page_that_names_its_knobs(name):
    fields = {field.name: field.default for field in dataclasses.fields(compressor_class(name)) if field.name not in COMMON}
    expected = {knob: None if default is dataclasses.MISSING else str(default) for knob, default in fields.items()}
    assert knobs(page_of(name).read_text()) == expected


def test_the_knobs_of_all_are_named():
    assert knobs((PAGES / "README.md").read_text().partition("## Knobs of all")[2]) == {k: str(v) for k, v in COMMON.items()}
    for page in ("momentum", "merging", "ef21"):
        found = knobs((PAGES / f"{page}.md").read_text())
        assert found and found == {knob: str(COMMON[knob]) for knob in found}, page


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_something_under_each_heading(page):
    text = page.read_text()
    if page.stem != "README":
        sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
        assert all(sections.get(heading, "").strip() for heading in HEADINGS)
        what_it_does = re.sub(r"```.*?```", "", text.partition("\n")[2].partition("\n## ")[0], flags=re.S)
        assert len(re.findall(r"[.!?](?=\s|$)", what_it_does)) == 3
        source = get_compressor(match[1]).spec if (match := re.search(r'compression="([^"]+)"', text)) else None
        assert source or page.stem == "model_averaging"
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in link or (page.parent / link).exists(), f"{page.stem} points to {link}"


@pytest.mark.parametrize("name", [name for name in OWN_CODES if page_of(name).stem != "half"])
def test_the_size_of_a_message(name):
    size, times = re.search(r"1024 × 1024 entries takes ([\d,]+) bytes, ([\d.]+) times", page_of(name).read_text()).groups()
    spec = re.search(r'compression="([^"]+)"', page_of(name).read_text())[1]
    nbytes = get_compressor(spec).payload_bytes(TensorInfo.whole("w", (1024, 1024)))
    assert (size, times) == (f"{nbytes:,}", f"{4 * 2**20 / nbytes:.1f}")


def test_the_sizes_in_the_overview():
    rows = re.findall(r"^\| (`.+?) \| .+? \| 1/(\d+)(?: (?:at|of) .+?)? \|", (PAGES / "README.md").read_text(), re.M)
    specs = {"topk": "topk:ratio=0.01", "threshold": "threshold:tau=1"}
    for (name,), times in ((re.findall(r"`(\w+)`", names), int(times)) for names, times in rows):
        nbytes = get_compressor(specs.get(name, name)).payload_bytes(TensorInfo.whole("w", (1024, 1024)))
        assert times == pytest.approx(4 * 2**20 / nbytes, rel=0.04), name
    assert len(rows) == 10


def accepted(*knobs):
    name, *knobs = knobs
    try:
        return bool(get_compressor(f"{name}:{','.join(('tau=1',) * (name == 'threshold') + tuple(knobs))}"))
    except ValueError:
        return False


def test_what_goes_with_what():
    table = (PAGES / "README.md").read_text().partition("## What goes with what")[2].partition("\n## ")[0]
    (_, *columns), _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", table, re.M))
    columns = [column.strip("`") for column in columns]
    named = []
    for heads, *cells in rows:
        for head in re.findall(r"`([^`]+)`", heads):
            named.append(head)
            for column, cell in zip(columns, cells, strict=True):
                given = ["topk", head] if "=" in head else [head]
                expected = "yes" if accepted(*given, column) else "no"
                if expected == "no" and "memory" not in "".join(given) + column and accepted(*given, "memory=error_feedback", column):
                    expected = "with `memory=error_feedback`"
                assert cell == ("" if head == column else expected), (head, column)
    assert set(named) == set(OWN_CODES) | {column for column in columns if not column.startswith(("hierarchical", "schedule"))}
