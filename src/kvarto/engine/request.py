"""A request: what is asked for, and how far it is. No torch."""

from __future__ import annotations

import enum
import math
import secrets
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvarto.errors import UsageError

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Names and meanings are OpenAI's; `top_k`, `min_p`, `stop_token_ids` and `ignore_eos` those of other servers.

    temperature   0 takes the likeliest token
    top_k         only the so many likeliest; 0: all
    min_p         only those at least so likely, relative to the likeliest
    seed          equal seeds give equal tokens, whatever else is in the batch, up to float rounding; None: another one for each request
    max_tokens    0 computes the prompt, and nothing follows
    logprobs      report the log probability of each token, and of the so many likeliest; None: nothing
    prompt_logprobs   the same of each token of the prompt but the first; then nothing of the prompt is taken from the prefix cache
    stop          the text ends before any of these

    Raises UsageError that names the field.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _between("max_tokens", self.max_tokens, 0, math.inf)
        _between("temperature", self.temperature, 0, 100)
        _between("top_p", self.top_p, 0, 1)
        _between("top_k", self.top_k, 0, math.inf)
        _between("min_p", self.min_p, 0, 1)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.top_p == 0:
            raise UsageError("top_p", "more than 0", self.top_p)
        if self.seed is not None:
            _between("seed", self.seed, -(2**63), 2**63 - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _between(name, value, 0, MOST_LOGPROBS)
        if not all(self.stop):
            raise UsageError("stop", "strings that are not empty", self.stop)


def _between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN is not
        raise UsageError(name, f"{least} or more" if most == math.inf else f"{least} to {most}", value)


class Finish(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Guide(Protocol):
    """Says what a text may go on with: a grammar, a JSON schema. One for each request, since it has a state."""

    def apply(self, logits: Any) -> Any:
        """logits float32 [V] with -inf for what may not come next; a tensor of its own."""

    def accept(self, token: int) -> None:
        """This token came next."""


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    tokens       the prompt, then what was generated
    policy       by its number among those that the engine offers
    identity     whose prefixes it may share: tenant salt, or None for everybody's
    priority     lower goes first; equal ones in the order of arrival
    guide        what may be generated, None: everything
    probed       it may be among those that the quality probe reads again
    holding      what it holds of the memory while it runs
    scored       of the prompt's second, third ... token a `sampling.Choice`, as far as `Sampling.prompt_logprobs` was seen to
    waits_since_seconds   time.monotonic() when it came, or was last sent back to wait
    began_seconds   time.monotonic() of its first step, None while it waits for it
    """

    id: str
    tokens: list[int]
    sampling: Sampling
    policy: int = 0
    identity: Hashable = None
    priority: int = 0
    guide: Guide | None = None
    probed: bool = True
    prompt_tokens: int = field(init=False)
    seed: int = field(init=False)
    order: int = field(default=0, init=False)
    holding: Any = field(default=None, init=False)
    scored: list[Any] = field(default_factory=list, init=False)
    _counts: Counter[int] = field(default_factory=Counter, init=False)
    _counted: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    finish: Finish | None = field(default=None, init=False)
    waits_since_seconds: float = field(default=0.0, init=False)
    began_seconds: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.tokens:
            raise UsageError("prompt", "at least one token", "none")
        self.prompt_tokens = len(self.tokens)
        chosen = self.sampling.seed
        self.seed = secrets.randbits(64) if chosen is None else chosen % 2**64

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_tokens :]

    @property
    def generated_tokens(self) -> int:
        """How many."""
        return len(self.tokens) - self.prompt_tokens

    def count_generated(self) -> Counter[int]:
        """How often each token was generated; only those are counted that came since."""
        new = self.tokens[self.prompt_tokens + self._counted :]
        self._counts.update(new)
        self._counted += len(new)
        return self._counts

    @property
    def most_tokens(self) -> int:
        """How long it may become."""
        return self.prompt_tokens + self.sampling.max_tokens

    @property
    def scores(self) -> bool:
        """Log probabilities of its prompt are wanted, and not all are there."""
        return self.sampling.prompt_logprobs is not None and len(self.scored) < self.prompt_tokens - 1

    @property
    def findable(self) -> list[int]:
        """The tokens that the prefix cache may be asked for, which never gives the last one: what must be scored must be computed."""
        return self.tokens[: len(self.scored) + 1] if self.scores else self.tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first."""
        return self.priority, self.order

    @property
    def missing(self) -> int:
        """Tokens that are known and not computed yet: all of the prompt's, then one at a time."""
        return len(self.tokens) - (0 if self.holding is None else self.holding.length)
