"""Numbers that follow from a window, and how they are shown. Each that cannot be known is None, with what is missing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvarto.diagnose.exposition import Histogram
from kvarto.diagnose.signals import Counter, Gauge, Timing
from kvarto.diagnose.window import Series, Window

LEAST_USE = 0.05
"""From a pool that is emptier than that nobody can tell how dense it is when full."""


@dataclass(frozen=True)
class Evidence:
    """One observation. `value` is its number, None where there is none."""

    name: str
    shown: str
    value: float | None = None


@dataclass(frozen=True)
class Model:
    """What the user says of the model, in bytes: of the weights that a step reads, and of keys and values of one token. None: not said."""

    weights_bytes: float | None = None
    kv_token_bytes: float | None = None


def prefill_share(window: Window) -> tuple[float | None, str]:
    """Prefill's share of the time, and of what; or None, and what is missing.

    Of the seconds of steps where an engine counts them, else of those that requests spent: there whoever generates counts a step that others count
    too, so that part is divided by how many run at once; a prompt is rarely computed beside another.
    """
    prompts, tokens = window.counter(Counter.PREFILL_SECONDS), window.counter(Counter.DECODE_SECONDS)
    if prompts is not None and tokens is not None and window.engine.seconds_of_steps:
        return (prompts / (prompts + tokens), "the steps' time") if prompts + tokens > 0 else (None, "no step was made")
    first, second = window.timing(Timing.PREFILL), window.timing(Timing.DECODE)
    if first is not None and second is not None and first.count > 0 and second.count > 0:
        prompts, tokens = first.sum, second.sum
    if prompts is None or tokens is None:
        return _share_by_gaps(window)  # no request ended, perhaps: first tokens and gaps are told before that
    return _share_of_requests(window, prompts, tokens)


def _share_of_requests(window: Window, prompts: float, tokens: float) -> tuple[float | None, str]:
    """Of seconds that requests spent with their prompt, and with generating: the latter overlap, as many as run at once."""
    at_once = _at_once(window)
    total = prompts + tokens / at_once
    if total <= 0:
        return None, "no request ended in this window"
    return prompts / total, "requests' time" + (f", {at_once:.1f} generating at once" if at_once > 1 else "")


def _at_once(window: Window) -> float:
    running, slots = window.gauge(Gauge.RUNNING), window.gauge(Gauge.BUSY_SLOTS)
    told = slots if window.lifetime or running is None else running
    return 1.0 if told is None else max(1.0, told.mean)


def _share_by_gaps(window: Window) -> tuple[float | None, str]:
    """From the times to the first token, without the queue, and between tokens."""
    first, gap, queued = (window.timing(each) for each in (Timing.TTFT, Timing.ITL, Timing.QUEUE))
    if first is None or gap is None or gap.mean is None:
        return None, "the page tells neither of steps' time nor of prefill and decode"
    generated = window.counter(Counter.GENERATED) or gap.count
    prompts = max(0.0, first.sum - (0.0 if queued is None else queued.sum))
    return _share_of_requests(window, prompts, gap.mean * max(0.0, generated - first.count))


def kv_share(window: Window, model: Model) -> tuple[float | None, str]:
    """KV's share of the bytes that a decode step reads: KV / (weights + KV), all running sequences; or None, and what is missing."""
    held = held_bytes(window, model)
    if model.weights_bytes is None:
        return None, "how many bytes a step reads is on no page: give --weights" + (
            "" if held is not None else " and --kv-token"
        )
    if held is None:
        if model.kv_token_bytes is not None:
            return None, "how many tokens are live is on no page of this engine"
        return None, "how many bytes of keys and values are live is not known: give --kv-token"
    total = held + model.weights_bytes
    return (held / total, "") if total > 0 else (None, "give --weights above zero")


def held_bytes(window: Window, model: Model) -> float | None:
    """Bytes of live keys and values, on average."""
    held, live = window.gauge(Gauge.HELD_BYTES), live_tokens(window)
    if held is not None:
        return held.mean
    return None if live is None or model.kv_token_bytes is None else live * model.kv_token_bytes


