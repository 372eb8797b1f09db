"""The Keras frontend in one process: what it refuses, how it is saved, imports that can't work, and one worker."""

import os
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow")
keras = pytest.importorskip("keras")
import tensorflow as tf  # noqa: E402

import hvd_quant.keras as hvd  # noqa: E402

SGD, Scaler = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer


@keras.saving.register_keras_serializable("own")
class Registered(keras.optimizers.Adam):
    """An optimizer with a name of its own in saved models."""


@pytest.mark.parametrize("make", [lambda: SGD(0.1, momentum=0.9, name="sgd"), lambda: Registered(0.1, name="r"),
                                  lambda: Scaler(SGD(0.1, name="sgd"), name="scaler")])
def test_it_is_saved_as_the_optimizer_it_was_made_from(make):
    optimizer, distributed = make(), hvd.DistributedOptimizer(make(), compression="topk", backward_passes_per_step=2)
    assert isinstance(distributed, type(optimizer)) and type(distributed) is not type(optimizer)
    for name in ("__name__", "__module__", "__qualname__", "__doc__"):
        assert getattr(type(distributed), name) == getattr(type(optimizer), name)
    config = keras.saving.serialize_keras_object(distributed)
    assert config == keras.saving.serialize_keras_object(optimizer)
    assert type(keras.saving.deserialize_keras_object(config)) is type(optimizer)


@pytest.mark.parametrize("make", [lambda: SGD(0.1, momentum=0.9), lambda: keras.optimizers.Adam(), lambda: Scaler(SGD(0.1, momentum=0.9))])
@pytest.mark.parametrize("compression", ["topk:momentum=0.5", {"*/kernel": "topk:momentum=0.5"}])
def test_a_second_momentum_is_warned_about(make, compression):
    with pytest.warns(UserWarning, match="has a momentum of its own, and compression=topk:momentum=0.5 adds another"):
        distributed(make(), compression=compression)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed(compression=compression)
        distributed(make(), compression="topk")
    with pytest.warns(UserWarning, match="AdamW has a weight decay of its own, and compression="):
        distributed(keras.optimizers.AdamW(weight_decay=0.1), compression="topk:momentum=0.5,weight_decay=0.1")


def distributed(optimizer=None, **kwargs):
    return hvd.DistributedOptimizer(optimizer or SGD(0.1), **kwargs)


@pytest.mark.parametrize("make, error, sentence", [
    (lambda: distributed(distributed()), ValueError, "this SGD is distributed already"),
    (lambda: distributed(Scaler(distributed())), ValueError, "this LossScaleOptimizer is distributed already"),
    (lambda: distributed(distributed(Scaler(SGD()))), ValueError, "this LossScaleOptimizer is distributed already"),
    (lambda: distributed(Scaler(Scaler(SGD()))), ValueError, "a LossScaleOptimizer around a LossScaleOptimizer"),
    (lambda: Scaler(Scaler(distributed())).apply([0.0], [0]), ValueError, "a LossScaleOptimizer around a LossScaleOpt"),
    (lambda: distributed(SGD(gradient_accumulation_steps=2), backward_passes_per_step=3), ValueError,
     "backward_passes_per_step=3 can't be combined with gradient_accumulation_steps=2"),
    (lambda: distributed(backward_passes_per_step=0), ValueError, "backward_passes_per_step is 0; give a number"),
    (lambda: distributed(op=hvd.Average + 1000), ValueError, "not supported for Keras optimizers; give Average or Sum"),
    (lambda: distributed(groups=0), ValueError, "groups is 0; give a positive number of groups"),
    (lambda: distributed(op=hvd.Sum, gradient_predivide_factor=2.0), ValueError, "not supported with op != Average"),
    (lambda: distributed("sgd"), TypeError, "takes an optimizer object such as keras.optimizers.SGD.*, not 'sgd'"),
    (lambda: distributed(tf.compat.v1.train.GradientDescentOptimizer(0.1)), TypeError, "use hvd_quant.tensorflow"),
])
def test_what_can_not_work_is_refused_in_one_sentence(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()


def test_horovods_own_wrapper_is_warned_about_once():
    import horovod.tensorflow.keras as stock

    with pytest.warns(UserWarning, match="write 'import hvd_quant.keras as hvd'") as warned:
        stock.DistributedOptimizer(SGD(0.1))
        stock.DistributedOptimizer(SGD(0.1))
    assert sum("hvd_quant.keras" in str(w.message) for w in warned) == 1


def test_the_whole_public_api_of_horovod_is_there():
    import horovod.keras
    import horovod.tensorflow.keras as stock

    modules = ((stock, hvd), (horovod.keras, hvd), (stock.callbacks, hvd.callbacks), (stock.elastic, hvd.elastic))
    internal = ("Adasum", "K", "keras", "is_version_greater_equal_than", "tf", "version", "warnings")
    for theirs, ours in modules:
        for name in dir(theirs):
            if name[0] != "_" and name not in internal:
                assert hasattr(ours, name), name
    import hvd_quant.keras.callbacks
    import hvd_quant.keras.elastic
    import hvd_quant.tensorflow.elastic

    assert (hvd_quant.keras.callbacks, hvd_quant.keras.elastic) == (hvd.callbacks, hvd.elastic)
    assert issubclass(hvd.elastic.KerasState, hvd_quant.tensorflow.elastic.TensorFlowKerasState)
    assert hvd_quant.tensorflow.elastic.TensorFlowKerasState is not stock.elastic.TensorFlowKerasState


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment})


