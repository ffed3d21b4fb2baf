"""Can one go back? A baseline that answers, and a switch that takes a single request off the format. Requests of one token are sent."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.diagnose.exposition import Page
from kvarto.diagnose.signals import Counter
from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.rollout import Arm, Rollout
from kvarto.errors import KvartoError, Unreachable

_PLAIN = "bf16"
_OURS = ("X-KV-Format", _PLAIN)
_COUNT = "kvarto_requests_total"


def fallback(rollout: Rollout) -> Iterator[Outcome]:
    """The baseline generates a token; or the candidate itself does, in 16 bits, where formats live side by side."""
    name, arm = "fallback", rollout.baseline
    fields = {}
    if arm is None and offers(rollout.candidate, _PLAIN):
        arm, fields = rollout.candidate, {"kv_format": _PLAIN}
    if arm is None or not arm.is_live:
        yield Outcome(name, Status.ASK, "no live baseline was named", "name it: --baseline URL")
    elif not rollout.may_send:
        yield Outcome(name, Status.ASK, "nothing was sent (--no-requests)", f"send a request to {arm.source}")
    else:
        where = f"{arm.source} in {_PLAIN}" if fields else arm.source
        try:
            arm.complete(seconds=rollout.answer_seconds, fields=fields)
        except Unreachable as error:
            yield Outcome(name, Status.FAIL, str(error), "a fallback that does not answer is none")
            return
        yield Outcome(name, Status.PASS, f"{where} generated a token")


def off_switch(rollout: Rollout) -> Iterator[Outcome]:
    """A request with the switch is served in 16 bits, by the engines' own counts."""
    name, candidate = "off switch", rollout.candidate
    ours = candidate.engine is not None and candidate.engine.name == "kvarto" and candidate.is_live
    if not rollout.may_send and (ours or rollout.gateway):
        yield Outcome(
            name,
            Status.ASK,
            "nothing was sent (--no-requests)",
            "send a request with the switch, and see who served it",
        )
    elif rollout.gateway is not None and rollout.baseline is not None and rollout.off_header is not None:
        yield _through_gateway(rollout, rollout.gateway, rollout.baseline, rollout.off_header)
    elif ours:
        yield _in_one_engine(rollout)
    else:
        remedy = "give --gateway URL, --off-header 'NAME: VALUE' and --baseline URL"
        yield Outcome(name, Status.ASK, "the engine has no switch of its own, and no gateway was named", remedy)


def _in_one_engine(rollout: Rollout) -> Outcome:
    """kvarto: a header names the format of a request, and requests are counted by format."""
    name, candidate = "off switch", rollout.candidate
    header, value = rollout.off_header or _OURS
    try:
        before = _served(candidate.scrape().pages[-1], _PLAIN)
        candidate.complete(seconds=rollout.answer_seconds, headers={header: value})
        after = _served(candidate.scrape().pages[-1], _PLAIN)
    except KvartoError as error:
        return Outcome(name, Status.FAIL, str(error), f"serve {_PLAIN} too: kvarto serve --also {_PLAIN}")
    if after > before:
        return Outcome(
            name,
            Status.PASS,
            f"a request with {header}: {value} was served in {_PLAIN} ({_COUNT}: {before:.0f} to {after:.0f})",
        )
    return Outcome(
        name,
        Status.FAIL,
        f"a request with {header}: {value} was not counted as {_PLAIN}",
        "the header did not reach the engine",
    )


def _served(page: Page, kv_format: str) -> float:
    return sum(each.value for each in page.samples.get(_COUNT, ()) if each.labels.get("kv_format") == kv_format)


def _through_gateway(rollout: Rollout, gateway: str, baseline: Arm, header: tuple[str, str]) -> Outcome:
    """Who computed a prompt while the request was served; where other traffic runs, both did, and a person must look."""
    name, arms = "off switch", (rollout.candidate, baseline)
    try:
        before = [_prompted(arm) for arm in arms]
        rollout.through(gateway).complete(seconds=rollout.answer_seconds, headers=dict([header]))
        after = [_prompted(arm) for arm in arms]
    except KvartoError as error:
        return Outcome(name, Status.FAIL, str(error), "is the gateway's address right?")
    moved = [None if then is None or now is None else now > then for then, now in zip(before, after, strict=True)]
    said = f"with {header[0]} sent to {gateway}"
    if moved == [False, True]:
        return Outcome(name, Status.PASS, f"{said} the baseline computed the prompt, and the candidate none")
    if moved[0] and not moved[1]:
        return Outcome(
            name,
            Status.FAIL,
            f"{said} the candidate computed the prompt, and the baseline none",
            "the switch does not switch",
        )
    return Outcome(
        name, Status.ASK, f"{said} both or none of the engines computed prompts", "try again without other traffic"
    )


def _prompted(arm: Arm) -> float | None:
    window = arm.scrape()
    return window.counter(Counter.PROMPT_TOKENS) if window.computed_tokens is None else window.computed_tokens


def offers(arm: Arm, kv_format: str) -> bool:
    """Whether a kvarto server has the format too."""
    if arm.engine is None or arm.engine.name != "kvarto" or not arm.is_live:
        return False
    samples = arm.window.pages[-1].samples.get("kvarto_formats_info", ()) if arm.window else ()
    return any(sample.labels.get("kv_format") == kv_format for sample in samples)


CHECKS = (
    Check("fallback", "does a 16-bit engine answer?", fallback),
    Check("off switch", "can a request be taken off the format?", off_switch),
)
