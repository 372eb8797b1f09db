"""Translate with compressed gradients, and compare: a Transformer, or a recurrent net with attention.

    horovodrun -np 4 python examples/pytorch/pytorch_nmt.py
    horovodrun -np 4 python examples/pytorch/pytorch_nmt.py --compression none --compression topk:ratio=0.01,merge=replace
    horovodrun -np 2 python examples/pytorch/pytorch_nmt.py --model rnn --train-src train.en --train-tgt train.de \\
        --valid-src valid.en --valid-tgt valid.de --test-src test.en --test-tgt test.de

What is different from training with Horovod alone is one import and the argument ``compression=``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_quant.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import nmt  # noqa: E402
from common.decoding import search  # noqa: E402
from common.process import keep_freed_memory, threads_per_worker  # noqa: E402
from common.subwords import PAD, Batch  # noqa: E402

State = tuple[Tensor, ...]


class Model(nn.Module):
    """Embeddings of both sides, and the output; a subclass encodes sources and decodes targets."""

    def __init__(self, vocabulary: int, width: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width, PAD)
        self.target = nn.Embedding(vocabulary, width, PAD)
        self.output = nn.Linear(width, vocabulary)
        self.dropout = nn.Dropout(dropout)
        for matrix in (self.source.weight, self.target.weight, self.output.weight):
            nn.init.normal_(matrix, std=width ** -0.5)
        if tied:
            self.source.weight = self.target.weight = self.output.weight

    def encode(self, source: Tensor) -> State:
        """What the decoder is to know of sources of shape (sentences, tokens)."""
        raise NotImplementedError

    def decode(self, inputs: Tensor, state: State) -> Tensor:
        """Features of the token after each of ``inputs``, (sentences, tokens, width)."""
        raise NotImplementedError

    def forward(self, source: Tensor, inputs: Tensor, wanted: Tensor) -> Tensor:
        """Logits where ``wanted`` is true, (tokens wanted, vocabulary): the output is much of the work, and padding needs none."""
        return self.output(self.decode(inputs, self.encode(source))[wanted])


class Transformer(Model):
    """Vaswani et al. 2017, with the norms before the layers, which trains with fewer steps of warm-up."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float, tied: bool, longest: int) -> None:
        super().__init__(vocabulary, width, dropout, tied)
        options = {"d_model": width, "nhead": width // 64, "dim_feedforward": 4 * width, "dropout": dropout, "batch_first": True,
                   "norm_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), layers, nn.LayerNorm(width),
                                             enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), layers, nn.LayerNorm(width))
        angles = torch.arange(longest + 1)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], 2).flatten(1), persistent=False)
        self.register_buffer("later", torch.ones(longest + 1, longest + 1, dtype=torch.bool).triu(1), persistent=False)

    def _embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        return self.dropout(embedding(tokens) * embedding.embedding_dim ** 0.5 + self.positions[:tokens.shape[1]])

    def encode(self, source: Tensor) -> State:
        padding = source == PAD
        return self.encoder(self._embed(self.source, source), src_key_padding_mask=padding), padding

    def decode(self, inputs: Tensor, state: State) -> Tensor:
        memory, padding = state
        length = inputs.shape[1]
        return self.decoder(self._embed(self.target, inputs), memory, tgt_mask=self.later[:length, :length], tgt_is_causal=True,
                            memory_key_padding_mask=padding)


