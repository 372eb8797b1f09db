"""The distributed tape: eager and in graphs, all arguments, all kinds of gradients and variables."""

import dataclasses
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
from hvd_quant import get_compressor
from hvd_quant.tensorflow.reducer import Reducer
from hvd_quant.tensorflow.state import State
from tests.conftest import CODECS
from tests.parallel.tensorflow_workers import RANK, TOPK, WORLD, Network, assert_same_everywhere, batch, every, on_all, train

MEAN = np.mean([r + 1.0 for r in range(WORLD)])


def reduced(grads, variables=None, **how):
    """What a tape's reduction makes of gradients, eagerly."""
    variables = variables or [tf.Variable(tf.zeros_like(g)) for g in grads]
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(v * g) for v, g in zip(variables, grads))
    return hvd.DistributedGradientTape(tape, **how).gradient(loss, variables)


@every(CODECS)
def test_eager_steps_and_graphs_give_the_same(compressor):
    eager, graph = Network(), Network()
    train(eager, range(4), in_graph=False, compression=compressor)
    train(graph, range(4), in_graph=True, compression=compressor)
    np.testing.assert_allclose(eager.flat(), graph.flat(), atol=1e-6)
    assert_same_everywhere(eager.flat())
    assert_same_everywhere(graph.flat())


@pytest.mark.parametrize("compression", ["none", TOPK, "topk:ratio=0.1,min_numel=0,warmup=20", {"*kernel": TOPK}], ids=str)
def test_fifty_steps_are_traced_once(compression):
    network = Network()
    traces, _ = train(network, range(50), compression=compression)
    assert traces == 1
    assert_same_everywhere(network.flat())


@pytest.mark.parametrize("compression", ["none", TOPK])
def test_fifty_steps_on_keras_variables_are_traced_once(compression):
    keras.utils.set_random_seed(0)
    layer, traces = keras.layers.Dense(30), []
    layer.build((None, 30))
    before = layer.kernel.numpy()

    @tf.function
    def step(x):
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((layer(x) - x) ** 2)
        variables = layer.trainable_variables
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for v, g in zip(variables, tape.gradient(loss, variables)):
            v.assign_sub(0.1 * g)

    for i in range(50):
        step(tf.constant(batch(i)))
    assert len(traces) == 1
    assert not np.array_equal(before, layer.kernel.numpy())
    for v in layer.trainable_variables:
        assert_same_everywhere(v.numpy())


def test_an_eager_loop_makes_its_graph_once():
    network = Network()
    train(network, range(2), in_graph=False, compression=TOPK)
    (state,) = vars(network.variables[0])["_hvd_quant_states"].values()
    (reducer,) = state.reducers.values()
    train(network, range(2, 10), in_graph=False, compression=TOPK)
    assert reducer._in_graph().experimental_get_tracing_count() == 1
    assert state.stats()["steps"] == 10


@pytest.mark.parametrize("how, factor", [
    ({}, 1), ({"op": hvd.Sum}, WORLD), ({"gradient_predivide_factor": 3.0}, 1), ({"groups": 2}, 1),
    ({"groups": "each", "op": hvd.Sum}, WORLD)], ids=str)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "onebit:block_size=64,min_numel=0"])
def test_arguments(compression, how, factor):
    variables = [tf.Variable(tf.zeros([300])), tf.Variable(tf.zeros([5, 7])), tf.Variable(tf.zeros([]))]
    if how.get("groups") == "each":
        how = {**how, "groups": [variables[:2]]}

    for grad in reduced([tf.fill(v.shape, RANK + 1.0) for v in variables], variables, compression=compression, **how):
        np.testing.assert_allclose(grad, np.full(grad.shape, MEAN * factor), rtol=1e-6)


def test_groups_number_is_deprecated_as_in_horovod():
    with pytest.warns(DeprecationWarning, match="replaced by `groups`"):
        (grad,) = reduced([tf.fill([300], RANK + 1.0)], compression="onebit:min_numel=0", num_groups=1)
    np.testing.assert_allclose(grad, np.full(300, MEAN), rtol=1e-6)


def test_a_variable_that_is_not_in_the_loss_has_no_gradient():
    network = Network()
    unused = tf.Variable(tf.zeros([5000]))
    for in_graph in (False, True):
        def step(x):
            with tf.GradientTape() as tape:
                loss = network.loss(x)
            return hvd.DistributedGradientTape(tape, compression=TOPK).gradient(loss, [network.variables[0], unused, network.variables[1]])

        grads = (tf.function(step) if in_graph else step)(tf.constant(batch(0)))
        assert grads[1] is None
        assert_same_everywhere(grads[0])
        assert_same_everywhere(grads[2])


