"""Training schemes on n workers in one process, from their formulas, in NumPy. Nothing here comes from hvd_quant."""

import copy
import dataclasses
import math

import numpy as np

from tests.randomness import number, stream_of

SHAPES = {"matrix": (30, 41), "vector": (700,)}
"""Codes that sample see all entries of these, and none has two sets of levels."""
LARGE = {"large": (120, 190), "vector": (700,)}
"""Of the first of these they see one entry in five, and it has two stretches."""
STRETCH = 16384
"""Entries that share levels in the codes that drop some."""
NEAR = 1e-5
"""An entry that is this near to a decision may fall either way, by the rounding of a mean that went before."""


class NearADecision(Exception):
    """Other numbers have to be drawn."""


KNOBS = {"topk": ("ratio", "values", "mean", "scope"), "threshold": ("tau", "capacity"), "adaptive": ("ratio",),
         "onebit": ("block_size", "zeros"), "signsgd": ("block_size", "zeros"), "blockwise8": ("block_size", "table"),
         "qsgd": ("block_size", "bits", "norm", "seed"), "terngrad": ("clip", "seed"), "natural": ("seed",)}
"""Those of each code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """What is simulated; the names are those of the knobs, but for ``code``, and ``table``, which is blockwise8's ``code``."""

    code: str
    ratio: float = 0.1
    values: str = "float32"
    mean: str = "unit"
    scope: str = "tensor"
    tau: float = 0.5
    capacity: float = 1.0
    block_size: int = 64
    zeros: bool = False
    table: str = "linear"
    bits: int = 4
    norm: str = "max"
    clip: float = 2.5
    seed: int = 0
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
    hierarchical: bool = False
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
        of_codes = {"code"}.union(*KNOBS.values())
        knobs = [f.name for f in dataclasses.fields(self) if f.name in (*KNOBS[self.code], "exchange", "memory")
                 or f.name not in of_codes and getattr(self, f.name) != f.default]
        return f"{self.code}:min_numel=0," + ",".join(f"{'code' if k == 'table' else k}={getattr(self, k)}" for k in knobs)

    @property
    def exact(self):
        """Whether no mean comes in but that of the workers, which are two or four and are added up in the order of ranks."""
        means = (self.code in ("onebit", "signsgd", "adaptive") or self.values in ("sign", "2bit") or self.norm == "l2"
                 or self.code == "terngrad" and self.clip)
        return not (means or self.momentum or self.warmup or self.memory == "ef21" or self.merge != "none")

    @property
    def range_multiple(self):
        """Entries that ranges with an owner are multiples of."""
        unit = self.code == "adaptive" or self.values == "2bit" or self.values == "sign" and self.mean == "unit"
        return STRETCH if unit else self.block_size if "block_size" in KNOBS[self.code] else 256


