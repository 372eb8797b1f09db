"""What the examples of every framework do around the training: get the data, compare, leave together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from common import results
from common.datasets import Dataset, DatasetError, load, prepare

T = TypeVar("T")
Total = Callable[[list[int]], list[int]]


def run(hvd: Any, arguments: argparse.Namespace, total: Total,
        train: Callable[[str, argparse.Namespace, Dataset], results.Run]) -> None:
    """Get the data set of images, and train and compare.

    Arguments:
        hvd: Horovod's module for the framework, initialised.
        arguments: of the command line.
        total: adds integers up over the workers, place by place.
        train: trains a model with a compressor.
    """
    together(hvd, total, lambda: prepare(arguments.dataset) if hvd.local_rank() == 0 else None)  # one download a host
    dataset = together(hvd, total, lambda: load(prepare(arguments.dataset)))
    together(hvd, total, lambda: dataset.train.steps(hvd.size(), arguments.batch_size))

    title = (f"{arguments.model} on {arguments.dataset}; workers: {hvd.size()}, epochs: {arguments.epochs}, "
             f"{arguments.optimizer} {arguments.lr:g}, batch a worker: {arguments.batch_size}")
    compare(hvd, arguments, title, lambda compression: train(compression, arguments, dataset))


def compare(hvd: Any, arguments: argparse.Namespace, title: str, train: Callable[[str], results.Run]) -> None:
    """Train one model with each compressor, and show and save what came of it.

    Arguments:
        hvd: Horovod's module for the framework, initialised.
        arguments: of the command line.
        title: of the table and the picture.
        train: trains a model with a compressor.
    """
    setting = {**{key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
               "workers": hvd.size()}
    runs = []
    for compression in arguments.compression:
        runs.append(train(compression))
        if hvd.rank() == 0:  # each time, so that a job that is cut short leaves what it has
            paths = results.save(runs, setting, title, arguments.output)
    if hvd.rank() == 0:
        console = Console(force_terminal=False, width=100)  # horovodrun puts a tag before each line, colours or not
        console.print(results.table(runs, title))
        print(*paths, sep="\n")


def together(hvd: Any, total: Total, action: Callable[[], T]) -> T:
    """Do something that may fail on one worker: if it does, all leave, where the others would wait for ever."""
    result = problem = None
    try:
        result = action()
    except (DatasetError, OSError) as error:
        problem = error
    failed = total([int(problem is not None and rank == hvd.rank()) for rank in range(hvd.size())])
    if any(failed):
        if failed.index(1) == hvd.rank():
            print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr)
        sys.exit(2)
    return result
