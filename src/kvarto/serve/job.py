"""What a client asked for while the engine works on it: one or more requests, what comes of them, and the accounts of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from kvarto.engine.engine import Ask, Engine
from kvarto.engine.loop import Delta, Ticket
from kvarto.engine.request import Finish, Request
from kvarto.errors import EngineClosed, KvartoError, UsageError
from kvarto.serve.metrics import Metrics, Times
from kvarto.serve.shapes import Json, usage
from kvarto.serve.structured import GrammarGuide

_log = logging.getLogger("kvarto.serve")


class GenerationFailed(KvartoError):
    """The engine could not finish a request, through no fault of the client."""


class Job:
    """Belongs to the running event loop.

    asks      for each prompt the same request once for each choice; choices are numbered through
    name      what the client knows it by
    arrived   when it came, in seconds of time.monotonic
    """

    def __init__(
        self, engine: Engine, metrics: Metrics, asks: Sequence[Sequence[Ask]], *, name: str, arrived: float
    ) -> None:
        self._engine, self._metrics, self._asks, self._name = engine, metrics, asks, name
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Delta, float]]()
        self._times = [Times(arrived) for group in asks for _ in group]
        self._tickets: list[Ticket] = []
        self._ended: set[int] = set()

    def submit(self) -> None:
        """Hand all of it to the engine, or nothing. May take a moment, so not for the event loop's thread. Raises what Engine.submit_many does."""
        try:
            for group in self._asks:
                first = len(self._tickets)
                delivers = [partial(self._deliver, first + i) for i in range(len(group))]
                self._tickets += self._engine.submit_many(group, delivers)
        except KvartoError:
            for ticket in self._tickets:
                self._engine.abort(ticket)
            raise

    async def news(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, Delta) as they come, until every choice is over. Raises EngineClosed, GenerationFailed or UsageError."""
        while len(self._ended) < len(self._tickets):
            index, delta, now = await self._news.get()
            for _ in delta.choices:
                self._metrics.token(self._times[index], now, self._tickets[index].kv)
            if delta.finish is not None:
                self._end(index, now, delta.finish)
                self._check(index, delta)
            yield index, delta

    def close(self) -> None:
        """Whatever still runs is not wanted any more: what it holds is free before the next step."""
        for index, ticket in enumerate(self._tickets):
            if index not in self._ended:
                self._engine.abort(ticket)
                self._end(index, time.monotonic(), Finish.ABORT)

    @property
    def kv_format(self) -> str:
        """The effective format."""
        return self._tickets[0].kv

    @property
    def usage(self) -> Json:
        """Of all choices together."""
        requests = [ticket.request for ticket in self._tickets]
        each, firsts = len(self._asks[0]), requests[:: len(self._asks[0])]
        assert len(firsts) * each == len(requests)
        return usage(
            sum(request.prompt_tokens for request in firsts),
            sum(request.cached_tokens for request in firsts),
            sum(len(request.generated) for request in requests),
        )

    def _deliver(self, index: int, delta: Delta) -> None:
        self._loop.call_soon_threadsafe(self._news.put_nowait, (index, delta, time.monotonic()))

    def _check(self, index: int, delta: Delta) -> None:
        guide = self._tickets[index].request.guide
        if delta.finish == Finish.ERROR:
            raise GenerationFailed(delta.error)
        if delta.finish == Finish.ABORT:
            raise EngineClosed("the server is closing and could not finish the request")
        if isinstance(guide, GrammarGuide) and guide.failure:
            reason = f"one that became too complex: {guide.failure}"
            raise UsageError(guide.field, "a JSON schema that can be enforced", reason, "make it simpler")

    def _end(self, index: int, now: float, finish: Finish) -> None:
        self._ended.add(index)
        ticket, times = self._tickets[index], self._times[index]
        request = ticket.request
        times.began = request.began_seconds
        self._metrics.ended(times, now, ticket.kv, str(finish))
        self._metrics.tokens(
            ticket.kv,
            prompt=request.prompt_tokens,
            cached=request.cached_tokens,
            generated=len(request.generated),
        )
        _log.info("%s[%d]: %s", self._name, index, _account(request, times, now, ticket.kv, finish))


def _account(request: Request, times: Times, now: float, kv: str, finish: Finish) -> str:
    """A line for the log."""
    first = "" if times.first is None else f", first token after {times.first - times.arrived:.3f} s"
    return (
        f"{finish}, kv {kv}, {request.prompt_tokens} prompt tokens ({request.cached_tokens} cached), "
        f"{len(request.generated)} generated{first}, {now - times.arrived:.3f} s in all"
    )
