"""The report of the exchange benchmark: limits, tables, plots, and the page that they go into."""

import json
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pages
from allreduce_grid import (
    BASELINE,
    COMPRESSED,
    DETAILED,
    HOROVOD_FP16,
    IDEAL,
    MAIN,
    POWERSGD,
    ROWS,
    SQUARES,
    WORKLOADS,
    Key,
    Point,
    variants,
)
from cluster import HEADERS, bits_per_second
from rich import box
from rich.console import Console
from rich.table import Table

from hvd_quant import get_compressor
from hvd_quant.compressors import TensorInfo
from hvd_quant.exchange import sent_bytes


def limit(point: Point) -> float:
    """Seconds that physics asks for: the worker's bytes through its link, then one streaming pass an encode and a decode."""
    rate = bits_per_second(point["rate"])
    wire = point.get("wire_bytes", point["link_bytes"]) * HEADERS * 8 / rate if rate else 0.0
    return wire + sum(point.get(f"{what}_bytes", 0) / point["memory"][what] for what in ("encode", "decode"))


def ms(seconds: float | None) -> str:
    return "" if seconds is None else digits(1e3 * seconds)


def mb(count: float | None) -> str:
    return "" if count is None else digits(count / 1e6)


def digits(value: float) -> str:
    """With three digits or more, two of them at most behind the point; or with the first that isn't zero."""
    if 0 < value < 0.095:
        return f"{value:.1g}"
    return f"{value:,.{2 - (value >= 9.995) - (value >= 99.95)}f}"


Index = dict[Key, Point]


def headed(first: str, rest: Iterable[str], style: box.Box, title: str | None) -> Table:
    table = Table(title=title, box=style)
    table.add_column(first, no_wrap=True)
    for heading in rest:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def overview(points: Index, workers: int, rate: str, style: box.Box = box.HEAVY_HEAD, title: str | None = None) -> Table:
    """Milliseconds of every competitor on every workload, and how many times faster than Horovod fp32 it is."""
    there = {(key.workload, key.row): point for key, point in points.items() if key[:2] == (workers, rate)}
    workloads = [workload for workload in WORKLOADS if any(workload == known for known, _ in there)]
    table = headed("ms (speed-up)", workloads, style, title)
    for row in (row for row in ROWS if any(row == known for _, known in there)):
        cells = []
        for workload in workloads:
            point, base = there.get((workload, row)), there.get((workload, BASELINE))
            gain = f" ({base['seconds'] / point['seconds']:.2f})" if point and base else ""
            cells.append(ms(point["seconds"]) + gain if point else "")
        table.add_row(row, *cells)
    return table


def details(points: Index, workers: int, rate: str, workload: str, style: box.Box = box.HEAVY_HEAD,
            title: str | None = None) -> Table:
    """One workload's competitors with all that was measured of them, and their limits."""
    columns = ("ms", "quartiles", "speed-up", "encode", "wait", "decode", "limit", "ideal", "MB sent", "on the link")
    table = headed(workload, columns, style, title)
    base = points.get(Key(workers, rate, workload, BASELINE))
    for row in ROWS:
        if not (point := points.get(Key(workers, rate, workload, row))):
            continue
        ideal = points.get(Key(workers, rate, workload, IDEAL + row))
        table.add_row(
            row, ms(point["seconds"]), " … ".join(map(ms, point["quartiles"])),
            f"{base['seconds'] / point['seconds']:.2f}" if base else "",
            *(ms(point.get(f"{what}_seconds")) for what in ("encode", "wait", "decode")),
            ms(limit(point)), ms(ideal["seconds"]) if ideal else "", mb(point.get("wire_bytes")), mb(point["link_bytes"]))
    return table


