"""Model averaging among workers, with Keras 3 and again with tf_keras, against a simulation of all of them in NumPy."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.keras as hvd
from hvd_quant.tensorflow.variables import make_variables
from tests.parallel import averaging_in_numpy as simulation
from tests.parallel.keras_workers import RANK, WORLD, assert_same_everywhere, data, fit, flat, keras, network, on_all, residuals

KERAS3 = keras.layers.Layer.__module__.startswith("keras.")
SGD = keras.optimizers.SGD
MAKERS = [SGD] if KERAS3 else [SGD, keras.optimizers.legacy.SGD]
ONEBIT, SRA = (f"onebit:min_numel=0,block_size={simulation.BLOCK},exchange={exchange}" for exchange in ("allgather", "sra"))
NESTEROV = {"momentum": 0.9, "nesterov": True}
makers = pytest.mark.parametrize("make", MAKERS, ids=["new", "old"][:len(MAKERS)])


def averaging(every=4, optimizer=None, /, **how):
    return hvd.ModelAveragingOptimizer(optimizer or SGD(0.1, momentum=0.9), every=every, **how)


def mean_of(value):
    return on_all(value).mean(0)


class Product(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(simulation.OUTPUTS, simulation.INPUTS), initializer="zeros", name="w")

    def call(self, x):
        return tf.matmul(x, tf.convert_to_tensor(self.w), transpose_b=True)


class Counting(keras.Sequential):
    traces = 0

    def train_step(self, *args):
        self.traces += 1
        return super().train_step(*args)


def linear():
    """The model that is simulated, in float64."""
    model = Counting([keras.layers.Input((simulation.INPUTS,), dtype="float64"), Product(dtype="float64")])
    model.set_weights([simulation.weight()])
    return model


@makers
@pytest.mark.parametrize("setting", simulation.SETTINGS.values(), ids=list(simulation.SETTINGS))
def test_as_in_numpy(setting, make):
    model = linear()
    lr, momentum = setting.get("outer", (1.0, 0.0))
    inner = make(setting.get("lr", 0.5), momentum=setting.get("momentum", 0.0))
    if setting.get("adamw"):
        inner = keras.optimizers.AdamW(setting["lr"], simulation.DECAY, *simulation.BETAS, simulation.EPSILON)
    optimizer = averaging(setting["every"], inner,
                          outer=make(lr, momentum=momentum, nesterov=True) if "outer" in setting else None,
                          average_state=setting.get("average_momentum", False),
                          compression=ONEBIT if setting.get("compressed") else "none")
    x, y = map(np.concatenate, zip(*(simulation.batch(step, RANK) for step in range(20))))
    fit(model, optimizer, xy=(x, y))
    expected = simulation.simulate(WORLD, 20, **setting)[RANK]
    np.testing.assert_allclose(model.get_weights()[0], expected, atol=1e-6)
    assert model.traces == 1
    averagings = simulation.averagings(setting["every"], 20)
    assert optimizer.compression_stats()["steps"] == len(averagings)
    if averagings[-1] == 20:
        assert_same_everywhere(flat(model))


@pytest.mark.parametrize("code", simulation.CODES)
def test_what_a_code_leaves_of_the_way_is_kept(code):
    """What models are off their mean by is, on average, what the workers keep; that of the averaging before has arrived."""
    keras.backend.clear_session()  # Keras numbers names anew: by them, workers draw the same entries
    model = network()
    optimizer, before = averaging(100, compression=code), 0
    for which in (range(2), range(2, 5)):
        steps(optimizer, model, which)
        mean = mean_of(flat(model))
        optimizer.average()
        assert_same_everywhere(flat(model))
        kept = residuals(optimizer)
        names = [v.path if KERAS3 else v.name.removesuffix(":0") for v in model.trainable_variables]
        own = [kept.get(name, np.zeros(v.shape)).ravel() for name, v in zip(names, model.trainable_variables)]
        after = mean_of(np.concatenate(own))
        assert after.any() and not np.allclose(flat(model), mean, atol=1e-5)
        np.testing.assert_allclose(flat(model) - mean, after - before, rtol=0, atol=1e-6)
        before = after


def steps(optimizer, model, which):
    """Steps with a tape, outside a graph."""
    x, y = (part.reshape(-1, 8, 20) for part in data(batches=24))
    for step in which:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[step]) - y[step]) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))


@makers
def test_intervals_and_bytes(make):
    model = network()
    optimizer = averaging(lambda step: 1 if step < 2 else 3, make(0.1, momentum=0.9), average_state=True)  # after 1, 2, 5, 8
    taken = []
    for step in range(9):
        steps(optimizer, model, [step])
        taken.append(optimizer.compression_stats()["steps"])
    assert taken == [1, 2, 2, 2, 3, 3, 3, 4, 4]
    mean = mean_of(flat(model))
    for _ in range(2):
        optimizer.average()
        np.testing.assert_allclose(flat(model), mean, atol=1e-6)
        stats = optimizer.compression_stats()
        assert stats["steps"] == 5 and stats["local_steps"] == 9
        assert stats["wire_bytes"] == round(5 * 2 * 2 * 4 * flat(model).size * (WORLD - 1) / WORLD)  # with the momentum
    steps(optimizer, model, range(9, 12))
    assert optimizer.compression_stats()["steps"] == 6  # three steps after the last one
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("way", ["dictionary", "checkpoint"])
@makers
def test_a_resumed_run_is_the_same_bit_for_bit(make, way, tmp_path):
    def made(seed):
        model = network(seed)
        optimizer = averaging(4, make(0.1, momentum=0.9), outer=make(0.7, **NESTEROV), compression=SRA, average_state=True)
        make_variables(optimizer, model.trainable_variables)
        return model, optimizer, tf.train.Checkpoint(model=model, optimizer=optimizer)

    def kept(optimizer):
        state = optimizer.compression_state_dict()
        arrays = [*state["averaging"]["anchors"], *state["averaging"]["outer"],
                  *(v for tensor in state["tensors"].values() for v in tensor["state"].values())]
        return [a.tolist() for a in arrays], {key: state["averaging"][key] for key in ("known", "steps", "averaged", "due")}

    (model, optimizer, checkpoint), (other, resumed, restored) = made(0), made(1)
    steps(optimizer, model, range(10))  # amid an interval
    path = checkpoint.write(str(tmp_path / f"{RANK}"))
    state = optimizer.compression_state_dict()
    restored.read(path).assert_consumed()
    if way == "dictionary":
        make_variables(fresh := averaging(4, make(0.1, momentum=0.9), outer=make(0.7, **NESTEROV), compression=SRA,
                                          average_state=True), other.trainable_variables)
        for new, old in zip(hvd_variables(fresh), hvd_variables(resumed)):
            new.assign(old)
        resumed = fresh
        resumed.load_compression_state_dict(state)
    assert kept(resumed) == kept(optimizer)
    for m, o in ((model, optimizer), (other, resumed)):
        steps(o, m, range(10, 21))
    np.testing.assert_array_equal(flat(model), flat(other))
    assert kept(resumed) == kept(optimizer) and kept(resumed)[1]["due"] == 24


def hvd_variables(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def test_a_foreign_or_damaged_state_changes_nothing():
    model, optimizer = network(), averaging(outer=SGD(0.7, **NESTEROV), compression=ONEBIT)
    steps(optimizer, model, range(6))
    good = optimizer.compression_state_dict()
    averaged = good["averaging"]
    bad = {
        f"of worker {WORLD}": {**good, "rank": WORLD, "averaging": {**averaged, "steps": 99}},
        "none of a ModelAveragingOptimizer": {key: value for key, value in good.items() if key != "averaging"},
        "or damaged": {**good, "averaging": {**averaged, "due": None}},
        "with other variables, of shapes": {**good, "averaging": {**averaged, "anchors": averaged["anchors"][1:]}},
        "variables of its outer optimizer": {**good, "averaging": {**averaged, "outer": []}},
    }
    for sentence, state in bad.items():
        with pytest.raises(ValueError, match=sentence):
            optimizer.load_compression_state_dict(state)
        np.testing.assert_equal(optimizer.compression_state_dict(), good)


class Watch(keras.callbacks.Callback):
    """Whether the workers' models are the same where others look at them."""

    def __init__(self):
        super().__init__()
        self.same = []

    def look(self, *_):
        rows = on_all(flat(self.model))
        self.same.append(bool((rows == rows[:1]).all()))

    on_test_begin = on_epoch_end = look

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.look()


