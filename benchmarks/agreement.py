"""What it costs that workers compare what they are about to train, and that they compare their parameters (verify_every).

    horovodrun -np 4 python benchmarks/agreement.py
"""

import argparse
import statistics
import time

import horovod.torch as hvd
import torch

import hvd_quant
from hvd_quant.torch import agreement


def milliseconds(action) -> float:
    """Of a call, when all workers start together."""
    hvd.barrier()
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=161, help="as ResNet-50 has (%(default)s)")
    parser.add_argument("--entries", type=int, default=25_600_000, help="of all of them together (%(default)s)")
    parser.add_argument("--times", type=int, default=40, help="(%(default)s)")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(args.entries // args.parameters)) for _ in range(args.parameters)]
    names = {p: f"layer.{i}.weight" for i, p in enumerate(parameters)}
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    verifier = agreement.Verifier(1, hvd.global_process_set)
    topk, row = hvd_quant.get_compressor("topk"), torch.zeros(1, 32, dtype=torch.uint8)
    actions = {
        "an allgather of 32 bytes": lambda: hvd.allgather(row, name="plain"),
        "what they train": lambda: agreement.agree("DistributedOptimizer", optimizer, names, topk, {}, hvd.global_process_set),
        "their parameters": lambda: verifier.count((name, p) for p, name in names.items())}
    times = {what: [] for what in actions}
    for _ in range(args.times):  # they take turns, on a machine that has other things to do
        for what, action in actions.items():
            times[what].append(milliseconds(action))
    if hvd.rank() == 0:
        print(f"{hvd.size()} workers, {args.parameters} parameters of {args.entries / 1e6:g} M entries together, ms: first, median, least")
        for what, of in times.items():
            print(f"{what:25} {of[0]:6.1f} {statistics.median(of):6.1f} {min(of):6.1f}")


if __name__ == "__main__":
    main()
