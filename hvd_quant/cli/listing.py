"""``hvd-quant list``: the compressors there are."""

from __future__ import annotations

import click

from hvd_quant import list_compressors
from hvd_quant.cli import compressors, output
from hvd_quant.registry import compressor_class


@click.command("list", epilog=output.examples("hvd-quant list", "hvd-quant list --shape 1024x1024",
                                              "hvd-quant list --import my_package.compressors --json"))
@click.option("--shape", type=output.Shape(), default="4096x4096", show_default=True, help="Of a tensor, for the sizes.")
@output.import_option
@output.json_option
def command(shape: tuple[int, ...], as_json: bool) -> None:
    """List all compressors, those of installed packages included, with the bytes of one tensor's payload.

    Exit codes: 0 done, 2 the usage is wrong.
    """
    found = []
    for name in list_compressors():
        cls = compressor_class(name)
        found.append({"name": name, "summary": compressors.summary(cls), "paper": compressors.paper(cls),
                      **compressors.sizes(compressors.example_of(cls), shape)})
    if as_json:
        output.show_json(found)
        return
    rows = output.table("name", "payload", "times less", "what", right=("payload", "times less"),
                        caption=f"payload: of a tensor of {'x'.join(map(str, shape))} with the default knobs; "
                                "`hvd-quant show NAME` tells more")
    for one in found:
        rows.add_row(one["name"], output.format_bytes(one["payload_bytes"]), f"{one['ratio']:.3g}", one["summary"])
    output.show(rows)
