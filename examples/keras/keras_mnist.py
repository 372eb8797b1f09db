"""Train on MNIST with compressed gradients by Keras's fit, and compare.

    horovodrun -np 2 python examples/keras/keras_mnist.py
    horovodrun -np 2 python examples/keras/keras_mnist.py --compression none --compression adaptive

What is different from training with Horovod alone is one import and the argument ``compression=``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow tells much about itself

import keras  # noqa: E402
import numpy as np  # noqa: E402

import hvd_quant.keras as hvd  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments as command_line, job  # noqa: E402
from common.datasets import Dataset  # noqa: E402
from common.keras_nets import build, build_optimizer  # noqa: E402
from common.process import keep_freed_memory, share_machine_in_tensorflow  # noqa: E402
from common.progress import Progress  # noqa: E402
from common.results import Run  # noqa: E402


class Course(keras.callbacks.Callback):
    """Sets the learning rate of each step, and tells ``progress`` of steps and tests."""

    def __init__(self, arguments: argparse.Namespace, progress: Progress) -> None:
        super().__init__()
        self._arguments, self._progress = arguments, progress

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._progress.start()
        self.model.optimizer.learning_rate = command_line.learning_rate(self._arguments, self._progress.done)

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        self._progress.stop(logs["loss"])

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self._progress.tested(float(logs["val_accuracy"]))


def train(compression: str, arguments: argparse.Namespace, dataset: Dataset) -> Run:
    """Train one model from the same start and on the same batches as every other."""
    keras.utils.set_random_seed(arguments.seed)
    model = build(arguments.model, dataset.image_shape, dataset.classes)
    optimizer = build_optimizer(arguments.optimizer, arguments.lr)

    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for epoch in range(arguments.epochs):
            yield from dataset.train.batches(seed=arguments.seed, epoch=epoch, rank=hvd.rank(), size=hvd.size(),
                                             batch_size=arguments.batch_size)

    test = dataset.test.share(hvd.rank(), hvd.size())
    steps = dataset.train.steps(hvd.size(), arguments.batch_size)
    progress = Progress(compression, arguments.epochs, steps, optimizer.compression_stats, show=hvd.rank() == 0)
    _, untrained = model.evaluate(test.images, test.labels, batch_size=1000, verbose=0)
    progress.tested(float(hvd.allreduce(untrained)))
    model.fit(batches(), epochs=arguments.epochs, steps_per_epoch=steps, validation_data=(test.images, test.labels),
              validation_batch_size=1000, shuffle=False, verbose=0, callbacks=[
                  hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
                  hvd.callbacks.MetricAverageCallback(),  # each worker tests its own share of the test images
                  Course(arguments, progress)])
    return progress.run


def total(counts: list[int]) -> list[int]:
    """The sums over all workers, place by place."""
    return hvd.allreduce(counts, average=False).numpy().tolist()


def main() -> None:
    hvd.init()
    arguments = command_line.parse(__doc__, speak=hvd.rank() == 0)
    keep_freed_memory()
    share_machine_in_tensorflow(hvd.local_size())
    job.run(hvd, arguments, total, train)


if __name__ == "__main__":
    main()
