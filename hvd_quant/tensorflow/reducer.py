"""Which gradients travel together, in which order, and by which exchange."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from horovod.common.util import split_list
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import Adasum, Average, ProcessSet, Sum, global_process_set
from tensorflow.python.ops import control_flow_util

from hvd_quant.compressors import Compressor
from hvd_quant.exchange import MPI_COUNT_LIMIT, buckets, gathered_bytes, rows
from hvd_quant.exchange.agreement import COLLECTIVES, OPS
from hvd_quant.exchange.buckets import by
from hvd_quant.registry import get_compressor
from hvd_quant.tensorflow import agreement, network
from hvd_quant.tensorflow.agreement import Verifier, settled
from hvd_quant.tensorflow.codes import Hosted, Traced
from hvd_quant.tensorflow.exchanges import Cargo, Flight, Gradient, Landed, Route, end, label_of, rest, unless
from hvd_quant.tensorflow.state import COSTS, REAL, Slot, State, Way, untracked

_NONE, _FP16 = get_compressor("none"), get_compressor("fp16")


class Reducer(tf.Module):
    """Reduces the gradients of variables over the workers.

    A ``tf.train.Checkpoint`` of what tracks it holds the compression state; each worker has to save and restore its own.

    Arguments:
        compression: a compressor, a spec string such as ``"topk:ratio=0.01"``, a mapping from patterns of variable paths to
            these (first match wins, no match goes dense), any class with Horovod's ``compress``/``decompress``, or a
            :class:`State`, whose state is then used.
        variables: TensorFlow's or Keras's, in the same order on all workers.
        name: starts the names of the collectives; a :class:`State` has its own.
        op: Average or Sum; Adasum for uncompressed and fp16 gradients.
        predivide: Horovod's gradient_predivide_factor, for dense gradients; a compressed mean is the same whatever it is.
        groups: lists of variables, or a number of groups, that travel together.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense gradients; otherwise they are compressed row by row.
        process_set: the workers to reduce over.
        bucket_bytes: dense bytes of gradients that travel together.
        synced: whether workers that join an elastic job get the others' step counts.
        verify_every: steps between two comparisons of the workers' variables, before gradients are reduced, or None for none.
        agree_on: what else has to be the same on all workers, by name.

    Raises:
        TypeError, ValueError: for a compression, variable or combination that can't work, saying why.
    """

    def __init__(self, compression: Any, variables: Iterable[Any], *, name: str = "Distributed", op: int = Average,
                 predivide: float = 1.0, groups: int | list[list[Any]] | None = None, sparse_as_dense: bool = False,
                 process_set: ProcessSet = global_process_set, bucket_bytes: int = buckets.BUCKET_BYTES,
                 synced: bool = False, verify_every: int | None = None, agree_on: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        given = isinstance(compression, State)
        self.state = compression if given else State(compression, variables, process_set, name, synced=synced)
        for slot in self.state.slots.values():
            if op not in (Average, Sum) and slot.compressor not in ((_NONE, _FP16) if op == Adasum else (_NONE,)):
                raise ValueError(f"op={op!r} can't be combined with compression={slot.compressor.spec}: it needs the "
                                 "gradients themselves; use 'none', or op=Average")
        self._op, self._predivide, self._sparse_as_dense = op, predivide, sparse_as_dense
        self._process_set, self._bucket_bytes = process_set, bucket_bytes
        if groups is not None and not isinstance(groups, int):
            groups = [[self.state.place(v) for v in group] for group in groups]
        in_graph = tf.function(self._exchange_all, autograph=False, reduce_retracing=True)
        # In a function, since models that are saved would take a tf.function that they find along.
        untracked(self, _groups=groups, _warned=set(), _in_graph=lambda: in_graph, _agreed=False, _agree_on=dict(agree_on or {}),
                  _asked=set(), _kinds={},  # places of which workers know whether any has a gradient, and what kind if one has
                  _verifier=Verifier(verify_every, process_set, self.state.by_place[0].label if self.state.by_place else name))

    def stats(self, residual_norms: bool = False) -> dict[str, Any]:
        """See :meth:`State.stats`."""
        return self.state.stats(residual_norms)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`State.state_dict`."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`State.load_state_dict`."""
        self.state.load_state_dict(state, self._op == Average)

    @tf.autograph.experimental.do_not_convert
    def reduce(self, grads: Iterable[Gradient | None], variables: Iterable[Any], scale: Any = None) -> list[Gradient | None]:
        """The reduced gradients, eagerly or in the graph that is being traced; where no worker has one, None stays None.

        A step in which a value is not finite on some worker is void on all, where something is kept between steps: that is as
        before, and all gradients are NaN.

        Arguments:
            grads: of real floating point, each of its variable's shape; ``tf.IndexedSlices`` too.
            variables: whose they are.
            scale: of the loss that they are of, as are those that are returned; what is kept doesn't depend on it.

        Raises:
            TypeError: for gradients of whole numbers and the like.
            ValueError: for a variable without state here, and where XLA would compile the collectives.
            tf.errors.DataLossError: when run, on every worker, for a payload that is damaged, foreign, or says that its
                worker failed.
        """
        grads, variables = list(grads), list(variables)
        alone = not network.ELASTIC and self._process_set.size() == 1
        if not network.ELASTIC and not self._process_set.included() or alone and not self.state.has_momentum:
            return grads
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError("gradients can't be exchanged inside a function that XLA compiles, since XLA can't contain "
                             "Horovod's collectives: pass jit_compile=False (or 'auto' to model.compile)")
        grads = self.filled(grads, variables)
        # By place: a variable may be among the variables twice.
        given = {self.state.place(variable): grad for grad, variable in zip(grads, variables) if grad is not None}
        if alone:  # momentum is a part of training with one worker too
            given = {place: grad for place, grad in given.items() if self.state.by_place[place].compressor.has_momentum}
        if self._verifier.every is not None and not alone:
            given = self._verified(given, variables)
        exchange_all = self._in_graph() if tf.executing_eagerly() else self._exchange_all
        scale = None if scale is None else tf.cast(scale, tf.float32)
        # A graph takes one stage for all that travel together, so variables that were unfrozen late travel apart.
        begun = [self.state.by_place[place].begun for place in given]
        alike = tuple(map(begun.index, begun))
        reduced = dict(zip(given, exchange_all(list(given.values()), tuple(given), alike, scale)))
        return [None if grad is None else reduced.get(self.state.place(v), grad) for grad, v in zip(grads, variables)]

    @tf.autograph.experimental.do_not_convert
    def filled(self, grads: Iterable[Gradient | None], variables: Iterable[Any]) -> list[Gradient | None]:
        """The gradients, as tensors where they are exchanged whole, and zeros in the place of those that are None on this worker and
        not on all of them.

        Workers ask each other which gradients any of them has when they first meet these variables. What none has had since is
        asked for again at each eager step, and in a graph when it has a gradient while that is made, on all workers together then.

        Raises:
            TypeError: for gradients of whole numbers and the like.
            ValueError: for a variable without state here; on all workers, if they are about to do different things.
        """
        grads, state = list(grads), self.state
        places = [state.place(variable) for variable in variables]
        for i, (grad, place) in enumerate(zip(grads, places)):
            if grad is not None:
                slot = state.by_place[place]
                if grad.dtype not in REAL:
                    raise TypeError(f"the gradient of {slot.info.name} is {grad.dtype.name}; those of {', '.join(d.name for d in REAL)} "
                                    "can be exchanged: cast it")
                if self._sparse_as_dense or rows.goes_whole(slot.compressor):
                    grads[i] = tf.convert_to_tensor(grad)
        if not network.ELASTIC and (self._process_set.size() == 1 or not self._process_set.included()):
            return grads
        self._agree()
        kinds = {place: agreement.kind_of(grad) for grad, place in zip(grads, places) if grad is not None}
        # (Workers may make graphs apart, such as one whose batch has another shape.)
        open_ones = places if tf.executing_eagerly() else kinds
        if not self._asked.issuperset(places) or not self._kinds.keys() >= set(open_ones):
            self._kinds.update(agreement.kinds_anywhere(kinds, list(state.slots), self._process_set))
            self._asked.update(places)
        return [agreement.zeros(self._kinds[place], state.by_place[place].variable) if grad is None and place in self._kinds else grad
                for grad, place in zip(grads, places)]

    def _agree(self) -> None:
        """Before the first exchange, check that the workers are about to do the same.

        Raises:
            ValueError: on all workers, if they are not.
        """
        if self._agreed:
            return
        state, style, parameters = self.state, self.state.horovod_style, []
        spec_of = functools.cache(lambda compressor: compressor.spec)
        for slot in state.by_place:
            spec = spec_of(slot.compressor) if style is None else getattr(style, "__qualname__", type(style).__qualname__)
            parameters.append(agreement.parameter(slot.info.name, slot.variable, spec))
        agreement.compare(parameters, {
            "op": dict(enumerate(OPS)).get(self._op, self._op), "gradient_predivide_factor": self._predivide, "groups": self._groups,
            "sparse_as_dense": self._sparse_as_dense, "bucket_bytes": self._bucket_bytes, "verify_every": self._verifier.every,
            **self._agree_on, **{f"{COLLECTIVES} of parameter {place}": slot.label for place, slot in enumerate(state.by_place)},
        }, self._process_set)
        untracked(self, _agreed=True)

    def _verified(self, given: dict[int, Gradient], variables: list[Any]) -> dict[int, Gradient]:
        """The gradients, once the variables are found to be the same on all workers where it is time to ask."""
        slots = list({self.state.place(v): self.state.slot(v) for v in variables}.values())
        same = self._verifier.verify([slot.variable for slot in slots], [slot.info.name for slot in slots], settled(slots))
        with tf.control_dependencies([same]):
            counted = self._verifier.count()
        with tf.control_dependencies([counted]):
            return {place: tf.nest.map_structure(tf.identity, grad, expand_composites=True) for place, grad in given.items()}

    def _exchange_all(self, grads: list[Gradient], places: tuple[int, ...], alike: tuple[int, ...], scale: tf.Tensor | None = None
                      ) -> list[Gradient]:
        for place, number in zip(places, alike):
            untracked(self.state.by_place[place], in_step=number)
        given = {self.state.by_place[place]: grad for place, grad in zip(places, grads)}
        buckets = [[self.state.by_place[place] for place in bucket] for bucket in self._buckets(dict(zip(places, grads)))]
        for bucket in buckets:
            self._decide(bucket, given)
        exchange = functools.partial(self._exchange_buckets, buckets, given, scale)
        ways = {slot: self._way(slot)[0] for slot in given}
        staged = [slot.step >= ways[slot][-1].first for slot in given if len(ways[slot]) > 1]
        if not staged or network.ELASTIC:
            return exchange(last=False)
        # Once all are at the last stage, exchanges are in no branches of their own any more, and nothing has to be copied.
        return tf.cond(tf.reduce_all(tf.stack(staged)), lambda: exchange(last=True), lambda: exchange(last=False))

    def _exchange_buckets(self, buckets: list[list[Slot]], given: dict[Slot, Gradient], scale: tf.Tensor | None, last: bool
                          ) -> list[Gradient]:
        """The reduced gradients, in the order of ``given``.

        Arguments:
            last: whether all travel as they do after the last stage of their compressors.
        """
        reduced, void = _finished([route for bucket in buckets for route in self._routes(bucket, given, scale, last)])
        grads = [reduced[slot] for slot in given]
        if void is None or not any(slot.travels.across_tensors for slot in reduced):
            return grads
        with tf.control_dependencies([grad for grad in grads if not isinstance(grad, tf.IndexedSlices)]):
            decided = tf.cond(void, lambda: tf.constant(False), lambda: self._decided(reduced))
        with tf.control_dependencies([decided]):
            return tf.nest.map_structure(tf.identity, grads, expand_composites=True)

    def _decided(self, reduced: dict[Slot, Gradient]) -> tf.Tensor:
        """What the next step's compressors decide for several tensors together, once these are reduced, and then True."""
        slots = [slot for slot in reduced if slot.travels.across_tensors and slot.worker_state and not slot.sparse]
        decided = []
        for (compressor, _), alike in by(slots, lambda slot: (slot.compressor, slot.in_step)).items():
            with tf.control_dependencies([reduced[slot] for slot in alike]):
                at = {"step": alike[0].step.read_value(), "rank": alike[0].workers.rank, "world": alike[0].workers.world}
                told = [(slot.info.part(*slot.pieces[slot.workers.local[0]]).at(**at), slot.worker_state) for slot in alike]
                firsts, stages = zip(*compressor.stages())
                decided.append(_at_stage(at["step"], firsts, [functools.partial(_between_steps, stage, told) for stage in stages]))
        with tf.control_dependencies(decided):
            return tf.constant(True)

    def _buckets(self, given: dict[int, Gradient]) -> list[list[int]]:
        """Which gradients travel together, by their places; those that are expected to be complete first come first."""
        # Backward makes the last layers' gradients first, and stateful operations run in program order.
        order = {place: at for at, place in enumerate(reversed(given))}
        alone = [[place] for place in order if isinstance(given[place], tf.IndexedSlices)]
        groups = split_list(list(given), self._groups) if isinstance(self._groups, int) else self._groups or []
        planned = [*alone, *([place for place in order if place in group and [place] not in alone] for group in groups)]
        taken = {place for bucket in planned for place in bucket}
        sizes = {place: 4 * self.state.by_place[place].info.numel for place in order if place not in taken}
        planned += buckets.fill(sizes, self._bucket_bytes)
        return sorted(filter(None, planned), key=lambda bucket: order[bucket[-1]])

    def exchange(self, slot: Slot, grad: Gradient) -> Gradient:
        """One gradient's exchange in the graph that is being made, by itself."""
        self._agree()
        self._decide([slot], {slot: grad})
        return _finished(self._routes([slot], {slot: grad}, None, last=False))[0][slot]

    def _decide(self, slots: list[Slot], given: dict[Slot, Gradient]) -> None:
        """Decide how those of a bucket travel."""
        for slot in slots:
            untracked(slot, sparse=isinstance(given[slot], tf.IndexedSlices))
        if self._op in (Average, Sum):
            for group in by(slots, lambda slot: slot.compressor).values():
                self.state.decide(group)

    def _routes(self, slots: list[Slot], given: dict[Slot, Gradient], scale: tf.Tensor | None, last: bool
                ) -> list[tuple[list[Slot], Step]]:
        """The exchanges of a bucket: gradients with the same compressor and exchange travel together."""
        return [(members, self._exchange(ways[-1:] if last else ways, members, [given[slot] for slot in members], scale))
                for (ways, _, _), together in by(slots, self._way).items() for members in self._parted(ways, together)]

    def _way(self, slot: Slot) -> tuple[tuple[Way, ...], Any, Any]:
        """How it travels, and what else those have in common that travel with it."""
        if slot.sparse:
            return slot.ways, slot, None
        dense = (Way(0, "dense", None),)
        if self._op == Adasum:
            return dense, slot.compressor, slot.workers  # which makes fp16 of it, or doesn't
        ways = slot.ways if self._op in (Average, Sum) else dense
        return ways, slot.in_step if len(ways) > 1 else None, slot.workers

    def _parted(self, ways: tuple[Way, ...], slots: list[Slot]) -> list[list[Slot]]:
        """Those that fit into one collective, which over MPI counts bytes in 32 bits."""
        gathered = [way for way in ways if way.kind in ("allgather", "sra")]
        if not mpi_ops.mpi_enabled() or not gathered:
            return [slots]
        sizes = {slot: max(gathered_bytes(way.kind, way.compressor.payload_bytes(slot.typical), slot.workers.world)
                           for way in gathered) for slot in slots}
        return buckets.fill(sizes, MPI_COUNT_LIMIT - 1)

    def _exchange(self, ways: tuple[Way, ...], slots: list[Slot], grads: list[Gradient], scale: tf.Tensor | None) -> Step:
        """The exchange of gradients that travel together, chosen now or, for stages and elastic jobs, when it runs.

        The exchanges of a slot follow each other, whatever graphs they are in, since each begins with reading its step and ends
        with counting it.
        """
        workers, label = slots[0].workers, label_of(slots)
        at = {"rank": workers.rank, "world": workers.world}
        if network.ELASTIC:
            at = {"rank": mpi_ops.rank_op(), "world": mpi_ops.size_op(self._process_set.process_set_id)}
        infos = [dataclasses.replace(slot.info, step=slot.step.read_value(), **at) for slot in slots]
        if slots[0].sparse:
            self._require_sums(slots[0])
        style = self.state.horovod_style or (slots[0].compressor if self._op == Adasum else None)

        def go(way: Way) -> Route:
            cargo = [Cargo(slot, info, grad, slot.left_by(ways[-1]), scale) for slot, info, grad in zip(slots, infos, grads)]
            flight = Flight(label, way.compressor, cargo, workers, self._op, self._predivide, style)
            return self._by_row(flight, way.kind) if slots[0].sparse else getattr(flight, way.kind)()

        if len(ways) == 1 and not network.ELASTIC:
            route = go(ways[0])
            void = yield next(route)
            landed = yield from rest(route, void)
        else:
            landed, void = yield from self._chosen_when_it_runs(ways, slots, grads, infos, go)
        added = self.state.account(slots, label).costs.assign_add(landed.costs)
        return [self._counted(slot, grad, void, [added] if i == 0 else [])
                for i, (slot, grad) in enumerate(zip(slots, landed.gradients))]

    def _chosen_when_it_runs(self, ways: tuple[Way, ...], slots: list[Slot], grads: list[Gradient], infos: list[Any],
                             go: Callable[[Way], Route]) -> Generator[Callable[[], tf.Tensor], tf.Tensor | None, Any]:
        """An exchange in a branch, which can't stop amid it: what is kept is copied before, and put back if the step is void."""
        before = [(variable, tf.identity(variable)) for slot in slots for variable in slot.state.values()]

        def alone(way: Way) -> tuple[Landed, tf.Tensor]:
            """The exchange, and whether a value was not finite: then it is void by itself."""
            route = go(way)
            ask = next(route)
            flagged = ask() if before else None
            return end([route], flagged)[0], tf.constant(False) if flagged is None else flagged

        def exchanged() -> tuple[Landed, tf.Tensor]:
            least = tf.reduce_min(tf.stack([info.step for info in infos]))
            return _at_stage(least, [way.first for way in ways], [functools.partial(alone, way) for way in ways])

        with tf.control_dependencies([value for _, value in before]):
            if network.ELASTIC:
                stay = Landed(grads, tf.zeros(len(COSTS), tf.float64)), tf.constant(False)
                momentum = any(slot.compressor.momentum for slot in slots)
                by_itself = functools.partial(alone, Way(0, "dense", None)) if momentum else lambda: stay
                included = mpi_ops.process_set_included_op(self._process_set.process_set_id)
                landed, flagged = tf.cond(included == 1, lambda: tf.cond(infos[0].world > 1, exchanged, by_itself), lambda: stay)
            else:
                landed, flagged = exchanged()
        void = yield lambda: flagged
        if void is None:
            return landed, void

        def put_back() -> tf.Tensor:
            with tf.control_dependencies([variable.assign(value) for variable, value in before]):
                return tf.constant(True)

        with tf.control_dependencies([landed.costs]):  # which are known in the end
            done = tf.cond(void, put_back, lambda: tf.constant(False))
        with tf.control_dependencies([done]):
            return Landed(unless(void, landed.gradients), landed.costs), void

    def _counted(self, slot: Slot, grad: Gradient, void: tf.Tensor | None, also: list[Any]) -> Gradient:
        """The reduced gradient, once its exchange is counted, unless it is void."""
        with tf.control_dependencies([grad.values if isinstance(grad, tf.IndexedSlices) else grad]):
            counted = slot.step.assign_add(1 if void is None else tf.cast(~void, tf.int64))
        with tf.control_dependencies([counted, *also]):
            return tf.nest.map_structure(tf.identity, grad, expand_composites=True)

    def _by_row(self, flight: Flight, kind: str) -> Route:
        """The exchange of a sparse gradient, compressed where that can be done."""
        slot = flight.cargo[0].slot
        if kind == "dense":
            return flight.sparse()
        if rows.goes_by_row(flight.compressor, slot.info):
            return flight.rows(kind)
        if slot.info.name not in self._warned:
            self._warned.add(slot.info.name)
            warnings.warn(rows.uncompressed_warning(flight.compressor, slot.info.name), stacklevel=2)
        return flight.sparse()

    def _require_sums(self, slot: Slot) -> None:
        if self._op not in (Average, Sum):
            raise ValueError(f"the gradient of {slot.info.name} is sparse, which op={self._op!r} can't reduce: pass "
                             "sparse_as_dense=True")


