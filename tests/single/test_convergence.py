"""The convergence benchmark without workers: what it measures, that it goes on where it was, and what it reports."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import convergence  # noqa: E402
import convergence_grid as grid  # noqa: E402
import convergence_report  # noqa: E402
import pages  # noqa: E402
from convergence_grid import TASKS, UNSHAPED, Run  # noqa: E402

from hvd_quant import get_compressor  # noqa: E402


# ----------------------------------------------------------------------------------------------------------- the matrix

def test_the_matrix_has_what_the_papers_claim_and_room_in_an_evening():
    runs = grid.matrix()
    assert len(set(runs)) == len(runs) and sum(map(grid.estimate, runs)) < 5 * 3600
    courses = {(run.task, run.scheme) for run in runs if run.kind == "course" and run.workers == 4 and run.rate == UNSHAPED}
    assert courses >= {("mnist-4096", name) for name in ("none", "onebit", "adaptive")}
    assert courses >= {(task, f"topk:ratio={ratio}") for task in ("mnist", "transformer") for ratio in ("0.1", "0.01", "0.001")}
    assert courses >= {("mnist", grid.AVERAGED.format(i)) for i in (1, 4, 16, 64)}
    assert courses >= {(task, name) for task in ("transformer", "rnn") for name in (grid.DROPPED, *grid.MERGED)}
    for task, name in courses:  # each has a pace, and what it is compared with
        assert {Run("pace", task, name, 4, grid.RATE), Run("pace", task, "none", 1, UNSHAPED), Run("course", task, "none", 4, UNSHAPED)} <= set(runs)
    for task in ("mnist", "transformer"):
        assert {run.seed for run in runs if run.task == task and run.scheme == "none"} == {1, 2, 3}
        whole = [run.scheme for run in runs if run.task == task and run.rate == grid.RATE and run.kind == "course"]
        assert len(whole) == 2 and whole[0] == "none"
    specs = {get_compressor(grid.scheme(run.scheme).spec) for run in runs}
    assert {spec.exchange for spec in specs if spec.name not in grid.HOROVOD} == {"sra"} and "fp16:exchange=allreduce" in {s.spec for s in specs}
    assert grid.scheme("averaged every 16 steps").every == 16 and grid.scheme("onebit").every == 0


def test_the_short_form_is_short():
    runs = grid.matrix(short=True)
    assert sum(map(grid.estimate, runs)) < 17 * 60 and {run.task for run in runs} == {"mnist-short", "transformer-short"}
    assert not set(runs) & set(grid.matrix())


def test_runs_share_their_processes():
    groups = dict(grid.launches(grid.matrix()))
    assert set(groups) == {(1, UNSHAPED), (2, grid.RATE), (4, UNSHAPED), (4, grid.RATE)}
    assert sum(map(len, groups.values())) == len(grid.matrix())


@pytest.mark.parametrize("name", TASKS)
def test_tasks_say_what_their_examples_take(name):
    pytest.importorskip("sacrebleu", reason="pip install 'hvd_quant[examples]'")
    pytest.importorskip("sentencepiece", reason="pip install 'hvd_quant[examples]'")
    from common import arguments, nmt
    task = TASKS[name]
    if task.example == "mnist":
        parsed = arguments.parse("", argv=list(task.arguments))
        assert task.steps == 60000 // (4 * parsed.batch_size) * parsed.epochs
    else:
        parsed = nmt.parse("", ("transformer", "rnn"), argv=list(task.arguments))
        assert (parsed.steps, parsed.steps // parsed.evaluate_every) == (task.steps, task.tests)


# ------------------------------------------------------------------------------------------------------------- resuming

def course(task, scheme, values, *, workers=4, rate=UNSHAPED, seed=1, end=True, seconds=0.0, wire=1e6, **more):
    run = Run("course", task, scheme, workers, rate, seed)
    return [{**run._asdict(), "step": 10 * i, "value": value, "seconds": seconds * i, "wire_bytes": wire * i, "dense_bytes": 4e6 * i,
             "end": end and i == len(values), **more} for i, value in enumerate(values, 1)]


def pace(task, scheme, seconds, *, workers=4, **more):
    run = Run("pace", task, scheme, workers, UNSHAPED if workers == 1 else grid.RATE)
    return {**run._asdict(), "seconds": seconds, "quartiles": [seconds, seconds], "steps": 60, "entries": 10, "end": True, **more}


def test_what_was_cut_short_is_measured_again(tmp_path):
    file = tmp_path / "new" / "results.jsonl"
    whole, part = course("mnist", "none", [0.9, 0.98]), course("mnist", "topk", [0.8, 0.9], end=False)
    runs = [Run.of(whole[0]), Run.of(part[0]), Run("pace", "mnist", "none", 4, grid.RATE)]
    assert convergence.begin(file, runs) == runs and file.read_text() == ""
    file.write_text("".join(json.dumps(line) + "\n" for line in [*part[:1], *whole, pace("mnist", "none", 0.2), *part[1:]]) + '{"kind": "cou')
    assert convergence.begin(file, runs) == [runs[1]]
    assert convergence.load(file) == [*whole, pace("mnist", "none", 0.2)]
    assert convergence.begin(file, runs) == [runs[1]] and len(convergence.load(file)) == 3


class Subject:
    """Gets better by one with each step."""

    def __init__(self, steps, every):
        self.steps, self.every, self.done = steps, every, 0
        self.optimizer = self

    def advance(self):
        while True:
            self.done += 1
            yield

    def evaluate(self):
        return float(self.done)

    def compression_stats(self):
        return {"wire_bytes": 5 * self.done, "dense_bytes": 50 * self.done}

    def finish(self):
        return {"test_bleu": 7.0}


def test_a_course_tells_of_each_evaluation():
    lines, run = [], Run("course", "mnist", "topk", 4, UNSHAPED)
    convergence.course(run, Subject(25, 10), lines.append)
    assert [(line["step"], line["value"], line["wire_bytes"], line["end"]) for line in lines] == [
        (10, 10.0, 50, False), (20, 20.0, 100, False), (25, 25.0, 125, True)]
    assert lines[-1]["test_bleu"] == 7.0 and "test_bleu" not in lines[0] and Run.of(lines[0]) == run
    assert convergence.complete(lines) == lines and convergence.complete(lines[:2]) == []


def test_what_there_is_to_do_is_chosen_and_listed(capsys, tmp_path):
    assert convergence.main(["run", "--list", "--tasks", "rnn", "--kinds", "course", "--schemes", "none", "topk*replace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("course rnn" in line for line in lines[:3]) and lines[3].startswith("3 runs, about 0.")
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in course("rnn", "none", [1.0])))
    convergence.main(["run", "--list", "--json", str(file), "--tasks", "rnn", "--kinds", "course", "--schemes", "none"])
    assert "1 runs" in capsys.readouterr().out  # that of one worker


def test_each_launch_gets_its_runs(monkeypatch, tmp_path, capsys):
    launched = []
    monkeypatch.setattr(convergence, "launch", lambda *arguments: launched.append(arguments) or 0)
    monkeypatch.setattr(convergence, "prepare_data", lambda runs: None)
    monkeypatch.setattr(convergence, "unavailable", lambda: "no root")
    file = tmp_path / "x.jsonl"
    assert convergence.main(["run", "--json", str(file), "--tasks", "mnist-4096"]) == 0
    assert [arguments[:2] for arguments in launched] == [(4, UNSHAPED), (1, UNSHAPED)]
    assert "Left out is what needs a slow network: no root" in capsys.readouterr().err
    monkeypatch.setattr(convergence, "launch", lambda *arguments: 3)
    assert convergence.main(["run", "--json", str(file)]) == 3


# ---------------------------------------------------------------------------------------------------------------- report

@pytest.fixture
def lines():
    """Dense needs 30 steps to 98 %, one dropped seed in three never gets there."""
    reached = {"none": 30, "fp16": 30, "topk:ratio=0.01": 40}
    found = []
    for scheme, steps in reached.items():
        for seed in (1, 2, 3):
            values = [0.98 + 0.0001 * seed if step >= steps and (scheme, seed) != ("topk:ratio=0.01", 3) else 0.9 for step in (10, 20, 30, 40, 50)]
            found += course("mnist", scheme, values, seed=seed, wire=1e6 if "topk" in scheme else 1e8)
        found.append(pace("mnist", scheme, {"none": 0.3, "fp16": 0.2, "topk:ratio=0.01": 0.05}[scheme], exchange_seconds=0.04))
    end = {"test_bleu": 21.5, "signature": "nrefs:1", "beam": 4}
    for scheme, final in (("none", 20.0), ("topk:ratio=0.01", 18.0), ("topk:ratio=0.01,merge=replace", 19.9)):
        found += course("transformer", scheme, [5.0, final], **end)
    found += course("transformer", "none", [3.0, 12.0], workers=1, **end)
    found += course("mnist", "none", [0.9, 0.98], rate=grid.RATE, seconds=3.3)
    return [*found, pace("mnist", "none", 0.02, workers=1), pace("mnist", "none", 0.25, workers=2)]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_is_steps_times_their_time(lines):
    results = convergence_report.Results(lines)
    table = convergence_report.table(results, "mnist", results.rows("mnist")).splitlines()
    none, fp16, topk = (cells(line) for line in table[2:])
    assert none == ["`none`", "4", "3", "98.02 %", "", "500", "300", "30", "9.0", "", "0.67", "60", "1.8"]
    assert fp16[6:11] == ["200", "30", "6.0", "1.50", ""]
    assert topk == ["`topk:ratio=0.01`", "4", "3", "98.01 %", "−0.01", "5", "50", "40", "2.0", "4.50", "3.00", "60", "2.4"]
    assert "steps to 98.00 %" in table[0]


def test_bleu_is_compared_with_denses(lines):
    results = convergence_report.Results(lines)
    assert results.target("transformer") == pytest.approx(19.7) and results.target("rnn") is None
    rows = {(row.scheme, row.workers): row.steps for row in results.rows("transformer")}
    assert rows == {("none", 4): 20, ("topk:ratio=0.01", 4): None, ("topk:ratio=0.01,merge=replace", 4): 20, ("none", 1): None}
    table = convergence_report.table(results, "transformer", results.rows("transformer"))
    assert "| 18.00 | −2.00 |" in table and "steps to 19.70" in table
    assert "| `none` | 1 | 21.50 |" in convergence_report.judged(results.rows("transformer"))


def test_the_product_is_proved_and_scaling_shown(lines):
    results = convergence_report.Results(lines)
    assert "| MNIST, 3 × 1024 units | `none` | 7 | 6 | 1.10 |" in convergence_report.proofs(results)
    scaling = convergence_report.scaling(results).splitlines()
    assert "| MNIST, 3 × 1024 units | `none` | 2 | 250 | 0.16 |" in scaling and "| MNIST, 3 × 1024 units | `none` | 1 | 20 | 1.00 |" in scaling


def test_the_page_has_what_was_measured_and_nothing_else(lines, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    page = tmp_path / "README.md"
    page.write_text(f"# before\n{convergence_report.BEGIN}\nold\n{pages.END}\nafter\n")
    for _ in range(2):
        convergence_report.report(lines, page)
    text = page.read_text()
    assert text.startswith("# before\n") and text.endswith(f"{pages.END}\nafter\n") and "\nold\n" not in text
    assert "### Aji, Heafield 2017" in text and "### Aji, Heafield, Bogoychev 2019" in text
    assert "Dryden" not in text and "Yu, Yang" not in text and "RNN" not in text and "short" not in text.lower()
    for name in ("mnist.png", "transformer.png"):
        assert f"]({name})" in text and (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    convergence_report.report(lines, tmp_path / "new.md")
    assert "### Aji, Heafield 2017" in (tmp_path / "new.md").read_text()
    convergence_report.report(lines, None)
    assert "### Aji, Heafield 2017" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no complete run"):
        convergence_report.report([], page)
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        convergence_report.report(lines, page)


def test_the_real_page_has_its_marks():
    text = (ROOT / "docs" / "papers" / "README.md").read_text()
    assert text.count(convergence_report.BEGIN) == text.count(pages.END) == 1
