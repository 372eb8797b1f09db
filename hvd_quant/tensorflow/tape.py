"""DistributedGradientTape: Horovod's, with compressors, for TensorFlow's and Keras's variables."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import Average, ProcessSet, global_process_set

from hvd_quant.exchange import buckets
from hvd_quant.exchange.agreement import checked_every
from hvd_quant.exchange.stats import Stats
from hvd_quant.registry import get_compressor
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.arguments import checked_bucket_bytes, checked_groups, warn_if_never_averaged, weights_of
from hvd_quant.tensorflow.reducer import Reducer, local_gradient
from hvd_quant.tensorflow.state import state_of
from hvd_quant.tensorflow.variables import plain


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = get_compressor("none"),  # noqa: B008 - it is frozen
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | list[list[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        bucket_bytes: int = buckets.BUCKET_BYTES,
        verify_every: int | None = None) -> tf.GradientTape:
    """Wrap a tape so that ``gradient()`` returns gradients reduced over the workers, exchanged compressed.

    The signature is that of ``horovod.tensorflow.DistributedGradientTape``. A tape lives for one step, so what is kept between
    steps belongs to the variables, once for each compressor. To save it, bind the compressor first::

        compression = hvd.Compression.topk(ratio=0.01).bind(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=model, compression=compression)  # a checkpoint a worker
        ...
        tape = hvd.DistributedGradientTape(tape, compression=compression)

    ``compression.stats()`` is then what the exchanges cost; otherwise ``tape.compression_stats()`` after ``gradient()``.

    With loss scaling, ``tape.set_loss_scale(optimizer.dynamic_scale)`` before ``gradient()`` keeps what is kept free of the scale.

    Arguments:
        gradtape: the tape, after or inside its ``with`` block.
        device_dense, device_sparse: devices for the exchange, as in Horovod.
        compression: a compressor, a spec string such as ``"topk:ratio=0.01"``, a mapping from patterns of variable paths to
            these (first match wins, no match goes dense), any class with Horovod's ``compress``/``decompress``, or what
            ``compressor.bind(variables)`` returned.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense gradients; otherwise they are compressed row by row.
        op: Average or Sum; Adasum for uncompressed and fp16 gradients.
        gradient_predivide_factor: as in Horovod for dense gradients; a compressed mean is the same whatever the factor.
        num_groups, groups: variables that travel together, when the last of them has its gradient.
        process_set: the workers to reduce over.
        scale_local_gradients: divide the gradients of local variables by the number of workers.
        bucket_bytes: bytes of dense gradients that travel together; they start once all of them are there.
        verify_every: steps between two comparisons of the workers' variables, each in ``gradient()``, which raises an error on all
            of them if a source differs.

    Raises:
        ValueError, TypeError: for a combination that can't work, as Horovod does and as :class:`Reducer` does.
    """
    groups = checked_groups(gradient_predivide_factor, op, num_groups, groups)
    base: Any = type(gradtape)
    cls: Any = _distributed(base)
    tape = cls.__new__(cls)
    vars(tape).update(vars(gradtape), _recording=False)  # the block, if still open, is that of the other
    tape._hvd_devices = (device_dense, device_sparse)
    tape._hvd_compression, tape._hvd_process_set = compression, process_set
    tape._hvd_settings = {"op": op, "predivide": gradient_predivide_factor, "groups": groups,
                          "sparse_as_dense": sparse_as_dense, "process_set": process_set,
                          "bucket_bytes": checked_bucket_bytes(bucket_bytes),
                          "verify_every": checked_every(verify_every, network.ELASTIC)}
    tape._hvd_scale_local, tape._hvd_local, tape._hvd_reducer = scale_local_gradients, set(), None
    tape._hvd_loss_scale = None
    return tape


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = get_compressor("none"),  # noqa: B008 - it is frozen
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | list[list[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        local_layers: Any = None,
        scale_local_gradients: bool = True,
        bucket_bytes: int = buckets.BUCKET_BYTES,
        verify_every: int | None = None) -> tf.GradientTape:
    """A distributed tape that leaves the gradients of some layers as they are on each worker.

    Arguments:
        local_layers: a Keras layer, or several, whose trainable weights are local.
        others: as for :func:`DistributedGradientTape`.

    Raises:
        ValueError: if one of ``local_layers`` is no Keras layer, and as :func:`DistributedGradientTape`.
    """
    tape = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
                                   gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients, bucket_bytes,
                                   verify_every)
    for variable in weights_of(local_layers):
        tape.register_local_source(variable)
    return tape


class _DistributedGradientTape:
    """What a distributed tape's class has beside that of the tape it wraps."""

    def register_local_source(self, source: Any) -> None:
        """Leave a variable's gradient as it is on this worker."""
        self._hvd_local.add(id(plain(source)))

    def set_loss_scale(self, scale: Any) -> None:
        """Say by what the target of the next ``gradient()`` was multiplied: a number or a scalar tensor or variable, the same on all
        workers. The gradients are returned with that scale, and what is kept between steps doesn't depend on it."""
        self._hvd_loss_scale = scale

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False,
                 **kwargs: Any) -> Any:
        """The reduced gradients of ``target``, structured as ``sources``; those of local sources as they are.

        Arguments:
            use_generic_names: collectives are named the same way with and without it.
            others: as for ``tf.GradientTape.gradient``.
        """
        gradients = super().gradient(target, sources, output_gradients, **kwargs)
        variables, grads = _flat(sources), _flat(gradients)
        shared = [i for i, v in enumerate(variables) if id(plain(v)) not in self._hvd_local]
        if shared:
            reducer = self._reducer([variables[i] for i in shared])
            with tf.device(self._hvd_devices[0]):
                reduced = reducer.reduce([grads[i] for i in shared], [variables[i] for i in shared], self._hvd_loss_scale)
            for i, grad in zip(shared, reduced):
                grads[i] = grad
        if self._hvd_scale_local:
            reduced_here = set(shared)
            grads = [grad if i in reduced_here else local_gradient(grad, self._hvd_process_set) for i, grad in enumerate(grads)]
        return tf.nest.pack_sequence_as(gradients, grads, expand_composites=False)

    @tf.autograph.experimental.do_not_convert
    def get_local_and_global_gradients(self, target: Any, sources: Any, output_gradients: Any = None,
                                       use_generic_names: bool = False) -> tuple[list, list]:
        """(source, gradient) pairs of the local sources, and of the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(_flat(sources), _flat(gradients)))
        return ([pair for pair in pairs if id(plain(pair[0])) in self._hvd_local],
                [pair for pair in pairs if id(plain(pair[0])) not in self._hvd_local])

    def compression_stats(self, residual_norms: bool = False) -> dict[str, Any]:
        """What the exchanges of the last ``gradient()``'s sources have cost so far on this worker; nothing before it.

        Arguments:
            residual_norms: add the 2-norm of what is kept of each variable's gradients, which takes a pass over it.
        """
        return Stats().as_dict() if self._hvd_reducer is None else self._hvd_reducer.stats(residual_norms)

    def _reducer(self, variables: list[Any]) -> Reducer:
        state = state_of(self._hvd_compression, variables, self._hvd_process_set)
        settings = self._hvd_settings
        groups = settings["groups"]
        key = str({**settings, "groups": [[id(plain(v)) for v in g] for g in groups] if isinstance(groups, list) else groups,
                   "process_set": settings["process_set"].process_set_id})
        if key not in state.reducers:
            if not state.reducers:
                warn_if_never_averaged(state)
            state.reducers[key] = Reducer(state, variables, **settings)
        self._hvd_reducer = state.reducers[key]
        return self._hvd_reducer


@functools.cache
def _distributed(base: Any) -> type:
    return type(base.__name__, (_DistributedGradientTape, base), {})


def _flat(structure: Any) -> list[Any]:
    return tf.nest.flatten(structure, expand_composites=False)
