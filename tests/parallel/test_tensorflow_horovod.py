"""Horovod's stock tape with our compressors, and Horovod's own API through our import."""

import warnings

import horovod.tensorflow as stock
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
from hvd_quant import Compression, get_compressor
from tests.conftest import CODECS
from tests.parallel.tensorflow_workers import RANK, WORLD, Network, assert_same_everywhere, batch, train


@pytest.mark.parametrize("compressor, how", [
    *((compressor, {}) for compressor in CODECS.values()),
    *((compressor, how) for compressor in (Compression.fp16, Compression.topk(min_numel=0))
      for how in ({"op": hvd.Sum}, {"gradient_predivide_factor": 3.0}, {"groups": 2}))], ids=str)
def test_the_stock_tape_gives_the_same_numbers(compressor, how):
    ours, theirs = Network(), Network()
    train(ours, range(4), compression=compressor, **how)
    bound = compressor.bind(theirs.variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = theirs.loss(x)
        tape = stock.DistributedGradientTape(tape, compression=bound, **how)
        for v, g in zip(theirs.variables, tape.gradient(loss, theirs.variables)):
            v.assign_sub(0.1 * g)

    for i in range(4):
        step(tf.constant(batch(i)))
    np.testing.assert_allclose(ours.flat(), theirs.flat(), rtol=1e-6, atol=1e-6)
    assert_same_everywhere(theirs.flat())


def test_the_stock_tape_eagerly_and_with_a_variable_that_is_not_in_the_loss():
    network, unused = Network(), tf.Variable(tf.zeros([77]))
    sources = [network.variables[0], unused, *network.variables[1:]]
    bound = Compression.topk(ratio=0.1, min_numel=0).bind(sources)
    for i in range(3):
        with tf.GradientTape() as tape:
            loss = network.loss(tf.constant(batch(i)))
        grads = stock.DistributedGradientTape(tape, compression=bound).gradient(loss, sources)
        assert grads[1] is None
        for v, g in zip(sources, grads):
            if g is not None:
                v.assign_sub(0.1 * g)
    assert_same_everywhere(network.flat())
    stats = bound.stats()
    assert stats["steps"] == 3 and stats["exchanges"] == {"allgather": ["0/kernel", "0/bias", "1/kernel", "1/bias"]}


@pytest.mark.parametrize("op, factor", [(stock.Average, 1), (stock.Sum, (WORLD + 2) / WORLD)])
def test_the_states_of_another_number_of_workers_are_shared_out_by_the_op_that_is_told(op, factor):
    v = tf.Variable(tf.zeros([300]), name="v")
    bound = Compression.topk(min_numel=0).bind([v])
    own, share = bound.state_dict(), lambda: bound.state_dict()["tensors"]["v"]["state"]["residual"]
    states = [{**own, "rank": rank, "world": WORLD + 2, "tensors": {"v": {**own["tensors"]["v"], "state": {
        "residual": np.full(300, 2.0 * rank, np.float32)}}}} for rank in range(WORLD + 2)]
    with pytest.raises(ValueError, match="averaged or summed: say load_state_dict"):
        bound.load_state_dict(states)
    assert not share().any()
    bound.load_state_dict(states, op=op)
    np.testing.assert_allclose(share(), (WORLD + 1) * factor, rtol=1e-6)


def test_join_is_refused_where_gradients_are_compressed(monkeypatch):
    monkeypatch.setattr("hvd_quant.tensorflow.state._slots", set())  # as if there had been no tests before
    v = tf.Variable(tf.zeros([300]))
    bound = [Compression.none.bind([v])]
    hvd.join()
    bound.append(Compression.topk(min_numel=0).bind([v]))
    with pytest.raises(ValueError, match=r"hvd.join\(\) can't be combined with compressed exchanges: give all workers the same number"):
        hvd.join()


def test_what_is_not_bound_is_told():
    network = Network()
    with tf.GradientTape() as tape:
        loss = network.loss(tf.constant(batch(0)))
    tape = stock.DistributedGradientTape(tape, compression=Compression.topk(min_numel=0))
    with pytest.raises(ValueError, match=r"topk:min_numel=0 keeps state by parameter.*compressor.bind\(model.trainable_variables"):
        tape.gradient(loss, network.variables)
    bound = Compression.onebit(min_numel=0).bind(network.variables[:1])
    with tf.GradientTape() as tape:
        loss = network.loss(tf.constant(batch(0)))
    with pytest.raises(ValueError, match=r"shape \(40,\) is not the gradient of a variable that onebit:min_numel=0 was bound to"):
        stock.DistributedGradientTape(tape, compression=bound).gradient(loss, network.variables)
    with pytest.raises(ValueError, match="bind takes variables such as model.trainable_variables.*given a .*EagerTensor"):
        Compression.onebit().bind([tf.zeros([3])])
    with pytest.raises(ValueError, match="for gradients of Horovod's tape or optimizer"):
        hvd.allreduce(tf.zeros([30, 40]), compression=bound)


def test_ready_made_compressors_in_horovods_functions():
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        got = hvd.allreduce(tf.fill([5], 40000.0), name="a", compression=compression)
        np.testing.assert_array_equal(got, np.full(5, 40000.0))
        total = hvd.allreduce(tf.fill([5], 2.0), name="b", compression=compression, op=hvd.Sum)
        np.testing.assert_array_equal(total, np.full(5, 2.0 * WORLD))
        assert hvd.allreduce(tf.constant([3]), name="c", compression=compression, op=hvd.Sum).numpy() == 3 * WORLD
    with pytest.raises(ValueError, match="bf16 exchanges its payloads by the parameters' names"):
        hvd.allreduce(tf.zeros([3]), name="d", compression=hvd.Compression.bf16)


OURS = {"Compression", "DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape", "SyncBatchNormalization",
        "broadcast_global_variables", "broadcast_variables", "elastic", "functions", "join", "keras", "sync_batch_norm"}


def test_the_whole_public_api_of_horovod_is_there():
    for name in dir(stock):
        assert hasattr(hvd, name), name
        if name not in OURS and not name.startswith("__"):
            assert getattr(hvd, name) is getattr(stock, name), name


def test_submodules_of_horovod_are_found_by_name():
    import hvd_quant.tensorflow.mpi_ops
    from hvd_quant.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

    import hvd_quant.keras
    import hvd_quant.tensorflow.keras.callbacks

    assert hvd_quant.tensorflow.keras.callbacks is hvd_quant.keras.callbacks
    assert hvd_quant.tensorflow.keras is hvd_quant.keras
    assert hvd_quant.tensorflow.mpi_ops is stock.mpi_ops
    assert TensorFlowState is stock.elastic.TensorFlowState
    assert hvd.elastic.TensorFlowKerasState is TensorFlowKerasState is not stock.elastic.TensorFlowKerasState


@pytest.mark.parametrize("inplace", [False, True])
def test_broadcasting_variables_of_both_kinds(inplace):
    layer = keras.layers.Dense(3, name=f"names_may_differ_{RANK}")
    layer.build((None, 4))
    variables = [tf.Variable(tf.fill([4], float(RANK)), name=f"own_{RANK}"), keras.Variable(np.full(5, RANK, np.float32)), *layer.variables]
    layer.kernel.assign(np.full((4, 3), RANK))
    hvd.broadcast_variables(variables, root_rank=WORLD - 1, inplace=inplace)
    for v in variables[:3]:
        np.testing.assert_array_equal(np.asarray(v), np.full(v.shape, WORLD - 1))


def test_an_optimizer_of_tensorflow_1_in_a_session_and_eagerly():
    ours = {}
    for compression in ("none", "onebit:block_size=64,min_numel=0"):
        with tf.Graph().as_default():
            w = tf.compat.v1.get_variable("w", initializer=np.zeros(300, np.float32))
            unused = tf.compat.v1.get_variable("unused", initializer=np.zeros(3, np.float32))
            loss = tf.reduce_sum((w - (RANK + 1.0)) ** 2)
            optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), compression=compression)
            train_op = optimizer.minimize(loss, var_list=[w, unused])
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for _ in range(3):
                    session.run(train_op)
                ours[compression] = session.run(w)
        assert_same_everywhere(ours[compression])
        v = tf.Variable(tf.zeros([300]))
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), compression=compression)
        for _ in range(3):
            optimizer.minimize(lambda v=v: tf.reduce_sum((v - (RANK + 1.0)) ** 2), var_list=[v])
        np.testing.assert_allclose(v, ours[compression], rtol=1e-6)
    np.testing.assert_allclose(ours["none"], ours["onebit:block_size=64,min_numel=0"], rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_optimizer_of_tensorflow_1_that_accumulates(momentum):
    spec, expected = f"onebit:block_size=64,min_numel=0,warmup=1,momentum={momentum}", 0.0
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=np.zeros(300, np.float32))
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=3,
                                             compression=spec)
        train_op = optimizer.minimize(tf.reduce_sum(w) * (RANK + 1.0))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(tf.compat.v1.local_variables_initializer())
            velocity = 0.0
            for i in range(7):
                session.run(train_op)
                if i % 3 == 2:
                    velocity = momentum * velocity + 3 * np.mean([r + 1.0 for r in range(WORLD)])
                    expected -= velocity
                np.testing.assert_allclose(session.run(w), np.full(300, expected), rtol=1e-6)