@pytest.mark.parametrize("wrap", [lambda: averaging(outer=SGD(0.7, **NESTEROV), compression=ONEBIT), lambda: SGD(0.1)],
                         ids=["averaging", "plain"])
def test_the_callback_averages_before_validation_and_at_the_end_of_epochs(wrap):
    model, optimizer, watch = network(), wrap(), Watch()
    callbacks = [hvd.callbacks.AverageParametersCallback(), watch]
    history = fit(model, optimizer, batches=6, epochs=2, callbacks=callbacks, validation_data=data(rank=99)).history
    assert watch.same == [False, True, True] * 2
    assert_same_everywhere(history["val_loss"])
    if hasattr(optimizer, "compression_stats"):
        assert optimizer.compression_stats()["steps"] == 4  # after 4, 6, 10 and 12 steps
    before = flat(model)
    model.evaluate(*data(), verbose=0, callbacks=callbacks[:1])
    np.testing.assert_array_equal(flat(model), before)


def test_statistics_of_batch_normalisation():
    own, optimizers = [], []
    for with_model in (True, False):
        keras.utils.set_random_seed(0)
        frozen = keras.layers.Dense(20)
        frozen.trainable = False
        layers = [keras.layers.Input((20,)), keras.layers.BatchNormalization(), frozen, keras.layers.Dropout(0.5, seed=1),
                  keras.layers.Dense(20)]
        model = keras.Sequential(layers)
        optimizer = averaging(4, model=model if with_model else None)
        callback = hvd.callbacks.AverageParametersCallback()
        if with_model:
            fit(model, optimizer)
        else:
            fit(model, optimizer)
            with pytest.warns(UserWarning, match="moving_mean.* and other statistics of this model stay each worker's own"):
                fit(model, batches=1, callbacks=[callback])
        own.append(model.layers[0].moving_mean.numpy())
        optimizers.append(optimizer)
    assert_same_everywhere(own[0])
    assert on_all(own[1]).std(0).max() > 1e-4
    sent = optimizers[0].compression_stats()["wire_bytes"]
    assert sent == round(2 * 4 * (2 * 20 + 20 * 20 + 20 + 2 * 20) * (WORLD - 1) / WORLD)  # not what is frozen


