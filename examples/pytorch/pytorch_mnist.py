"""Train on MNIST with compressed gradients, and compare.

    horovodrun -np 2 python examples/pytorch/pytorch_mnist.py
    horovodrun -np 2 python examples/pytorch/pytorch_mnist.py --model mlp --compression none --compression adaptive

What is different from training with Horovod alone is one import and the argument ``compression=``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from torch import nn
from tqdm import tqdm

import hvd_quant.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments as command_line, results  # noqa: E402
from common.datasets import Dataset, DatasetError, Split, load, prepare  # noqa: E402
from common.process import keep_freed_memory, threads_per_worker  # noqa: E402

T = TypeVar("T")


def build(model: str, image_shape: tuple[int, int], classes: int) -> nn.Module:
    """A net that takes images of shape (batch, height, width) and gives logits."""
    height, width = image_shape
    if model == "conv":
        features = nn.Sequential(nn.Unflatten(1, (1, height)),
                                 nn.Conv2d(1, 10, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
                                 nn.Conv2d(10, 20, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
        return nn.Sequential(features, nn.Linear(20 * (height // 4) * (width // 4), 50), nn.ReLU(), nn.Linear(50, classes))
    units = {"mlp": 1024, "mlp-4096": 4096}[model]
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(),
                         nn.Linear(units, units), nn.ReLU(), nn.Linear(units, classes))


def build_optimizer(name: str, parameters: object, lr: float) -> torch.optim.Optimizer:
    """The fused variants go over memory once; in a large fully connected net the others cost as much as backward."""
    optimizers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    return optimizers[name](parameters, lr, fused=True)


def train(compression: str, arguments: argparse.Namespace, dataset: Dataset) -> results.Run:
    """Train one model from the same start and on the same batches as every other."""
    torch.manual_seed(arguments.seed)
    model = build(arguments.model, dataset.image_shape, dataset.classes)
    optimizer = build_optimizer(arguments.optimizer, model.parameters(), arguments.lr)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    run = results.Run(compression)
    test = dataset.test.share(hvd.rank(), hvd.size())
    steps = dataset.train.steps(hvd.size(), arguments.batch_size)
    every = max(1, steps * arguments.epochs // 200)
    step, seconds = 0, 0.0

    def now() -> results.Point:
        return results.Point(step, seconds, optimizer.compression_stats()["wire_bytes"])

    run.tests.append((now(), accuracy(model, test)))
    for epoch in range(arguments.epochs):
        batches = dataset.train.batches(seed=arguments.seed, epoch=epoch, rank=hvd.rank(), size=hvd.size(),
                                        batch_size=arguments.batch_size)
        with progress_bar(f"{compression}, epoch {epoch + 1} of {arguments.epochs}", steps) as bar:
            for images, labels in batches:
                started = time.perf_counter()
                for group in optimizer.param_groups:
                    group["lr"] = command_line.learning_rate(arguments, step / (steps * arguments.epochs))
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
                loss.backward()
                optimizer.step()
                seconds += time.perf_counter() - started
                step += 1
                point = now()
                if step % every == 0:
                    run.progress.append(point)
                figures = {"loss": f"{loss.item():.3f}", "sent": results.format_bytes(point.wire_bytes)}
                bar.set_postfix(figures, refresh=False)
                bar.update()
            run.tests.append((now(), accuracy(model, test)))
            bar.set_postfix({**figures, "test accuracy": f"{100 * run.accuracy:.2f} %"})
    run.dense_bytes = optimizer.compression_stats()["dense_bytes"]
    return run


@torch.no_grad()
def accuracy(model: nn.Module, share: Split) -> float:
    """The fraction of all test images that the model gets right; each worker tests its own share of them."""
    images, labels = torch.from_numpy(share.images), torch.from_numpy(share.labels)
    right = sum(int((model(part).argmax(1) == truth).sum())
                for part, truth in zip(images.split(1000), labels.split(1000)))
    # Counts, not the workers' accuracies: shares may differ by an image.
    right, count = hvd.allreduce(torch.tensor([right, len(share)]), op=hvd.Sum, name="accuracy").tolist()
    return right / count


def progress_bar(title: str, steps: int) -> tqdm:
    """A bar on worker 0. Under horovodrun its width can't be found out, and a full log file is no use: hence the limits."""
    return tqdm(total=steps, desc=title, disable=hvd.rank() != 0, mininterval=0.5,
                bar_format="{desc} {percentage:3.0f}% |{bar:16}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]")


def together(action: Callable[[], T]) -> T:
    """Do something that may fail on one worker: if it does, all leave, where the others would wait for ever."""
    result = problem = None
    try:
        result = action()
    except (DatasetError, OSError) as error:
        problem = error
    speaker = hvd.allreduce(torch.tensor(hvd.rank() if problem else hvd.size()), op=hvd.Min, name="failed")
    if speaker == hvd.rank():
        print(f"{Path(__file__).name}: {problem}", file=sys.stderr)
    if speaker < hvd.size():
        sys.exit(2)
    return result


def main() -> None:
    hvd.init()
    arguments = command_line.parse(__doc__, speak=hvd.rank() == 0)
    keep_freed_memory()
    torch.set_num_threads(threads_per_worker(hvd.local_size()))

    together(lambda: prepare(arguments.dataset) if hvd.local_rank() == 0 else None)  # one download a host
    dataset = together(lambda: load(prepare(arguments.dataset)))
    together(lambda: dataset.train.steps(hvd.size(), arguments.batch_size))

    title = (f"{arguments.model} on {arguments.dataset}; workers: {hvd.size()}, epochs: {arguments.epochs}, "
             f"{arguments.optimizer} {arguments.lr:g}, batch a worker: {arguments.batch_size}")
    setting = {**vars(arguments), "output": str(arguments.output), "workers": hvd.size()}
    runs = []
    for compression in arguments.compression:
        runs.append(train(compression, arguments, dataset))
        if hvd.rank() == 0:  # each time, so that a job that is cut short leaves what it has
            paths = results.save(runs, setting, title, arguments.output)
    if hvd.rank() == 0:
        console = Console(force_terminal=False, width=100)  # horovodrun puts a tag before each line, colours or not
        console.print(results.table(runs, title))
        print(*paths, sep="\n")


if __name__ == "__main__":
    main()