class Recurrent(Model):
    """GRUs, the encoder's in both directions, with Luong et al.'s (2015) global attention."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float, tied: bool) -> None:
        super().__init__(vocabulary, width, dropout, tied)
        self.layers = layers
        between = dropout if layers > 1 else 0.0
        self.encoder = nn.GRU(width, width // 2, layers, batch_first=True, dropout=between, bidirectional=True)
        self.bridge = nn.Linear(width, layers * width)
        self.decoder = nn.GRU(width, width, layers, batch_first=True, dropout=between)
        self.score = nn.Linear(width, width, bias=False)
        self.combine = nn.Linear(2 * width, width)

    def encode(self, source: Tensor) -> State:
        padding = source == PAD
        embedded = self.dropout(self.source(source) * self.source.embedding_dim ** 0.5)
        lengths = (~padding).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        memory, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], batch_first=True, total_length=source.shape[1])
        return memory, padding, torch.tanh(self.bridge(memory.sum(1) / lengths[:, None]))

    def decode(self, inputs: Tensor, state: State) -> Tensor:
        memory, padding, start = state
        embedded = self.dropout(self.target(inputs) * self.target.embedding_dim ** 0.5)
        hidden, _ = self.decoder(embedded, start.unflatten(1, (self.layers, -1)).transpose(0, 1).contiguous())
        weights = (self.score(hidden) @ memory.transpose(1, 2)).masked_fill(padding[:, None], -torch.inf).softmax(2)
        return self.dropout(torch.tanh(self.combine(torch.cat([weights @ memory, hidden], 2))))


def build(arguments: argparse.Namespace, vocabulary: int) -> Model:
    """The net of the command line."""
    common = (vocabulary, arguments.width, arguments.layers, arguments.dropout, arguments.tied)
    return Recurrent(*common) if arguments.model == "rnn" else Transformer(*common, arguments.longest)


class Trainer:
    """A model and Adam; all models of a seed start the same. See :class:`common.nmt.Trainer`."""

    def __init__(self, compression: str, arguments: argparse.Namespace, vocabulary: int) -> None:
        torch.manual_seed(arguments.seed)
        self.model = build(arguments, vocabulary)
        optimizer = torch.optim.Adam(self.model.parameters(), arguments.lr, betas=(0.9, 0.98), eps=1e-9, fused=True)

        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters(), compression=compression)

        self._smoothing = arguments.label_smoothing
        torch.manual_seed(arguments.seed + 1000 * (1 + hvd.rank()))  # dropout is each worker's own

    def step(self, batch: Batch, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        source, inputs, labels = map(torch.from_numpy, (batch.source, batch.inputs, batch.labels))
        wanted = labels != PAD
        self.model.train()
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(source, inputs, wanted), labels[wanted], label_smoothing=self._smoothing)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def agree(self) -> None:
        self.optimizer.average_parameters()

    @torch.no_grad()
    def translate(self, sources: np.ndarray, limits: np.ndarray, beam: int) -> list[list[int]]:
        self.model.eval()
        state = tuple(part.repeat_interleave(beam, 0) for part in self.model.encode(torch.from_numpy(sources)))

        def next_scores(tokens: np.ndarray) -> np.ndarray:
            features = self.model.decode(torch.from_numpy(tokens).flatten(0, 1), state)[:, -1]
            return self.model.output(features).log_softmax(1).unflatten(0, tokens.shape[:2]).numpy()

        return search(next_scores, limits, beam)

    def stats(self) -> dict[str, Any]:
        return self.optimizer.compression_stats()

    def save(self, path: Path, run: dict[str, Any]) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "random": torch.get_rng_state(),
                    "compression": self.optimizer.compression_state_dict(), "run": run}, path)

    def load(self, path: Path) -> dict[str, Any]:
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.load_compression_state_dict(saved["compression"])
        torch.set_rng_state(saved["random"])
        return saved["run"]


def total(counts: list[int]) -> list[int]:
    """The sums over all workers, place by place."""
    return hvd.allreduce(torch.tensor(counts), op=hvd.Sum, name=f"counts.{len(counts)}").tolist()


def main() -> None:
    hvd.init()
    arguments = nmt.parse(__doc__, ("transformer", "rnn"), tied=True, speak=hvd.rank() == 0)
    keep_freed_memory()
    torch.set_num_threads(threads_per_worker(hvd.local_size()))
    nmt.run(hvd, arguments, total, Trainer)


if __name__ == "__main__":
    main()