def choices(points: Index, style: box.Box = box.HEAVY_HEAD, title: str | None = None) -> Table:
    """What auto chose, beside the fastest of its code's exchanges and Horovod's fp32 and fp16; a cross where it took over 10 % and
    2 ms longer."""
    table = headed("workers, rate, workload", ("code", "fastest", "ms", "auto travelled", "auto ms", "longer", "ms longer", ""), style, title)
    for key, chosen in points.items():
        if not key.row.startswith("auto:"):
            continue
        code = key.row.removeprefix("auto:")
        fixed = {row: points[other] for row in (*variants(code, "allgather", "sra"), BASELINE, HOROVOD_FP16)
                 if (other := key._replace(row=row)) in points}
        if len(fixed) > 1:
            name, best = min(fixed.items(), key=lambda item: item[1]["seconds"])
            longer = chosen["seconds"] - best["seconds"]
            table.add_row(", ".join(map(str, key[:3])), code, name.removeprefix(f"{code}:exchange="), ms(best["seconds"]),
                          ", ".join(f"{count} {kind}" for kind, count in chosen["exchanges"].items() if count), ms(chosen["seconds"]),
                          f"{100 * longer / best['seconds']:+.0f} %", f"{1e3 * longer:+.1f}",
                          "✗" if longer > max(0.1 * best["seconds"], 2e-3) else "")
    return table


def tables(results: dict[str, Any], style: box.Box = box.HEAVY_HEAD) -> Iterator[tuple[str, Table]]:
    """All tables with their titles: an overview for each number of workers and rate, then the workloads measured in detail."""
    points = {Key.of(point): point for point in results["points"]}
    places = sorted({key[:2] for key in points}, key=lambda place: (place[0], bits_per_second(place[1]) or float("inf")))
    for workers, rate in places:
        yield f"{workers} workers, {rate}", overview(points, workers, rate, style)
    for workers, rate in places:
        for workload in DETAILED:
            table = details(points, workers, rate, workload, style)
            if table.row_count:
                yield f"{workload}, {workers} workers, {rate}, in detail", table
    if (table := choices(points, style)).row_count:
        yield "auto and the fastest fixed choice", table


