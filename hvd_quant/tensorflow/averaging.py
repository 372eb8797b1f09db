"""Model averaging: workers take steps of their own and average their variables now and then, through an outer optimizer if
there is one (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import Average, ProcessSet, Sum, global_process_set
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_quant.exchange import averaging, buckets, sent_bytes
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.agreement import Verifier
from hvd_quant.tensorflow.functions import unused_label
from hvd_quant.tensorflow.reducer import Reducer
from hvd_quant.tensorflow.state import untracked
from hvd_quant.tensorflow.variables import make_variables, plain, variables_of

_HALF = (tf.float16, tf.bfloat16)
_UNKNOWN, _TAKEN, _COMPARED = range(3)


class Averager(tf.Module):
    """Counts the steps of an optimizer, and averages what it trains.

    A ``tf.train.Checkpoint`` of what tracks it holds θ₀, the outer optimizer and the counts; each worker has to save and
    restore its own.

    Arguments:
        reducer: of the gradients of ``variables``; it gets what is averaged in their place.
        variables: the optimizer's, θ.
        every: the local steps between two averagings, or a function from the steps taken so far to those until the next one.
        outer: an optimizer of Keras, without variables yet, or None.
        also: the variables that are averaged too, dense, when they are known.
        process_set: the workers to average over.
        verify_every: averagings between two comparisons of the workers' variables, or None for none.

    Attributes:
        anchors: θ₀, what the workers last had in common, in fp32 or fp64.
        known: whether the anchors have values, and whether the workers have found that they started with the same.
        steps, averaged, due: steps so far, those at the last averaging, and those at which the next one is.
    """

    def __init__(self, reducer: Reducer, variables: Iterable[Any], every: averaging.Every, outer: Any,
                 also: Callable[[], list[Any]], process_set: ProcessSet, verify_every: int | None = None) -> None:
        super().__init__()
        variables = [plain(v) for v in variables]
        with tf.init_scope():  # (A tf.Variable would make tf.function trace twice.)
            self.anchors = [ResourceVariable(tf.zeros(v.shape, _wide(v.dtype)), trainable=False, name="anchor")
                            for v in variables]
            self.known, self.steps, self.averaged, self.due = (
                ResourceVariable(np.int64(value), trainable=False) for value in (_UNKNOWN, 0, 0, averaging.interval(every, 0)))
            averagings = ResourceVariable(np.int64(0), trainable=False)
            if outer is not None:
                make_variables(outer, self.anchors)
        self.outer = outer
        untracked(self, _reducer=reducer, _variables=variables, _every=every, _also=also, _process_set=process_set,
                  _averagings=averagings, _also_sent=0.0,
                  _verifier=Verifier(verify_every, process_set, reducer.state.by_place[0].label, "averagings"))

    @tf.autograph.experimental.do_not_convert
    def begin(self) -> None:
        """Before the first step: note where the variables are."""
        def take() -> None:
            for anchor, variable in zip(self.anchors, self._variables):
                anchor.assign(tf.cast(variable, anchor.dtype))
            self.known.assign(_TAKEN)

        tf.cond(tf.equal(self.known, _UNKNOWN), take, lambda: None)

    def restart(self) -> None:
        """Take the variables as they are before the next step, the same on all workers, for those they have in common."""
        self.known.assign(_UNKNOWN)

    @tf.autograph.experimental.do_not_convert
    def count(self) -> None:
        """After a step: average where it is time."""
        self.steps.assign_add(1)
        tf.cond(self.steps >= self.due, self._average, lambda: None)

    @tf.autograph.experimental.do_not_convert
    def average(self) -> None:
        """Bring the workers' variables together, unless they are; the interval starts anew."""
        tf.cond(self.steps > self.averaged, self._average, self._stay)

    def _average(self) -> None:
        """Average.

        1. Δ = θ₀ − θ, on each worker. (What a half type rounds away of θ₀ is no step of a worker's.)
        2. The workers ask each other whether they are at the same step, average the same things, and have finite ones. If not,
           all of them raise, and nothing has changed.
        3. Mean Δ, through the compressor.
        4. The outer optimizer steps on θ₀ with mean Δ for a gradient. Without one, θ₀ ← θ₀ − mean Δ.
        5. θ ← θ₀. Statistics and the optimizer's state are averaged as they are.
        """
        alone = self._process_set.size() == 1
        if self._process_set.included() and not (alone and self.outer is None):
            pairs = list(zip(self.anchors, self._variables))
            deltas = [tf.cast(tf.cast(anchor, v.dtype), anchor.dtype) - tf.cast(v, anchor.dtype) for anchor, v in pairs]
            also = self._also()
            agreed = self._agreed(deltas, also)
            with tf.control_dependencies([agreed]):
                deltas = [tf.identity(delta) for delta in deltas]
            means = self._reducer.reduce(deltas, self._variables)
            if self.outer is None:
                for anchor, mean in zip(self.anchors, means):
                    anchor.assign_sub(mean)
            else:
                self.outer.apply_gradients(list(zip(means, self.anchors)))
            for anchor, variable in pairs:
                variable.assign(tf.cast(anchor, variable.dtype))
            with tf.control_dependencies([agreed]):  # where the workers don't agree, no collective may be under way
                averaged = average(also, self._process_set)
            untracked(self, _also_sent=sum(sent_bytes("dense", nbytes, self._process_set.size()) for _, nbytes in averaged))
            self._averagings.assign_add(1)
            if self._verifier.every is not None and not alone:
                self._verifier.count()
                self._verifier.verify(self._variables, [slot.info.name for slot in map(self._reducer.state.slot, self._variables)])
        self.averaged.assign(self.steps)
        self.due.assign(self.steps + self._interval())

    def _stay(self) -> None:
        """Tell the others that there is nothing to average here, which is an error where they have something."""
        if self._process_set.included() and self._process_set.size() > 1:
            self._told(averaging.Report(self.steps.read_value(), np.int64(averaging.layout([])), np.int64(0), np.int64(-1)))

    def _interval(self) -> Any:
        if not callable(self._every):
            return self._every
        steps = tf.py_function(lambda step: averaging.interval(self._every, int(step)), [self.steps], tf.int64)
        return tf.ensure_shape(steps, [])

    def _agreed(self, deltas: list[tf.Tensor], also: list[Any]) -> tf.Tensor:
        """Something that is there once the workers agree."""
        slots = [self._reducer.state.slot(v) for v in self._variables]
        described = [(*slot.info.shape, slot.compressor.spec) for slot in slots] + [tuple(v.shape) for v in also]
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(delta)) for delta in deltas])
        bad = tf.where(tf.reduce_all(finite), np.int64(-1), tf.argmin(tf.cast(finite, tf.int32)))
        start = tf.cond(tf.equal(self.known, _COMPARED), lambda: np.int64(0),
                        lambda: tf.add_n([_sum_of_bits(anchor) for anchor in self.anchors]))
        agreed = self._told(averaging.Report(self.steps.read_value(), np.int64(averaging.layout(described)), start, bad))
        self.known.assign(agreed)
        return agreed

    def _told(self, report: averaging.Report) -> tf.Tensor:
        """``_COMPARED``, once the workers have told each other their reports and agree."""
        slots = self._reducer.state.by_place
        reports = mpi_ops.allgather(tf.stack(list(report))[None], name=f"HorovodAllgather_{slots[0].label}_averaging",
                                    ignore_name_scope=True, process_set=self._process_set)
        ranks, names = self._process_set.ranks, [slot.info.name for slot in slots]

        def check(reports: tf.Tensor) -> int:
            averaging.require_agreement(reports.numpy().tolist(), ranks, names)
            return _COMPARED

        return tf.ensure_shape(tf.py_function(check, [reports], tf.int64), [])

    def stats(self) -> dict[str, Any]:
        """What averaging cost so far on this worker; see :class:`hvd_quant.exchange.stats.Stats`. ``steps`` are averagings, and
        ``local_steps`` those of the optimizer."""
        stats = self._reducer.stats()
        also = round(self._also_sent * int(self._averagings))
        sent = {key: stats[key] + also for key in ("dense_bytes", "wire_bytes")}
        ratio = sent["dense_bytes"] / sent["wire_bytes"] if sent["wire_bytes"] else None
        return {**stats, **sent, "compression_ratio": ratio, "local_steps": int(self.steps)}

    def state_dict(self) -> dict[str, Any]:
        """The reducer's state, θ₀, the outer optimizer's variables (as NumPy arrays) and the counts."""
        return {**self._reducer.state_dict(), "averaging": {
            **{key: int(getattr(self, key)) for key in ("known", "steps", "averaged", "due")},
            **{key: [v.numpy() for v in variables] for key, variables in self._arrays().items()}}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned.

        Raises:
            ValueError: if it is of another worker, other variables, another kind of optimizer, or damaged; then nothing is
                changed.
        """
        with averaging.reading():
            kept = state["averaging"]
            counts = {key: int(kept[key]) for key in ("known", "steps", "averaged", "due")}
            arrays = {key: [np.asarray(value) for value in kept[key]] for key in ("anchors", "outer")}
        own = self._arrays()
        for key, what in (("anchors", "variables"), ("outer", "variables of its outer optimizer")):
            found, expected = [value.shape for value in arrays[key]], [tuple(v.shape) for v in own[key]]
            if found != expected:
                raise ValueError(f"the compression state is of an optimizer with other {what}, of shapes {found}, where they "
                                 f"are {expected} here: load it into the optimizer of the same model")
        self._reducer.load_state_dict(state)
        for key, count in counts.items():
            getattr(self, key).assign(count)
        for key, variables in own.items():
            for variable, value in zip(variables, arrays[key]):
                variable.assign(value)

    def _arrays(self) -> dict[str, list[Any]]:
        return {"anchors": list(self.anchors), "outer": [] if self.outer is None else variables_of(self.outer)}


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in _HALF else dtype


def _sum_of_bits(variable: Any) -> tf.Tensor:
    """A number that differs between variables which aren't the same, most of the time."""
    return tf.reduce_sum(tf.cast(tf.bitcast(variable, tf.int32), tf.int64))


def statistics(model: Any) -> list[Any]:
    """The variables of a Keras model that change without being trained, such as the statistics of batch normalisation. (Those
    of frozen layers don't change.)"""
    frozen = {id(v) for layer in model._flatten_layers() if not layer.trainable for v in layer.variables}
    return [plain(v) for v in model.non_trainable_variables if id(v) not in frozen and tf.as_dtype(v.dtype).is_floating]


# ---------------------------------------------------------------------------------------------------- once, by themselves

@tf.autograph.experimental.do_not_convert
def average_parameters(what: Any, process_set: ProcessSet = global_process_set) -> tf.Operation | None:
    """Replace variables by their mean over the workers, uncompressed; all workers have to call it.

    Half types are averaged in fp32; what is not floating point stays as it is.

    Arguments:
        what: a Keras model, whose weights are averaged, statistics of batch normalisation among them; or a list of variables,
            TensorFlow's or Keras's, in the same order on all workers; or one.
        process_set: the workers to average over.

    Returns:
        In a graph, the operation that does it; eagerly it is done.

    Raises:
        TypeError: for something else.
    """
    given = getattr(what, "weights", what)
    variables = [plain(v) for v in given] if isinstance(given, list | tuple) else [plain(given)]
    if not all(isinstance(v, tf.Variable) for v in variables):
        raise TypeError(f"average_parameters takes a Keras model or a list of variables, not {what!r:.100}")
    done = [op for op, _ in average(variables, process_set)]
    return None if tf.executing_eagerly() else tf.group(*done)


def average(variables: list[Any], process_set: ProcessSet) -> list[tuple[Any, int]]:
    """Replace variables by their means, in a few collectives: of each, what is done when it is, and how many bytes it took."""
    if not network.ELASTIC and (not process_set.included() or process_set.size() == 1):
        return []
    done = []
    for dtype, places in _together(variables):
        parts = [variables[place] for place in places]
        vector = tf.concat([tf.reshape(tf.cast(v, dtype), [-1]) for v in parts], 0)
        label = f"HorovodAllreduce_average_{places[0]}_{vector.shape[0]}"
        # Horovod's own average divides by the number of all workers.
        how = {"op": Average} if network.ELASTIC else {"op": Sum, "postscale_factor": 1 / process_set.size()}
        total = mpi_ops._allreduce(vector, name=label if tf.executing_eagerly() else unused_label(label), ignore_name_scope=True,
                                   process_set=process_set, **how)
        means = tf.split(total, [v.shape.num_elements() for v in parts])
        assigned = [v.assign(tf.cast(tf.reshape(mean, v.shape), v.dtype)) for v, mean in zip(parts, means)]
        done.append((tf.group(*assigned), vector.shape[0] * dtype.size))
    return done


def _together(variables: list[Any]) -> list[tuple[tf.DType, list[int]]]:
    """Those that travel in one vector, by their places, and as what."""
    kinds: dict[tf.DType, dict[int, int]] = {}
    for place, v in enumerate(variables):
        if v.dtype.is_floating:
            dtype = _wide(v.dtype)
            kinds.setdefault(dtype, {})[place] = v.shape.num_elements() * dtype.size
    return [(dtype, places) for dtype, sizes in kinds.items() for places in buckets.fill(sizes)]
