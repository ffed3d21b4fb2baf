"""Does the format that was asked for really serve? Engines fall back without a word, and a flag is not a fact."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.diagnose.formats import PLAIN_BITS, known_format, stored_bits
from kvarto.diagnose.served import by_head_dim
from kvarto.diagnose.signals import Engine, Setting
from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.rollout import Rollout

_NAME = "format"
_HEAD = by_head_dim(128).model
"""Stands for any model: only formats of 16 bits or more cost as much on it."""


def serving_format(rollout: Rollout) -> Iterator[Outcome]:
    """The candidate's effective KV format beside the wanted one."""
    told, engine = rollout.candidate.settings.get(Setting.KV_DTYPE), rollout.candidate.engine
    if told is None or engine is None:
        how = "see the line that it logs at its start" if engine is not None else "make its metrics readable"
        yield Outcome(_NAME, Status.ASK, "the engine does not tell its KV format", how)
        return
    seen = f"{told.value} ({told.source})"
    if rollout.wanted is not None and _whole_name(engine, rollout.wanted) != _whole_name(engine, told.value):
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


def not_told(name: str, engine: Engine | None) -> Outcome:
    """What a check says that needs the engine and the format, and lacks one."""
    if engine is None:
        return Outcome(name, Status.ASK, "which engine it is is not known", "make its metrics readable")
    return Outcome(name, Status.ASK, "the engine does not tell its KV format", "give --kv")


def _whole_name(engine: Engine, name: str) -> str:
    """One name for all that an engine calls a format."""
    kv = known_format(engine, name)
    return name.strip().lower() if kv is None else kv.name


def is_plain(engine: Engine, name: str) -> bool:
    """A format of 16 bits or more."""
    kv = known_format(engine, name)
    return kv is not None and (stored_bits(kv, _HEAD) or 0) >= PLAIN_BITS


CHECKS = (Check(_NAME, "does the wanted format really serve?", serving_format),)
