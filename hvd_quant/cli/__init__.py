"""The ``hvd-quant`` command: one file a subcommand."""

import importlib

import click

import hvd_quant

COMMANDS = {"bench": "bench", "build-horovod": "build_horovod", "doctor": "doctor", "list": "listing", "plan": "plan",
            "show": "show"}


class _Commands(click.Group):
    """Imports a subcommand when it is asked for: most need what others don't."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return importlib.import_module(f"hvd_quant.cli.{COMMANDS[name]}").command if name in COMMANDS else None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hvd_quant.__version__, prog_name="hvd-quant")
def main() -> None:
    """Compressed gradient exchange for Horovod."""
