"""What a check is: a question, and a function that answers it from what it can see of the rollout. One small file or function each, in `checks/`.

A check that cannot know says "ask a person", never "pass". Each outcome has its evidence, and what to do if it is not a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarto.doctor.rollout import Rollout


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    WARN = "warn"
    ASK = "ask a person"


@dataclass(frozen=True)
class Outcome:
    """What a check found. `remedy`: what to do, empty for a pass."""

    check: str
    status: Status
    evidence: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """`name` is what reports show, `asks` the question, `run` gives one outcome or one for each part of the question."""

    name: str
    asks: str
    run: Callable[[Rollout], Iterable[Outcome]]


def overall(outcomes: Iterable[Outcome]) -> int:
    """The exit code: 1 if anything failed, else 3 if a person must be asked, else 0; a warning does not stop anybody."""
    statuses = {outcome.status for outcome in outcomes}
    return 1 if Status.FAIL in statuses else 3 if Status.ASK in statuses else 0
