"""Many exchanges of tensors of random sizes, whose gradients arrive in another order and at other times on each worker, against NumPy.

    horovodrun -np 4 python tests/stress.py --exchanges 10000

In each round workers wrap new parameters, with random sizes, compressors and buckets, and take some steps of SGD. Then what has been applied
and what is still kept, on workers and on owners of ranges, has to be what NumPy adds up of all gradients, and the replicas the same bits.
"""

import argparse
import time
import warnings

import numpy as np
import torch

import hvd_quant.torch as hvd

IN_SUMS = ["none", "fp16", "powersgd", "randomk:ratio=0.1"]
AS_PAYLOADS = ["onebit:block_size=128", "topk:ratio=0.01", "topk:ratio=0.1,values=float16", "adaptive", "threshold:tau=0.5", "signsgd",
               "blockwise8", "qsgd:memory=error_feedback", "natural:memory=error_feedback", "onebit:warmup=2",
               "topk:ratio=0.05,schedule=dgc,schedule_steps=2"]
# Named, so that nothing is measured.
SPECS = IN_SUMS + [f"{spec}{',' if ':' in spec else ':'}exchange={exchange}" for spec in AS_PAYLOADS for exchange in ("allgather", "sra")]
TENSORS, STEPS, LARGEST = 30, 8, 100_000
TOLERANCE = {"fp16": 2e-2}  # half precision, without a residual
FP32 = 2e-4


class Late(torch.autograd.Function):
    """The identity, whose gradient takes its time."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


def gradients(seed, number, step, rank, sizes):
    rng = np.random.default_rng((seed, number, step, rank))
    return [rng.standard_normal(size, np.float32) for size in sizes]


def kept(state, numel):
    """What is still to come of a tensor: the mean of what workers have kept, and what owners have of the mean."""
    total = torch.zeros(numel, dtype=torch.float64)
    if "residual" in state["state"]:
        total += state["state"]["residual"].double() / hvd.size()
    if "owner.residual" in state["state"]:
        total[slice(*state["owned"])] += state["state"]["owner.residual"].double()
    return total


def stress_round(seed, number):
    """The exchanges of a round and the largest deviation among them, in parts of what is tolerated."""
    together, alone = np.random.default_rng((seed, number)), np.random.default_rng((seed, number, 1 + hvd.rank()))
    sizes = np.exp(together.uniform(0, np.log(LARGEST), TENSORS)).astype(int)
    specs = {f"p{i}": f"{spec}{',' if ':' in spec else ':'}min_numel=0" for i, spec in enumerate(together.choice(SPECS, TENSORS))}
    parameters = {name: torch.nn.Parameter(torch.zeros(int(size))) for name, size in zip(specs, sizes)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=1.0), parameters.items(), specs,
                                             bucket_bytes=int(together.choice([2**12, 2**18, 2**25])))
    for step in range(STEPS):
        optimizer.zero_grad()
        given = gradients(seed, number, step, hvd.rank(), sizes)
        terms = [(Late.apply(p, float(alone.choice([0, 0, 0, 1e-3, 5e-3]))) * torch.from_numpy(g)).sum()
                 for _, p, g in sorted(zip(alone.permutation(TENSORS), parameters.values(), given), key=lambda one: one[0])]
        torch.stack(terms).sum().backward()
        time.sleep(float(alone.choice([0, 0, 0.02])))
        optimizer.step()
    states, worst = optimizer.compression_state_dict()["tensors"], 0.0
    expected = [sum(np.add.reduce([gradients(seed, number, step, rank, sizes)[i] for rank in range(hvd.size())], 0, np.float64)
                    for step in range(STEPS)) / hvd.size() for i in range(TENSORS)]
    for i, (name, p) in enumerate(parameters.items()):
        left = hvd.allreduce(kept(states[name], p.numel()), op=hvd.Sum, name=f"stress.kept.{i}")
        deviation = float((left - p.detach().double() - torch.from_numpy(expected[i])).abs().max())
        worst = max(worst, deviation / TOLERANCE.get(specs[name].partition(":")[0], FP32))
        rows = hvd.allgather(p.detach()[None], name=f"stress.replicas.{i}.{p.numel()}")
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            raise AssertionError(f"round {number}: {name}, {specs[name]}: the replicas differ")
        if worst > 1:
            raise AssertionError(f"round {number}: {name} of {p.numel()} entries, {specs[name]}: what was applied and what is kept deviates by "
                                 f"{deviation:.2g} from the sum of the gradients")
    return TENSORS * STEPS, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    done, worst, number, start = 0, 0.0, 0, time.monotonic()
    while done < arguments.exchanges:
        exchanges, deviation = stress_round(arguments.seed, number)
        done, worst, number = done + exchanges, max(worst, deviation), number + 1
    if hvd.rank() == 0:
        print(f"{done:,} exchanges between {hvd.size()} workers in {time.monotonic() - start:.0f} s: replicas the same, sums within {worst:.0%} of "
              "what is tolerated")


if __name__ == "__main__":
    main()
