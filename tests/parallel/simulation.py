"""Training schemes on n workers in one process, from their formulas, in NumPy. Nothing here comes from hvd_quant.

A tensor has at most 4,096 entries, so that the codes that sample see all of them, and codes that drop entries are not cut into
ranges, whose capacities would come in.
"""

import dataclasses
import hashlib
import math

import numpy as np

NEAR = 1e-5
"""An entry that is this near to a decision may fall either way, by the rounding of a mean that went before."""


class NearADecision(Exception):
    """Other numbers have to be drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """What is simulated; the names are those of the knobs."""

    code: str
    ratio: float = 0.1
    tau: float = 0.5
    block: int = 64
    values: str = "float32"
    memory: str = "error_feedback"
    warmup: int = 0
    merge: str = "none"
    average_every: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float = 0.0
    weight_decay: float = 0.0
    eta: float = 1.0
    exchange: str = "allgather"
    schedule: str = "none"
    schedule_steps: int = 1000

    def ratio_at(self, step):
        """The ratio that is kept, 1 where everything is sent as it is."""
        t = step - self.warmup
        if t < 0 or self.memory == "ef21" and step == 0:
            return 1
        if self.schedule == "dgc":
            stages = [ratio for ratio in (0.25, 0.0625, 0.015625, 0.004) if ratio > self.ratio]
            return [*stages, self.ratio][min(t // self.schedule_steps, len(stages))]
        if self.schedule == "merging" and t < self.schedule_steps:
            kept = 1 - (1 - self.ratio) ** (self.schedule_steps / (t + 1))
            return 1 if kept > 0.1 else self.ratio * 2 ** (math.ceil(2 * math.log2(kept / self.ratio) - 1e-9) / 2)
        return self.ratio

    @property
    def spec(self):
        knobs = {"topk": {"ratio": self.ratio, "values": self.values}, "threshold": {"tau": self.tau, "capacity": 1.0},
                 "adaptive": {"ratio": self.ratio}, "blockwise8": {"block_size": self.block, "code": "linear"},
                 "terngrad": {}, "natural": {}}.get(self.code, {"block_size": self.block})
        common = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)
                  if f.name not in ("code", "ratio", "tau", "block", "values") and (getattr(self, f.name) != f.default or f.name in ("exchange", "memory"))}
        return f"{self.code}:min_numel=0," + ",".join(f"{k}={v}" for k, v in (knobs | common).items())


def topk(v, ratio):
    """The ratio of the entries that is largest."""
    order = np.sort(abs(v))[::-1]
    kept = math.ceil(ratio * v.size)
    require_clear(order[kept - 1] - order[kept:kept + 1])
    return np.where(abs(v) > order[kept], v, 0) if kept < v.size else v


def threshold(v, tau):
    require_clear(abs(v) - np.float32(tau))
    return np.where(v >= np.float32(tau), np.float32(tau), np.where(v <= -np.float32(tau), -np.float32(tau), np.float32(0)))


def adaptive(v, ratio):
    """The ratio of each sign's entries that is largest, as that sign's mean."""
    out = np.zeros_like(v)
    for sign in (1, -1):
        order = np.sort((sign * v)[sign * v > 0])[::-1]
        kept = max(1, math.ceil(ratio * order.size))
        require_clear(order[kept - 1] - order[kept:kept + 1])
        chosen = sign * v >= order[kept - 1]
        out[chosen] = v[chosen].mean(dtype=np.float64)
    return out


def onebit(v, block):
    """The mean of each block's entries of one sign."""
    require_clear(v)
    out = np.empty_like(v)
    for i in range(0, v.size, block):
        part = v[i:i + block]
        for chosen in (part >= 0, part < 0):
            out[i:i + block][chosen] = part[chosen].mean(dtype=np.float64) if chosen.any() else 0
    return out


def signs(v, values):
    """What is left of values that are kept: their mean magnitude, or that of those above, and of those below it."""
    a, kept = abs(v).astype(np.float64), v != 0
    mean = a[kept].mean()
    if values == "sign":
        return np.where(kept, np.sign(v) * np.float32(mean), 0).astype(np.float32)
    require_clear(a[kept] - mean)
    upper = kept & (a > mean)
    lower = kept & ~upper
    return (np.sign(v) * np.where(upper, np.float32(a[upper].mean()), np.float32(a[lower].mean()) * lower)).astype(np.float32)


def signsgd(v, block):
    """The mean magnitude of each block, with the sign."""
    require_clear(v)
    out = np.empty_like(v)
    for i in range(0, v.size, block):
        part = v[i:i + block]
        out[i:i + block] = np.sign(part) * np.float32(abs(part).mean(dtype=np.float64))
    return out


def levels(v, block, steps, u):
    """Each entry as a multiple of its block's largest over ``steps``, the next one where what is over exceeds u."""
    out = np.empty_like(v)
    for i in range(0, v.size, block):
        part = v[i:i + block]
        out[i:i + block] = levels_below(part, abs(part).max(), steps, u[i:i + block])
    return out