def test_a_model_that_is_broadcast_after_its_first_batch():
    model = network(seed=RANK)
    optimizer = averaging(3)
    fit(model, optimizer, batches=1, callbacks=[_Late()])
    assert_same_everywhere(flat(model))
    x, y = data(batches=3)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    optimizer.average()
    assert_same_everywhere(flat(model))


class _Late(hvd.callbacks.BroadcastGlobalVariablesCallback):
    def __init__(self):
        super().__init__(0)

    def on_train_begin(self, logs=None):
        pass  # as where a worker's model is not built yet


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("every, first, others", [(10, 4, 3), (4, 4, 5), (4, 5, 4), (4, 1, 0), (4, 0, 1)])
def test_workers_that_have_taken_other_numbers_of_steps_are_told(every, first, others, in_graph):
    """Also those that have averaged after their last step, or have taken none, and have nothing to average."""
    model, optimizer = network(), averaging(every)
    make_variables(optimizer, model.trainable_variables)
    optimizer.average()
    steps(optimizer, model, range(first if RANK == 0 else others))
    before = flat(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"worker 1 has taken {others} steps and worker 0 {first}: call"):
        (tf.function(optimizer.average) if in_graph else optimizer.average)()
    np.testing.assert_array_equal(flat(model), before)


def test_workers_that_disagree_are_told():
    model, optimizer = network(seed=RANK), averaging(1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="worker 1 started from other parameters than worker 0: broadcast"):
        fit(model, optimizer)
    normalised = keras.Sequential([keras.layers.Input((20,)), keras.layers.BatchNormalization()])
    optimizer = averaging(1, model=network() if RANK == 0 else normalised)
    with pytest.raises(tf.errors.InvalidArgumentError, match="worker 1 averages other parameters, optimizer state or"):
        fit(network(), optimizer)


