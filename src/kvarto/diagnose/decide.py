"""What limits a server, decided from a window: memory for KV, reading KV, computing prompts, its own queue, or something that no KV format changes.

Each cause is one function that says yes, no or unknown, with its evidence. Nothing is decided on a metric that is not there, nor on a window in which
too little happened. The first cause that holds, in this order, is the verdict: who waits for memory gains nothing from faster steps.

Sources: facts of engines' own issues and the step bound KV / (weights + KV) (docs/diagnosis.md names them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvarto.diagnose.measure import (
    Evidence,
    Model,
    gauge_evidence,
    kv_share,
    mean_prompt_tokens,
    overview,
    pool_tokens,
    prefill_share,
    timing_evidence,
)
from kvarto.diagnose.signals import Counter, Gauge, Timing
from kvarto.diagnose.window import Series, Window

FULL = 0.9
"""A pool that is held to that share is full: the rest is what blocks waste and what the next step needs."""
OFTEN = 0.3
"""Who is found waiting in that share of the scrapes waits regularly."""
MOSTLY = 0.5
"""Of the time: the larger part."""
KV_SHARE_PAYS = 0.4
"""From this share of a step's bytes on, half the bytes make the step a quarter faster: 1 / (1 - .4 + .4 / 2) = 1.25."""
LEAST_FIRST_TOKENS, LEAST_TOKENS, MANY_TOKENS = 5, 100, 500
"""With fewer first tokens or tokens a window says nothing; with so many generated it does, however few requests they are of."""
LEAST_SCRAPES = 5
"""With fewer a gauge is of single moments."""
LONG_QUEUE_SECONDS = 0.1
"""Less than that in the queue nobody notices."""
RARELY = 0.01
"""Fewer preemptions than that for each request are no limit."""
_ASKED = (
    Gauge.RUNNING, Gauge.WAITING, Gauge.USAGE, Counter.PREEMPTIONS, Counter.GENERATED, Timing.TTFT, Timing.ITL, Timing.QUEUE,
)  # fmt: skip


class Cause(StrEnum):
    """What limits the server."""

    CAPACITY = "capacity-bound"
    QUEUE = "queue-bound"
    PREFILL = "prefill-bound"
    DECODE = "decode-bandwidth-bound"
    NOT_KV = "not KV"
    UNKNOWN = "inconclusive"


@dataclass(frozen=True)
class Finding:
    """Whether a cause holds; None: the metrics do not tell, and `reason` says what is missing."""

    cause: Cause
    holds: bool | None
    reason: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """The verdict and all that was looked at. `kv_share`: of the bytes that a decode step reads, None if unknown."""

    cause: Cause
    reason: str
    findings: tuple[Finding, ...]
    evidence: tuple[Evidence, ...]
    kv_share: float | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def diagnose(window: Window, model: Model | None = None) -> Diagnosis:
    """Decide."""
    share, why_no_share = kv_share(window, model or Model())
    memory = capacity(window)
    findings = (memory, queue(window, memory.holds), prefill(window), decode(window, share, why_no_share))
    missing = tuple(window.missing(*_ASKED))
    cause, reason = _verdict(window, findings)
    return Diagnosis(cause, reason, findings, overview(window), share, missing, window.notes)


def _verdict(window: Window, findings: Sequence[Finding]) -> tuple[Cause, str]:
    by_cause = {finding.cause: finding for finding in findings}
    if by_cause[Cause.CAPACITY].holds:
        return Cause.CAPACITY, by_cause[Cause.CAPACITY].reason
    if short := too_little(window):
        return Cause.UNKNOWN, short
    for finding in findings:
        if finding.holds:
            return finding.cause, finding.reason
    unknown = [finding for finding in findings if finding.holds is None]
    if unknown:
        return Cause.UNKNOWN, "; ".join(f"whether it is {finding.cause}: {finding.reason}" for finding in unknown)
    return Cause.NOT_KV, by_cause[Cause.DECODE].reason


