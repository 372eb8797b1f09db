"""The native kernels against the machine's limits, in one run.

An encode with error feedback must read the gradient, and read and write the residual: its limit is one pass that reads two
vectors and writes one. One without must only read the gradient; it is compared with both. A decode must write its output: its
limit is filling a vector. All are taken as the best way found to do them here. All rows take turns in each round, so that what
else the machine does falls on all of them alike; what is printed are medians over the rounds, and the quartiles. With one
thread it is the process's processor time that counts, which leaves out when others had the core. Where TensorFlow is
installed, its operations run too, in a tf.function.

    python benchmarks/kernels.py --entries 16777216 --threads 1 --rounds 15
"""

import argparse
import json
import os
from pathlib import Path

import torch
from rich.console import Console

from hvd_quant.cli.kernels import BASELINE, Bench, clock, measure, summary, table

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
try:
    import tensorflow as tf

    import hvd_quant.ops.tensorflow  # noqa: F401 - whose kernels may be missing
except ImportError:
    tf = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=2**24, help="of each vector (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, and of TensorFlow (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds, at least 2 (%(default)s)")
    parser.add_argument("--no-baseline", action="store_true", help="leave torch.topk out: it takes most of the time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}, expected at least 2")

    torch.set_num_threads(args.threads)
    if tf:
        tf.config.threading.set_intra_op_parallelism_threads(args.threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    figures = summary(measure(Bench(args.entries, tf).rows(not args.no_baseline), args.rounds, clock(args.threads)))
    level = torch.ops.hvd_quant.simd_level()
    console = Console()
    console.print(table(figures, args.entries, f"{args.entries} fp32 entries, {args.threads} thread(s), {args.rounds} rounds, {level}"))
    if BASELINE in figures:
        console.print(f"topk encode is {figures[BASELINE]['topk_speedup']:.1f} times faster than with torch.topk")
    if args.json:
        args.json.write_text(json.dumps({"entries": args.entries, "threads": args.threads, "rounds": args.rounds, "simd": level,
                                         "rows": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
