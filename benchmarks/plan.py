"""What `hvd-quant plan` predicts, against what the exchange benchmark has measured.

First network and codes are measured, as `hvd-quant bench exchange` does it, between the hosts of a `Cluster`, for each number
of workers and each rate of the benchmark: 10 to 60 seconds each. Then every point of the benchmark is predicted by that, and by
the rate alone with codes as they run here in one process. Rows that aren't what plan predicts are left out: Horovod's own fp16,
DDP, and the streaming twins.

    python benchmarks/plan.py calibrate            # writes docs/benchmarks/calibration.json; needs root
    python benchmarks/plan.py check                # reads it and docs/benchmarks/allreduce.json; --all lists every point
    python benchmarks/plan.py check --write        # puts the shares into docs/plan.md too
"""

import argparse
import collections
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pages
import torch
from allreduce_grid import BASELINE, CODES, HOROVOD_FP16, IDEAL, WORKLOADS, Point, entries
from allreduce_workers import Workers
from cluster import Cluster, ClusterError
from rich.console import Console
from rich.table import Column, Table

from hvd_quant import TensorInfo, get_compressor
from hvd_quant.exchange import cost, plan, timing

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
PAGE = FOLDER.parent / "plan.md"
BEGIN = pages.begin("benchmarks/plan.py check --write")
NEAR = 0.2
COLUMNS = ("workers", "rate", "tensors", "points", "within 20 %", "median of predicted / measured")
SPECS = [*CODES, "fp16", "bf16", "none"]
Place = tuple[int, str]


def predictable(row: str) -> bool:
    """Whether a row of the benchmark is an exchange that plan predicts."""
    return not row.startswith(("DDP", IDEAL)) and row != HOROVOD_FP16


def places(points: Iterable[Point]) -> list[Place]:
    """Numbers of workers and rates, in the order in which they come."""
    return list(dict.fromkeys((point["workers"], point["rate"]) for point in points if predictable(point["row"])))


def calibrate(place: Place) -> cost.Costs:
    """What exchanges cost between so many hosts of a cluster.

    Raises:
        ClusterError: with what was printed, where it can't be measured.
    """
    workers, rate = place
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=workers, rate=rate) as cluster:
        path = Path(folder) / "costs.json"
        codes = [word for spec in SPECS for word in ("-c", spec)]
        done = cluster.run(["hvd-quant", "bench", "exchange", "--shape", "8x8", "--save", str(path), *codes], env=Workers.ENV)
        if done.returncode:
            raise ClusterError((done.stdout + done.stderr)[-2000:])
        return cost.Costs.of(json.loads(path.read_text()))


def stated(place: Place) -> cost.Costs:
    """What plan takes for granted where it knows the rate alone. Codes run here in one process, and the workers of a place share the
    machine's cores."""
    workers, rate = place
    bits = cost.bits_per_second(rate) or 100e9
    found = timing.all_rates(map(get_compressor, SPECS), timing.in_torch(), workers)
    share = max(1.0, workers / (os.cpu_count() or 1))
    rates = {spec: cost.Rates(*(share * seconds for seconds in dataclasses.astuple(one))) for spec, one in found.items()}
    return dataclasses.replace(cost.typical(workers, bits), rates=rates)


def predicted(point: Point, costs: cost.Costs) -> float:
    """Seconds of a point's exchange."""
    spec = "none" if point["row"] == BASELINE else point["row"]
    infos = [TensorInfo.whole(str(i), shape, world=point["workers"]) for i, shape in enumerate(WORKLOADS[point["workload"]])]
    return plan.predict(get_compressor(spec), infos, costs).exchange_seconds


def check(points: list[Point], by_place: dict[Place, cost.Costs]) -> list[tuple[Point, float]]:
    """Points with predicted over measured seconds."""
    return [(point, predicted(point, by_place[point["workers"], point["rate"]]) / point["seconds"])
            for point in points if predictable(point["row"]) and (point["workers"], point["rate"]) in by_place]


def near(ratios: Iterable[float]) -> tuple[int, int]:
    """How many are within ``NEAR``, and of how many."""
    ratios = list(ratios)
    return sum(1 - NEAR <= ratio <= 1 + NEAR for ratio in ratios), len(ratios)