@pytest.mark.parametrize("before, environment, sentence", [
    ("sys.modules['tensorflow'] = None", {}, "hvd_quant.keras needs TensorFlow: pip install tensorflow"),
    ("sys.modules['horovod'] = None", {},
     "hvd_quant.keras needs Horovod built for this TensorFlow; this command builds it: hvd-quant build-horovod"),
    ("sys.modules['tf_keras'] = None", {"TF_USE_LEGACY_KERAS": "1"},
     f"pip install tf_keras=={tf.__version__}, or unset the variable to use Keras 3"),
    ("sys.modules['keras'] = None", {}, "pip install 'keras>=3.5', and set KERAS_BACKEND=tensorflow"),
    ("import keras; keras.backend.backend = lambda: 'torch'", {},
     "needs Keras on TensorFlow, and its backend is 'torch': set KERAS_BACKEND=tensorflow"),
    ("import keras; keras.__version__ = '3.4.1'", {}, "needs Keras 3.5 or newer, and this is 3.4.1: pip install"),
])
def test_a_missing_piece_is_named_with_what_brings_it(before, environment, sentence):
    failed = run(f"import sys; {before}; import hvd_quant.keras", **environment)
    assert failed.returncode == 1 and sentence in failed.stderr.strip().splitlines()[-1], failed.stderr


def test_one_worker_without_a_launcher():
    finished = run("""
import keras, numpy as np
import hvd_quant.keras as hvd
hvd.init()
assert hvd.size() == 1
x = np.random.default_rng(0).normal(size=(32, 20)).astype("float32")
def train(wrap, passes=1, **how):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((20,)), hvd.SyncBatchNormalization(), keras.layers.Dense(20)])
    model.compile(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), "mse", **how)
    history = model.fit(x, x, batch_size=8, verbose=0, shuffle=False, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1), hvd.callbacks.CompressionStatsCallback(verbose=1)])
    return np.concatenate([w.ravel() for w in model.get_weights()]), model, history.history
plain, _, _ = train(lambda o: o)
for spec in ("none", "topk:min_numel=0", {"*": "onebit"}, "topk:memory=ef21,min_numel=0", "topk:merge=sum,min_numel=0"):
    weights, model, logs = train(lambda o: hvd.DistributedOptimizer(o, compression=spec))
    assert (weights == plain).all() and logs["wire_bytes"] == [0] and "compression_ratio" not in logs
    assert model.optimizer.compression_stats()["wire_bytes"] == 0
    model.optimizer.load_compression_state_dict(model.optimizer.compression_state_dict())
weights, _, _ = train(lambda o: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(o, compression="topk")))
np.testing.assert_allclose(weights, plain, atol=1e-6)
# Momentum is a part of training with one worker too.
weights, model, _ = train(lambda o: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk:momentum=0.9,min_numel=0"))
np.testing.assert_allclose(weights, plain, atol=1e-6)
assert model.optimizer.compression_stats()["wire_bytes"] == 0
# There is nothing to exchange, so XLA will do.
weights, _, _ = train(lambda o: hvd.DistributedOptimizer(o, compression="topk"), jit_compile=True)
np.testing.assert_allclose(weights, plain, atol=1e-5)
print("worked")
""")
    assert "worked" in finished.stdout, finished.stderr
