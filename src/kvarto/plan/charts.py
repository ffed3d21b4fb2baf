"""A plan's curves as SVG: pure functions from an answer to markup, coloured by the classes of curves.css. Every line has its name beside its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from kvarto.plan.answer import Answer, FormatAnswer
from kvarto.plan.prefixes import PrefixAnswer
from kvarto.plan.show import size, tokens

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 320, 64, 168, 26, 44
_LABEL_GAP = 14
_SHOWN = (
    "bf16",
    "vllm:bf16",
    "fp8",
    "int8",
    "int4",
    "int2",
    "vllm:fp8_e4m3",
    "vllm:nvfp4",
    "vllm:int4_per_token_head",
    "llama.cpp:q8_0",
    "llama.cpp:q4_0",
)
_MOST_LINES = 6
_MARKED = ("bf16", "fp8", "int4", "int2")


@dataclass(frozen=True)
class Line:
    """A named curve. `tone`: a class."""

    name: str
    points: tuple[tuple[float, float], ...]
    tone: str


def shown_formats(made: Answer) -> list[FormatAnswer]:
    """The formats that pictures have room for: the baseline and the best known ones."""
    known = {each.name: each for each in made.formats}
    wanted = [known[name] for name in _SHOWN if name in known]
    wanted += [each for each in made.formats if each not in wanted]
    base = [each for each in wanted if each.name == made.baseline]
    return [*base, *(each for each in wanted if each.smaller > 1.01)][:_MOST_LINES]


def share_curves(made: Answer) -> Markup:
    """The baseline's KV share of a step over contexts, a line for each batch."""
    if not made.cells:
        return Markup("")
    batches = sorted({cell.batch for cell in made.cells})
    lines = [
        Line(
            f"batch {batch}", tuple((cell.context_tokens, 100 * cell.kv_share) for cell in made.cells if cell.batch == batch),
            f"tone{at}",
        )
        for at, batch in enumerate(batches)
    ]  # fmt: skip
    asked = made.scenario.context_tokens
    return _chart(
        f"KV share of a {made.baseline} decode step",
        "percent of the bytes read",
        lines,
        (0.0, 100.0),
        marks=[(asked, "asked")],
    )


def gain_curves(made: Answer) -> Markup:
    """The most that a step gains over contexts, at the asked concurrency, with the context from which on it pays."""
    if not made.cells:
        return Markup("")
    batch = made.scenario.concurrency
    cells = [cell for cell in made.cells if cell.batch == batch]
    lines = [
        Line(each.name, tuple((cell.context_tokens, cell.gain_bound[each.name]) for cell in cells), f"tone{at}")
        for at, each in enumerate(shown_formats(made))
        if each.name != made.baseline
    ]
    if not lines:
        return Markup("")
    most = max(value for line in lines for _, value in line.points)
    title = f"Decode at batch {batch}: times faster than {made.baseline}, at most"
    fp8 = next((each for each in made.formats if each.name in ("fp8", "vllm:fp8_e4m3")), None)
    marks = [(made.scenario.context_tokens, "asked")]
    low, high = cells[0].context_tokens, cells[-1].context_tokens
    if fp8 is not None and fp8.break_even_tokens is not None and low < fp8.break_even_tokens < high:
        marks.append((fp8.break_even_tokens, f"{fp8.name} pays from here"))
    return _chart(title, "", lines, (1.0, _round_up(most)), marks=marks)


def hit_curve(prefixes: PrefixAnswer) -> Markup:
    """Hit rate over the room of a prefix cache, and where each format stands."""
    points = tuple((capacity, 100 * rate) for capacity, rate in prefixes.curve)
    if len(points) < 2:
        return Markup("")
    base = [Line("hit rate", points, "tone0")]
    marks = [(row.capacity_tokens, row.name) for row in prefixes.rows if row.name in _MARKED]
    top = max(5.0, _round_up(max(value for _, value in points) / 10) * 10)
    return _chart(
        "Prefix hits under LRU",
        "percent of prompt tokens",
        base,
        (0.0, min(100.0, top)),
        marks=marks,
        across="room in tokens",
    )


def waterfall(made: Answer, each: FormatAnswer) -> Markup:
    """Bars from the whole memory down to what is free."""
    pieces = each.waterfall
    whole = sum(piece.nbytes for piece in pieces)
    if not pieces or whole <= 0:
        return Markup("")
    left, right, bar, gap = 176, 90, 22, 8
    width = _WIDTH - 20
    reach = max(whole, sum(piece.nbytes for piece in pieces if piece.nbytes > 0))
    scale = (width - left - right) / reach
    parts = [
        _text(
            0,
            14,
            f"{each.name}: {made.scenario.concurrency} sequences of {made.scenario.context_tokens:,} tokens",
            "strong",
        )
    ]
    at, y, edge = 0.0, 28.0, left + whole * scale
    parts.append(_line(edge, 24, edge, y + len(pieces) * (bar + gap) - gap + 2, "mark"))
    for number, piece in enumerate(pieces):
        missing = piece.nbytes < 0
        start = whole if missing else at
        length = abs(piece.nbytes) * scale
        tone = "bar missing" if missing else "bar free" if piece.name == "free" else f"bar tone{number}"
        parts.append(_text(left - 8, y + 15, "missing" if missing else piece.name, "end small"))
        parts.append(
            Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" rx="2"/>').format(
                tone, left + start * scale, y, max(length, 1.0), bar
            )
        )
        parts.append(
            _text(min(left + start * scale + length + 6, width - right + 6), y + 15, size(abs(piece.nbytes)), "small")
        )
        at += max(piece.nbytes, 0)
        y += bar + gap
    return _svg(width, y, parts, f"Memory of a GPU in {each.name}")


