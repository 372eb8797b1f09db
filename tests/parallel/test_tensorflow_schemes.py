"""Memories, merges and stages on several workers: the same as a simulation from the formulas, and what else can be told of them."""

import contextlib
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
from hvd_quant import TensorInfo, get_compressor
from hvd_quant.compressors.topk import TopK
from hvd_quant.exchange import sent_bytes
from hvd_quant.ops import generic
from hvd_quant.tensorflow import codes, network
from hvd_quant.tensorflow.reducer import Reducer
from hvd_quant.tensorflow.state import state_of
from tests.parallel import simulation
from tests.parallel.tensorflow_workers import RANK, WORLD, Network, assert_same_everywhere, on_all

SHAPES = simulation.SHAPES
STEPS = 20
KEPT = ["topk:ratio=0.1,momentum=0.9", "topk:ratio=0.1,momentum=0.9,nesterov=true,clip_norm=1,weight_decay=0.01,warmup=2",
        "onebit:memory=ef21,warmup=2", "onebit:memory=ef21,eta=0.5,exchange=sra", "topk:ratio=0.1,merge=replace,exchange=sra",
        "onebit:merge=error", "topk:ratio=0.1,memory=ef21,schedule=dgc,schedule_steps=2"]
# More that is kept between steps.
OTHERS = ["topk:ratio=0.1,scope=model", "powersgd:merge=sum", "randomk:ratio=0.1", "adaptive:ratio=0.1,warmup=2,exchange=sra",
          "threshold:tau=0.1", "qsgd:memory=error_feedback"]

with_two = pytest.mark.skipif(WORLD > 2, reason="the launches with two workers run this")


class Together:
    """Plain SGD with several compressors; their steps are one graph, which takes less time to make than many.

    Arguments:
        compressors: key -> spec or compressor, and op.
        shapes: from a key to the shapes of its tensors.

    Attributes:
        sent: this worker's payloads of the last step: (key, name of a tensor) -> compressor, record, ranges, and bytes.
    """

    def __init__(self, compressors, shapes=lambda key: SHAPES):
        self.sent = {}
        self.weights = {key: [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes(key).items()] for key in compressors}
        self.rates = {key: 0.1 if op == hvd.Average else 0.1 / WORLD for key, (_, op) in compressors.items()}
        self.reducers = {key: Reducer(compressor, self.weights[key], name="test", op=op)
                         for key, (compressor, op) in compressors.items()}
        self.traces = 0
        self._run = tf.function(self._train, autograph=False)

    def _train(self, gradients):
        self.traces += 1
        results = []
        for given, (key, reducer) in zip(gradients, self.reducers.items()):
            with self._noting(key):
                results.append(reducer.reduce(given, self.weights[key]))
            for weight, result in zip(self.weights[key], results[-1]):
                weight.assign_sub(self.rates[key] * result)
        return results

    @contextlib.contextmanager
    def _noting(self, key):
        """Have what native codes encode in ``sent`` whenever the graph runs."""
        encode = codes.Traced.encode

        def encode_and_note(code, vector, state, info, cuts):
            encoded = encode(code, vector, state, info, cuts)
            if info.phase == 0:
                def note(payload):
                    self.sent[key, info.name] = code._compressor, info, cuts, payload.copy()
                    return payload.size

                tf.numpy_function(note, [encoded.payload], tf.int64)
            return encoded

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codes.Traced, "encode", encode_and_note)
            yield

    def decoded(self):
        """What is in ``sent``, by key and name."""
        found = {}
        for at, (compressor, info, cuts, payload) in self.sent.items():
            found[at] = np.zeros(info.numel, np.float32)
            for cut in filter(lambda cut: cut[0] < cut[1], cuts):
                part = info.part(*cut)
                own, payload = np.split(payload, [compressor.payload_bytes(part)])
                compressor.decode_sum(generic, [own], part, found[at][slice(*cut)])
            assert not payload.size
        return found

    def step(self, gradients):
        """The results by key.

        Arguments:
            gradients: by key, one of each shape; or the same for all keys.
        """
        self.sent.clear()
        given = [gradients[key] if isinstance(gradients, dict) else gradients for key in self.reducers]
        results = self._run([[tf.constant(g) for g in of_one] for of_one in given])
        return {key: [g.numpy() for g in of_one] for key, of_one in zip(self.reducers, results)}

    def state(self):
        return {(key, name, what): value for key, reducer in self.reducers.items()
                for name, slot in reducer.state_dict()["tensors"].items() for what, value in slot["state"].items()}

    def values(self):
        return {(key, i): weight.numpy() for key, weights in self.weights.items() for i, weight in enumerate(weights)}

    def assign(self, values):
        for (key, i), value in values.items():
            self.weights[key][i].assign(value)


