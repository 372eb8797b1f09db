"""From how many entries on a gradient is worth compressing: what `min_numel` is to be.

Smaller tensors share a dense vector, which takes more bytes and fewer calls of encoders and decoders. A model's gradients are
exchanged as `allreduce.py` does it, with `exchange="auto"`. All sizes take turns in each round, so that what else the machine
does falls on all of them alike. Printed are medians over the rounds, of the median of each, and the fastest and the slowest.

    python benchmarks/min_numel.py --json min_numel.json         # needs root; less than 10 minutes on 2 cores
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from allreduce import launch, machine, save
from allreduce_grid import WORKLOADS, Key, Point
from allreduce_report import headed, mb, ms
from allreduce_workers import BenchmarkError
from cluster import Cluster, ClusterError
from rich import box
from rich.console import Console
from rich.table import Table

CODES = ("topk", "onebit")
SIZES = (1024, 4096, 16384, 65536, 262144)


def table(rate: str, rounds: Mapping[Key, Sequence[Point]]) -> Table:
    """A line for each code and size."""
    columns = ("compressed", "travel by", "MB sent", "ms", "rounds")
    shown = headed("compressor", columns, box.HEAVY_HEAD, f"{rate}, {next(iter(rounds)).workload}")
    for key, points in rounds.items():
        if key.rate == rate:
            exchanges, times = points[0]["exchanges"], [point["seconds"] for point in points]
            compressed = sum(tensors for kind, tensors in exchanges.items() if kind != "dense")
            kinds = sorted({kind for point in points for kind in point["exchanges"]} - {"dense"})
            shown.add_row(key.row, f"{compressed} of {sum(exchanges.values())}", ", ".join(kinds),
                          mb(statistics.median(point["wire_bytes"] for point in points)),
                          ms(statistics.median(times)), f"{ms(min(times))} … {ms(max(times))}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="one a host (%(default)s)")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], metavar="RATE", help="in tc's syntax (1gbit 10gbit)")
    parser.add_argument("--workload", choices=WORKLOADS, default="resnet50", help="whose gradients (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a point in a round (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all figures go")
    args, console = parser.parse_args(), Console(width=max(120, Console().width))
    keys = [Key(args.workers, rate, args.workload, f"{code}:min_numel={size}")
            for rate in args.rates for _ in range(args.rounds) for code in CODES for size in SIZES]
    rounds: dict[Key, list[Point]] = defaultdict(list)
    try:
        with Cluster(hosts=args.workers) as cluster:
            for point in launch(cluster, "horovod", keys, args.seconds, "gloo", console):
                rounds[Key.of(point)].append(point)
                if args.json:
                    points = [point for points in rounds.values() for point in points]
                    save({"command": sys.argv, "machine": machine(), "points": points}, args.json)
    except (ClusterError, BenchmarkError, ValueError) as error:
        parser.error(str(error))
    for rate in args.rates:
        console.print(table(rate, rounds))


if __name__ == "__main__":
    main()
