"""The exchange of gradients by itself: Horovod, PyTorch DDP and hvd_quant between 2 to 8 hosts of 1 Gb/s and more.

Timed is the way from "the gradients are there" to "the reduced gradients are there", without backward pass and optimizer.
The workers, one a host of a `Cluster`, start together behind a barrier; an iteration takes as long as its slowest worker.
Gradients are random normal, others on each worker and in each iteration, and written before the clock starts. All ways in which
one of our codes travels take turns, so that they meet the same machine.

Frameworks are launched one after the other, since Horovod's thread would talk while DDP is timed. The rates of the links
are changed while the workers wait for commands.

    python benchmarks/allreduce.py run --list                                        # what there is to measure, and minutes
    python benchmarks/allreduce.py run --json docs/benchmarks/allreduce.json         # 50 minutes on 2 cores; --resume goes on
    python benchmarks/allreduce.py run --workers 4 --rates 1gbit --workloads 4096x4096 --rows 'Horovod*' 'topk*' --json x.json
    python benchmarks/allreduce.py report docs/benchmarks/allreduce.json             # tables and plots beside the file
"""

import argparse
import collections
import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from allreduce_grid import (
    BASELINE,
    RATES,
    ROWS,
    WORKERS,
    WORKLOADS,
    Key,
    Point,
    contests_of,
    entries,
    framework,
    in_default_grid,
    matches,
)
from allreduce_report import ms, report, tables
from allreduce_workers import BenchmarkError, PointError, Workers, unavailable, warm_up
from cluster import CONTROLLERS, Cluster, ClusterError, bits_per_second
from rich.console import Console
from rich.table import Column, Table

FIGURES = Path(__file__).parents[1] / "docs" / "benchmarks" / "allreduce.json"
SLOW = 2.0  # seconds of an iteration
# Seconds beside what is timed, for each worker, as found on two cores that all share: of a launch, of measuring network and
# codes for "auto", once for a code and a rate, of an iteration's barrier, and of writing an entry of its gradients.
LAUNCH, CALIBRATION, BARRIER, WRITING = 3.0, 1.25, 5e-3, 1e-9
SETUP = 0.7  # seconds of a point
TURNS = 5  # that each competitor of a contest gets
REHEARSALS = 15  # exchanges, of three plans that "auto" tries


def grid(args: argparse.Namespace) -> list[Key]:
    """The points that the options ask for, in the order in which they are measured."""
    return [Key(workers, rate, workload, row) for workers in args.workers for rate in args.rates
            for workload in WORKLOADS if matches(workload, args.workloads)
            for row in ROWS
            if matches(row, args.rows) and (args.all or in_default_grid(workers, rate, workload, row))]


def iterations(seconds: float, one: float) -> int:
    """How many iterations of a point are timed that take ``one`` second each: some ``seconds``, but 5 to 50, or 3 slow ones."""
    return max(5 if one < SLOW else 3, min(50, round(seconds / one)))


def likely(key: Key, points: Iterable[Point]) -> float:
    """Seconds of an iteration, by the point of this row whose workload, then workers, then rate are the most similar.

    More entries, and more workers on the same cores, take proportionally longer.
    """
    def ratios(point: Point) -> tuple[float, float]:
        return entries(key.workload) / entries(point["workload"]), key.workers / point["workers"]

    similar = min(points, key=lambda point: (
        point["row"] != key.row, *(abs(math.log2(ratio)) for ratio in ratios(point)), point["rate"] != key.rate))
    return similar["seconds"] * math.prod(ratios(similar))


def spent(key: Key, points: Iterable[Point], seconds: float) -> float:
    """Seconds that measuring a point takes, with warm-up and all, by what was measured before."""
    one = likely(key, points)
    whole = one + key.workers * (BARRIER + WRITING * entries(key.workload))
    count = warm_up(key.row) + iterations(seconds, one)
    if key.row.startswith("auto"):  # its first step is dense, then it rehearses
        return SETUP + likely(key._replace(row=BASELINE), points) + (count + REHEARSALS) * whole
    return SETUP + count * whole


def estimate(keys: Sequence[Key], points: Iterable[Point], seconds: float) -> float:
    """Seconds that measuring all of these points takes."""
    launches = {(key.workers, framework(key.row)) for key in keys}
    calibrations = {key._replace(workload="") for key in keys if key.row.startswith("auto")}
    once = LAUNCH * sum(workers for workers, _ in launches) + CALIBRATION * sum(key.workers for key in calibrations)
    return once + sum(spent(key, points, seconds) for key in keys)