def stacked(charts: Sequence[Markup], style: str, title: str) -> str:
    """Charts below each other as one SVG file that needs nothing else."""
    y, parts = 40.0, [_text(16, 26, title, "strong")]
    for chart in charts:
        height = _height(chart)
        inner = str(chart).replace("<svg ", f'<svg x="16" y="{y:.0f}" width="{_WIDTH}" height="{height:.0f}" ', 1)
        parts.append(Markup(inner))
        y += height + 24
    whole = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h:.0f}" width="{w}" height="{h:.0f}" class="sheet"><style>{style}</style>'
    ).format(w=_WIDTH + 32, h=y, style=Markup(style))
    return (
        str(
            whole
            + Markup('<rect class="ground" width="100%" height="100%"/>')
            + Markup("").join(parts)
            + Markup("</svg>")
        )
        + "\n"
    )


def _height(chart: Markup) -> float:
    return float(str(chart).split('viewBox="', 1)[1].split('"', 1)[0].split()[3])


# ---- one chart ---------------------------------------------------------------------------------------------------------


def _chart(
    title: str, unit: str, lines: Sequence[Line], span: tuple[float, float], *, marks: Sequence[tuple[float, str]], across: str = "context in tokens"
) -> Markup:  # fmt: skip
    """Lines over a logarithmic axis of tokens."""
    xs = sorted({x for line in lines for x, _ in line.points})
    low, high = xs[0], max(xs[-1], xs[0] * 2)
    right = _WIDTH - _RIGHT

    def x_of(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low)
        return _LEFT + min(share, 1.0) * (right - _LEFT)

    def y_of(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - span[0]) / (span[1] - span[0]) * (_HEIGHT - _BOTTOM - _TOP)

    parts = [_text(0, 12, title, "strong"), _text(right, 12, unit, "end small")]
    for value in _ticks(*span):
        parts += [
            _line(_LEFT, y_of(value), right, y_of(value), "grid"),
            _text(_LEFT - 8, y_of(value) + 4, f"{value:g}", "end small"),
        ]
    every = max(1, math.ceil(len(xs) / 7))
    for x in xs[::every]:
        parts.append(_text(x_of(x), _HEIGHT - _BOTTOM + 17, _short(x), "middle small"))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 6, across, "middle small"))
    parts += _marks([(x_of(x), name) for x, name in marks if low <= x <= high])
    ends = _spread([y_of(line.points[-1][1]) for line in lines])
    for line, label_y in zip(lines, ends, strict=True):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(Markup('<polyline class="curve {}" points="{}"/>').format(line.tone, path))
        parts.append(_text(x_of(line.points[-1][0]) + 8, label_y + 4, line.name, f"label {line.tone}"))
    return _svg(_WIDTH, _HEIGHT, parts, title)


def _marks(places: Sequence[tuple[float, str]]) -> Iterable[Markup]:
    """Vertical lines with their names, at heights of their own so that near ones do not write over each other."""
    for row, (x, name) in enumerate(sorted(places)):
        y = _TOP + 10 + row * _LABEL_GAP
        yield _line(x, _TOP, x, _HEIGHT - _BOTTOM, "mark")
        near_end = x > _WIDTH - _RIGHT - 8 * len(name) / 1.2
        yield _text(x - 5 if near_end else x + 5, y, name, "end small" if near_end else "small")


def _spread(ys: Sequence[float]) -> list[float]:
    """Heights of labels, pushed apart, and up again if they left the picture."""
    placed = [0.0] * len(ys)
    floor = _HEIGHT - _BOTTOM
    last = -math.inf
    for i in sorted(range(len(ys)), key=lambda i: ys[i]):
        last = placed[i] = max(ys[i], last + _LABEL_GAP)
    beyond = max(0.0, last - floor)
    return [y - beyond for y in placed]


def _ticks(low: float, high: float) -> list[float]:
    step = next(step for step in _steps() if (high - low) / step <= 6)
    return [low + i * step for i in range(int((high - low) / step + 1e-9) + 1)]


def _steps() -> Iterable[float]:
    for exponent in range(-3, 9):
        yield from (factor * 10.0**exponent for factor in (1, 2, 2.5, 5))


def _round_up(value: float) -> float:
    """To a half, and at least a tenth above one."""
    return max(1.1, math.ceil(value * 2) / 2) if value > 1.1 else 1.1


def _short(count: float) -> str:
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.3g}{unit}"
    return tokens(int(count))


def _line(x1: float, y1: float, x2: float, y2: float, tone: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(tone, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, tone: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(tone, x, y, escape(text))


def _svg(width: float, height: float, parts: Iterable[Markup], label: str) -> Markup:
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{}" viewBox="0 0 {:.0f} {:.0f}">{}</svg>'
    ).format(label, width, height, Markup("").join(parts))
