"""Intervals and exact tests against known values, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvarto import stats


def test_equal_weights_give_the_t_interval_over_cluster_means():
    found = stats.clustered_mean([1.0, 2.0, 3.0], [1, 1, 1])
    assert found.mean == pytest.approx(2.0)
    assert found.error == pytest.approx(1 / math.sqrt(3))
    assert found.high - found.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_scaling_all_weights_changes_nothing():
    once = stats.clustered_mean([3.0, 5.0, 1.0, 4.0], [2, 4, 1, 3])
    thrice = stats.clustered_mean([9.0, 15.0, 3.0, 12.0], [6, 12, 3, 9])
    assert (once.mean, once.low, once.high) == pytest.approx((thrice.mean, thrice.low, thrice.high))


def test_unequal_weights_follow_the_ratio_formula():
    totals, weights = np.array([10.0, 1.0, 4.0]), np.array([5.0, 1.0, 2.0])
    mean = 15 / 8
    error = math.sqrt(3 / 2 * ((totals - mean * weights) ** 2).sum()) / 8
    found = stats.clustered_mean(totals, weights)
    assert (found.mean, found.error) == pytest.approx((mean, error))


def test_one_cluster_has_no_interval():
    found = stats.clustered_mean([2.0], [4.0])
    assert (found.mean, found.low, found.high) == (0.5, -math.inf, math.inf)
    assert stats.smallest_mean_seen(found) == math.inf


@pytest.mark.parametrize(("totals", "weights"), [([], []), ([1.0], [0.0]), ([1.0, 2.0], [1.0])])
def test_clustered_mean_refuses_what_has_no_mean(totals, weights):
    with pytest.raises(ValueError, match="clustered_mean"):
        stats.clustered_mean(totals, weights)


def test_the_clustered_interval_covers_where_the_naive_one_does_not():
    """Documents differ (sd 1) more than tokens average out (sd 3 over 100): the naive interval is several times too short."""
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(1000):
        weights = rng.integers(60, 140, size=8)
        effects = rng.normal(size=8)
        tokens = [rng.normal(effect, 3, size=weight) for effect, weight in zip(effects, weights, strict=True)]
        found = stats.clustered_mean([t.sum() for t in tokens], weights)
        covered += found.low <= 0 <= found.high
        flat = np.concatenate(tokens)
        naive += abs(flat.mean()) <= 1.96 * flat.std() / math.sqrt(len(flat))
    assert 0.93 <= covered / 1000 <= 0.97
    assert naive / 1000 < 0.6


def test_smallest_mean_seen_is_seen_with_its_power():
    rng = np.random.default_rng(1)
    effect = (stats.t_quantile(12, 0.975) + stats.t_quantile(12, 0.8)) / math.sqrt(12)
    seen = 0
    for _ in range(2000):
        sample = stats.clustered_mean(rng.normal(effect, 1, size=12), np.ones(12))
        seen += sample.low > 0
    assert seen / 2000 == pytest.approx(0.8, abs=0.04)


def test_clusters_needed_is_the_first_that_decides():
    estimate = stats.clustered_mean([0.8, 1.4, 0.6, 1.6, 0.9], [1] * 5)
    needed = stats.clusters_needed(estimate, 1.3)
    spread = estimate.error * math.sqrt(5)
    halves = [stats.t_quantile(n, 0.975) * spread / math.sqrt(n) for n in (needed - 1, needed)]
    distance = 1.3 - estimate.mean
    assert halves[1] <= distance < halves[0]


def test_clusters_needed_is_none_at_the_margin_itself():
    estimate = stats.clustered_mean([1.0, 2.0, 3.0], [1, 1, 1])
    assert stats.clusters_needed(estimate, 2.0) is None


@pytest.mark.parametrize(
    ("losses", "gains", "p"), [(0, 0, 1.0), (5, 0, 1 / 32), (10, 2, 79 / 4096), (3, 3, 0.65625), (0, 4, 1.0)]
)
def test_mcnemar_exact_values(losses, gains, p):
    assert stats.mcnemar(losses, gains) == pytest.approx(p)


def test_mcnemar_keeps_its_level():
    rng = np.random.default_rng(2)
    discordant = rng.binomial(32, 0.2, size=4000)
    losses = rng.binomial(discordant, 0.5)
    rejected = [stats.mcnemar(int(b), int(n - b)) < 0.05 for b, n in zip(losses, discordant, strict=True)]
    assert np.mean(rejected) <= 0.05


def test_clopper_pearson_known_values():
    found = stats.clopper_pearson(10, 100)
    assert (found.low, found.high) == pytest.approx((0.0490, 0.1762), abs=1e-4)
    assert (stats.clopper_pearson(0, 5).low, stats.clopper_pearson(5, 5).high) == (0.0, 1.0)


def test_upper_bound_without_losses_is_the_rule_of_three():
    assert stats.upper_bound(0, 24) == pytest.approx(1 - 0.05 ** (1 / 24))
    assert stats.upper_bound(0, 0) == 1.0
    assert stats.lower_bound(0, 0) == 0.0


def test_upper_bound_covers():
    rng = np.random.default_rng(3)
    bounds = [stats.upper_bound(int(k), 32) for k in rng.binomial(32, 0.1, size=3000)]
    assert np.mean([bound >= 0.1 for bound in bounds]) >= 0.95


def test_smallest_loss_seen_is_the_first_significant_count():
    assert stats.smallest_loss_seen(24) == pytest.approx(5 / 24)
    assert stats.mcnemar(5, 0) < stats.ALPHA < stats.mcnemar(4, 0)
    assert stats.smallest_loss_seen(4) is None


def test_pairs_needed_to_pass_without_losses():
    assert stats.pairs_needed(0, 0, 10, margin=0.15) == 19
    assert stats.upper_bound(0, 19) < 0.15 <= stats.upper_bound(0, 18)


def test_pairs_needed_when_enough_were_seen_is_what_was_seen():
    assert stats.pairs_needed(0, 0, 40, margin=0.15) == 40


def test_pairs_needed_to_fail_at_the_rate_seen():
    needed = stats.pairs_needed(4, 0, 20, margin=0.15)
    assert needed is not None
    assert stats.mcnemar(math.ceil(0.2 * needed), 0) < stats.ALPHA
    assert needed > 20


def test_pairs_needed_is_none_between_pass_and_fail():
    assert stats.pairs_needed(5, 3, 20, margin=0.15) is None