def exchanged_bytes(spec: str, numel: int, workers: int) -> float:
    """Bytes that one worker sends for a vector, by calculation; for an sra those of ranges, each with its header."""
    compressor, info = get_compressor(spec.partition(":exchange")[0].partition(",exchange")[0]), TensorInfo.whole("", (numel,))
    if spec.endswith("=allgather"):
        return (workers - 1) * compressor.payload_bytes(info)
    return 2 * (workers - 1) * compressor.payload_bytes(info.part(0, -(-numel // workers)))


def style_of(row: str) -> dict[str, Any]:
    """A line's colour by code, its dashes by exchange."""
    groups = ("Horovod fp16", "DDP fp32", "DDP fp16", "DDP PowerSGD", "onebit", "adaptive", "topk", "threshold")
    place = next((i for i, group in enumerate(groups) if group in row), len(groups))
    return {"color": f"C{place}", "linestyle": "--" if "sra" in row else ":" if row.startswith("auto") else "-", "label": row}


def plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what there are points for; the files that were written."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = {Key.of(point): point for point in results["points"]}
    rates = sorted({key.rate for key in points if key.workers == 4}, key=lambda rate: bits_per_second(rate) or float("inf"))
    written = []

    def finish(figure: Any, name: str) -> None:
        written.append(folder / name)
        figure.savefig(written[-1], dpi=110)
        pyplot.close(figure)

    def panels(height: float) -> tuple[Any, Any]:
        figure, axes = pyplot.subplots(1, len(rates), figsize=(2 + 4.5 * len(rates), height), layout="constrained", sharey=True,
                                       squeeze=False)
        for axis, rate in zip(axes[0], rates):
            axis.set_title(f"4 workers, {rate}")
            axis.grid(alpha=0.3)
        return figure, axes[0]

    bases = {key[1:3]: point["seconds"] for key, point in points.items() if key.workers == 4 and key.row == BASELINE}
    if bases:
        figure, axes = panels(5.5)
        for axis, rate in zip(axes, rates):
            for row in MAIN[1:]:
                line = {n: bases[rate, f"{n}x{n}"] / points[key]["seconds"] for n in SQUARES
                        if (rate, f"{n}x{n}") in bases and (key := Key(4, rate, f"{n}x{n}", row)) in points}
                if line:
                    axis.plot(line.keys(), line.values(), marker="o", markersize=3, **style_of(row))
            axis.axhline(1.0, color="black", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_xlabel("n, of an n × n layer")
        axes[0].set_ylabel("times faster than Horovod fp32")
        lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(lines.values(), lines.keys(), loc="outside right center", fontsize=8)
        finish(figure, "speedup.png")

    # Without the dense ones, beside whose bars the others' parts could not be seen.
    shown = [*COMPRESSED, *(row for row in MAIN if row.startswith("auto")), POWERSGD]
    rows = [row for one in shown for row in (one, IDEAL + one)
            if any(key.workers == 4 and key[2:] == ("4096x4096", row) for key in points)]
    if rows:
        figure, axes = panels(1.5 + 0.27 * len(rows))
        for axis, rate in zip(axes, rates):
            for height, row in enumerate(reversed(rows)):
                if not (point := points.get(Key(4, rate, "4096x4096", row))):
                    continue
                left = 0.0
                for what, color in (("encode", "C0"), ("wait", "C1"), ("decode", "C2"), ("rest", "0.7")):
                    width = max(0.0, point["seconds"] - left) if what == "rest" else point.get(f"{what}_seconds", 0.0)
                    axis.barh(height, 1e3 * width, left=1e3 * left, color=color, label=what)
                    left += width
                axis.plot(1e3 * limit(point), height, "k|", markersize=10, label="limit")
            axis.set_yticks(range(len(rows)), reversed(rows), fontsize=8)
            axis.set_xlabel("ms, 4096 × 4096")
        legend = dict(zip(*reversed(axes[0].get_legend_handles_labels())))
        figure.legend(legend.values(), legend.keys(), loc="outside right center")
        finish(figure, "breakdown.png")

    counts = [2**k for k in range(1, 11)]
    figure, axis = pyplot.subplots(figsize=(10, 5), layout="constrained")
    numel = 4096**2
    axis.plot(counts, [sent_bytes("allreduce", 4 * numel, n) / 1e6 for n in counts], color="black", label=BASELINE)
    for row in COMPRESSED:
        axis.plot(counts, [exchanged_bytes(row, numel, n) / 1e6 for n in counts], **style_of(row))
    for row in (BASELINE, *COMPRESSED):
        sent = {key.workers: point["link_bytes"] / 1e6 for key, point in points.items() if key[1:] == (rates[0], "4096x4096", row)
                } if rates else {}
        axis.plot(sent.keys(), sent.values(), "o", color="black" if row == BASELINE else style_of(row)["color"])
    axis.set(xlabel="workers", ylabel="MB sent by a worker, 4096 × 4096", title="by calculation; dots: measured at the link")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    finish(figure, "bytes.png")
    return written


BEGIN = pages.begin("benchmarks/allreduce.py report")
CAPTIONS = {"speedup.png": "Times faster than Horovod fp32, by layer",
            "breakdown.png": "Where the time of a 4096 × 4096 layer goes", "bytes.png": "Bytes a worker sends"}


def markdown(results: dict[str, Any], images: Iterable[Path]) -> str:
    """The report's section of a Markdown page."""
    facts, controller, loads = results["machine"], results["settings"]["controller"], [p["load"] for p in results["points"]]
    lines = [f"{facts['cores']} cores of {facts['cpu']}, {facts['simd']}; PyTorch {facts['torch']}, Horovod {facts['horovod']} "
             f"on {controller}, hvd_quant {facts['hvd_quant']}, Python {facts['python']}. Load averages before the launches: "
             f"{min(loads):.1f} to {max(loads):.1f}.", ""]
    for image in images:
        lines += [f"![{CAPTIONS[image.name]}]({image.name})", ""]
    for title, table in tables(results, box.MARKDOWN):
        text = StringIO()
        Console(file=text, width=10000, color_system=None).print(table)
        head, _, *rows = (line.strip() for line in text.getvalue().strip().splitlines())
        lines += [f"### {title}", "", head, "|---|" + "---:|" * (len(table.columns) - 1), *rows, ""]
    return "\n".join(lines)


def report(path: Path, page: Path) -> None:
    """Write tables into the page, between its marks, and plots beside it.

    Raises:
        ValueError: if the page has no marks, or the file no points.
    """
    results = json.loads(path.read_text())
    if not results["points"]:
        raise ValueError(f"{path} has no points")
    pages.write(page, BEGIN, markdown(results, plots(results, page.parent)))
