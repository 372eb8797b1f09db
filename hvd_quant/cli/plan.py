"""``hvd-quant plan``: which compressor a model and a network ask for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import platformdirs

from hvd_quant import Compressor, TensorInfo, list_compressors
from hvd_quant.cli import output
from hvd_quant.exchange import cost, plan, timing
from hvd_quant.registry import compressor_class

Shapes = list[tuple[str, tuple[int, ...]]]


def calibration_path(workers: int) -> Path:
    """Where `hvd-quant bench exchange` leaves what it measured between so many workers."""
    return platformdirs.user_cache_path("hvd_quant") / f"exchange-{workers}.json"


def save_calibration(costs: cost.Costs, workers: int, path: Path) -> None:
    """Write what exchanges cost between so many workers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"workers": workers, **costs.as_dict()}) + "\n")


def load_calibration(path: Path, workers: int) -> cost.Costs:
    """What :func:`save_calibration` wrote.

    Raises:
        click.UsageError: for a file that is none, or one of another number of workers.
    """
    try:
        figures = json.loads(path.read_text())
        costs = cost.Costs.of(figures)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path} can't be read: {error}; `hvd-quant bench exchange` writes such a file") from None
    if figures.get("workers") != workers:
        raise click.UsageError(f"{path} was measured between {figures.get('workers')} workers, and --workers is {workers}: measure it "
                               f"with `horovodrun -np {workers} -H HOST:1,HOST:1,... hvd-quant bench exchange --save {path}`")
    return costs


def shapes_of_model(name: str) -> Shapes:
    """Names and shapes of what a factory's model trains.

    Raises:
        click.UsageError: for what is no such factory, or fails.
    """
    module, colon, function = name.partition(":")
    if not colon or not function:
        raise click.UsageError(f"--model is {name!r}, expected module:function, as torchvision.models:resnet50")
    make = output.import_module(module)
    for part in function.split("."):
        if not hasattr(make, part):
            raise click.UsageError(f"{module} has no {function}")
        make = getattr(make, part)
    try:
        model = make() if isinstance(make, type) or not hasattr(make, "named_parameters") else make
    except Exception as error:
        raise click.UsageError(f"{name}() failed: {type(error).__name__}: {error}") from None
    if hasattr(model, "named_parameters"):
        return [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    if hasattr(model, "trainable_variables"):
        if not model.built:
            raise click.UsageError(f"{name}() gave a model that isn't built: give its first layer an Input, or call model.build")
        return [(getattr(v, "path", v.name), tuple(v.shape)) for v in model.trainable_variables]
    raise click.UsageError(f"{name}() gave a {type(model).__name__}; a torch.nn.Module or a Keras model is expected")


def shapes_of_file(path: Path) -> Shapes:
    """One tensor a line: its shape, with a name before it if it has one."""
    shapes = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if words := line.partition("#")[0].split():
            try:
                shapes.append((words[0] if len(words) > 1 else f"line {number}", output.parse_shape(words[-1])))
            except ValueError as error:
                raise click.UsageError(f"{path}:{number}: {error}") from None
    return shapes


def shapes_of_text(text: str) -> Shapes:
    """Shapes with commas between them."""
    try:
        return [(str(i), output.parse_shape(part)) for i, part in enumerate(filter(str.strip, text.split(",")))]
    except ValueError as error:
        raise click.UsageError(f"--shapes: {error}") from None


def everything() -> list[Compressor]:
    """Each compressor that needs no knob."""
    classes = map(compressor_class, list_compressors())
    return [cls() for cls in classes if not any(field.default is dataclasses.MISSING for field in dataclasses.fields(cls))]


def costs_for(compressors: list[Compressor], workers: int, rate: str | None, calibration: Path | None) -> tuple[cost.Costs, str]:
    """What there is to predict with, and what that is in words."""
    if rate is not None:
        bits = cost.bits_per_second(rate)
        if bits is None:
            raise ValueError(f"the rate is {rate!r}, expected that of a link, as 10gbit")
        costs, words = cost.typical(workers, bits), f"a network of {rate}"
    else:
        path = calibration or calibration_path(workers)
        if calibration is None and not path.exists():
            raise click.UsageError("give --rate, such as 1gbit, or measure: "
                                   f"horovodrun -np {workers} -H HOST:1,HOST:1,... hvd-quant bench exchange")
        costs, words = load_calibration(path, workers), f"what was measured between {workers} workers ({path})"
    missing = [c for c in [*compressors, plan.FP16] if cost.key_of(c) not in costs.rates and c.name != "none"]
    if missing:
        backend = timing.here()
        if backend is None:
            return costs, f"{words}, and codes that take a typical time, since no framework's kernels are here to measure"
        found = timing.all_rates([c for c in missing if backend.can(c)], backend, workers)
        costs = dataclasses.replace(costs, rates={**found, **costs.rates})
        words += f", and codes as they run here in {backend.name}"
    return costs, words


@click.command("plan", epilog=output.examples(
    "hvd-quant plan --model torchvision.models:resnet50 --workers 8 --rate 10gbit --backward 0.12",
    "hvd-quant plan --model my_project.train:make_model --workers 4 --rate 1gbit -c topk:ratio=0.001 -c onebit",
    "hvd-quant plan --shapes 4096x4096,1000x4096,1000 --workers 4 --rate 1gbit --json",
    "horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-quant bench exchange && hvd-quant plan --file shapes.txt --workers 4"))
@click.option("--model", metavar="MODULE:FUNCTION", help="What returns a PyTorch or Keras model.")
@click.option("--shapes", metavar="SHAPES", help="Of its parameters instead, as 1024x1024,1000.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A file with one of them a line, as 1024x1024 or `name 1024x1024`.")
@click.option("--workers", type=click.IntRange(min=2), required=True, help="How many there will be.")
@click.option("--rate", help="Of each worker's link, as 1gbit or 100mbit.")
@click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="What `hvd-quant bench exchange --save` wrote. Without it and --rate, what that has measured last.")
@click.option("--backward", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS",
              help="Of a backward pass, beside which gradients travel.")
