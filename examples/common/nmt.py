"""What the translation examples share: the command line, the schedule of the learning rate, the course of training, BLEU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from sacrebleu.metrics import BLEU

from common import job, results
from common.arguments import Parser, positive
from common.job import Total
from common.progress import Progress
from common.subwords import BEGIN, END, PAD, Batch, Sentences, Subwords, padded, subwords
from common.translation import SPLITS, Corpus, Pairs, load, prepare, read

SAMPLES = 3


def parse(description: str, models: tuple[str, ...], *, tied: bool = False, speak: bool = True,
          argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments; leaves with exit code 2 where one is wrong.

    Arguments:
        description: first line of the help text.
        models: to choose from, the default first.
        tied: whether they can share one matrix.
        speak: whether this worker prints (all of them parse the same line).
        argv: the command line; the process's own by default.
    """
    parser = Parser(description, speak)
    for part in SPLITS:
        for side, language in (("src", "source"), ("tgt", "target")):
            parser.add_argument(f"--{part}-{side}", metavar="FILE", type=Path,
                                help=f"{language} sentences for {part}, one a line; without all six, English-German from Debian")
    parser.add_argument("--model", choices=models, default=models[0], help="(default: %(default)s)")
    parser.add_argument("--vocabulary", type=positive(int), default=8000,
                        help="subwords of both languages together (default: %(default)s)")
    parser.add_argument("--width", type=positive(int), default=256, help="of embeddings and layers (default: %(default)s)")
    parser.add_argument("--layers", type=positive(int), default=2, help="of encoder and of decoder (default: %(default)s)")
    if tied:
        parser.add_argument("--tied", action="store_true", help="one matrix for the embeddings of both sides and the output")
    parser.add_argument("--dropout", type=float, default=0.1, help="(default: %(default)s)")
    parser.add_argument("--label-smoothing", type=float, default=0.1, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive(int), default=512,
                        help="tokens of a step on each worker, of either side and with padding (default: %(default)s)")
    parser.add_argument("--longest", type=positive(int), default=64,
                        help="tokens of a sentence; longer ones are cut off (default: %(default)s)")
    parser.add_argument("--steps", type=positive(int), default=1000, help="(default: %(default)s)")
    parser.add_argument("--evaluate-every", type=positive(int), default=100, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.002,
                        help="Adam's, at the end of the warm-up (default: %(default)s)")
    parser.add_argument("--warmup", type=positive(int), default=200, metavar="STEPS",
                        help="of rising learning rate; then it falls as 1 / sqrt(step) (default: %(default)s)")
    parser.add_argument("--beam", type=positive(int), default=4,
                        help="for the test set; 1 is greedy, as validation is (default: %(default)s)")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path,
                        help="where each worker saves at each evaluation, and goes on from if there is something")
    arguments = parser.parse_args(argv)
    files = [getattr(arguments, f"{part}_{side}") for part in SPLITS for side in ("src", "tgt")]
    if None in files and any(files):
        parser.error("of the six files --train-src, --train-tgt, --valid-src, --valid-tgt, --test-src and --test-tgt some are "
                     "missing: give all or none")
    if arguments.width % 64:
        parser.error(f"--width {arguments.width} is no multiple of 64, which a head of attention has")
    return arguments


def learning_rate(arguments: argparse.Namespace, step: int) -> float:
    """The rate of step ``step``, counted from 0 (Vaswani et al. 2017, with a height of its own)."""
    return arguments.lr * min((step + 1) / arguments.warmup, (arguments.warmup / (step + 1)) ** 0.5)


# ------------------------------------------------------------------------------------------------------------------ task

@dataclass(frozen=True)
class Task:
    """Sentences as numbers, and those that are judged as text."""

    train: Sentences
    valid: Pairs
    test: Pairs
    subwords: Subwords


def task(arguments: argparse.Namespace) -> Task:
    """The corpus of the command line, or Debian's, with its subwords.

    Raises:
        DatasetError, OSError: if it can't be had, or isn't one.
    """
    if arguments.train_src is None:
        corpus = load(prepare())
    else:
        corpus = Corpus(*(read(getattr(arguments, f"{part}_src"), getattr(arguments, f"{part}_tgt")) for part in SPLITS))
    vocabulary = subwords(corpus.train, arguments.vocabulary)
    return Task(Sentences(corpus.train, vocabulary, arguments.longest), corpus.valid, corpus.test, vocabulary)


# ------------------------------------------------------------------------------------------------------------------ BLEU

Translate = Callable[[np.ndarray, np.ndarray, int], list[list[int]]]


