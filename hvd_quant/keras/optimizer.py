"""DistributedOptimizer for every Keras optimizer, and load_model: arguments are checked here, and the Keras is
chosen."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import Average, ProcessSet, Sum, global_process_set

from hvd_quant.exchange import buckets
from hvd_quant.exchange.agreement import checked_every
from hvd_quant.keras.reducing import Settings, reducing
from hvd_quant.registry import get_compressor, resolve, selector
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.arguments import advice_on, checked_bucket_bytes, checked_groups, weights_of
from hvd_quant.tensorflow.state import State
from hvd_quant.tensorflow.variables import make_variables

_NONE = get_compressor("none")


def DistributedOptimizer(
        optimizer: Any,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = _NONE,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: int = Average,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        num_groups: int = 0,
        groups: int | list[list[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        bucket_bytes: int = buckets.BUCKET_BYTES,
        verify_every: int | None = None) -> Any:
    """An optimizer that reduces gradients over the workers, exchanged compressed, before it applies them as another
    does.

    The signature is that of ``horovod.tensorflow.keras.DistributedOptimizer``. The result is an instance of the
    optimizer's own class, with its state; configurations, models and weights that are saved with it load without it. In
    addition it has ``compression_stats()``, ``compression_state_dict()``, ``load_compression_state_dict()`` and
    ``register_local_var()``. A ``tf.train.Checkpoint`` that holds it holds its compression state too, which belongs to
    the worker.

    Loss scaling works with the LossScaleOptimizer inside or outside, where ``model.compile`` puts one under the policy
    mixed_float16: whether gradients are finite is asked once they are reduced, so an overflow on one worker voids the
    step on all.

    Arguments:
        optimizer: the other one: of Keras 3 or of tf_keras, or a LossScaleOptimizer around one.
        name: starts the names of the collectives.
        device_dense, device_sparse: devices for the exchange, as in Horovod; the first counts.
        compression: a compressor, a spec string such as ``"topk:ratio=0.01"``, a mapping from patterns of variable
            paths to these (first match wins, no match goes dense), or any class with Horovod's
            ``compress``/``decompress``.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense gradients; otherwise they are compressed row by row.
        gradient_predivide_factor: as in Horovod for dense gradients; a compressed mean is the same whatever the factor.
        op: Average or Sum.
        backward_passes_per_step: passes whose gradients are added up before each exchange. ``iterations`` counts
            passes. (With Keras's own ``gradient_accumulation_steps`` there is one exchange a window too, and Keras's
            meaning.)
        average_aggregated_gradients: take the mean over those passes, not the sum.
        num_groups, groups: variables that travel together, when the last of them has its gradient.
        process_set: the workers to reduce over.
        scale_local_gradients: divide the gradients of local variables by the number of workers.
        bucket_bytes: bytes of dense gradients that travel together; they start once all of them are there.
        verify_every: steps between two comparisons of the workers' variables. That of the last step is made when the next
            one is about to exchange gradients, so that a BroadcastGlobalVariablesCallback comes first; it raises an error
            on all workers if a variable differs. Where a ``merge`` lets them differ, it waits for the next averaging.

    Raises:
        TypeError: for something else than a Keras optimizer, or a compression that is none of the above.
        ValueError: for an optimizer that is distributed already, and for a combination that can't work.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op={op!r} is not supported for Keras optimizers; give Average or Sum")
    if not (isinstance(backward_passes_per_step, int) and backward_passes_per_step > 0):
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step!r}; give a number, 1 or more")
    groups = checked_groups(gradient_predivide_factor, op, num_groups, groups)
    if not isinstance(compression, State):
        compression = resolve(compression)
        if isinstance(compression, Mapping):
            selector(compression)  # raises for what can't be in one
    for sentence in advice_on(optimizer, compression):
        warnings.warn(sentence, stacklevel=2)
    return frontend(optimizer, "DistributedOptimizer").distribute(optimizer, Settings(
        name, device_dense, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step,
        average_aggregated_gradients, groups, process_set, scale_local_gradients, checked_bucket_bytes(bucket_bytes),
        checked_every(verify_every, network.ELASTIC)))


