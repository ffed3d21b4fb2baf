"""How the parts of a study are run: as small steps, so that there is progress to show and little to lose when one is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvarto.study.arms import Arm


@dataclass(frozen=True)
class Step:
    """A piece of work of seconds. `arm` is whose it is; `cost_tokens` is about how many tokens' prefill it takes, for the time left."""

    stage: str
    label: str
    cost_tokens: int
    run: Callable[[], None]
    arm: Arm | None = None


class Progress(Protocol):
    """Who is told how far a study is."""

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
