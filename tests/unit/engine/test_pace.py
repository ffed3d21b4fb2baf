"""A step in which somebody generates takes about what it should: with a clock that counts what a made machine would take."""

from __future__ import annotations

import pytest
from test_scheduler import Engine

from kvarto.engine.pace import Pace

TARGET_SECONDS = 0.3


class Machine:
    """An engine whose steps take so many seconds for each token, and some for being there."""

    def __init__(
        self, pace: Pace, *, prompt_token: float = 0.004, generating: float = 0.02, step: float = 0.03, mixed: float = 0.0
    ) -> None:  # fmt: skip
        self.pace, self.costs = pace, (step, prompt_token, generating, mixed)
        self.now = 0.0
        pace.clock = lambda: self.now
        self.engine = Engine(4000, step_tokens=512, most_running=16, pace=pace, checked=False)
        self.seconds: list[float] = []  # of steps in which somebody generates and a prompt is read
        self.chunks: list[int] = []

    def step(self, disturbed: float = 0.0) -> dict[str, int]:
        generating = sum(
            request.generated_tokens > 0 and request.missing == 1 for request in self.engine.scheduler.running
        )
        counts = self.engine.step()
        prompts = sum(counts.values()) - generating
        step, prompt_token, each, mixed = self.costs
        seconds = step + prompt_token * prompts + each * generating + mixed * bool(prompts and generating) + disturbed
        if prompts and generating:
            self.seconds.append(seconds)
            self.chunks.append(prompts)
        self.pace.took(prompts, generating, seconds)
        self.now += seconds
        return counts

    def until_read(self, name: str, tokens: int) -> int:
        """Steps that it takes to read a prompt of somebody who comes now."""
        request = self.engine.add(name, tokens, most=400)
        steps = 0
        while not request.generated_tokens:
            self.step()
            steps += 1
            assert steps < 2000, "a prompt is never read"
        return steps


def test_a_lone_prompt_is_read_in_full_chunks() -> None:
    machine = Machine(Pace(TARGET_SECONDS))
    assert machine.until_read("a", 2048) == 4


@pytest.mark.parametrize("off", [None, 0, 0.0])
def test_without_a_target_nothing_is_held_back(off: float | None) -> None:
    machine = Machine(Pace(off))
    machine.until_read("a", 600)
    machine.until_read("b", 2000)
    assert machine.chunks[:3] == [511, 511, 511]


def test_steps_of_those_who_generate_take_what_they_should() -> None:
    machine = Machine(Pace(TARGET_SECONDS))
    machine.until_read("a", 600)
    for _ in range(5):
        machine.step()
    machine.until_read("b", 900)
    assert all(abs(seconds / TARGET_SECONDS - 1) < 0.1 for seconds in machine.seconds[1:-1])
    machine.seconds.clear()
    for name in "cdefg":  # more and more generate
        machine.until_read(name, 800)
    assert max(machine.seconds) < 1.5 * TARGET_SECONDS
    assert sorted(machine.seconds)[len(machine.seconds) // 2] < 1.1 * TARGET_SECONDS


def test_what_disturbs_one_step_changes_nothing_for_long() -> None:
    machine = Machine(Pace(TARGET_SECONDS))
    machine.engine.add("a", 1500, most=400)
    machine.step(disturbed=30.0)  # a kernel is compiled
    machine.until_read("b", 900)
    machine.engine.add("c", 3000, most=400)
    for _ in range(6):
        machine.step()
    before = machine.chunks[-1]
    machine.step(disturbed=5.0)
    machine.now -= 5.0  # nobody gets more for it
    machine.step()
    assert abs(machine.chunks[-1] / before - 1) < 0.2


def test_where_generation_alone_takes_too_long_prompts_still_end() -> None:
    machine = Machine(Pace(TARGET_SECONDS), generating=0.5)
    machine.until_read("a", 100)
    for _ in range(3):
        machine.step()
    steps = machine.until_read("b", 160)
    assert steps <= 160 / 16 * 17 / 16 + 2
    assert max(machine.seconds[1:]) < 0.53 + TARGET_SECONDS  # and others do not wait for all of it


def test_a_fixed_price_of_reading_prompts_does_not_stop_them() -> None:
    """On a GPU: a step that reads a prompt is not replayed, and takes long however few tokens it has."""
    machine = Machine(Pace(0.05), prompt_token=4e-5, generating=1e-4, step=0.02, mixed=0.04)
    machine.until_read("a", 100)
    for _ in range(3):
        machine.step()
    assert machine.until_read("b", 1000) <= 70
    roomy = Machine(Pace(TARGET_SECONDS), prompt_token=4e-5, generating=1e-4, step=0.02, mixed=0.04)
    roomy.until_read("a", 100)
    for _ in range(3):
        roomy.step()
    roomy.until_read("b", 5000)
    assert roomy.chunks[-2] == 511  # nothing is held back where time is not short


def test_who_generates_is_seen_alone_now_and_then() -> None:
    machine = Machine(Pace(TARGET_SECONDS))
    machine.until_read("a", 600)
    request = machine.engine.add("b", 4000, most=400)
    without = 0
    while not request.generated_tokens:
        without += "b" not in machine.step()
    assert without == (len(machine.chunks) - 1) // 16 > 0


def test_who_sends_more_than_the_machine_can_do_finds_no_prompt_that_is_never_read() -> None:
    """Two requests a second of 400 tokens, 1.6 s of work each: first tokens come later and later, but as they would without a pace."""
    ends = {}
    for pace in (Pace(TARGET_SECONDS), Pace(None)):
        machine, came = Machine(pace), 0
        while machine.now < 60:
            while came < 0.5 * machine.now:
                machine.engine.add(f"{chr(97 + came)}", 400, most=20)
                came += 1
            machine.step()
        ends[pace] = len(machine.engine.done), max(machine.seconds)
    (paced, longest), (unpaced, unpaced_longest) = ends.values()
    assert paced >= 0.8 * unpaced
    assert longest < 0.6 * unpaced_longest


def test_a_prompt_that_waited_long_gets_more_of_a_step() -> None:
    machine = Machine(Pace(TARGET_SECONDS))
    machine.until_read("a", 600)
    for _ in range(5):
        machine.step()
    machine.engine.add("b", 2000, most=400)
    machine.now += 30
    machine.step()
    machine.step()
    assert machine.chunks[-1] == pytest.approx(0.75 / 0.004, rel=0.1)
