"""Tokens per second and bytes, with a given context in the cache, through the whole model.

The cache is filled with noise (`filling`), then a chunk of prompt is prefilled onto it and tokens are decoded one by one. The bytes are those
that the cache itself counts; `memory` adds what a process really grows by.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from kvarto.attention import LayerSpec
from kvarto.integrations.quirks import plan_layers
from kvarto.study.arms import Arm, feed
from kvarto.study.filling import fill_own, fill_pages, own_bytes
from kvarto.study.options import Budget
from kvarto.study.result import Memory, Speed
from kvarto.study.stage import Step

_STAGE = "speed"
_FILL_COST = 0.05
_WARM_TOKENS = 32
_DECODE_COST_TOKENS = 40


def filled_cache(arm: Arm, tokens: int) -> Any:
    """A cache of one sequence that holds `tokens` tokens of noise."""
    cache, model = arm.new_cache(), arm.model
    if arm.policy is None:
        fill_own(cache, layer_specs(model), tokens, model.dtype, model.device)
        return cache
    fill_pages(cache.kv, tokens, device=model.device)
    cache.adopt(1, tokens)
    return cache


def layer_specs(model: Any) -> list[LayerSpec | None]:
    """What each layer of a model caches, None where it caches no keys."""
    return [layer if isinstance(layer, LayerSpec) else None for layer in plan_layers(model)]


def weigh(arm: Arm, cache: Any, tokens: int) -> Memory:
    """The bytes of a filled cache, as it counts them."""
    if arm.policy is None:
        held = own_bytes(cache)
        return Memory(context_tokens=tokens, payload_bytes=held, metadata_bytes=0, tail_bytes=0, allocated_bytes=held)
    footprint = cache.footprint()
    return Memory(
        context_tokens=tokens,
        payload_bytes=footprint.payload_bytes,
        metadata_bytes=footprint.metadata_bytes,
        tail_bytes=footprint.raw_bytes,
        allocated_bytes=footprint.allocated_bytes,
    )


def time_cache(arm: Arm, cache: Any, context_tokens: int, budget: Budget) -> Speed:
    """Time prefill chunks and decode steps on a filled cache, after an unmeasured one of each. Each run adds to the context."""
    prompt = [1 + i % 1000 for i in range(budget.prefill_tokens)]
    feed(arm, cache, prompt[:_WARM_TOKENS])
    feed(arm, cache, prompt[:1])
    prefills = [_seconds(arm, cache, prompt) / len(prompt) for _ in range(budget.prefill_runs)]
    decodes = [_seconds(arm, cache, prompt[i : i + 1]) for i in range(budget.decode_steps)]
    return Speed(
        context_tokens=context_tokens,
        prefill_tokens_per_second=_rates(prefills),
        decode_tokens_per_second=_rates(decodes),
        prefill_runs=len(prefills),
        decode_steps=len(decodes),
    )


def _seconds(arm: Arm, cache: Any, tokens: Sequence[int]) -> float:
    _synchronize(arm)
    begun = time.perf_counter()
    feed(arm, cache, tokens)
    _synchronize(arm)
    return time.perf_counter() - begun


def _synchronize(arm: Arm) -> None:
    if arm.model.device.type == "cuda":
        torch.cuda.synchronize(arm.model.device)


def _rates(seconds_per_token: Sequence[float]) -> tuple[float, float, float]:
    """Tokens per second: median, slowest, fastest."""
    return 1 / median(seconds_per_token), 1 / max(seconds_per_token), 1 / min(seconds_per_token)


class SpeedStage:
    """Runs the contexts one after another, every arm in turn, so that what disturbs the machine meets all alike."""

    def __init__(self, arms: Sequence[Arm], budget: Budget) -> None:
        self.arms, self.budget = arms, budget
        self._speed: dict[tuple[int, str], Speed] = {}
        self._memory: dict[tuple[int, str], Memory] = {}

    def steps(self) -> Iterator[Step]:
        """One for each context and arm."""
        budget = self.budget
        for context in budget.speed_contexts:
            timed = budget.prefill_tokens * budget.prefill_runs + (budget.decode_steps + 2) * _DECODE_COST_TOKENS
            for arm in self.arms:
                yield Step(
                    _STAGE,
                    f"{context} tokens, {arm.name}",
                    timed + int(context * _FILL_COST),
                    self._timer(arm, context),
                    arm,
                )

    def _timer(self, arm: Arm, context: int) -> Any:
        def run() -> None:
            cache = filled_cache(arm, context)
            self._memory[context, arm.name] = weigh(arm, cache, context)
            self._speed[context, arm.name] = time_cache(arm, cache, context, self.budget)

        return run

    def results(self, broken: Collection[str]) -> dict[str, tuple[Speed, ...]]:
        """By arm, over the contexts that every arm was timed at but those named in `broken`."""
        whole = [arm.name for arm in self.arms if arm.name not in broken]
        done = [c for c in self.budget.speed_contexts if all((c, name) in self._speed for name in whole)]
        return {
            arm.name: tuple(self._speed[c, arm.name] for c in done if (c, arm.name) in self._speed) for arm in self.arms
        }

    def memory(self, arm: Arm) -> tuple[Memory, ...]:
        """Of an arm, at every context it was weighed at."""
        return tuple(self._memory[c, arm.name] for c in self.budget.speed_contexts if (c, arm.name) in self._memory)
