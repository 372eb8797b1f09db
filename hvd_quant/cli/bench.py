"""``hvd-quant bench``: how fast the codes are here, and the exchange between these workers."""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from pathlib import Path
from typing import Any

import click

from hvd_quant import Compressor, TensorInfo, get_compressor
from hvd_quant.cli import output
from hvd_quant.cli.plan import calibration_path, save_calibration
from hvd_quant.exchange import plan

COMPARED = ("none", "fp16", "onebit", "adaptive", "topk")
SAMPLE, REPEATS = 2**23, 12  # more than training spends on it: what is measured here is kept
ROUNDS, WARM_UP = 7, 3


@click.group("bench")
def command() -> None:
    """Measure codes and exchanges; each in less than 20 seconds."""


@command.command("kernels", epilog=output.examples("hvd-quant bench kernels", "hvd-quant bench kernels --entries 16777216 --json"))
@click.option("--entries", type=click.IntRange(min=4096), default=2**22, show_default=True, help="Of each vector.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of PyTorch.")
@click.option("--rounds", type=click.IntRange(min=2), default=7, show_default=True, help="In which all take turns.")
@output.json_option
def kernels(entries: int, threads: int, rounds: int, as_json: bool) -> None:
    """Time each code on one machine, against the machine's limit for it.

    A code's limit is one pass over memory: an encode with error feedback must read gradient and residual and write the
    residual, a decode must write its output.

    Exit codes: 0 done, 1 PyTorch or its kernels are missing, 2 the usage is wrong.
    """
    try:
        import torch

        from hvd_quant.cli import kernels as core
    except ImportError as error:
        raise output.FoundError(f"{error}; `hvd-quant doctor` tells more") from None
    torch.set_num_threads(threads)
    figures = core.summary(core.measure(core.Bench(entries).rows(baseline=False), rounds, core.clock(threads)))
    level = torch.ops.hvd_quant.simd_level()
    if as_json:
        output.show_json({"entries": entries, "threads": threads, "rounds": rounds, "simd": level, "rows": figures})
    else:
        output.show(core.table(figures, entries, f"{entries} fp32 entries, {threads} thread(s), {rounds} rounds, {level}"))


def frontend() -> tuple[Any, Any]:
    """The module that has Horovod's functions and its ``network``, of a framework that works.

    Raises:
        click.ClickException: where none does, with the reasons.
    """
    reasons = []
    for name in ("torch", "tensorflow"):
        try:
            hvd = importlib.import_module(f"hvd_quant.{name}")
            return hvd, importlib.import_module(f"hvd_quant.{name}.network")
        except ImportError as error:
            reasons.append(str(error))
    raise output.FoundError("; ".join(reasons) + "; `hvd-quant doctor` tells more")


def exchange_seconds(hvd: Any, network: Any, compressor: Compressor, shape: tuple[int, ...]) -> float:
    """The median of some exchanges of one tensor, each by its slowest worker, in PyTorch."""
    import torch
    p = torch.nn.Parameter(torch.empty(shape))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), named_parameters=[(f"bench.{compressor.spec}", p)],
                                         compression=compressor)
    p.grad = torch.empty_like(p)
    gradient, seconds = torch.randn(shape), []
    for _ in range(WARM_UP + ROUNDS):
        optimizer.zero_grad(set_to_none=False)
        p.grad.copy_(gradient)
        network.slowest([0.0], hvd.global_process_set)  # all start together
        start = time.perf_counter()
        optimizer.synchronize()
        seconds += network.slowest([time.perf_counter() - start], hvd.global_process_set)
    return statistics.median(seconds[WARM_UP:])


@command.command("exchange", epilog=output.examples(
    "horovodrun -np 2 -H host1:1,host2:1 hvd-quant bench exchange",
    "horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-quant bench exchange -c onebit -c topk:ratio=0.001 --save network.json"))
@click.option("--shape", type=output.Shape(), default="2048x2048", show_default=True, help="Of the tensor that is exchanged.")
@click.option("-c", "--compressor", "compressors", type=output.Spec(), multiple=True, default=COMPARED, metavar="SPEC",
              help=f"Exchange with this one, may be given several times; {', '.join(COMPARED)} if unset.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path),
              help="Write what was measured there, for `hvd-quant plan --calibration`; to where plan looks for it if unset.")
@output.import_option
@output.json_option
def exchange(shape: tuple[int, ...], compressors: tuple[Compressor, ...], save: Path | None, as_json: bool) -> None:
    """Measure the network between the workers that run this, started by horovodrun or mpirun, and what exchanges take on it.

    What collectives and codes take is kept, so that `hvd-quant plan` can predict by it.

    Exit codes: 0 done, 1 Horovod doesn't work here, 2 the usage is wrong, or there is one worker alone.
    """
    hvd, network = frontend()
    hvd.init()
    workers = hvd.size()
    if workers < 2:
        raise click.UsageError("there is one worker, and nothing to exchange: start it on several, with horovodrun -np 2 "
                               "-H host1:1,host2:1 hvd-quant bench exchange")
    costs = network.measure([get_compressor("none:only_if_faster=true"), *compressors], SAMPLE, REPEATS)
    info = TensorInfo.whole("tensor", shape, world=workers)
    exchanges = []
    for way in plan.ways(compressors):
        predicted = plan.predict(way, [info], costs)
        measured = exchange_seconds(hvd, network, way, shape) if hvd.__name__ == "hvd_quant.torch" else None
        exchanges.append({**dataclasses.asdict(predicted), "measured_seconds": measured})
    if hvd.rank() != 0:
        return
    path = save or calibration_path(workers)
    save_calibration(costs, workers, path)
    if as_json:
        output.show_json({"workers": workers, "shape": list(shape), "exchanges": exchanges, "costs": costs.as_dict(),
                          "saved": str(path)})
        return
    network_rows = output.table("collective", "smallest", "Mbit/s", right=("smallest", "Mbit/s"))
    for kind, points in costs.collectives.items():
        (first, least), (last, most) = points[0], points[-1]
        network_rows.add_row(kind, output.format_seconds(least), f"{8e-6 * (last - first) / max(most - least, 1e-9):.0f}")
    rows = output.table("compression", "sends", "predicted", "measured", right=("sends", "predicted", "measured"))
    for one in exchanges:
        rows.add_row(one["spec"], output.format_bytes(one["sent_bytes"]), output.format_seconds(one["exchange_seconds"]),
                     "" if one["measured_seconds"] is None else output.format_seconds(one["measured_seconds"]))
    output.show(f"{workers} workers", network_rows, f"A tensor of {'x'.join(map(str, shape))}:", rows, f"Kept in {path}")
