"""Accuracy and BLEU over steps, bytes and time, for the schemes of the papers that hvd_quant implements.

    python benchmarks/convergence.py run --list                                    # what there is to measure, and hours
    python benchmarks/convergence.py run --json docs/papers/results.jsonl          # hours on 2 cores; goes on where the file ends
    python benchmarks/convergence.py report docs/papers/results.jsonl --page docs/papers/README.md

A *course* trains a model to its end and leaves one line of JSON an evaluation; how good a model is after so many steps doesn't depend
on the network, so most courses run unshaped. A *pace* is the median time of a step between hosts with links of 1 Gb/s, and of an
exchange by itself. Steps to a target times the time of a step is the time to the target; a few courses at 1 Gb/s prove it.

All workers share this machine's cores, one thread each, and glibc keeps freed memory, for all competitors alike.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "pytorch")]

import convergence_report  # noqa: E402
from cluster import Cluster, horovodrun, unavailable  # noqa: E402
from convergence_grid import PACED_STEPS, TASKS, UNSHAPED, Run, estimate, launches, matrix, scheme  # noqa: E402

Line = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- the file

def load(file: Path) -> list[Line]:
    """The lines of a file. One that a killed run left unfinished at the end is left out."""
    lines = []
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            pass
    return lines


def complete(lines: Iterable[Line]) -> list[Line]:
    """Those of runs that came to their end."""
    lines = list(lines)
    ended = {Run.of(line) for line in lines if line["end"]}
    return [line for line in lines if Run.of(line) in ended]


def missing(runs: Iterable[Run], lines: Iterable[Line]) -> list[Run]:
    ended = {Run.of(line) for line in lines if line["end"]}
    return [run for run in runs if run not in ended]


def begin(file: Path, runs: Iterable[Run]) -> list[Run]:
    """Drop what is left of runs that were cut short, and give the runs that are missing."""
    lines = complete(load(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return missing(runs, lines)


# ------------------------------------------------------------------------------------------------------ on each worker

class Subject(Protocol):
    """Something to train.

    Attributes:
        optimizer, model: of PyTorch, the optimizer distributed.
        steps: of a course.
        every: steps between two evaluations.
    """

    optimizer: Any
    model: Any
    steps: int
    every: int

    def advance(self) -> Iterator[None]:
        """Take one step at each turn."""

    def evaluate(self) -> float:
        """How good the model is that the workers have in common."""

    def finish(self) -> Line:
        """What else to say at the end."""


@functools.cache
def images() -> Any:
    """MNIST, read once a process."""
    from common.datasets import load as read, prepare

    return read(prepare("mnist"))


@functools.cache
def sentences() -> Any:
    """English–German, read once a process."""
    from common import nmt

    return nmt.task(nmt.parse("", ("transformer",), argv=[]))


class Images:
    """MNIST, as benchmarks/schemes.py trains it."""

    def __init__(self, run: Run) -> None:
        import schemes
        from common import arguments

        task = TASKS[run.task]
        recipe = arguments.parse("", argv=list(task.arguments))
        self._training = schemes.Training(scheme(run.scheme), run.seed, recipe, images())
        self.optimizer, self.model = self._training.optimizer, self._training.model
        self.steps = self._training.steps * recipe.epochs
        self.every = max(1, self.steps // task.tests)

    def advance(self) -> Iterator[None]:
        for batch in self._training.batches():
            self._training.step(*batch)
            yield

    def evaluate(self) -> float:
        self._training.test()
        return self._training.tests[-1]["accuracy"]

    def finish(self) -> Line:
        return {}


class Sentences:
    """English–German, as examples/pytorch/pytorch_nmt.py trains it."""

    def __init__(self, run: Run) -> None:
        import pytorch_nmt
        from common import nmt

        self._nmt, self._total, task = nmt, pytorch_nmt.total, TASKS[run.task]
        self._arguments = nmt.parse("", ("transformer", "rnn"), tied=True, argv=[*task.arguments, "--seed", str(run.seed)])
        self._task = sentences()
        self._trainer = pytorch_nmt.Trainer(scheme(run.scheme).spec, self._arguments, len(self._task.subwords))
        self.optimizer, self.model = self._trainer.optimizer, self._trainer.model
        self.steps, self.every = self._arguments.steps, self._arguments.evaluate_every

    def advance(self) -> Iterator[None]:
        import hvd_quant.torch as hvd

        batches = self._task.train.batches(seed=self._arguments.seed, rank=hvd.rank(), size=hvd.size(),
                                           max_tokens=self._arguments.max_tokens)
        for step, batch in zip(range(self.steps), batches):
            self._trainer.step(batch, self._nmt.learning_rate(self._arguments, step))
            yield

    def evaluate(self) -> float:
        self._trainer.agree()
        return self._judge(self._task.valid, 1)[0]

    def finish(self) -> Line:
        score, signature = self._judge(self._task.test, self._arguments.beam)
        return {"test_bleu": score, "signature": signature, "beam": self._arguments.beam}

    def _judge(self, pairs: Any, beam: int) -> tuple[float, str]:
        import hvd_quant.torch as hvd

        found = self._nmt.translations(self._trainer.translate, pairs.source, self._task.subwords, hvd, self._total, beam,
                                       self._arguments.longest)
        return self._nmt.bleu(found, pairs.target)


def course(run: Run, subject: Subject, tell: Callable[[Line], None]) -> None:
    """Train to the end, and tell of each evaluation. Seconds are of training alone."""
    step, seconds, turns = 0, 0.0, subject.advance()
    while step < subject.steps:
        start = time.perf_counter()
        next(turns)
        seconds += time.perf_counter() - start
        step += 1
        if step % subject.every == 0 or step == subject.steps:
            value, end = subject.evaluate(), step == subject.steps
            stats = subject.optimizer.compression_stats()
            tell({**run._asdict(), "step": step, "value": value, "seconds": seconds, "wire_bytes": stats["wire_bytes"],
                  "dense_bytes": stats["dense_bytes"], "end": end, **(subject.finish() if end else {})})


def pace(run: Run, subject: Subject, tell: Callable[[Line], None]) -> None:
    """The median time of a step, in a window from one averaging to the next where there are such, and of an exchange alone."""
    import torch

    import hvd_quant.torch as hvd

    window = max(1, scheme(run.scheme).every)
    turns, times = subject.advance(), []
    for _ in range(3 * window):  # not timed: sizes are agreed upon, memory is taken
        next(turns)
    for _ in range(max(PACED_STEPS // window, 5)):
        start = time.perf_counter()
        for _ in range(window):
            next(turns)
        times.append((time.perf_counter() - start) / window)
    line = {**run._asdict(), "seconds": statistics.median(times), "quartiles": statistics.quantiles(times, n=4)[::2],
            "steps": window * len(times), "entries": sum(p.numel() for p in subject.model.parameters()), "end": True}
    if run.workers > 1 and window == 1:
        parameters, exchanges = list(subject.model.parameters()), []
        gradients = [torch.randn_like(p) for p in parameters]
        for _ in range(PACED_STEPS // 2):
            subject.optimizer.zero_grad()
            loss = sum((p * gradient).sum() for p, gradient in zip(parameters, gradients))
            hvd.allreduce(torch.zeros(1), name="start")
            start = time.perf_counter()
            loss.backward()  # the gradients are there, and on their way
            subject.optimizer.synchronize()
            exchanges.append(time.perf_counter() - start)
        subject.optimizer.zero_grad()
        line["exchange_seconds"] = statistics.median(exchanges[3:])
    tell(line)


def work(file: Path, runs: Iterable[Run]) -> None:
    """What each worker does: one run after the other; worker 0 writes."""
    import torch
    from common.process import keep_freed_memory

    import hvd_quant.torch as hvd

    hvd.init()
    keep_freed_memory()
    torch.set_num_threads(1)

    def tell(line: Line) -> None:
        if hvd.rank() == 0:
            with file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")

    for run in runs:
        subject = {"mnist": Images, "nmt": Sentences}[TASKS[run.task].example](run)
        {"course": course, "pace": pace}[run.kind](run, subject, tell)
        del subject
        gc.collect()  # an optimizer and its hooks refer to each other
        if hvd.rank() == 0:
            print(describe(run), flush=True)


# -------------------------------------------------------------------------------------------------------- command line

def describe(run: Run) -> str:
    return f"{run.kind} {run.task}, {run.scheme}, {run.workers} workers, {run.rate}, seed {run.seed}"


def prepare_data(runs: Iterable[Run]) -> None:
    """Fetch what the runs train on, before workers would all at once."""
    for example in {TASKS[run.task].example for run in runs}:
        {"mnist": images, "nmt": sentences}[example]()


def launch(workers: int, rate: str, file: Path, runs: list[Run]) -> int:
    """Start the workers, and wait for them."""
    command = [sys.executable, str(Path(__file__).resolve()), "work", "--json", str(file.resolve()), "--runs", json.dumps(runs)]
    environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if rate != UNSHAPED:
        with Cluster(hosts=workers, rate=rate) as cluster:
            return cluster.run(command, env=environment, capture=False).returncode
    launcher = [] if workers == 1 else [horovodrun(), "-np", str(workers), "--gloo"]
    return subprocess.run([*launcher, *command], env={**os.environ, **environment}).returncode


def chosen(arguments: argparse.Namespace) -> list[Run]:
    def fits(value: str, patterns: list[str] | None) -> bool:
        return not patterns or any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)

    return [run for run in matrix(arguments.short) if fits(run.task, arguments.tasks) and fits(run.scheme, arguments.schemes)
            and fits(run.kind, arguments.kinds) and (not arguments.seeds or run.seed in arguments.seeds)]


def listing(runs: list[Run]) -> str:
    lines = [f"{estimate(run) / 60:5.1f} min  {describe(run)}" for run in runs]
    return "\n".join([*lines, f"{len(runs)} runs, about {sum(map(estimate, runs)) / 3600:.1f} hours on 2 cores"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="measure what the file lacks")
    command.add_argument("--json", metavar="FILE", type=Path, help="where the lines go; those in it are kept")
    command.add_argument("--list", action="store_true", help="say what would be measured, and how long that takes")
    command.add_argument("--short", action="store_true", help="a quarter of an hour's worth instead")
    command.add_argument("--tasks", metavar="PATTERN", nargs="+", help="of " + ", ".join(TASKS))
    command.add_argument("--schemes", metavar="PATTERN", nargs="+", help="compressors, or averaged every N steps")
    command.add_argument("--kinds", nargs="+", choices=("course", "pace"))
    command.add_argument("--seeds", type=int, nargs="+")
    command = commands.add_parser("work", help="what run starts on each worker")
    command.add_argument("--json", type=Path, required=True)
    command.add_argument("--runs", type=lambda text: [Run(*run) for run in json.loads(text)], required=True)
    command = commands.add_parser("report", help="tables and plots of a file's lines")
    command.add_argument("json", metavar="FILE", type=Path)
    command.add_argument("--page", type=Path, help="write into this page, between its marks, with plots beside it; else print tables")
    arguments = parser.parse_args(argv)
    if arguments.command == "report":
        convergence_report.report(complete(load(arguments.json)), arguments.page)
        return 0
    if arguments.command == "work":
        work(arguments.json, arguments.runs)
        return 0
    runs = chosen(arguments)
    if arguments.list:
        print(listing(missing(runs, load(arguments.json)) if arguments.json else runs))
        return 0
    if arguments.json is None:
        parser.error("say with --json where the lines are to go, or --list what there is")
    runs = begin(arguments.json, runs)
    if runs and (reason := unavailable()):
        print(f"Left out is what needs a slow network: {reason}", file=sys.stderr)
        runs = [run for run in runs if run.rate == UNSHAPED]
    prepare_data(runs)
    for (workers, rate), together in launches(runs):
        if failed := launch(workers, rate, arguments.json, together):
            return failed
    return 0


if __name__ == "__main__":
    sys.exit(main())