@pytest.mark.parametrize("compression, in_graph", [
    *((spec, in_graph) for spec in ("none", TOPK, "qsgd:min_numel=0,exchange=allgather") for in_graph in (False, True)),
    *(pytest.param(spec, False, marks=pytest.mark.skipif(WORLD > 2, reason="the launch with two workers runs this")) for spec in (
        "randomk:min_numel=0", "powersgd:min_numel=0", f"{TOPK},momentum=0.9", f"{TOPK},memory=ef21"))])
def test_a_gradient_that_is_missing_on_some_workers_counts_as_0(compression, in_graph):
    """In the first step and later, and one that no worker had before; in graphs that is then on all of them."""
    everyone, last = set(range(WORLD)), WORLD - 1
    present = [{"a": everyone, "b": {0}}, {"a": everyone, "b": {last}}, {"a": {last}, "b": everyone},
               {"a": everyone, "c": everyone if in_graph else {0}}]

    def run(given_as_zeros):
        variables = {name: tf.Variable(tf.zeros([40, 30]), name=name) for name in "abcd"}
        state, known, found = get_compressor(compression).bind(list(variables.values())), set(), []

        def gradients(x, weights):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.zeros([]), *(tf.reduce_sum(variables[name] * x) * weight for name, weight in weights
                                                 if given_as_zeros or weight)])
            return hvd.DistributedGradientTape(tape, compression=state).gradient(loss, list(variables.values()))

        call = tf.function(gradients) if in_graph else gradients
        for step, workers in enumerate(present):
            known |= workers.keys()
            x = tf.constant(np.random.default_rng([step, RANK]).normal(size=(40, 30)).astype(np.float32))
            found.append(call(x, tuple((name, float(RANK in workers.get(name, ()))) for name in sorted(known))))
            assert [grad is not None for grad in found[-1]] == [name in known for name in "abcd"]
        return [grad for grads in found for grad in grads if grad is not None]

    for grad, expected in zip(run(False), run(True), strict=True):
        np.testing.assert_array_equal(grad, expected)
        assert_same_everywhere(grad)


@pytest.mark.parametrize("compression", ["none", "onebit:block_size=64,min_numel=0,exchange=allgather"])
def test_a_sparse_gradient_that_is_missing_on_some_workers_has_no_rows(compression):
    table, other = tf.Variable(tf.zeros([6, 320]), name="table"), tf.Variable(tf.zeros([3]))
    for step in range(3):
        with tf.GradientTape() as tape:
            taken = tf.reduce_sum(tf.gather(table, [1, 4])) * WORLD if RANK == step % WORLD else 0.0
            loss = tf.reduce_sum(other) + taken
        grad, _ = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [table, other])
        np.testing.assert_allclose(tf.convert_to_tensor(grad)[:, 0], [0, 1, 0, 0, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_sparse_gradients(op, in_graph):
    half = tf.Variable(tf.zeros([6, 3], tf.bfloat16))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(half, [0, RANK]))
    (grad,) = hvd.DistributedGradientTape(tape, op=op).gradient(loss, [half])
    assert grad.dtype == tf.bfloat16 and tf.convert_to_tensor(grad)[0, 0] == (WORLD + 1) / (WORLD if op == hvd.Average else 1)
    onebit = "onebit:block_size=64,min_numel=0,exchange=allgather"
    table = tf.Variable(tf.zeros([6, 320]), name="table")
    rows = {0: [0, 0, 2], 1: [2, 5]}.get(RANK, [1])

    def run(**how):
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows) * (RANK + 1.0))
            return hvd.DistributedGradientTape(tape, op=op, **how).gradient(loss, table)

        return (tf.function(step) if in_graph else step)()

    expected = sum(np.eye(6)[r].sum(0) * (k + 1.0) for k, r in enumerate([{0: [0, 0, 2], 1: [2, 5]}.get(k, [1]) for k in range(WORLD)]))
    expected = np.repeat(expected[:, None], 320, 1) / (WORLD if op == hvd.Average else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for compression in ("none", onebit):
            grad = run(compression=compression)
            assert isinstance(grad, tf.IndexedSlices)
            np.testing.assert_allclose(tf.convert_to_tensor(grad), expected, rtol=1e-6)
    dense = run(compression=onebit, sparse_as_dense=True)
    np.testing.assert_allclose(dense, expected, rtol=1e-6)
    states = vars(table)["_hvd_quant_states"].values()
    kinds = [list(state.stats()["exchanges"]) for state in states]
    assert kinds == [["sparse"], ["allgather"]]
    assert not isinstance(run(compression="none:momentum=0.5"), tf.IndexedSlices)  # momentum goes on in all rows


def test_a_tape_that_never_averages_what_differs_says_so_once():
    v, warned = tf.Variable(tf.zeros(300)), []
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * (RANK + 1.0))
        tape = hvd.DistributedGradientTape(tape, compression="topk:min_numel=0,average_every=7")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tape.gradient(loss, [v])
        warned.append([str(w.message) for w in caught if "call hvd.average_parameters(variables) every 7 steps" in str(w.message)])
    assert list(map(len, warned)) == [1, 0]


