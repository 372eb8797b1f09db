"""Names to compressors: registration, spec strings, patterns over parameter names, entry points."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import importlib.metadata
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from hvd_quant.compressors.base import Compressor

ENTRY_POINTS = "hvd_quant.compressors"

_registry: dict[str, type[Compressor]] = {}
_Class = TypeVar("_Class", bound=type[Compressor])


def register(cls: _Class) -> _Class:
    """Class decorator: make a compressor known by its ``name``.

    Packages can register theirs without being imported, through an entry point in the group ``hvd_quant.compressors``.

    Raises:
        TypeError: if ``cls`` is not a frozen dataclass derived from :class:`hvd_quant.Compressor`.
        ValueError: if its name is missing, malformed or taken by another class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Compressor)):
        raise TypeError(f"register takes a subclass of hvd_quant.Compressor, not {cls!r}")
    if not (dataclasses.is_dataclass(cls) and "__dataclass_params__" in vars(cls) and vars(cls)["__dataclass_params__"].frozen):
        raise TypeError(f"{cls.__name__} is not a frozen dataclass: put @dataclass(frozen=True, kw_only=True) between "
                        "@register and the class")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"{cls.__name__}.name is {name!r}; give a name of lower-case letters, digits and underscores")
    known = _registry.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"the name {name!r} is taken by {known.__module__}.{known.__qualname__}; give "
                         f"{cls.__name__} another one")
    _registry[name] = cls
    return cls


def list_compressors() -> list[str]:
    """The names of all registered compressors, those of installed packages included, sorted."""
    _load_entry_points()
    return sorted(_registry)


def compressor_class(name: str) -> type[Compressor]:
    """The class registered under ``name``.

    Raises:
        ValueError: naming the closest known name.
    """
    if name not in _registry:
        _load_entry_points()
    if name not in _registry:
        raise ValueError(f"there is no compressor {name!r}{_closest(name, _registry)}")
    return _registry[name]


def get_compressor(spec: str | Compressor | type[Compressor]) -> Compressor:
    """The compressor that a spec string describes: ``name`` or ``name:knob=value,knob=value``.

    Example: ``get_compressor("topk:ratio=0.01,values=float16")``. A compressor is returned as it is, and its ``spec`` is
    the string that gives it back. ``auto:`` before a spec string stands for ``only_if_faster=true``, ``auto`` alone for
    ``topk:only_if_faster=true``.

    Raises:
        ValueError: for an unknown name or knob, or a value that is not accepted, saying which are.
        TypeError: for anything but a string or a compressor.
    """
    if isinstance(spec, Compressor):
        return spec
    if isinstance(spec, type) and issubclass(spec, Compressor):
        spec = spec.name  # Horovod's own compressors are passed as classes, so people leave the parentheses out
    if not isinstance(spec, str):
        raise TypeError(f"a compressor or a spec string such as 'topk:ratio=0.01' is expected, not {spec!r}")
    if spec.partition(":")[0].strip() == "auto":
        return dataclasses.replace(get_compressor(spec.partition(":")[2] or "topk"), only_if_faster=True)
    name, _, knobs = spec.partition(":")
    cls = compressor_class(name.strip())
    types = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in knobs.split(","))):
        knob, equals, text = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"{spec!r}: {item!r} is not of the form knob=value")
        if knob not in fields:
            raise ValueError(f"{cls.name} has no knob {knob!r}{_closest(knob, fields)}")
        if knob in given:
            raise ValueError(f"{spec!r} gives {knob} twice")
        given[knob] = _parse(cls.name, knob, text, types[knob])
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in given]
    if missing:
        raise ValueError(f"{cls.name} needs {missing[0]}: write {cls.name}:{missing[0]}=VALUE")
    return cls(**given)


def selector(compression: str | Compressor | Mapping[str, str | Compressor]) -> Callable[[str], Compressor]:
    """A function from a parameter's name to its compressor.

    Arguments:
        compression: one compressor or spec string for all, or a mapping from patterns (``*``, ``?``, ``[...]`` as in a
            shell) to compressors, of which the first that matches a name counts; without a match a parameter goes
            uncompressed.

    Raises:
        ValueError, TypeError: as :func:`get_compressor`.
    """
    if not isinstance(compression, Mapping):
        one = get_compressor(compression)
        return lambda name: one
    for pattern in compression:
        if not isinstance(pattern, str):
            raise TypeError(f"compression maps patterns of parameter names to compressors; {pattern!r} is not a string")
    rules = [(pattern, get_compressor(spec)) for pattern, spec in compression.items()]
    dense = get_compressor("none")
    return lambda name: next((c for pattern, c in rules if fnmatch.fnmatchcase(name, pattern)), dense)


def resolve(compression: Any) -> Compressor | Mapping[str, Any] | Any:
    """What a frontend's ``compression=`` means: a compressor, a mapping from patterns, or an object in Horovod's style.

    Raises:
        ValueError: as :func:`get_compressor`.
        TypeError: for anything else.
    """
    if isinstance(compression, str) or isinstance(compression, type) and issubclass(compression, Compressor):
        return get_compressor(compression)
    if isinstance(compression, Compressor | Mapping):
        return compression
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        return compression
    raise TypeError(f"compression={compression!r} is not accepted: give a compressor such as Compression.topk(ratio=0.01), a "
                    "spec string such as 'topk:ratio=0.01', a mapping from patterns of parameter names to these, or an "
                    "object with compress and decompress")


def unmatched(compression: Any, names: Iterable[str]) -> list[str]:
    """The patterns of a mapping that match none of ``names``: misspelt ones, most of the time."""
    names = list(names)
    patterns = compression if isinstance(compression, Mapping) else ()
    return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]


class Compression:
    """The compressors by name: ``Compression.topk(ratio=0.01)``; ``none``, ``fp16`` and ``bf16`` are ready-made ones, and
    ``auto`` compresses only where that is faster."""

    _ready = ("none", "fp16", "bf16")

    @property
    def auto(self) -> Compressor:
        return get_compressor("auto")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            cls = compressor_class(name)
        except ValueError as error:
            raise AttributeError(str(error)) from None
        return cls() if name in self._ready else cls

    def __dir__(self) -> list[str]:
        return list_compressors()


def _parse(name: str, knob: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"{name}: {knob}={text} is not accepted; give true or false")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name}: {knob}={text} is not {what}") from None
    return text


def _closest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(sorted(known))}"


_entry_points_loaded = False


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            register(point.load())
        except Exception as error:
            raise ValueError(f"the compressor {point.name!r} of entry point {point.value!r} can't be registered: {error}"
                             ) from error