@pytest.mark.parametrize("compression", ["none", ONEBIT])
def test_a_variable_that_is_not_finite_changes_nothing(compression):
    model, last = network(), WORLD - 1
    optimizer = averaging(4, outer=SGD(0.7, **NESTEROV), compression=compression)
    steps(optimizer, model, range(7))
    before, state = model.get_weights(), optimizer.compression_state_dict()
    bad = [w.copy() for w in before]
    bad[2][3, 4] = np.nan
    if RANK == last:
        model.set_weights(bad)
    with pytest.raises(tf.errors.OpError, match=rf"kernel of worker {last} is not finite: nothing was averaged"):
        optimizer.average()
    np.testing.assert_equal(model.get_weights(), bad if RANK == last else before)
    np.testing.assert_equal(optimizer.compression_state_dict(), state)
    model.set_weights(before)
    steps(optimizer, model, range(7, 8))
    assert_same_everywhere(flat(model))


@pytest.mark.parametrize("nesting", ["inside", "outside"])
def test_an_overflow_on_one_worker(nesting):
    """Its scaler skips a step there, and the workers average after the same number of batches all the same."""
    scaler = getattr(keras.optimizers, "LossScaleOptimizer", None) or keras.mixed_precision.LossScaleOptimizer
    if not KERAS3:
        with pytest.raises(ValueError, match="can't be combined with tf_keras's LossScaleOptimizer, which skips a step"):
            fit(network(), scaler(averaging()))
        return
    model, plain = network(), network()
    optimizer = scaler(averaging(3), initial_scale=1024.0) if nesting == "outside" else averaging(3, scaler(
        SGD(0.1, momentum=0.9), initial_scale=1024.0))
    reference = scaler(SGD(0.1, momentum=0.9), initial_scale=1024.0)
    apply = {}
    for m, one in ((model, optimizer), (plain, reference)):
        one.build(m.trainable_variables)
        apply[one] = tf.function(lambda grads, m=m, one=one: one.apply(grads, m.trainable_variables))
    for step in range(6):
        for m, one in ((model, optimizer), (plain, reference)):
            bad = np.inf if step == 1 and RANK == WORLD - 1 else 1.0
            random = np.random.default_rng([step, RANK])
            apply[one]([tf.constant(random.normal(size=v.shape) * 1024 * bad, tf.float32) for v in m.trainable_variables])
        if step < 2:
            np.testing.assert_allclose(flat(model), flat(plain), atol=1e-6)
        elif step in (2, 5):
            assert_same_everywhere(flat(model))
            mean = mean_of(flat(plain))
            np.testing.assert_allclose(flat(model), mean, atol=1e-6)
            sizes = np.cumsum([w.size for w in plain.get_weights()])[:-1]
            plain.set_weights([part.reshape(w.shape) for part, w in zip(np.split(mean, sizes), plain.get_weights())])
    assert float(optimizer.dynamic_scale) == (512 if RANK == WORLD - 1 else 1024)


@makers
def test_process_sets_and_local_variables(make):
    sets = [hvd.add_process_set([r]) for r in range(WORLD)]
    try:
        plain, alone, model = network(), network(), network()
        steps(make(0.1, momentum=0.9), plain, range(2))
        optimizer = averaging(2, make(0.1, momentum=0.9), process_set=sets[RANK])
        steps(optimizer, alone, range(2))
        np.testing.assert_array_equal(flat(alone), flat(plain))
        assert optimizer.compression_stats()["wire_bytes"] == 0
        optimizer = averaging(2, make(0.1, momentum=0.9), process_set=sets[0], outer=make(0.5))
        steps(optimizer, model, range(2))
        expected = (flat(network()) + flat(plain)) / 2 if RANK == 0 else flat(plain)
        np.testing.assert_allclose(flat(model), expected, atol=1e-6)
        before = flat(model)
        hvd.average_parameters(model, process_set=sets[0])
        np.testing.assert_array_equal(flat(model), before)
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)
    model, optimizer = network(), averaging(2, make(0.1))
    optimizer.register_local_var(model.trainable_variables[0])
    steps(optimizer, model, range(2))
    assert on_all(model.get_weights()[0]).std(0).max() > 1e-4
    assert_same_everywhere(model.get_weights()[1])
    with pytest.raises(ValueError, match="local from the start or not at all"):
        optimizer.register_local_var(model.trainable_variables[1])


