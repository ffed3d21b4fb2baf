"""What to do with the verdicts: the smallest format that is safe, or stay, with the reasons and what was not shown. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvarto.study.result import ArmResult, Recommendation, Scope, Skipped, Status

_NOTABLY_SLOWER = 0.95
_NOTABLY_FASTER = 1.05
_BITS_16 = 16.0


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
