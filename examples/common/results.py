"""What a training run gives: figures, a table, a picture, a JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Point:
    """How far training was at one moment, on worker 0."""

    step: int
    seconds: float
    wire_bytes: int


@dataclass
class Run:
    """One model trained with one compressor."""

    compression: str
    progress: list[Point] = field(default_factory=list)
    """Some 200 points in time."""
    tests: list[tuple[Point, float]] = field(default_factory=list)
    """Test accuracy before the first and after each epoch."""
    dense_bytes: int = 0
    """What one worker would have sent uncompressed."""

    @property
    def accuracy(self) -> float:
        return self.tests[-1][1]

    @property
    def seconds(self) -> float:
        """Training time, without the tests."""
        return self.tests[-1][0].seconds

    @property
    def wire_bytes(self) -> int:
        """What one worker sent."""
        return self.tests[-1][0].wire_bytes

    @property
    def compression_ratio(self) -> float | None:
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else None

    def to_json(self) -> dict[str, Any]:
        """The figures and, below them, the course of training."""
        figures = {name: getattr(self, name) for name in
                   ("compression", "accuracy", "seconds", "dense_bytes", "wire_bytes", "compression_ratio")}
        return {**figures,
                "tests": [{**dataclasses.asdict(point), "accuracy": accuracy} for point, accuracy in self.tests],
                "progress": [dataclasses.asdict(point) for point in self.progress]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """What :meth:`to_json` described."""
        tests = [(Point(test["step"], test["seconds"], test["wire_bytes"]), test["accuracy"]) for test in data["tests"]]
        return cls(data["compression"], [Point(**point) for point in data["progress"]], tests, data["dense_bytes"])


def format_bytes(count: float) -> str:
    """``count`` with a decimal unit and three figures or so: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            break
        count /= 1000
    else:
        unit = "TB"
    return f"{count:.0f} B" if unit == "B" else f"{count:.{2 - (count >= 10) - (count >= 100)}f} {unit}"


def table(runs: list[Run], title: str) -> Table:
    """The runs beside each other: test accuracy, points above a dense one if there is one, what one worker sent."""
    dense = next((run for run in runs if run.compression == "none"), None)
    result = Table(title=title)
    result.add_column("compression", no_wrap=True)
    for heading in ("accuracy", "vs dense", "seconds", "bytes sent", "compression ratio"):
        result.add_column(heading, justify="right", overflow="fold")
    for run in runs:
        against = f"{100 * (run.accuracy - dense.accuracy):+.2f}" if dense and run is not dense else "–"
        ratio = f"{run.compression_ratio:.1f}" if run.compression_ratio else "–"
        result.add_row(run.compression, f"{100 * run.accuracy:.2f} %", against, f"{run.seconds:.1f}",
                       format_bytes(run.wire_bytes), ratio)
    return result


def picture(runs: list[Run], title: str, path: Path) -> None:
    """Draw accuracy and bytes over time, and accuracy over bytes, into a PNG."""
    import matplotlib
    matplotlib.use("Agg")  # workers have no display
    from matplotlib import pyplot

    figure, (accuracy, sent, both) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    figure.suptitle(title)
    for run in runs:
        points, percent = zip(*((point, 100 * value) for point, value in run.tests))
        accuracy.plot([point.seconds for point in points], percent, "o-", label=run.compression, markersize=3)
        sent.plot([point.seconds for point in run.progress], [point.wire_bytes / 1e6 for point in run.progress],
                  label=run.compression)
        both.plot([point.wire_bytes / 1e6 for point in points[1:]], percent[1:], "o-", markersize=3)
    accuracy.set(xlabel="seconds of training", ylabel="test accuracy, %")
    sent.set(xlabel="seconds of training", ylabel="MB sent by a worker")
    both.set(xlabel="MB sent by a worker", ylabel="test accuracy, %")
    sent.legend(loc="lower right")
    # An untrained net's 10 % would leave no room for the rest.
    accuracy.set_ylim(min(100 * value for run in runs for _, value in run.tests[1:]) - 1, 100)
    if any(run.wire_bytes for run in runs):
        sent.set_yscale("log")
        both.set_xscale("log")
    for axes in (accuracy, sent, both):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def save(runs: list[Run], setting: dict[str, Any], title: str, folder: Path) -> tuple[Path, Path]:
    """Write results.json and results.png to ``folder``.

    Arguments:
        runs: what was measured.
        setting: what it was measured with.
        title: of the picture.
        folder: created where it is missing.

    Returns:
        The two paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures, drawing = folder / "results.json", folder / "results.png"
    figures.write_text(json.dumps({**setting, "runs": [run.to_json() for run in runs]}, indent=1) + "\n")
    picture(runs, title, drawing)
    return figures, drawing
