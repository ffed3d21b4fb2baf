"""A study as one HTML file that needs nothing else: no script, no font, no address."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvarto.study import render, svg
from kvarto.study.result import ArmResult, Interval, StudyResult, baseline_perplexity

_MARK = {"pass": "✓", "fail": "✗", "inconclusive": "?", "reported": "·"}


def html(result: StudyResult) -> str:
    """The whole report."""
    environment = Environment(
        loader=PackageLoader("kvarto.study", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        mark=_MARK,
        interval=render.interval_text,
        needles_text=render.needles_text,
        json_text=render.json_text,
        thousands=render.thousands,
        changed=_changed,
        percent=_percent,
        nothing=render.NOTHING,
    )
    return environment.get_template("report.html.j2").render(
        result=result,
        base_perplexity=_base_perplexity(result),
        scatter=svg.bits_against_kl(result),
        heatmaps=_heatmaps(result),
        bars=[svg.speed_bars(result, decode=True), svg.speed_bars(result, decode=False)],
    )


def _heatmaps(result: StudyResult) -> list[dict[str, Any]]:
    """For each candidate its name, verdict on needles, and two pictures: baseline and candidate."""
    base = result.baseline
    return [
        {
            "name": arm.name,
            "check": next((check for check in arm.verdict.checks if check.name == "needles"), None)
            if arm.verdict
            else None,
            "pictures": [svg.heatmap(base.needles, base.name), svg.heatmap(arm.needles, arm.name)],
        }
        for arm in result.candidates
        if arm.needles and base.needles
    ]


def _base_perplexity(result: StudyResult) -> float | None:
    read = next((arm.fidelity for arm in result.arms if arm.fidelity is not None), None)
    return baseline_perplexity(read.documents) if read else None


def _percent(share: Interval) -> Interval:
    """In percent, cut off at 100."""
    low, high = (None if bound is None else min(100 * bound, 100.0) for bound in (share.low, share.high))
    return Interval(mean=100 * share.mean, low=low, high=high)


def _changed(arm: ArmResult, baseline: ArmResult) -> list[tuple[str, str, str]]:
    """(prompt, baseline's output, candidate's output) where the JSON answers differ."""
    pairs = zip(baseline.json_items, arm.json_items, strict=False)
    return [(base.prompt, base.output, other.output) for base, other in pairs if base.output != other.output]
