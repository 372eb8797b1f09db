"""The course of one model's training: figures for its results, and a bar to look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from common.results import ACCURACY, Measure, Point, Run, format_bytes


class Progress:
    """Is told of each step and each test, and takes the time of the steps.

    Arguments:
        compression: the model's.
        epochs, steps: epochs of so many steps each.
        stats: tells what the exchanges cost so far, as ``optimizer.compression_stats`` does.
        show: whether this worker draws the bar.
        measure: what tests give.
        part: what an epoch is called.

    Attributes:
        run: what was measured.
    """

    def __init__(self, compression: str, epochs: int, steps: int, stats: Callable[[], dict[str, Any]],
                 show: bool, measure: Measure = ACCURACY, part: str = "epoch") -> None:
        self.run = Run(compression, measure=measure)
        self._epochs, self._steps, self._stats, self._show, self._part = epochs, steps, stats, show, part
        self._every = max(1, steps * epochs // 200)
        self._step, self._seconds, self._bar, self._figures = 0, 0.0, None, {}
        self._tokens, self._since = 0, 0.0
        self._before = {"wire_bytes": 0, "dense_bytes": 0}

    def go_on(self, run: Run) -> None:
        """Take up a run where its last test left it."""
        self.run, point = run, run.tests[-1][0]
        self._step, self._seconds = point.step, point.seconds
        self._since = point.seconds
        self._before = {"wire_bytes": point.wire_bytes, "dense_bytes": run.dense_bytes}

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    @property
    def done(self) -> float:
        """The fraction of all steps that is done."""
        return self._step / (self._steps * self._epochs)

    def start(self) -> None:
        """A step starts."""
        if self._bar is None:
            epoch = 1 + self._step // self._steps
            self._bar = self._new_bar(f"{self.run.compression}, {self._part} {epoch} of {self._epochs}")
        self._started = time.perf_counter()

    def stop(self, loss: float, tokens: int = 0) -> None:
        """The step has ended, with this loss, and with so many tokens learned from if the model is one of language."""
        self._seconds += time.perf_counter() - self._started
        self._step += 1
        point = self._now()
        if self._step % self._every == 0:
            self.run.progress.append(point)
        self._tokens += tokens
        speed = {"tokens/s": f"{self._tokens / (self._seconds - self._since):.0f}"} if tokens else {}
        self._figures = {"loss": f"{loss:.3f}", **speed, "sent": format_bytes(point.wire_bytes)}
        self._bar.set_postfix(self._figures, refresh=False)
        self._bar.update()

    def tested(self, value: float) -> None:
        """The model was tested: before the first epoch, or at the end of one."""
        self.run.tests.append((self._now(), value))
        self.run.dense_bytes = self._so_far("dense_bytes")
        if self._bar is not None:
            self._bar.set_postfix({**self._figures, self.run.measure.label: self.run.measure.show(value)})
            self._bar.close()
            self._bar = None

    def _now(self) -> Point:
        return Point(self._step, self._seconds, self._so_far("wire_bytes"))

    def _so_far(self, name: str) -> int:
        return self._before[name] + self._stats()[name]

    def _new_bar(self, title: str) -> tqdm:
        """Under horovodrun a bar's width can't be found out, and a full log file is no use: hence the limits."""
        layout = "{desc} {percentage:3.0f}% |{bar:16}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        return tqdm(total=self._steps, desc=title, disable=not self._show, mininterval=0.5, bar_format=layout)
