"""Are prefix caching, chunked prefill, continuous batching and pages on, and still on with the format? Read from the live engine, before and after.

A KV format has switched prefix caching off without a word (rwlove/home-ops#13384: hits fell to 0 %, 95,993 more prompt tokens a step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvarto.diagnose.signals import Always, Setting
from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.rollout import Arm, Rollout

_NO_PAGES = "room is bought by the longest request of each slot; expect less from a smaller format"
_HALF = 0.5
_ENOUGH_TOKENS = 10_000


def _switch(setting: Setting) -> Callable[[Rollout], Iterator[Outcome]]:
    def run(rollout: Rollout) -> Iterator[Outcome]:
        now, before = _of(rollout.candidate, setting), _of(rollout.reference, setting)
        name, source = setting.value, rollout.candidate.settings.get(setting)
        was = "" if before is None else f"; before the format: {_word(before)}"
        if now is None or source is None:
            yield Outcome(name, Status.ASK, f"the engine does not tell{was}", _how(rollout.candidate, setting))
        elif now:
            yield Outcome(name, Status.PASS, f"on ({source.source}){was}")
        elif before:
            yield Outcome(
                name,
                Status.FAIL,
                f"off ({source.source}){was}",
                "the format, or its flags, switched it off: switch it on",
            )
        elif _never(rollout.candidate, setting):
            yield Outcome(name, Status.WARN, f"off ({source.source})", _NO_PAGES)
        else:
            yield Outcome(name, Status.FAIL, f"off ({source.source}){was}", _option(rollout.candidate, setting))

    return run


def _prefix_caching(rollout: Rollout) -> Iterator[Outcome]:
    """The switch, and whether what it hits fell: it may say on and never hit."""
    yield from _switch(Setting.PREFIX_CACHING)(rollout)
    rates = [_hits(arm) for arm in (rollout.candidate, rollout.reference)]
    if rates[0] is None or rates[1] is None:
        return
    words = f"{rates[0]:.0%} of prompt tokens hit, against {rates[1]:.0%} without the format"
    fell = rates[1] > 0.02 and rates[0] < _HALF * rates[1]
    remedy = "compare the same traffic: is it really on, and is the cache warm?" if fell else ""
    yield Outcome("prefix caching: hits", Status.FAIL if fell else Status.PASS, words, remedy)


def _hits(arm: Arm | None) -> float | None:
    """The hit rate since the engine's start, None if it was asked too little to say."""
    window = None if arm is None else arm.window
    if window is None:
        return None
    computed = window.computed_tokens
    return window.hit_rate if computed is not None and computed >= _ENOUGH_TOKENS else None


def _of(arm: Arm | None, setting: Setting) -> bool | None:
    told = None if arm is None else arm.settings.get(setting)
    return None if told is None else told.on


def _word(on: bool) -> str:
    return "on" if on else "off"


def _never(arm: Arm, setting: Setting) -> bool:
    places = () if arm.engine is None else arm.engine.settings.get(setting, ())
    return any(isinstance(place, Always) for place in places)


def _option(arm: Arm, setting: Setting) -> str:
    option = "" if arm.engine is None else arm.engine.advice.get(setting.value, "")
    return f"switch it on: {option}" if option else "switch it on"


def _how(arm: Arm, setting: Setting) -> str:
    if arm.engine is not None and arm.engine.name == "vllm" and setting is Setting.CHUNKED_PREFILL:
        return "VLLM_SERVER_DEV_MODE=1 opens /server_info on a test instance; or see the line that it logs at its start"
    return "see the line that it logs at its start"


CHECKS = (
    Check("prefix caching", "is it on, and does it still hit?", _prefix_caching),
    *(
        Check(setting.value, "is it on, and still on with the format?", _switch(setting))
        for setting in (Setting.CHUNKED_PREFILL, Setting.CONTINUOUS_BATCHING, Setting.PAGED_KV)
    ),
)
