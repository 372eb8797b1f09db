"""What the TensorFlow tests on several workers share: a small model, its batches, and looks at the other workers."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
from hvd_quant import TensorInfo, exchange

RANK, WORLD = hvd.rank(), hvd.size()
TOPK = "topk:ratio=0.1,min_numel=0"


def every(codecs):
    return pytest.mark.parametrize("compressor", codecs.values(), ids=list(codecs))


def on_all(value):
    """The workers' values of an array, one row a worker."""
    return hvd.allgather(tf.reshape(tf.constant(np.asarray(value)), (1, -1)), name="on_all").numpy()


def assert_same_everywhere(value):
    rows = on_all(value)
    np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))


class Network:
    """Two dense layers on plain variables, the same on all workers."""

    def __init__(self, seed=0):
        random = np.random.default_rng(seed)
        self.variables = [tf.Variable(random.normal(0, 0.2, shape).astype(np.float32), name=name)
                          for name, shape in (("0/kernel", (30, 40)), ("0/bias", (40,)), ("1/kernel", (40, 30)), ("1/bias", (30,)))]

    def loss(self, x):
        w0, b0, w1, b1 = self.variables
        return tf.reduce_mean((tf.nn.relu(x @ w0 + b0) @ w1 + b1 - x) ** 2)

    def flat(self):
        return np.concatenate([v.numpy().ravel() for v in self.variables])


def batch(step, rank=RANK):
    """A batch of a step: another one on each worker, the same in every run."""
    return np.random.default_rng(1000 * step + rank).normal(size=(8, 30)).astype(np.float32)


def train(network, steps, in_graph=True, lr=0.1, scale=lambda step: 1.0, **how):
    """SGD on a distributed tape; how many times the step was traced, and what the last gradients were."""
    traces = 0

    def step_on(x, factor):
        nonlocal traces
        traces += 1
        with tf.GradientTape() as tape:
            loss = network.loss(x) * factor
        tape = hvd.DistributedGradientTape(tape, **how)
        grads = tape.gradient(loss, network.variables)
        for v, g in zip(network.variables, grads):
            v.assign_sub(lr * g)
        return grads

    run = tf.function(step_on) if in_graph else step_on
    for step in steps:
        grads = run(tf.constant(batch(step)), tf.constant(scale(step)))
    return traces, grads


class Simulation:
    """All workers of an exchange in one process, on a backend's codes and arrays.

    Arguments:
        array, numpy: to and from the backend's arrays.
    """

    def __init__(self, compressor, ops, shapes, array, numpy, world=WORLD):
        self.compressor, self.ops, self.array, self.numpy, self.world = compressor, ops, array, numpy, world
        self.infos = {name: TensorInfo.whole(name, shape, world=world) for name, shape in shapes.items()}
        self.kinds = {name: exchange.choose(compressor, info) for name, info in self.infos.items()}
        self.states = [{name: {key: array(np.zeros(shape, np.float32)) for key, shape in compressor.state_shapes(info).items()}
                        for name, info in self.infos.items()} for _ in range(world)]

    def reduce(self, name, gradients, step):
        """The mean gradient of a tensor, from each worker's."""
        info, flats = self.infos[name], [self.array(g.ravel()) for g in gradients]
        if self.kinds[name] != "allgather":
            return np.mean([g.ravel() for g in gradients], axis=0).reshape(info.shape)
        payloads = []
        for rank, flat in enumerate(flats):
            at = dataclasses.replace(info, step=step, rank=rank)
            params = self.compressor.measure(self.ops, flat, self.states[rank][name], at)
            payloads.append(self.compressor.encode(self.ops, flat, self.states[rank][name], params, at))
        return self.numpy(self.compressor.decode_mean(self.ops, payloads, info)).reshape(info.shape)
