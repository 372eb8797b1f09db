"""Every scheme on MNIST: test accuracy over several seeds, bytes sent, steps to a target.

    python benchmarks/schemes.py run --json docs/schemes/mnist.json
    python benchmarks/schemes.py report docs/schemes/mnist.json --page docs/schemes/README.md

``run`` starts two workers with horovodrun and goes on where the file ends; ``report`` writes a table into a page. The net is 3 x 1024
fully connected units, the recipe that of examples/common/arguments.py, the library PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pages

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "pytorch")]

TARGET = 0.975
TESTS_AN_EPOCH = 3
MODEL, WORKERS, LAST_LAYER = "mlp", 2, "7.*"
_WITH_MOMENTUM = 0.03
"""The learning rate with a momentum of 0.9, which moves ten times as far as without."""
_WITH_MASKED_MOMENTUM = 0.1
"""The same where entries lose their momentum when they are sent, so that it moves them less far."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: in the table; a compressor's spec where nothing else is said.
        lr: learning rate at the start, the recipe's where None.
        every: local steps between two averagings of the model, in the place of gradients; 0: none.
        outer: Nesterov momentum of the SGD that averaging goes through, or None.
        compression: what the name says, unless it says more; or one for each pattern of parameters.
        optimizer: the recipe's where None.
    """

    name: str
    lr: float | None = None
    every: int = 0
    outer: float | None = None
    compression: str | dict[str, str] = ""
    optimizer: str | None = None

    @property
    def spec(self) -> str | dict[str, str]:
        return self.compression or self.name


ROWS = [
    *map(Row, ["none", "fp16", "bf16", "onebit", "signsgd", "blockwise8", "natural", "qsgd", "qsgd:bits=2", "terngrad",
               "terngrad:clip=2.5", "threshold:tau=0.01", "threshold:tau=0.003,capacity=0.25", "adaptive", "topk", "topk:ratio=0.001",
               "topk:values=sign", "topk:values=2bit", "topk:scope=model", "topk:merge=sum", "topk:merge=replace", "topk:merge=error",
               "topk:memory=ef21", "topk:memory=ef21,eta=0.5", "randomk", "powersgd"]),
    Row("terngrad:clip=2.5, last layer dense", compression={LAST_LAYER: "none", "*": "terngrad:clip=2.5"}),
    Row("none:momentum=0.9", lr=_WITH_MOMENTUM),
    Row("topk:momentum=0.9", lr=_WITH_MASKED_MOMENTUM),
    Row("topk:ratio=0.001,momentum=0.9,nesterov=true,schedule=dgc,schedule_steps=100", lr=_WITH_MASKED_MOMENTUM),
    Row("averaged every 4 steps", every=4, compression="none"),
    Row("averaged every 16 steps", every=16, compression="none"),
    Row("averaged every 16 steps, onebit", every=16, compression="onebit"),
    Row("DiLoCo, every 50 steps", every=50, outer=0.9, compression="none", optimizer="adam", lr=0.001),
    Row("DiLoCo, every 50 steps, outer momentum 0.5", every=50, outer=0.5, compression="none", optimizer="adam", lr=0.001),
]


def load(file: Path) -> list[dict[str, Any]]:
    """The runs in a file, one a row and seed."""
    return json.loads(file.read_text())["runs"] if file.exists() else []


def save(runs: list[dict[str, Any]], file: Path) -> None:
    """Write them, a line each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"runs": [\n' + ",\n".join(map(json.dumps, runs)) + "\n]}\n")


def missing(rows: Iterable[Row], seeds: Iterable[int], epochs: int, runs: list[dict[str, Any]]) -> list[tuple[Row, int]]:
    """The rows and seeds of which there is no run, seed by seed."""
    done = {(run["row"], run["seed"], run["epochs"]) for run in runs}
    return [(row, seed) for seed in seeds for row in rows if (row.name, seed, epochs) not in done]


# --------------------------------------------------------------------------------------------------- on each worker

def work(arguments: argparse.Namespace) -> None:
    import torch
    from common import arguments as command_line
    from common.datasets import load as load_dataset, prepare
    from common.process import keep_freed_memory, threads_per_worker

    import hvd_quant.torch as hvd

    hvd.init()
    keep_freed_memory()
    torch.set_num_threads(threads_per_worker(hvd.local_size()))
    if hvd.local_rank() == 0:
        prepare("mnist")
    hvd.allreduce(torch.zeros(1), name="prepared")
    dataset = load_dataset(prepare("mnist"))
    recipe = command_line.parse("", argv=["--model", MODEL, "--epochs", str(arguments.epochs)])
    for row, seed in missing(_chosen(arguments.rows), arguments.seeds, arguments.epochs, load(arguments.json)):
        run = train(row, seed, recipe, dataset)
        if hvd.rank() == 0:
            save([*load(arguments.json), run], arguments.json)
            print(f"{row.name}, seed {seed}: {100 * run['accuracy']:.2f} %", flush=True)
        hvd.allreduce(torch.zeros(1), name="written")


class Training:
    """A model and its distributed optimizer.

    Arguments:
        row: what is different from the recipe.
        seed: of initial weights and order of images.
        recipe: as examples/common/arguments.py parses it.
        dataset: images.

    Attributes:
        steps: of an epoch.
        done: steps so far.
        tests: what the tests so far gave.
    """

    def __init__(self, row: Row, seed: int, recipe: argparse.Namespace, dataset: Any) -> None:
        import torch
        from pytorch_mnist import build, build_optimizer

        import hvd_quant.torch as hvd

        self.settings = argparse.Namespace(**vars(recipe))
        self.settings.optimizer, self.settings.lr = row.optimizer or recipe.optimizer, row.lr or recipe.lr
        self._seed, self._dataset = seed, dataset
        torch.manual_seed(seed)
        self.model = build(recipe.model, dataset.image_shape, dataset.classes)
        optimizer = build_optimizer(self.settings.optimizer, self.model.parameters(), self.settings.lr)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        if row.every:
            outer = row.outer and (lambda params: torch.optim.SGD(params, lr=0.7, momentum=row.outer, nesterov=True))
            self.optimizer = hvd.ModelAveragingOptimizer(optimizer, self.model.named_parameters(), every=row.every, outer=outer,
                                                         compression=row.spec)
            self._agree = self.optimizer.average
        else:
            self.optimizer = hvd.DistributedOptimizer(optimizer, self.model.named_parameters(), row.spec)
            self._agree = self.optimizer.average_parameters
        self.steps = dataset.train.steps(hvd.size(), self.settings.batch_size)
        self.done, self.tests = 0, []

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """This worker's, of all epochs."""
        import hvd_quant.torch as hvd

        for epoch in range(self.settings.epochs):
            yield from self._dataset.train.batches(seed=self._seed, epoch=epoch, rank=hvd.rank(), size=hvd.size(),
                                                   batch_size=self.settings.batch_size)

    def step(self, images: Any, labels: Any) -> None:
        """Train on a batch."""
        import torch
        from common import arguments as command_line

        for group in self.optimizer.param_groups:
            group["lr"] = command_line.learning_rate(self.settings, self.done / (self.steps * self.settings.epochs))
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
        self.optimizer.step()
        self.done += 1

    def test(self) -> None:
        """Test the model that the workers have in common."""
        from pytorch_mnist import accuracy

        import hvd_quant.torch as hvd

        self._agree()
        self.tests.append({"step": self.done, "accuracy": accuracy(self.model, self._dataset.test.share(hvd.rank(), hvd.size())),
                           "wire_bytes": self.optimizer.compression_stats()["wire_bytes"]})


def train(row: Row, seed: int, recipe: argparse.Namespace, dataset: Any) -> dict[str, Any]:
    """Train one model, and what came of it."""
    import hvd_quant.torch as hvd

    training = Training(row, seed, recipe, dataset)
    moments = {round(training.steps * i / TESTS_AN_EPOCH) for i in range(1, TESTS_AN_EPOCH + 1)}
    for images, labels in training.batches():
        training.step(images, labels)
        if (training.done - 1) % training.steps + 1 in moments:
            training.test()
    dense = 4 * sum(p.numel() for p in training.model.parameters()) * training.done * 2 * (hvd.size() - 1) / hvd.size()
    return {"row": row.name, "seed": seed, "epochs": recipe.epochs, "steps": training.done,
            "accuracy": training.tests[-1]["accuracy"], "wire_bytes": training.tests[-1]["wire_bytes"], "dense_bytes": dense,
            "tests": training.tests}


# ------------------------------------------------------------------------------------------------------------ report

BEGIN = pages.begin("benchmarks/schemes.py report")


def report(runs: list[dict[str, Any]]) -> str:
    """The table: medians over the seeds, in the order of ``ROWS``."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_row.setdefault(run["row"], []).append(run)
    dense = statistics.median(run["accuracy"] for run in by_row["none"])
    lines = [f"| scheme | test accuracy | of the seeds | against dense | fewer bytes | steps to {100 * TARGET:g} % |",
             "|---|---:|---:|---:|---:|---:|"]
    for row in ROWS:
        if row.name in by_row:
            found = by_row[row.name]
            accuracies = sorted(run["accuracy"] for run in found)
            median = statistics.median(accuracies)
            fewer = statistics.median(run["dense_bytes"] / run["wire_bytes"] for run in found)
            lines.append(f"| `{row.name}` | {100 * median:.2f} % | {100 * accuracies[0]:.2f} … {100 * accuracies[-1]:.2f} | "
                         f"{'' if row.name == 'none' else f'{100 * (median - dense):+.2f}'.replace('-', '−')} | "
                         f"{'' if row.name == 'none' else f'{fewer:.1f} ×'} | {_reached(found)} |")
    return "\n".join(lines)


def _reached(runs: list[dict[str, Any]]) -> str:
    """The median of the steps after which a test first reached the target."""
    steps = [next((test["step"] for test in run["tests"] if test["accuracy"] >= TARGET), None) for run in runs]
    if steps.count(None) * 2 >= len(steps):
        return "–"
    return f"{statistics.median_low(sorted(step if step is not None else 10**9 for step in steps)):,}"


def _chosen(patterns: list[str] | None) -> list[Row]:
    return [row for row in ROWS if not patterns or any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "work"):
        command = commands.add_parser(name, help="measure" if name == "run" else "what run starts on each worker")
        command.add_argument("--json", metavar="FILE", type=Path, required=True, help="where the runs go; those in it are kept")
        command.add_argument("--rows", metavar="PATTERN", nargs="+", help="of " + ", ".join(row.name for row in ROWS))
        command.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
        command.add_argument("--epochs", type=int, default=4)
    command = commands.add_parser("report", help="the table of a file's runs")
    command.add_argument("json", metavar="FILE", type=Path)
    command.add_argument("--page", metavar="FILE", type=Path, help="with the marks that it goes between; printed without")
    arguments = parser.parse_args(argv)
    if arguments.command == "report":
        if arguments.page:
            pages.write(arguments.page, BEGIN, report(load(arguments.json)))
        else:
            print(report(load(arguments.json)))
    elif arguments.command == "work":
        work(arguments)
    else:
        own = sys.argv[1:] if argv is None else argv
        horovodrun = Path(sys.executable).with_name("horovodrun")
        sys.exit(subprocess.run([str(horovodrun), "-np", str(WORKERS), "--gloo", sys.executable, __file__, "work", *own[1:]]).returncode)


if __name__ == "__main__":
    main()
