"""What a metrics page says: Prometheus' text format (version 0.0.4), and as much of OpenMetrics as engines write.

    name{label="value",...} number [timestamp] [# exemplar]

Written here and not taken from prometheus-client: the base install has no such package, and what is no metrics page must become one clear line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvarto.errors import UsageError

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_TYPE = re.compile(r"#\s*TYPE\s+([a-zA-Z_:][a-zA-Z0-9_:]*)\s")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|(?=\}))')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_ESCAPE = re.compile(r'\\[\\n"]')
_WORDS_SHOWN = 60


@dataclass(frozen=True)
class Sample:
    """One line: a number under labels."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Page:
    """One scrape. `samples`: by the name as it stands there. `at_seconds`: Unix time, None if nobody knows. `origin`: for messages.

    `declared`: names of which it gives the type; with labels of which none was seen yet, that is all that stands there.
    """

    samples: Mapping[str, tuple[Sample, ...]]
    origin: str = "metrics"
    at_seconds: float | None = None
    declared: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[str]:
        return iter(self.samples)


def parse(text: str, origin: str = "metrics", at_seconds: float | None = None) -> Page:
    """Read a page. Raises UsageError if it is empty, something else (HTML, JSON), or has a line that is no sample."""
    _refuse_other(text, origin)
    found: dict[str, list[Sample]] = {}
    declared = set()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if declaration := _TYPE.match(line):
            declared.add(declaration.group(1))
        elif line and not line.startswith("#"):
            name, sample = _sample(line, f"{origin}, line {number}")
            found.setdefault(name, []).append(sample)
    if not found:
        raise UsageError(
            origin, "a metrics page of an engine", "one without a number in it", "is the engine still loading?"
        )
    return Page({name: tuple(samples) for name, samples in found.items()}, origin, at_seconds, frozenset(declared))


def _refuse_other(text: str, origin: str) -> None:
    start = text.lstrip("\ufeff \t\r\n")[:200]
    what = "a metrics page, lines such as `vllm:num_requests_running 3`"
    if not start:
        raise UsageError(origin, what, "an empty page", "is this the address of the engine's /metrics?")
    if start[0] == "<":
        raise UsageError(
            origin, what, f"HTML or XML ({_shown(start)})", "give the address of the engine itself, or of its /metrics"
        )
    if start[0] in "{[":
        raise UsageError(origin, what, f"JSON ({_shown(start)})", "TensorRT-LLM's page is at /prometheus/metrics")


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WORDS_SHOWN else line[:_WORDS_SHOWN] + "..."


def _sample(line: str, where: str) -> tuple[str, Sample]:
    name = _NAME.match(line)
    if name is None:
        raise UsageError(where, "a sample, NAME{LABELS} NUMBER", repr(_shown(line)))
    labels, rest = _labels(line, name.end(), where)
    words = rest.split("#")[0].split()
    try:
        value = float(words[0])
    except (IndexError, ValueError) as error:
        raise UsageError(where, "a sample, NAME{LABELS} NUMBER", repr(_shown(line))) from error
    return name.group(), Sample(labels, value)


def _labels(line: str, position: int, where: str) -> tuple[dict[str, str], str]:
    """The labels that begin at `position`, and what follows them."""
    if not line[position:].lstrip().startswith("{"):
        return {}, line[position:]
    position = line.index("{", position) + 1
    labels: dict[str, str] = {}
    while found := _LABEL.match(line, position):
        labels[found.group(1)] = _ESCAPE.sub(lambda each: _ESCAPES[each.group()], found.group(2))
        position = found.end()
    if not line[position:].lstrip().startswith("}"):
        raise UsageError(where, 'labels, {name="value"}', repr(_shown(line)))
    return labels, line[line.index("}", position) + 1 :]


def is_sane(value: float) -> bool:
    """A number that an engine can have counted or measured: not NaN, infinite or negative."""
    return math.isfinite(value) and value >= 0


@dataclass(frozen=True)
class Histogram:
    """Counts of what was observed, by upper bound; the last bound is infinite and its count is of all. Not every engine gives `sum`."""

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """How many were observed."""
        return self.cumulative[-1] if self.cumulative else 0.0

    @property
    def mean(self) -> float | None:
        """None if nothing was observed."""
        return self.sum / self.count if self.count > 0 else None

    def quantile(self, share: float) -> tuple[float, float] | None:
        """The bucket (low, high] in which the quantile lies: all that a histogram knows; a value between would be a guess."""
        if self.count <= 0:
            return None
        rank, below = share * self.count, 0.0
        for bound, cumulative in zip(self.bounds, self.cumulative, strict=True):
            if cumulative >= rank:
                return below, bound
            below = bound
        return below, math.inf

    def minus(self, earlier: Histogram) -> Histogram:
        """What was observed since. The bounds must be the same."""
        counts = tuple(now - then for now, then in zip(self.cumulative, earlier.cumulative, strict=True))
        return Histogram(self.bounds, counts, self.sum - earlier.sum)


def histogram(page: Page, name: str) -> Histogram | None:
    """The histogram of that name (without `_bucket`), all label sets added up; None if the page has none.

    Label sets with other bounds (two engines behind one page) are brought to the bounds that all have.
    """
    series: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    for sample in page.samples.get(f"{name}_bucket", ()):
        bound = _bound(sample.labels.get("le", ""))
        if bound is not None and is_sane(sample.value):
            rest = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
            series.setdefault(rest, {})[bound] = sample.value
    total = sum(sample.value for sample in page.samples.get(f"{name}_sum", ()) if is_sane(sample.value))
    if not series:
        count = page.samples.get(f"{name}_count")  # a summary, or buckets that a proxy took away: a mean at least
        return (
            None
            if count is None
            else Histogram((math.inf,), (sum(each.value for each in count if is_sane(each.value)),), total)
        )
    bounds = sorted(set.intersection(*(set(each) for each in series.values())))
    if not bounds or bounds[-1] != math.inf:
        return None
    return Histogram(tuple(bounds), tuple(sum(each[bound] for each in series.values()) for bound in bounds), total)


def _bound(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
