"""Who goes on in the next step: continuous batching under a budget of tokens a step and of memory. No torch.

Requests that generate come first, so that a long prompt does not make them wait; then prompts, a chunk of as many tokens as are left, and while
somebody generates of no more than `Pace` says. A chunk may end anywhere: nothing that is computed depends on it but for rounding. When memory
runs out, the request of the lowest rank is *preempted*: it lets go of its blocks and waits, its full pages stay findable as long as there is room,
and the rest is computed again. A waiting request is let in as soon as its first chunk has room; nobody overtakes the first one that waits.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvarto.engine.holding import Holding
from kvarto.engine.pace import Pace
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

    @property
    def generates(self) -> bool:
        """Somebody who has had a token waits for the next one. Before the step is committed."""
        return self.request.missing == 1 and self.request.generated_tokens > 0

    @property
    def decodes(self) -> bool:
        """It computes what was generated. Before the step is committed."""
        return bool(self.request.holding.length >= self.request.prompt_tokens)

    @property
    def scored(self) -> range:
        """Places of the prompt whose logits say how likely the token behind them was, which nobody has seen yet. Before the step is committed."""
        request, first = self.request, self.request.holding.length
        if not request.scores:
            return range(0)
        return range(max(first, len(request.scored)), min(first + self.count, request.prompt_tokens - 1))


class Scheduler:
    """`step_tokens` at most are computed in a step, of `most_running` requests, and of prompts that are scored `most_scored`: those have logits.

    begin      opens the books of a request that is let in
    released   counts what was let go of, ever: who found no room does not look again before it has grown
    pace       how many tokens of prompts a step may have in which somebody generates
    give_way   asked when there is no room, before anybody is preempted or refused: lets go of what no request holds, and says whether it had any
    """

    def __init__(
        self, begin: Callable[[Request], Holding], released: Callable[[], int], *,
        step_tokens: int, most_running: int, most_scored: int = 512, pace: Pace | None = None,
        give_way: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._begin, self._released, self._step_tokens, self._most_running = begin, released, step_tokens, most_running
        self._most_scored, self._give_way = most_scored, give_way
        self._pace = pace or Pace(None)
        self._refused: tuple[Request, int] | None = None
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        # By policy: prompt tokens that the prefix cache was asked for, and had.
        self.queried_tokens, self.found_tokens = Counter[int](), Counter[int]()
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
            if self._left(works) == 0:
                break
            if request.holding is None:  # preempted for the sake of one before it
                continue
            left = self._left(works, request)
            if left <= 0:
                continue
            self.found_tokens[request.policy] += _find(request)
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
        while self.waiting and len(self.running) < self._most_running:
            # The first one, but for those that are scored while the step scores as much as it may already.
            request = next((request for request in self.waiting if self._left(works, request) > 0), None)
            if request is None or self._refused == (request, self._released()):
                return
            left = self._left(works, request)
            request.holding = self._begin(request)
            found = _find(request)
            count = min(request.missing, left)
            if not self._reserve(request, count):
                request.holding.release()
                request.holding = None
                request.cached_tokens -= found
                self._refused = (request, self._released())
                return
            self.found_tokens[request.policy] += found
            if not request.preemptions and not request.scores:
                self.queried_tokens[request.policy] += request.prompt_tokens
            self.waiting.remove(request)
            self.running.append(request)
            works[request] = Work(request, count)

    def _reserve(self, request: Request, count: int) -> bool:
        """Blocks for the next tokens of a request that is let in."""
        reserve = request.holding.reserve
        return bool(reserve(count) or (self._give_way() and reserve(count)))

    @property
    def starved(self) -> bool:
        """The first one that waits found no room."""
        return bool(self.waiting) and self._refused is not None and self._refused[0] is self.waiting[0]

    def _left(self, works: dict[Request, Work], request: Request | None = None) -> int:
        """How many tokens the step has room for, of this request."""
        left = self._step_tokens - sum(work.count for work in works.values())
        if request is not None and request.scores:
            left = min(left, self._most_scored - sum(len(work.scored) for work in works.values()))
        if request is not None and request.missing > 1 and any(work.generates for work in works.values()):
            share = self._pace.prompt_tokens(self._pace.clock() - request.waits_since_seconds)
            if share is not None:
                left = min(left, share - sum(work.count for work in works.values() if not work.generates))
        return left

    def preempt(self, request: Request) -> None:
        """A running request lets go of what it holds, and waits. What of it is not found again will be computed again."""
        self.running.remove(request)
        request.holding.release()
        request.holding = None
        request.preemptions += 1
        self.preemptions += 1
        self._wait(request)

    def _wait(self, request: Request) -> None:
        request.waits_since_seconds = self._pace.clock()
        bisect.insort(self.waiting, request, key=lambda other: other.rank)


def _find(request: Request) -> int:
    """Take what the prefix cache has. Returns how much of it counts as cached: not what a preempted request computed itself."""
    found: int = request.holding.find(request.findable)
    if request.preemptions:
        return 0
    request.cached_tokens += found
    return found
