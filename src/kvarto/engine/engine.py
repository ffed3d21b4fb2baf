"""The engine: a model under some formats, and what others ask of it. loop.py is the thread that does it.

    engine = Engine("smollm2", kv="int4", memory="2GiB")
    for completion in engine.generate(["The capital of France is"], Sampling(max_tokens=16)):
        print(completion.text)

Other threads and event loops hand requests over and are told of every token.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import re
from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kvarto.cache.tiers import DiskTier, HostTier, Tiers
from kvarto.engine.core import EngineCore, Options
from kvarto.engine.loop import Delta, Listener, Loop, Ticket
from kvarto.engine.memory import ENDLESS
from kvarto.engine.request import Finish, Guide, Request, Sampling
from kvarto.engine.sampling import Choice
from kvarto.engine.text import TextStream
from kvarto.errors import KvartoError, UnknownName, Unsupported, UsageError
from kvarto.formats import parse_policy, spelled_policy
from kvarto.layout import PAGE_TOKENS
from kvarto.models.load import LoadedModel, load

_WARMING = "kvarto warms up"  # nobody shares these prefixes
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
    options   of `core.Options`: step_tokens, step_seconds, most_running, kernel, probe, graphs

    `formats` are those offered, the first one that of requests that name none.

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
        except BaseException:
            if tiers is not None:
                tiers.close()
            raise
        self.most_waiting = most_waiting
        self._names = itertools.count(1)
        self._loop = Loop(self.core, most_waiting)

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
        return self._loop.waiting

    @property
    def why_closed(self) -> str:
        """Why no more requests are taken, or "" while they are."""
        return self._loop.why_closed

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, ask: Ask, deliver: Listener) -> Ticket:
        """Hand over a request; `deliver` is told of it by the engine's thread. Raises UsageError, UnknownName, Overloaded or EngineClosed."""
        return self.submit_many([ask], [deliver])[0]

    def submit_many(self, asks: Sequence[Ask], delivers: Sequence[Listener]) -> list[Ticket]:
        """Requests with one prompt: the others begin once the first has computed it, and find its pages. Raises as `submit`, for all or none."""
        tickets = [self._ticket(ask, deliver) for ask, deliver in zip(asks, delivers, strict=True)]
        tickets[0].followers = tickets[1:]
        self._loop.hand_over(tickets)
        return tickets

    def abort(self, ticket: Ticket) -> None:
        """Nobody wants it any more. What it holds is free before the next step; nothing more is delivered."""
        self._loop.abort(ticket)

    def generate(
        self, prompts: Sequence[str | Sequence[int] | Ask], sampling: Sampling | None = None, *, kv: str | None = None
    ) -> list[Completion]:
        """Complete all prompts, however many, and return when the last one is done. `sampling` and `kv` are for those that are no Ask."""
        asks = [prompt if isinstance(prompt, Ask) else Ask(prompt, sampling or Sampling(), kv=kv) for prompt in prompts]
        return self._generate((ask, None) for ask in asks)

    def warm_up(self) -> None:
        """Let kernels be compiled before the first client waits for them: each format, the probe's too, fills a page and reads it.

        Raises Unsupported if one cannot.
        """
        ask = Ask([0] * (PAGE_TOKENS + 1), Sampling(max_tokens=2), identity=_WARMING, probed=False)
        for done in self._generate((ask, policy) for policy in range(len(self.core.policies))):
            if done.error:
                raise Unsupported(f"format {done.kv} does not run on this machine: {done.error}; serve another one")

    def _generate(self, asks: Iterable[tuple[Ask, int | None]]) -> list[Completion]:
        """Each in its own format, or that of this number."""
        arrived: queue.SimpleQueue[tuple[int, Delta]] = queue.SimpleQueue()
        tickets: list[Ticket] = []
        try:
            for i, (ask, policy) in enumerate(asks):
                tickets.append(self._ticket(ask, partial(_put, arrived, i), policy))
                self._loop.hand_over(tickets[-1:], limited=False)
            deltas, left = [list[Delta]() for _ in tickets], len(tickets)
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
        self._loop.close(drain=drain, timeout_seconds=timeout_seconds)

    # ---- formats and tickets --------------------------------------------------------------------------------------

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

    def _ticket(self, ask: Ask, deliver: Listener, policy: int | None = None) -> Ticket:
        """`policy`: the number of a format that the ask need not name and that need not be offered."""
        prompt, sampling = ask.prompt, ask.sampling
        tokens = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
        if policy is None and ask.kv is None:
            policy = self.route(0, len(tokens), sampling.max_tokens)
        elif policy is None:
            policy = self.policy_of(ask.kv)
        name = f"request-{next(self._names)}"
        request = Request(name, tokens, sampling, policy, ask.identity, ask.priority, ask.guide, ask.probed)
        if error := self.core.why_not(request):
            raise error
        text = None if self.tokenizer is None else TextStream(self.tokenizer, sampling.stop)
        if text is None and sampling.stop:
            raise UsageError("stop", "no stop strings, since this engine has no tokenizer", sampling.stop)
        return Ticket(request, deliver, text, str(self.core.policies[policy]))


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
