"""What the measurements mean, as pure functions: pass, fail or inconclusive for each format, and one recommendation.

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
    Recommendation,
    Scope,
    Skipped,
    Status,
    Verdict,
)

_WEAK_BASELINE = 0.5
_NOTABLY_SLOWER = 0.95
_NOTABLY_FASTER = 1.05
_BITS_16 = 16.0


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
        return f"too close to the margin for any number of {what} within reach"
    return f"needs {max(needed - measured, 1)} more {what} ({max(needed, measured + 1)} in all)"


# ---- recommendation ------------------------------------------------------------------------------------------------


def recommend(
    arms: Sequence[ArmResult], scope: Scope, skipped: Sequence[Skipped] = (), *, interrupted: bool = False
) -> Recommendation:
    """The passing format with the fewest bits; else that the model's dtype stays, and why."""
    baseline = next(arm for arm in arms if arm.role == "baseline")
    judged = [arm for arm in arms if arm.role == "candidate" and arm.verdict is not None]
    caveats = tuple(_caveats(scope, skipped, interrupted=interrupted))
    passing = sorted((arm for arm in judged if _status(arm) == "pass"), key=_bits)
    if passing:
        best = passing[0]
        headline = f"Use {best.name}: {best.bits_per_number:.2f} bits per number, {_smaller(best)}."
        reasons = (*_gains_and_losses(best, baseline), *_why_not_fewer_bits(best, judged))
        return Recommendation(status="pass", format=best.name, headline=headline, reasons=reasons, caveats=caveats)
    open_ones = sorted((arm for arm in judged if _status(arm) == "inconclusive"), key=_bits)
    reasons = tuple(f"{arm.name}: {arm.verdict.reason}" for arm in (open_ones or judged) if arm.verdict)
    if open_ones or not judged:
        headline = f"Inconclusive: stay on {baseline.name} until one of the formats has passed."
        return Recommendation(status="inconclusive", format=None, headline=headline, reasons=reasons, caveats=caveats)
    headline = f"No format passed: stay on {baseline.name}."
    return Recommendation(status="fail", format=None, headline=headline, reasons=reasons, caveats=caveats)


def _status(arm: ArmResult) -> Status | None:
    return arm.verdict.status if arm.verdict else None


def _bits(arm: ArmResult) -> tuple[float, float]:
    """Fewer bits first; of equal bits, the nearer to the baseline."""
    return arm.bits_per_number, arm.fidelity.kl_nats.mean if arm.fidelity else math.inf


def _smaller(arm: ArmResult) -> str:
    times = _BITS_16 / arm.bits_per_number
    return f"{times:.1f} times smaller than a 16-bit cache" if times > 1 else "no smaller than a 16-bit cache"


def _gains_and_losses(best: ArmResult, baseline: ArmResult) -> list[str]:
    assert best.verdict is not None
    lines = [check.reason[0].upper() + check.reason[1:] for check in best.verdict.checks]
    if best.fidelity:
        lines[0] += f"; the likeliest token is the same in {best.fidelity.top1.mean:.1%} of places"
    if best.memory and baseline.memory:
        ours, theirs = best.memory[-1], baseline.memory[-1]
        lines.append(
            f"Memory at {ours.context_tokens:,} tokens: {ours.bytes_per_token:,.0f} bytes per token instead of {theirs.bytes_per_token:,.0f}"
        )
    return lines + _speed_lines(best, baseline)


def _speed_lines(best: ArmResult, baseline: ArmResult) -> list[str]:
    lines = []
    for ours, theirs in zip(best.speed, baseline.speed, strict=False):
        decode = ours.decode_tokens_per_second[0] / theirs.decode_tokens_per_second[0]
        prefill = ours.prefill_tokens_per_second[0] / theirs.prefill_tokens_per_second[0]
        lines.append(
            f"Speed at {ours.context_tokens:,} tokens: decode {decode:.2f}x ({_pace(decode)}), prefill {prefill:.2f}x ({_pace(prefill)})"
        )
    return lines


def _pace(ratio: float) -> str:
    return "slower" if ratio < _NOTABLY_SLOWER else "faster" if ratio > _NOTABLY_FASTER else "the same"


def _why_not_fewer_bits(best: ArmResult, judged: Sequence[ArmResult]) -> list[str]:
    return [
        f"Not {arm.name} ({arm.bits_per_number:.2f} bits): {arm.verdict.reason}"
        for arm in judged
        if arm.verdict and arm.verdict.status != "pass" and _bits(arm) < _bits(best)
    ]


def _caveats(scope: Scope, skipped: Sequence[Skipped], *, interrupted: bool) -> list[str]:
    longest = max(scope.document_tokens, *scope.needle_lengths, 0)
    caveats = []
    if interrupted:
        caveats.append("The study was interrupted: it rests on the part that was done")
    caveats.append(
        f"Quality was measured up to {longest:,} tokens; that says little about 32K or 128K"
        " contexts, where damage shows first: repeat with longer text before serving them"
    )
    caveats.append(
        "Reasoning, tool calls and multi-turn use were not measured; roll out behind a shadow or a canary, and keep the fallback"
    )
    caveats.append(
        "Several formats were tried on the same inputs: confirm the chosen one with another --seed or --text"
    )
    if skipped:
        caveats.append("Not tried: " + ", ".join(f"{each.name} ({each.reason})" for each in skipped))
    return caveats


def _number(x: float) -> str:
    """Three significant figures, without an exponent where that stays short."""
    return f"{x:.3g}" if abs(x) >= 1e-4 or x == 0 else f"{x:.1e}"
