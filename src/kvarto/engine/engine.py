"""The engine: a thread that steps, and what others ask of it.

    engine = Engine("smollm2", kv="int4", memory="2GiB")
    for completion in engine.generate(["The capital of France is"], Sampling(max_tokens=16)):
        print(completion.text)

Other threads and event loops hand requests over and are told of every token; nobody else touches the model or the books.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kvarto.cache.tiers import DiskTier, HostTier, Tiers
from kvarto.engine.core import EngineCore, Options, Output
from kvarto.engine.memory import ENDLESS
from kvarto.engine.request import Finish, Guide, Request, Sampling
from kvarto.engine.sampling import Choice
from kvarto.engine.text import TextStream
from kvarto.errors import EngineClosed, KvartoError, Overloaded, UnknownName, UsageError
from kvarto.formats import parse_policy, spelled_policy
from kvarto.models.load import LoadedModel, load

_log = logging.getLogger(__name__)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?)?\s*", re.IGNORECASE)


def parse_bytes(text: str | int, name: str = "memory") -> int:
    """Bytes of "8GiB", "512M" (2^20 both, as M and MiB), "4GB" (10^9) or a number. Raises UsageError."""
    match = _SIZE.fullmatch(str(text))
    if not match or float(match[1]) == 0:
        raise UsageError(name, "a size such as 8GiB, 512M or 4GB", repr(text))
    unit = (match[2] or "").upper()
    decimal = unit and not match[3] and str(text).strip().upper().endswith("B")
    return int(float(match[1]) * (1000 if decimal else 1024) ** " KMGT".index(unit or " "))


def open_tiers(
    host_memory: str | int | None = None, disk: str | Path | None = None, disk_memory: str | int = "10GiB"
) -> Tiers | None:
    """Host memory for pages that leave the engine's own, and a folder for those that leave that, which outlive the engine; None if neither is given.

    Raises UsageError.
    """
    if host_memory is None and disk is None:
        return None
    return Tiers(
        None if host_memory is None else HostTier(parse_bytes(host_memory, "host_memory")),
        None if disk is None else DiskTier(Path(disk).expanduser(), parse_bytes(disk_memory, "disk_memory")),
    )


@dataclass(frozen=True)
class Ask:
    """What is asked for: a text or tokens to go on from, and how.

    kv         the format of its cache; None for the engine's first one, or for bf16 where the quality probe found that one too bad
    identity   whose prefixes it may share: a tenant's salt, or None for everybody's; files know it by its repr
    priority   lower goes first
    guide      what may be generated, or None for everything
    probed     it may be among those that the quality probe reads again
    """

    prompt: str | Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    kv: str | None = None
    identity: Hashable = None
    priority: int = 0
    guide: Guide | None = None
    probed: bool = True


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


@dataclass(eq=False)
class Ticket:
    """A request that was handed over. `deliver` is called by the engine's thread with each Delta and must not block."""

    request: Request
    deliver: Callable[[Delta], None]
    text: TextStream | None
    kv: str
    followers: list[Ticket] = field(default_factory=list)


@dataclass(frozen=True)
class Completion:
    """A request that is over. `text` is "" if the engine has no tokenizer; `scored` as in Delta."""

    text: str
    tokens: tuple[int, ...]
    choices: tuple[Choice, ...]
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    kv: str
    error: str = ""
    scored: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Offered:
    """A format as it is really served.

    most_tokens       how long a request may become, by the model's context and by the memory
    capacity_tokens   the longest sequence that the memory has room for, whatever the model's context; None: of any length
    """

    name: str
    kernel_names: str
    bits_per_number: float
    most_tokens: int
    capacity_tokens: int | None


