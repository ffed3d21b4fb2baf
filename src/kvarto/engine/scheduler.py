"""Who goes on in the next step: continuous batching under a budget of tokens a step and of memory. No torch.

Requests that generate come first, so that a long prompt does not make them wait; then prompts, a chunk of as many tokens as are left. When memory
runs out, the request of the lowest rank is *preempted*: it lets go of its blocks and waits, its full pages stay findable as long as there is room,
and the rest is computed again. A waiting request is let in as soon as its first chunk has room; nobody overtakes the first one that waits.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from kvarto.engine.holding import Holding
from kvarto.engine.request import Request


@dataclass(frozen=True)
class Work:
    """The next `count` tokens of a request, whose blocks are reserved."""

    request: Request
    count: int

    @property
    def samples(self) -> bool:
        """The step computes the last token that is known, so the next one can be chosen."""
        return self.count == self.request.missing


class Scheduler:
    """`step_tokens` at most are computed in a step, of `most_running` requests.

    begin      opens the books of a request that is let in
    released   counts what was let go of, ever: who found no room does not look again before it has grown
    give_way   asked when there is no room, before anybody is preempted or refused: lets go of what no request holds, and says whether it had any
    """

    def __init__(
        self, begin: Callable[[Request], Holding], released: Callable[[], int], *, step_tokens: int, most_running: int,
        give_way: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._begin, self._released, self._step_tokens, self._most_running = begin, released, step_tokens, most_running
        self._give_way = give_way
        self._refused: tuple[Request, int] | None = None
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self._arrived = 0

    def add(self, request: Request) -> None:
        """A new request."""
        self._arrived += 1
        request.order = self._arrived
        self._wait(request)

    def remove(self, request: Request) -> None:
        """A request is over, or nobody wants it any more; it lets go of all that it holds. Does nothing if it is not here."""
        if request in self.running:
            self.running.remove(request)
            request.holding.release()
            request.holding = None
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> list[Work]:
        """The next step: empty only if nobody is here, or the only one that could go on has no room for its next token, ever."""
        works: dict[Request, Work] = {}
        preempted = False
        for request in sorted(self.running, key=lambda request: (request.missing > 1, request.rank)):
            left = self._left(works)
            if left == 0:
                break
            if request.holding is None:  # preempted for the sake of one before it
                continue
            _find(request)
            count = min(request.missing, left)
            while not self._reserve(request, count):
                victim = max(self.running, key=lambda other: other.rank)
                self.preempt(victim)
                works.pop(victim, None)
                preempted = True
                if victim is request:
                    break
            else:
                works[request] = Work(request, count)
        if not preempted:
            self._let_in(works)
        return list(works.values())

    def _let_in(self, works: dict[Request, Work]) -> None:
        while self.waiting and len(self.running) < self._most_running and (left := self._left(works)):
            request = self.waiting[0]
            if self._refused == (request, self._released()):
                return
            request.holding = self._begin(request)
            found = _find(request)
            count = min(request.missing, left)
            if not self._reserve(request, count):
                request.holding.release()
                request.holding = None
                request.cached_tokens -= found
                self._refused = (request, self._released())
                return
            self.running.append(self.waiting.pop(0))
            works[request] = Work(request, count)

    def _reserve(self, request: Request, count: int) -> bool:
        """Blocks for the next tokens of a request that is let in."""
        reserve = request.holding.reserve
        return bool(reserve(count) or (self._give_way() and reserve(count)))

    @property
    def starved(self) -> bool:
        """The first one that waits found no room."""
        return bool(self.waiting) and self._refused is not None and self._refused[0] is self.waiting[0]

    def _left(self, works: dict[Request, Work]) -> int:
        return self._step_tokens - sum(work.count for work in works.values())

    def preempt(self, request: Request) -> None:
        """A running request lets go of what it holds, and waits. What of it is not found again will be computed again."""
        self.running.remove(request)
        request.holding.release()
        request.holding = None
        request.preemptions += 1
        self.preemptions += 1
        self._wait(request)

    def _wait(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda other: other.rank)


def _find(request: Request) -> int:
    """Take what the prefix cache has. What a preempted request computed itself does not count as cached."""
    found: int = request.holding.find(request.tokens)
    if request.preemptions:
        return 0
    request.cached_tokens += found
    return found
