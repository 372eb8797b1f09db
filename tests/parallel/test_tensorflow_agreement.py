"""Workers that are about to train different things, and workers whose variables have come apart, with a tape."""

import horovod.tensorflow as horovod
import numpy as np
import pytest
import tensorflow as tf

import hvd_quant
import hvd_quant.tensorflow as hvd
from tests.parallel.tensorflow_workers import RANK, TOPK, WORLD, Network, assert_same_everywhere, batch, train

ODD = RANK == WORLD - 1
MOST = "rank 0" if WORLD == 2 else f"ranks {', '.join(map(str, range(WORLD - 2)))} and {WORLD - 2}"


def variables(*named, dtype=tf.float32):
    return [tf.Variable(tf.ones(shape, dtype), name=name) for name, shape in named]


KERNEL, BIAS = ("dense/kernel", (30, 40)), ("dense/bias", (40,))
FIRST = "parameter 0 = dense/kernel float32 [30, 40] compressed with " + hvd_quant.get_compressor(TOPK).spec
CASES = {  # what the last worker does, and how most and this one are told
    "spec": ({"compression": "onebit"}, FIRST, "parameter 0 = dense/kernel float32 [30, 40] compressed with onebit"),
    "dense": ({"compression": "none"}, FIRST, "uncompressed"),
    "in Horovod's style": ({"compression": horovod.Compression.fp16}, FIRST, "compressed with FP16Compressor"),
    "inside hosts": ({"compression": TOPK + ",hierarchical=true"}, FIRST, "hierarchical=true"),
    "type": ({"dtype": tf.float16}, FIRST, "parameter 0 = dense/kernel float16 [30, 40]"),
    "shape": ({"sources": (("dense/kernel", (30, 41)), BIAS)}, FIRST, "parameter 0 = dense/kernel float32 [30, 41]"),
    "name": ({"sources": (("dense/gamma", (30, 40)), BIAS)}, FIRST, "parameter 0 = dense/gamma"),
    "more": ({"sources": (KERNEL, BIAS, ("out/bias", (3,)))}, "no parameter 2", "parameter 2 = out/bias float32 [3]"),
    "fewer": ({"sources": (KERNEL,)}, "parameter 1 = dense/bias float32 [40]", "no parameter 1"),
    "order": ({"sources": (BIAS, KERNEL)}, FIRST, "parameter 0 = dense/bias float32 [40]"),
    "sparse": ({"sparse": 0}, "parameter 0 = dense/kernel with a dense gradient", "dense/kernel with a sparse gradient with rows in int32"),
    "bucket_bytes": ({"bucket_bytes": 1000}, "bucket_bytes = 26214400", "bucket_bytes = 1000"),
    "op": ({"op": hvd.Sum}, "op = Average", "op = Sum"),
    "predivide": ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor = 1.0", "gradient_predivide_factor = 2.0"),
    "groups": ({"groups": 2}, "groups = None", "groups = 2"),
    "sparse_as_dense": ({"sparse_as_dense": True}, "sparse_as_dense = False", "sparse_as_dense = True"),
    "verify_every": ({"verify_every": 5}, "verify_every = None", "verify_every = 5"),
}


def gradients(sources, dtype, compression, sparse=None, **how):
    """Of a loss that takes all variables, or one by some of its rows."""
    given = variables(*sources, dtype=dtype)
    with tf.GradientTape() as tape:
        taken = [tf.gather(v, [0, 2]) if i == sparse else v for i, v in enumerate(given)]
        loss = tf.add_n([tf.reduce_sum(v) for v in taken])
    return hvd.DistributedGradientTape(tape, compression=compression, **how).gradient(loss, given)


def assert_told(call, most, odd):
    """All workers raise the same sentence, and nothing is in flight then."""
    hvd.allgather_object(0, name="start")
    with pytest.raises(ValueError) as caught:
        call()
    sentence = next(line for line in str(caught.value).splitlines() if "workers differ" in line).strip()
    assert set(hvd.allgather_object(sentence, name="sentence")) == {sentence}
    assert f"workers differ: {MOST} ha" in sentence and f"; rank {WORLD - 1} has " in sentence
    told = sentence.split("; rank")
    assert most in told[0] and odd in told[1]


@pytest.mark.parametrize("other, most, odd", CASES.values(), ids=list(CASES))
def test_what_differs_is_told_by_all_before_the_first_exchange(other, most, odd):
    how = {"sources": (KERNEL, BIAS), "dtype": tf.float32, "compression": TOPK, **(other if ODD else {})}
    assert_told(lambda: gradients(**how), most, odd)


