"""Who goes on: generation before prompts, budgets, ranks, and that everybody is served in the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.cache.arena import UNIT_BYTES, Arena
from kvarto.cache.prefix import PrefixCache
from kvarto.engine.holding import Group, Holding, Scratch
from kvarto.engine.pace import Pace
from kvarto.engine.request import Request, Sampling
from kvarto.engine.scheduler import Scheduler, Work
from kvarto.rule import Rule

S = 4
GROUP = Group(Rule(S, sink_pages=1), raw=0, sealed=1)


class Engine:
    """A scheduler with books; the model always says 7."""

    def __init__(
        self, blocks: int = 64, step_tokens: int = 16, most_running: int = 4, pace: Pace | None = None, checked: bool = True,
    ) -> None:  # fmt: skip
        self.step_tokens, self.checked = step_tokens, checked
        self.cache = PrefixCache(Arena(blocks * UNIT_BYTES, [UNIT_BYTES, UNIT_BYTES]))
        self.scheduler = Scheduler(
            self.begin, lambda: self.cache.released, step_tokens=step_tokens, most_running=most_running, pace=pace
        )
        self.done: list[str] = []

    def begin(self, request: Request) -> Holding:
        return Holding(self.cache, None, [GROUP])

    def add(self, name: str, prompt: int, most: int = 4, priority: int = 0) -> Request:
        request = Request(name, [ord(name[0])] * prompt, Sampling(max_tokens=most), priority=priority)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        works: list[Work] = self.scheduler.schedule()
        scratch = Scratch(10_000, {0: 1}, max(64, self.step_tokens))
        for work in works:
            work.request.holding.plan(scratch)
        for work in works:
            samples = work.samples
            work.request.holding.commit(work.request.tokens)
            if samples:
                work.request.tokens.append(7)
                if len(work.request.tokens) == work.request.most_tokens:
                    self.scheduler.remove(work.request)
                    self.done.append(work.request.id)
        if self.checked:
            self.cache.check()
        return {work.request.id: work.count for work in works}

    def finish(self) -> list[str]:
        for _ in range(10_000):
            if not self.scheduler.running and not self.scheduler.waiting:
                return self.done
            assert self.step(), "nobody goes on"
        raise AssertionError("it never ends")


def test_generation_comes_before_prompts_which_take_what_is_left() -> None:
    engine = Engine()
    engine.add("a", 5)
    assert engine.step() == {"a": 5}
    engine.add("b", 40)
    assert engine.step() == {"a": 1, "b": 15}
    assert engine.step() == {"a": 1, "b": 15}
    engine.add("c", 3)
    assert engine.step() == {"a": 1, "b": 10, "c": 3}


def test_priorities_then_the_order_of_arrival() -> None:
    engine = Engine(most_running=1)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -1)):
        engine.add(name, 5, most=1, priority=priority)
    assert engine.finish() == ["d", "a", "c", "b"]


def test_no_more_run_than_may() -> None:
    engine = Engine(most_running=2)
    for name in "abc":
        engine.add(name, 2)
    assert engine.step() == {"a": 2, "b": 2}


def test_the_lowest_rank_makes_room() -> None:
    engine = Engine(blocks=12)
    low = engine.add("low", 10, most=30, priority=1)
    while low.holding is None or low.holding.length < 20:
        engine.step()
    high = engine.add("high", 10, most=25)
    engine.finish()
    assert engine.done == ["high", "low"]
    assert (low.preemptions > 0, high.preemptions) == (True, 0)


def test_nobody_overtakes_the_first_that_waits() -> None:
    engine = Engine(blocks=16, most_running=8)
    engine.add("a", 16, most=20)
    while engine.scheduler.running == [] or engine.scheduler.running[0].holding.length < 30:
        engine.step()
    engine.add("big", 16)
    engine.add("tiny", 1)
    counts = engine.step()
    assert "tiny" not in counts or "big" in counts


def test_who_leaves_gives_everything_back() -> None:
    engine = Engine()
    requests = [engine.add(name, 20) for name in "abcde"]
    engine.step()
    for request in requests:
        engine.scheduler.remove(request)
        engine.scheduler.remove(request)
    assert (engine.scheduler.running, engine.scheduler.waiting) == ([], [])
    assert engine.cache.held_bytes == 0


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=12),
    blocks=st.integers(28, 60),
    step_tokens=st.integers(4, 20),
)
def test_everybody_is_served_in_the_end(requests: list[tuple[int, int, int]], blocks: int, step_tokens: int) -> None:
    engine = Engine(blocks, step_tokens, most_running=4)
    for i, (prompt, most, priority) in enumerate(requests):
        engine.add(f"{chr(97 + i)}", prompt, most, priority)
    assert sorted(engine.finish()) == sorted(chr(97 + i) for i in range(len(requests)))
    assert engine.cache.held_bytes == 0


@pytest.mark.parametrize("found_first", [True, False])
def test_cached_tokens_are_counted_once_and_never_after_preemption(found_first: bool) -> None:
    engine = Engine()
    if found_first:
        engine.add("a", 20, most=1)
        engine.finish()
    request = engine.add("a", 20, most=9)
    engine.step()
    engine.scheduler.preempt(request)
    engine.finish()
    assert request.cached_tokens == (16 if found_first else 0)


def test_prompts_that_are_scored_do_not_keep_others_waiting() -> None:
    engine = Engine(step_tokens=16)
    engine.scheduler._most_scored = 3
    scored = Sampling(max_tokens=1, prompt_logprobs=0)
    for name in "ab":
        engine.scheduler.add(Request(name, [ord(name)] * 12, scored))
    engine.add("plain", 5)
    assert engine.step() == {"a": 3, "plain": 5}
