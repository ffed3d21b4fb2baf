"""How much of a step prompts may take while others generate: those wait for the whole step between two of their tokens. No torch.

What a step takes is seen and not predicted. `alone` are steps in which no prompt is read; what steps with prompts took beyond that, by tokens of
prompts, is the price of one. Of the last few of each the least counts, because whatever disturbs a step (a kernel that is compiled, another process)
only makes it longer. The price depends on how large the share was, and so settles where steps take what they should: a share that made a step too
long gives a price that makes the next share smaller.

Small shares are dear: all who generate are computed with each of them. So where prompts wait long, they get more: a fortieth of what they have
waited. Whoever waits for a token then waits no longer than a step should take, or than a fortieth of what others wait for their first one; and who
sends more than the machine can do finds everybody slower, and not prompts that are never read.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_LAST = 4
# Fewer cost about as much, since a step reads all weights for a single one too.
_LEAST_TOKENS = 16
# Where generation alone takes as long as a step should, prompts still get so much of the step's time; else they would never end.
_LEAST_SHARE = 0.25
_PATIENCE = 1 / 40
# So many steps with prompts, and one is without, since who generates and how long their contexts are changes meanwhile.
_MOST_MIXED_STEPS = 16


class Pace:
    """`step_seconds`: what a step in which somebody generates should take; 0 or None: as long as it takes. `clock`: by which requests wait."""

    def __init__(self, step_seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._target = clock, step_seconds or math.inf
        self._alone = deque[float](maxlen=_LAST)
        self._price = deque[float](maxlen=_LAST)
        self._mixed_steps = 0

    def took(self, prompt_tokens: int, generating: int, seconds: float) -> None:
        """A step is over: so many tokens of prompts (or computed again), and so many requests that wait for their next one."""
        if not prompt_tokens:
            self._alone.append(seconds)
            self._mixed_steps = 0
            return
        self._mixed_steps += generating > 0
        # Never nothing: what generation took before may be more than all of this step.
        beyond = max(seconds - self._alone_seconds * (generating > 0), seconds / 8)
        self._price.append(beyond / prompt_tokens)

    def prompt_tokens(self, waited_seconds: float) -> int | None:
        """Of the next step, in which somebody generates, for somebody who waited that long for the first token; None: as many as there is room for,
        which is so until something is known.
        """
        if self._target == math.inf or not self._price:
            return None
        if self._mixed_steps >= _MOST_MIXED_STEPS:
            return 0
        seconds = max(self._target - self._alone_seconds, _LEAST_SHARE * self._target, _PATIENCE * waited_seconds)
        return max(_LEAST_TOKENS, int(seconds / min(self._price)))

    @property
    def _alone_seconds(self) -> float:
        return min(self._alone, default=0.0)
