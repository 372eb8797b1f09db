"""What there is to say, in one sentence each, of compressors that don't go well with an optimizer or with each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvd_quant.compressors.base import Compressor

SETTINGS = ("momentum", "betas", "beta_1", "_momentum", "_beta1", "weight_decay")
"""What optimizers of PyTorch, of Keras, and of ``tf.compat.v1.train`` call their momentum; and their weight decay."""


def twice(optimizer: Any, groups: Iterable[Mapping[str, Any]], compressors: Iterable[Compressor]) -> list[str]:
    """What an optimizer does to gradients that compressors have done to them already.

    Arguments:
        optimizer: named by its class.
        groups: of its parameters, each with those of ``SETTINGS`` that it has.
    """
    groups, compressors, told = list(groups), list(compressors), []
    *momenta, decay = SETTINGS
    for one in [c for c in compressors if c.momentum][:1]:
        if any(_is_set(group.get(name)) for group in groups for name in momenta):
            told.append(f"{type(optimizer).__name__} has a momentum of its own, and compression={one.spec} adds another to the gradients: "
                        "use an optimizer without, such as SGD with momentum=0")
    for one in [c for c in compressors if c.weight_decay][:1]:
        if any(_is_set(group.get(decay)) for group in groups):
            told.append(f"{type(optimizer).__name__} has a weight decay of its own, and compression={one.spec} adds another to the "
                        "gradients: set one of them to 0")
    return told


def left_out(compressors: Mapping[str, Compressor]) -> list[str]:
    """That some parameters would train without the momentum of others.

    Arguments:
        compressors: by the names of parameters.
    """
    without = [name for name, one in compressors.items() if not one.momentum]
    momenta = [one.momentum for one in compressors.values() if one.momentum]
    if not without or not momenta:
        return []
    return [f"compression= corrects the momentum of some parameters, and {', '.join(without[:5])}{', ...' if without[5:] else ''} train "
            f"without any: give them one too, to those that go uncompressed 'none:momentum={momenta[0]}'"]


def _is_set(value: Any) -> bool:
    if isinstance(value, list | tuple):
        value = next(iter(value), None)
    try:
        return value is not None and float(value) != 0
    except (TypeError, ValueError):
        return True  # a function or a tensor, whose value changes
