"""What the measurements mean, as pure functions: pass, fail or inconclusive for each format.

A check passes when the whole interval is on the good side of its margin, and fails when the whole interval is on the bad side; else it is
inconclusive and says how many samples would decide it. Harm that was not looked for was not excluded: a check that was not made leaves the
verdict open. The JSON check is too small to exclude harm, so it can only fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvarto import stats
from kvarto.study.result import (
    ArmResult,
    Check,
    CheckStatus,
    Interval,
    JsonItem,
    Margins,
    NeedleCell,
    Status,
    Verdict,
)

_WEAK_BASELINE = 0.5


def judge(arm: ArmResult, baseline: ArmResult, margins: Margins) -> Verdict:
    """The verdict on a candidate, from its measurements and the baseline's."""
    if arm.broken is not None:
        check = Check(name="runs", status="fail", reason=arm.broken)
        return Verdict(status="fail", checks=(check,), reason=arm.broken)
    checks = (
        *_fidelity_checks(arm, margins),
        needle_check(baseline.needles, arm.needles, margins),
        json_check(baseline.json_items, arm.json_items, margins),
    )
    return Verdict(status=overall(checks), checks=checks, reason=_reason(checks))


def overall(checks: Sequence[Check]) -> Status:
    """Any failed check fails; else any inconclusive one leaves it open."""
    statuses = {check.status for check in checks}
    return "fail" if "fail" in statuses else "inconclusive" if "inconclusive" in statuses else "pass"


def _reason(checks: Sequence[Check]) -> str:
    status = overall(checks)
    if status == "pass":
        return "every interval lies within its margin"
    return "; ".join(check.reason for check in checks if check.status == status)


# ---- fidelity ------------------------------------------------------------------------------------------------------


def _fidelity_checks(arm: ArmResult, margins: Margins) -> tuple[Check, Check]:
    found = arm.fidelity
    documents = len(found.documents) if found else 0
    kl, ratio = (found.kl_nats, found.perplexity_ratio) if found else (None, None)
    return (
        interval_check("KL", kl, margins.kl_nats, unit="nats", documents=documents),
        interval_check("perplexity ratio", ratio, margins.perplexity_ratio, unit="ratio", documents=documents),
    )


def interval_check(name: str, found: Interval | None, margin: float, *, unit: str, documents: int) -> Check:
    """Where an interval lies against an upper margin. `unit` "ratio" is judged as a logarithm, in which its interval is symmetric."""
    if found is None or found.low is None or found.high is None:
        reason = f"{name} inconclusive: needs at least 2 documents, {documents} measured"
        value = None if found is None else found.mean
        return Check(name=name, status="inconclusive", value=value, margin=margin, needed=2, unit=unit, reason=reason)
    status: CheckStatus = "pass" if found.high <= margin else "fail" if found.low > margin else "inconclusive"
    text = "{:.4f}".format if unit == "ratio" else _number
    shown = f"{name} {text(found.mean)} [{text(found.low)}, {text(found.high)}]"
    needed = (
        _documents_needed(found, margin, documents, logarithm=unit == "ratio") if status == "inconclusive" else None
    )
    reason = {
        "pass": f"{shown} within {margin:g}",
        "fail": f"{shown} above {margin:g}",
        "inconclusive": f"{shown} spans {margin:g}: {_needs(needed, documents, 'documents')}",
    }[status]
    return Check(
        name=name, status=status, value=found.mean, low=found.low, high=found.high, margin=margin,
        smallest_seen=found.smallest_seen, needed=needed, unit=unit, reason=reason,
    )  # fmt: skip


def _documents_needed(found: Interval, margin: float, documents: int, *, logarithm: bool) -> int | None:
    assert found.low is not None
    assert found.high is not None
    mean, low, high = (math.log(x) if logarithm else x for x in (found.mean, found.low, found.high))
    half = (high - low) / 2
    error = half / stats.t_quantile(documents, (1 + stats.LEVEL) / 2)
    estimate = stats.Estimate(mean, mean - half, mean + half, error, documents)
    return stats.clusters_needed(estimate, math.log(margin) if logarithm else margin)