def translations(translate: Translate, lines: list[str], vocabulary: Subwords, hvd: Any, total: Total, beam: int,
                 longest: int) -> list[str]:
    """All lines translated; each worker does its share of them, and all get all.

    Arguments:
        translate: from sources (int64, filled with PAD), the most tokens of each translation, and the beam, to translations.
    """
    sources = [[*tokens[:longest - 1], END] for tokens in vocabulary.encode(lines)]
    mine = sorted(range(len(lines)), key=lambda i: (len(sources[i]), i))[hvd.rank()::hvd.size()]
    found = np.zeros((len(lines), longest), np.int64)
    together = max(1, 128 // beam)
    for start in range(0, len(mine), together):
        chosen = mine[start:start + together]
        limits = np.array([min(longest, 10 + 3 * len(sources[i]) // 2) for i in chosen])
        for i, tokens in zip(chosen, translate(padded([sources[i] for i in chosen]), limits, beam)):
            found[i, :len(tokens)] = tokens
    # Each line is zero but on one worker, so sums gather.
    rows = np.array(total(found.ravel().tolist())).reshape(found.shape)
    return vocabulary.decode([[token for token in row if token not in (PAD, BEGIN)] for row in rows.tolist()])


def bleu(found: list[str], references: list[str]) -> tuple[float, str]:
    """SacreBLEU's score of translations, and the signature that says how it was counted."""
    metric = BLEU()
    return metric.corpus_score(found, [references]).score, str(metric.get_signature())


# ------------------------------------------------------------------------------------------------------------------ course

class Trainer(Protocol):
    """A model and its distributed optimizer."""

    def step(self, batch: Batch, lr: float) -> float:
        """Train on a batch, and give the loss a token."""

    def agree(self) -> None:
        """Average the parameters, where a compressor's merge lets them differ between workers."""

    def translate(self, sources: np.ndarray, limits: np.ndarray, beam: int) -> list[list[int]]:
        """See :func:`translations`."""

    def stats(self) -> dict[str, Any]:
        """What the exchanges cost so far."""

    def save(self, path: Path, run: dict[str, Any]) -> None:
        """Write what training goes on from: model, optimizer, this worker's compression state, random numbers, ``run``."""

    def load(self, path: Path) -> dict[str, Any]:
        """Take it up, and give ``run`` back."""


def train(trainer: Trainer, compression: str, arguments: argparse.Namespace, task: Task, hvd: Any, total: Total,
          told: Callable[[results.Run], None] = lambda run: None) -> results.Run:
    """Train a model, look at its translations now and then, and judge it by the test set at the end.

    Arguments:
        trainer: of the framework.
        compression: what it was made with.
        arguments, task: what to train with and on.
        hvd: Horovod's module for the framework.
        total: adds integers up over the workers, place by place.
        told: is called after each evaluation.
    """
    show = hvd.rank() == 0
    parts = -(-arguments.steps // arguments.evaluate_every)
    progress = Progress(compression, parts, min(arguments.steps, arguments.evaluate_every), trainer.stats, show, results.BLEU,
                        "part")
    checkpoints = arguments.checkpoint and Checkpoints(arguments.checkpoint / compression, hvd, total)
    if checkpoints and (path := checkpoints.latest()):
        progress.go_on(results.Run.from_json(trainer.load(path)))
    batches = task.train.batches(seed=arguments.seed, rank=hvd.rank(), size=hvd.size(), max_tokens=arguments.max_tokens,
                                 start=progress.step)

    def judge(pairs: Pairs, beam: int) -> tuple[float, str]:
        found = translations(trainer.translate, pairs.source, task.subwords, hvd, total, beam, arguments.longest)
        if show:
            for lines in list(zip(pairs.source, found, pairs.target))[:SAMPLES]:
                print(" | ".join(lines), flush=True)
        return bleu(found, pairs.target)

    while progress.step < arguments.steps:
        batch = next(batches)
        progress.start()
        progress.stop(trainer.step(batch, learning_rate(arguments, progress.step)), batch.tokens)
        if progress.step % arguments.evaluate_every == 0 or progress.step == arguments.steps:
            trainer.agree()
            progress.tested(judge(task.valid, 1)[0])
            told(progress.run)
            if checkpoints:
                checkpoints.write(progress.step, lambda path: trainer.save(path, progress.run.to_json()))
    score, signature = judge(task.test, arguments.beam)
    progress.run.more = {"test_bleu": score, "signature": signature, "beam": arguments.beam}
    if show:
        print(f"{compression}: BLEU of the test set {score:.2f} ({signature}, beam {arguments.beam})", flush=True)
    return progress.run


class Checkpoints:
    """One file a worker and step. Older ones go when all workers have written, so there is a step of which all have theirs."""

    def __init__(self, folder: Path, hvd: Any, total: Total) -> None:
        self._folder, self._total, self._rank, self._size = folder, total, hvd.rank(), hvd.size()
        self._suffix = f"-{self._rank}of{self._size}"

    def latest(self) -> Path | None:
        """This worker's file of the last step that all have written."""
        steps = [0] * self._size
        steps[self._rank] = max(self._steps(), default=0)
        step = min(self._total(steps))
        return self._path(step) if step else None

    def write(self, step: int, save: Callable[[Path], None]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        before, scratch = self._steps(), self._path(step).with_suffix(".incomplete")
        save(scratch)
        scratch.replace(self._path(step))
        self._total([1])  # all have
        for old in before:
            if old != step:
                self._path(old).unlink()

    def _steps(self) -> list[int]:
        return [int(path.name.partition("-")[0]) for path in self._folder.glob(f"*{self._suffix}")]

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:08d}{self._suffix}"


def run(hvd: Any, arguments: argparse.Namespace, total: Total, make: Callable[[str, argparse.Namespace, int], Trainer]) -> None:
    """Get the sentences, and train and compare a model with each compressor.

    Arguments:
        hvd: Horovod's module for the framework, initialised.
        arguments: of the command line.
        total: adds integers up over the workers, place by place.
        make: from a compressor, the arguments and the vocabulary's size, to a trainer; all of the same start.
    """
    job.together(hvd, total, lambda: task(arguments) if hvd.local_rank() == 0 else None)  # one download a host
    work = job.together(hvd, total, lambda: task(arguments))
    job.together(hvd, total, lambda: work.train.plan(seed=arguments.seed, epoch=0, size=hvd.size(),
                                                     max_tokens=arguments.max_tokens))
    title = (f"{arguments.model}, {len(work.train):,} pairs of sentences; workers: {hvd.size()}, steps: {arguments.steps}, "
             f"tokens a worker: {arguments.max_tokens}")
    job.compare(hvd, arguments, title, lambda compression: train(
        make(compression, arguments, len(work.subwords)), compression, arguments, work, hvd, total))
