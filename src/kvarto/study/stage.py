"""How the parts of a study are run: as small steps, so that there is progress to show and little to lose when one is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarto.study.arms import Arm


@dataclass(frozen=True)
class Step:
    """A piece of work of seconds. `arm` is whose it is; `cost_tokens` is about how many tokens' prefill it takes, for the time left."""

    stage: str
    label: str
    cost_tokens: int
    run: Callable[[], None]
    arm: Arm | None = None