@click.option("-c", "--compressor", "compressors", type=output.Spec(), multiple=True, metavar="SPEC",
              help="Compare this one, may be given several times; all if unset.")
@output.import_option
@output.json_option
def command(model: str | None, shapes: str | None, file: Path | None, workers: int, rate: str | None, calibration: Path | None,
            backward: float, compressors: tuple[Compressor, ...], as_json: bool) -> None:
    """Predict what the exchange of a model's gradients takes with each compressor, and recommend one, or none.

    The model of the costs is that of exchange="auto". Workers are taken to have a link each. What a compressor does to training isn't
    predicted: of those within 10 % of the fastest, the one
    with the longest payloads is recommended, since it loses least.

    Exit codes: 0 done, 2 the usage is wrong, or the model can't be made.
    """
    if sum(one is not None for one in (model, shapes, file)) != 1:
        raise click.UsageError("give the model as --model, --shapes or --file, one of them")
    if rate is not None and calibration is not None:
        raise click.UsageError("give --rate or --calibration, not both")
    if model is not None:
        named = shapes_of_model(model)
    else:
        named = shapes_of_text(shapes) if shapes is not None else shapes_of_file(file)
    if not named:
        raise click.UsageError("there is nothing to exchange: the model has no parameters")
    infos = [TensorInfo.whole(name, shape, world=workers) for name, shape in named]
    chosen = list(compressors) or everything()
    try:
        costs, basis = costs_for(chosen, workers, rate, calibration)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    predictions = plan.predict_all(chosen, infos, costs, backward)
    best = plan.recommend(predictions)
    none = next(one for one in predictions if one.spec == "none")
    result: dict[str, Any] = {
        "tensors": len(infos), "entries": sum(info.numel for info in infos), "workers": workers, "basis": basis,
        "backward": backward,
        "predictions": [dataclasses.asdict(one) for one in predictions], "recommended": best.spec}
    if as_json:
        output.show_json(result)
        return
    rows = output.table("compression", "sends", "exchange", *(["step"] if backward else []), "times faster",
                        right=("sends", "exchange", "step", "times faster"))
    for one in predictions:
        figures = [one.exchange_seconds, *([one.step_seconds] if backward else [])]
        rows.add_row(one.spec, output.format_bytes(one.sent_bytes), *map(output.format_seconds, figures),
                     f"{none.step_seconds / one.step_seconds:.2f}", style="bold" if one is best else None)
    output.show(f"{result['tensors']} tensors, {result['entries']:,} entries, {workers} workers; {basis}", rows,
                conclusion(best, none, backward))


def conclusion(best: plan.Prediction, none: plan.Prediction, backward: float) -> str:
    """The recommendation, in a sentence."""
    what = "step" if backward else "exchange"
    if best is none:
        return f"Recommended: no compression, since none makes the {what} {plan.WORTH:.0%} faster."
    return (f'Recommended: compression="{best.spec}": {what} {output.format_seconds(best.step_seconds)} instead of '
            f"{output.format_seconds(none.step_seconds)}.")