class Engine:
    """A model served with its KV cache in one or more formats.

    model     a name, folder or hub id (kvarto.models), or a LoadedModel
    kv        the format of requests that name none, or a policy file; `also`: others that they may name, all under one budget
    memory    bytes for keys and values, such as "8GiB"
    tiers     where pages go that leave the memory (`open_tiers`); the engine closes them
    most_waiting   more requests than that are refused with Overloaded
    options   of `core.Options`: step_tokens, most_running, kernel, probe, graphs

    `formats` are those offered, the first one that of requests that name none; `held`: these, and bf16 if the probe alone needs it.

    Raises what load, EngineCore and parse_policy raise. Close it, or use it in a `with`.
    """

    def __init__(
        self, model: str | LoadedModel, *, kv: str = "int4", also: Sequence[str] = (), memory: str | int = "1GiB",
        tiers: Tiers | None = None, most_waiting: int = 1024, **options: Any,
    ) -> None:  # fmt: skip
        self._given = [kv, *also]
        policies = [parse_policy(text) for text in self._given]
        self.formats = [str(policy) for policy in policies]
        if twice := [name for i, name in enumerate(self.formats) if name in self.formats[:i]]:
            raise UsageError("also", "formats that differ from kv and from each other", twice[0])
        self.loaded = load(model) if isinstance(model, str) else model
        try:
            chosen = Options(parse_bytes(memory), tiers=tiers, identity=self.loaded.identity, **options)
            self.core = EngineCore(self.loaded.model, policies, chosen)
            self.held = [str(policy) for policy in self.core.policies]
        except BaseException:
            if tiers is not None:
                tiers.close()
            raise
        self.most_waiting = most_waiting
        self._names, self._inbox = itertools.count(1), deque[Callable[[], None]]()
        self._tickets: dict[Request, Ticket] = {}
        self._handed = 0
        self._change = threading.Condition()
        self._closing, self._closed, self._failure = False, False, ""
        self._thread = threading.Thread(target=self._run, name="kvarto engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.loaded.tokenizer

    @cached_property
    def offers(self) -> list[Offered]:
        """The formats of `formats`, in the same order."""
        memory, context = self.core.memory, self.core.context_tokens
        offers = []
        for policy, name in enumerate(self.formats):
            offer, capacity = memory.offers[policy], memory.capacity_tokens(policy)
            offers.append(
                Offered(
                    name=name,
                    kernel_names=offer.kernel_names,
                    bits_per_number=offer.bits_per_number,
                    most_tokens=min(context, capacity),
                    capacity_tokens=None if capacity >= ENDLESS - 1 else capacity,
                )
            )
        return offers

    @property
    def running(self) -> int:
        """Requests that are computed."""
        return len(self.core.scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that were handed over and are not computed yet, or not at the moment."""
        return len(self.core.scheduler.waiting) + self._handed

    @property
    def why_closed(self) -> str:
        """Why no more requests are taken, or "" while they are."""
        return (self._failure or "the engine is closing and takes no more requests") if self._closing else ""

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, ask: Ask, deliver: Callable[[Delta], None]) -> Ticket:
        """Hand over a request; `deliver` is told of it by the engine's thread. Raises UsageError, UnknownName, Overloaded or EngineClosed."""
        return self.submit_many([ask], [deliver])[0]

    def submit_many(self, asks: Sequence[Ask], delivers: Sequence[Callable[[Delta], None]]) -> list[Ticket]:
        """Requests with one prompt: the others begin once the first has computed it, and find its pages. Raises as `submit`, for all or none."""
        tickets = [self._ticket(ask, deliver) for ask, deliver in zip(asks, delivers, strict=True)]
        tickets[0].followers = tickets[1:]
        self._hand_over(tickets)
        return tickets

    def abort(self, ticket: Ticket) -> None:
        """Nobody wants it any more. What it holds is free before the next step; nothing more is delivered."""
        self._tell(lambda: self._abort(ticket))

    def generate(
        self, prompts: Sequence[str | Sequence[int] | Ask], sampling: Sampling | None = None, *, kv: str | None = None
    ) -> list[Completion]:
        """Complete all prompts, however many, and return when the last one is done. `sampling` and `kv` are for those that are no Ask."""
        asks = [prompt if isinstance(prompt, Ask) else Ask(prompt, sampling or Sampling(), kv=kv) for prompt in prompts]
        arrived: queue.SimpleQueue[tuple[int, Delta]] = queue.SimpleQueue()
        tickets: list[Ticket] = []
        deltas: list[list[Delta]] = [[] for _ in asks]
        try:
            for i, ask in enumerate(asks):
                tickets.append(self._ticket(ask, partial(_put, arrived, i)))
                self._hand_over(tickets[-1:], limited=False)
            left = len(asks)
            while left:
                i, delta = arrived.get()
                deltas[i].append(delta)
                left -= delta.finish is not None
        except BaseException:  # refused halfway, or interrupted
            for ticket in tickets:
                self.abort(ticket)
            raise
        return [_completion(ticket, each) for ticket, each in zip(tickets, deltas, strict=True)]

    async def stream(self, ask: Ask) -> AsyncIterator[Delta]:
        """What comes of a request, as it comes. Who stops listening ends it."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Delta]()

        def deliver(delta: Delta) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, delta)

        ticket = self.submit(ask, deliver)
        try:
            while True:
                delta = await arrived.get()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self.abort(ticket)

    def close(self, *, drain: bool = False, timeout_seconds: float = 60.0) -> None:
        """Stop: at once, which ends what runs with Finish.ABORT, or with `drain` once everybody is served, if that is in time."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._tell(self.core.stop_probing)
        if drain:
            self._thread.join(timeout_seconds)
        self._tell(self._abort_all)
        self._thread.join(timeout_seconds)
        with self._change:
            is_over = not self._thread.is_alive()
            is_first, self._closed = is_over and not self._closed, self._closed or is_over
        if is_first:
            self.core.close()

    # ---- handing over ----------------------------------------------------------------------------------------------

    def policy_of(self, kv: str | None) -> int:
        """The number of an offered format; a policy from a file goes by its name too, and by the path that the engine was given.

        Raises UnknownName that says what is offered. Opens no file: clients say what `kv` is.
        """
        if kv is None:
            return 0
        if kv in self._given:
            return self._given.index(kv)
        try:
            name = str(spelled_policy(kv))
        except KvartoError:
            named = [name for name in self.formats if kv == name.partition("@")[0]]
            name = named[0] if len(named) == 1 else kv
        if name not in self.formats:
            raise UnknownName("kv_format", kv, self.formats)
        return self.formats.index(name)

    def route(self, policy: int, prompt_tokens: int, max_tokens: int) -> int:
        """The format for a request that named none and would get `policy`: bf16 if the probe found that too bad here, and it fits."""
        probe = self.core.probe
        if probe is None or not probe.routes(policy, prompt_tokens, max_tokens):
            return policy
        return probe.baseline if prompt_tokens + max_tokens <= self.offers[probe.baseline].most_tokens else policy

    def _ticket(self, ask: Ask, deliver: Callable[[Delta], None]) -> Ticket:
        prompt, sampling = ask.prompt, ask.sampling
        tokens = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
        if ask.kv is None:
            policy = self.route(0, len(tokens), sampling.max_tokens)
        else:
            policy = self.held.index(ask.kv) if ask.kv in self.held else self.policy_of(ask.kv)
        name = f"request-{next(self._names)}"
        request = Request(name, tokens, sampling, policy, ask.identity, ask.priority, ask.guide, ask.probed)
        if error := self.core.why_not(request):
            raise error
        text = None if self.tokenizer is None else TextStream(self.tokenizer, sampling.stop)
        if text is None and sampling.stop:
            raise UsageError("stop", "no stop strings, since this engine has no tokenizer", sampling.stop)
        return Ticket(request, deliver, text, self.held[policy])

    def _hand_over(self, tickets: Sequence[Ticket], *, limited: bool = True) -> None:
        with self._change:
            if self._closing:
                raise EngineClosed(self.why_closed)
            if limited and len(tickets) > self.most_waiting:
                raise UsageError("n", f"at most {self.most_waiting} requests at once, as may wait", len(tickets))
            if limited and (waiting := self.waiting) + len(tickets) > self.most_waiting:
                raise Overloaded(f"{waiting} requests wait already, of {self.most_waiting} at most; try again later")
            self._handed += len(tickets)
            self._inbox.append(lambda: self._add(tickets[0]))
            self._change.notify()

    def _tell(self, message: Callable[[], None]) -> None:
        """Let the engine's thread do something between two steps, if it still runs."""
        with self._change:
            self._inbox.append(message)
            self._change.notify()

    # ---- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.core.enter_thread()
            self._loop()
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

    def _loop(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._inbox or self._closing or not self.core.idle)
                messages = list(self._inbox)
                self._inbox.clear()
                if self._closing and not messages and self.core.idle:
                    return
            for message in messages:
                message()
            for output in self.core.step():
                self._deliver(output)

    def _add(self, ticket: Ticket) -> None:
        with self._change:
            self._handed -= 1
        if ticket.request.finish is None:  # else it was aborted before it began
            self._tickets[ticket.request] = ticket
            self.core.admit(ticket.request)

    def _abort(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.request, None)
        self.core.abort(ticket.request)
        self._let_follow(ticket)

    def _abort_all(self) -> None:
        while self._tickets:
            ticket = next(iter(self._tickets.values()))
            self._abort(ticket)
            if self._failure:
                ticket.request.finish = Finish.ERROR
            self._say(ticket, Delta(finish=ticket.request.finish, error=self._failure))

    def _deliver(self, output: Output) -> None:
        ticket = self._tickets[output.request]
        text, finish = "", output.finish
        if ticket.text is not None and output.choice is not None:
            # A token that ends the text is not part of it.
            text = ticket.text.feed(output.choice.token) if finish != Finish.STOP else ""
            if ticket.text.stopped and finish is None:
                finish = ticket.request.finish = Finish.STOP
                self.core.abort(ticket.request)
            if finish is not None:
                text += ticket.text.finish()
                if ticket.text.stopped:
                    finish = Finish.STOP
        if finish is not None:
            output.request.finish = finish
            del self._tickets[output.request]
        choices = () if output.choice is None else (output.choice,)
        self._say(ticket, Delta(text, choices, finish, output.error, output.scored))
        self._let_follow(ticket)

    def _let_follow(self, ticket: Ticket) -> None:
        """The prompt is computed, or nobody will: who has the same one may begin."""
        followers, ticket.followers = ticket.followers, []
        for follower in followers:
            self._add(follower)

    @staticmethod
    def _say(ticket: Ticket, delta: Delta) -> None:
        try:
            ticket.deliver(delta)
        except Exception as error:  # noqa: BLE001 - a listener is somebody else's: a loop that is gone, a queue that is full
            _log.warning("%s cannot be told: %s: %s", ticket.request.id, type(error).__name__, error)


def _put(arrived: queue.SimpleQueue[tuple[int, Delta]], i: int, delta: Delta) -> None:
    arrived.put((i, delta))


def _completion(ticket: Ticket, deltas: Sequence[Delta]) -> Completion:
    request, last = ticket.request, deltas[-1]
    assert last.finish is not None
    return Completion(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(request.generated),
        choices=tuple(choice for delta in deltas for choice in delta.choices),
        finish=last.finish,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        kv=ticket.kv,
        error=last.error,
        scored=tuple(request.scored),
    )
