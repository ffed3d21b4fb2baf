"""Weighted k-means in one dimension against every way to cut few numbers, against Lloyd and Max, and Q-Norm's moments."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from kvarto.codecs.levels import BINS, Histogram, fit_levels, normalised, thresholds


def histogram(numbers: np.ndarray, weights: np.ndarray | None = None) -> Histogram:
    made = Histogram()
    made.add(numbers.astype(np.float32), None if weights is None else weights.astype(np.float32))
    return made


def cost(numbers: np.ndarray, weights: np.ndarray, levels: np.ndarray) -> float:
    return float((weights * np.square(numbers[:, None] - levels).min(axis=1)).sum())


@pytest.mark.parametrize("seed", range(5))
def test_no_other_levels_cost_less(seed: int) -> None:
    """Of 12 weighted numbers at the middles of bins all ways to cut them into 4 runs are tried."""
    random = np.random.default_rng(seed)
    numbers = np.sort(random.choice(BINS, 12, replace=False) * 2.0 / BINS - 1.0 + 1.0 / BINS)
    weights = random.exponential(size=12) ** 3
    found = fit_levels(histogram(numbers, weights), 2)
    best = np.inf
    for cuts in combinations(range(1, 12), 3):
        parts = np.split(np.arange(12), cuts)
        levels = np.array([np.average(numbers[part], weights=weights[part]) for part in parts])
        best = min(best, cost(numbers, weights, levels))
    assert cost(numbers, weights, found) == pytest.approx(best, rel=1e-3, abs=1e-9)


def test_a_gaussian_gets_the_levels_of_lloyd_and_max() -> None:
    """Max (1960): +-.2451, .7560, 1.3439, 2.1519 for unit variance; here 5 deviations fill the range."""
    numbers = np.random.default_rng(0).normal(size=2_000_000) / 5
    assert fit_levels(histogram(numbers), 3)[4:] * 5 == pytest.approx([0.2451, 0.7560, 1.3439, 2.1519], abs=0.02)


def test_weights_draw_levels_to_where_they_count() -> None:
    numbers = np.linspace(-1, 1, 10_000)
    weighted = fit_levels(histogram(numbers, np.where(numbers > 0, 100.0, 1.0)), 3)
    assert (weighted > 0).sum() >= 6
    assert fit_levels(histogram(numbers), 3) == pytest.approx((2 * np.arange(8) + 1) / 8 - 1, abs=2e-3)


def test_what_lies_outside_takes_no_part_and_nothing_means_even_levels() -> None:
    inside, outside = np.linspace(-0.5, 0.5, 999), np.array([2.0, -40.0, np.nan])
    assert np.array_equal(fit_levels(histogram(np.append(inside, outside)), 2), fit_levels(histogram(inside), 2))
    assert np.array_equal(fit_levels(histogram(outside), 2), np.float32([-0.75, -0.25, 0.25, 0.75]))


def test_fewer_numbers_than_levels() -> None:
    levels = fit_levels(histogram(np.array([0.25, 0.5])), 4)
    assert len(levels) == 16
    assert bool((np.diff(levels) >= 0).all())
    assert {0.25, 0.5} <= set(np.round(levels, 6).tolist())


def test_q_norm_keeps_mean_and_variance() -> None:
    numbers = np.clip(np.random.default_rng(1).normal(0.1, 0.4, size=500_000), -0.999, 0.999)
    made = histogram(numbers)
    levels = fit_levels(made, 2)
    codes = np.searchsorted(thresholds(levels), numbers)
    drawn = normalised(made, levels)
    assert levels[codes].std() < 0.95 * numbers.std()
    assert drawn[codes].std() == pytest.approx(numbers.std(), rel=5e-3)
    assert drawn[codes].mean() == pytest.approx(numbers.mean(), abs=2e-3)
