"""What the convergence benchmark trains: tasks, schemes, and the runs that an evening has room for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemes import Row

RATE = "1gbit"
UNSHAPED = "unshaped"
PACED_STEPS = 60
AVERAGED = "averaged every {} steps"


@dataclass(frozen=True)
class Task:
    """A model and what it is trained on.

    Attributes:
        title: in the report.
        example: "mnist" or "nmt", whose command line ``arguments`` are.
        steps: of a run with 4 workers; with one worker as many, unless an epoch is longer.
        tests: evaluations of a run.
        target: the value to be reached, or how far below dense's final value.
        seconds: a step takes about so long on two cores: of one worker, of 4 unshaped, and of 4 dense ones at 1 Gb/s.
        evaluation: seconds of one.
    """

    title: str
    example: str
    arguments: tuple[str, ...]
    steps: int
    tests: int
    target: float
    seconds: tuple[float, float, float]
    evaluation: float


def _mnist(epochs: int) -> tuple[str, ...]:
    return "--model", "mlp", "--epochs", str(epochs)


def _nmt(model: str, steps: int, tests: int) -> tuple[str, ...]:
    return "--model", model, "--steps", str(steps), "--evaluate-every", str(steps // tests)


TASKS = {
    "mnist": Task("MNIST, 3 × 1024 units", "mnist", _mnist(10), 2340, 40, 0.98, (0.02, 0.045, 0.2), 0.4),
    "mnist-4096": Task("MNIST, 3 × 4096 units, AdaGrad", "mnist", ("--model", "mlp-4096"), 375, 6, -0.001, (0.2, 0.7, 2.4), 3),
    "transformer": Task("English–German, Transformer", "nmt", _nmt("transformer", 1000, 10), 1000, 10, -0.3, (0.17, 0.4, 0.8), 7),
    "rnn": Task("English–German, RNN with attention", "nmt", _nmt("rnn", 1000, 10), 1000, 10, -0.3, (0.12, 0.28, 0.6), 6),
    "mnist-short": Task("MNIST, 3 × 1024 units, 3 epochs", "mnist", _mnist(3), 702, 12, -0.002, (0.02, 0.045, 0.2), 0.4),
    "transformer-short": Task("English–German, Transformer, 150 steps", "nmt", _nmt("transformer", 150, 3), 150, 3, -0.3,
                              (0.17, 0.4, 0.8), 15),
}


class Run(NamedTuple):
    """A line of the matrix: a "course" is trained to its end, for a "pace" the time of a step is taken."""

    kind: str
    task: str
    scheme: str
    workers: int
    rate: str
    seed: int = 1

    @classmethod
    def of(cls, line: dict[str, Any]) -> Run:
        return cls(*(line[name] for name in cls._fields))


def scheme(name: str) -> Row:
    """What a scheme's name stands for: a compressor, or a number of steps between two averagings of the model.

    How gradients travel is said, since the fastest way over loopback is another than at 1 Gb/s, with other bytes and another rounding.
    """
    every = next((i for i in (1, 4, 16, 64) if name == AVERAGED.format(i)), 0)
    if every or name == "none":
        return Row(name, every=every, compression="none")
    exchange = "allreduce" if name in HOROVOD else "sra"
    return Row(name, compression=f"{name}{',' if ':' in name else ':'}exchange={exchange}")


DROPPED = "topk:ratio=0.01"
MERGED = [f"{DROPPED},merge={merge}" for merge in ("sum", "replace", "error")]
# Aji & Heafield 2017: how much is dropped, by whose threshold, and how what remains is quantised.
DROPPING = ["topk:ratio=0.1", DROPPED, "topk:ratio=0.001", f"{DROPPED},scope=model", f"{DROPPED},values=2bit"]
# Dryden et al. 2016, with a threshold that suits MNIST's gradients (docs/mnist.md).
QUANTISED = ["onebit", "threshold:tau=0.01", "adaptive"]
HOROVOD = ["none", "fp16"]
AVERAGINGS = [AVERAGED.format(i) for i in (1, 4, 16, 64)]  # Yu et al. 2019

THREE_SEEDS = {"mnist": ["none", "adaptive", DROPPED], "transformer": ["none", DROPPED, f"{DROPPED},merge=replace"]}
ONE_SEED = {
    "mnist": ["fp16", "onebit", "threshold:tau=0.01", *DROPPING, *AVERAGINGS],
    "mnist-4096": ["none", "onebit", "threshold:tau=0.001", "adaptive"],
    "transformer": ["fp16", *(name for name in DROPPING if "scope" not in name), *MERGED],
    "rnn": ["none", DROPPED, *MERGED],
}
WHOLE = {"mnist": ["none", "adaptive"], "transformer": ["none", f"{DROPPED},merge=replace"]}
"""Trained to the end at 1 Gb/s too, to prove that steps times their time is the time."""
SHORT = {"mnist-short": [*HOROVOD, "adaptive", DROPPED], "transformer-short": ["none", DROPPED, f"{DROPPED},merge=replace"]}


def matrix(short: bool = False) -> list[Run]:
    """All runs, what matters most first; without ``short`` ones or those alone."""
    three, one, whole = ({}, SHORT, {}) if short else (THREE_SEEDS, ONE_SEED, WHOLE)
    runs: dict[Run, None] = {}
    for seed in (1, 2, 3):
        for task, schemes in three.items():
            runs.update({Run("course", task, name, 4, UNSHAPED, seed): None for name in schemes})
        if seed == 1:
            for task in TASKS:
                schemes = list(dict.fromkeys([*three.get(task, []), *one.get(task, [])]))
                runs.update({Run("course", task, name, 4, UNSHAPED): None for name in schemes})
                runs.update({Run("pace", task, name, 4, RATE): None for name in schemes})
                if schemes:
                    runs[Run("pace", task, "none", 1, UNSHAPED)] = None
            if not short:
                runs.update({Run("pace", "mnist-4096", name, 2, RATE): None for name in ("none", "adaptive")})
                runs.update({Run("pace", task, "fp16", 4, RATE): None for task in ("mnist-4096", "rnn")})
                runs.update({Run("course", task, "none", 1, UNSHAPED): None for task in ("transformer", "rnn")})
            for task, schemes in whole.items():
                runs.update({Run("course", task, name, 4, RATE): None for name in schemes})
    return list(runs)


def estimate(run: Run) -> float:
    """About how many seconds a run takes on two cores, its part of a launch included."""
    task = TASKS[run.task]
    alone, together, dense = task.seconds
    if run.workers == 1:
        step = alone
    else:
        step = together if run.rate == UNSHAPED or scheme(run.scheme).every or run.scheme not in HOROVOD else dense
    if run.kind == "pace":
        return 10 + 2 * step * max(PACED_STEPS, 5 * scheme(run.scheme).every)
    return 10 + step * task.steps + task.evaluation * task.tests


def launches(runs: Iterable[Run]) -> Iterator[tuple[tuple[int, str], list[Run]]]:
    """Runs that can share their processes, in the order of the first of each."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.workers, run.rate), []).append(run)
    yield from groups.items()
