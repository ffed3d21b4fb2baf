"""The statistics behind a verdict, as pure functions of counts and sums: intervals, exact tests, what could have been seen, what is missing.

Two kinds of evidence occur. Numbers per token (KL, log-likelihood) are correlated within a document, so the document is the unit and a mean
has a cluster-robust t interval. Yes-or-no answers (needles, JSON) are paired with the baseline's answer on the same input, so only the pairs
that disagree say anything, and exact binomial arguments hold at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
ALPHA = 0.05
POWER = 0.8
_MOST_SAMPLES = 1_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval. `error` is the standard error; with fewer than two clusters it and the bounds are infinite."""

    mean: float
    low: float
    high: float
    error: float
    clusters: int


@dataclass(frozen=True)
class Bounds:
    """An interval for a probability."""

    low: float
    high: float


def clustered_mean(totals: Sequence[float], weights: Sequence[float], level: float = LEVEL) -> Estimate:
    """Mean per token and its interval, where cluster (document) d contributes `totals[d]` summed over `weights[d]` tokens.

    mean = sum(totals) / sum(weights); its variance is that of a ratio of cluster sums,
    D / (D - 1) * sum((totals - mean * weights)^2) / sum(weights)^2, and the interval is t with D - 1 degrees of freedom. With equal weights
    this is the t interval over the document means. Sources: Cochran, Sampling Techniques (1977), 6.3; Cameron and Miller, J. Human
    Resources 50 (2015), 317.
    """
    total, weight = np.asarray(totals, float), np.asarray(weights, float)
    if len(total) != len(weight) or not len(total) or weight.min() <= 0:
        raise ValueError("clustered_mean: expected as many totals as weights, at least one, and positive weights")
    clusters, mean = len(total), float(total.sum() / weight.sum())
    if clusters < 2:
        return Estimate(mean, -math.inf, math.inf, math.inf, clusters)
    variance = clusters / (clusters - 1) * float(((total - mean * weight) ** 2).sum()) / float(weight.sum()) ** 2
    error = math.sqrt(variance)
    half = t_quantile(clusters, (1 + level) / 2) * error
    return Estimate(mean, mean - half, mean + half, error, clusters)


def smallest_mean_seen(estimate: Estimate, power: float = POWER, level: float = LEVEL) -> float:
    """The smallest true mean that a sample of this spread tells from zero with probability `power`: (t_level + t_power) * error.

    Source: Bloom, Evaluation Review 19 (1995), 547 (minimum detectable effect).
    """
    if estimate.clusters < 2:
        return math.inf
    return (t_quantile(estimate.clusters, (1 + level) / 2) + t_quantile(estimate.clusters, power)) * estimate.error


def clusters_needed(estimate: Estimate, margin: float, level: float = LEVEL) -> int | None:
    """Clusters in all at which an interval of this spread would leave `margin` outside, if the mean stayed; None if none would.

    Solves |mean - margin| >= t_{n-1} * sd / sqrt(n) for the smallest n, with sd = error * sqrt(clusters).
    """
    distance, spread = abs(estimate.mean - margin), estimate.error * math.sqrt(estimate.clusters)
    if not math.isfinite(spread) or distance == 0:
        return None
    return _smallest(lambda n: distance >= t_quantile(n, (1 + level) / 2) * spread / math.sqrt(n), start=2)


def mcnemar(losses: int, gains: int) -> float:
    """One-sided exact p value of "the candidate is not worse": P(X >= losses) for X ~ Binomial(losses + gains, 1/2).

    losses: pairs that only the baseline got right; gains: pairs that only the candidate got right. 1 when no pair disagrees.
    Source: McNemar, Psychometrika 12 (1947), 153, in its exact (binomial) form.
    """
    return float(stats.binom.sf(losses - 1, losses + gains, 0.5)) if losses + gains else 1.0


def clopper_pearson(successes: int, trials: int, level: float = LEVEL) -> Bounds:
    """Exact two-sided interval of a probability. Source: Clopper and Pearson, Biometrika 26 (1934), 404."""
    tail = (1 - level) / 2
    return Bounds(lower_bound(successes, trials, 1 - tail), upper_bound(successes, trials, 1 - tail))


def upper_bound(successes: int, trials: int, level: float = LEVEL) -> float:
    """Exact one-sided upper bound of a probability: the p at which P(X <= successes) = 1 - level. 1 without trials."""
    return 1.0 if successes >= trials else float(stats.beta.ppf(level, successes + 1, trials - successes))


def lower_bound(successes: int, trials: int, level: float = LEVEL) -> float:
    """Exact one-sided lower bound of a probability: the p at which P(X >= successes) = 1 - level. 0 without trials."""
    return 0.0 if successes <= 0 else float(stats.beta.ppf(1 - level, successes, trials - successes + 1))


def smallest_loss_seen(pairs: int, alpha: float = ALPHA) -> float | None:
    """The smallest share of `pairs` lost, with none gained, that `mcnemar` calls significant: 2^-losses <= alpha. None if even all is too few."""
    losses = math.ceil(-math.log2(alpha))
    return losses / pairs if losses <= pairs else None


def pairs_needed(losses: int, gains: int, pairs: int, margin: float, alpha: float = ALPHA) -> int | None:
    """Pairs in all that would decide whether the loss rate is below `margin`, if the rates stayed as seen; None if none would.

    Below the margin: an n at which the upper bound of losses / n is below it. Above: an n at which `mcnemar` calls the loss significant.
    Losses are rounded up and gains down. Counts are whole, so both conditions flicker near their edge: the n decides, but a somewhat
    smaller one may too.
    """
    lost, gained = losses / pairs, gains / pairs
    if lost < margin:
        return _smallest(lambda n: upper_bound(math.ceil(lost * n - 1e-9), n, 1 - alpha) < margin, start=pairs)
    if lost - gained > margin:
        return _smallest(lambda n: mcnemar(math.ceil(lost * n - 1e-9), math.floor(gained * n)) < alpha, start=pairs)
    return None


def t_quantile(clusters: int, probability: float) -> float:
    """Quantile of Student's t with clusters - 1 degrees of freedom."""
    return float(stats.t.ppf(probability, clusters - 1))


def _smallest(holds: Callable[[int], bool], start: int) -> int | None:
    """The smallest n from `start` for which a condition that stays true once true holds, by doubling and halving."""
    high = start
    while not holds(high):
        if high > _MOST_SAMPLES:
            return None
        high *= 2
    low = max(start, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