def levels_below(v, largest, steps, u):
    x = np.minimum(abs(v).astype(np.float64) * steps / largest, steps)
    over = x - np.floor(x)
    require_clear(over - u, 2e-7 * np.maximum(x, 1))  # what fp32 leaves of x
    return (np.sign(v) * (np.floor(x) + (over > u)) * np.float32(largest / np.float32(steps))).astype(np.float32)


def terngrad(v, u):
    """Clipped to 2.5 standard deviations: the largest then, or 0."""
    largest = np.float32(min(float(abs(v).max()), 2.5 * float(v.std(dtype=np.float64))))
    return levels_below(v, largest, 1, u)


def natural(v, h):
    """A power of two, the next one where the digits and 23 random bits make up a whole."""
    a = np.where(v == 0, 1, abs(v)).astype(np.float64)
    power = np.exp2(np.floor(np.log2(a)))
    digits = ((a / power - 1) * 2**23).astype(np.int64)
    return (np.sign(v) * power * np.where(digits + (h >> 9) >= 2**23, 2, 1)).astype(np.float32)


def random_bits(name, step, rank, phase, first, numel):
    """32 bits an entry, as docs/payloads.md has them."""
    word, half = 2**64 - 1, 2**32 - 1
    key = int.from_bytes(hashlib.blake2b(repr((0, 0, name)).encode(), digest_size=8).digest(), "little")
    for one in (step, rank, phase):
        key = (key ^ one) + 0x9E3779B97F4A7C15 & word
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & word
        key = (key ^ key >> 27) * 0x94D049BB133111EB & word
        key ^= key >> 31
    x = np.arange(first, first + numel, dtype=np.int64) ^ (key & half)
    x = (x ^ x >> 17) * 0xED5AD4BB & half
    x = (x ^ x >> 11) + (key >> 32) & half
    x = x * 0xAC4C1B51 & half
    x = (x ^ x >> 15) * 0x31848BAB & half
    return x ^ x >> 14


def require_clear(distance, near=NEAR):
    if np.any(abs(distance) < near):
        raise NearADecision


