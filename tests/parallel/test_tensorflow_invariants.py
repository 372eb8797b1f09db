"""The invariants, for each compressor: replicas, nothing lost, nothing poisoned, state, and the same as PyTorch."""

from dataclasses import dataclass

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
from hvd_quant import Compression, exchange
from hvd_quant.compressors import TopK
from hvd_quant.ops import generic
from hvd_quant.tensorflow.reducer import Reducer
from tests.conftest import CODECS, LINEAR
from tests.parallel.tensorflow_workers import (RANK, WORLD, Network, Simulation, assert_same_everywhere, batch, every, on_all,
                                               routes, train)

ROUTES = routes(CODECS)
SHAPES = {"a/kernel": (30, 40), "a/bias": (33,), "b/kernel": (70, 257)}


def variables():
    return [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]


def recorded(step):
    """The gradients of a step, of each worker by name."""
    return [{name: np.random.default_rng([step, rank]).normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
            for rank in range(WORLD)]


@every(ROUTES)
def test_replicas_are_bit_identical(compressor):
    network = Network()
    start = network.flat()
    train(network, range(6), compression=compressor)
    assert_same_everywhere(network.flat())
    assert not np.array_equal(start, network.flat())


@every(ROUTES)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_the_same_as_a_simulation_of_all_workers(compressor, op):
    """Every worker has every worker's gradients, and the NumPy specification does the rest."""
    weights = variables()
    reducer = Reducer(compressor, weights, name="test", op=op)
    simulated = Simulation(compressor, generic, SHAPES, np.array, np.asarray)
    given, received = {name: 0 for name in SHAPES}, {name: 0 for name in SHAPES}
    for step in range(5):
        gradients = recorded(step)
        reduced = reducer.reduce([tf.constant(gradients[RANK][name]) for name in SHAPES], weights)
        for name, result in zip(SHAPES, reduced):
            mean = result.numpy() / (1 if op == hvd.Average else WORLD)
            tolerance = 2e-3 if compressor.name == "fp16" else 3e-6
            expected = simulated.reduce(name, [g[name] for g in gradients], step)
            np.testing.assert_allclose(mean, expected, rtol=tolerance, atol=tolerance)
            given[name] = given[name] + np.mean([g[name] for g in gradients], axis=0)
            received[name] = received[name] + mean
    if compressor.memory == "error_feedback":  # nothing is lost: what arrived and what is still kept is what was given
        for i, (name, slot) in enumerate(reducer.state_dict()["tensors"].items()):
            kept = np.zeros(given[name].size, np.float32)
            if slot["state"]:
                kept += on_all(slot["state"]["residual"]).mean(0)
            for (a, b), owned in zip(simulated.cuts[name], hvd.allgather_object(slot["state"].get("owner.residual"), name="owned")):
                if owned is not None:
                    kept[a:b] += owned
            np.testing.assert_allclose(received[name] + kept.reshape(SHAPES[name]), given[name], atol=1e-5)


@every(ROUTES)
def test_the_same_bits_as_pytorch(compressor):
    """PyTorch's kernels on the same recorded gradients: the same state and results."""
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("hvd_quant.ops.torch")
    weights = variables()
    reducer = Reducer(compressor, weights, name="test")
    simulated = Simulation(compressor, ops, SHAPES, torch.tensor, lambda t: t.numpy())
    for step in range(4):
        gradients = recorded(step)
        reduced = reducer.reduce([tf.constant(gradients[RANK][name]) for name in SHAPES], weights)
        for name, result in zip(SHAPES, reduced):
            expected = simulated.reduce(name, [g[name] for g in gradients], step)
            if simulated.kinds[name] in ("allgather", "sra"):
                np.testing.assert_array_equal(result.numpy(), expected)
    for name, slot in reducer.state_dict()["tensors"].items():
        for key, value in slot["state"].items():
            np.testing.assert_array_equal(value, simulated.states[RANK][name][key].numpy())


@every({name: c for name, c in ROUTES.items() if c.exchange != "sra"})
def test_training_ends_as_in_pytorch(compressor):
    """The same model, data and steps in PyTorch, all workers in one process. (By way of owners, rounding in the model decides
    twice which entries are kept, and 30 steps later ends differ; that the exchange is the same is tested above.)"""
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("hvd_quant.ops.torch")
    network = Network()
    names = [v.name.removesuffix(":0") for v in network.variables]
    weights = [torch.tensor(v.numpy(), requires_grad=True) for v in network.variables]
    simulated = Simulation(compressor, ops, {n: tuple(w.shape) for n, w in zip(names, weights)}, torch.tensor, lambda t: t.numpy())

    def loss(x):
        w0, b0, w1, b1 = weights
        return ((torch.relu(x @ w0 + b0) @ w1 + b1 - x) ** 2).mean()

    steps = range(30)
    for step in steps:
        gradients = [torch.autograd.grad(loss(torch.tensor(batch(step, rank))), weights) for rank in range(WORLD)]
        for i, (name, w) in enumerate(zip(names, weights)):
            mean = simulated.reduce(name, [g[i].numpy() for g in gradients], step)
            w.data -= 0.3 * torch.tensor(mean)
    train(network, steps, lr=0.3, compression=compressor)
    ends = [float(network.loss(tf.constant(batch(99, 0)))), float(loss(torch.tensor(batch(99, 0))).detach())]
    if compressor.name == "none":
        np.testing.assert_allclose(network.flat(), np.concatenate([w.detach().numpy().ravel() for w in weights]), atol=1e-5)
    # Rounding in the model decides now and then which entries are kept.
    assert abs(ends[0] - ends[1]) <= 0.01 * ends[1]


@every(ROUTES)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_nonfinite_gradient_is_seen_everywhere_and_poisons_nothing(compressor, bad):
    network = Network()
    state = compressor.bind(network.variables)
    train(network, range(3), compression=state)
    before = state.state_dict()["tensors"]
    _, grads = train(network, [3], lr=0.0, compression=state, scale=lambda step: np.float32(bad if RANK == WORLD - 1 else 1))
    for variable, grad in zip(network.variables, grads):
        kind = state.slot(variable).ways[-1].kind
        assert not np.isfinite(grad).all()
        assert kind in ("dense", "allreduce") or np.isnan(grad).all()
    for variable in network.variables:  # NaN * 0 was subtracted
        variable.assign(tf.where(tf.math.is_finite(variable), variable, 0.1))
    for name, slot in state.state_dict()["tensors"].items():
        for key, value in slot["state"].items():
            np.testing.assert_allclose(value, before[name]["state"][key], atol=1e-5)
    compressed = [v for v in network.variables if state.slot(v).ways[-1].kind in ("allgather", "sra")]
    assert state.stats()["void_tensors"] == len(compressed)
    train(network, range(4, 6), compression=state)
    assert np.isfinite(network.flat()).all()
    assert_same_everywhere(network.flat())


@every(ROUTES | {spec: c for spec, c in LINEAR.items() if c.memory == "error_feedback"})
def test_a_checkpoint_resumes_bit_for_bit(compressor, tmp_path):
    straight, first = Network(), Network()
    train(straight, range(8), compression=compressor)
    state = compressor.bind(first.variables)
    train(first, range(4), compression=state)
    path = tf.train.Checkpoint(compression=state, variables=first.variables).save(str(tmp_path / "c"))
    second = Network(seed=1)
    resumed = compressor.bind(second.variables)
    status = tf.train.Checkpoint(compression=resumed, variables=second.variables).restore(path)
    status.assert_consumed()
    train(second, range(4, 8), compression=resumed)
    np.testing.assert_array_equal(second.flat(), straight.flat())


def test_a_checkpoint_of_a_variable_that_has_changed_its_shape_is_refused(tmp_path):
    def bound(rows):
        weights = [tf.Variable(tf.zeros([rows, 40]), name="changed"), tf.Variable(tf.zeros([50, 20]), name="other")]
        return weights, hvd.Compression.topk(ratio=0.1, min_numel=0).bind(weights)

    weights, state = bound(30)
    Reducer(state, []).reduce([tf.random.normal(v.shape) for v in weights], weights)
    path = tf.train.Checkpoint(compression=state).write(str(tmp_path / f"of-{RANK}"))
    with pytest.raises(ValueError, match=r"shape \(1200,\) .* shape \(1240,\) and name .*_0_changed/residual"):
        tf.train.Checkpoint(compression=bound(31)[1]).read(path)


def test_a_checkpoint_is_restored_by_its_worker_alone(tmp_path):
    """As where worker 0 alone saves, which is right for the model."""
    network = Network()
    state = hvd.Compression.topk(ratio=0.1, min_numel=0).bind(network.variables)
    train(network, range(2), compression=state)
    path = hvd.broadcast_object(tf.train.Checkpoint(compression=state).write(str(tmp_path / f"of-{RANK}")), name="path")
    if RANK == 0:
        tf.train.Checkpoint(compression=state).read(path)
    else:
        with pytest.raises(ValueError, match=f"is of worker 0 of {WORLD}; this is worker {RANK} of {WORLD}: each worker"):
            tf.train.Checkpoint(compression=state).read(path)
    hvd.broadcast_object(0, name="read")  # nobody removes its folder before


def test_a_model_that_tracks_its_state_can_be_exported(tmp_path):
    class Trained(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 30])])
        def __call__(self, x):
            return x @ self.kernel

    trained = Trained()
    network = Network()
    trained.kernel = network.variables[0]
    trained.reducer = Reducer("onebit:min_numel=0", network.variables, name="test")
    trained.reducer.reduce([tf.ones_like(v) for v in network.variables], network.variables)
    tf.saved_model.save(trained, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(loaded(tf.ones([2, 30])), trained(tf.ones([2, 30])))


def test_a_dictionary_resumes_bit_for_bit_and_belongs_to_its_worker():
    straight, first, second = Network(), Network(), Network(seed=1)
    train(straight, range(6), compression="onebit:min_numel=0")
    compressor = hvd.Compression.onebit(min_numel=0)
    state, resumed = compressor.bind(first.variables), compressor.bind(second.variables)
    train(first, range(3), compression=state)
    saved = state.state_dict()
    for a, b in zip(second.variables, first.variables):
        a.assign(b)
    resumed.load_state_dict(saved)
    train(second, range(3, 6), compression=resumed)
    np.testing.assert_array_equal(second.flat(), straight.flat())
    renamed = {f"other_{name}": slot for name, slot in saved["tensors"].items()}  # as Keras does with layers
    resumed.load_state_dict({**saved, "tensors": renamed})
    for name, slot in resumed.state_dict()["tensors"].items():
        np.testing.assert_array_equal(slot["state"].get("residual", 0), saved["tensors"][name]["state"].get("residual", 0))
    with pytest.raises(ValueError, match=f"of worker {(RANK + 1) % WORLD} of {WORLD}.*each worker has to save and load its own"):
        resumed.load_state_dict({**saved, "rank": (RANK + 1) % WORLD})


def test_fp16_averages_what_does_not_fit_and_keeps_its_type():
    for dtype in (tf.float16, tf.bfloat16, tf.float64, tf.float32):
        for spec in ("none", "fp16", "bf16", "onebit:min_numel=0", "onebit:block_size=64,min_numel=0"):
            weight = tf.Variable(tf.zeros([300], dtype))
            value = tf.constant(39936.0, dtype)  # which every type holds
            (result,) = Reducer(spec, [weight], name="test").reduce([tf.fill([300], value)], [weight])
            assert result.dtype == dtype
            np.testing.assert_array_equal(tf.cast(result, tf.float32), tf.fill([300], tf.cast(value, tf.float32)))


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("spec", ["none", "bf16", "onebit:min_numel=0", "topk:min_numel=0,ratio=1", "blockwise8:min_numel=0",
                                  "topk:min_numel=0,ratio=0.1,exchange=sra"])
def test_tiny_values_do_not_flush_away(spec, in_graph):
    for value in (1e-7, 2.0**-130):
        weight = tf.Variable(tf.zeros([64]))
        reducer = Reducer(spec, [weight], name="test")

        def reduce(grad):
            return reducer.reduce([grad], [weight])

        (reduced,) = (tf.function(reduce) if in_graph else reduce)(tf.fill([64], np.float32(value)))
        kept = np.zeros(64, np.float32)
        for slot in reducer.state.by_place:
            kept += slot.state["residual"].numpy() if slot.state else 0
            own = slot.owner_state["residual"].numpy() if slot.owner_state else 0
            for (a, b), owned in hvd.allgather_object((slot.owned, own), name="owned"):
                kept[a:b] += owned
        np.testing.assert_allclose(reduced.numpy() + kept, np.full(64, value), rtol=4e-3 if spec == "bf16" else 1e-6)


def test_sums_that_outgrow_fp32_are_seen():
    """What a threshold leaves grows step by step, which the statistics tell, until the step in which it would overflow is void."""
    weight, norms = tf.Variable(tf.zeros([64]), name="w"), []
    reducer = Reducer("threshold:tau=1,min_numel=0", [weight], name="test")
    for _ in range(4):
        (reduced,) = reducer.reduce([tf.fill([64], np.float32(1e38))], [weight])
        norms.append(reducer.stats(residual_norms=True)["residual_norms"]["w"] / 8e38)
    assert norms[:3] == pytest.approx([1, 2, 3]) and norms[3] < 3.1 and np.isnan(reduced).all()
    assert reducer.stats()["void_tensors"] == 1


def test_shapes_of_all_kinds():
    sizes = [(), (0,), (1,), (7,), (8,), (9,), (31,), (33,), (255,), (256,), (257,), (3, 5, 7)]
    for compressor in CODECS.values():
        weights = [tf.Variable(tf.zeros(shape)) for shape in sizes]
        reducer = Reducer(compressor, weights, name="test")
        for _ in range(2):
            grads = [tf.fill(shape, float(RANK + 1)) for shape in sizes]
            for shape, result in zip(sizes, reducer.reduce(grads, weights)):
                assert result.shape == shape
                assert_same_everywhere(result)
        kinds = reducer.stats()["exchanges"]
        assert sum(map(len, kinds.values())) == len(sizes)
        assert exchange.choose(compressor, reducer.state.slot(weights[2]).info) in ("dense", "allreduce")


@dataclass(frozen=True, kw_only=True)
class InArrays(TopK):
    """The same in array operations, which TensorFlow calls on the host."""


@pytest.mark.parametrize("kind", [TopK, InArrays])
@pytest.mark.parametrize("way, stages", [("allgather", {}), ("sra", {}), ("allgather", {"schedule": "dgc", "schedule_steps": 2})], ids=str)
def test_a_threshold_for_the_whole_model_is_that_of_the_step_before(kind, way, stages):
    """Every worker's own, from all its tensors, as in a simulation with the NumPy specification. It is for what the next step
    keeps."""
    compressor, weights = kind(ratio=0.05, min_numel=100, scope="model", exchange=way, **stages), variables()
    reducer, simulated = Reducer(compressor, weights, name="test"), Simulation(compressor.at(0), generic, SHAPES, np.array, np.asarray)
    large = ["a/kernel", "b/kernel"]
    reduce = tf.function(lambda grads: reducer.reduce(grads, weights))
    for step in range(5):
        gradients = [{n: g * np.float32(0.1 if n == "a/kernel" else 1) for n, g in of_one.items()} for of_one in recorded(step)]
        given = [tf.constant(gradients[RANK][name]) for name in SHAPES]
        reduced = dict(zip(SHAPES, reduce(given) if step % 2 else reducer.reduce(given, weights)))
        for name in SHAPES:
            expected = simulated.reduce(name, [g[name] for g in gradients], step)
            np.testing.assert_allclose(reduced[name], expected, rtol=1e-6, atol=1e-6)
        simulated.compressor = compressor.at(step + 1)
        for of_one in simulated.states:
            simulated.compressor.between_steps(generic, [(simulated.infos[n], of_one[n]) for n in large])
        found = reducer.state_dict()["tensors"]
        for name in large:
            for key, value in simulated.states[RANK][name].items():
                np.testing.assert_allclose(found[name]["state"][key], value, rtol=1e-6, atol=1e-6)
        assert float(found[large[0]]["state"]["threshold"][0]) == float(found[large[1]]["state"]["threshold"][0]) > 0


def test_a_threshold_for_the_whole_model_in_a_session_and_in_horovods_tape():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        w, b = (tf.compat.v1.get_variable(name, initializer=np.zeros(300, np.float32)) for name in "wb")
        loss = tf.reduce_sum((w - (RANK + 1.0)) ** 2 * np.linspace(0, 1, 300, dtype=np.float32)) + tf.reduce_sum((b - 3.0) ** 2)
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1),
                                             compression="topk:ratio=0.1,min_numel=0,scope=model")
        train_op = optimizer.minimize(loss, var_list=[w, b])
        session.run(tf.compat.v1.global_variables_initializer())
        held = [v for v in tf.compat.v1.get_collection("hvd_quant") if v.name.endswith("threshold:0")]
        for _ in range(3):
            session.run(train_op)
            thresholds = session.run(held)
            assert len(held) == 2 and thresholds[0][0] == thresholds[1][0] > 0
    network = Network()
    bound = Compression.topk(scope="model", min_numel=0).bind(network.variables)
    with tf.GradientTape() as tape:
        loss = network.loss(tf.constant(batch(0)))
    with pytest.raises(ValueError, match="scope=model can't be used there: Horovod's own optimizers have no place"):
        stock.DistributedGradientTape(tape, compression=bound).gradient(loss, network.variables)
    train(network, range(2), compression=bound)
    assert all(slot["state"]["threshold"][0] > 0 for slot in bound.state_dict()["tensors"].values() if slot["state"])
