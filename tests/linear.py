"""Random-k and PowerSGD of all workers at once, in plain NumPy, straight from their formulas."""

import numpy as np

from hvd_quant import get_compressor
from tests.randomness import number, stream_of


def drawn(seed, name, step, numel, count):
    """One entry of each of ``count`` stretches of a ring that begins anywhere, in Python's integers."""
    turn, more, *random = (number(stream_of(seed, name), i, step, rank=0, phase=2) for i in range(count + 2))
    bounds = [i * numel // count for i in range(count + 1)]
    turn = ((turn << 32) + more) * numel >> 64
    return np.array([(turn + a + (u * (b - a) >> 32)) % numel for u, a, b in zip(random, bounds, bounds[1:])])


class RandomK:
    """The state of all workers for one tensor."""

    def __init__(self, compressor, name, shape, world):
        self.compressor, self.name, self.numel, self.step = compressor, name, int(np.prod(shape)), 0
        self.residuals = [np.zeros(self.numel, np.float32) for _ in range(world)]
        self.sent = []  # by worker, in the last step: what each round adds up

    def reduce(self, gradients):
        """The mean gradient."""
        count = int(np.ceil(self.compressor.ratio * self.numel))
        index = drawn(self.compressor.seed, self.name, self.step, self.numel, count)
        self.step += 1
        self.sent, total = [], np.zeros(count, np.float32)
        for worker, g in enumerate(gradients):
            v = g.ravel() + self.residuals[worker]
            if self.compressor.memory == "error_feedback":
                self.sent.append([v[index]])
                v[index] = 0
                self.residuals[worker] = v
            else:
                self.sent.append([v[index] * np.float32(self.numel / count)])
            total += self.sent[-1][0]
        mean = np.zeros(self.numel, np.float32)
        mean[index] = total / len(gradients)
        return mean

    def state(self, worker):
        return {"residual": self.residuals[worker]} if self.compressor.memory == "error_feedback" else {}


class PowerSGD:
    """As the paper's algorithm, in float64. Columns of Q have a largest entry of 1, which no result depends on."""

    def __init__(self, compressor, name, shape, world):
        self.compressor, self.shape = compressor, (shape[0], int(np.prod(shape[1:])))
        random = np.random.Generator(np.random.Philox(key=stream_of(compressor.seed, name)))
        self.q = random.standard_normal((compressor.rank, self.shape[1]), np.float32).astype(np.float64).T
        self.residuals = [np.zeros(self.shape) for _ in range(world)]
        self.sent = []  # by worker, in the last step: what each round adds up

    def reduce(self, gradients):
        """The mean gradient."""
        matrices = [g.reshape(self.shape) + e for g, e in zip(gradients, self.residuals)]
        q = self.q / abs(self.q).max(axis=0) if self.sent else self.q
        sent = [m @ q for m in matrices]
        p = np.mean(sent, axis=0)
        for i in range(self.compressor.rank):
            p[:, i] /= np.linalg.norm(p[:, i])
            p[:, i + 1:] -= np.outer(p[:, i], p[:, i] @ p[:, i + 1:])
        own = [m.T @ p for m in matrices]
        self.sent = [[left.ravel(), right.T.ravel()] for left, right in zip(sent, own)]
        self.q = np.mean(own, axis=0)
        if self.compressor.memory == "error_feedback":
            self.residuals = [m - p @ q.T for m, q in zip(matrices, own)]
        return (p @ self.q.T).ravel()

    def state(self, worker):
        residual = {"residual": self.residuals[worker].ravel()} if self.compressor.memory == "error_feedback" else {}
        return {**residual, "q": self.q.T.ravel()}


def simulation(compressor, name, shape, world):
    return {"randomk": RandomK, "powersgd": PowerSGD}[compressor.name](compressor, name, shape, world)


def noting(rounds, note):
    """A code's rounds, of which ``note`` is given a tensor's name and what this worker adds."""
    def noted(*arguments):
        code, info = rounds(*arguments), arguments[4]
        try:
            vector = next(code)
            while True:
                note(info.name, vector)
                vector = code.send((yield vector))
        except StopIteration as end:
            return end.value

    return noted


def assert_sent(simulated, worker, vectors):
    """That a worker adds what the formulas say; random-k two numbers more, by which workers see that they drew the same."""
    for vector, expected in zip(vectors, simulated.sent[worker], strict=True):
        assert_close(simulated.compressor, vector[:-2] if simulated.compressor.name == "randomk" else vector, expected)


def results(simulated, gradients):
    """What each worker's optimizer gets: the mean gradient and, with a merge, a part of the worker's own."""
    merge, before, found = simulated.compressor.merge, [e.ravel() for e in simulated.residuals], []
    mean = simulated.reduce(gradients)
    for worker, (g, e) in enumerate(zip((g.ravel() for g in gradients), before)):
        kept = simulated.residuals[worker].ravel()
        found.append(mean + {"none": 0, "sum": g, "replace": g - (g + e - kept), "error": kept}[merge])
        if merge == "error":
            simulated.residuals[worker] = np.zeros_like(simulated.residuals[worker])
    return found


MERGING = {spec: get_compressor(spec) for spec in (
    "randomk:ratio=0.1,min_numel=0,merge=sum", "randomk:ratio=0.1,min_numel=0,merge=error", "powersgd:min_numel=0,merge=replace")}


def assert_close(compressor, found, expected, exact=True):
    """Random-k to the bit, or to the order of a sum; PowerSGD, whose products are in fp32, with an error of 1e-5."""
    found, expected = np.asarray(found).ravel(), np.asarray(expected)
    if compressor.name == "randomk" and compressor.merge == "none" and exact:
        np.testing.assert_array_equal(found, expected)
    else:
        assert found.shape == expected.shape
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


def gradient(step, rank, shape):
    """What a worker gets at a step: a matrix of a few directions and some noise, as gradients are. The four strongest stand out, so
    that rank 4 is well determined."""
    random, fixed = np.random.default_rng([step, rank]), np.random.default_rng(7)
    rows, columns = shape[0], int(np.prod(shape[1:]))
    low = (fixed.normal(size=(rows, 6)) * [9, 7, 5, 4, 0.2, 0.2]) @ fixed.normal(size=(6, columns))
    return (low * random.normal(1, 0.3) + random.normal(size=(rows, columns))).reshape(shape).astype(np.float32)