def summary(checked: list[tuple[Point, float]]) -> list[tuple[str, ...]]:
    """Rows of ``COLUMNS``: by place, and within it by tensors of up to a megabyte and others; then all."""
    groups: dict[Any, list[float]] = collections.defaultdict(list)
    for point, ratio in checked:
        size = "up to 1 MB" if 4 * entries(point["workload"]) <= 2**20 else "more"
        groups[str(point["workers"]), point["rate"], size].append(ratio)
    groups["all", "", ""] = [ratio for _, ratio in checked]
    rows = []
    for key, ratios in groups.items():
        good, count = near(ratios)
        rows.append((*key, str(count), f"{good} ({good / count:.0%})", f"{statistics.median(ratios):.2f}"))
    return rows


def write(tables: dict[str, list[tuple[str, ...]]], page: Path) -> None:
    """Put the summaries into a page, between its two marks."""
    lines: list[str] = []
    for title, rows in tables.items():
        lines += [f"**{title}**:", "", f"| {' | '.join(COLUMNS)} |", "|" + "---:|" * len(COLUMNS)]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    pages.write(page, BEGIN, "\n".join(lines))


def listing(checked: list[tuple[Point, float]]) -> Table:
    """Every point."""
    table = Table()
    for column in ("workers", "rate", "workload", "row", "predicted ms", "measured ms", "quartiles", ""):
        table.add_column(column)
    for point, ratio in checked:
        low, high = (f"{1e3 * seconds:.1f}" for seconds in point["quartiles"])
        table.add_row(str(point["workers"]), point["rate"], point["workload"], point["row"], f"{1e3 * ratio * point['seconds']:.1f}",
                      f"{1e3 * point['seconds']:.1f}", f"{low} … {high}", "" if abs(ratio - 1) <= NEAR else f"{ratio:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("calibrate", "check"))
    parser.add_argument("--figures", type=Path, default=FOLDER / "allreduce.json", help="of the exchange benchmark (%(default)s)")
    parser.add_argument("--calibration", type=Path, default=FOLDER / "calibration.json", help="to write or read (%(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", help="calibrate these alone, and keep the others that are in the file")
    parser.add_argument("--rates", nargs="+", help="the same for rates")
    parser.add_argument("--all", action="store_true", help="list every point")
    parser.add_argument("--write", action="store_true", help=f"put the shares into {PAGE.name} too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    points = json.loads(args.figures.read_text())["points"]
    kept: dict[Place, cost.Costs] = {}
    if args.calibration.exists():
        kept = {(one["workers"], one["rate"]): cost.Costs.of(one) for one in json.loads(args.calibration.read_text())}
    console = Console()
    if args.command == "calibrate":
        for place in places(points):
            if (not args.workers or place[0] in args.workers) and (not args.rates or place[1] in args.rates):
                try:
                    kept[place] = calibrate(place)
                except ClusterError as error:
                    sys.exit(f"{place[0]} workers, {place[1]}: {error}")
                console.print(f"{place[0]} workers, {place[1]}: {cost.describe(kept[place])}", highlight=False)
                whole = [{"workers": workers, "rate": rate, **costs.as_dict()} for (workers, rate), costs in kept.items()]
                args.calibration.write_text("[\n " + ",\n ".join(map(json.dumps, whole)) + "\n]\n")
        return
    if not any(place in kept for place in places(points)):
        sys.exit(f"{args.calibration} has nothing of the places in {args.figures}: python benchmarks/plan.py calibrate")
    tables = {}
    for title, by_place in (("By what was measured of network and codes", kept),
                            ("By the rate alone", {place: stated(place) for place in places(points)})):
        checked = check(points, by_place)
        if args.all:
            console.print(listing(checked))
        tables[title] = summary(checked)
        table = Table(*(Column(name, justify="right") for name in COLUMNS), title=title)
        for row in tables[title]:
            table.add_row(*row)
        console.print(table)
    if args.write:
        write(tables, PAGE)


if __name__ == "__main__":
    main()