def recorded(step, rank=RANK):
    random = np.random.default_rng([step, rank])
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]


def compressors(specs, **knobs):
    return {spec: (dataclasses.replace(get_compressor(spec), **{"min_numel": 0, **knobs}), hvd.Average) for spec in specs}


RUNS = simulation.runs(WORLD)


@functools.cache
def simulated():
    """Of each scheme the history and the simulations; and of each with each op what was the result here, step by step, and in
    the end."""
    schemes = {(scheme.spec, op): scheme for scheme, op in RUNS}
    shapes = {key: simulation.shapes_of(scheme) for key, scheme in schemes.items()}
    here = Together({key: (key[0], hvd.Average if key[1] == "average" else hvd.Sum) for key in schemes}, shapes.get)
    runs = {scheme.spec: simulation.train(scheme, WORLD, STEPS) for scheme in dict.fromkeys(schemes.values())}
    steps = []
    for step in range(STEPS):
        results = here.step({key: [runs[key[0]][0][step][0][name][RANK].reshape(shape) for name, shape in shapes[key].items()]
                             for key in schemes})
        for key, scheme in schemes.items():
            if scheme.average_every and (step + 1) % scheme.average_every == 0:
                hvd.average_parameters(here.weights[key])
        steps.append((results, here.values(), here.decoded()))
    assert here.traces == 1
    return runs, steps, here.state()


@pytest.mark.parametrize("scheme, op", RUNS, ids=lambda x: getattr(x, "spec", x))
def test_the_same_as_a_simulation_from_the_formulas(scheme, op):
    """In what is sent, what optimizers get, and what is kept."""
    runs, steps, state = simulated()
    key = scheme.spec, op
    history, simulations = runs[scheme.spec]
    for (_, mean, after, sent), (results, values, decoded) in zip(history, steps):
        for i, name in enumerate(simulations):
            assert ((key, name) in decoded) == bool(sent[name])
            if sent[name]:
                expected = sent[name][RANK]
                np.testing.assert_allclose(decoded[key, name], expected, rtol=0, atol=0 if scheme.exact else 2e-6 * abs(expected).max())
            expected = mean[name][RANK] * np.float32(1 if op == "average" else WORLD)
            scale = abs(expected).max()
            np.testing.assert_allclose(results[key][i].ravel(), expected, rtol=0, atol=0 if scheme.exact else 2e-6 * scale)
            np.testing.assert_allclose(values[key, i].ravel(), after[name][RANK], rtol=0, atol=4e-6 * scale)
    kept = {(name, what): value for (of, name, what), value in state.items() if of == key}
    assert {name for name, _ in kept} == set(simulations if scheme.memory != "none" else ())
    for (name, what), value in kept.items():
        expected = simulations[name].states[RANK] | {"owner.residual": simulations[name].owned[RANK]}
        np.testing.assert_allclose(value, expected[what], rtol=0, atol=0 if scheme.exact else 1e-5, err_msg=f"{what} of {name}")


