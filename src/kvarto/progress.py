"""How far long work is: who is told, and what is shown of it, on a terminal a bar with the time left, elsewhere a line now and then."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

_LINE_EVERY_SECONDS = 20.0


class Progress(Protocol):
    """Who is told how far it is. `cost_tokens`: about how many tokens' prefill something takes, for the time left."""

    def plan(self, total_cost_tokens: int) -> None:
        """All work is known now."""

    def begin(self, stage: str, label: str) -> None:
        """A step begins."""

    def done(self, cost_tokens: int) -> None:
        """It ended."""

    def say(self, message: str) -> None:
        """Something happened that is no step."""


class Silent:
    """A Progress that tells nobody."""

    def plan(self, total_cost_tokens: int) -> None:
        """Nothing."""

    def begin(self, stage: str, label: str) -> None:
        """Nothing."""

    def done(self, cost_tokens: int) -> None:
        """Nothing."""

    def say(self, message: str) -> None:
        """Nothing."""


class Bar:
    """A Progress that draws a bar. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.fields[stage]:<9}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, stage="prepare")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def plan(self, total_cost_tokens: int) -> None:
        """Know the whole."""
        # Starting anew keeps the time of loading out of the estimate.
        self._bar.reset(self._task, total=total_cost_tokens, stage="prepare")

    def begin(self, stage: str, label: str) -> None:
        """Show what runs."""
        self._bar.update(self._task, stage=stage, description=label)

    def done(self, cost_tokens: int) -> None:
        """Move on."""
        self._bar.advance(self._task, cost_tokens)

    def say(self, message: str) -> None:
        """Above the bar."""
        self._bar.update(self._task, description=message)


class Lines:
    """A Progress for logs: a line for each stage, and one every twenty seconds."""

    def __init__(self, console: Console) -> None:
        self._console, self._begun, self._said = console, time.monotonic(), 0.0
        self._total, self._done, self._stage = 1, 0, ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def plan(self, total_cost_tokens: int) -> None:
        """Know the whole."""
        self._total, self._begun = max(total_cost_tokens, 1), time.monotonic()

    def begin(self, stage: str, label: str) -> None:
        """A line if the stage is new or the last line is old."""
        now = time.monotonic()
        if stage == self._stage and now - self._said < _LINE_EVERY_SECONDS:
            return
        self._stage, self._said = stage, now
        share = self._done / self._total
        left = f", about {(now - self._begun) * (1 - share) / share:.0f} s left" if share > 0 else ""
        self._console.print(f"{share:4.0%} {stage}: {label}{left}", highlight=False, markup=False)

    def done(self, cost_tokens: int) -> None:
        """Move on."""
        self._done += cost_tokens

    def say(self, message: str) -> None:
        """A line."""
        self._console.print(message, highlight=False, markup=False)


def progress_for(console: Console) -> Bar | Lines:
    """What suits the console."""
    return Bar(console) if console.is_terminal else Lines(console)
