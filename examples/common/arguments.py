"""The command line of the MNIST examples, and what each model is trained with unless it says otherwise."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import hvd_quant


@dataclass(frozen=True)
class Recipe:
    """How a model is trained by default."""

    optimizer: str
    lr: float
    batch_size: int
    epochs: int


# SGD without momentum: with it, one bit an entry stayed behind dense (docs/mnist.md).
RECIPES = {
    "conv": Recipe("sgd", 0.3, 64, 5),
    "mlp": Recipe("sgd", 0.3, 64, 5),
    "mlp-4096": Recipe("adagrad", 0.005, 40, 1),  # Dryden et al. 2016
}
OPTIMIZERS = ("sgd", "adagrad", "adam")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and on one worker."""

    speak = True

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")

    def _print_message(self, message: str, file: object = None) -> None:
        if self.speak:
            super()._print_message(message, file)


def parse(description: str, *, speak: bool = True, argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the model's recipe filled in; leaves with exit code 2 where one is wrong.

    Arguments:
        description: first line of the help text.
        speak: whether this worker prints (all of them parse the same line).
        argv: the command line; the process's own by default.
    """
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.speak = speak
    parser.add_argument("--compression", metavar="SPEC", type=_compression, action="append",
                        help="one of " + ", ".join(hvd_quant.list_compressors()) + ", with knobs as in topk:ratio=0.01 (the "
                             "default); given more than once, one model after the other is trained, for comparison")
    parser.add_argument("--dataset", metavar="NAME|DIR", default="mnist",
                        help="mnist, fashion-mnist, or a folder of four IDX files (default: mnist)")
    parser.add_argument("--model", choices=RECIPES, default="conv",
                        help="a small convolutional net, 3 hidden layers of 1024, or of 4096 units (default: conv)")
    parser.add_argument("--epochs", type=_positive(int), help="passes over the training images" + _defaults("epochs"))
    parser.add_argument("--batch-size", type=_positive(int), help="images a step on each worker" + _defaults("batch_size"))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="sgd's learning rate falls linearly to 0" + _defaults("optimizer"))
    parser.add_argument("--lr", type=_positive(float), help="learning rate" + _defaults("lr"))
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights and the order of images (default: 1)")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("results"),
                        help="where results.json and results.png go (default: results)")
    arguments = parser.parse_args(argv)
    arguments.compression = arguments.compression or ["topk:ratio=0.01"]
    recipe = RECIPES[arguments.model]
    if arguments.optimizer not in (None, recipe.optimizer) and arguments.lr is None:
        parser.error(f"--optimizer {arguments.optimizer} needs --lr: the default learning rate of {arguments.model} is "
                     f"for {recipe.optimizer}")
    for name, value in vars(recipe).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def learning_rate(arguments: argparse.Namespace, done: float) -> float:
    """What the learning rate is when the fraction ``done`` of all steps is done; AdaGrad and Adam scale their own."""
    return arguments.lr * (1 - done) if arguments.optimizer == "sgd" else arguments.lr


def _defaults(name: str) -> str:
    return " (default: " + ", ".join(f"{getattr(recipe, name)} for {model}" for model, recipe in RECIPES.items()) + ")"


def _compression(spec: str) -> str:
    try:
        hvd_quant.get_compressor(spec)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return spec


def _positive(number: type) -> object:
    def parse(text: str) -> float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value
    parse.__name__ = number.__name__  # argparse names the type where the text is no number
    return parse
