"""The ``hvd-quant`` command: one file a subcommand."""

import click

import hvd_quant
from hvd_quant.cli import bench, build_horovod, doctor, listing, plan, show


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hvd_quant.__version__, prog_name="hvd-quant")
def main() -> None:
    """Compressed gradient exchange for Horovod."""


for _module in (bench, build_horovod, doctor, listing, plan, show):
    main.add_command(_module.command)
