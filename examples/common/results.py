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


@dataclass(frozen=True)
class Measure:
    """What a model is judged by.

    Attributes:
        name: in results.json.
        label: of an axis.
        scale: from a value to what is shown.
        unit: shown behind it.
    """

    name: str
    label: str
    scale: float = 1.0
    unit: str = ""

    def show(self, value: float) -> str:
        return f"{self.scale * value:.2f}{self.unit}"


ACCURACY = Measure("accuracy", "test accuracy", 100.0, " %")
BLEU = Measure("bleu", "BLEU")
_MEASURES = {measure.name: measure for measure in (ACCURACY, BLEU)}


@dataclass
class Run:
    """One model trained with one compressor."""

    compression: str
    progress: list[Point] = field(default_factory=list)
    """Some 200 points in time."""
    tests: list[tuple[Point, float]] = field(default_factory=list)
    """What the measure gave before the first epoch or not, and after each."""
    dense_bytes: int = 0
    """What one worker would have sent uncompressed."""
    measure: Measure = ACCURACY
    more: dict[str, Any] = field(default_factory=dict)
    """What else there is to say of the trained model."""

    @property
    def value(self) -> float:
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
        name = self.measure.name
        figures = {key: getattr(self, key) for key in ("seconds", "dense_bytes", "wire_bytes", "compression_ratio")}
        return {"compression": self.compression, name: self.value, **figures, **({"more": self.more} if self.more else {}),
                "tests": [{**dataclasses.asdict(point), name: value} for point, value in self.tests],
                "progress": [dataclasses.asdict(point) for point in self.progress]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """What :meth:`to_json` described."""
        measure = next(measure for name, measure in _MEASURES.items() if name in data)
        tests = [(Point(test["step"], test["seconds"], test["wire_bytes"]), test[measure.name]) for test in data["tests"]]
        return cls(data["compression"], [Point(**point) for point in data["progress"]], tests, data["dense_bytes"], measure,
                   data.get("more", {}))


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
    """The runs beside each other: test accuracy or BLEU, points above a dense one if there is one, what one worker sent."""
    dense = next((run for run in runs if run.compression == "none"), None)
    result = Table(title=title)
    result.add_column("compression", no_wrap=True)
    for heading in (runs[0].measure.name, "vs dense", "seconds", "bytes sent", "compression ratio"):
        result.add_column(heading, justify="right", overflow="fold")
    for run in runs:
        against = f"{run.measure.scale * (run.value - dense.value):+.2f}" if dense and run is not dense else "–"
        ratio = f"{run.compression_ratio:.1f}" if run.compression_ratio else "–"
        result.add_row(run.compression, run.measure.show(run.value), against, f"{run.seconds:.1f}",
                       format_bytes(run.wire_bytes), ratio)
    return result


def picture(runs: list[Run], title: str, path: Path) -> None:
    """Draw the measure and bytes over time, and the measure over bytes, into a PNG."""
    import matplotlib
    matplotlib.use("Agg")  # workers have no display
    from matplotlib import pyplot

    measure = runs[0].measure
    label = f"{measure.label},{measure.unit}" if measure.unit else measure.label
    figure, (quality, sent, both) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    figure.suptitle(title)
    for run in runs:
        points, values = zip(*((point, measure.scale * value) for point, value in run.tests))
        quality.plot([point.seconds for point in points], values, "o-", label=run.compression, markersize=3)
        sent.plot([point.seconds for point in run.progress], [point.wire_bytes / 1e6 for point in run.progress],
                  label=run.compression)
        trained = [(point.wire_bytes / 1e6, value) for point, value in zip(points, values) if point.step]
        both.plot(*zip(*trained), "o-", markersize=3)
    quality.set(xlabel="seconds of training", ylabel=label)
    sent.set(xlabel="seconds of training", ylabel="MB sent by a worker")
    both.set(xlabel="MB sent by a worker", ylabel=label)
    sent.legend(loc="lower right")
    if measure is ACCURACY:  # an untrained net's 10 % would leave no room for the rest
        quality.set_ylim(min(100 * value for run in runs for _, value in run.tests[1:]) - 1, 100)
    if any(run.wire_bytes for run in runs):
        sent.set_yscale("log")
        both.set_xscale("log")
    for axes in (quality, sent, both):
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
