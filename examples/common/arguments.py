"""The command lines of the examples: the pieces of all of them, and the MNIST examples' with their recipes."""

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


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and on one worker; knows the arguments that all examples have.

    Arguments:
        description: first line of the help text.
        speak: whether this worker prints (all of them parse the same line).
    """

    def __init__(self, description: str, speak: bool) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.speak = speak
        self.add_argument("--compression", metavar="SPEC", type=_compression, action="append",
                          help="one of " + ", ".join(hvd_quant.list_compressors()) + ", with knobs as in topk:ratio=0.01 (the "
                               "default); given more than once, one model after the other is trained, for comparison")
        self.add_argument("--seed", type=int, default=1, help="of the initial weights and the order of examples (default: 1)")
        self.add_argument("--output", metavar="DIR", type=Path, default=Path("results"),
                          help="where results.json and results.png go (default: results)")

    def parse_args(self, args: list[str] | None = None) -> argparse.Namespace:
        arguments = super().parse_args(args)
        arguments.compression = arguments.compression or ["topk:ratio=0.01"]
        return arguments

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
    parser = Parser(description, speak)
    parser.add_argument("--dataset", metavar="NAME|DIR", default="mnist",
                        help="mnist, fashion-mnist, or a folder of four IDX files (default: mnist)")
    parser.add_argument("--model", choices=RECIPES, default="conv",
                        help="a small convolutional net, 3 hidden layers of 1024, or of 4096 units (default: conv)")
    parser.add_argument("--epochs", type=positive(int), help="passes over the training images" + _defaults("epochs"))
    parser.add_argument("--batch-size", type=positive(int), help="images a step on each worker" + _defaults("batch_size"))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="sgd's learning rate falls linearly to 0" + _defaults("optimizer"))
    parser.add_argument("--lr", type=positive(float), help="learning rate" + _defaults("lr"))
    arguments = parser.parse_args(argv)
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


def positive(number: type) -> object:
    """A type of arguments: such a number above 0."""
    def parse(text: str) -> float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value
    parse.__name__ = number.__name__  # argparse names the type where the text is no number
    return parse
