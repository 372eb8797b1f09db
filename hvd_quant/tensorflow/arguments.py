"""Horovod's arguments, checked as Horovod does."""

from __future__ import annotations

import warnings
from typing import Any

from horovod.tensorflow.mpi_ops import Average, rocm_built


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