# ---- yes or no -----------------------------------------------------------------------------------------------------


def needle_check(baseline: Sequence[NeedleCell], arm: Sequence[NeedleCell], margins: Margins) -> Check:
    """Needles that only the baseline found, against the margin in points of all needles.

    pass: the exact one-sided upper bound of their share is below the margin. fail: significantly more lost than gained (exact McNemar), and
    the net loss is above the margin.
    """
    margin, pairs = margins.needle_loss, list(zip(baseline, arm, strict=False))
    if not pairs:
        return Check(
            name="needles",
            status="inconclusive",
            margin=margin,
            unit="share",
            reason="needles inconclusive: none measured",
        )
    losses = sum(base.found and not other.found for base, other in pairs)
    gains = sum(other.found and not base.found for base, other in pairs)
    found = sum(base.found for base, _ in pairs)
    n, net = len(pairs), (losses - gains) / len(pairs)
    high = stats.upper_bound(losses, n, 1 - margins.alpha)
    p = stats.mcnemar(losses, gains)
    shown = f"needles lost {losses}, gained {gains} of {n} (at most {high:.1%} lost)"
    needed = None
    status: CheckStatus
    if p < margins.alpha and net > margin:
        status, reason = "fail", f"needles lost {losses}, gained {gains} of {n} (p = {p:.2g}), more than {margin:.0%}"
    elif found < _WEAK_BASELINE * n:
        status, reason = "inconclusive", f"needles inconclusive: the baseline itself finds only {found} of {n}"
    elif high < margin:
        status, reason = "pass", f"{shown}, within {margin:.0%}"
    else:
        needed = stats.pairs_needed(losses, gains, n, margin, margins.alpha)
        status, reason = "inconclusive", f"{shown}: {_needs(needed, n, 'needles')}"
    return Check(
        name="needles", status=status, value=losses / n, low=stats.lower_bound(losses, n, 1 - margins.alpha), high=high,
        margin=margin, smallest_seen=stats.smallest_loss_seen(n, margins.alpha), needed=needed, unit="share", reason=reason,
    )  # fmt: skip


def json_check(baseline: Sequence[JsonItem], arm: Sequence[JsonItem], margins: Margins) -> Check:
    """Prompts with the right values: fails when significantly fewer than the baseline's (exact McNemar), otherwise only reports."""
    pairs = list(zip(baseline, arm, strict=False))
    if not pairs:
        return Check(name="JSON", status="reported", unit="share", reason="JSON not measured")
    losses = sum(base.right_values and not other.right_values for base, other in pairs)
    gains = sum(other.right_values and not base.right_values for base, other in pairs)
    n, p, seen = len(pairs), stats.mcnemar(losses, gains), stats.smallest_loss_seen(len(pairs), margins.alpha)
    right = sum(other.right_values for _, other in pairs)
    shown = f"JSON right {right} of {n}, baseline {sum(base.right_values for base, _ in pairs)}"
    status: CheckStatus = "fail" if p < margins.alpha else "reported"
    limit = "too few to see any loss" if seen is None else f"could not see a loss below {seen:.0%}"
    reason = f"{shown} (p = {p:.2g})" if status == "fail" else f"{shown}; {limit}"
    return Check(name="JSON", status=status, value=losses / n, smallest_seen=seen, unit="share", reason=reason)


def _needs(needed: int | None, measured: int, what: str) -> str:
    """How many more samples, in all and beyond those measured."""
    if needed is None:
        return f"at this rate no number of {what} within reach would decide"
    return f"needs {max(needed - measured, 1)} more {what} ({max(needed, measured + 1)} in all)"


def _number(x: float) -> str:
    """Three significant figures, without an exponent where that stays short."""
    return f"{x:.3g}" if abs(x) >= 1e-4 or x == 0 else f"{x:.1e}"
