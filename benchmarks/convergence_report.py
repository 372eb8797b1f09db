"""Tables, plots and a Markdown page of what the convergence benchmark has measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
from convergence_grid import AVERAGINGS, DROPPED, DROPPING, HOROVOD, MERGED, QUANTISED, RATE, TASKS, UNSHAPED, Run

Line = dict[str, Any]
Course = list[Line]
"""The evaluations of one run, in order."""

BEGIN = pages.begin("benchmarks/convergence.py report")

PAPERS = [
    ("Dryden, Moon, Jacobs, Van Essen 2016: quantised and sparse gradients", ("mnist", "mnist-4096"), QUANTISED),
    ("Aji, Heafield 2017: gradient dropping", ("mnist", "transformer"), DROPPING),
    ("Aji, Heafield, Bogoychev 2019: local gradients beside the global ones", ("transformer", "rnn"), [DROPPED, *MERGED]),
    ("Yu, Yang, Zhu 2019: model averaging", ("mnist",), AVERAGINGS),
    ("The short form", ("mnist-short", "transformer-short"), [*QUANTISED, *DROPPING, *MERGED]),
]
"""A heading, and the tasks and schemes whose rows stand below it, beside Horovod's."""


@dataclass(frozen=True)
class Row:
    """A scheme on a task with some workers: medians over its seeds.

    Attributes:
        courses: of each seed.
        step_seconds: of a step at the rate, if its pace was taken.
        modelled_seconds: of a step on hosts of their own: a single worker's step here, and the exchange.
        steps: to the target; None if half of the seeds or more didn't get there.
    """

    task: str
    scheme: str
    workers: int
    courses: list[Course]
    step_seconds: float | None
    modelled_seconds: float | None
    steps: int | None

    @property
    def final(self) -> float:
        return statistics.median(course[-1]["value"] for course in self.courses)

    @property
    def megabytes(self) -> float:
        return statistics.median(course[-1]["wire_bytes"] for course in self.courses) / 1e6

    @property
    def seconds(self) -> float | None:
        """To the target."""
        return self.steps * self.step_seconds if self.steps and self.step_seconds else None


class Results:
    """The lines of complete runs, by what they tell."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.courses: dict[Run, Course] = {}
        self.paces: dict[Run, Line] = {}
        for line in lines:
            run = Run.of(line)
            if run.kind == "pace":
                self.paces[run] = line
            else:
                self.courses.setdefault(run, []).append(line)
        for course in self.courses.values():
            course.sort(key=lambda line: line["step"])

    def seeds(self, task: str, scheme: str, workers: int) -> list[Course]:
        return [course for run, course in self.courses.items() if run[1:5] == (task, scheme, workers, UNSHAPED)]

    def pace(self, task: str, scheme: str, workers: int) -> Line | None:
        return self.paces.get(Run("pace", task, scheme, workers, UNSHAPED if workers == 1 else RATE))

    def target(self, task: str) -> float | None:
        """What is to be reached; below dense's final value if the task says so, and then None without dense courses."""
        wished = TASKS[task].target
        if wished > 0:
            return wished
        dense = self.seeds(task, "none", 4)
        return statistics.median(course[-1]["value"] for course in dense) + wished if dense else None

    def row(self, task: str, scheme: str, workers: int = 4) -> Row | None:
        """None if there are no courses."""
        courses = self.seeds(task, scheme, workers)
        if not courses:
            return None
        pace, alone = self.pace(task, scheme, workers), self.pace(task, "none", 1)
        exchange = pace and pace.get("exchange_seconds")
        modelled = alone["seconds"] + exchange if alone and exchange else None
        return Row(task, scheme, workers, courses, pace and pace["seconds"], modelled, reached(courses, self.target(task)))

    def rows(self, task: str, schemes: Iterable[str] | None = None) -> list[Row]:
        """Horovod's rows, then those of the schemes, or of all, then that of one worker."""
        if schemes is None:
            schemes = (run.scheme for run in self.courses if run.task == task)
        names = dict.fromkeys([*HOROVOD, *schemes])
        found = [self.row(task, name) for name in names] + [self.row(task, "none", 1)]
        return [row for row in found if row]


