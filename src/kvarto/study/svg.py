"""The report's pictures as inline SVG: pure functions from a result to markup, coloured by the classes of report.html.j2.

Colour never stands alone: every cell has its count, every point its label, every bar its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from kvarto.study.render import thousands
from kvarto.study.result import ArmResult, NeedleCell, StudyResult

_KL_FLOOR = 1e-6
_CELL_WIDTH, _CELL_HEIGHT = 26, 28
_LABEL_GAP = 14


def heatmap(cells: Sequence[NeedleCell], title: str) -> Markup:
    """Needles found of needles hidden, a row for each length and a column for each depth."""
    lengths = sorted({cell.length_tokens for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    left, top = 44, 22
    width, height = left + _CELL_WIDTH * len(depths) + 4, top + _CELL_HEIGHT * len(lengths) + 24
    parts = [_text(left, 14, title, "strong")]
    for row, length in enumerate(lengths):
        y = top + row * _CELL_HEIGHT
        parts.append(_text(left - 6, y + 18, thousands(length), "end small"))
        for column, depth in enumerate(depths):
            here = [cell.found for cell in cells if (cell.length_tokens, cell.depth) == (length, depth)]
            parts.append(_heat_cell(left + column * _CELL_WIDTH, y, sum(here), len(here)))
    bottom = top + len(lengths) * _CELL_HEIGHT + 14
    for column, depth in enumerate(depths):
        if column in (0, len(depths) - 1):
            parts.append(_text(left + (column + 0.5) * _CELL_WIDTH, bottom, f"{depth:.0%}", "middle small"))
    parts.append(_text(left + len(depths) * _CELL_WIDTH / 2, bottom, "depth", "middle small"))
    found = sum(cell.found for cell in cells)
    return _svg(width, height, parts, f"{title}: {found} of {len(cells)} needles found", fixed=True)


def _heat_cell(x: float, y: float, found: int, hidden: int) -> Markup:
    if not hidden:
        return Markup("")
    share = found / hidden
    box = Markup('<rect class="cell" x="{}" y="{}" width="{}" height="{}" rx="3" style="--share:{:.2f}"/>').format(
        x + 1, y + 1, _CELL_WIDTH - 2, _CELL_HEIGHT - 2, share
    )
    tone = "middle small on" if share > 0.6 else "middle small off"
    return box + _text(x + _CELL_WIDTH / 2, y + 18, f"{found}/{hidden}", tone)


def bits_against_kl(result: StudyResult) -> Markup:
    """A point for each candidate with its interval, the margin, and the noise floor; KL on a logarithmic axis."""
    arms = [arm for arm in result.candidates if arm.fidelity is not None]
    if not arms:
        return Markup("")
    width, height, left, right, top, bottom = 640, 340, 64, 24, 16, 44
    most_bits = max(arm.bits_per_number for arm in arms) + 2
    lows, highs = zip(*(_kl_range(arm) for arm in arms), strict=True)
    y_low = 10 ** math.floor(math.log10(min(min(lows), result.margins.kl_nats / 10)))
    y_high = 10 ** math.ceil(math.log10(max(*highs, result.margins.kl_nats * 2)))

    def x_of(bits: float) -> float:
        return left + bits / most_bits * (width - left - right)

    def y_of(kl: float) -> float:
        share = math.log(max(kl, y_low) / y_low) / math.log(y_high / y_low)
        return height - bottom - share * (height - top - bottom)

    parts = [*_kl_axis(y_low, y_high, y_of, left, width - right), *_bits_axis(most_bits, x_of, height - bottom)]
    margin = y_of(result.margins.kl_nats)
    parts += [_line(left, margin, width - right, margin, "margin")]
    parts += [_text(width - right, margin - 5, f"margin {result.margins.kl_nats:g}", "end small")]
    for arm, label_y in zip(
        arms, _spread([y_of(_kl(arm)) for arm in arms], [x_of(a.bits_per_number) for a in arms]), strict=True
    ):
        x, (low, high) = x_of(arm.bits_per_number), _kl_range(arm)
        status = arm.verdict.status if arm.verdict else "inconclusive"
        parts.append(_line(x, y_of(low), x, y_of(high), f"interval {status}"))
        parts.append(
            Markup('<circle class="point {}" cx="{:.1f}" cy="{:.1f}" r="5"/>').format(status, x, y_of(_kl(arm)))
        )
        parts.append(_text(x + 9, label_y + 4, arm.name, "label"))
    parts.append(
        _text(left + (width - left - right) / 2, height - 8, "bits per number, metadata included", "middle small")
    )
    parts.append(_text(left, 11, "mean KL to the baseline, nats per token", "small"))
    return _svg(width, height, parts, "Mean KL to the baseline against bits per number, for each format")


def _kl(arm: ArmResult) -> float:
    assert arm.fidelity is not None
    return max(arm.fidelity.kl_nats.mean, _KL_FLOOR)


def _kl_range(arm: ArmResult) -> tuple[float, float]:
    assert arm.fidelity is not None
    found = arm.fidelity.kl_nats
    low, high = (found.mean if bound is None else bound for bound in (found.low, found.high))
    return max(low, _KL_FLOOR), max(high, _KL_FLOOR)


def _kl_axis(low: float, high: float, y_of: object, left: float, right: float) -> Iterable[Markup]:
    assert callable(y_of)
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = y_of(10.0**exponent)
        yield _line(left, y, right, y, "grid")
        yield _text(left - 8, y + 4, f"{10.0**exponent:g}", "end small")


def _bits_axis(most: float, x_of: object, y: float) -> Iterable[Markup]:
    assert callable(x_of)
    for bits in range(0, math.floor(most) + 1, 2 if most < 24 else 4):
        yield _text(x_of(bits), y + 17, str(bits), "middle small")


def _spread(ys: Sequence[float], xs: Sequence[float]) -> list[float]:
    """Heights for labels, pushed apart where neighbours would overlap."""
    placed: dict[int, float] = {}
    for i in sorted(range(len(ys)), key=lambda i: ys[i]):
        y = ys[i]
        for other, taken in sorted(placed.items(), key=lambda item: item[1]):
            if abs(xs[other] - xs[i]) < 70 and abs(taken - y) < _LABEL_GAP:
                y = taken + _LABEL_GAP
        placed[i] = y
    return [placed[i] for i in range(len(ys))]


def speed_bars(result: StudyResult, *, decode: bool) -> Markup:
    """Tokens per second of each arm at each context, with the spread of the runs and the ratio to the baseline."""
    arms = [arm for arm in result.arms if arm.speed]
    if not arms:
        return Markup("")
    left, bar, gap, width = 96, 20, 26, 460
    contexts = [speed.context_tokens for speed in result.baseline.speed]
    rates = [_rates(speed, decode=decode) for arm in arms for speed in arm.speed]
    scale = (width - left - 120) / max(fast for _, _, fast in rates)
    parts, y = [], 6.0
    for at, context in enumerate(contexts):
        parts.append(
            _text(left, y + 12, f"{'decode' if decode else 'prefill'}, {context:,} tokens in the cache", "strong")
        )
        y += gap
        base = _rates(result.baseline.speed[at], decode=decode)[0]
        for arm in arms:
            if at < len(arm.speed):
                parts += _bar(arm, _rates(arm.speed[at], decode=decode), base, scale, left, y)
                y += bar + 4
        y += 8
    name = "Decode" if decode else "Prefill"
    return _svg(width, y, parts, f"{name} tokens per second for each format and context")


def _rates(speed: object, *, decode: bool) -> tuple[float, float, float]:
    rates: tuple[float, float, float] = getattr(speed, f"{'decode' if decode else 'prefill'}_tokens_per_second")
    return rates


def _bar(
    arm: ArmResult, rates: tuple[float, float, float], base: float, scale: float, left: float, y: float
) -> list[Markup]:
    median, slow, fast = rates
    tone = "base" if arm.role == "baseline" else "slower" if median < 0.95 * base else "as-fast"
    number = f"{median:.1f}" if median < 100 else f"{median:.0f}"
    return [
        _text(left - 8, y + 14, arm.name, "end small"),
        Markup('<rect class="bar {}" x="{}" y="{:.1f}" width="{:.1f}" height="20" rx="3"/>').format(
            tone, left, y, median * scale
        ),
        _line(left + slow * scale, y + 10, left + fast * scale, y + 10, "spread"),
        _text(left + fast * scale + 8, y + 14, f"{number}/s  {median / base:.2f}x", "small"),
    ]


def _line(x1: float, y1: float, x2: float, y2: float, tone: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(tone, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, tone: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(tone, x, y, escape(text))


def _svg(width: float, height: float, parts: Iterable[Markup], label: str, *, fixed: bool = False) -> Markup:
    """`fixed`: drawn at its own size; else it fills the room there is, up to its own size."""
    size = (
        Markup('width="{:.0f}" height="{:.0f}"').format(width, height)
        if fixed
        else Markup('style="max-width:{:.0f}px"').format(width)
    )
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{}" viewBox="0 0 {:.0f} {:.0f}" {}>{}</svg>'
    ).format(label, width, height, size, Markup("").join(parts))
