"""What happened between the first and the last scrape, in the words of `signals`: whatever engine and version it was.

Counters are differences, histograms too. A counter that went back means that the engine was started again: what was before is left out, and said. One
page alone is a window as well, from the engine's start until now, and its gauges are of one moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvarto.diagnose.engines import registry
from kvarto.diagnose.exposition import Histogram, Page, Sample, histogram, is_sane
from kvarto.diagnose.signals import At, Counter, Engine, Gauge, Label, Timing
from kvarto.errors import UsageError

_STARTED = "process_start_time_seconds"
_NOTHING = Histogram((math.inf,), (0.0,), 0.0)
_NOT_ADDED = (Gauge.USAGE, Gauge.HIT_RATE, Gauge.BLOCK_TOKENS, Gauge.BUSY_SLOTS)
"""Of several engines behind one page the largest counts; of other gauges the sum."""


@dataclass(frozen=True)
class Series:
    """A gauge at every scrape."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the scrapes."""
        return sum(self.values) / len(self.values)

    @property
    def peak(self) -> float:
        """The largest."""
        return max(self.values)

    def share_above(self, bound: float) -> float:
        """Of the scrapes."""
        return sum(value > bound for value in self.values) / len(self.values)


@dataclass(frozen=True)
class Window:
    """Pages of one engine in the order in which they were taken. `notes` say what the numbers do not."""

    engine: Engine
    pages: tuple[Page, ...]
    notes: tuple[str, ...] = ()
    _names: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for page in self.pages:
            for name in (*page, *page.declared):
                if (bare := self.engine.strip(name)) is not None:
                    self._names.setdefault(bare, name)

    @property
    def seconds(self) -> float | None:
        """How long it is; None if that is not known, or if it is the engine's whole life."""
        first, last = self.pages[0].at_seconds, self.pages[-1].at_seconds
        return None if len(self.pages) < 2 or first is None or last is None or last <= first else last - first

    @property
    def lifetime(self) -> bool:
        """One page: counters are from the engine's start."""
        return len(self.pages) == 1

    def gauge(self, signal: Gauge) -> Series | None:
        """At every scrape; None if the engine does not tell."""
        for place in self.engine.gauges.get(signal, ()):
            values = [_gathered(self._samples(page, place), place, signal) for page in self.pages]
            known = tuple(value for value in values if value is not None)
            if known:
                return Series(known)
        return self._pool() if signal is Gauge.POOL_TOKENS else None

    def counter(self, signal: Counter) -> float | None:
        """By how much it grew; None if the engine does not tell."""
        for place in self.engine.counters.get(signal, ()):
            if place.name in self._names:
                last, first = _total(self._samples(self.pages[-1], place)), 0.0
                if not self.lifetime:
                    first = _total(self._samples(self.pages[0], place))
                return last - first
        return None

    def timing(self, signal: Timing) -> Histogram | None:
        """What was observed in it; None if the engine does not tell."""
        for place in self.engine.timings.get(signal, ()):
            name = self._names.get(f"{place.name}_count") or self._names.get(f"{place.name}_bucket")
            if name is None:
                if place.name in self._names:  # its type stands there, and no label was seen yet
                    return _NOTHING
                continue
            name = name.removesuffix("_count").removesuffix("_bucket")
            last = histogram(self.pages[-1], name)
            first = None if self.lifetime else histogram(self.pages[0], name)
            if last is None or first is None or first.bounds != last.bounds:
                return last
            return last.minus(first)
        return None

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that the prefix cache had; None if it is not known, or nothing was asked."""
        asked, had = self.counter(Counter.QUERIES), self.counter(Counter.HITS)
        if asked is None or had is None:
            had, asked = self.counter(Counter.CACHED_TOKENS), self.counter(Counter.PROMPT_TOKENS)
        if asked is None and had is not None and (computed := self.counter(Counter.COMPUTED_TOKENS)) is not None:
            asked = had + computed
        if asked is not None and had is not None:
            return had / asked if asked > 0 else None
        told = self.gauge(Gauge.HIT_RATE)
        return None if told is None else told.values[-1]

    @property
    def computed_tokens(self) -> float | None:
        """Prompt tokens that went through the model."""
        computed = self.counter(Counter.COMPUTED_TOKENS)
        if computed is None and (asked := self.counter(Counter.PROMPT_TOKENS)) is not None:
            computed = asked - (self.counter(Counter.CACHED_TOKENS) or 0.0)
        return computed

    def missing(self, *signals: Gauge | Counter | Timing) -> list[str]:
        """Those that the engine does not tell, in words."""
        asked = {Gauge: self.gauge, Counter: self.counter, Timing: self.timing}
        words = [
            self.engine.absent.get(signal, f"{signal.value}: not on this page")
            for signal in signals
            if asked[type(signal)](signal) is None  # type: ignore[operator]
        ]
        return list(dict.fromkeys(words))

    def label(self, name: str, label: str) -> str | None:
        """The value of a label of an info metric, of the last page; None also if there are several, of which nobody knows the one that is meant."""
        samples = self.pages[-1].samples.get(self._names.get(name, ""), ())
        values = {sample.labels[label] for sample in samples if label in sample.labels}
        return values.pop() if len(values) == 1 else None

    def _samples(self, page: Page, place: At) -> list[Sample]:
        found = page.samples.get(self._names.get(place.name, ""), ())
        return [
            sample
            for sample in found
            if all(sample.labels.get(label, "") in values for label, values in place.where.items())
        ]

    def _pool(self) -> Series | None:
        """The pool's tokens by its blocks. Attention: of a model with several kinds of layers that is not exact."""
        blocks, tokens = self.gauge(Gauge.POOL_BLOCKS), self.gauge(Gauge.BLOCK_TOKENS)
        if blocks is None or tokens is None:
            return None
        return Series((blocks.values[-1] * tokens.values[-1],))


