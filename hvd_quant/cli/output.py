"""What the commands share: how they take names, shapes and figures, and how they show what they found."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from hvd_quant import Compressor, get_compressor
from hvd_quant.exchange.telemetry import format_bytes  # noqa: F401 - for the commands

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


class FoundError(click.ClickException):
    """Something is wrong beyond the command's arguments: exit code 1."""


def examples(*lines: str) -> str:
    """The end of a command's help: what one may type, as it is."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def show_json(result: Any) -> None:
    """Print it on standard output, alone."""
    click.echo(json.dumps(result, indent=2))


def table(*columns: str, right: Iterable[str] = (), **kwargs: Any) -> Table:
    """A table without rows; columns of figures are on the right."""
    return Table(*(Column(name, justify="right" if name in right else "left", no_wrap=name in right, overflow="fold")
                   for name in columns), **kwargs)


def show(*parts: Any) -> None:
    """Print tables, and lines as they are, on standard output."""
    console = Console(highlight=False)
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def import_module(name: str) -> Any:
    """A module of an installed package or of the working directory.

    Raises:
        click.UsageError: saying which module can't be imported, and why.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise click.UsageError(f"{name} can't be imported: {type(error).__name__}: {error}") from None


def _import_all(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        import_module(name)
    return names


import_option = click.option("--import", "imported", multiple=True, metavar="MODULE", callback=_import_all, is_eager=True,
                             expose_value=False, help="Import a module first that registers compressors of your own.")


class Spec(click.ParamType):
    """A compressor, by its spec string."""

    name = "spec"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Compressor:
        try:
            return get_compressor(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Shape(click.ParamType):
    """A tensor's shape, as 1024x512."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return parse_shape(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_shape(text: str) -> tuple[int, ...]:
    """The dimensions in a text such as 1024x512.

    Raises:
        ValueError: for what is no shape.
    """
    parts = text.strip().lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{text.strip()!r} is no shape: write dimensions with an x between them, as 1024x512, or 1000")
    return tuple(map(int, parts))


def format_seconds(seconds: float) -> str:
    """So many seconds, in three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
