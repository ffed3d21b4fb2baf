"""Orthogonal Hadamard transforms of any order 2^k, 12 x 2^k, 20 x 2^k or 28 x 2^k, which covers head dimensions 64, 80, 96, 112, 128, 192, 256.

Spreads an outlier channel over all channels (QuaRot, arXiv 2404.00456). `transform` adds in a stated order, elementwise, so that sealed bytes
do not depend on the batch; `matrix` is the same map as a matrix, for queries and outputs, where rounding may differ.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvarto.jit import torch

if TYPE_CHECKING:
    from torch import Tensor

# A prime q with q % 4 == 3 gives Paley's first construction of order q + 1, one with q % 4 == 1 his second of order 2 (q + 1).
_BASES = {12: 11, 20: 19, 28: 13}


def order_base(order: int) -> int | None:
    """1, 12, 20 or 28 if `order` is that times a power of two, else None."""
    for base in (1, *_BASES):
        quotient = order // base
        if order % base == 0 and quotient & (quotient - 1) == 0:
            return base
    return None


def transform(x: Tensor, *, inverse: bool = False) -> Tensor:
    """x: float32 [..., D]. Returns H x, or H^T x, with H orthogonal: H = (Paley base (x) Sylvester) / sqrt(D)."""
    order = x.shape[-1]
    base = order_base(order)
    assert base is not None, order
    power = order // base
    y = x.reshape(*x.shape[:-1], base, power)
    half = 1
    while half < power:
        pairs = y.reshape(*y.shape[:-1], power // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    if base > 1:
        signs = _paley(base)
        y = _signed_sums(y, [list(row) for row in zip(*signs, strict=True)] if inverse else signs)
    return y.flatten(-2) * float(order**-0.5)


def minus_signs(order: int) -> tuple[int, ...]:
    """For each column of the Paley base (1 column if it is 1) the rows that hold -1, as bits 2^row."""
    base = order_base(order)
    assert base is not None, order
    signs = _paley(base) if base > 1 else [[1]]
    return tuple(sum(1 << i for i in range(base) if signs[i][j] < 0) for j in range(base))


@cache
def matrix(order: int) -> Tensor:
    """float32 [D, D] on the CPU with `x @ matrix(D) == transform(x)` up to rounding; its transpose is the inverse."""
    return transform(torch.eye(order))


def _signed_sums(y: Tensor, signs: list[list[int]]) -> Tensor:
    """y [..., m, p]. Row i of the result is the sum over j of signs[i][j] * y[j], added from left to right."""
    rows = []
    for row in signs:
        total = y[..., 0, :] * row[0]
        for j, sign in enumerate(row[1:], start=1):
            total = total + y[..., j, :] if sign > 0 else total - y[..., j, :]
        rows.append(total)
    return torch.stack(rows, dim=-2)


@cache
def _paley(order: int) -> list[list[int]]:
    """A Hadamard matrix of order 12, 20 or 28 by Paley (J. Math. Phys. 12, 1933)."""
    q = _BASES[order]
    squares = {i * i % q for i in range(1, q)}
    chi = [0 if i == 0 else (1 if i in squares else -1) for i in range(q)]
    jacobsthal = [[chi[(i - j) % q] for j in range(q)] for i in range(q)]
    if q % 4 == 3:
        skew = [[0] + [1] * q] + [[-1, *row] for row in jacobsthal]
        return [[entry + (i == j) for j, entry in enumerate(row)] for i, row in enumerate(skew)]
    conference = [[0] + [1] * q] + [[1, *row] for row in jacobsthal]
    blocks = {0: ((1, -1), (-1, -1)), 1: ((1, 1), (1, -1)), -1: ((-1, -1), (-1, 1))}
    return [[blocks[entry][half][k] for entry in row for k in range(2)] for row in conference for half in range(2)]
