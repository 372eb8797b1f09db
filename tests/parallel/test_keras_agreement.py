"""Workers that are about to train different things, and workers whose variables have come apart, in either Keras."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant
import hvd_quant.keras as hvd
from hvd_quant.tensorflow import allgather_object
from tests.parallel.keras_workers import RANK, TOPK, WORLD, assert_same_everywhere, data, fit, flat, keras, network

ODD = RANK == WORLD - 1
MOST = "rank 0" if WORLD == 2 else f"ranks {', '.join(map(str, range(WORLD - 2)))} and {WORLD - 2}"
SGD = keras.optimizers.SGD


def deeper():
    return keras.Sequential([*network().layers, keras.layers.Dense(20)])


FIRST = "compressed with " + hvd_quant.get_compressor(TOPK).spec
CASES = {  # what the last worker does, and how most and this one are told
    "spec": ({"compression": "onebit"}, FIRST, "compressed with onebit"),
    "layers": ({"model": deeper}, "have no parameter 4" if WORLD > 2 else "has no parameter 4", "parameter 4 = "),
    "bucket_bytes": ({"bucket_bytes": 1000}, "bucket_bytes = 26214400", "bucket_bytes = 1000"),
    "op": ({"op": hvd.Sum}, "op = Average", "op = Sum"),
    "passes": ({"backward_passes_per_step": 2}, "backward_passes_per_step = 1", "backward_passes_per_step = 2"),
    "mean of passes": ({"average_aggregated_gradients": True}, "average_aggregated_gradients = False", "average_aggregated_gradients = True"),
    "verify_every": ({"verify_every": 5}, "verify_every = None", "verify_every = 5"),
    "models": ({"wrapper": hvd.ModelAveragingOptimizer, "every": 2}, "backward_passes_per_step = 1", "has no backward_passes_per_step"),
}


def compiled(model=network, wrapper=hvd.DistributedOptimizer, compression=TOPK, **how):
    made = model()
    made.compile(wrapper(SGD(0.1), name="Compared", compression=compression, **how), "mse", jit_compile=False)
    return made


def sentence_of(error, start):
    line = next(line for line in str(error).splitlines() if start in line)
    return line[line.index(start):]


@pytest.mark.parametrize("other, most, odd", CASES.values(), ids=list(CASES))
def test_what_differs_is_told_by_all_before_the_first_exchange(other, most, odd):
    model = compiled(**(other if ODD else {}))
    with pytest.raises(ValueError) as caught:
        fit(model)
    told = sentence_of(caught.value, "workers differ")
    assert len(set(allgather_object(told, name="sentence"))) == 1
    first, _, last = told.partition(f"; rank {WORLD - 1} ")
    assert first.startswith(f"workers differ: {MOST} ha") and most in first and odd in "has " + last.removeprefix("has ")


def test_intervals_that_differ_are_told():
    model = compiled(wrapper=hvd.ModelAveragingOptimizer, every=2 if ODD else 3)
    with pytest.raises(ValueError, match=f"workers differ: {MOST} ha.* every = 3; rank {WORLD - 1} has every = 2"):
        fit(model)


@pytest.mark.parametrize("how", [{}, {"compression": "none"}, {"backward_passes_per_step": 2}], ids=["topk", "none", "passes"])
def test_a_variable_that_comes_apart_is_named_by_all(how):
    model = compiled(verify_every=2, **how)
    fit(model, batches=4)
    if ODD:
        model.layers[1].bias.assign_add(tf.one_hot(3, 20) * 1e-6)
    with pytest.raises(tf.errors.OpError) as caught:
        fit(model, batches=8)
    told = sentence_of(caught.value, "parameters differ")
    after = 2 if how.get("backward_passes_per_step") else 4
    assert told.startswith(f"parameters differ between workers after {after} steps, 1 of 4: ")
    assert f"bias is one on {MOST}, another on rank {WORLD - 1}." in told


@pytest.mark.parametrize("compression, apart", [(TOPK, 0), (TOPK + ",merge=replace,average_every=2", 0), ("none", 1)])
def test_there_is_no_false_alarm(compression, apart):
    """Neither where a merge lets variables differ between averagings, nor where a callback broadcasts them after the first step."""
    model = compiled(model=lambda: network(seed=apart * RANK), compression=compression, verify_every=1)
    fit(model, batches=6, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("compression", ["none", "onebit:min_numel=0"])
def test_a_process_set_of_two_of_four(compression):
    """Only they exchange, and means are theirs."""
    if WORLD == 2:
        pytest.skip("of two workers, both are the global process set; the launch with four runs this")
    half = hvd.add_process_set([1, 3])
    try:
        v = tf.Variable(tf.zeros([500]))
        optimizer = hvd.DistributedOptimizer(SGD(1.0), compression=compression, process_set=half)
        optimizer.apply_gradients([(tf.fill([500], -(RANK + 1.0)), v)])
        np.testing.assert_allclose(v.numpy(), 3 if half.included() else RANK + 1, rtol=1e-6)
        assert optimizer.compression_state_dict()["rank"] == {1: 0, 3: 1}.get(RANK)
    finally:
        hvd.remove_process_set(half)


def test_local_variables_are_not_compared():
    model = network(seed=RANK)
    optimizer = hvd.PartialDistributedOptimizer(SGD(0.1), local_layers=model.layers[0], verify_every=1, compression="none")
    hvd.broadcast_variables(model.layers[1].trainable_variables, 0)
    fit(model, optimizer, xy=data(rank=0))


def test_model_averaging_compares_after_averaging():
    model = compiled(wrapper=hvd.ModelAveragingOptimizer, every=2, verify_every=1)
    fit(model, batches=6)
    if ODD:
        model.optimizer._hvd_averager.anchors[1].assign_add(tf.ones([30]))
    with pytest.raises(tf.errors.OpError, match="after 4 averagings, 1 of 4: .*bias is one on rank"):
        fit(model, batches=6)