def test_what_an_optimizer_of_tensorflow_1_is_warned_of():
    with pytest.warns(UserWarning, match="MomentumOptimizer has a momentum of its own, and compression=topk:momentum=0.5 adds"):
        hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), compression="topk:momentum=0.5")
    v = tf.Variable(tf.zeros(300))
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), compression="topk:min_numel=0,merge=replace")
    with pytest.warns(UserWarning, match=r"tape or an optimizer of tf.compat.v1.train doesn't do: call .* every 500 steps"):
        optimizer.minimize(lambda: tf.reduce_sum(v), var_list=[v])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer.minimize(lambda: tf.reduce_sum(v), var_list=[v])
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), compression="topk:momentum=0.5")


def test_what_tensorflow_1_keeps_is_each_workers_own_and_carries_on():
    targets = np.random.default_rng(RANK).normal(size=300).astype(np.float32)
    ends = {}
    for compression in ("none", "onebit:min_numel=0"):
        with tf.Graph().as_default():
            w = tf.compat.v1.get_variable("w", initializer=np.zeros(300, np.float32))
            b = tf.compat.v1.get_variable("b", initializer=np.zeros(300, np.float32))
            optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), compression=compression)
            # Two lists of variables, one optimizer.
            ops = [optimizer.minimize(tf.reduce_sum((v - targets) ** 2), var_list=[v]) for v in (w, b)]
            broadcast = hvd.broadcast_global_variables(0)
            residuals = [v for v in tf.compat.v1.global_variables() if v.name.endswith("/residual:0")]
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for step in range(10):
                    session.run(ops)
                    if step == 2 and residuals:
                        before = session.run(residuals[0])
                        session.run(broadcast)
                        np.testing.assert_array_equal(session.run(residuals[0]), before)
                ends[compression] = session.run([w, b])
        assert_same_everywhere(ends[compression][0])
        v = tf.Variable(tf.zeros([300]))
        bound = get_compressor(compression).bind([v])
        for _ in range(10):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((v - targets) ** 2)
            (grad,) = hvd.DistributedGradientTape(tape, compression=bound).gradient(loss, [v])
            v.assign_sub(0.1 * grad)
        for end in ends[compression]:  # so what the residual holds is not lost between two runs of a session
            np.testing.assert_allclose(end, v, atol=1e-5)


def test_adasum_in_tensorflow_1_is_refused_for_what_it_can_not_reduce():
    with pytest.raises(ValueError, match="op=Adasum can't be combined with compression=TopK"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), compression="topk", op=hvd.Adasum)
