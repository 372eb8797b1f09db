"""Train on MNIST with compressed gradients, and compare.

    horovodrun -np 2 python examples/pytorch/pytorch_mnist.py
    horovodrun -np 2 python examples/pytorch/pytorch_mnist.py --model mlp --compression none --compression adaptive

What is different from training with Horovod alone is one import and the argument ``compression=``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import hvd_quant.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments as command_line, job  # noqa: E402
from common.datasets import Dataset, Split  # noqa: E402
from common.process import keep_freed_memory, threads_per_worker  # noqa: E402
from common.progress import Progress  # noqa: E402
from common.results import Run  # noqa: E402


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


def train(compression: str, arguments: argparse.Namespace, dataset: Dataset) -> Run:
    """Train one model from the same start and on the same batches as every other."""
    torch.manual_seed(arguments.seed)
    model = build(arguments.model, dataset.image_shape, dataset.classes)
    optimizer = build_optimizer(arguments.optimizer, model.parameters(), arguments.lr)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    test = dataset.test.share(hvd.rank(), hvd.size())
    steps = dataset.train.steps(hvd.size(), arguments.batch_size)
    progress = Progress(compression, arguments.epochs, steps, optimizer.compression_stats, show=hvd.rank() == 0)
    progress.tested(accuracy(model, test))
    for epoch in range(arguments.epochs):
        for images, labels in dataset.train.batches(seed=arguments.seed, epoch=epoch, rank=hvd.rank(), size=hvd.size(),
                                                    batch_size=arguments.batch_size):
            progress.start()
            for group in optimizer.param_groups:
                group["lr"] = command_line.learning_rate(arguments, progress.done)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
            loss.backward()
            optimizer.step()
            progress.stop(loss.item())
        optimizer.average_parameters()  # with a compressor that has a merge they differ between workers
        progress.tested(accuracy(model, test))
    return progress.run


@torch.no_grad()
def accuracy(model: nn.Module, share: Split) -> float:
    """The fraction of all test images that the model gets right; each worker tests its own share of them."""
    images, labels = torch.from_numpy(share.images), torch.from_numpy(share.labels)
    right = sum(int((model(part).argmax(1) == truth).sum())
                for part, truth in zip(images.split(1000), labels.split(1000)))
    # Counts, not the workers' accuracies: shares may differ by an image.
    right, count = total([right, len(share)])
    return right / count


def total(counts: list[int]) -> list[int]:
    """The sums over all workers, place by place."""
    return hvd.allreduce(torch.tensor(counts), op=hvd.Sum, name="counts").tolist()


def main() -> None:
    hvd.init()
    arguments = command_line.parse(__doc__, speak=hvd.rank() == 0)
    keep_freed_memory()
    torch.set_num_threads(threads_per_worker(hvd.local_size()))
    job.run(hvd, arguments, total, train)


if __name__ == "__main__":
    main()
