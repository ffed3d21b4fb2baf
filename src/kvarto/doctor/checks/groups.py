"""Is there a baseline in 16 bits, and a control group like it? Without a control, a difference may be of the canary's age, size or luck."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.diagnose.signals import Setting
from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.checks.format import is_plain
from kvarto.doctor.rollout import Arm, Rollout

_SAME = (Setting.MODEL, Setting.VERSION, Setting.WEIGHTS_DTYPE)


def baseline(rollout: Rollout) -> Iterator[Outcome]:
    """Another engine, or the same one if it offers 16 bits."""
    yield _group("baseline", rollout.baseline, rollout)


def control(rollout: Rollout) -> Iterator[Outcome]:
    """A second baseline of the candidate's share and age."""
    arm, first = rollout.control, rollout.baseline
    if arm is not None and first is not None and arm.source == first.source:
        yield Outcome(
            "control",
            Status.FAIL,
            "control and baseline are the same engine",
            "a control of the canary's size, started with it",
        )
        return
    yield _group("control", arm, rollout)


def _group(name: str, arm: Arm | None, rollout: Rollout) -> Outcome:
    if arm is None:
        return Outcome(name, Status.ASK, f"no {name} was named", f"name it: --{name} URL")
    engine = arm.engine
    if arm.source == rollout.candidate.source:
        return Outcome(name, Status.FAIL, f"the {name} is the candidate itself", f"name another engine: --{name} URL")
    if engine is None:
        return Outcome(name, Status.FAIL, arm.problem, f"start the {name}")
    told = arm.settings.get(Setting.KV_DTYPE)
    if told is None:
        return Outcome(name, Status.ASK, f"{arm.source} does not tell its KV format", "see that it is 16 bits")
    if not is_plain(engine, told.value):
        return Outcome(name, Status.FAIL, f"{arm.source} serves {told.value}", f"a {name} stores 16 bits")
    return _alike(name, arm, rollout)


def _alike(name: str, arm: Arm, rollout: Rollout) -> Outcome:
    """The same engine, version and model as the candidate's: else a difference says nothing of the format."""
    mine, candidate = arm.settings, rollout.candidate
    if candidate.engine is not None and arm.engine is not None and candidate.engine.name != arm.engine.name:
        return Outcome(
            name,
            Status.FAIL,
            f"it is {arm.engine.title}, and the candidate {candidate.engine.title}",
            "compare one engine with itself",
        )
    for setting in _SAME:
        theirs, ours = candidate.settings.get(setting), mine.get(setting)
        if theirs is not None and ours is not None and theirs.value != ours.value:
            words = f"its {setting.value} is {ours.value}, and the candidate's {theirs.value}"
            return Outcome(name, Status.FAIL, words, "they may differ in the KV format alone")
    told = mine[Setting.KV_DTYPE]
    same = ", ".join(setting.value for setting in _SAME if setting in mine and setting in candidate.settings)
    return Outcome(name, Status.PASS, f"{arm.source} serves {told.value}" + (f"; same {same}" if same else ""))


CHECKS = (
    Check("baseline", "is there a baseline in 16 bits?", baseline),
    Check("control", "is there a control group?", control),
)
