"""A diagnosis as people read it at 80 columns, as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvarto.diagnose.advice import Hint
from kvarto.diagnose.decide import Cause, Diagnosis
from kvarto.diagnose.formats import Change
from kvarto.diagnose.settings import Told
from kvarto.diagnose.signals import Setting
from kvarto.diagnose.window import Window

_STYLES = {Cause.UNKNOWN: "bold yellow", Cause.NOT_KV: "bold green"}
_HOLDS = {True: "yes", False: "no", None: "?"}


@dataclass(frozen=True)
class Report:
    """All that `kvarto diagnose` says. `present`: the KV format now and where that stands, None if the engine does not tell.

    `model`: the name of that of which bytes were counted, None if only its `head_dim` was known.
    """

    window: Window
    diagnosis: Diagnosis
    settings: dict[Setting, Told]
    changes: Sequence[Change]
    advice: Sequence[Hint]
    model: str | None
    head_dim: int | None

    @property
    def present(self) -> Told | None:
        """The KV format that serves."""
        return self.settings.get(Setting.KV_DTYPE)

    @property
    def span(self) -> str:
        """What was looked at, in words."""
        count, seconds = len(self.window.pages), self.window.seconds
        if self.window.lifetime:
            return "one scrape, counters since the engine's start"
        return f"{count} scrapes" + (f" over {seconds:,.0f} s" if seconds else ", of files without times")


def as_json(report: Report) -> dict[str, Any]:
    """For programs; the fields are stable."""
    diagnosis, window = report.diagnosis, report.window
    return {
        "verdict": str(diagnosis.cause),
        "reason": diagnosis.reason,
        "engine": window.engine.name,
        "scrapes": len(window.pages),
        "seconds": window.seconds,
        "kv_format": None if report.present is None else report.present.value,
        "kv_share": diagnosis.kv_share,
        "evidence": [asdict(each) for each in diagnosis.evidence],
        "findings": [{**asdict(each), "cause": str(each.cause)} for each in diagnosis.findings],
        "missing": list(diagnosis.missing),
        "notes": list(diagnosis.notes),
        "settings": {setting.value: asdict(told) for setting, told in report.settings.items()},
        "advice": [each.to_json() for each in report.advice],
        "formats": [asdict(each) for each in report.changes],
        "model": report.model,
        "head_dim": report.head_dim,
    }


def show(report: Report, console: Console) -> None:
    """Print it."""
    diagnosis = report.diagnosis
    title = Text.assemble((str(diagnosis.cause), _STYLES.get(diagnosis.cause, "bold red")), f": {diagnosis.reason}")
    console.print(title)
    console.print(Text(f"{report.window.engine.title}, {report.span}", "dim"))
    for note in diagnosis.notes:
        console.print(Text(f"note: {note}", "yellow"))
    console.print(_evidence(report))
    console.print("What limits it")
    console.print(_findings(diagnosis))
    for number, each in enumerate(report.advice, 1):
        console.print(
            Text.assemble(
                f"{number}. ",
                (each.rule.say, "bold"),
                f" ({each.how})" if each.how else "",
                f" {each.rule.because}",
                (f" [{each.rule.source}]", "dim"),
            )
        )
    if report.changes:
        console.print("\nWhat a format would change")
        console.print(_changes(report))
        for line in (*_notes(report.changes), _caveat(report)):
            console.print(Text(line, "dim"))
    if diagnosis.missing:
        console.print(Text("not told: " + "; ".join(diagnosis.missing), "dim"))


def _table(*headings: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def _evidence(report: Report) -> Table:
    table = _table("", " ")
    table.show_header = False
    for each in report.diagnosis.evidence:
        table.add_row(each.name, Text(each.shown))
    for setting in (Setting.KV_DTYPE, Setting.PREFIX_CACHING, Setting.CHUNKED_PREFILL):
        if setting in report.settings:
            table.add_row(setting.value, Text(report.settings[setting].value))
    return table


def _findings(diagnosis: Diagnosis) -> Table:
    table = _table("cause", "holds", "because")
    for each in diagnosis.findings:
        table.add_row(str(each.cause), _HOLDS[each.holds], Text(each.reason))
    return table


def _changes(report: Report) -> Table:
    """Columns in which nothing is known are left out."""
    rows = [(each, _cells(each)) for each in report.changes]
    shown = [name for name in _COLUMNS if any(cells[name] for _, cells in rows)]
    table = _table("format", *shown, right=shown)
    table.columns[0].no_wrap = True
    for each, cells in rows:
        table.add_row(Text(each.name), *(cells[name] for name in shown))
    return table


_COLUMNS = ("bits", "smaller", "pool tokens", "prompts", "step at most")


def _cells(change: Change) -> dict[str, str]:
    faster = change.faster_at_most
    cells = (
        "" if change.bits_per_number is None else f"{change.bits_per_number:.2f}",
        f"{change.smaller:.2f}x",
        _count(change.pool_tokens),
        _count(change.requests),
        "" if faster is None else f"{faster:.2f}x",
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _notes(changes: Sequence[Change]) -> list[str]:
    """What is to be said of formats, each thing once."""
    named: dict[str, list[str]] = {}
    for each in changes:
        if each.note:
            named.setdefault(each.note, []).append(each.name)
    return [f"{', '.join(names)}: {note}" for note, names in named.items()]


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def _caveat(report: Report) -> str:
    present = report.present
    now = "16 bits, which the engine does not tell" if present is None else present.value
    counted = f"on heads of {report.head_dim}" if report.model is None else f"on {report.model}"
    return f"Against {now}, counted {counted}. Room is arithmetic; steps are upper bounds, real kernels reach less."


def markdown(report: Report) -> str:
    """For a pull request or an issue."""
    diagnosis = report.diagnosis
    lines = [f"**{diagnosis.cause}**: {diagnosis.reason}", "", f"{report.window.engine.title}, {report.span}", ""]
    lines += [f"> {note}\n" for note in diagnosis.notes]
    lines += [
        "| seen | |",
        "|---|---|",
        *(f"| {_cell(each.name)} | {_cell(each.shown)} |" for each in diagnosis.evidence),
        "",
    ]
    lines += ["| cause | holds | because |", "|---|---|---|"]
    lines += [f"| {each.cause} | {_HOLDS[each.holds]} | {_cell(each.reason)} |" for each in diagnosis.findings]
    lines += [
        "",
        *(
            f"{n}. **{each.rule.say}**"
            + (f" (`{each.how}`)" if each.how else "")
            + f" {each.rule.because} [{each.rule.source}]"
            for n, each in enumerate(report.advice, 1)
        ),
    ]
    if report.changes:
        lines += ["", f"| format | {' | '.join(_COLUMNS)} |", f"|---|{'---:|' * len(_COLUMNS)}"]
        lines += [f"| {each.name} | {' | '.join(_cells(each).values())} |" for each in report.changes]
        lines += ["", *(f"- {line}" for line in _notes(report.changes)), "", _caveat(report)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
