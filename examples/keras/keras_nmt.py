"""Translate with compressed gradients in Keras, and compare: a Transformer.

    horovodrun -np 2 python examples/keras/keras_nmt.py
    horovodrun -np 2 python examples/keras/keras_nmt.py --compression none --compression topk:ratio=0.01,merge=replace

What is different from training with Horovod alone is one import and the argument ``compression=``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow tells much about itself

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers, ops  # noqa: E402

import hvd_quant.keras as hvd  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import nmt  # noqa: E402
from common.decoding import search  # noqa: E402
from common.process import keep_freed_memory, share_machine_in_tensorflow  # noqa: E402
from common.subwords import PAD, Batch  # noqa: E402

TOKENS = tf.TensorSpec((None, None), tf.int64)  # of any length, so that nothing is traced again


class Block(layers.Layer):
    """A layer of the encoder, or of the decoder if it reads a ``memory``; with the norms first."""

    def __init__(self, width: int, dropout: float, decoder: bool) -> None:
        super().__init__()
        options = {"num_heads": width // 64, "key_dim": 64, "dropout": dropout}
        self.decoder = decoder
        self.attention, self.attention_norm = layers.MultiHeadAttention(**options), layers.LayerNormalization(epsilon=1e-5)
        if decoder:
            self.reading, self.reading_norm = layers.MultiHeadAttention(**options), layers.LayerNormalization(epsilon=1e-5)
        self.inner, self.outer = layers.Dense(4 * width, "relu"), layers.Dense(width)
        self.feed_norm, self.dropout = layers.LayerNormalization(epsilon=1e-5), layers.Dropout(dropout)

    def call(self, x: Any, readable: Any, memory: Any = None, training: bool = False) -> Any:
        """``readable``, (sentences, 1, tokens): what is no padding, of the memory if there is one, and else of x."""
        y = self.attention_norm(x)
        y = self.attention(y, y, attention_mask=None if self.decoder else readable, use_causal_mask=self.decoder, training=training)
        x = x + self.dropout(y, training=training)
        if self.decoder:
            y = self.reading(self.reading_norm(x), memory, attention_mask=readable, training=training)
            x = x + self.dropout(y, training=training)
        y = self.inner(self.feed_norm(x))
        return x + self.dropout(self.outer(self.dropout(y, training=training)), training=training)


class Transformer(keras.Model):
    """Vaswani et al. 2017, as in ``examples/pytorch/pytorch_nmt.py``."""

    def __init__(self, vocabulary: int, arguments: argparse.Namespace) -> None:
        super().__init__()
        width, dropout = arguments.width, arguments.dropout
        normal = keras.initializers.RandomNormal(stddev=width ** -0.5, seed=arguments.seed)
        self.source, self.target = (layers.Embedding(vocabulary, width, embeddings_initializer=normal.clone()) for _ in range(2))
        self.encoder, self.decoder = ([Block(width, dropout, decoder) for _ in range(arguments.layers)] for decoder in (False, True))
        self.encoder_norm, self.decoder_norm = layers.LayerNormalization(epsilon=1e-5), layers.LayerNormalization(epsilon=1e-5)
        self.output_layer, self.dropout = layers.Dense(vocabulary, kernel_initializer=normal.clone()), layers.Dropout(dropout)
        angles = np.arange(arguments.longest + 1)[:, None] * 10000 ** (-np.arange(0, width, 2) / width)
        self.positions = np.stack([np.sin(angles), np.cos(angles)], 2).reshape(len(angles), width).astype(np.float32)

    def _embed(self, embedding: layers.Embedding, tokens: Any, training: bool) -> Any:
        x = embedding(tokens) * embedding.output_dim ** 0.5 + ops.convert_to_tensor(self.positions)[:ops.shape(tokens)[1]]
        return self.dropout(x, training=training)

    def encode(self, source: Any, training: bool = False) -> tuple[Any, Any]:
        """Features of sources, and where they are no padding."""
        x, readable = self._embed(self.source, source, training), (source != PAD)[:, None]
        for block in self.encoder:
            x = block(x, readable, training=training)
        return self.encoder_norm(x), readable

    def decode(self, inputs: Any, memory: Any, readable: Any, training: bool = False) -> Any:
        """Features of the token after each of ``inputs``."""
        x = self._embed(self.target, inputs, training)
        for block in self.decoder:
            x = block(x, readable, memory, training=training)
        return self.decoder_norm(x)

    def call(self, source: Any, inputs: Any, training: bool = False) -> Any:
        return self.output_layer(self.decode(inputs, *self.encode(source, training), training))


class Trainer:
    """A model and Adam; all models of a seed start the same. See :class:`common.nmt.Trainer`."""

    def __init__(self, compression: str, arguments: argparse.Namespace, vocabulary: int) -> None:
        keras.utils.set_random_seed(arguments.seed)
        self.model = Transformer(vocabulary, arguments)
        self.model(tf.ones((1, 2), tf.int64), tf.ones((1, 2), tf.int64))  # which makes the variables
        hvd.broadcast_variables(self.model.variables, root_rank=0)
        for variable in self.model.non_trainable_variables:  # dropout's state: each worker's own
            variable.assign(variable + tf.cast(1000 * hvd.rank(), variable.dtype))

        optimizer = keras.optimizers.Adam(arguments.lr, beta_2=0.98, epsilon=1e-9)
        self.optimizer = hvd.DistributedOptimizer(optimizer, compression=compression, sparse_as_dense=True)  # as PyTorch's embeddings
        self.optimizer.build(self.model.trainable_variables)
        self._smoothing = arguments.label_smoothing

    @tf.function(input_signature=[TOKENS] * 3)
    def _step(self, source: tf.Tensor, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            chances = tf.nn.log_softmax(self.model(source, inputs, training=True)[labels != PAD])
            right = tf.gather(chances, labels[labels != PAD], batch_dims=1)
            loss = -tf.reduce_mean((1 - self._smoothing) * right + self._smoothing * tf.reduce_mean(chances, 1))
        self.optimizer.apply(tape.gradient(loss, self.model.trainable_variables), self.model.trainable_variables)
        return loss

    def step(self, batch: Batch, lr: float) -> float:
        self.optimizer.learning_rate = lr
        return float(self._step(batch.source, batch.inputs, batch.labels))

    def agree(self) -> None:
        self.optimizer.average_parameters()

    @tf.function(input_signature=[TOKENS])
    def _encode(self, source: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.model.encode(source)

    @tf.function(input_signature=[TOKENS, tf.TensorSpec((None, None, None)), tf.TensorSpec((None, 1, None), tf.bool)])
    def _next(self, tokens: tf.Tensor, memory: tf.Tensor, readable: tf.Tensor) -> tf.Tensor:
        return tf.nn.log_softmax(self.model.output_layer(self.model.decode(tokens, memory, readable)[:, -1]))

    def translate(self, sources: np.ndarray, limits: np.ndarray, beam: int) -> list[list[int]]:
        state = [tf.repeat(part, beam, 0) for part in self._encode(sources)]

        def next_scores(tokens: np.ndarray) -> np.ndarray:
            return self._next(tokens.reshape(-1, tokens.shape[2]), *state).numpy().reshape(*tokens.shape[:2], -1)

        return search(next_scores, limits, beam)

    def stats(self) -> dict[str, Any]:
        return self.optimizer.compression_stats()

    def save(self, path: Path, run: dict[str, Any]) -> None:
        saved = {"variables": [variable.numpy() for variable in self._variables()],
                 "compression": self.optimizer.compression_state_dict(), "run": run}
        with path.open("wb") as file:
            np.save(file, saved)

    def load(self, path: Path) -> dict[str, Any]:
        saved = np.load(path, allow_pickle=True).item()
        for variable, value in zip(self._variables(), saved["variables"], strict=True):
            variable.assign(value)
        self.optimizer.load_compression_state_dict(saved["compression"])
        return saved["run"]

    def _variables(self) -> list[keras.Variable]:
        return [*self.model.variables, *self.optimizer.variables]


def total(counts: list[int]) -> list[int]:
    """The sums over all workers, place by place."""
    return hvd.allreduce(counts, average=False, name=f"counts.{len(counts)}").numpy().tolist()


def main() -> None:
    hvd.init()
    arguments = nmt.parse(__doc__, ("transformer",), speak=hvd.rank() == 0)
    keep_freed_memory()
    share_machine_in_tensorflow(hvd.local_size())
    nmt.run(hvd, arguments, total, Trainer)


if __name__ == "__main__":
    main()
