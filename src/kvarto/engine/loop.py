"""The thread that steps: requests come in between two steps, from any other thread, and their listeners are told of every token.

Nobody else touches the model or the books.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvarto.engine.core import EngineCore, Output
from kvarto.engine.request import Finish, Request
from kvarto.engine.sampling import Choice
from kvarto.engine.text import TextStream
from kvarto.errors import EngineClosed, Overloaded, UsageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delta:
    """What came of a request: tokens with their text (or text of earlier ones that was held back), and at the end why it ended.

    The first one has what `Sampling.prompt_logprobs` asked for: `scored`, of all tokens of the prompt but the first.
    """

    text: str = ""
    choices: tuple[Choice, ...] = ()
    finish: Finish | None = None
    error: str = ""
    scored: tuple[Choice, ...] = ()


Listener = Callable[[Delta], None]
"""Is called by the thread that steps, and must not block."""


@dataclass(eq=False)
class Ticket:
    """A request that was handed over, who is told of it, and those with the same prompt that begin once it has computed it.

    When it is over the listener is let go of. A listener knows its ticket, as a rule, and a ring of both would keep all that the request had, its
    grammar above all, until Python looks for rings among old objects, which it does the more rarely the more there are.
    """

    request: Request
    deliver: Listener
    text: TextStream | None
    kv: str
    followers: list[Ticket] = field(default_factory=list)


class Loop:
    """Steps `core` from now on, in a thread of its own, until it is closed. More requests than `most_waiting` are refused."""

    def __init__(self, core: EngineCore, most_waiting: int) -> None:
        self._core, self._most_waiting = core, most_waiting
        self._inbox = deque[Callable[[], None]]()
        self._tickets: dict[Request, Ticket] = {}
        self._handed = 0
        self._change = threading.Condition()
        self._closing, self._closed, self._failure = False, False, ""
        self._thread = threading.Thread(target=self._run, name="kvarto engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that were handed over and are not computed yet, or not at the moment."""
        return len(self._core.scheduler.waiting) + self._handed

    @property
    def why_closed(self) -> str:
        """Why no more requests are taken, or "" while they are."""
        return (self._failure or "the engine is closing and takes no more requests") if self._closing else ""

    # ---- for other threads -----------------------------------------------------------------------------------------

    def hand_over(self, tickets: Sequence[Ticket], *, limited: bool = True) -> None:
        """The first one begins, the others are its followers. Raises EngineClosed, and if `limited` UsageError or Overloaded."""
        with self._change:
            if self._closing:
                raise EngineClosed(self.why_closed)
            if limited and len(tickets) > self._most_waiting:
                raise UsageError("n", f"at most {self._most_waiting} requests at once, as may wait", len(tickets))
            if limited and (waiting := self.waiting) + len(tickets) > self._most_waiting:
                raise Overloaded(f"{waiting} requests wait already, of {self._most_waiting} at most; try again later")
            self._handed += len(tickets)
            self._inbox.append(lambda: self._add(tickets[0]))
            self._change.notify()

    def abort(self, ticket: Ticket) -> None:
        """Nobody wants it any more. What it holds is free before the next step; nothing more is delivered."""
        self._tell(lambda: self._abort(ticket))

    def close(self, *, drain: bool, timeout_seconds: float) -> None:
        """As `Engine.close`."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._tell(self._core.stop_probing)
        if drain:
            self._thread.join(timeout_seconds)
        self._tell(self._abort_all)
        self._thread.join(timeout_seconds)
        with self._change:
            is_over = not self._thread.is_alive()
            is_first, self._closed = is_over and not self._closed, self._closed or is_over
        if is_first:
            self._core.close()

    def _tell(self, message: Callable[[], None]) -> None:
        """Let the thread do something between two steps, if it still runs."""
        with self._change:
            self._inbox.append(message)
            self._change.notify()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._core.enter_thread()
            while self._turn():
                pass
        except Exception as error:  # a fault of ours: whoever waits must hear of it
            _log.exception("the engine stopped")
            with self._change:
                self._closing, self._failure = True, f"the engine stopped: {type(error).__name__}: {error}"
                messages = list(self._inbox)
                self._inbox.clear()
            for message in messages:
                message()
            self._abort_all()
            raise

    def _turn(self) -> bool:
        """Messages, then a step, once there is either; False when all is over. A call of its own, so that nothing of it is kept while it waits."""
        with self._change:
            self._change.wait_for(lambda: self._inbox or self._closing or not self._core.idle)
            messages = list(self._inbox)
            self._inbox.clear()
            if self._closing and not messages and self._core.idle:
                return False
        for message in messages:
            message()
        for output in self._core.step():
            self._deliver(output)
        return True

    def _add(self, ticket: Ticket) -> None:
        with self._change:
            self._handed -= 1
        if ticket.request.finish is None:  # else it was aborted before it began
            self._tickets[ticket.request] = ticket
            self._core.admit(ticket.request)

    def _abort(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.request, None)
        ticket.deliver = _nobody
        self._core.abort(ticket.request)
        self._let_follow(ticket)

    def _abort_all(self) -> None:
        while self._tickets:
            ticket = next(iter(self._tickets.values()))
            deliver = ticket.deliver
            self._abort(ticket)
            if self._failure:
                ticket.request.finish = Finish.ERROR
            _say(ticket, deliver, Delta(finish=ticket.request.finish, error=self._failure))

    def _deliver(self, output: Output) -> None:
        ticket = self._tickets[output.request]
        text, finish = "", output.finish
        if ticket.text is not None and output.choice is not None:
            # A token that ends the text is not part of it.
            text = ticket.text.feed(output.choice.token) if finish != Finish.STOP else ""
            if ticket.text.stopped and finish is None:
                finish = ticket.request.finish = Finish.STOP
                self._core.abort(ticket.request)
            if finish is not None:
                text += ticket.text.finish()
                if ticket.text.stopped:
                    finish = Finish.STOP
        choices, deliver = () if output.choice is None else (output.choice,), ticket.deliver
        if finish is not None:
            output.request.finish = finish
            del self._tickets[output.request]
            ticket.deliver = _nobody
        _say(ticket, deliver, Delta(text, choices, finish, output.error, output.scored))
        self._let_follow(ticket)

    def _let_follow(self, ticket: Ticket) -> None:
        """The prompt is computed, or nobody will: who has the same one may begin."""
        followers, ticket.followers = ticket.followers, []
        for follower in followers:
            self._add(follower)


def _say(ticket: Ticket, deliver: Listener, delta: Delta) -> None:
    try:
        deliver(delta)
    except Exception as error:  # noqa: BLE001 - a listener is somebody else's: a loop that is gone, a queue that is full
        _log.warning("%s cannot be told: %s: %s", ticket.request.id, type(error).__name__, error)


def _nobody(_: Delta) -> None:
    """Listens no more."""