def make_window(pages: Sequence[Page], model: str | None = None, notes: Sequence[str] = ()) -> Window:
    """The window from the last start of the engine on. Raises UsageError for pages of no engine that we know, of two, or of two models."""
    engine = _engine_of(pages)
    pages = _in_order([_only_model(page, engine, model) for page in pages])
    begin = _after_restart(pages, engine)
    notes = list(notes)
    if begin:
        lost = f"{begin} of {len(pages)} scrapes are left out"
        notes.append(
            f"counters went back before scrape {begin + 1}: the engine was started again, or files are not in order; {lost}"
        )
    if len(pages) - begin == 1:
        notes.append("one scrape: counters are sums since the engine's start, gauges are of one moment")
    return Window(engine, tuple(pages[begin:]), tuple(notes))


def slim(page: Page) -> Page:
    """Only what windows look at: a day of scrapes fits into memory. A page of no engine that we know stays as it is, to be refused later."""
    try:
        engine = _engine(page)
    except UsageError:
        return page
    wanted = {
        _bare(engine, engine.prefixes[0] + place.name)
        for table in (engine.gauges, engine.counters, engine.timings)
        for each in table.values()
        for place in each
    }
    wanted |= {place.name for each in engine.settings.values() for place in each if isinstance(place, Label)} | set(
        engine.marks
    )
    kept = {
        name: samples for name, samples in page.samples.items() if _bare(engine, name) in wanted or name == _STARTED
    }
    return replace(
        page, samples=kept, declared=frozenset(name for name in page.declared if _bare(engine, name) in wanted)
    )


def _bare(engine: Engine, name: str) -> str:
    bare = engine.strip(name) or ""
    for suffix in ("_bucket", "_sum", "_count"):
        if bare.endswith(suffix):
            return bare.removesuffix(suffix)
    return bare


def _in_order(pages: list[Page]) -> list[Page]:
    """By time, if all tell it; else as given, and none has a time."""
    if any(page.at_seconds is None for page in pages):
        return [replace(page, at_seconds=None) for page in pages]
    return sorted(pages, key=lambda page: page.at_seconds or 0.0)


def _engine_of(pages: Sequence[Page]) -> Engine:
    found = [_engine(page) for page in pages]
    if other := next((engine for engine in found if engine.name != found[0].name), None):
        raise UsageError(
            "pages",
            "all of one engine",
            f"{found[0].title} ({pages[0].origin}) and {other.title}",
            "give them one by one",
        )
    return found[0]


def _engine(page: Page) -> Engine:
    """Which engine's page it is. Raises UsageError."""
    for engine in registry.values():
        names = {bare for name in page if (bare := engine.strip(name)) is not None}
        if names.intersection(engine.marks) or names.intersection(f"{mark}_count" for mark in engine.marks):
            return engine
    known = ", ".join(engine.title for engine in registry.values())
    some = ", ".join(sorted(page.samples)[:3])
    raise UsageError(
        page.origin, f"metrics of {known}", f"others ({some} ...)", "is it a gateway's page, or an exporter's?"
    )


def _only_model(page: Page, engine: Engine, model: str | None) -> Page:
    """The samples of one model. Raises UsageError if it is not told which of several, or if there is no such one."""
    label = engine.model_label
    names = {
        sample.labels[label]
        for name, samples in page.samples.items()
        if engine.strip(name) is not None
        for sample in samples
        if sample.labels.get(label)
    }
    if model is None:
        if len(names) > 1:
            raise UsageError(
                page.origin,
                "one model's metrics",
                f"{len(names)}: {', '.join(sorted(names)[:4])}",
                "name one with --model",
            )
        return page
    if model not in names:
        raise UsageError("--model", f"one of {', '.join(sorted(names)) or '(none is named)'}", repr(model))
    kept = {
        name: tuple(sample for sample in samples if sample.labels.get(label, model) == model)
        for name, samples in page.samples.items()
    }
    return replace(page, samples=kept)


def _after_restart(pages: Sequence[Page], engine: Engine) -> int:
    """The number of the first page after the last start."""
    begin = 0
    for number in range(1, len(pages)):
        if _went_back(Window(engine, (pages[number - 1],)), Window(engine, (pages[number],))):
            begin = number
    return begin


def _went_back(before: Window, after: Window) -> bool:
    started = [_total(list(window.pages[0].samples.get(_STARTED, ()))) for window in (before, after)]
    if all(started) and started[0] != started[1]:
        return True
    for signal in before.engine.counters:
        then, now = before.counter(signal), after.counter(signal)
        if then is not None and then > (now or 0.0):
            return True
    return False


def _total(samples: Sequence[Sample]) -> float:
    return sum(sample.value for sample in samples if is_sane(sample.value))


def _gathered(samples: Sequence[Sample], place: At, signal: Gauge) -> float | None:
    """One number of the samples of one scrape, None if there is none."""
    if place.label:
        values = [number for sample in samples if (number := _number(sample.labels.get(place.label, ""))) is not None]
    else:
        values = [sample.value for sample in samples if is_sane(sample.value)]
    if not values:
        return None
    return max(values) if signal in _NOT_ADDED else sum(values)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if is_sane(value) else None
