"""Does the format need scales, and are they there? Engines serve 1.0 for those that lack, without an error."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.checkpoint import Scales, read_scales
from kvarto.doctor.checks.format import is_plain, not_told
from kvarto.doctor.rollout import Rollout
from kvarto.errors import KvartoError

_NAME = "calibration"
_STATIC = {
    "vllm": ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4", "nvfp4_4over6"),
    "sglang": ("fp8_e4m3", "fp8_e5m2"),
    "tensorrt-llm": ("fp8", "int8", "nvfp4"),
    "kvarto": ("fp8", "fp8-head", "fp8_e5m2", "fp8_e5m2-head"),
    "llama.cpp": (),
}
"""Formats whose scales are fixed before serving; all others compute theirs from what they store."""
_REMEDY = "kvarto calibrate MODEL -o model.record; kvarto calibrate export-scales model.record FOLDER"


def calibration(rollout: Rollout) -> Iterator[Outcome]:
    """Scales found beside layers that cache."""
    engine, name = rollout.candidate.engine, rollout.format
    if engine is None or name is None:
        yield not_told(_NAME, engine)
        return
    parts = set(name.split("+")[0].split("/")) if engine.name == "kvarto" else {name.lower()}
    if not parts.intersection(_STATIC[engine.stores_as]):
        why = "it stores 16 bits" if is_plain(engine, name) else "its scales are computed from what is stored"
        yield Outcome(_NAME, Status.PASS, f"{name} needs none: {why}")
    elif rollout.checkpoint is None:
        yield Outcome(
            _NAME, Status.ASK, f"{name} needs scales, and no checkpoint was named", "give --checkpoint FOLDER"
        )
    else:
        try:
            found = read_scales(rollout.checkpoint)
        except KvartoError as error:
            yield Outcome(_NAME, Status.FAIL, str(error), "name the folder that the engine loads")
            return
        yield _judge(name, found)


def _judge(name: str, found: Scales) -> Outcome:
    counted = f"{found.k} of {found.layers} layers have a K scale, {found.v} a V scale"
    if found.k == found.v == found.layers:
        if found.ones:
            return Outcome(_NAME, Status.WARN, f"{counted}, and all of them are 1.0", f"was it calibrated? {_REMEDY}")
        return Outcome(_NAME, Status.PASS, counted)
    if found.k or found.v or found.promised:
        promise = "; config.json promises them" if found.promised else ""
        return Outcome(_NAME, Status.FAIL, f"{counted}{promise}: the rest serves 1.0", _REMEDY)
    return Outcome(
        _NAME, Status.WARN, f"{counted}: {name} serves with 1.0", f"calibrate, or evaluate it as it is: {_REMEDY}"
    )


CHECKS = (Check(_NAME, "are the scales that the format needs there?", calibration),)