def test_warm_up_is_dense_and_then_compressed():
    network = Network()
    state = hvd.Compression.topk(ratio=0.1, min_numel=0, warmup=3, exchange="allgather").bind(network.variables)
    train(network, range(3), compression=state)
    assert list(state.stats()["exchanges"]) == ["dense"]
    assert all(not np.any(s["state"]["residual"]) for s in state.state_dict()["tensors"].values())
    train(network, range(3, 5), compression=state)
    assert list(state.stats()["exchanges"]) == ["allgather"]
    assert_same_everywhere(network.flat())


def test_what_the_exchanges_cost():
    network = Network()
    state = hvd.Compression.topk(ratio=0.1, min_numel=0, exchange="allgather").bind(network.variables)
    train(network, range(10), compression=state)
    stats = state.stats()
    entries = sum(v.shape.num_elements() for v in network.variables)
    payloads = sum(state.slot(v).compressor.payload_bytes(state.slot(v).info) for v in network.variables)
    assert stats["steps"] == 10
    assert stats["dense_bytes"] == round(10 * 2 * 4 * entries * (WORLD - 1) / WORLD)
    assert stats["wire_bytes"] == 10 * payloads * (WORLD - 1)
    assert stats["compression_ratio"] == pytest.approx(stats["dense_bytes"] / stats["wire_bytes"], rel=1e-4)
    for what in ("encode", "wait", "decode"):
        assert 0 < stats[f"{what}_seconds"] < 60


def test_patterns_choose_by_path_and_a_misspelt_one_is_told():
    network = Network()
    with pytest.warns(UserWarning, match="the pattern 'decoder.*' in compression= matches no variable; the names are 0/kernel"):
        train(network, range(2), compression={"decoder.*": "onebit", "0/*": TOPK, "*/kernel": "fp16"})
    (state,) = vars(network.variables[0])["_hvd_quant_states"].values()
    assert state.stats()["exchanges"] == {"allgather": ["0/kernel", "0/bias"], "allreduce": ["1/kernel"], "dense": ["1/bias"]}


def test_any_class_in_horovods_style_works():
    import horovod.tensorflow as stock

    @dataclasses.dataclass
    class Halved:  # which can't be hashed
        def compress(self, tensor):
            return tensor / 2, None

        def decompress(self, tensor, ctx):
            return tensor * 2

    for style in (stock.Compression.none, stock.Compression.fp16, Halved()):
        (grad,) = reduced([tf.fill([300], RANK + 1.0)], compression=style)
        np.testing.assert_allclose(grad, np.full(300, MEAN), rtol=1e-3)


def test_keras_variables_and_structures_of_sources():
    a, b = keras.Variable(np.zeros(300, np.float32), name="a"), keras.Variable(np.zeros((3, 4), np.float32), name="b")
    for run in (lambda f: f, tf.function):
        def step():
            with tf.GradientTape() as tape:
                loss = (RANK + 1) * (tf.reduce_sum(a.value) + 2 * tf.reduce_sum(b.value))
            return hvd.DistributedGradientTape(tape, compression="onebit:block_size=64,min_numel=0").gradient(loss, {"a": a, "rest": [b]})

        grads = run(step)()
        np.testing.assert_allclose(grads["a"], np.full(300, MEAN), rtol=1e-6)
        np.testing.assert_allclose(grads["rest"][0], np.full((3, 4), 2 * MEAN), rtol=1e-6)