@pytest.mark.skipif(WORLD != 4, reason="takes two hosts of two workers")
def test_hosts_are_the_workers_of_a_simulation(monkeypatch):
    """Where their own workers are averaged first; each of these has a piece of the state."""
    monkeypatch.setattr(network, "_places", lambda: [(rank % 2, rank // 2) for rank in range(WORLD)])
    host, runs = RANK % 2, {scheme.spec: simulation.train(scheme, 2, STEPS) for scheme in simulation.BY_HOST}
    here = Together({spec: (spec, hvd.Average) for spec in runs})
    for step in range(STEPS):
        found = here.step({spec: [history[step][0][name][host].reshape(shape) * np.float32(0.5 + RANK // 2)
                                  for name, shape in SHAPES.items()] for spec, (history, _) in runs.items()})
        for spec, (history, _) in runs.items():
            for name, value in zip(SHAPES, found[spec]):
                expected = history[step][1][name][host]
                np.testing.assert_allclose(value.ravel(), expected, rtol=0, atol=2e-6 * abs(expected).max())
    for spec, (_, simulations) in runs.items():
        for name, slot in here.reducers[spec].state.slots.items():
            whole = simulations[name].states[host] | {"owner.residual": simulations[name].owners()}
            for key, value in slot.state.items():
                place = slice(*(slot.owned if key == "owner.residual" else slot.pieces[slot.workers.local[0]]))
                np.testing.assert_allclose(value, whole[key][place], rtol=0, atol=1e-5, err_msg=f"{key} of {name}")


@with_two
def test_a_step_that_is_not_finite_leaves_no_trace():
    """In any tensor; compressed, or dense for their size or in a warm-up."""
    always = [spec for spec in KEPT if get_compressor(spec).has_momentum]  # of others nothing is kept of small tensors
    here = Together({(spec, min_numel): chosen for min_numel, specs in ((0, [*KEPT, *OTHERS]), (10**6, always))
                     for spec, chosen in compressors(specs, min_numel=min_numel).items()})
    holding = {key for key, _, _ in here.state()}
    assert holding >= {key for key in here.reducers if key[0] in KEPT}
    for step in range(7):
        matrix, vector = recorded(step)
        if step not in (0, 1, 5):
            here.step([matrix, vector])
            continue
        before, values = here.state(), here.values()
        if RANK == WORLD - 1:
            matrix[3, 7] = np.nan if step else np.inf
        for key, results in here.step([matrix, vector]).items():
            nothing_kept = key not in holding  # then there is nothing to be taken back
            assert not np.isfinite(results[0]).all() if nothing_kept else all(np.isnan(result).all() for result in results)
        here.assign(values)
        for (key, name, what), value in here.state().items():
            atol = 1e-5 if what.endswith("residual") else 0
            np.testing.assert_allclose(value, before[key, name, what], rtol=0, atol=atol, err_msg=f"{key} {what}")


@with_two
def test_training_resumes_bit_for_bit(tmp_path):
    here = Together(compressors(KEPT))
    for step in range(5):
        here.step(recorded(step))
    checkpoint = tf.train.Checkpoint(state={str(i): reducer.state for i, reducer in enumerate(here.reducers.values())})
    path, values = checkpoint.write(str(tmp_path / f"of-{RANK}")), here.values()
    saved = {spec: reducer.state_dict() for spec, reducer in here.reducers.items()}

    def end():
        here.assign(values)
        for step in range(5, 9):
            here.step(recorded(step))
        return here.values()

    straight = end()
    checkpoint.read(path).assert_consumed()
    from_checkpoint = end()
    for spec, reducer in here.reducers.items():
        reducer.load_state_dict(saved[spec])
    for again in (from_checkpoint, end()):
        for key, value in straight.items():
            np.testing.assert_array_equal(value, again[key], err_msg=str(key))


SCHEDULES = ["topk:ratio=0.02,schedule=dgc,schedule_steps=2,warmup=1", "topk:ratio=0.02,schedule=merging,schedule_steps=20"]


@pytest.mark.parametrize("spec", SCHEDULES)
def test_what_is_sent_follows_the_stages(spec):
    compressor = get_compressor(f"{spec},min_numel=0,exchange=allgather")
    here, sent, expected = Together({"it": (compressor, hvd.Average)}), [0], []
    infos = [TensorInfo.whole(name, shape, world=WORLD) for name, shape in SHAPES.items()]
    for step in range(50):
        results = here.step(recorded(step))["it"]
        sent.append(here.reducers["it"].stats()["wire_bytes"])
        stage = compressor.at(step)
        expected.append(sum(sent_bytes("dense", 4 * info.numel, WORLD) if stage is None else
                            sent_bytes("allgather", stage.payload_bytes(info), WORLD) for info in infos))
    assert np.diff(sent).tolist() == expected == sorted(expected, reverse=True) and len(set(expected)) > 3
    assert here.traces == 1
    for result in results:
        assert_same_everywhere(result)
    (bucket,) = here.reducers["it"].stats()["buckets"].values()
    assert bucket["compressor"] == dataclasses.replace(compressor, schedule="none", schedule_steps=1000, warmup=0).spec


@with_two
def test_a_variable_that_is_unfrozen_late_begins_with_its_own_first_stage():
    """And doesn't send those back into theirs that travel with it, eagerly or in a graph."""
    weights = [tf.Variable(tf.zeros([1200]), name=name) for name in "ab"]
    reducer = Reducer("topk:ratio=0.1,min_numel=0,warmup=2", weights, name="test")
    in_graph = tf.function(lambda *grads: reducer.reduce(grads, weights[:len(grads)]))
    for step, (reduce, count, expected) in enumerate([
            (in_graph, 1, [False]), (in_graph, 1, [False]), (in_graph, 1, [True]), (in_graph, 2, [True, False]),
            (lambda *grads: reducer.reduce(grads, weights), 2, [True, False]), (in_graph, 2, [True, True])]):
        results = reduce(*(tf.constant(np.resize(g, 1200)) for g in recorded(step)[:count]))
        assert [bool(np.mean(result == 0) > 0.5) for result in results] == expected, step


class Own(TopK):
    """A user's, which TensorFlow calls on the host."""


@with_two
def test_a_compressor_of_ones_own_has_all_of_them():
    pairs = {}
    for spec, (compressor, op) in compressors([spec for spec in KEPT if spec.startswith("topk")]).items():
        own = Own(**{field.name: getattr(compressor, field.name) for field in dataclasses.fields(compressor)})
        pairs |= {(spec, "own"): (own, op), (spec, "native"): (compressor, op)}
    here = Together(pairs)
    for step in range(6):
        results = here.step(recorded(step))
        for spec, kind in pairs:
            for result, native in zip(results[spec, kind], results[spec, "native"]):
                np.testing.assert_array_equal(result, native, err_msg=spec)


@with_two
def test_what_goes_dense_for_its_size_has_the_momentum_of_an_optimizer():
    """And what travels by codes that leave nothing out."""
    here = Together(compressors(["topk:momentum=0.9", "topk:momentum=0.9,nesterov=true"], min_numel=10**6))
    whole = Together(compressors(["none:momentum=0.9", "fp16:momentum=0.9", "bf16:momentum=0.9"]))
    momenta = [tf.keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov) for nesterov in (False, True)]
    others = [[tf.Variable(tf.zeros(shape)) for shape in SHAPES.values()] for _ in momenta]
    for step in range(5):
        here.step(recorded(step))
        whole.step(recorded(step))
        for optimizer, variables in zip(momenta, others):
            means = [np.mean(grads, axis=0) for grads in zip(*(recorded(step, rank) for rank in range(WORLD)))]
            optimizer.apply_gradients(zip(map(tf.constant, means), variables))
    for weights, variables in zip(here.weights.values(), others):
        for weight, variable in zip(weights, variables):
            np.testing.assert_allclose(weight.numpy(), variable.numpy(), rtol=0, atol=1e-6)
    for weights in whole.weights.values():
        for weight, variable in zip(weights, others[0]):
            np.testing.assert_allclose(weight.numpy(), variable.numpy(), rtol=0, atol=1e-2)
    assert {what for _, _, what in here.state() | whole.state()} == {"velocity"}
    with pytest.warns(UserWarning, match="momentum of some parameters, and b train without any"):
        Reducer({"a": "topk:momentum=0.9"}, [tf.Variable(0.0, name=name) for name in "ab"], name="test")


@with_two
def test_what_goes_dense_has_the_moving_average_of_ef21():
    here = Together(compressors(["onebit:memory=ef21,eta=0.25"], min_numel=10**6) | compressors(["onebit:memory=ef21,eta=0.25,warmup=9"]))
    averages = None
    for step in range(5):
        means = [np.mean(grads, axis=0) for grads in zip(*(recorded(step, rank) for rank in range(WORLD)))]
        averages = [0.75 * average + 0.25 * mean for average, mean in zip(averages, means)] if averages else means
        for results in here.step(recorded(step)).values():
            for result, average in zip(results, averages):
                np.testing.assert_allclose(result, average, rtol=0, atol=1e-6)


@pytest.mark.parametrize("memory", ["error_feedback", "ef21"])
def test_what_an_owner_kept_is_not_lost_where_a_job_goes_on_without_owners(memory, monkeypatch):
    """With a constant gradient, all that is kept arrives in a few steps; a step that is void takes nothing out."""
    weights = [tf.Variable(tf.zeros([1230]))]
    reducer = Reducer(f"topk:ratio=0.5,min_numel=0,exchange=sra,memory={memory}", weights, name="test")

    def reduced(reducer, gradient):
        return reducer.reduce([tf.constant(gradient)], weights)[0].numpy()

    given, received = 0, 0
    for step in range(5):
        gradient = recorded(step)[0].ravel()
        given, received = given + on_all(gradient).mean(0), received + reduced(reducer, gradient)
    monkeypatch.setattr(network, "travels", lambda compressor, infos, costs: dataclasses.replace(compressor, exchange="allgather"))
    other = Reducer(reducer.state, [], name="test")
    (before,) = reducer.state_dict()["tensors"].values()
    assert before["state"]["owner.residual"].any()
    assert np.isnan(reduced(other, np.full(1230, np.nan if RANK == 0 else 1, np.float32))).all()
    (after,) = reducer.state_dict()["tensors"].values()
    for key, value in before["state"].items():
        np.testing.assert_allclose(after["state"][key], value, rtol=0, atol=1e-6 if key == "residual" else 0)
    # Of estimates the last gradient is one, of residuals all gradients add up.
    constant = recorded(9)[0].ravel() if memory == "ef21" else np.zeros(1230, np.float32)
    for _ in range(8):
        last = reduced(other, constant)
        received = received + last
    assert not reducer.state_dict()["tensors"]["Variable"]["state"]["owner.residual"].any()
    np.testing.assert_allclose(*((last, on_all(constant).mean(0)) if memory == "ef21" else (received, given)), rtol=0, atol=1e-5)


@with_two
def test_a_dense_step_leaves_nothing_to_owners_of_estimates():
    """It gives all workers the mean of the estimates, of which nothing is missing then."""
    weights = [tf.Variable(tf.zeros(shape)) for shape in SHAPES.values()]
    spec = "onebit:block_size=64,memory=ef21,min_numel=0,exchange=sra"
    before, after = Reducer(spec, weights, name="test"), Reducer(f"{spec},warmup=4", weights, name="test")
    for step in range(3):
        before.reduce([tf.constant(g) for g in recorded(step)], weights)
    state = before.state_dict()
    assert all(kept["state"]["owner.residual"].any() for kept in state["tensors"].values())
    after.load_state_dict(state)
    after.reduce([tf.constant(g) for g in recorded(3)], weights)
    for kept in after.state_dict()["tensors"].values():
        assert not kept["state"]["owner.residual"].any()
        np.testing.assert_allclose(kept["state"]["mean"], on_all(kept["state"]["estimate"]).mean(0), rtol=0, atol=1e-6)


def test_elastic_jobs_have_no_place_for_ef21(monkeypatch):
    monkeypatch.setattr(network, "ELASTIC", True)
    with pytest.raises(ValueError, match="onebit:memory=ef21: a worker that joins an elastic job doesn't have the mean"):
        Reducer("onebit:memory=ef21", [tf.Variable(0.0)], name="test")


@with_two
@pytest.mark.parametrize("spec", ["onebit:warmup=2", "topk:schedule=dgc", "topk:merge=sum", "onebit:average_every=9", "randomk"])
def test_elastic_jobs_have_no_place_for_what_goes_by_counts_that_newcomers_lack(spec, monkeypatch):
    """A tape's are in no elastic state; a KerasState makes those of an optimizer the same."""
    monkeypatch.setattr(network, "ELASTIC", True)
    variables = [tf.Variable(tf.zeros([5000]))]
    for make in (lambda: get_compressor(spec).bind(variables), lambda: state_of(spec, variables, hvd.global_process_set),
                 lambda: state_of({"*": spec}, variables, hvd.global_process_set), lambda: Reducer(spec, variables, name="test")):
        with pytest.raises(ValueError, match="a worker that joins an elastic job has not counted the others' exchanges"):
            make()
    hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=spec).build(variables)
    state_of("topk:momentum=0.9", variables, hvd.global_process_set)


@pytest.mark.parametrize("spec", KEPT[:1] + KEPT[2:3] + KEPT[5:6])
def test_horovods_own_tape_has_no_place_for_them(spec):
    import horovod.tensorflow as stock

    small = Network()
    bound = get_compressor(spec).bind(small.variables)  # for a tape of this package, and to be saved
    with tf.GradientTape() as tape:
        loss = small.loss(tf.ones([1, 30]))
    tape = stock.DistributedGradientTape(tape, compression=bound)
    with pytest.raises(ValueError, match="Horovod's own optimizers have no place for momentum correction, ef21, merging"):
        tape.gradient(loss, small.variables)
