"""Horovod's arguments, checked as Horovod does."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from horovod.tensorflow.mpi_ops import Average, rocm_built

from hvd_quant.compressors import Compressor, advice
from hvd_quant.registry import get_compressor
from hvd_quant.tensorflow.state import State


def checked_groups(predivide: float, op: int, num_groups: int, groups: int | list[list[Any]] | None) -> Any:
    """``groups`` as Horovod understands its older and newer arguments.

    Raises:
        ValueError: for what Horovod refuses.
    """
    if predivide != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is not None and not isinstance(groups, list) and not groups > 0:
        raise ValueError(f"groups is {groups!r}; give a positive number of groups or a list of lists of variables")
    return groups


def checked_bucket_bytes(bucket_bytes: Any) -> int:
    """Dense bytes of a bucket.

    Raises:
        ValueError: unless it is a positive whole number.
    """
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; give a positive whole number of bytes, such as 25 * 2**20")
    return bucket_bytes


def advice_on(optimizer: Any, compression: Any) -> list[str]:
    """What an optimizer would do once more that compressors do; see :func:`hvd_quant.compressors.advice.twice`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if isinstance(compression, State):
        chosen = [slot.compressor for slot in compression.by_place]
    else:
        chosen = compression.values() if isinstance(compression, Mapping) else [compression]
        chosen = [get_compressor(one) for one in chosen if isinstance(one, str | Compressor)]
    return advice.twice(optimizer, [{name: getattr(optimizer, name, None) for name in advice.SETTINGS}], chosen)


def warn_if_never_averaged(state: State) -> None:
    """Warn of variables that are to be averaged, where nothing here comes after they have changed."""
    for one in [slot.compressor for slot in state.by_place if slot.compressor.averaging][:1]:
        warnings.warn(f"compression={one.spec} lets the workers' variables differ until they are averaged, which a tape or an optimizer "
                      f"of tf.compat.v1.train doesn't do: call hvd.average_parameters(variables) every {one.averaging} steps",
                      stacklevel=5)


def weights_of(layers: Any) -> list[Any]:
    """The trainable weights of a Keras layer or of several.

    Raises:
        ValueError: if one of them is no Keras layer.
    """
    layers = [] if layers is None else list(layers) if isinstance(layers, list | tuple | set) else [layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers must be Keras layers; it holds {layer!r}")
    return [variable for layer in layers for variable in layer.trainable_weights]