def test_a_tape_around_the_block_a_persistent_one_and_one_inside_it():
    v = tf.Variable(tf.zeros([10]))
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss, other = tf.reduce_sum(v) * (RANK + 1), tf.reduce_sum(v * v)
    for _ in range(2):
        np.testing.assert_allclose(tape.gradient(loss, v), np.full(10, MEAN), rtol=1e-6)
    np.testing.assert_array_equal(tape.gradient(other, v), np.zeros(10))
    with tf.GradientTape() as plain:
        inside = hvd.DistributedGradientTape(plain)
        loss = tf.reduce_sum(v) * (RANK + 1)
    np.testing.assert_allclose(inside.gradient(loss, v), np.full(10, MEAN), rtol=1e-6)
    assert isinstance(inside, tf.GradientTape)


def test_two_tapes_on_the_same_variables_in_one_graph():
    """Their exchanges follow each other, and the second goes on with the residual that the first has left."""
    network, one = Network(), Network()

    @tf.function
    def both(x, y):
        grads = []
        for batch_of_tape in (x, y):
            with tf.GradientTape() as tape:
                loss = network.loss(batch_of_tape)
            grads.append(hvd.DistributedGradientTape(tape, compression=TOPK).gradient(loss, network.variables))
        return grads

    together = both(tf.constant(batch(0)), tf.constant(batch(1)))
    apart = [train(one, [i], compression=TOPK, lr=0.0)[1] for i in range(2)]
    for grads, expected in zip(together, apart):
        for grad, value in zip(grads, expected):
            np.testing.assert_allclose(grad, value, atol=1e-6)


@pytest.mark.parametrize("compression", ["none", "onebit:min_numel=0", "topk:ratio=0.1,min_numel=0,warmup=2"])
def test_a_generator_and_a_discriminator_with_the_same_names(compression):
    networks, alone = [Network(0), Network(1)], [Network(0), Network(1)]

    def step_of(network):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = network.loss(x)
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            for v, g in zip(network.variables, tape.gradient(loss, network.variables)):
                v.assign_sub(0.1 * g)

        return step

    steps = [step_of(network) for network in networks]

    @tf.function
    def both(x):
        for step in steps:
            step(x)

    steps[0](tf.constant(batch(0)))  # the first is traced on its own, both then run in one graph
    for i in range(1, 5):
        both(tf.constant(batch(i)))
    train(alone[0], range(5), compression=compression)
    train(alone[1], range(1, 5), compression=compression)
    for network, expected in zip(networks, alone):
        np.testing.assert_allclose(network.flat(), expected.flat(), atol=1e-6)
        assert_same_everywhere(network.flat())


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16:min_numel=0", "onebit:min_numel=0,memory=none", TOPK])
def test_workers_in_opposite_branches_whose_other_gradient_is_a_constant(compression):
    """The graph optimiser must not compute the exchange of a constant in advance, on one worker alone."""
    a, b = tf.Variable(tf.ones([40, 30])), tf.Variable(tf.ones([40, 30]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((a if RANK == 0 else b) * x)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [a, b], unconnected_gradients=tf.UnconnectedGradients.ZERO)

    for i in range(1, 4):
        grads = step(tf.fill([40, 30], float(i)))
        for grad, workers in zip(grads, (1, WORLD - 1)):
            assert_same_everywhere(grad)
            if compression != TOPK:
                np.testing.assert_allclose(grad, np.full((40, 30), i * workers / WORLD), rtol=1e-3)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_block_whose_activations_are_computed_again(in_graph):
    computed = []

    class Again(Network):
        def loss(self, x):
            w0, b0, w1, b1 = self.variables

            @tf.recompute_grad
            def block(x):
                computed.append(1)
                return tf.nn.relu(x @ w0 + b0)

            return tf.reduce_mean((block(x) @ w1 + b1 - x) ** 2)

    plain, again = Network(), Again()
    for network in (plain, again):
        train(network, range(3), in_graph=in_graph, compression=TOPK)
    assert len(computed) == (2 if in_graph else 6)
    np.testing.assert_allclose(again.flat(), plain.flat(), atol=1e-6)
    assert_same_everywhere(again.flat())


def test_a_worker_whose_batch_has_another_shape_traces_again_alone():
    network = Network()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = network.loss(x)
        tape = hvd.DistributedGradientTape(tape, compression=TOPK)
        for v, g in zip(network.variables, tape.gradient(loss, network.variables)):
            v.assign_sub(0.1 * g)

    @tf.function
    def three(x):
        for rows in (8, 8, 5 if RANK == 0 else 8):
            step(x[:rows])

    for i in range(2):
        three(tf.constant(batch(i)))
    assert_same_everywhere(network.flat())


def test_a_variable_that_is_among_the_sources_twice_is_exchanged_once():
    v = tf.Variable(tf.zeros([40, 30]))
    state = hvd.Compression.topk(ratio=0.1, min_numel=0).bind([v, v])
    x = tf.constant(np.random.default_rng(RANK).normal(size=(40, 30)).astype(np.float32))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v * x)
    first, second = hvd.DistributedGradientTape(tape, compression=state).gradient(loss, [v, v])
    np.testing.assert_array_equal(first, second)
    assert state.stats()["steps"] == 1 and list(state.slots) == ["Variable"]


