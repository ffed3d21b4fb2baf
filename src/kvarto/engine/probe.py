"""The quality probe: what a format does to the answers of real requests, measured while they are served.

Of a share of the requests in formats other than bf16 the engine keeps what the model said (its logits, before penalties, guides and temperature) at
some generated positions. When such a request is over, its tokens are read once more, on bf16 pages, by one sequence that nobody waits for, and at
these positions KL(bf16 || format) is taken over the whole vocabulary, in nats, and whether both have the same likeliest token.

What is kept   at most MOST_POSITIONS positions of a request, evenly spread over the text however long it becomes: every one at first, and each time
               they are full every other one goes and the distance doubles. A row is kept in host memory, in the dtype in which the model gave it,
               so nothing is lost. No more than MOST_KEPT requests are kept at a time, watched or waiting for their turn: 64 x 8 rows of 49,152
               float32 numbers are 100 MB. Others that were chosen are *skipped*.
Who is chosen  by a hash of the request's id: the same ones each time the same requests come in the same order, whatever their timing.
What it costs  Nothing if the share is 0: no bf16 pages are set up then. Otherwise a read of prompt and text, in forward passes of its own, so that no
               client's numbers depend on it. A pass has a page of tokens at most, so who arrives does not wait for long, and while there are clients
               the probe takes at most BUSY_SHARE of the time. Its pages are bf16's, shared with bf16 requests and other probes of the tenant; those
               that no request used are the first to go when memory is wanted, and never to another tier.
What goes first   It begins only when its pages fit beside what is held, stands still while a request waits for memory, and lets go of all it has when
               somebody needs it (*skipped* again); it is no part of what a closing engine finishes.

Results are told apart by format and context: how many tokens the position has seen, in buckets of CONTEXTS.

*Routing.* With a threshold, a (format, context) is routed once the lower 99 % bound of its mean KL is above it; the bound is that of the last
WINDOW_POSITIONS positions with the prompt as the unit (`stats.clustered_mean`), since positions of one text are alike, and needs FEWEST_PROMPTS
different ones. KL is skewed to the right, so the t bound is low rather than high: noise does not route. Who names no format is served in bf16 then,
if some place of the text may fall into that context and it fits. It stays so until the engine is made anew: routed traffic is not probed any more, so
nothing could tell that all is well again. All requests count and all are routed, whoever sends them: tenants share the format, and its fate.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvarto import stats
from kvarto.engine.memory import Memory
from kvarto.engine.request import Finish, Request, Sampling
from kvarto.engine.scheduler import Work
from kvarto.engine.step import Step
from kvarto.errors import KvartoError, NotFinite, UsageError
from kvarto.formats import Policy, parse_policy
from kvarto.jit import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvarto.engine.forward import Forward

BASELINE = parse_policy("bf16")
MOST_POSITIONS = 64
MOST_KEPT = 8
BUSY_SHARE = 0.1
CONTEXTS = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
CONTEXT_NAMES = ("1k", "4k", "16k", "64k", "more")
"""Positions that have seen at most so many tokens; the last: more than that."""
KL_BOUNDS_NATS = tuple(10 ** (i / 2) for i in range(-12, 3))
WINDOW_POSITIONS = 1024
FEWEST_PROMPTS = 8
OUTCOMES = ("done", "skipped", "failed")
_LEVEL = 0.98  # two-sided, so 99 % on the one side that counts
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probing:
    """What is probed.

    share            of the requests in formats other than bf16, from 0, which is off, to 1
    threshold_nats   mean KL above which requests that name no format are served in bf16; None: never

    Raises UsageError.
    """

    share: float = 0.0
    threshold_nats: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:  # NaN is not
            raise UsageError("probe_share", "0 to 1", self.share)
        if self.threshold_nats is None:
            return
        if not 0 < self.threshold_nats < math.inf:
            raise UsageError("probe_threshold", "more than 0 nats", self.threshold_nats)
        if self.share == 0:
            raise UsageError("probe_threshold", "a probe_share above 0 with it", self.share)

    def check(self, offered: Sequence[Policy]) -> None:
        """Raises UsageError if requests would have to be routed to a format that is not offered."""
        if self.threshold_nats is not None and BASELINE not in offered:
            names = ", ".join(map(str, offered))
            raise UsageError(
                "probe_threshold", f"{BASELINE} among the formats offered", names, f"add --also {BASELINE}"
            )

    def held(self, offered: Sequence[Policy]) -> list[Policy]:
        """The policies that an engine needs pages of, those that it offers first."""
        return [*offered, *([BASELINE] if self.share and BASELINE not in offered else [])]


@dataclass
class Tally:
    """Of one format in one context: positions with a KL up to each bound and beyond the last, their sum, and how many agreed on the likeliest token.

    recent   positions and sum of KL of the last prompts, WINDOW_POSITIONS or a little more. A prompt that comes again is one observation, not another
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(KL_BOUNDS_NATS) + 1))
    kl_nats: float = 0.0
    agreed: int = 0
    recent: dict[bytes, tuple[int, float]] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """All of them, ever."""
        return sum(self.counts)

    def add(self, prompt: bytes, scores: Sequence[Score]) -> None:
        """What one request brought here, of a prompt with this digest."""
        for score in scores:
            self.counts[bisect.bisect_left(KL_BOUNDS_NATS, score.kl_nats)] += 1
            self.agreed += score.agrees
        total = sum(score.kl_nats for score in scores)
        self.kl_nats += total
        count, before = self.recent.pop(prompt, (0, 0.0))
        self.recent[prompt] = count + len(scores), before + total
        while sum(count for count, _ in self.recent.values()) - next(iter(self.recent.values()))[0] >= WINDOW_POSITIONS:
            del self.recent[next(iter(self.recent))]

    @property
    def lower_bound_nats(self) -> float:
        """Of the mean KL of recent positions, at 99 %; -inf as long as too few prompts were probed."""
        if len(self.recent) < FEWEST_PROMPTS:
            return -math.inf
        counts, totals = zip(*self.recent.values(), strict=True)
        return stats.clustered_mean(totals, counts, _LEVEL).low