def _at_stage(step: tf.Tensor, firsts: Sequence[int], branches: list[Callable[[], Any]]) -> Any:
    """What that branch returns whose first step came last."""
    if len(branches) == 1:
        return branches[0]()
    return tf.switch_case(tf.math.count_nonzero(step >= firsts[1:], dtype=tf.int32), branches)


def _between_steps(stage: Compressor | None, told: list[Any]) -> tf.Tensor:
    """Something that is there once a stage has decided for several tensors together; dense ones have nothing to decide."""
    done = None if stage is None else (Traced if stage.native else Hosted)(stage).between_steps(told)
    with tf.control_dependencies([] if done is None else [done]):
        return tf.constant(True)


Step = Generator[Any, Any, list[Gradient]]
"""An exchange as :data:`Route`, in whichever way, of which the gradients come back."""


def _finished(routes: list[tuple[list[Slot], Step]]) -> tuple[dict[Slot, Gradient], tf.Tensor | None]:
    """The reduced gradients of exchanges that are void together, and whether they are; None where nothing is kept."""
    asks = [next(route) for _, route in routes]
    kept = any(slot.state for slots, _ in routes for slot in slots)
    void = tf.reduce_any(tf.stack([ask() for ask in asks])) if kept else None
    ended = end([route for _, route in routes], void)
    return {slot: grad for (slots, _), grads in zip(routes, ended) for slot, grad in zip(slots, grads)}, void


def local_gradient(grad: Gradient | None, process_set: ProcessSet) -> Gradient | None:
    """A local variable's gradient, divided by the number of workers: then it has the weight it would have in an average."""
    if grad is None:
        return None
    world = mpi_ops.size_op(process_set.process_set_id) if network.ELASTIC else process_set.size()
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / tf.cast(world, grad.dtype), grad.indices, grad.dense_shape)
    return grad / tf.cast(world, grad.dtype)
