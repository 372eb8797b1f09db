"""Sentences as numbers of subwords, by SentencePiece, and batches of them with the same number of tokens or so."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
import sentencepiece

from common.datasets import DatasetError
from common.translation import Pairs

PAD, UNKNOWN, BEGIN, END = range(4)


class Subwords:
    """A vocabulary that source and target language share.

    Arguments:
        model: SentencePiece's, serialised.
    """

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    def encode(self, lines: list[str]) -> list[list[int]]:
        return self._processor.encode(lines, num_threads=1)

    def decode(self, tokens: list[list[int]]) -> list[str]:
        return self._processor.decode(tokens)


def subwords(pairs: Pairs, size: int, cache: Path | None = None) -> Subwords:
    """The vocabulary of training sentences, by byte-pair encoding: the same bytes for the same sentences, and kept by their hash.

    Arguments:
        pairs: both sides are learned from.
        size: tokens, the four special ones included.
        cache: where to keep vocabularies; the user's cache folder by default.

    Raises:
        DatasetError: if the sentences don't have that many.
    """
    lines = [*pairs.source, *pairs.target]
    key = hashlib.sha256("\n".join([f"{sentencepiece.__version__} bpe {size}", *lines]).encode()).hexdigest()[:16]
    file = (cache or platformdirs.user_cache_path("hvd_quant") / "subwords") / f"{key}.model"
    if not file.is_file():
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=model, vocab_size=size, model_type="bpe", character_coverage=1.0,
                pad_id=PAD, unk_id=UNKNOWN, bos_id=BEGIN, eos_id=END, num_threads=1, minloglevel=2)
        except RuntimeError as error:
            raise DatasetError(f"no vocabulary of {size} subwords can be made of {len(pairs)} pairs of sentences: "
                               f"{error}") from error
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(model.getvalue())
        os.replace(scratch, file)
    return Subwords(file.read_bytes())


# ---------------------------------------------------------------------------------------------------------------- batches

@dataclass(frozen=True)
class Batch:
    """Sentences of about one length: what encoder and decoder read, and what the decoder should say; int64, filled with PAD."""

    source: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray

    @property
    def tokens(self) -> int:
        """What there is to be learned from it."""
        return int((self.labels != PAD).sum())


class Sentences:
    """Encoded pairs, and the batches of an epoch.

    Arguments:
        pairs: to be encoded.
        subwords: by what.
        longest: tokens of a sentence; longer ones are cut off.
    """

    def __init__(self, pairs: Pairs, subwords: Subwords, longest: int) -> None:
        self.sources, self.targets = ([tokens[:longest - 1] for tokens in subwords.encode(lines)]
                                      for lines in (pairs.source, pairs.target))
        self._lengths = np.array([1 + max(map(len, pair)) for pair in zip(self.sources, self.targets)])

    def __len__(self) -> int:
        return len(self.sources)

    def plan(self, *, seed: int, epoch: int, size: int, max_tokens: int) -> list[list[np.ndarray]]:
        """The steps of an epoch: which sentences each worker takes. All workers make the same plan, of the arguments alone.

        Sentences are sorted by length, those of a length in a random order, and cut into batches of at most ``max_tokens`` tokens
        on either side, padding included. Neighbours make a step, so that its workers have as much to do, and steps come in a random
        order. Up to ``size`` - 1 batches are left over.

        Raises:
            DatasetError: if there are fewer batches than workers.
        """
        random = np.random.default_rng((seed, epoch))
        order = random.permutation(len(self))
        order = order[np.argsort(self._lengths[order], kind="stable")]
        batches, start = [], 0
        while start < len(order):
            lengths = self._lengths[order[start:start + max_tokens]]
            fitting = lengths * np.arange(1, 1 + len(lengths)) <= max_tokens
            stop = start + max(1, int(fitting.sum()))
            batches.append(order[start:stop])
            start = stop
        steps = [batches[i:i + size] for i in range(random.integers(1 + len(batches) % size), len(batches) - size + 1, size)]
        if not steps:
            raise DatasetError(f"{len(self)} training sentences are fewer than one step takes: {size} workers with batches of "
                               f"{max_tokens} tokens")
        return [steps[i] for i in random.permutation(len(steps))]

    def batches(self, *, seed: int, rank: int, size: int, max_tokens: int, start: int = 0) -> Iterator[Batch]:
        """This worker's batches, one a step, epoch after epoch without end, from step ``start`` on."""
        epoch, before = 0, 0
        while True:
            plan = self.plan(seed=seed, epoch=epoch, size=size, max_tokens=max_tokens)
            for chosen in plan[max(0, start - before):]:
                yield self.batch(chosen[rank])
            epoch, before = epoch + 1, before + len(plan)

    def batch(self, chosen: np.ndarray) -> Batch:
        targets = [self.targets[i] for i in chosen]
        return Batch(padded([[*self.sources[i], END] for i in chosen]), padded([[BEGIN, *target] for target in targets]),
                     padded([[*target, END] for target in targets]))


def padded(rows: list[list[int]]) -> np.ndarray:
    """Rows of numbers as a matrix, filled with PAD at the end."""
    matrix = np.full((len(rows), max(map(len, rows))), PAD, np.int64)
    for row, values in zip(matrix, rows):
        row[:len(values)] = values
    return matrix
