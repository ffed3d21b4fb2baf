"""Statistics in bounded memory against numpy on everything."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvarto.calibrate import statistics
from kvarto.calibrate.record import PERCENTILES
from kvarto.calibrate.statistics import Magnitudes, Moments, SideStatistics, Tails


def numbers(tokens: int, seed: int = 0) -> torch.Tensor:
    """float32 [2, tokens, 8] with outliers, and channels far from 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, tokens, 8, generator=generator) * torch.logspace(-3, 2, 8)
    x[:, :, 3] += 200
    x[1, tokens // 2, 5] = -3e4
    x[0, :, 7] = 0
    return x


def pieces(x: torch.Tensor, sizes: tuple[int, ...] = (1, 63, 500)) -> list[torch.Tensor]:
    cuts = [*sizes, x.shape[1] - sum(sizes)]
    return list(x.split(cuts, dim=1))


def test_moments() -> None:
    x, moments = numbers(3000), Moments()
    for piece in pieces(x):
        moments.add(piece)
    assert np.allclose(moments.mean, x.double().mean(dim=1), rtol=1e-6, atol=1e-7)
    assert np.allclose(moments.square, x.double().square().mean(dim=1), rtol=1e-6)
    assert moments.mean.dtype == np.float32


def test_percentiles_of_magnitudes_are_not_too_small_and_hardly_too_large() -> None:
    x, magnitudes = numbers(3000), Magnitudes(2)
    for piece in pieces(x):
        magnitudes.add(piece)
    size = np.sort(x.abs().flatten(1).numpy(), axis=1)
    assert np.array_equal(magnitudes.amax, size[:, -1])
    for i, percentile in enumerate(PERCENTILES):
        exact = size[:, math.ceil(percentile / 100 * size.shape[1]) - 1]
        assert (magnitudes.percentiles[:, i] >= exact * (1 - 1e-6)).all()
        assert (magnitudes.percentiles[:, i] <= exact * 2 ** (1 / 64) * (1 + 1e-6)).all()


@pytest.mark.parametrize("limit", [102_400, 1000])
def test_thresholds_are_exact_over_the_tokens_that_are_looked_at(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "THRESHOLD_TOKENS", limit)
    x = numbers(3000)
    tails = Tails(3000)
    for piece in pieces(x):
        tails.add(piece)
    chosen = np.sort(x[:, :: tails.stride].numpy(), axis=1)
    assert tails.tokens == chosen.shape[1] == min(limit, 3000)
    rank = math.ceil(0.005 * tails.tokens)
    assert np.array_equal(tails.low, chosen[:, rank - 1])
    assert np.array_equal(tails.high, chosen[:, -rank])


def test_it_does_not_matter_how_the_text_is_cut() -> None:
    x = numbers(2000)
    whole, parts = SideStatistics(2, 2000), SideStatistics(2, 2000)
    whole.add(x)
    for piece in pieces(x):
        parts.add(piece)
    for name, array in whole.arrays("k").items():
        assert np.allclose(array, parts.arrays("k")[name], rtol=1e-6, atol=1e-7), name


def test_nothing_grows_with_the_text() -> None:
    tails = Tails(100_000)
    for seed in range(20):
        tails.add(numbers(5000, seed))
    assert tails._low.shape[-1] == tails._high.shape[-1] == 500
