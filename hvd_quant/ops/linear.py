"""The specification of the codes that travel in sums, randomk and powersgd, in array operations as those of
:mod:`hvd_quant.ops.generic`, which has their names too."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device, size

from hvd_quant import wire
from hvd_quant.ops.arrays import Array, noise, quiet, stretches


def _counts(total: Array, out: Array) -> bool:
    """Whether a sum is finite; if it isn't, ``out`` becomes NaN."""
    xp = array_namespace(total)
    finite = bool(xp.all(xp.isfinite(total)))
    if not finite:
        out[:] = math.nan
    return finite


# ------------------------------------------------------------------------------------------------------------- randomk

def strata(grad: Array, count: int, key: int, step: int) -> Array:
    """Places of ``count`` different entries, int64, of which each entry is one with the probability count / N.

    The vector, closed to a ring, is cut into ``count`` stretches whose lengths differ by one at most; an entry of each is
    drawn, and then the ring is turned by as many entries as are drawn. An entry meets a stretch of length L with the
    probability L / N and is drawn there with 1 / L, which makes 1 / N a stretch, whatever the lengths.
    """
    xp = array_namespace(grad)
    numel, random = size(grad), noise(count + 2, grad, key, 0, step, 0, phase=2)
    bounds = xp.arange(count + 1, dtype=xp.int64, device=device(grad)) * numel // count
    place = bounds[:-1] + (random[2:] * (bounds[1:] - bounds[:-1]) >> 32)
    turn = random[0] * numel + (random[1] * numel >> 32) >> 32
    return (place + turn) % numel


APART = ("{name}: the workers drew different entries, which depend on the seed, the name and the number of exchanges before: make "
         "and name parameters alike on all workers, and load the same checkpoint")


def randomk_encode(grad: Array, residual: Array | None, index: Array, scale: float = 1.0) -> Array:
    """The entries of v at ``index`` times ``scale``, NaN if any entry of v is not finite, so that all workers see it; then a
    small number m that ``index`` decides and m * m, by which they see whether they all have the same."""
    xp = array_namespace(grad)
    with quiet():
        finite = _all_finite(grad, residual)
        value = grad[index] if residual is None else grad[index] + residual[index]
        value = value if scale == 1.0 else value * scale
    mark = xp.astype(index[:1] % 64, xp.float32)
    return xp.concat([xp.where(finite, value, xp.full_like(value, math.nan)), mark, mark * mark])


def _all_finite(grad: Array, residual: Array | None) -> Array:
    xp = array_namespace(grad)
    g, e = xp.reshape(grad, (-1, 1)), None if residual is None else xp.reshape(residual, (-1, 1))
    largest = xp.zeros((), dtype=xp.float32, device=device(grad))
    for rows in stretches(g):  # a NaN is the largest of all
        largest = xp.maximum(largest, xp.max(xp.abs(g[rows] if e is None else g[rows] + e[rows])))
    return xp.isfinite(largest)


def randomk_decode(total: Array, grad: Array, residual: Array | None, index: Array, world: int, name: str, out: Array
                   ) -> tuple[Array, bool]:
    """The mean of what :func:`randomk_encode` made, and whether it was finite; if so, e = v but 0 at ``index``.

    Raises:
        hvd_quant.wire.PayloadError: on all workers, if they don't have the same ``index``.
    """
    mark, square = (float(x) for x in total[-2:])
    if mark * mark != world * square:
        raise wire.PayloadError(APART.format(name=name))
    total = total[:-2]
    if not _counts(total, out):
        return out, False
    if residual is not None:
        residual += grad
        residual[index] = 0.0
    out[:] = 0.0
    out[index] = total / world
    return out, True


# ------------------------------------------------------------------------------------------------------------ powersgd

class Matrix(NamedTuple):
    """M = G + E, which is never made as a whole."""

    grad: Array
    residual: Array | None

    def rows(self, rows: slice) -> Array:
        with quiet():
            return self.grad[rows] if self.residual is None else self.grad[rows] + self.residual[rows]


def powersgd_matrix(grad: Array, residual: Array | None, columns: int) -> Matrix:
    """v as a matrix with so many columns."""
    xp = array_namespace(grad)
    return Matrix(*(None if x is None else xp.reshape(x, (-1, columns)) for x in (grad, residual)))


def powersgd_start(matrix: Matrix, kept: Array, key: int) -> Array:
    """Q transposed, from what was kept of it: each of its columns with a largest entry of 1, which the space that they span
    doesn't depend on; random where it is zero, as before the first step."""
    xp = array_namespace(kept)
    q = xp.reshape(kept, (-1, matrix.grad.shape[1]))
    peak = xp.max(xp.abs(q), axis=1, keepdims=True)
    return xp.where(peak > 0, q / xp.where(peak > 0, peak, xp.ones_like(peak)), _normal(xp, device(q), tuple(q.shape), key))