def sample(v, step):
    """One entry of each of 4,096 parts, at places that change with the step; all entries, if there are no more."""
    count = min(4096, v.size)
    i, long = np.arange(count), v.size // count
    m = (i ^ step * 0x9E3779B1 % 2**32) * 0x9E3779B1 % 2**32
    m = (m ^ m >> 15) * 0x85EBCA77 % 2**32
    return v[i * v.size // count + ((m ^ m >> 13) * long >> 32)]


def largest(v, ratio, step):
    """The ratio of the entries that is largest, as a sample has it; of those that are equal all, or rather none."""
    a, seen = abs(v), abs(sample(v, step))
    kept = math.ceil(ratio * seen.size)
    t = np.sort(seen)[::-1][kept] if kept < seen.size else 0
    require_clear(a[a != t] - t)
    return a > t if (a > t).any() else (a == t) & (t > 0)


def beyond(v, tau):
    distance = abs(v) - np.float32(tau)
    require_clear(distance[distance != 0])  # a mean of taus is one exactly
    return distance >= 0


def largest_of_each_sign(v, ratio, step):
    seen = sample(v, step)
    require_clear(seen[seen != 0])  # each sign's are counted
    chosen = np.zeros(v.size, bool)
    for sign in (1, -1):
        signed = sign * v
        order = np.sort(sign * seen[sign * seen > 0])[::-1]
        t = order[max(1, math.ceil(ratio * order.size)) - 1]
        require_clear(signed[signed != t] - t)
        chosen |= signed >= t
    return chosen


def first(kept, slots, step):
    """Of those that are kept, as many as have a slot: from another entry of another block of another stretch on in each step."""
    stretches, order = -(-kept.size // STRETCH), []
    stretch, place = divmod(step * 0x9E3779B1 % 2**32 / 2**32 * stretches, 1)
    for i in range(stretches):
        begin = (int(stretch) + i) % stretches * STRETCH
        end = min(begin + STRETCH, kept.size)
        blocks = -(-(end - begin) // 256)
        block, part = divmod(place * blocks, 1)
        for j in range(blocks):
            start = begin + (int(block) + j) % blocks * 256
            entries = np.arange(start, min(start + 256, end))
            order.append(np.roll(entries, -int(part * entries.size)))
    order = np.concatenate(order)
    chosen = np.zeros_like(kept)
    chosen[order[kept[order]][:slots]] = True
    return chosen


def by_stretch(code, v):
    """What a code makes of each stretch that has something."""
    return np.concatenate([code(part) if part.any() else part for part in (v[i:i + STRETCH] for i in range(0, v.size, STRETCH))])


def means(v):
    """The mean of the entries of each sign."""
    out = np.zeros_like(v)
    for chosen in (v > 0, v < 0):
        out[chosen] = v[chosen].mean(dtype=np.float64) if chosen.any() else 0
    return out


def onebit(v, block, zeros):
    """The mean of each block's entries of one sign; or of none, if zeros stay zeros."""
    require_clear(v[v != 0] if zeros else v)
    return np.concatenate([means(v[i:i + block]) for i in range(0, v.size, block)])


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


def signsgd(v, block, zeros):
    """The mean magnitude of each block, with the sign; of entries that aren't 0, if zeros stay zeros."""
    require_clear(v[v != 0] if zeros else v)
    parts = [v[i:i + block] for i in range(0, v.size, block)]
    return np.concatenate([np.sign(part) * np.float32(abs(part[part != 0]).mean(dtype=np.float64)) for part in parts])


def levels(v, block, steps, u, norm="max"):
    """Each entry as a multiple of its block's norm over ``steps``, the next one where what is over exceeds u."""
    out = np.empty_like(v)
    for i in range(0, v.size, block):
        part = v[i:i + block]
        of_block = abs(part).max() if norm == "max" else math.sqrt(np.square(part, dtype=np.float64).sum())
        out[i:i + block] = levels_below(part, np.float32(of_block), steps, u[i:i + block])
    return out


def dynamic(v, block):
    """Each entry as that part of its block's largest which is nearest in the table: of each decade from 1e-6 to 1 the middles of
    1, 2, 4 ... 64 steps from a tenth of it; and 0, and 1, which has no minus."""
    table = np.float32([0, *(10.0**(i - 6) * (0.1 + 0.9 * (j + 0.5) / 2**i) for i in range(7) for j in range(2**i)), 1])
    marks = (table[1:] + table[:-1]) / 2
    out = np.empty_like(v)
    for i in range(0, v.size, block):
        scale, a = abs(v[i:i + block]).max(), abs(v[i:i + block]).astype(np.float64) / abs(v[i:i + block]).max()
        require_clear(a[:, None] - marks, 3e-7 * a[:, None])  # what fp32 leaves of them
        place = np.minimum(np.searchsorted(marks, a), np.where(v[i:i + block] < 0, 127, 128))
        out[i:i + block] = np.sign(v[i:i + block]) * table[place] * scale
    return out


def levels_below(v, largest, steps, u):
    x = np.minimum(abs(v).astype(np.float64) * steps / largest, steps)
    over = x - np.floor(x)
    require_clear(over - u, 2e-7 * np.maximum(x, 1))  # what fp32 leaves of x
    return (np.sign(v) * (np.floor(x) + (over > u)) * np.float32(largest / np.float32(steps))).astype(np.float32)


def terngrad(v, clip, u):
    """Clipped to so many standard deviations: the largest then, or 0."""
    most = float(abs(v).max())
    return levels_below(v, np.float32(min(most, clip * float(v.std(dtype=np.float64))) if clip else most), 1, u)


def natural(v, h):
    """A power of two, the next one where the digits and 23 random bits make up a whole."""
    a = np.where(v == 0, 1, abs(v)).astype(np.float64)
    power = np.exp2(np.floor(np.log2(a)))
    digits = ((a / power - 1) * 2**23).astype(np.int64)
    return (np.sign(v) * power * np.where(digits + (h >> 9) >= 2**23, 2, 1)).astype(np.float32)


def require_clear(distance, near=NEAR):
    if np.any(abs(distance) < near):
        raise NearADecision


class Simulation:
    """The workers' gradients of one tensor, step by step.

    Arguments:
        name: the tensor's, on which random numbers depend.
        index: its place among the tensors, which decides who owns which range.
    """

    def __init__(self, scheme, name, numel, workers, index):
        self.scheme, self.name, self.n, self.step = scheme, name, workers, 0
        self.sent = []  # in the last step, what each worker's payload decodes to; nothing where it went dense
        names = ("residual", "velocity", "estimate", "mean", "average", "magnitudes")
        self.states = [{name: np.zeros(numel, np.float32) for name in names} | {"threshold": np.zeros(2, np.float32)}
                       for _ in range(workers)]
        multiple = scheme.range_multiple
        blocks, bounds = -(-numel // multiple), [0]
        for i in range(workers):
            bounds.append(min(numel, bounds[-1] + multiple * (blocks // workers + (i < blocks % workers))))
        self.ranges = [slice(bounds[(r + index) % workers], bounds[(r + index) % workers + 1]) for r in range(workers)]
        self.owned = [np.zeros(range_.stop - range_.start, np.float32) for range_ in self.ranges]

    def code(self, v, rank, phase=0, first=0):
        """What a worker's vector, or an owner's mean of a range, decodes to."""
        s = self.scheme
        if s.code in ("topk", "threshold", "adaptive"):
            return self.sparse(v, rank, phase)
        h = number(stream_of(s.seed, self.name), np.arange(first, first + v.size), self.step, rank, phase)
        u = ((h >> 8) | 1) * 2.0**-24
        return {"onebit": lambda: onebit(v, s.block_size, s.zeros), "signsgd": lambda: signsgd(v, s.block_size, s.zeros),
                "blockwise8": lambda: dynamic(v, s.block_size) if s.table == "dynamic" else
                levels(v, s.block_size, 127, np.full(v.size, 0.5)),
                "qsgd": lambda: levels(v, s.block_size, 2 ** (s.bits - 1) - 1, u, s.norm),
                "terngrad": lambda: terngrad(v, s.clip, u), "natural": lambda: natural(v, h)}[s.code]()

    def sparse(self, v, rank, phase):
        """The same of codes that drop entries, and in a range only have room for its share."""
        s, ratio = self.scheme, self.scheme.ratio_at(self.step)
        room, tau = {"threshold": s.capacity}.get(s.code, ratio), 0
        if s.scope == "model":
            room = min(1, 2 * ratio)
            if phase == 0:
                state = self.states[rank]
                tau, state["magnitudes"], state["threshold"][1] = state["threshold"][0], abs(sample(v, self.step)), 1
        kept = (beyond(v, s.tau) if s.code == "threshold" else largest_of_each_sign(v, ratio, self.step) if s.code == "adaptive" else
                beyond(v, tau) if tau else largest(v, ratio, self.step))
        out = np.zeros_like(v)
        for range_ in self.ranges if s.exchange == "sra" and phase == 0 else [slice(0, v.size)]:
            part = v[range_]
            if not part.size:
                continue
            slots = -(-max(1, math.ceil(room * part.size)) // 8) * 8
            part = np.where(first(kept[range_], slots, self.step), part, np.float32(0))
            if s.code == "threshold":
                part = np.sign(part) * np.float32(s.tau)
            elif s.code == "adaptive":
                part = by_stretch(means, part)
            elif s.values == "float16":
                part = part.astype(np.float16)
            elif s.values == "sign" and s.mean == "tensor":
                part = signs(part, s.values) if part.any() else part
            elif s.values != "float32":
                part = by_stretch(lambda v: signs(v, s.values), part)
            out[range_] = part
        return out

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

    def owners(self):
        """What the owners have kept, of all ranges."""
        whole = np.zeros(sum(owned.size for owned in self.owned), np.float32)
        for range_, owned in zip(self.ranges, self.owned):
            whole[range_] = owned
        return whole

    def reduce(self, gradients, parameters):
        """What each worker's optimizer gets."""
        self.sent = []
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
        if dense:
            mean = np.mean(given, axis=0, dtype=np.float64).astype(f)
            for g, state in zip(given, self.states):
                if s.memory == "ef21":
                    state["estimate"], state["mean"] = g, mean
            return [mean] * self.n
        sent = []
        for rank, (g, state) in enumerate(zip(given, self.states)):
            if s.memory == "error_feedback":
                v = g + state["residual"]
                sent.append(self.code(v, rank))
                state["residual"] = v - sent[-1]
            else:
                sent.append(self.code(g - state["estimate"], rank))
        self.sent = sent
        mean = self.exchange(sent)
        results = []
        for g, state, own in zip(gradients, self.states, sent):
            if s.memory == "ef21":
                state["estimate"] = state["estimate"] + own
                state["mean"] = state["mean"] + mean
                results.append(state["mean"])
                continue
            if s.momentum and s.code != "onebit":  # which sends something of every entry
                state["velocity"] = np.where(own != 0, f(0), state["velocity"])
            local = {"none": f(0), "sum": g, "replace": g - own, "error": state["residual"]}[s.merge]
            results.append(mean + local)
            if s.merge == "error":
                state["residual"] = np.zeros_like(g)
        return results


def decide_together(scheme, simulations, step):
    """The threshold of the next step, where the tensors of a worker share one."""
    ratio = scheme.ratio_at(step + 1)
    if scheme.scope != "model" or scheme.ratio_at(step) == 1:
        return
    for states in zip(*(simulation.states for simulation in simulations)):
        magnitudes = np.concatenate([state["magnitudes"] for state in states])
        weights = np.concatenate([np.full(state["magnitudes"].size, (state["residual"].size << 20) // state["magnitudes"].size)
                                  for state in states])  # the entries that each of a sample stands for
        order = np.argsort(-magnitudes)
        place = (np.cumsum(weights[order]) <= int(ratio * int(weights.sum()))).sum()
        for state in states:
            state["threshold"][0] = np.nextafter(magnitudes[order[place]], np.float32(np.inf))


CODES = [
    Scheme(code="threshold"), Scheme(code="threshold", capacity=0.25, exchange="sra"),
    Scheme(code="adaptive"), Scheme(code="adaptive", memory="none", exchange="sra"),
    Scheme(code="topk", values="sign"), Scheme(code="topk", values="2bit"),
    Scheme(code="topk", values="float16", exchange="sra"), Scheme(code="topk", values="sign", mean="tensor", exchange="sra"),
    Scheme(code="topk", scope="model"), Scheme(code="topk", scope="model", exchange="sra", warmup=2),
    Scheme(code="onebit", zeros=True),
    Scheme(code="signsgd", exchange="sra"), Scheme(code="signsgd", zeros=True, exchange="sra"), Scheme(code="signsgd", block_size=2048),
    Scheme(code="blockwise8"), Scheme(code="blockwise8", exchange="sra"),
    Scheme(code="blockwise8", table="dynamic"), Scheme(code="blockwise8", table="dynamic", exchange="sra"),
    Scheme(code="qsgd", memory="none"), Scheme(code="qsgd", memory="none", exchange="sra"), Scheme(code="qsgd"),
    Scheme(code="qsgd", memory="none", bits=2, norm="l2", seed=3), Scheme(code="qsgd", bits=8, norm="l2", exchange="sra"),
    Scheme(code="qsgd", memory="none", bits=2, exchange="sra"), Scheme(code="qsgd", bits=8), Scheme(code="qsgd", memory="none", norm="l2"),
    Scheme(code="terngrad", memory="none"), Scheme(code="terngrad", memory="none", clip=0.0, seed=-5, exchange="sra"),
    Scheme(code="natural", memory="none"), Scheme(code="natural", memory="none", exchange="sra"), Scheme(code="natural", exchange="sra"),
]
SAMPLED = [Scheme(code="topk", ratio=0.02), Scheme(code="topk", ratio=0.02, values="float16"),
           *(Scheme(code="topk", ratio=0.02, values="sign", mean=mean, exchange="sra") for mean in ("unit", "tensor")),
           Scheme(code="topk", ratio=0.02, values="2bit", exchange="sra"), Scheme(code="topk", ratio=0.02, scope="model"),
           Scheme(code="adaptive", ratio=0.02)]
TRAINING = [
    Scheme(code="topk"), Scheme(code="topk", memory="none"), Scheme(code="onebit"), Scheme(code="onebit", exchange="sra"),
    Scheme(code="topk", momentum=0.9), Scheme(code="topk", momentum=0.9, nesterov=True, warmup=3),
    Scheme(code="adaptive", momentum=0.5, clip_norm=20.0, weight_decay=0.01),
    Scheme(code="topk", momentum=0.9, nesterov=True, clip_norm=20.0, weight_decay=0.01, exchange="sra"),
    Scheme(code="onebit", momentum=0.9, exchange="sra"),
    Scheme(code="topk", memory="ef21"), Scheme(code="onebit", memory="ef21", eta=0.25, warmup=3),
    Scheme(code="onebit", memory="ef21", exchange="sra"), Scheme(code="topk", memory="ef21", eta=0.5, exchange="sra"),
    Scheme(code="qsgd", memory="ef21"),
    *(Scheme(code="topk", merge=merge, average_every=6) for merge in ("sum", "replace", "error")),
    Scheme(code="onebit", merge="replace", exchange="sra", average_every=5, warmup=2),
    Scheme(code="threshold", merge="error", average_every=7), Scheme(code="qsgd", merge="sum", average_every=4, warmup=1),
    Scheme(code="blockwise8", merge="error", average_every=20),
    Scheme(code="adaptive", ratio=0.02, merge="replace", average_every=8, schedule="dgc", schedule_steps=5, exchange="sra"),
    Scheme(code="topk", ratio=0.02, momentum=0.9, schedule="dgc", schedule_steps=5, warmup=2),
    Scheme(code="topk", ratio=0.02, momentum=0.9, schedule="dgc", schedule_steps=5, scope="model", values="2bit"),
    Scheme(code="topk", ratio=0.02, merge="replace", average_every=8, schedule="merging", schedule_steps=15),
]
RUNS = [(scheme, op) for op, schemes in (("average", CODES + SAMPLED + TRAINING), ("sum", TRAINING)) for scheme in schemes]
"""What is exchanged and by which of Horovod's ops, of which codes know nothing."""


def runs(workers):
    """With more than two workers, sums of those that depend on how many there are."""
    return [(scheme, op) for scheme, op in RUNS if workers == 2 or op == "average" or scheme.exchange == "sra" or scheme.clip_norm]


# blocks are not cut, so it doesn't matter where hosts cut tensors
BY_HOST = [Scheme(code="onebit", exchange="sra", hierarchical=True), Scheme(code="signsgd", hierarchical=True)]


def shapes_of(scheme):
    return LARGE if scheme in SAMPLED else SHAPES


def train(scheme, workers, steps, lr=0.1):
    """Plain SGD of all workers from the same start, on mean gradients; those of a step are drawn until none is near a decision.

    Returns:
        Of each step and worker, the tensors' gradients, what the optimizer got, the parameters after it, and what was sent, by name;
        and the simulations by name.
    """
    random, sizes = np.random.default_rng(0), {name: math.prod(shape) for name, shape in shapes_of(scheme).items()}
    simulations = {name: Simulation(scheme, name, size, workers, i) for i, (name, size) in enumerate(sizes.items())}
    parameters = {name: [np.zeros(size, np.float32)] * workers for name, size in sizes.items()}
    history = []
    for step in range(steps):
        gradients, results, simulations = _clear_step(scheme, random, sizes, simulations, parameters)
        decide_together(scheme, simulations.values(), step)
        for name in sizes:
            parameters[name] = [p - np.float32(lr) * r for p, r in zip(parameters[name], results[name])]
            if scheme.average_every and (step + 1) % scheme.average_every == 0:
                mean = np.mean(parameters[name], axis=0, dtype=np.float64).astype(np.float32)
                parameters[name] = [mean] * workers
        history.append((gradients, results, parameters.copy(), {name: one.sent for name, one in simulations.items()}))
    return history, simulations


def _clear_step(scheme, random, sizes, simulations, parameters):
    for _ in range(1000):
        gradients = {name: random.normal(size=(simulations[name].n, size)).astype(np.float32) for name, size in sizes.items()}
        for g in gradients.values():
            g[:, ::5] *= not scheme.zeros
        after = copy.deepcopy(simulations)
        try:
            return gradients, {name: after[name].reduce(list(gradients[name]), parameters[name]) for name in sizes}, after
        except NearADecision:
            continue
    raise AssertionError(f"{scheme}: all gradients have an entry near a decision")