def test_other_sources_go_on_with_the_residuals_of_before():
    """A layer that is frozen, a head that is replaced: what is kept belongs to the variable."""
    network, straight = Network(), Network()
    train(straight, range(4), compression=TOPK)
    kernel = network.variables[0]
    train(network, range(2), compression=TOPK)
    slots = vars(kernel)["_hvd_quant_slots"]
    (slot,) = slots.values()
    before = slot.state["residual"].numpy()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(kernel) * 0.0
    hvd.DistributedGradientTape(tape, compression=TOPK).gradient(loss, [kernel])
    assert list(slots.values()) == [slot] and int(slot.step) == 3
    assert np.abs(before).sum() > np.abs(slot.state["residual"].numpy()).sum() > 0  # some of it was sent


def test_tensorflow_may_run_functions_eagerly():
    graph, eager = Network(), Network()
    train(graph, range(3), compression=TOPK)
    tf.config.run_functions_eagerly(True)
    try:
        train(eager, range(3), compression=TOPK)
    finally:
        tf.config.run_functions_eagerly(False)
    np.testing.assert_allclose(eager.flat(), graph.flat(), atol=1e-6)


def test_one_compressor_object_for_two_models_keeps_two_states():
    compressor, networks = hvd.Compression.topk(ratio=0.1, min_numel=0), [Network(0), Network(1)]
    for network in networks:
        train(network, range(3), compression=compressor)
    alone = Network(1)
    train(alone, range(3), compression=TOPK)
    np.testing.assert_array_equal(networks[1].flat(), alone.flat())


def test_two_tapes_for_parts_of_what_a_compressor_is_bound_to():
    """They share its state and its statistics, and are together as one tape."""
    whole, parts = Network(), Network()
    state = get_compressor(TOPK).bind(parts.variables)

    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as plain:
            loss = parts.loss(x)
        tapes, sources = [hvd.DistributedGradientTape(plain, compression=state) for _ in range(2)], parts.variables
        grads = [g for tape, part in zip(tapes, (sources[:2], sources[2:])) for g in tape.gradient(loss, part)]
        for v, g in zip(sources, grads):
            v.assign_sub(0.1 * g)

    for i in range(4):
        step(tf.constant(batch(i)))
    train(whole, range(4), compression=TOPK)
    np.testing.assert_allclose(parts.flat(), whole.flat(), atol=1e-6)
    assert_same_everywhere(parts.flat())
    stats = state.stats()
    assert stats["steps"] == 4 and sum(map(len, stats["exchanges"].values())) == 4


def test_state_lives_as_long_as_the_variables():
    import gc
    import weakref

    gone = []
    for _ in range(4):
        network = Network()
        train(network, range(2), compression=TOPK)
        (state,) = vars(network.variables[0])["_hvd_quant_states"].values()
        gone.append(weakref.ref(state))
        del network, state
    gc.collect()
    assert sum(ref() is not None for ref in gone) <= 1  # TensorFlow may hold the last