def too_little(window: Window) -> str:
    """Why nothing can be said of this window, or ""."""
    first, generated = window.timing(Timing.TTFT), window.counter(Counter.GENERATED)
    waiting = window.gauge(Gauge.WAITING)
    if waiting is not None and waiting.share_above(0) >= OFTEN and len(waiting.values) >= LEAST_SCRAPES:
        return ""  # a server that is so full that nothing ends within the window
    few = first is not None and first.count < LEAST_FIRST_TOKENS and (generated or 0.0) < MANY_TOKENS
    if first is not None and few:
        return f"{first.count:.0f} requests got their first token in this window, fewer than {LEAST_FIRST_TOKENS}: watch for longer, under load"
    if generated is not None and (tokens := generated + (window.computed_tokens or 0.0)) < LEAST_TOKENS:
        return f"{tokens:.0f} tokens went through the model in this window, fewer than {LEAST_TOKENS}: watch for longer, under load"
    if first is None and generated is None:
        return "the page tells neither of first tokens nor of generated ones, so nobody knows whether anything happened"
    return ""


# ---- causes ----------------------------------------------------------------------------------------------------------


def capacity(window: Window) -> Finding:
    """Requests wait for, or are thrown out of, memory for keys and values."""
    usage, waiting, preempted = window.gauge(Gauge.USAGE), window.gauge(Gauge.WAITING), _preempted(window)
    evidence = (
        *gauge_evidence("KV pool held", usage, percent=True),
        *gauge_evidence("waiting", waiting),
        *([] if preempted is None else [Evidence("preemptions", f"{preempted:.0f}", preempted)]),
    )

    def found(holds: bool | None, reason: str) -> Finding:
        return Finding(Cause.CAPACITY, holds, reason, evidence)

    often = waiting is not None and waiting.share_above(0) >= OFTEN
    if preempted:
        if usage is None or usage.peak >= FULL or often or window.lifetime:
            since = " since the engine's start" if window.lifetime else ""
            return found(True, f"{preempted:.0f} requests were preempted for want of blocks{since}" + _at_peak(usage))
        words = f"{preempted:.0f} requests were preempted, but nobody waits and the pool was never seen above {usage.peak:.0%}"
        return found(None, f"{words}: scrape more often")
    if waiting is None:
        return found(None, _absent(window, Gauge.WAITING))
    if not often:
        return found(False, "nobody waits regularly" + _at_peak(usage))
    if window.engine.waits_for:
        return found(False, f"who waits, waits for {window.engine.waits_for}")
    if usage is None:
        return found(None, _absent(window, Gauge.USAGE))
    if (used := _mean_while_waiting(usage, waiting)) >= FULL:
        return found(True, f"{waiting.mean:.1f} requests wait on average while the pool is held to {used:.0%}")
    return _does_the_next_fit(window, usage, evidence)


def _preempted(window: Window) -> float | None:
    """Preemptions; 0 if they are so few that they limit nothing."""
    count, first = window.counter(Counter.PREEMPTIONS), window.timing(Timing.TTFT)
    return 0.0 if count is not None and first is not None and count < RARELY * first.count else count


def _does_the_next_fit(window: Window, usage: Series, evidence: tuple[Evidence, ...]) -> Finding:
    """Requests wait and the pool is not full: is what is free enough for a prompt of the usual length?"""
    pool, mean = pool_tokens(window), mean_prompt_tokens(window)
    if pool is not None and mean is not None and pool > 0:
        free = (1 - usage.mean) * pool
        if free < mean:
            reason = f"requests wait: {free:,.0f} tokens are free, and a prompt has {mean:,.0f} on average"
            return Finding(Cause.CAPACITY, True, reason, evidence)
        reason = f"requests wait although {free:,.0f} tokens are free, and a prompt has {mean:,.0f} on average"
        return Finding(Cause.CAPACITY, False, reason, evidence)
    return Finding(Cause.CAPACITY, False, f"requests wait although only {usage.mean:.0%} of the pool is held", evidence)


