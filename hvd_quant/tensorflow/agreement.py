"""Whether workers train the same thing: what they compare before their first exchange, and now and then their variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_quant.exchange import agreement
from hvd_quant.exchange.agreement import DIGEST_ENTRIES, DIGEST_FACTOR, Parameter
from hvd_quant.tensorflow import network
from hvd_quant.tensorflow.functions import unused_label


def parameter(name: str, variable: Any, spec: str, note: str = "") -> Parameter:
    """What is compared of a variable: of its name the last part, since Keras numbers layers as a process makes them."""
    dtype, shape = tf.as_dtype(variable.dtype).name, tf.TensorShape(variable.shape).as_list()
    return Parameter(name, dtype, shape, spec, note, alike=name.rpartition("/")[2])


def compare(parameters: Iterable[Parameter], settings: Mapping[str, Any], process_set: ProcessSet) -> None:
    """Check that the workers have the same, now, also where a graph is being made; all of them get here together. In an elastic job
    they don't: one that joins would wait for the others, which are training.

    Raises:
        ValueError: on all workers, if they differ.
    """
    if not network.ELASTIC and process_set.included() and process_set.size() > 1:
        agreement.require_agreement(agreement.describe(parameters, settings), lambda row: _gather(row, process_set), process_set.ranks)


_KINDS = (None, "a dense gradient", "a sparse gradient with rows in int32", "a sparse gradient with rows in int64")


def kind_of(gradient: Any) -> int:
    """What kind of gradient it is, as a number; 0 for None."""
    if not isinstance(gradient, tf.IndexedSlices):
        return int(gradient is not None)
    return 3 if gradient.indices.dtype == tf.int64 else 2


def zeros(kind: int, variable: Any) -> tf.Tensor | tf.IndexedSlices:
    """A gradient of a kind that is 0."""
    shape = variable.shape.as_list()
    if kind == 1:
        return tf.zeros(shape, variable.dtype)
    index = tf.int64 if kind == 3 else tf.int32
    return tf.IndexedSlices(tf.zeros([0, *shape[1:]], variable.dtype), tf.zeros([0], index), tf.constant(shape, index))


def kinds_anywhere(kinds: Mapping[int, int], names: Sequence[str], process_set: ProcessSet) -> dict[int, int]:
    """The kinds of the gradients that any worker has, by place; all workers get here together, but for elastic jobs.

    Arguments:
        kinds: of this worker's, by place.
        names: of all parameters.

    Raises:
        ValueError: on all workers, if a gradient is of another kind on one of them.
    """
    if network.ELASTIC:
        return dict(kinds)
    rows = _gather(bytes(kinds.get(place, 0) for place in range(len(names))), process_set)
    columns = [set(column) - {0} for column in zip(*rows)]
    for place, found in enumerate(columns):
        if len(found) > 1:
            told = {rank: row[place] for rank, row in zip(process_set.ranks, rows) if row[place]}
            raise ValueError(agreement.difference(
                [{f"parameter {place}": agreement.Trait(str(kind), f"{names[place]} with {_KINDS[kind]}")} for kind in told.values()],
                list(told)))
    return {place: found.pop() for place, found in enumerate(columns) if found}


def _gather(row: bytes, process_set: ProcessSet) -> list[bytes]:
    """All workers' rows, each of as many bytes."""
    def gathered() -> tf.Tensor:
        with tf.device("CPU:0"):
            own = tf.constant(np.frombuffer(row, np.uint8)[None])
            # Horovod negotiates anew what has another size than before.
            return mpi_ops.allgather(own, name=f"hvd_quant_agreement_{len(row)}", process_set=process_set)

    with tf.init_scope():
        eager = tf.executing_eagerly()
        rows = gathered().numpy() if eager else None
    if not eager:  # in a graph of TensorFlow 1
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            rows = session.run(gathered())
    return [one.tobytes() for one in rows]


class Verifier:
    """Compares the workers' variables every so many steps, in graphs and eagerly.

    Arguments:
        every: steps between two comparisons, or None for none.
        process_set: the workers that compare.
        label: starts the names of the collectives.
        what: is counted.

    Raises:
        ValueError: for ``every`` as :func:`hvd_quant.exchange.agreement.checked_every` does.
    """

    def __init__(self, every: int | None, process_set: ProcessSet, label: str, what: str = "steps") -> None:
        self.every = agreement.checked_every(every, network.ELASTIC)
        self._process_set, self._label, self._what = process_set, label, what
        if self.every is not None:
            with tf.init_scope(), tf.device("CPU:0"):  # (A tf.Variable would make tf.function trace twice.)
                self._steps, self._last = (ResourceVariable(np.int64(0), trainable=False, name=f"hvd_quant/{label}/{name}")
                                           for name in ("steps", "verified"))

    def count(self) -> tf.Tensor:
        """One more step is done, or begun."""
        return self._steps.assign_add(1)

    def verify(self, variables: Sequence[tf.Variable], names: Sequence[str], settled: Any = True) -> tf.Tensor:
        """Compare variables where it is time.

        Arguments:
            settled: whether they are to be the same on all workers now.

        Returns:
            Something that is there once they are found to be the same.

        Raises:
            tf.errors.UnknownError: when run, on all workers: a RuntimeError that names the first variable that differs.
        """
        steps, last = self._steps.read_value(), self._last.read_value()
        label = f"HorovodAllgather_{self._label}_verify_{len(names)}"
        label = label if tf.executing_eagerly() else unused_label(label)

        def check(rows: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
            agreement.require_same(rows.numpy().tolist(), self._process_set.ranks, names, f"after {int(steps)} {self._what}")
            return steps

        def compared() -> tf.Tensor:
            with tf.device("CPU:0"):
                own = tf.stack([digest(v) for v in variables])[None]
                rows = mpi_ops.allgather(own, name=label, ignore_name_scope=True, process_set=self._process_set)
                return tf.ensure_shape(tf.py_function(check, [rows, steps], tf.int64), [])

        now = tf.cond(tf.logical_and(steps - last >= self.every, settled), compared, lambda: last)
        with tf.control_dependencies([self._last.assign(now)]):
            return tf.identity(now)


def digest(variable: Any) -> tf.Tensor:
    """64 bits that tell a variable's bits, in the order of its entries, from others; see
    :func:`hvd_quant.exchange.agreement.digest_weights`."""
    kinds = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
    entries = variable.shape.num_elements()
    with tf.device(variable.device):
        bits = tf.bitcast(tf.reshape(variable, [-1]), kinds[variable.dtype.size])
        weights = tf.constant(agreement.digest_weights()[:entries])

        def add(first: Any, total: tf.Tensor) -> tuple[Any, tf.Tensor]:
            part = tf.cast(bits[first:first + DIGEST_ENTRIES], tf.int64)
            return first + DIGEST_ENTRIES, total * DIGEST_FACTOR + tf.reduce_sum(part * weights[:tf.size(part)])

        total = tf.zeros([], tf.int64)
        if entries <= DIGEST_ENTRIES:
            return add(0, total)[1]
        return tf.while_loop(lambda first, _: first < entries, add, (0, total), parallel_iterations=1)[1]


def settled(slots: Iterable[Any]) -> tf.Tensor:
    """Whether no variable may differ between workers, or none has moved since it was averaged last."""
    moved = [tf.not_equal(slot.averaged, slot.step) for slot in slots if slot.averaged is not None]
    return ~tf.reduce_any(tf.stack(moved)) if moved else tf.constant(True)