def listing(keys: Sequence[Key], points: Sequence[Point], seconds: float) -> Table:
    """How many points there are, and how long they take."""
    counts = (Column(name, justify="right") for name in ("points", "minutes"))
    table = Table("workers", "rate", "workload", *counts, show_footer=True)
    for place in dict.fromkeys(key[:3] for key in keys):
        mine = [key for key in keys if key[:3] == place]
        table.add_row(*map(str, place), str(len(mine)), f"{sum(spent(key, points, seconds) for key in mine) / 60:.1f}")
    table.columns[2].footer = "with launches, and measurements of the network"
    table.columns[3].footer, table.columns[4].footer = str(len(keys)), f"{estimate(keys, points, seconds) / 60:.1f}"
    return table


def summary(rounds: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    """The figures of a point from what all workers measured, iteration by iteration.

    An iteration's time is its slowest worker's, other figures are means over the workers; then medians over the iterations.
    """
    times = [max(sample["seconds"] for sample in samples) for samples in rounds]
    low, median, high = statistics.quantiles(times, n=4)
    figures = {"iterations": len(times), "seconds": median, "quartiles": [low, high]}
    for key in rounds[0][0].keys() - {"seconds"}:
        figures[key] = statistics.median(statistics.fmean(sample[key] for sample in samples) for samples in rounds)
    return figures


def measure(cluster: Cluster, workers: Workers, keys: Sequence[Key], seconds: float) -> list[Point]:
    """The points of a contest: warm all of them up, then let them take turns."""
    workers.ask("clear")
    each = [max(workers.ask("prepare", key.row, key.workload)) for key in keys]
    count = iterations(seconds, statistics.fmean(each))
    samples: list[list[Any]] = [[] for _ in keys]  # of each, those of all workers an iteration
    sent = [0.0] * len(keys)
    for turn in range(TURNS):
        if share := count * (turn + 1) // TURNS - count * turn // TURNS:
            for i in range(len(keys)):
                before = cluster.bytes_sent()
                samples[i] += zip(*workers.ask("measure", i, share))
                sent[i] += statistics.fmean(after - first for after, first in zip(cluster.bytes_sent(), before))
    return [{**key._asdict(), **summary(samples[i]), **workers.ask("facts", i)[0], "link_bytes": sent[i] / count}
            for i, key in enumerate(keys)]


def machine() -> dict[str, Any]:
    """What the figures depend on, besides the settings and what else was running."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {name: importlib.metadata.version(name) for name in ("torch", "horovod", "hvd_quant")}
    return {"cpu": model, "cores": os.cpu_count(), "simd": torch.ops.hvd_quant.simd_level(), "kernel": platform.release(),
            "python": platform.python_version(), **versions}


def save(results: dict[str, Any], path: Path) -> None:
    """Write the file in one go, so that it is whole however this ends."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({**results, "points": None}, indent=1)[:-len("null\n}")] + "[\n  "
                   + ",\n  ".join(json.dumps(point) for point in results["points"]) + "\n ]\n}\n")
    os.replace(new, path)


def missing(keys: Iterable[Key], points: Iterable[Point]) -> list[Key]:
    """The points that have not been measured yet."""
    done = {Key.of(point) for point in points}
    return [key for key in keys if key not in done]