def reached(courses: list[Course], target: float | None) -> int | None:
    """The median of the steps at which a course's value first was at the target."""
    if target is None:
        return None
    steps = sorted(next((line["step"] for line in course if line["value"] >= target), 10**9) for course in courses)
    median = statistics.median_high(steps)
    return median if median < 10**9 else None


# --------------------------------------------------------------------------------------------------------------- tables

def show(task: str, value: float) -> str:
    return f"{100 * value:.2f} %" if TASKS[task].example == "mnist" else f"{value:.2f}"


def number(value: float | None, form: str = ",.0f", factor: float = 1.0) -> str:
    return "" if value is None else format(factor * value, form)


def times(slower: Row | None, faster: Row) -> str:
    """How many times less time the target takes."""
    if slower is None or slower is faster or slower.seconds is None or faster.seconds is None:
        return ""
    return f"{slower.seconds / faster.seconds:.2f}"


def table(results: Results, task: str, rows: list[Row]) -> str:
    """The rows beside each other, in Markdown."""
    horovod = {row.scheme: row for row in rows if row.scheme in HOROVOD and row.workers > 1}
    dense = horovod.get("none")
    best = min((row for row in horovod.values() if row.seconds), key=lambda row: row.seconds, default=None)
    target = results.target(task)
    wished = "" if target is None else f" to {show(task, target)}"
    measure = "accuracy" if TASKS[task].example == "mnist" else "BLEU"
    heads = ["scheme", "workers", "seeds", measure, "against dense", "MB sent", "ms a step", f"steps{wished}",
             f"seconds{wished}", "× none", "× the better of none and fp16", "modelled, ms a step", "modelled seconds"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        scale = 100 if measure == "accuracy" else 1
        against = "" if dense is None or row is dense else f"{scale * (row.final - dense.final):+.2f}"
        modelled = row.steps * row.modelled_seconds if row.steps and row.modelled_seconds else None
        cells = [f"`{row.scheme}`", str(row.workers), str(len(row.courses)), show(task, row.final), against.replace("-", "−"),
                 number(row.megabytes), number(row.step_seconds, ",.0f", 1e3), number(row.steps) if row.steps else "–",
                 number(row.seconds, ",.1f"), times(dense, row), times(best, row), number(row.modelled_seconds, ",.0f", 1e3),
                 number(modelled, ",.1f")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def judged(rows: list[Row]) -> str:
    """The test set's BLEU, which is looked at once, at the end of a course."""
    lines = ["| scheme | workers | BLEU of the test set |", "|---|---:|---:|"]
    for row in rows:
        score = statistics.median(course[-1]["test_bleu"] for course in row.courses)
        lines.append(f"| `{row.scheme}` | {row.workers} | {score:.2f} |")
    end = rows[0].courses[0][-1]
    return "\n".join(lines) + f"\n\nSacreBLEU's signature: `{end['signature']}`, beam {end['beam']}."


def proofs(results: Results) -> str:
    """What was trained to its end at the rate, against the product of steps and their time."""
    lines = ["| task | scheme | seconds of training, measured | steps × median step | ratio |", "|---|---|---:|---:|---:|"]
    for run, course in results.courses.items():
        pace = results.pace(run.task, run.scheme, run.workers)
        if run.rate == RATE and pace:
            end, product = course[-1], course[-1]["step"] * pace["seconds"]
            lines.append(f"| {TASKS[run.task].title} | `{run.scheme}` | {end['seconds']:,.0f} | {product:,.0f} | "
                         f"{end['seconds'] / product:.2f} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def scaling(results: Results) -> str:
    """Examples a second of dense and compressed training by the number of workers, where there are several numbers."""
    lines = ["| task | scheme | workers | ms a step | times one worker's speed |", "|---|---|---:|---:|---:|"]
    for task in TASKS:
        alone = results.pace(task, "none", 1)
        paces = sorted((run for run in results.paces if run.task == task and run.workers > 1),
                       key=lambda run: (run.scheme, run.workers))
        if alone and len({run.workers for run in paces}) > 1:
            lines.append(f"| {TASKS[task].title} | `none` | 1 | {1e3 * alone['seconds']:,.0f} | 1.00 |")
            lines += [f"| {TASKS[task].title} | `{run.scheme}` | {run.workers} | {1e3 * results.paces[run]['seconds']:,.0f} | "
                      f"{run.workers * alone['seconds'] / results.paces[run]['seconds']:.2f} |" for run in paces]
    return "\n".join(lines) if len(lines) > 2 else ""


# ---------------------------------------------------------------------------------------------------------------- plots

def plot(results: Results, task: str, rows: list[Row], path: Path) -> None:
    """The value over steps, over bytes, and over time where there are paces; the median of the seeds at each step."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    scale = 100 if TASKS[task].example == "mnist" else 1
    figure, (over_steps, over_bytes, over_time) = pyplot.subplots(1, 3, figsize=(16, 4.6), layout="constrained", sharey=True)
    figure.suptitle(f"{TASKS[task].title}; time at {RATE}")
    for index, row in enumerate(rows):
        steps = sorted({line["step"] for course in row.courses for line in course})
        at = {step: [line for course in row.courses for line in course if line["step"] == step] for step in steps}
        values = [scale * statistics.median(line["value"] for line in at[step]) for step in steps]
        style = {"color": "black" if row.scheme == "none" else f"C{index}", "linestyle": ":" if row.workers == 1 else "-",
                 "label": f"{row.scheme}, one worker" if row.workers == 1 else row.scheme, "marker": "o", "markersize": 2}
        over_steps.plot(steps, values, **style)
        if row.workers > 1:
            over_bytes.plot([statistics.median(line["wire_bytes"] for line in at[step]) / 1e6 for step in steps], values, **style)
            over_bytes.set_xscale("log")
        if row.step_seconds:
            over_time.plot([step * row.step_seconds for step in steps], values, **style)
    target = results.target(task)
    for axes, label in ((over_steps, "steps"), (over_bytes, "MB sent by a worker"), (over_time, "seconds of training")):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if target is not None:
            axes.axhline(scale * target, color="0.6", linewidth=1)
    over_steps.set_ylabel("test accuracy, %" if scale == 100 else "BLEU")
    if scale == 100:  # the first evaluations would leave no room for the rest
        over_steps.set_ylim(100 * min(row.final for row in rows) - 3, 100 * max(row.final for row in rows) + 0.3)
    figure.legend(*over_steps.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


# ----------------------------------------------------------------------------------------------------------------- page

def sections(results: Results, folder: Path | None) -> Iterator[str]:
    """The report, part by part; plots go into the folder."""
    for heading, tasks, schemes in PAPERS:
        parts = []
        for task in tasks:
            rows = results.rows(task, schemes)
            if any(row.scheme in schemes and row.scheme not in HOROVOD for row in rows):
                parts += [f"**{TASKS[task].title}**", table(results, task, rows)]
                if TASKS[task].example == "nmt":
                    parts.append(judged(rows))
        if parts:
            yield "\n\n".join([f"### {heading}", *parts])
    for heading, text in (("Times at 1 Gb/s, proved", proofs(results)), ("Scaling at 1 Gb/s", scaling(results))):
        if text:
            yield f"### {heading}\n\n{text}"
    for task in TASKS:
        rows = results.rows(task)
        if rows and folder:
            plot(results, task, rows, folder / f"{task}.png")
            yield f"![{TASKS[task].title}: over steps, over bytes, over time]({task}.png)"


def report(lines: Iterable[Line], page: Path | None) -> None:
    """Write tables into the page, between its marks, and plots beside it, making a new one where there is none; or print tables.

    Raises:
        ValueError: if the page has no marks, or there are no lines.
    """
    results = Results(lines)
    if not results.courses and not results.paces:
        raise ValueError("there is no complete run to report")
    if page is None:
        print("\n\n".join(sections(results, None)))
        return
    if not page.exists():
        page.write_text(f"# Accuracy and BLEU over time\n\n{BEGIN}\n{pages.END}\n")
    pages.write(page, BEGIN, "\n\n".join(sections(results, page.parent)))