def PartialDistributedOptimizer(
        optimizer: Any,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = _NONE,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: int = Average,
        groups: int | list[list[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        local_layers: Any = None,
        scale_local_gradients: bool = True,
        bucket_bytes: int = buckets.BUCKET_BYTES,
        verify_every: int | None = None) -> Any:
    """A distributed optimizer that leaves the gradients of some layers as they are on each worker.

    Arguments:
        local_layers: a Keras layer, or several, whose trainable weights are local.
        others: as for :func:`DistributedOptimizer`.

    Raises:
        ValueError: if one of ``local_layers`` is no Keras layer, and as :func:`DistributedOptimizer`.
    """
    local = weights_of(local_layers)
    distributed = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients, bucket_bytes=bucket_bytes,
        verify_every=verify_every)
    for variable in local:
        distributed.register_local_var(variable)
    return distributed


def load_model(filepath: Any, custom_optimizers: Iterable[type] | None = None,
               custom_objects: Mapping[str, Any] | None = None, compression: Any = _NONE, legacy_opts: bool = False,
               **kwargs: Any) -> Any:
    """Load a saved model and distribute its optimizer, whose state is kept.

    Arguments:
        filepath: where the model is, with or without this plugin saved.
        custom_optimizers: optimizer classes that Keras doesn't know.
        custom_objects: names and what they stand for in the saved model; a function that takes an optimizer's
            configuration as keywords (``lambda **kwargs: ...``) may stand for its class, and may return a distributed
            optimizer.
        compression: as for :func:`DistributedOptimizer`.
        legacy_opts: of no effect, both kinds of tf_keras optimizers are found.
        kwargs: for ``keras.models.load_model``.

    Returns:
        The model, compiled as it was saved.
    """
    objects: dict[str, Any] = {cls.__name__: cls for cls in custom_optimizers or ()}
    for key, value in (custom_objects or {}).items():
        objects[key] = _Maker(value) if _makes_optimizers(value) else value
    model = tf.keras.models.load_model(filepath, custom_objects=objects, **kwargs)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if reducing(optimizer) is None:
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
        make_variables(model.optimizer, model.trainable_variables)
        if hasattr(model, "_compile_config"):
            model._compile_config.config["optimizer"] = model.optimizer
    if getattr(model, "jit_compile", False):
        model.jit_compile = False  # what jit_compile="auto" came out as where the model was saved, most of the time
    return model


def frontend(optimizer: Any, taker: str) -> Any:
    """The module that distributes optimizers of this kind.

    Raises:
        TypeError: in the name of ``taker``, for something else.
    """
    keras, tf_keras = (getattr(sys.modules.get(name), "optimizers", None) for name in ("keras", "tf_keras"))
    if keras and isinstance(optimizer, keras.Optimizer):
        return importlib.import_module("hvd_quant.keras.keras3")
    if tf_keras and isinstance(optimizer, (tf_keras.Optimizer, tf_keras.legacy.Optimizer)):
        return importlib.import_module("hvd_quant.keras.legacy")
    hint = ""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        hint = "; for one of tf.compat.v1.train use hvd_quant.tensorflow"
    raise TypeError(f"{taker} takes an optimizer object such as keras.optimizers.SGD(0.1), not {optimizer!r}{hint}")


class _Maker:
    """A function that makes an optimizer of keyword arguments, where Keras expects a class."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def from_config(self, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        if isinstance(config.get("learning_rate"), dict):
            config["learning_rate"] = tf.keras.optimizers.schedules.deserialize(config["learning_rate"], custom_objects)
        return self._function(**config)


def _makes_optimizers(value: Any) -> bool:
    """Whether it is a function of nothing but ``**kwargs``, unlike losses and metrics."""
    if not inspect.isfunction(value):
        return False
    return all(p.kind == p.VAR_KEYWORD for p in inspect.signature(value).parameters.values())