class Simulation:
    """The workers' gradients of one tensor, step by step.

    Arguments:
        name: the tensor's, on which random numbers depend.
        index: its place among the tensors, which decides who owns which range.
    """

    def __init__(self, scheme, name, numel, workers, index, summed=False):
        self.scheme, self.name, self.n, self.summed, self.step = scheme, name, workers, summed, 0
        names = ("residual", "velocity", "estimate", "mean", "average")
        self.states = [{name: np.zeros(numel, np.float32) for name in names} for _ in range(workers)]
        blocks, bounds = -(-numel // scheme.block), [0]
        for i in range(workers):
            bounds.append(min(numel, bounds[-1] + scheme.block * (blocks // workers + (i < blocks % workers))))
        self.ranges = [slice(bounds[(r + index) % workers], bounds[(r + index) % workers + 1]) for r in range(workers)]
        self.owned = [np.zeros(range_.stop - range_.start, np.float32) for range_ in self.ranges]

    def code(self, v, rank, phase=0, first=0):
        s, ratio = self.scheme, self.scheme.ratio_at(self.step)
        h = random_bits(self.name, self.step, rank, phase, first, v.size)
        u = ((h >> 8) | 1) * 2.0**-24
        return {"topk": lambda: topk(v, ratio) if s.values == "float32" else signs(topk(v, ratio), s.values),
                "onebit": lambda: onebit(v, s.block), "threshold": lambda: threshold(v, s.tau),
                "adaptive": lambda: adaptive(v, ratio), "signsgd": lambda: signsgd(v, s.block),
                "blockwise8": lambda: levels(v, s.block, 127, np.full(v.size, 0.5)), "qsgd": lambda: levels(v, s.block, 7, u),
                "terngrad": lambda: terngrad(v, u), "natural": lambda: natural(v, h)}[s.code]()

    def mean(self, vectors):
        """Added up in the order of ranks, times the fp32 value of 1 / n."""
        total = np.zeros_like(vectors[0])
        for vector in vectors:
            total += vector
        return total * np.float32(1 / self.n)

    def exchange(self, sent):
        """What all get of what each has sent."""
        if self.scheme.exchange == "allgather":
            return self.mean(sent)
        out = np.empty_like(sent[0])
        for owner, (range_, residual) in enumerate(zip(self.ranges, self.owned)):
            v = self.mean([vector[range_] for vector in sent]) + residual
            out[range_] = self.code(v, owner, 1, range_.start) if v.size else v
            if self.scheme.memory != "none":
                residual[:] = v - out[range_]
        return out

    def reduce(self, gradients, parameters):
        """What each worker's optimizer gets."""
        results = self._reduce(gradients, parameters)
        self.step += 1
        return results

    def _reduce(self, gradients, parameters):
        s, f = self.scheme, np.float32
        dense = s.ratio_at(self.step) == 1
        given = []
        for g, p, state in zip(gradients, parameters, self.states):
            if s.momentum:
                if s.clip_norm:
                    norm = math.sqrt(np.square(g, dtype=np.float64).sum())
                    g = g * f(min(1.0, s.clip_norm / math.sqrt(self.n) / norm))
                g = g + f(s.weight_decay) * p
                if s.nesterov:
                    state["velocity"] = f(s.momentum) * (state["velocity"] + g)
                    g = state["velocity"] + g
                else:
                    g = state["velocity"] = f(s.momentum) * state["velocity"] + g
            if s.memory == "ef21" and s.eta != 1:
                g = state["average"] = g if self.step == 0 else f(1 - s.eta) * state["average"] + f(s.eta) * g
            given.append(g)
        factor = self.n if self.summed else 1
        if dense:
            mean = np.mean(given, axis=0, dtype=np.float64).astype(f)
            for g, state in zip(given, self.states):
                if s.memory == "ef21":
                    state["estimate"], state["mean"] = g, mean
            return [mean * f(factor)] * self.n
        sent = []
        for rank, (g, state) in enumerate(zip(given, self.states)):
            if s.memory == "error_feedback":
                v = g + state["residual"]
                sent.append(self.code(v, rank))
                state["residual"] = v - sent[-1]
            else:
                sent.append(self.code(g - state["estimate"], rank))
        mean = self.exchange(sent)
        results = []
        for g, state, own in zip(gradients, self.states, sent):
            if s.memory == "ef21":
                state["estimate"] = state["estimate"] + own
                state["mean"] = state["mean"] + mean
                results.append(state["mean"] * f(factor))
                continue
            if s.momentum and s.code != "onebit":  # which sends something of every entry
                state["velocity"] = np.where(own != 0, f(0), state["velocity"])
            local = {"none": f(0), "sum": g, "replace": g - own, "error": state["residual"]}[s.merge]
            results.append(mean * f(factor) + local * f(factor))
            if s.merge == "error":
                state["residual"] = np.zeros_like(g)
        return results


SCHEMES = [
    Scheme(code="topk"), Scheme(code="onebit"), Scheme(code="threshold"), Scheme(code="adaptive"),
    Scheme(code="onebit", exchange="sra"), Scheme(code="topk", memory="none"),
    Scheme(code="topk", values="sign"), Scheme(code="topk", values="2bit"),
    Scheme(code="signsgd", exchange="sra"), Scheme(code="blockwise8"), Scheme(code="blockwise8", exchange="sra"),
    Scheme(code="qsgd", memory="none"), Scheme(code="qsgd", memory="none", exchange="sra"), Scheme(code="qsgd"),
    Scheme(code="terngrad", memory="none"), Scheme(code="natural", memory="none"),
    Scheme(code="natural", memory="none", exchange="sra", block=256),  # of which its ranges are multiples
    Scheme(code="topk", momentum=0.9), Scheme(code="topk", momentum=0.9, nesterov=True, warmup=3),
    Scheme(code="adaptive", momentum=0.5, clip_norm=20.0, weight_decay=0.01),
    Scheme(code="onebit", momentum=0.9, exchange="sra"),
    Scheme(code="topk", memory="ef21"), Scheme(code="onebit", memory="ef21", eta=0.25, warmup=3),
    Scheme(code="onebit", memory="ef21", exchange="sra"),
    *(Scheme(code="topk", merge=merge, average_every=6) for merge in ("sum", "replace", "error")),
    Scheme(code="onebit", merge="replace", exchange="sra", average_every=5, warmup=2),
    Scheme(code="threshold", merge="error", average_every=7),
    Scheme(code="topk", ratio=0.02, momentum=0.9, schedule="dgc", schedule_steps=5, warmup=2),
    Scheme(code="topk", ratio=0.02, merge="replace", average_every=8, schedule="merging", schedule_steps=15),
]


def train(scheme, shapes, workers, steps, summed=False, lr=0.1):
    """Plain SGD of all workers from the same start, on gradients whose numbers are drawn until none is near a decision.

    Returns:
        Of each step and worker, the tensors' gradients, what the optimizer got, and the parameters after it, by name; and the
        simulations by name.
    """
    for seed in range(100):
        try:
            random = np.random.default_rng(seed)
            simulations = {name: Simulation(scheme, name, math.prod(shape), workers, i, summed) for i, (name, shape) in enumerate(shapes.items())}
            parameters = {name: [np.zeros(math.prod(shape), np.float32)] * workers for name, shape in shapes.items()}
            history = []
            for step in range(1, steps + 1):
                gradients = {name: [random.normal(size=math.prod(shape)).astype(np.float32) for _ in range(workers)]
                             for name, shape in shapes.items()}
                results = {name: simulations[name].reduce(gradients[name], parameters[name]) for name in shapes}
                for name in shapes:
                    parameters[name] = [p - np.float32(lr) * r for p, r in zip(parameters[name], results[name])]
                    if scheme.average_every and step % scheme.average_every == 0:
                        mean = np.mean(parameters[name], axis=0, dtype=np.float64).astype(np.float32)
                        parameters[name] = [mean] * workers
                history.append((gradients, results, parameters.copy()))
            return history, simulations
        except NearADecision:
            continue
    raise AssertionError(f"{scheme}: every seed has an entry near a decision")