def test_local_sources():
    for scale in (True, False):
        v, w = tf.Variable(tf.zeros([10])), tf.Variable(tf.zeros([10]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v + 2 * w) * (RANK + 1.0)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(w)
        local, shared = tape.get_local_and_global_gradients(loss, [v, w])
        assert local[0][0] is w and shared[0][0] is v
        np.testing.assert_allclose(shared[0][1], np.full(10, MEAN), rtol=1e-6)
        np.testing.assert_allclose(local[0][1], np.full(10, 2 * (RANK + 1) / (WORLD if scale else 1)), rtol=1e-6)


def test_local_layers():
    layers = [keras.layers.Dense(3), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones([2, 4]))) * (RANK + 1.0)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layers[1], compression=TOPK)
    grads = tape.gradient(loss, model.trainable_variables)
    np.testing.assert_allclose(grads[3], np.full(2, 2 * (RANK + 1) / WORLD), rtol=1e-6)
    assert_same_everywhere(grads[0])
    with pytest.raises(ValueError, match="local_layers must be Keras layers; it holds 3"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def test_a_process_set():
    if WORLD == 2:
        pytest.skip("of two workers, both are the global process set; the launch with four runs this")
    half = hvd.add_process_set([1, 3])
    try:
        network = Network()
        train(network, range(4), compression=TOPK, process_set=half)
        rows = on_all(network.flat())
        np.testing.assert_array_equal(rows[1], rows[3])
        assert not np.array_equal(rows[0], rows[1])
        (grad,) = reduced([tf.fill([300], RANK + 1.0)], compression="onebit:block_size=64,min_numel=0", process_set=half)
        np.testing.assert_allclose(grad, np.full(300, 3.0 if half.included() else RANK + 1.0), rtol=1e-6)
        state = hvd.Compression.topk().bind(network.variables, half).state_dict()
        assert state["rank"] == ({1: 0, 3: 1}[RANK] if half.included() else None)
    finally:
        hvd.remove_process_set(half)


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16:exchange=allgather", TOPK,
                                         "onebit:min_numel=0,warmup=2,exchange=allgather"])
def test_a_number_of_workers_that_is_known_when_a_step_runs(compression, monkeypatch):
    """As in elastic jobs, whose graphs outlive a change of it."""
    fixed, elastic = Network(), Network()
    train(fixed, range(4), compression=compression)
    monkeypatch.setattr("hvd_quant.tensorflow.network.ELASTIC", True)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    train(elastic, range(4), compression=State(compression, elastic.variables, hvd.global_process_set, "elastic", synced=True))
    np.testing.assert_array_equal(fixed.flat(), elastic.flat())


def test_what_can_not_work_is_refused():
    v = tf.Variable(tf.zeros([10]))

    @tf.function(jit_compile=True)
    def compiled():
        return reduced([tf.ones([10])], [v], compression=TOPK)

    with pytest.raises(ValueError, match="XLA can't contain Horovod's collectives: pass jit_compile=False"):
        compiled()
    with pytest.raises(ValueError, match="op=.* can't be combined with compression=onebit"):
        reduced([tf.ones([5000])], compression="onebit", op=hvd.Adasum)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported with op != Average"):
        reduced([tf.ones([10])], op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups is 0; give a positive number"):
        reduced([tf.ones([10])], groups=0)
    with pytest.raises(TypeError, match="variable Variable is complex64; gradients of float32.* can be compressed: give it 'none'"):
        hvd.Compression.topk(min_numel=0).bind([tf.Variable(tf.zeros([10], tf.complex64))])
    with pytest.raises(ValueError, match="there is no compressor 'topkk', did you mean 'topk'"):
        reduced([tf.ones([10])], compression="topkk")
    with pytest.raises(TypeError, match="compression=3 is not accepted: give a compressor"):
        reduced([tf.ones([10])], compression=3)
    for dtype in (tf.int64, tf.bool, tf.complex64):
        with pytest.raises(TypeError, match=f"gradient of Variable is {dtype.name}; those of float32.* can be exchanged: cast it"):
            Reducer("none", [v], name="test").reduce([tf.zeros([10], dtype)], [v])
    with pytest.raises(ValueError, match="is none of the 1 variables that compression state was made for"):
        reduced([tf.ones([10])], compression=hvd.Compression.topk().bind([v]))
    assert hvd.DistributedGradientTape(tf.GradientTape()).compression_stats()["wire_bytes"] == 0


def test_adasum_with_uncompressed_and_fp16_gradients():
    if not hvd.mpi_enabled():
        pytest.skip("Horovod has Adasum on MPI and NCCL only")
    for compression in ("none", "fp16"):
        network = Network()
        train(network, range(2), compression=compression, op=hvd.Adasum)
        assert_same_everywhere(network.flat())


def test_a_large_tensor_and_many_small_ones():
    weights = [tf.Variable(tf.zeros([1 << 21]))] + [tf.Variable(tf.zeros([100])) for _ in range(60)]
    reducer = Reducer("topk:ratio=0.01,min_numel=0", weights, name="test")
    random = np.random.default_rng(RANK)
    for _ in range(3):
        for grad in reducer.reduce([tf.constant(random.normal(size=v.shape).astype(np.float32)) for v in weights], weights):
            assert_same_everywhere(grad)
