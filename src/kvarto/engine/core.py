"""The engine without threads: requests in, steps one after another, what each step brought out.

A step: the scheduler says who goes on, the books say where, the model computes all of it in one forward pass, the samplers choose the next tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvarto.cache.tiers import Tiers
from kvarto.engine.forward import Forward, Result
from kvarto.engine.graphs import Graphs
from kvarto.engine.memory import Compute, Memory
from kvarto.engine.offload import Offload
from kvarto.engine.pace import Pace
from kvarto.engine.plan import StepPlan
from kvarto.engine.probe import Probe, Probing
from kvarto.engine.request import Finish, Request
from kvarto.engine.sampling import Choice, choose, logprobs_of
from kvarto.engine.scheduler import Scheduler, Work
from kvarto.engine.step import Step
from kvarto.errors import KvartoError, UsageError
from kvarto.formats import Policy

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_MOST_EMPTY_STEPS = 3
# Of the float32 logits of scored prompts in a step; a few matrices of that size live at once.
_SCORED_BYTES = 64 << 20
_NOT_FINITE = "keys or values were not finite; check the model's weights"


@dataclass(frozen=True)
class Output:
    """What a step brought a request: perhaps a token, perhaps its end; `error` says why for Finish.ERROR.

    scored   what was asked for of the prompt's tokens, with the first output of a request
    """

    request: Request
    choice: Choice | None = None
    finish: Finish | None = None
    error: str = ""
    scored: tuple[Choice, ...] = ()


StepListener = Callable[[int, int, float], None]
"""Is told of each step, by the thread that steps: tokens of prompts (or computed again), tokens that follow generated ones, seconds."""


@dataclass(frozen=True)
class Options:
    """How an engine serves.

    memory_bytes   for keys and values
    step_tokens    most tokens of a step; most_running: most requests of a step
    step_seconds   what a step in which somebody generates should take: prompts get smaller chunks then; 0 or None: as long as it takes
    kernel         a name, or None for the best one
    tiers          where blocks go that leave the memory, if anywhere; `identity` says then whose they are: the model, weights and all
    probe          which requests are read again in bf16, to see what their format did to them
    poison         freed memory becomes NaN, for tests
    graphs         on a GPU decode steps are replayed as CUDA graphs where they can be (graphs.py)

    Raises UsageError.
    """

    memory_bytes: int
    step_tokens: int = 512
    step_seconds: float | None = None
    most_running: int = 64
    kernel: str | None = None
    tiers: Tiers | None = None
    identity: str = ""
    probe: Probing = field(default_factory=Probing)
    poison: bool = False
    graphs: bool = True

    def __post_init__(self) -> None:
        for name, value in (("step_tokens", self.step_tokens), ("most_running", self.most_running)):
            if value < 1:
                raise UsageError(name, "at least 1", value)
        if self.step_tokens < self.most_running:
            raise UsageError("step_tokens", f"at least most_running, {self.most_running}", self.step_tokens)
        if self.step_seconds is not None and not 0 <= self.step_seconds < math.inf:  # NaN is not
            raise UsageError("step_seconds", "0 or more seconds", self.step_seconds)


class EngineCore:
    """A model under some policies, those offered; its own `policies` have bf16 too if the probe needs it.

    Raises Unsupported or UsageError when the model, a policy or the budget cannot be served.
    """

    def __init__(self, model: Any, policies: Sequence[Policy], options: Options) -> None:
        self.forward, self.device = Forward(model), model.device
        self.enter_thread()
        self.policies = options.probe.held(policies)
        compute, step_tokens = Compute(model.dtype, model.device, options.kernel), options.step_tokens
        self._step_tokens = step_tokens
        self.memory = Memory(
            self.forward.specs, self.policies, compute,
            budget_bytes=options.memory_bytes, step_tokens=step_tokens, poison=options.poison,
        )  # fmt: skip
        self.offload = None if options.tiers is None else Offload(self.memory, options.tiers, options.identity)
        self.memory.prefixes.below = self.offload
        self.probe: Probe | None = None
        if options.probe.share:
            self.probe = Probe(self.memory, self.forward, self.device, policies, options.probe)
        self._pace = Pace(options.step_seconds)
        self.scheduler = Scheduler(
            self.memory.begin,
            lambda: self.memory.prefixes.released,
            step_tokens=step_tokens,
            most_running=options.most_running,
            give_way=(lambda: False) if self.probe is None else self.probe.give_way,
            most_scored=max(1, _SCORED_BYTES // (4 * self.forward.vocabulary)),
            pace=self._pace,
        )
        self._aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.graphs = Graphs(self.forward, self.memory, self.device, self._aside)
        if not options.graphs:
            self.graphs.why_not = "they were not wanted"
        self.context_tokens = int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 2**31))
        self.eos_tokens = _eos_tokens(model)
        self.steps = self._empty_steps = 0
        self.on_step: list[StepListener] = []

    def enter_thread(self) -> None:
        """The calling thread will step. Streams, graphs and Triton's launches go to a thread's own current device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def live_tokens(self) -> tuple[int, int]:
        """(Tokens of running requests that are in the cache, tokens that their pages have room for). Another thread may ask."""
        holdings = [request.holding for request in list(self.scheduler.running)]
        lengths = [holding.length for holding in holdings if holding is not None]
        S = self.memory.page_tokens
        return sum(lengths), sum(-(-length // S) * S for length in lengths)

    def why_no_prompt(self, tokens: Sequence[int]) -> UsageError | None:
        """Why these are no tokens of the model, or None."""
        vocabulary = self.forward.vocabulary
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        return None if wrong is None else UsageError("prompt", f"tokens from 0 to {vocabulary - 1}", wrong)

    def why_not(self, request: Request) -> UsageError | None:
        """Why a request cannot be served, ever, or None."""
        tokens = request.prompt_tokens
        if error := self.why_no_prompt(request.tokens):
            return error
        if request.most_tokens > self.context_tokens:
            got = f"a prompt of {tokens} and max_tokens {request.sampling.max_tokens}"
            return UsageError("max_tokens", f"at most {self.context_tokens} tokens together with the prompt", got)
        if reason := self.memory.why_not(request):
            return UsageError("max_tokens", "a request that fits the memory", reason, "give the engine more memory")
        return None

    def add(self, request: Request) -> None:
        """Raises UsageError as `why_not`."""
        if error := self.why_not(request):
            raise error
        self.admit(request)

    def admit(self, request: Request) -> None:
        """As `add`, for one that can be served."""
        if self.probe is not None:
            self.probe.admit(request)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Nobody wants it any more: what it holds is free at once. Nothing happens if it is over."""
        self._end(request, request.finish or Finish.ABORT)

    @property
    def idle(self) -> bool:
        """Nobody is here, and nothing is left to be read again."""
        return not self._has_requests and (self.probe is None or self.probe.idle)

    @property
    def _has_requests(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Output]:
        """Compute a step. An error of the model ends the requests of this step, and not the engine."""
        if self.probe is not None:  # before the step, so that no token waits for it that is there
            self.probe.step(self._step_tokens, busy=self._has_requests, starved=self.scheduler.starved)
        works = self.scheduler.schedule()
        if not works:
            return self._unstick()
        self.steps, self._empty_steps = self.steps + 1, 0
        now = time.monotonic()
        for work in works:
            work.request.began_seconds = work.request.began_seconds or now
        decoded, computed = sum(work.count for work in works if work.decodes), sum(work.count for work in works)
        generating = sum(work.generates for work in works)
        outputs = self._compute(works)
        seconds = time.monotonic() - now
        self._pace.took(computed - generating, generating, seconds)
        for listener in self.on_step:
            listener(computed - decoded, decoded, seconds)
        return outputs

    def _compute(self, works: Sequence[Work]) -> list[Output]:
        """The step of these works."""
        try:
            plan = self.memory.plan(works, shape=self.graphs.shape_of(works))
            result = self._run(plan)
            broken = _broken(plan, result)
            # Before anything lets go of its holding, which says what is scored and whether a work samples.
            rows, sampled = self._score(plan.works, broken, result.logits)
            # A slice where nobody is left out: a list of rows would have to be sent.
            logits = result.logits[: len(rows)] if rows == [*range(len(rows))] else result.logits[rows]
            if self.probe is not None:
                self.probe.watch(sampled, logits)
            choices = choose(logits, sampled) if sampled else []
        except (RuntimeError, KvartoError) as error:
            _log.exception("a step of %d requests failed", len(works))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a device that is lost fails again here, and ends the engine
            return [self._fail(work.request, f"{type(error).__name__}: {error}") for work in works]
        for work in plan.works:
            if work not in broken:
                work.request.holding.commit(work.request.tokens)
        self.memory.count_sealed(plan)
        outputs = [self._fail(work.request, _NOT_FINITE) for work in broken]
        return outputs + [
            self._fail(request, choice.error) if choice.error else self._accept(request, choice)
            for request, choice in zip(sampled, choices, strict=True)
        ]

    def _run(self, plan: StepPlan) -> Result:
        """Replayed, if that can be."""
        if plan.shape is not None and (result := self.graphs.run(plan)) is not None:
            return result
        return self.forward.run(Step(self.memory, plan, self.device, self._aside))

    @staticmethod
    def _score(works: Sequence[Work], broken: Sequence[Work], logits: Tensor) -> tuple[list[int], list[Request]]:
        """Note what was wanted of prompts; `logits` are those of `StepPlan.wanted`. Returns the rows of the others, and whose they are."""
        rows, sampled, row = list[int](), list[Request](), 0
        for work in works:
            request, scored = work.request, work.scored
            if scored and work not in broken:
                assert request.sampling.prompt_logprobs is not None, "nobody asked for it"
                tokens = request.tokens[scored.start + 1 : scored.stop + 1]
                request.scored += logprobs_of(logits[row : row + len(scored)], tokens, request.sampling.prompt_logprobs)
            row += len(scored)
            if work.samples:
                if work not in broken:
                    rows.append(row)
                    sampled.append(request)
                row += 1
        return rows, sampled

    def _unstick(self) -> list[Output]:
        """Nobody could go on. Once that is so because the last one that ran was preempted; then the first that waits has all memory for itself."""
        self._empty_steps += self._has_requests
        if self._empty_steps < _MOST_EMPTY_STEPS or not self.scheduler.waiting:
            return []
        self._empty_steps = 0
        return [self._fail(self.scheduler.waiting[0], "it found no room in a memory that nobody else holds")]

    def _accept(self, request: Request, choice: Choice) -> Output:
        """The next token of a request, unless it wants none."""
        sampling, scored = request.sampling, tuple(request.scored) if not request.generated_tokens else ()
        if sampling.max_tokens == 0:
            self._end(request, Finish.LENGTH)
            return Output(request, None, request.finish, scored=scored)
        request.tokens.append(choice.token)
        stops = choice.token in sampling.stop_token_ids or (choice.token in self.eos_tokens and not sampling.ignore_eos)
        if stops:
            self._end(request, Finish.STOP)
        elif len(request.tokens) >= request.most_tokens:
            self._end(request, Finish.LENGTH)
        return Output(request, choice, request.finish, scored=scored)

    def _fail(self, request: Request, reason: str) -> Output:
        self._end(request, Finish.ERROR)
        return Output(request, finish=Finish.ERROR, error=reason)

    def _end(self, request: Request, finish: Finish) -> None:
        """It lets go of what it holds; the probe may take it from here."""
        request.finish = finish
        self.scheduler.remove(request)
        if self.probe is not None:
            self.probe.ended(request)

    def stop_probing(self) -> None:
        """What is not read again yet never will be."""
        if self.probe is not None:
            self.probe.close()

    def close(self) -> None:
        """Nobody will come any more; what the tiers can keep for the next engine goes there."""
        if self.offload is not None:
            self.offload.close()

    def check(self) -> None:
        """Assert that the books balance."""
        self.memory.prefixes.check()
        assert all(request.holding is not None for request in self.scheduler.running)
        assert all(request.holding is None for request in self.scheduler.waiting)


def _broken(plan: StepPlan, result: Result) -> list[Work]:
    """Those whose keys or values were not finite in some layer. Waits for the device."""
    return plan.works_of(result.not_finite())


def _eos_tokens(model: Any) -> frozenset[int]:
    """What ends a text, by the model's generation config."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