def test_what_differs_is_told_where_a_graph_is_made():
    given = variables(KERNEL, BIAS)

    @tf.function
    def call():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) for v in given])
        return hvd.DistributedGradientTape(tape, compression="fp16" if ODD else TOPK).gradient(loss, given)

    assert_told(call, FIRST, "parameter 0 = dense/kernel float32 [30, 40] compressed with fp16")


def test_what_differs_is_told_in_horovods_tape():
    given = variables(KERNEL, BIAS)
    bound = hvd.Compression.topk(ratio=0.02 if ODD else 0.03, min_numel=0).bind(given)

    def call():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) for v in given])
        return horovod.DistributedGradientTape(tape, compression=bound).gradient(loss, given)

    assert_told(call, "ratio=0.03", "ratio=0.02")


def test_what_differs_is_told_in_graphs_of_tensorflow_1():
    def call():
        with tf.Graph().as_default():
            v = tf.compat.v1.get_variable("dense/kernel", (30, 40))
            optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1),
                                                 compression=TOPK, backward_passes_per_step=2 if ODD else 1)
            optimizer.compute_gradients(tf.reduce_sum(v), [v])

    assert_told(call, "backward_passes_per_step = 1", "backward_passes_per_step = 2")


def test_another_version_is_told(monkeypatch):
    monkeypatch.setattr(hvd_quant, "__version__", "9.9" if ODD else "0.1.0")
    assert_told(lambda: gradients((KERNEL, BIAS), tf.float32, TOPK), "hvd_quant = 0.1.0", "hvd_quant = 9.9: install the same")


def test_optimizers_made_on_some_workers_only_are_told():
    """They count in the names of the collectives."""
    if ODD:
        hvd.Compression.onebit().bind(variables(KERNEL))
    given = variables(KERNEL, BIAS)
    bound = hvd.Compression.onebit().bind(given)

    def call():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) for v in given])
        return hvd.DistributedGradientTape(tape, compression=bound).gradient(loss, given)

    try:
        assert_told(call, "names of the collectives of parameter 0 = bound", "make as many optimizers on all of them, in the same order")
    finally:
        if not ODD:  # so that the next tests count alike
            hvd.Compression.onebit().bind(variables(KERNEL))


def test_names_of_layers_may_differ():
    """Keras counts layers as a process makes them."""
    given = variables((f"dense_{RANK}/kernel", (30, 40)), (f"dense_{RANK}/bias", (40,)))
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in given])
    hvd.DistributedGradientTape(tape, compression=TOPK).gradient(loss, given)


# ------------------------------------------------------------------------------------------------------------ verify_every

@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("compression", ["none", TOPK])
def test_a_variable_that_comes_apart_is_named_by_all(in_graph, compression):
    network = Network()

    def step_on(x):
        with tf.GradientTape() as tape:
            loss = network.loss(x)
        grads = hvd.DistributedGradientTape(tape, compression=compression, verify_every=3).gradient(loss, network.variables)
        for v, g in zip(network.variables, grads):
            v.assign_sub(0.1 * g)

    run = tf.function(step_on) if in_graph else step_on
    for step in range(7):
        if step == 4 and ODD:
            network.variables[2].assign_add(tf.one_hot([3] * 40, 30) * 1e-6)
        if step < 6:
            run(tf.constant(batch(step)))
    with pytest.raises(tf.errors.UnknownError) as caught:
        run(tf.constant(batch(6)))
    sentence = next(line for line in str(caught.value).splitlines() if "parameters differ" in line)
    sentence = sentence[sentence.index("parameters differ"):]
    assert sentence.startswith(f"parameters differ between workers after 6 steps, 1 of 4: 1/kernel is one on {MOST}, another on rank {WORLD - 1}. ")
    assert len(set(hvd.allgather_object(sentence[:150], name="sentence"))) == 1


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_there_is_no_false_alarm(in_graph):
    network = Network()
    network.variables[0].assign(tf.where(network.variables[0] > 0.4, np.nan, network.variables[0]))
    train(network, range(7), in_graph=in_graph, compression="none", verify_every=1)
    assert_same_everywhere(network.flat())


def test_variables_of_tensorflow_1_are_compared():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        v = tf.compat.v1.get_variable("kernel", (30, 40), initializer=tf.compat.v1.ones_initializer())
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), compression=TOPK, verify_every=2)
        train_op = optimizer.apply_gradients(optimizer.compute_gradients(tf.reduce_sum(v * v) * (RANK + 1), [v]))
        apart = v.assign_add(tf.ones_like(v) * (RANK + 1))
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(5):
            session.run(train_op)
        session.run(apart)
        session.run(train_op)
        with pytest.raises(tf.errors.UnknownError, match="parameters differ between workers after 6 steps, 1 of 1: kernel is one on rank 0"):
            session.run(train_op)