@makers
def test_the_state_of_local_variables_is_not_averaged(make):
    """Also where others have their shape."""
    shared, local = (tf.Variable(tf.zeros([7, 3]), name=name) for name in ("shared", "local"))
    optimizer = averaging(2, make(0.1, momentum=0.9), average_state=True)
    optimizer.register_local_var(local)
    for _ in range(2):
        optimizer.apply_gradients([(tf.fill([7, 3], RANK + 1.0), variable) for variable in (shared, local)])
    kept = {name: [v.numpy() for v in hvd_variables(optimizer) if name in v.name] for name in ("shared", "local")}
    assert sum(map(len, kept.values())) == 2
    assert_same_everywhere([shared.numpy(), *kept["shared"]])
    for own in (local.numpy(), *kept["local"]):
        rows = on_all(own)
        np.testing.assert_allclose(rows, np.arange(1, WORLD + 1).reshape(-1, 1, 1) * rows[:1], rtol=1e-6)


@pytest.mark.skipif(not KERAS3, reason="Keras 3 adds gradients up")
def test_sums_of_gradients_are_each_workers_own():
    """Steps are passes, so an averaging may be amid a window."""
    variable = tf.Variable(tf.zeros([7]))
    optimizer = averaging(3, SGD(0.1, momentum=0.9, gradient_accumulation_steps=2), average_state=True)
    for step in range(3):
        optimizer.apply_gradients([(tf.fill([7], (RANK + 1.0) * 10 ** step), variable)])
    (total,) = optimizer._accumulated_gradients
    np.testing.assert_array_equal(total.numpy(), np.full(7, 100.0 * (RANK + 1)))
    assert_same_everywhere([variable.numpy(), optimizer.momentums[0].numpy()])


def test_half_types():
    """What the outer optimizer does is kept in fp32, so that its steps add up where each is too small for the variable."""
    variable = tf.Variable(tf.ones([5], tf.bfloat16))
    optimizer = averaging(1, SGD(2 ** -5), outer=SGD(2 ** -4))
    for _ in range(8):
        optimizer.apply_gradients([(tf.fill([5], tf.constant(-1.0 if RANK == 0 else 0.0, tf.bfloat16)), variable)])
    anchor = optimizer.compression_state_dict()["averaging"]["anchors"][0]
    assert anchor.dtype == np.float32 and (anchor == 1 + 8 * 2 ** -9 / WORLD).all()
    np.testing.assert_array_equal(variable.numpy(), tf.cast(anchor, tf.bfloat16).numpy())


@pytest.mark.parametrize("in_graph", [False, True])
def test_average_parameters(in_graph):
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(7), keras.layers.BatchNormalization()])
    model.set_weights([np.full(w.shape, RANK + 1.0) for w in model.get_weights()])
    others = [tf.Variable(tf.fill([3], tf.constant(RANK + 1, dtype))) for dtype in (
        tf.float64, tf.bfloat16, tf.float32, tf.int32)]

    def average():
        hvd.average_parameters(model)
        hvd.average_parameters(others)

    graph = tf.function(average)
    (graph if in_graph else average)()
    for value in (*model.get_weights(), *(v.numpy() for v in others[:3])):
        assert (value == (WORLD + 1) / 2).all()
    assert (others[3].numpy() == RANK + 1).all()
    if in_graph:  # of the model, and of fp32 with bf16, and fp64
        assert sum(op.type == "HorovodAllreduce" for op in graph.get_concrete_function().graph.get_operations()) == 3
    with pytest.raises(TypeError, match="takes a Keras model or a list of variables, not 'kernel'"):
        hvd.average_parameters("kernel")


def test_a_saved_model_needs_no_plugin(tmp_path):
    model = network()
    optimizer = averaging(outer=SGD(0.7, **NESTEROV))
    fit(model, optimizer)
    optimizer.average()
    model.save(tmp_path / f"{RANK}.keras")
    plain = keras.models.load_model(tmp_path / f"{RANK}.keras")
    assert type(plain.optimizer) is SGD
    make_variables(plain.optimizer, plain.trainable_variables)
    again = averaging(4, plain.optimizer)
    make_variables(again, plain.trainable_variables)
    for old, new in zip(hvd_variables(optimizer), hvd_variables(again), strict=True):
        np.testing.assert_array_equal(old.numpy(), new.numpy())


@pytest.mark.skipif(not KERAS3, reason="written for Keras 3")
def test_the_example_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "schemes" / "model_averaging.md").read_text()
    names = {}
    exec(next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "hvd_quant.keras" in block), names)
    assert_same_everywhere(flat(names["model"]))
    losses = names["model"].history.history["loss"]
    assert losses[-1] < losses[0] and names["optimizer"].compression_stats()["steps"] == 3
