"""Does it answer, and can one go back? The candidate, a baseline, a switch that takes a request off the format. Requests of one token are sent."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.diagnose.exposition import Page
from kvarto.diagnose.signals import Counter
from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.checks.format import is_plain
from kvarto.doctor.rollout import Arm, Rollout
from kvarto.errors import KvartoError, Unreachable

_HEADER = "X-KV-Format"
_COUNT = "kvarto_requests_total"


def generation(rollout: Rollout) -> Iterator[Outcome]:
    """The candidate generates a token with the format: an engine may start with one that its kernels do not have, and die of the first request."""
    name, arm = "generation", rollout.candidate
    if not arm.is_live:
        yield Outcome(name, Status.ASK, "the candidate is a file", "give its address")
    elif not rollout.may_send:
        yield Outcome(name, Status.ASK, "nothing was sent (--no-requests)", f"send a request to {arm.source}")
    else:
        yield _answers(name, arm, rollout, "an engine that does not answer is not ready")


def fallback(rollout: Rollout) -> Iterator[Outcome]:
    """The baseline generates a token; or the candidate itself does, in 16 bits or more, where formats live side by side."""
    name, arm, plain = "fallback", rollout.baseline, None
    if arm is None and (plain := plain_offered(rollout.candidate)) is not None:
        arm = rollout.candidate
    if arm is None or not arm.is_live:
        yield Outcome(name, Status.ASK, "no live baseline was named", "name it: --baseline URL")
    elif not rollout.may_send:
        yield Outcome(name, Status.ASK, "nothing was sent (--no-requests)", f"send a request to {arm.source}")
    else:
        yield _answers(name, arm, rollout, "a fallback that does not answer is none", plain)


def _answers(name: str, arm: Arm, rollout: Rollout, remedy: str, kv_format: str | None = None) -> Outcome:
    """Whether it generates a token, in a format of those that it offers or in its own."""
    fields = {} if kv_format is None else {"kv_format": kv_format}
    try:
        arm.complete(seconds=rollout.answer_seconds, fields=fields)
    except Unreachable as error:
        return Outcome(name, Status.FAIL, str(error), remedy)
    where = arm.source if kv_format is None else f"{arm.source} in {kv_format}"
    return Outcome(name, Status.PASS, f"{where} generated a token")


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
    name, candidate, plain = "off switch", rollout.candidate, plain_offered(rollout.candidate)
    if plain is None:
        return Outcome(name, Status.FAIL, "it serves no format of 16 bits to switch to", "kvarto serve --also bf16")
    header, value = rollout.off_header or (_HEADER, plain)
    try:
        before = _served(candidate.scrape().pages[-1], plain)
        candidate.complete(seconds=rollout.answer_seconds, headers={header: value})
        after = _served(candidate.scrape().pages[-1], plain)
    except KvartoError as error:
        return Outcome(name, Status.FAIL, str(error), "does the engine know the header?")
    sent = f"a request with {header}: {value}"
    if after > before:
        return Outcome(name, Status.PASS, f"{sent} was served in {plain} ({_COUNT}: {before:.0f} to {after:.0f})")
    return Outcome(name, Status.FAIL, f"{sent} was not counted as {plain}", "the header did not reach the engine")


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


def plain_offered(arm: Arm) -> str | None:
    """A format of 16 bits or more that a kvarto server has too."""
    if arm.engine is None or arm.window is None or arm.engine.name != "kvarto" or not arm.is_live:
        return None
    samples = arm.window.pages[-1].samples.get("kvarto_formats_info", ())
    names = [sample.labels.get("kv_format", "") for sample in samples]
    return next((name for name in names if name and is_plain(arm.engine, name)), None)


CHECKS = (
    Check("generation", "does the candidate generate with the format?", generation),
    Check("fallback", "does a 16-bit engine answer?", fallback),
    Check("off switch", "can a request be taken off the format?", off_switch),
)
