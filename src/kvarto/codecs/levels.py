"""Levels that are not evenly spaced, fitted to what they must hold: weighted k-means in one dimension, solved exactly. Numpy, no torch.

Numbers are normalised to -1 .. 1 and counted in BINS bins, so that what is kept of a text does not grow with it. In one dimension the clusters of
k-means are intervals, so the best 2^b levels are found by dynamic programming (Wang and Song, The R Journal 3/2 (2011)), not from a random start:

    best[k][j] = min over i of best[k - 1][i] + cost(i, j),   cost(i, j) the weighted squared error of bins i .. j - 1 about their mean
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BINS = 1024
# Of the mean weight, for numbers that have none: so that no level is lost where weights happen to be 0.
_LEAST_WEIGHT = 1e-6


class Histogram:
    """Normalised numbers by bin: how many, their sum and sum of squares, and their weights, plain and times the number. Float64 [BINS]."""

    def __init__(self) -> None:
        self.count, self.total, self.square, self.mass, self.moment = np.zeros((5, BINS))

    def add(self, u: NDArray[np.float32], weights: NDArray[np.float32] | None = None) -> None:
        """u and weights, any one shape. What lies outside -1 .. 1 is an outlier and left out. Without weights all count alike."""
        inside = np.abs(u) <= 1
        x = u[inside].astype(np.float64)
        w = np.ones_like(x) if weights is None else weights[inside].astype(np.float64)
        bins = np.minimum(((x + 1.0) * (BINS / 2)).astype(np.int64), BINS - 1)
        for into, what in (
            (self.count, None), (self.total, x), (self.square, x * x), (self.mass, w), (self.moment, w * x),
        ):  # fmt: skip
            into += np.bincount(bins, weights=what, minlength=BINS)


def fit_levels(histogram: Histogram, bits: int) -> NDArray[np.float32]:
    """The 2^bits levels of least weighted squared error, ascending, float32; evenly spaced if nothing was counted."""
    count = 1 << bits
    if not histogram.count.sum():
        return ((2.0 * np.arange(count) + 1.0) / count - 1.0).astype(np.float32)
    least = _LEAST_WEIGHT * max(histogram.mass.sum() / histogram.count.sum(), np.finfo(float).tiny)
    mass, moment = histogram.mass + least * histogram.count, histogram.moment + least * histogram.total
    ends = _intervals(mass, moment, count)
    held, summed = (np.concatenate([[0.0], np.cumsum(x)])[ends] for x in (mass, moment))
    weight = np.diff(held)
    middle = (ends[1:] + ends[:-1]) / BINS - 1.0
    levels = np.where(weight > 0, np.diff(summed) / np.where(weight > 0, weight, 1.0), middle)
    return np.maximum.accumulate(np.clip(levels, -1.0, 1.0)).astype(np.float32)


def _intervals(mass: Array, moment: Array, count: int) -> NDArray[np.int64]:
    """The bins at which the intervals of least cost begin and end, [count + 1]."""
    centres = (np.arange(BINS) + 0.5) * (2.0 / BINS) - 1.0
    held, summed, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (mass, moment, mass * centres**2))
    # cost[i, j] of bins i .. j - 1. Within a bin all numbers are at its centre, but for the means.
    weight, sums = held - held[:, None], summed - summed[:, None]
    cost = (squares - squares[:, None]) - np.divide(sums**2, weight, out=np.zeros_like(weight), where=weight > 0)
    cost = np.where(np.arange(BINS + 1) > np.arange(BINS + 1)[:, None], np.maximum(cost, 0.0), np.inf)
    best = np.full(BINS + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(count):
        every = best[:, None] + cost
        choices.append(every.argmin(axis=0))
        best = every.min(axis=0)
    ends = [BINS]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return np.array(ends[::-1])


def thresholds(levels: NDArray[Any]) -> NDArray[np.float32]:
    """Half-way between neighbouring levels: where the nearest one changes."""
    found: NDArray[np.float32] = ((levels[1:].astype(np.float64) + levels[:-1]) / 2).astype(np.float32)
    return found


def normalised(histogram: Histogram, levels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Q-Norm (KVQuant, 3.6): the levels, drawn so that what is decoded has the mean and the variance of what was encoded.

    Codes are chosen by `thresholds` of the levels as they were. Counts are not weighted.
    """
    count = histogram.count.sum()
    if not count:
        return levels
    centres = (np.arange(BINS) + 0.5) * (2.0 / BINS) - 1.0
    decoded = levels[np.searchsorted(thresholds(levels), centres)].astype(np.float64)
    mean, square = histogram.total.sum() / count, histogram.square.sum() / count
    level_mean, level_square = ((histogram.count * x).sum() / count for x in (decoded, decoded**2))
    variance, level_variance = square - mean**2, level_square - level_mean**2
    if not (variance > 0 and level_variance > 0):
        return levels
    factor = np.sqrt(variance / level_variance)
    drawn: NDArray[np.float32] = ((levels - level_mean) * factor + mean).astype(np.float32)
    return drawn
