"""Model averaging of all workers in one process, written from the formulas: local SGD on a linear layer, mean differences, an
outer SGD with Nesterov momentum, and 1-bit codes with error feedback."""

import numpy as np

INPUTS, OUTPUTS, BATCH, BLOCK = 30, 40, 8, 128


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


def simulate(world, steps, every, lr=0.5, momentum=0.0, outer=(1.0, 0.0), average_momentum=False, compressed=False):
    """Each worker's weight after so many steps."""
    theta = [weight() for _ in range(world)]
    velocity = [np.zeros_like(w) for w in theta]
    residual = [np.zeros(w.size, np.float32) for w in theta]
    anchor, outer_velocity = weight(), np.zeros((OUTPUTS, INPUTS))
    for step in range(steps):
        for rank in range(world):
            velocity[rank] = momentum * velocity[rank] + gradient(theta[rank], step, rank)
            theta[rank] = theta[rank] - lr * velocity[rank]
        if (step + 1) % every:
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


SETTINGS = {
    "every step": {"every": 1},
    "every 4 steps": {"every": 4},
    "momentum": {"every": 4, "momentum": 0.9, "lr": 0.1},
    "momentum averaged": {"every": 4, "momentum": 0.9, "lr": 0.1, "average_momentum": True},
    "outer": {"every": 4, "outer": (0.7, 0.9)},
    "compressed": {"every": 1, "compressed": True},
    "compressed outer": {"every": 3, "outer": (0.7, 0.9), "compressed": True},
}
