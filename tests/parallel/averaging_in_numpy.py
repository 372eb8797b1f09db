"""Model averaging of all workers in one process, written from the formulas: local SGD or AdamW on a linear layer, mean
differences, an outer SGD with Nesterov momentum, and 1-bit codes with error feedback."""

import numpy as np

INPUTS, OUTPUTS, BATCH, BLOCK = 30, 40, 8, 128
BETAS, DECAY, EPSILON = (0.875, 0.96875), 0.01, 1e-15
"""Of AdamW: the first two are exact in fp32, in which Keras has them, and the last is so small that it doesn't matter where it is
added."""


def weight():
    return np.random.default_rng(0).normal(0, 0.2, (OUTPUTS, INPUTS))


def batch(step, rank):
    """Another batch on each worker, the same in every run: inputs and targets."""
    random = np.random.default_rng([step, rank])
    return random.normal(size=(BATCH, INPUTS)), random.normal(size=(BATCH, OUTPUTS))


def gradient(w, step, rank):
    """Of the mean squared error of x wᵀ."""
    x, y = batch(step, rank)
    return 2 / y.size * (x @ w.T - y).T @ x


def onebit(v):
    """What a block's entries decode to: the mean of those with their sign."""
    decoded = np.empty_like(v)
    for first in range(0, v.size, BLOCK):
        block, out = v[first:first + BLOCK], decoded[first:first + BLOCK]
        for side in (block >= 0, block < 0):
            if side.any():
                out[side] = block[side].mean(dtype=np.float64)
    return decoded


def averagings(every, steps):
    """The steps after which the workers average."""
    found, step = [], 0
    while (step := step + (every(step) if callable(every) else every)) <= steps:
        found.append(step)
    return found


def simulate(world, steps, every, lr=0.5, momentum=0.0, adamw=False, outer=(1.0, 0.0), average_momentum=False, compressed=False):
    """Each worker's weight after so many steps."""
    theta = [weight() for _ in range(world)]
    velocity, squares = ([np.zeros_like(w) for w in theta] for _ in range(2))
    residual = [np.zeros(w.size, np.float32) for w in theta]
    anchor, outer_velocity = weight(), np.zeros((OUTPUTS, INPUTS))
    for step in range(steps):
        for rank in range(world):
            g = gradient(theta[rank], step, rank)
            if adamw:
                b, c = BETAS
                velocity[rank] = b * velocity[rank] + (1 - b) * g
                squares[rank] = c * squares[rank] + (1 - c) * g**2
                mean, square = velocity[rank] / (1 - b ** (step + 1)), squares[rank] / (1 - c ** (step + 1))
                theta[rank] = (1 - lr * DECAY) * theta[rank] - lr * mean / (np.sqrt(square) + EPSILON)
            else:
                velocity[rank] = momentum * velocity[rank] + g
                theta[rank] = theta[rank] - lr * velocity[rank]
        if step + 1 not in averagings(every, steps):
            continue
        deltas = [anchor - w for w in theta]
        if compressed:
            for rank, delta in enumerate(deltas):
                v = delta.astype(np.float32).ravel() + residual[rank]
                decoded = onebit(v)
                residual[rank], deltas[rank] = v - decoded, decoded.reshape(delta.shape)
        mean = np.mean(deltas, axis=0)
        outer_velocity = outer[1] * outer_velocity + mean
        anchor = anchor - outer[0] * (mean + outer[1] * outer_velocity)
        theta = [anchor.copy() for _ in theta]
        if average_momentum:
            velocity = [np.mean(velocity, axis=0) for _ in velocity]
    return theta


CODES = [*(f"{code}min_numel=0,exchange=allgather" for code in (
    "onebit:", "signsgd:", "blockwise8:", "threshold:tau=0.003,", "topk:ratio=0.1,", "topk:ratio=0.1,values=2bit,", "adaptive:ratio=0.1,",
    "qsgd:memory=error_feedback,")), "randomk:min_numel=0", "powersgd:rank=2,min_numel=0"]
"""Those that keep what they don't send."""

SETTINGS = {
    "every step": {"every": 1},
    "every 4 steps": {"every": 4},
    "every step, then every 5": {"every": lambda step: 1 if step < 4 else 5},
    "momentum": {"every": 4, "momentum": 0.9, "lr": 0.1},
    "momentum averaged": {"every": 4, "momentum": 0.9, "lr": 0.1, "average_momentum": True},
    "outer": {"every": 4, "outer": (0.7, 0.9)},
    "DiLoCo": {"every": 10, "adamw": True, "lr": 0.01, "outer": (0.7, 0.9)},
    "compressed": {"every": 1, "compressed": True},
    "compressed outer": {"every": 3, "outer": (0.7, 0.9), "compressed": True},
}