@dataclass(frozen=True)
class Score:
    """A position: the place of its last token, KL(bf16 || format) in nats, and whether both have the same likeliest token."""

    place: int
    kl_nats: float
    agrees: bool


class Trace:
    """What the model said of a request on its way: logits [V] after the tokens at some places."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.rows: list[Tensor] = []
        self._seen, self._stride = 0, 1

    def add(self, place: int, row: Tensor, dtype: torch.dtype) -> None:
        """The next position: float32 [V], made of numbers of `dtype`."""
        number, self._seen = self._seen, self._seen + 1
        if number % self._stride:
            return
        if len(self.places) == MOST_POSITIONS:
            self.places, self.rows, self._stride = self.places[::2], self.rows[::2], 2 * self._stride
        self.places.append(place)
        self.rows.append(row.to("cpu", dtype, copy=True))  # not a view, which would keep the rows of the whole step


@dataclass(frozen=True)
class _Job:
    """A request that is over, to be read again: `request` is the one that reads, of tokens up to the last place; `policy` the one probed; `prompt` a
    digest.
    """

    request: Request
    policy: int
    prompt: bytes
    trace: Trace
    scores: list[Score] = field(default_factory=list)


class Probe:
    """Belongs to the engine's thread; others may read `tallies`, `outcomes` and `routed`.

    offered   the policies that clients may choose; `memory` has bf16 too (`Probing.held`)
    """

    def __init__(
        self, memory: Memory, forward: Forward, device: torch.device, offered: Sequence[Policy], probing: Probing
    ) -> None:
        probing.check(offered)
        self._memory, self._forward, self._device, self._probing = memory, forward, device, probing
        self.names = [str(policy) for policy in offered]
        self.baseline = probing.held(offered).index(BASELINE)
        self.tallies: dict[tuple[int, int], Tally] = {}
        self.outcomes: Counter[tuple[int, int, str]] = (
            Counter()
        )  # by policy, context, and what became of a chosen request
        self.routed: set[tuple[int, int]] = set()
        self._traces: dict[Request, Trace] = {}
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._not_before_seconds = 0.0
        self._closed = False

    @property
    def share(self) -> float:
        """Of `Probing`, as the next one."""
        return self._probing.share

    @property
    def threshold_nats(self) -> float | None:
        """None: nothing is routed."""
        return self._probing.threshold_nats

    @property
    def idle(self) -> bool:
        """Nothing waits to be read again."""
        return not self._queue and self._running is None

    def routes(self, policy: int, prompt_tokens: int, max_tokens: int) -> bool:
        """Requests under this policy, with a prompt and a text of at most so many tokens, are better served in bf16, as some of its places are."""
        contexts = range(context_of(prompt_tokens), context_of(prompt_tokens + max_tokens) + 1)
        return any((policy, context) in self.routed for context in contexts)

    # ---- what it is told -------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """A request begins; perhaps it is one of those that are watched."""
        if self._closed or not request.probed or request.policy == self.baseline:
            return
        if not _is_chosen(request.id, self.share):
            return
        if len(self._traces) + len(self._queue) + (self._running is not None) >= MOST_KEPT:
            self._count(request.policy, request.prompt_tokens, "skipped")
        else:
            self._traces[request] = Trace()

    def watch(self, requests: Sequence[Request], logits: Tensor) -> None:
        """The model's logits float32 [n, V] after the last token of each request, before anything is done with them."""
        for number, request in enumerate(requests):
            if (trace := self._traces.get(request)) is not None:
                trace.add(len(request.tokens) - 1, logits[number], self._forward.logits_dtype)

    def ended(self, request: Request) -> None:
        """A request is over, and holds nothing any more. What failed, or was left by its client, is forgotten."""
        trace = self._traces.pop(request, None)
        if trace is None or not trace.places or request.finish not in (Finish.STOP, Finish.LENGTH):
            return
        tokens = request.tokens[: trace.places[-1] + 1]
        reader = Request(f"probe of {request.id}", tokens, Sampling(max_tokens=1), self.baseline, request.identity)
        prompt = hashlib.blake2b(repr(request.tokens[: request.prompt_tokens]).encode(), digest_size=16).digest()
        self._queue.append(_Job(reader, request.policy, prompt, trace))

    def give_way(self) -> bool:
        """Somebody needs memory: let go of all. False if there is none to be had from here."""
        if self._running is None:
            return False
        self._end("skipped")
        return True

    def close(self) -> None:
        """The engine closes: nobody is watched any more, nothing is read again."""
        self._closed = True
        self._traces.clear()
        self.give_way()
        for job in self._queue:
            self._count(job.policy, len(job.request.tokens), "skipped")
        self._queue.clear()

    # ---- reading again ---------------------------------------------------------------------------------------------

    def step(self, step_tokens: int, *, busy: bool, starved: bool) -> None:
        """Read on, if it is time: a page, or as many tokens as a step may have.

        busy      clients are computed or wait
        starved   one of them waits for memory
        """
        began = time.monotonic()
        if self.idle or starved or (busy and began < self._not_before_seconds):
            return
        if self._running is None and not self._begin():
            return
        self._read(min(self._memory.page_tokens, step_tokens))
        now = time.monotonic()
        self._not_before_seconds = now + (now - began) * (1 / BUSY_SHARE - 1)

    def _begin(self) -> bool:
        """The next job, if it has room beside what is held. Pages that are there already are not read again before the first place."""
        job = self._queue.popleft()
        if self._memory.why_not(job.request) or not self._memory.has_room(job.request):
            self._count(job.policy, len(job.request.tokens), "skipped")
            return False
        job.request.holding = self._memory.begin(job.request, keep=False)
        job.request.holding.find(job.request.tokens[: job.trace.places[0] + 1])
        self._running = job
        return True

    def _read(self, most_tokens: int) -> None:
        """The next tokens of the job."""
        job = self._running
        assert job is not None
        holding, count = job.request.holding, min(most_tokens, job.request.missing)
        if not holding.reserve(count):
            self._end("skipped")
            return
        try:
            self._score(job, Work(job.request, count))
        except (RuntimeError, KvartoError):
            _log.exception("a probe failed; the requests are not concerned")
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # a device that is lost fails again here, and ends the engine
            self._end("failed")
            return
        holding.commit(job.request.tokens)
        if not job.request.missing:
            self._record(job)
            self._end("done")

    def _score(self, job: _Job, work: Work) -> None:
        """Compute a chunk, and compare at the places in it. Raises NotFinite and what the model raises."""
        first, trace = job.request.holding.length, job.trace
        chunk = slice(bisect.bisect_left(trace.places, first), bisect.bisect_left(trace.places, first + work.count))
        places = trace.places[chunk]
        plan = self._memory.plan([work], wanted=[place - first for place in places])
        result = self._forward.run(Step(self._memory, plan, self._device))
        if len(result.not_finite()):
            raise NotFinite("keys or values: expected finite values, got NaN or infinity")
        for place, base, row in zip(places, result.logits, trace.rows[chunk], strict=True):
            other = row.to(self._device, torch.float32)
            kl = kl_nats(base.log_softmax(-1), other.log_softmax(-1))
            job.scores.append(Score(place, kl, bool(base.argmax() == other.argmax())))

    def _end(self, outcome: str) -> None:
        job, self._running = self._running, None
        assert job is not None
        job.request.holding.release()
        self._count(job.policy, len(job.request.tokens), outcome)

    def _count(self, policy: int, tokens: int, outcome: str) -> None:
        """`tokens`: of the prompt, or of all that was to be read, if that is known."""
        self.outcomes[policy, context_of(tokens), outcome] += 1

    # ---- what comes of it ------------------------------------------------------------------------------------------

    def _record(self, job: _Job) -> None:
        contexts = [context_of(score.place + 1) for score in job.scores]
        for context in sorted(set(contexts)):
            key = job.policy, context
            tally = self.tallies.setdefault(key, Tally())
            tally.add(job.prompt, [score for score, own in zip(job.scores, contexts, strict=True) if own == context])
            if self.threshold_nats is not None and key not in self.routed:
                self._judge(key, tally)

    def _judge(self, key: tuple[int, int], tally: Tally) -> None:
        bound = tally.lower_bound_nats
        if self.threshold_nats is not None and bound > self.threshold_nats:
            self.routed.add(key)
            _log.warning(
                "%s, context %s: the mean KL of probed positions is at least %.3g nats, above %.3g; requests that name no format get %s from now on",
                self.names[key[0]], CONTEXT_NAMES[key[1]], bound, self.threshold_nats, BASELINE,
            )  # fmt: skip


def context_of(tokens: int) -> int:
    """The number of the bucket that a position with so many tokens behind it falls into."""
    return bisect.bisect_left(CONTEXTS, tokens)


def kl_nats(base: Tensor, other: Tensor) -> float:
    """KL(base || other) of log-probabilities float32 [V], summed in float64. What `base` holds for impossible does not count. Raises NotFinite."""
    terms = torch.where(base == -math.inf, 0.0, base.exp() * (base - other))
    kl = float(terms.sum(dtype=torch.float64))
    if not math.isfinite(kl):
        raise NotFinite("log-probabilities: expected finite values, got NaN or infinity")
    return max(kl, 0.0)  # rounding may bring two equal ones a little below


def _is_chosen(name: str, share: float) -> bool:
    """By the name alone, a `share` of all names."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) < share * 2**64
