"""``hvd-quant show``: one compressor."""

from __future__ import annotations

import click

from hvd_quant import get_compressor
from hvd_quant.cli import compressors, output


@click.command("show", epilog=output.examples(
    "hvd-quant show topk", "hvd-quant show topk:ratio=0.001,values=float16 --shape 1024x1024", "hvd-quant show threshold --json"))
@click.argument("spec", metavar="NAME|SPEC")
@click.option("--shape", type=output.Shape(), help="Of the tensor whose sizes are shown; 4096x4096 if unset.")
@click.option("--numel", type=click.IntRange(min=1), help="The same for a vector of so many entries.")
@output.import_option
@output.json_option
def command(spec: str, shape: tuple[int, ...] | None, numel: int | None, as_json: bool) -> None:
    """Show what a compressor does, its knobs, and what it sends and keeps of a tensor.

    NAME is one of `hvd-quant list`; SPEC is what compression= takes, such as topk:ratio=0.001.

    Exit codes: 0 done, 2 there is no such compressor or the usage is wrong.
    """
    if shape is not None and numel is not None:
        raise click.UsageError("give --shape or --numel, not both")
    shape = shape or ((numel,) if numel else (4096, 4096))
    try:
        named = spec.strip() == spec.partition(":")[0].strip() and spec.strip() != "auto"
        compressor = compressors.example_of(compressors.class_of(spec)) if named else get_compressor(spec)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    cls, knobs, sizes = type(compressor), compressors.knobs(compressor), compressors.sizes(compressor, shape)
    needed = [knob["name"] for knob in knobs if knob["default"] is None]
    example = f"{cls.name}:{','.join(f'{name}=VALUE' for name in needed)}" if named and needed else compressor.spec
    result = {"name": cls.name, "spec": example, "summary": compressors.summary(cls), "text": compressors.text(cls),
              "paper": compressors.paper(cls), "linear": cls.linear, "sparse": cls.sparse, "sizes": sizes, "knobs": knobs}
    if as_json:
        output.show_json(result)
        return
    rows = output.table("knob", "value", "default", "what")
    for knob in sorted(knobs, key=lambda knob: knob["common"]):
        if named and knob["name"] in needed:
            value = default = "needed"
        else:
            value, default = (_text(knob[key]) for key in ("value", "default"))
        rows.add_row(knob["name"], "" if value == default else value, default, knob["help"],
                     end_section=not knob["common"] and knob is [k for k in knobs if not k["common"]][-1])
    whole = "x".join(map(str, shape))
    output.show(f"{cls.name}: {result['summary']}", *(["", result["text"]] if result["text"] else []),
                *(["", f"Source: {result['paper']}"] if result["paper"] else []), "", rows, "",
                f"A tensor of {whole} is {output.format_bytes(sizes['payload_bytes'])} instead of "
                f"{output.format_bytes(sizes['dense_bytes'])}, {sizes['ratio']:.3g} times less; a worker keeps "
                f"{output.format_bytes(sizes['state_bytes'])} for it"
                + (f", and by sra {output.format_bytes(sizes['owner_state_bytes'])} divided by the number of workers more"
                   if sizes["owner_state_bytes"] else "")
                + ".", f'compression="{example}"')


def _text(value: object) -> str:
    return "needed" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
