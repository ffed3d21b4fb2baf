"""What to do first: the rules that plans go by too (kvarto/advice.toml), on what was seen here, each with the engine's own switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvarto import advice
from kvarto.diagnose.decide import Cause, Diagnosis
from kvarto.diagnose.measure import prefill_share
from kvarto.diagnose.signals import Counter, Gauge, Timing
from kvarto.diagnose.window import Window


@dataclass(frozen=True)
class Facts:
    """What rules look at. `prefix_caching`, `chunked_prefill`: None if the engine does not tell; `kv_bits`: of the present format.

    `model`: signals that the model alone gives, where its config is known.
    """

    window: Window
    diagnosis: Diagnosis
    prefix_caching: bool | None
    chunked_prefill: bool | None
    kv_bits: float
    model: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Hint:
    """A rule that holds here, and how this engine calls the switch that it is about."""

    rule: advice.Advice
    how: str

    def to_json(self) -> dict[str, str | int]:
        """For programs."""
        return self.rule.to_json() | {"how": self.how}


def advise(facts: Facts) -> list[Hint]:
    """What holds here, what to do first at the top."""
    named = facts.window.engine.advice
    return [Hint(rule, named.get(rule.option, "")) for rule in advice.advise(signals(facts))]


def signals(facts: Facts) -> dict[str, float]:
    """What is known of this window; a signal that is not is left out."""
    window, cause = facts.window, facts.diagnosis.cause
    found: dict[str, float | None] = {
        "capacity_bound": cause is Cause.CAPACITY,
        "queue_bound": cause is Cause.QUEUE,
        "prefill_bound": cause is Cause.PREFILL,
        "not_kv": cause is Cause.NOT_KV,
        "kv_bound": cause in (Cause.CAPACITY, Cause.DECODE),
        "kv_bits": facts.kv_bits,
        "prefix_caching": facts.prefix_caching,
        "chunked_prefill": facts.chunked_prefill,
        "hit_rate": None if facts.prefix_caching is False else window.hit_rate,
        "long_gaps": None if facts.chunked_prefill is False else _long_gaps(window),
        "waits_for_slots": bool(window.engine.waits_for),
        "corrupted": window.counter(Counter.CORRUPTED),
    }
    if cause is not Cause.UNKNOWN:
        running = window.gauge(Gauge.RUNNING)
        found |= {
            "prefill_share": prefill_share(window)[0],
            "kv_share": facts.diagnosis.kv_share,
            "concurrency": None if running is None else running.mean,
        }
    return {name: value for name, value in (found | dict(facts.model)).items() if value is not None}


def _long_gaps(window: Window) -> float | None:
    """The gap that one in a hundred exceeds, at least, over the mean one; None where nobody knows, or gaps may be of those that were sent back."""
    gap = window.timing(Timing.ITL)
    high = None if gap is None else gap.quantile(0.99)
    if window.counter(Counter.PREEMPTIONS) or gap is None or high is None or not gap.mean:
        return None
    return high[0] / gap.mean
