"""What there is to say of a compressor: its knobs, by its docstring, and the bytes it takes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any

from hvd_quant import Compressor, TensorInfo, get_compressor
from hvd_quant.registry import compressor_class

COMMON = {field.name for field in dataclasses.fields(Compressor)}


def example_of(cls: type[Compressor]) -> Compressor:
    """One with its defaults; knobs that have none are 1 (a bool or a number) or empty, which no size depends on."""
    needed = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
    types = typing.get_type_hints(cls)
    return get_compressor(cls.name + ":" + ",".join(f"{name}={'true' if types[name] is bool else 1}" for name in needed))


def summary(cls: type[Compressor]) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join(_docstring(cls).partition("\n\n")[0].split())


def paper(cls: type[Compressor]) -> str | None:
    found = re.search(r"^Source: (.*?)(?:\n\n|\Z)", _docstring(cls), re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else None


def text(cls: type[Compressor]) -> str:
    """What the docstring has besides that and the arguments."""
    body = re.split(r"^(?:Arguments|Raises|Source|Example):?", _docstring(cls), flags=re.MULTILINE)[0]
    return body.partition("\n\n")[2].strip()


def knobs(compressor: Compressor) -> list[dict[str, Any]]:
    """Each with its value, its default (None where it has to be given), what docstrings say, and whether all compressors have it."""
    described: dict[str, str] = {}
    for cls in reversed(type(compressor).__mro__[:-1]):
        described |= _arguments(cls)
    return [{"name": field.name, "value": getattr(compressor, field.name),
             "default": None if field.default is dataclasses.MISSING else field.default,
             "help": described.get(field.name, ""), "common": field.name in COMMON}
            for field in dataclasses.fields(compressor)]


def _docstring(cls: type[Compressor]) -> str:
    # (A dataclass without a docstring gets its signature for one.)
    found = inspect.getdoc(cls) or ""
    found = re.sub(r":\w+:`([^`]*)`", r"\1", found).replace("``", "").replace("\\|", "|")  # what is for a site's pages
    return "" if found.startswith(f"{cls.__name__}(") else found


def _arguments(cls: type[Compressor]) -> dict[str, str]:
    section = _docstring(cls).partition("Arguments:\n")[2]
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = {}
    for names, said in re.findall(r"^ {4}([\w, ]+): (.*?)(?=^ {4}\S|\Z)", section, re.MULTILINE | re.DOTALL):
        found |= dict.fromkeys((name.strip() for name in names.split(",")), " ".join(said.split()))
    return found


def sizes(compressor: Compressor, shape: tuple[int, ...]) -> dict[str, Any]:
    """Bytes of a tensor's payload and of what is kept for it.

    Returns:
        shape, dense_bytes, payload_bytes, ratio, state_bytes: of the worker's own gradient, owner_state_bytes: of the entries
        whose mean a worker sends to all in "sra", were it all of them.
    """
    info = TensorInfo.whole("", shape, world=2)
    final = compressor.stages()[-1][1] or compressor
    payload = final.summed_bytes(info) if final.allreduced else final.payload_bytes(info)

    def state(role: str) -> int:
        return sum(4 * TensorInfo.whole("", kept).numel for kept in compressor.state_shapes(info, role).values())

    return {"shape": list(shape), "dense_bytes": 4 * info.numel, "payload_bytes": payload, "ratio": 4 * info.numel / payload,
            "state_bytes": state("worker"), "owner_state_bytes": 0 if compressor.allreduced else state("owner")}


def class_of(spec: str) -> type[Compressor]:
    """The class that a spec names.

    Raises:
        ValueError: naming the closest known name.
    """
    return compressor_class(spec.partition(":")[0].strip())
