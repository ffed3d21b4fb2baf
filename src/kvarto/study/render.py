"""A study on the terminal: a table of quality, one of memory and speed, and what to do."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvarto.study.result import ArmResult, Interval, StudyResult

_COLOUR = {"pass": "green", "fail": "red", "inconclusive": "yellow"}
NOTHING = "-"


def render(result: StudyResult) -> RenderableType:
    """Everything that a terminal shows of a study."""
    parts: list[RenderableType] = [quality_table(result)]
    if any(arm.memory or arm.speed for arm in result.arms):
        parts += ["", cost_table(result), ""]
    return Group(*parts, recommendation_panel(result))


def quality_table(result: StudyResult) -> Table:
    """Agreement with the baseline, needles, JSON and the verdict, a row for each arm."""
    scope = result.scope
    caption = (
        f"{scope.documents} {scope.clusters} x {scope.document_tokens} tokens; [95 % interval by {scope.clusters[:-1]}];"
        " ppl ratio = perplexity over the baseline's; A/A = the baseline through another path, the noise floor"
    )
    table = _table(f"Quality of {result.provenance.model}", caption)
    for heading, justify in (
        ("format", "left"), ("bits", "right"), ("KL nats", "right"), ("top-1", "right"), ("ppl ratio", "right"),
        ("needles", "right"), ("JSON", "right"), ("verdict", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for arm in result.arms:
        fidelity = arm.fidelity
        table.add_row(
            arm.name,
            f"{arm.bits_per_number:.2f}",
            interval_text(fidelity.kl_nats, "{:#.2g}") if fidelity else NOTHING,
            f"{fidelity.top1.mean:.1%}" if fidelity else NOTHING,
            interval_text(fidelity.perplexity_ratio, "{:.3f}") if fidelity else NOTHING,
            needles_text(arm),
            json_text(arm),
            _verdict_text(arm),
        )
    return table


def cost_table(result: StudyResult) -> Table:
    """Bytes per token and tokens per second, a row for each arm that has them."""
    weighed = result.baseline.memory
    at = f" at {weighed[-1].context_tokens:,} tokens" if weighed else ""
    table = _table(f"Memory{at}, and speed", _cost_caption(result))
    headings = ["format", "payload", "metadata", "tail", "B/token", "grew MB"]
    for speed in result.baseline.speed:
        size = thousands(speed.context_tokens)
        headings += [f"decode/s @{size}", f"prefill/s @{size}"]
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for arm in result.arms:
        if arm.memory or arm.speed:
            table.add_row(arm.name, *_memory_cells(arm), *_speed_cells(arm, result.baseline))
    return table


def _cost_caption(result: StudyResult) -> str:
    threads = result.provenance.threads
    return (
        "bytes per token of one sequence; tail = tokens kept raw; grew = resident memory of a fresh process;"
        f" tokens per second and ratio to the baseline on {threads} thread{'s' if threads > 1 else ''}"
    )


def recommendation_panel(result: StudyResult) -> Panel:
    """The headline with its reasons and caveats."""
    found = result.recommendation
    lines = Table.grid(padding=(0, 1))
    for reason in found.reasons:
        lines.add_row(" ", Text(reason))
    for caveat in found.caveats:
        lines.add_row(Text("!", style="dim"), Text(caveat, style="dim"))
    body = Group(Text(found.headline, style="bold"), lines)
    title = "Interrupted: what was done so far" if result.interrupted else "Recommendation"
    return Panel(body, title=title, title_align="left", border_style=_COLOUR[found.status])


def interval_text(found: Interval, pattern: str) -> str:
    """`mean [low, high]`, or the mean alone."""
    mean = pattern.format(found.mean)
    if found.low is None or found.high is None:
        return mean
    return f"{mean} [{pattern.format(found.low)}, {pattern.format(found.high)}]"


def needles_text(arm: ArmResult) -> str:
    """`found/all`."""
    return f"{sum(cell.found for cell in arm.needles)}/{len(arm.needles)}" if arm.needles else NOTHING


def json_text(arm: ArmResult) -> str:
    """`right/all`."""
    return f"{sum(item.right_values for item in arm.json_items)}/{len(arm.json_items)}" if arm.json_items else NOTHING


def thousands(tokens: int) -> str:
    """1024 as 1K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens}"


def _memory_cells(arm: ArmResult) -> Sequence[str]:
    if not arm.memory:
        return [NOTHING] * 5
    memory = arm.memory[-1]
    parts = (memory.payload_bytes, memory.metadata_bytes, memory.tail_bytes)
    grown = memory.rss_growth_bytes
    return [
        *(f"{part / memory.context_tokens:,.0f}" for part in parts),
        f"{memory.bytes_per_token:,.0f}",
        NOTHING if grown is None else f"{grown / 1e6:.1f}",
    ]


def _speed_cells(arm: ArmResult, baseline: ArmResult) -> Sequence[str]:
    cells = []
    for ours, theirs in zip(arm.speed, baseline.speed, strict=False):
        for own, other in (
            (ours.decode_tokens_per_second[0], theirs.decode_tokens_per_second[0]),
            (ours.prefill_tokens_per_second[0], theirs.prefill_tokens_per_second[0]),
        ):
            cells.append(f"{own:.1f} ({own / other:.2f}x)" if own < 100 else f"{own:.0f} ({own / other:.2f}x)")
    return cells


def _verdict_text(arm: ArmResult) -> Text:
    if arm.verdict is None:
        return Text({"baseline": "baseline", "control": "noise floor"}.get(arm.role, NOTHING), style="dim")
    return Text(arm.verdict.status, style=f"bold {_COLOUR[arm.verdict.status]}")


def _table(title: str, caption: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        title_style="bold",
        caption_style="dim",
    )


def picture(result: StudyResult, *, columns: int = 132) -> str:
    """The terminal's view as an SVG image."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(result))
    drawn = console.export_svg(title=f"kvarto study {result.provenance.model}")
    # rich names a font on the network; any monospaced one will do.
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
