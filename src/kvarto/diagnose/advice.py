"""What to do first: rules as data, each with its reason. They go from what costs nothing to what needs an evaluation.

The order is that of the four steps: fix what wastes memory and time whatever the format, then FP8, then fewer bits where memory still lacks and
an evaluation says so; a fallback always stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarto.diagnose.decide import Cause, Diagnosis
from kvarto.diagnose.signals import Counter, Timing
from kvarto.diagnose.window import Window

LOW_HITS = 0.05
LONG_GAP = 4.0
"""Times the mean gap: whoever generates waits for a prompt."""


@dataclass(frozen=True)
class Facts:
    """What rules look at. `prefix_caching`, `chunked_prefill`: None if the engine does not tell; `kv_bits`: of the present format."""

    window: Window
    diagnosis: Diagnosis
    prefix_caching: bool | None
    chunked_prefill: bool | None
    kv_bits: float | None


@dataclass(frozen=True)
class Rule:
    """A piece of advice: said when `when` is true of the facts. `option`: which entry of the engine's `advice` names its switch."""

    name: str
    when: Callable[[Facts], bool]
    says: str
    because: str
    option: str = ""


@dataclass(frozen=True)
class Advice:
    """A rule that holds here."""

    name: str
    says: str
    because: str
    how: str


def _gaps_wait_for_prompts(facts: Facts) -> bool:
    if facts.window.counter(Counter.PREEMPTIONS):
        return False  # the gaps may be of those that were sent back
    gap = facts.window.timing(Timing.ITL)
    high = None if gap is None else gap.quantile(0.99)
    return gap is not None and high is not None and gap.mean is not None and high[0] > LONG_GAP * gap.mean


def _bound(*causes: Cause) -> Callable[[Facts], bool]:
    return lambda facts: facts.diagnosis.cause in causes


def _prefixes_differ(facts: Facts) -> bool:
    hit = facts.window.hit_rate
    if hit is None or facts.prefix_caching is False:
        return False
    return hit < LOW_HITS and _bound(Cause.CAPACITY, Cause.PREFILL)(facts)


_KV = (Cause.CAPACITY, Cause.DECODE)
RULES = (
    Rule(
        "NaN in logits",
        lambda facts: bool(facts.window.counter(Counter.CORRUPTED)),
        "Find out where the NaN come from before anything else",
        "numbers of a server that computes NaN say nothing",
    ),
    Rule(
        "prefix caching",
        lambda facts: facts.prefix_caching is False,
        "Switch on prefix caching",
        "what prompts share is stored once and computed once, at full precision",
        "prefix caching",
    ),
    Rule(
        "chunked prefill",
        lambda facts: facts.chunked_prefill is False,
        "Switch on chunked prefill",
        "a long prompt in one step keeps everybody else from generating",
        "chunked prefill",
    ),
    Rule(
        "smaller chunks",
        lambda facts: facts.chunked_prefill is not False and _gaps_wait_for_prompts(facts),
        "Let a step compute fewer prompt tokens",
        "one gap in a hundred is over four times the mean: who generates waits for others' prompts",
        "smaller chunks",
    ),
    Rule(
        "prefixes first",
        _prefixes_differ,
        "See whether prompts could begin alike",
        "the prefix cache hits next to nothing: a date at the top makes every prompt new",
    ),
    Rule(
        "more slots",
        lambda facts: _bound(Cause.QUEUE)(facts) and bool(facts.window.engine.waits_for),
        "Allow more slots, or add a replica",
        "each slot needs KV memory: a smaller format pays for more of them with the same bytes",
        "more sequences",
    ),
    Rule(
        "more sequences",
        lambda facts: _bound(Cause.QUEUE)(facts) and not facts.window.engine.waits_for,
        "Allow more sequences in a step, or add a replica",
        "requests wait while there is memory for them",
        "more sequences",
    ),
    Rule(
        "pool",
        _bound(Cause.CAPACITY),
        "Give the pool more of the memory",
        "it costs nothing if the rest is idle",
        "pool",
    ),
    Rule(
        "FP8",
        lambda facts: _bound(*_KV)(facts) and (facts.kv_bits is None or facts.kv_bits > 8.5),
        "Then FP8, with calibrated scales, evaluated on long contexts",
        "half the bytes at nearly 16 bits' quality on most models; scales of 1.0 are what goes wrong",
        "format",
    ),
    Rule(
        "below 8 bits",
        _bound(*_KV),
        "Fewer bits if memory still lacks, once `kvarto study` or your own evaluation passes",
        "reasoning, tool calls and formats break first, and at long context",
        "format",
    ),
    Rule(
        "prefill",
        _bound(Cause.PREFILL),
        "Do not change the KV format for speed",
        "the time goes into computing prompts, which a packed cache makes no faster",
    ),
    Rule(
        "not KV",
        _bound(Cause.NOT_KV),
        "Leave the KV cache as it is",
        "it limits nothing here; fewer bits would only risk quality",
    ),
)


def advise(facts: Facts) -> list[Advice]:
    """What holds here, what to do first at the top."""
    engine = facts.window.engine
    return [
        Advice(rule.name, rule.says, rule.because, engine.advice.get(rule.option, ""))
        for rule in RULES
        if rule.when(facts)
    ]
