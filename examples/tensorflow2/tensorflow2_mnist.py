"""Train on MNIST with compressed gradients in a loop with a tape, and compare.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_mnist.py
    horovodrun -np 2 python examples/tensorflow2/tensorflow2_mnist.py --compression none --compression adaptive

What is different from training with Horovod alone is one import and the argument ``compression=``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow tells much about itself

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import hvd_quant.tensorflow as hvd  # noqa: E402
from hvd_quant import get_compressor  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments as command_line, job  # noqa: E402
from common.datasets import Dataset, Split  # noqa: E402
from common.keras_nets import build, build_optimizer  # noqa: E402
from common.process import keep_freed_memory, share_machine_in_tensorflow  # noqa: E402
from common.progress import Progress  # noqa: E402
from common.results import Run  # noqa: E402


def train(compression: str, arguments: argparse.Namespace, dataset: Dataset) -> Run:
    """Train one model from the same start and on the same batches as every other."""
    keras.utils.set_random_seed(arguments.seed)
    model = build(arguments.model, dataset.image_shape, dataset.classes)
    optimizer = build_optimizer(arguments.optimizer, arguments.lr)
    optimizer.build(model.trainable_variables)

    hvd.broadcast_variables(model.variables, root_rank=0)
    state = get_compressor(compression).bind(model.trainable_variables)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        tape = hvd.DistributedGradientTape(tape, compression=state)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    test = dataset.test.share(hvd.rank(), hvd.size())
    steps = dataset.train.steps(hvd.size(), arguments.batch_size)
    progress = Progress(compression, arguments.epochs, steps, state.stats, show=hvd.rank() == 0)
    progress.tested(accuracy(model, test))
    for epoch in range(arguments.epochs):
        for images, labels in dataset.train.batches(seed=arguments.seed, epoch=epoch, rank=hvd.rank(), size=hvd.size(),
                                                    batch_size=arguments.batch_size):
            progress.start()
            optimizer.learning_rate = command_line.learning_rate(arguments, progress.done)
            loss = step(images, labels)
            progress.stop(float(loss))
        progress.tested(accuracy(model, test))
    return progress.run


def accuracy(model: keras.Model, share: Split) -> float:
    """The fraction of all test images that the model gets right; each worker tests its own share of them."""
    parts = (slice(start, start + 1000) for start in range(0, len(share), 1000))
    right = sum(int(np.sum(np.argmax(model(share.images[part]), 1) == share.labels[part])) for part in parts)
    # Counts, not the workers' accuracies: shares may differ by an image.
    right, count = total([right, len(share)])
    return right / count


def total(counts: list[int]) -> list[int]:
    """The sums over all workers, place by place."""
    return hvd.allreduce(tf.constant(counts), op=hvd.Sum, name="counts").numpy().tolist()


def main() -> None:
    hvd.init()
    arguments = command_line.parse(__doc__, speak=hvd.rank() == 0)
    keep_freed_memory()
    share_machine_in_tensorflow(hvd.local_size())
    job.run(hvd, arguments, total, train)


if __name__ == "__main__":
    main()