def queue(window: Window, for_memory: bool | None = False) -> Finding:
    """Requests wait although there is memory: for a slot, or because the steps are as full as they may be. `for_memory`: it is known what for."""
    waiting, time, first = window.gauge(Gauge.WAITING), window.timing(Timing.QUEUE), window.timing(Timing.TTFT)
    evidence = (
        *gauge_evidence("waiting", waiting),
        *timing_evidence("in the queue", time),
        *timing_evidence("to the first token", first),
    )

    def found(holds: bool | None, reason: str) -> Finding:
        return Finding(Cause.QUEUE, holds, reason, evidence)

    if for_memory:
        return found(False, "who waits, waits for memory")
    known = "and not for KV memory" if for_memory is False else "and for what is not known"
    if window.engine.waits_for:
        known = f"for {window.engine.waits_for}"
    holds = True if for_memory is False else None
    if waiting is not None and waiting.share_above(0) >= OFTEN:
        return found(holds, f"{waiting.mean:.1f} requests wait on average, {known}")
    if time is not None and first is not None and time.mean is not None and first.mean:
        share = time.mean / first.mean
        queued = share >= MOSTLY and time.mean > LONG_QUEUE_SECONDS
        words = f"{share:.0%} of the time to the first token is spent in the queue"
        return found(holds, f"{words}, {known}") if queued else found(False, words)
    if waiting is None:
        return found(None, _absent(window, Gauge.WAITING))
    return found(False, "nobody waits regularly")


def prefill(window: Window) -> Finding:
    """The time goes into computing prompts, which no KV format makes faster."""
    share, basis = prefill_share(window)
    computed, generated = window.computed_tokens, window.counter(Counter.GENERATED)
    evidence = list(timing_evidence("prefill of a request", window.timing(Timing.PREFILL)))
    if share is not None:
        evidence.append(Evidence("prefill's share", f"{share:.0%} of {basis}", share))
    if computed is not None and generated:
        evidence.append(
            Evidence("prompt tokens computed for each generated", f"{computed / generated:.1f}", computed / generated)
        )
    if share is None:
        return Finding(Cause.PREFILL, None, basis, tuple(evidence))
    if share >= MOSTLY:
        return Finding(Cause.PREFILL, True, f"{share:.0%} of {basis} goes into prompts", tuple(evidence))
    return Finding(Cause.PREFILL, False, f"{1 - share:.0%} of {basis} goes into generating", tuple(evidence))


def decode(window: Window, share: float | None, why_no_share: str) -> Finding:
    """The time goes into generating, and a good part of what a step reads is keys and values."""
    evidence = list(timing_evidence("between tokens", window.timing(Timing.ITL)))
    if share is not None:
        evidence.append(Evidence("KV's share of a step's bytes", f"{share:.0%}", share))
    time, basis = prefill_share(window)
    if time is not None and time >= MOSTLY:
        return Finding(Cause.DECODE, False, f"most of {basis} goes into prompts", tuple(evidence))
    if share is None:
        return Finding(Cause.DECODE, None, why_no_share, tuple(evidence))
    words = f"keys and values are {share:.0%} of the bytes that a decode step reads"
    if share >= KV_SHARE_PAYS:
        return Finding(Cause.DECODE, True, words, tuple(evidence))
    return Finding(
        Cause.DECODE,
        False,
        f"{words}; weights are the rest, and quantizing those or a larger batch helps",
        tuple(evidence),
    )


# ---- words -----------------------------------------------------------------------------------------------------------


def _at_peak(usage: Series | None) -> str:
    return "" if usage is None else f", with the pool held to {usage.peak:.0%}"


def _absent(window: Window, signal: Gauge) -> str:
    return window.engine.absent.get(signal, f"the page does not tell the {signal.value}")


def _mean_while_waiting(usage: Series, waiting: Series) -> float:
    """The pool's use in those scrapes in which somebody waited."""
    if len(usage.values) != len(waiting.values):
        return usage.mean
    used = [share for share, count in zip(usage.values, waiting.values, strict=True) if count > 0]
    return sum(used) / len(used) if used else 0.0
