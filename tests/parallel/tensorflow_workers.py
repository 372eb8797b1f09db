"""What the TensorFlow tests on several workers share: a small model, its batches, and looks at the other workers."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import hvd_quant.tensorflow as hvd
from hvd_quant import TensorInfo, exchange

RANK, WORLD = hvd.rank(), hvd.size()
TOPK = "topk:ratio=0.1,min_numel=0,exchange=allgather"


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
        self.cuts = {name: exchange.ranges(info.numel, compressor.range_multiple, world, i)
                     for i, (name, info) in enumerate(self.infos.items())}
        self.states = [{name: self._zeros(name, rank) for name in shapes} for rank in range(world)]

    def _zeros(self, name, rank):
        info = self.infos[name]
        shapes = self.compressor.state_shapes(info)
        if self.kinds[name] == "sra":
            owned = self.compressor.state_shapes(info.part(*self.cuts[name][rank]), role="owner")
            shapes = {**shapes, **{f"owner.{key}": shape for key, shape in owned.items()}}
        return {key: self.array(np.zeros(shape, np.float32)) for key, shape in shapes.items()}

    def reduce(self, name, gradients, step):
        """The mean gradient of a tensor, from each worker's."""
        info = self.infos[name]
        if self.kinds[name] not in ("allgather", "sra"):
            return np.mean([g.ravel() for g in gradients], axis=0).reshape(info.shape)
        scatter = self.kinds[name] == "sra"
        cuts = [cut for cut in self.cuts[name] if cut[0] < cut[1]] if scatter else [info.range]
        payloads = [self._encode(name, g, step, rank, cuts) for rank, g in enumerate(gradients)]
        mean = np.empty(info.numel, np.float32)
        for i, (a, b) in enumerate(cuts):
            at = dataclasses.replace(info.part(a, b), step=step)
            part = self.compressor.decode_mean(self.ops, [row[i] for row in payloads], at)
            if scatter:
                rank = self.cuts[name].index((a, b))
                kept = {key.removeprefix("owner."): v for key, v in self.states[rank][name].items() if key.startswith("owner.")}
                params = self.compressor.measure(self.ops, part, kept, at)
                payload = self.compressor.encode(self.ops, part, kept, params, dataclasses.replace(at, rank=rank, phase=1))
                part = self.compressor.decode_sum(self.ops, [payload], at)
            mean[a:b] = self.numpy(part)
        return mean.reshape(info.shape)

    def _encode(self, name, gradient, step, rank, cuts):
        flat, kept = self.array(gradient.ravel()), self.states[rank][name]
        state = {key: value for key, value in kept.items() if not key.startswith("owner.")}
        at = dataclasses.replace(self.infos[name], step=step, rank=rank)
        params = self.compressor.measure(self.ops, flat, state, at)
        return [self.compressor.encode(self.ops, flat[a:b], {key: v[a:b] for key, v in state.items()}, params, at.part(a, b))
                for a, b in cuts]


def routes(codecs):
    """Each compressor by each of its exchanges."""
    found = {}
    for compressor in codecs.values():
        for way in ("auto",) if compressor.linear else ("allgather", "sra"):
            one = dataclasses.replace(compressor, exchange=way)
            found[one.spec] = one
    return found