def begin(path: Path, resume: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """New results, or those in the file.

    Raises:
        ValueError: if there is a file that isn't to be resumed, or one of another machine, version or settings.
    """
    facts = {"settings": settings, "machine": machine()}
    if not path.exists():
        return {**facts, "points": []}
    if not resume:
        raise ValueError(f"{path} exists: give --resume to add what is missing in it, or another --json")
    results = json.loads(path.read_text())
    for name, value in facts.items():
        if differing := [key for key in value if results[name].get(key) != value[key]]:
            raise ValueError(f"{path} has other {name}: " + ", ".join(
                f"{key} is {results[name].get(key)!r} there and {value[key]!r} here" for key in differing))
    return results


def run(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """Measure what the file lacks, which is written after each point; all results, and the number of points that failed."""
    results = begin(args.json, args.resume, {"seconds": args.seconds, "controller": args.controller, "env": Workers.ENV})
    keys = grid(args)
    absent = {row: reason for row in dict.fromkeys(key.row for key in keys) if (reason := unavailable(row))}
    for row, reason in absent.items():
        console.print(f"left out: {row}: {reason}", highlight=False, markup=False)
    todo = missing([key for key in keys if key.row not in absent], results["points"])
    for workers in dict.fromkeys(key.workers for key in todo):
        with Cluster(hosts=workers) as cluster:
            for kind in ("horovod", "ddp"):
                if mine := [key for key in todo if key.workers == workers and framework(key.row) == kind]:
                    for point in launch(cluster, kind, mine, args.seconds, args.controller, console):
                        results["points"].append(point)
                        save(results, args.json)
                        name, count = " ".join(map(str, Key.of(point))), len(results["points"])
                        console.print(f"{count:5} {name}: {ms(point['seconds'])} ms", highlight=False, markup=False)
    return results, len(missing(todo, results["points"]))


def launch(cluster: Cluster, kind: str, keys: list[Key], seconds: float, controller: str, console: Console) -> Iterator[Point]:
    """Start the workers of one framework and measure its points."""
    facts: dict[str, Any] = {"began": datetime.now(timezone.utc).isoformat(timespec="seconds"), "load": os.getloadavg()[0]}
    cluster.set_rate("unlimited")
    with Workers(cluster, kind, controller) as workers:
        memory = workers.ask("memory", 1.0)
        facts["memory"] = {name: statistics.fmean(rates[name] for rates in memory) for name in memory[0]}
        workers.ask("pool", max(entries(key.workload) for key in keys))
        contests = collections.deque(contests_of(keys))
        while contests:
            rivals = contests.popleft()
            if cluster.rate != rivals[0].rate:
                cluster.set_rate(rivals[0].rate)
                workers.ask("forget")
            try:
                for point in measure(cluster, workers, rivals, seconds):
                    yield {**point, **facts}
            except PointError as failure:
                if len(rivals) > 1:  # each by itself, to know whose it is
                    contests.extendleft([key] for key in reversed(rivals))
                else:
                    console.print(f"failed: {' '.join(map(str, rivals[0]))}: {failure}", highlight=False, markup=False)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|report")
    measuring = commands.add_parser("run", help="measure")
    measuring.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), metavar="N", help="one a host (2 4 8)")
    measuring.add_argument("--rates", nargs="+", default=list(RATES), metavar="RATE", help=f"in tc's syntax ({' '.join(RATES)})")
    measuring.add_argument("--workloads", nargs="+", default=["*"], metavar="PATTERN", help=f"of {' '.join(WORKLOADS)}")
    measuring.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help=f"of {', '.join(ROWS)}")
    measuring.add_argument("--all", action="store_true", help="also points that take hours, or much memory")
    measuring.add_argument("--seconds", type=float, default=1.0, help="of a point, by 5 to 50 iterations, or 3 slow ones (1)")
    measuring.add_argument("--controller", choices=CONTROLLERS, default="gloo", help="of Horovod (%(default)s)")
    measuring.add_argument("--json", type=Path, metavar="FILE", help="where the figures go, after each point")
    measuring.add_argument("--resume", action="store_true", help="measure what the file lacks")
    measuring.add_argument("--list", action="store_true", help="only say how many points there are, and for how many minutes")
    reporting = commands.add_parser("report", help="tables and plots from the figures")
    reporting.add_argument("json", type=Path, metavar="FILE")
    reporting.add_argument("--page", type=Path, help="Markdown with marks for the tables (README.md beside the file)")
    args = parser.parse_args(arguments)
    if args.command == "run":
        try:
            for rate in args.rates:
                bits_per_second(rate)
        except ValueError as error:
            parser.error(str(error))
        if not grid(args):
            parser.error("no point of the grid matches; --all has more")
        if not (args.json or args.list):
            parser.error("give --json FILE, where the figures go, or --list")
    args.error = parser.error
    return args


def main() -> None:
    args, console = parse(), Console(width=max(170, Console().width))  # where it is narrower, the tables say nothing
    try:
        if args.command == "report":
            report(args.json, args.page or args.json.parent / "README.md")
        elif args.list:
            console.print(listing(grid(args), json.loads(FIGURES.read_text())["points"], args.seconds))
        else:
            results, failed = run(args, console)
            for title, table in tables(results):
                table.title = title
                console.print(table)
            if failed:
                raise BenchmarkError(f"{failed} points failed, see above; --resume tries them again")
    except (ClusterError, BenchmarkError, ValueError, OSError) as error:
        args.error(str(error))


if __name__ == "__main__":
    main()