def live_tokens(window: Window) -> float | None:
    """Tokens in the cache that requests hold, on average."""
    live, usage, pool = (window.gauge(each) for each in (Gauge.LIVE_TOKENS, Gauge.USAGE, Gauge.POOL_TOKENS))
    if live is not None:
        return live.mean
    return None if usage is None or pool is None else usage.mean * pool.values[-1]


def pool_tokens(window: Window) -> float | None:
    """Tokens that the pool has room for, as told, or as dense as what is in it now."""
    told, live, usage = (window.gauge(each) for each in (Gauge.POOL_TOKENS, Gauge.LIVE_TOKENS, Gauge.USAGE))
    if told is not None:
        return told.values[-1]
    if live is None or usage is None or usage.mean < LEAST_USE:
        return None
    return live.mean / usage.mean


def mean_prompt_tokens(window: Window) -> float | None:
    """Of a request."""
    tokens, first = window.counter(Counter.PROMPT_TOKENS), window.timing(Timing.TTFT)
    return None if tokens is None or first is None or first.count < 1 else tokens / first.count


def overview(window: Window) -> tuple[Evidence, ...]:
    """What everybody wants to see first."""
    hit, generated, computed = window.hit_rate, window.counter(Counter.GENERATED), window.computed_tokens
    seconds = window.seconds
    rows = [
        *gauge_evidence("running", window.gauge(Gauge.RUNNING)),
        *gauge_evidence("waiting", window.gauge(Gauge.WAITING)),
        *gauge_evidence("KV pool held", window.gauge(Gauge.USAGE), percent=True),
    ]
    if (pool := window.gauge(Gauge.POOL_TOKENS)) is not None:
        rows.append(Evidence("KV pool", f"{pool.values[-1]:,.0f} tokens", pool.values[-1]))
    if (preempted := window.counter(Counter.PREEMPTIONS)) is not None:
        rows.append(Evidence("preemptions", f"{preempted:,.0f}", preempted))
    if hit is not None:
        rows.append(Evidence("prefix cache hits", f"{hit:.0%} of prompt tokens", hit))
    for name, count in (("prompt tokens computed", computed), ("tokens generated", generated)):
        if count is not None:
            rate = f" ({count / seconds:,.1f}/s)" if seconds else ""
            rows.append(Evidence(name, f"{count:,.0f}{rate}", count))
    for name, timing in (
        ("in the queue", Timing.QUEUE),
        ("to the first token", Timing.TTFT),
        ("between tokens", Timing.ITL),
    ):
        rows += timing_evidence(name, window.timing(timing))
    if corrupted := window.counter(Counter.CORRUPTED):
        rows.append(Evidence("requests with NaN", f"{corrupted:.0f}: stop, and find out why", corrupted))
    return tuple(rows)


def gauge_evidence(name: str, series: Series | None, *, percent: bool = False) -> list[Evidence]:
    """A row of a gauge; none if it is not there."""
    if series is None:
        return []
    number = "{:.0%}".format if percent else "{:.1f}".format
    one = len(series.values) == 1
    shown = number(series.values[0]) if one else f"{number(series.mean)} on average, {number(series.peak)} at most"
    return [Evidence(name, shown, series.mean)]


def timing_evidence(name: str, found: Histogram | None) -> list[Evidence]:
    """A row of a histogram: its mean, and the bound of the bucket that 95 % lie under; a value inside a bucket would be a guess."""
    if found is None or found.mean is None:
        return []
    shown, high = f"{seconds(found.mean)} on average", found.quantile(0.95)
    if high is not None and len(found.bounds) > 1:
        shown += f", 95 % within {seconds(high[1])}" if math.isfinite(high[1]) else f", 5 % above {seconds(high[0])}"
    return [Evidence(name, shown, found.mean)]


def seconds(value: float) -> str:
    """As people read it."""
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.2g} ms"
