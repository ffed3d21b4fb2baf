"""What the checks found: a table at 80 columns, Markdown for a pull request, JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvarto.doctor.check import Outcome, Status, overall
from kvarto.doctor.rollout import Rollout

_STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.WARN: "yellow", Status.ASK: "cyan"}
_SHOWN = {Status.PASS: "pass", Status.FAIL: "FAIL", Status.WARN: "warn", Status.ASK: "ask"}
_BOXES = {Status.PASS: "[x]", Status.FAIL: "[ ]", Status.WARN: "[x]", Status.ASK: "[ ]"}
_VERDICTS = {0: "ready", 1: "not ready", 3: "a person must answer what is left"}


def verdict(outcomes: Sequence[Outcome]) -> str:
    """In words, with counts."""
    counts = Counter(outcome.status for outcome in outcomes)
    told = ", ".join(f"{counts[status]} {_SHOWN[status].lower()}" for status in Status if counts[status])
    return f"{_VERDICTS[overall(outcomes)]}: {told}"


def as_json(rollout: Rollout, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For programs; the fields are stable."""
    engine = rollout.candidate.engine
    return {
        "ready": overall(outcomes) == 0,
        "exit_code": overall(outcomes),
        "candidate": rollout.candidate.source,
        "engine": None if engine is None else engine.name,
        "kv_format": rollout.format,
        "date": rollout.today.isoformat(),
        "checks": [{**asdict(outcome), "status": str(outcome.status)} for outcome in outcomes],
    }


def show(rollout: Rollout, outcomes: Sequence[Outcome], console: Console) -> None:
    """Print it; what needs doing has its remedy below it."""
    code = overall(outcomes)
    style = {0: "bold green", 1: "bold red"}.get(code, "bold yellow")
    console.print(
        Text.assemble(
            (verdict(outcomes), style), f" ({rollout.candidate.source}, {rollout.format or 'format not known'})"
        )
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("check", overflow="fold", max_width=22)
    table.add_column("evidence", overflow="fold")
    for outcome in outcomes:
        evidence = Text(outcome.evidence)
        if outcome.remedy and outcome.status is not Status.PASS:
            evidence.append(f"\n> {outcome.remedy}", "bold")
        table.add_row(Text(_SHOWN[outcome.status], _STYLES[outcome.status]), Text(outcome.check), evidence)
    console.print(table)


def markdown(rollout: Rollout, outcomes: Sequence[Outcome]) -> str:
    """A list to tick off."""
    lines = [
        f"### kvarto doctor: {verdict(outcomes)}",
        "",
        f"`{rollout.candidate.source}`, KV format `{rollout.format or 'not known'}`, {rollout.today}",
        "",
    ]
    for outcome in outcomes:
        remedy = f" **To do:** {outcome.remedy}" if outcome.remedy and outcome.status is not Status.PASS else ""
        lines.append(f"- {_BOXES[outcome.status]} **{outcome.check}**: {outcome.status}. {outcome.evidence}.{remedy}")
    return "\n".join(lines) + "\n"