@functools.lru_cache(maxsize=4096)
def _normal(xp: Any, where: Any, shape: tuple[int, int], key: int) -> Array:
    return xp.asarray(normal(shape, key), device=where)


def normal(shape: tuple[int, ...], key: int) -> np.ndarray:
    """Normally distributed numbers, fp32, that the key decides."""
    return np.random.Generator(np.random.Philox(key=key % 2**64)).standard_normal(shape, np.float32)


def powersgd_left(matrix: Matrix, q: Array) -> Array:
    """P = M Q, of Q transposed."""
    xp = array_namespace(q)
    p = xp.empty((matrix.grad.shape[0], q.shape[0]), dtype=xp.float32, device=device(q))
    with quiet():
        for rows in stretches(matrix.grad):
            p[rows] = matrix.rows(rows) @ q.T
    return p


def powersgd_right(matrix: Matrix, p: Array) -> Array:
    """Q = transposed M P, transposed."""
    xp = array_namespace(p)
    q = xp.zeros((p.shape[1], matrix.grad.shape[1]), dtype=xp.float32, device=device(p))
    with quiet():
        for rows in stretches(matrix.grad):
            q += p[rows].T @ matrix.rows(rows)
    return q


def orthonormal(p: Array) -> Array:
    """An orthonormal basis of what the columns span, by modified Gram-Schmidt; NaN if anything is not finite.

    Workers of all kinds get the same bits: sums are of integers, which their order doesn't matter to. A column of which the
    others leave less than 1e-8 becomes zero.
    """
    xp = array_namespace(p)
    length, count = p.shape
    finite = xp.all(xp.isfinite(p))
    rest, columns = _scaled(xp.astype(xp.where(finite, p, xp.zeros_like(p)), xp.float64), 0.0), []
    for _ in range(count):
        column = _scaled(rest[:, :1], 1e-8)
        norm = xp.sqrt(_dot(column, column, length))
        column = column / xp.where(norm > 0, norm, xp.ones_like(norm))
        rest = rest[:, 1:] - column * _dot(column, rest[:, 1:], math.isqrt(length) + 1)
        columns.append(column)
    return xp.where(finite, xp.astype(xp.concat(columns, axis=1), xp.float32), xp.full_like(p, math.nan))


def _scaled(columns: Array, least: float) -> Array:
    """Columns with a largest entry of 1; zeros where that is ``least`` at most."""
    xp = array_namespace(columns)
    peak = xp.max(xp.abs(columns), axis=0, keepdims=True)
    return xp.where(peak > least, columns / xp.where(peak > least, peak, xp.ones_like(peak)), xp.zeros_like(columns))


def _dot(a: Array, b: Array, limit: int) -> Array:
    """The columns' products, as sums of integers; ``limit`` is what none of them exceeds."""
    xp = array_namespace(a)
    unit = 2.0 ** (62 - limit.bit_length())
    return xp.astype(xp.sum(xp.astype(xp.round(a * b * unit), xp.int64), axis=0, keepdims=True), xp.float64) / unit


EXPONENT = 0x7FF << 52
"""The bits of an fp64 number that say what power of two it begins with."""


def powersgd_decode(total: Array, own: Array, p: Array, matrix: Matrix, kept: Array, world: int, out: Array) -> tuple[Array, bool]:
    """The mean P Q', and whether it was finite; if so, e = v - P Q' of this worker's own Q, and the mean Q is kept.

    Arguments:
        total: the sum over the workers of what :func:`powersgd_right` made.
        own: what it made here.
        p: what :func:`orthonormal` made.
        kept: where the mean Q is kept.
    """
    if not _counts(total, out):
        return out, False
    xp = array_namespace(total)
    mean = total / world
    kept[:] = xp.reshape(mean, (-1,))
    result, (left, right) = xp.reshape(out, matrix.grad.shape), exact_factors(p, mean)
    for rows in stretches(matrix.grad):
        if matrix.residual is not None:
            residual = matrix.residual[rows]
            residual += matrix.grad[rows]
            residual -= p[rows] @ own
        result[rows] = left[rows] @ right
    return out, True


def exact_factors(p: Array, q: Array) -> tuple[Array, Array]:
    """Both in fp64, rounded so that their product is exact: workers of all kinds get the same bits, in whatever order they add."""
    bits = 51 - q.shape[0].bit_length()
    return _rounded(p, bits - 23), _rounded(q, 23)


def _rounded(x: Array, bits: int) -> Array:
    """x in fp64, as multiples of 2^-bits times the power of two below its largest entry."""
    xp = array_namespace(x)
    x = xp.astype(x, xp.float64)
    power = (xp.reshape(xp.max(xp.abs(x)), (1,)).view(xp.int64) & EXPONENT).view(xp.float64)
    unit = xp.where(power > 0, power, xp.ones_like(power)) * 2.0**-bits
    return xp.round(x / unit) * unit
