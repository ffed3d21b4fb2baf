"""Does the format that was asked for really serve? Engines fall back without a word, and a flag is not a fact."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.diagnose.formats import stored_bits
from kvarto.diagnose.signals import Engine, Setting
from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.rollout import Rollout

_NAME = "format"
_DIM = 128


def serving_format(rollout: Rollout) -> Iterator[Outcome]:
    """The candidate's effective KV format beside the wanted one."""
    told, engine = rollout.candidate.settings.get(Setting.KV_DTYPE), rollout.candidate.engine
    if told is None or engine is None:
        how = "see the line that it logs at its start" if engine is not None else "make its metrics readable"
        yield Outcome(_NAME, Status.ASK, "the engine does not tell its KV format", how)
        return
    seen = f"{told.value} ({told.source})"
    if rollout.wanted is not None and engine.canonical(rollout.wanted) != engine.canonical(told.value):
        yield Outcome(
            _NAME,
            Status.FAIL,
            f"{rollout.wanted} was wanted, and {seen} serves",
            f"set {engine.advice.get('format', 'it')}",
        )
    elif is_plain(engine, told.value):
        yield Outcome(
            _NAME, Status.WARN, f"{seen} serves: nothing is quantized", f"set {engine.advice.get('format', 'it')}"
        )
    elif rollout.wanted is None:
        yield Outcome(_NAME, Status.PASS, f"{seen} serves", "")
    else:
        yield Outcome(_NAME, Status.PASS, f"{seen} serves, as wanted")


def is_plain(engine: Engine, name: str) -> bool:
    """A format of 16 bits or more."""
    bits = stored_bits(engine, name, _DIM)
    return bits is not None and bits >= 16


CHECKS = (Check(_NAME, "does the wanted format really serve?", serving_format),)
