"""The engine as others use it: handed requests from any thread or event loop, refused, aborted, drained, and told when it breaks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny

from kvarto.engine.engine import Ask, Engine, parse_bytes
from kvarto.engine.loop import Delta
from kvarto.engine.request import Finish, Sampling
from kvarto.errors import EngineClosed, Overloaded, UnknownName, UsageError
from kvarto.models.load import LoadedModel

TOKENS = tiny.prompt(70)["input_ids"][0].tolist()
SHORT = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
ENDLESS = Sampling(max_tokens=900, temperature=0, ignore_eos=True)


def make(**options: Any) -> Engine:
    loaded = LoadedModel(tiny.model("llama"), None, "tiny", "tiny", Path())
    return Engine(loaded, kv="int4", also=["fp32"], memory="8MiB", **{"step_tokens": 128, "most_running": 4} | options)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make() as made:
        yield made


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def held(engine: Engine) -> int:
    return engine.core.memory.prefixes.held_bytes


class Listener:
    """Deltas of a request, and whether it is over."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.over = threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish is not None:
            self.over.set()


def test_many_threads_get_what_one_gets(engine: Engine) -> None:
    (expected,) = engine.generate([TOKENS], SHORT)
    results: dict[int, Any] = {}

    def ask(i: int) -> None:
        results[i] = engine.generate([TOKENS, TOKENS[i:]], SHORT, kv="fp32" if i % 2 else None)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(results[i][0].tokens == expected.tokens for i in (0, 2, 4))
    assert {results[i][0].kv for i in range(6)} == {"int4", "fp32"}
    assert expected.finish is Finish.LENGTH
    assert (expected.prompt_tokens, len(expected.tokens)) == (len(TOKENS), 8)
    assert held(engine) == 0


def test_event_loops_get_tokens_as_they_come(engine: Engine) -> None:
    async def listen(length: int) -> list[Delta]:
        return [delta async for delta in engine.stream(Ask(TOKENS[:length], SHORT))]

    async def both() -> list[list[Delta]]:
        return await asyncio.gather(listen(70), listen(40))

    for deltas in asyncio.run(both()):
        assert [len(delta.choices) for delta in deltas] == [1] * 8
        assert [delta.finish for delta in deltas] == [None] * 7 + [Finish.LENGTH]


def test_who_stops_listening_ends_the_request(engine: Engine) -> None:
    async def listen_to_three() -> None:
        count = 0
        stream = engine.stream(Ask(TOKENS, ENDLESS))
        async for _ in stream:
            count += 1
            if count == 3:
                assert held(engine) > 0
                break
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(listen_to_three())
    wait_for(lambda: held(engine) == 0 and engine.core.idle)


def test_an_aborted_request_is_told_nothing_more(engine: Engine) -> None:
    listener = Listener()
    ticket = engine.submit(Ask(TOKENS, ENDLESS), listener)
    wait_for(lambda: len(listener.deltas) > 2)
    engine.abort(ticket)
    wait_for(lambda: engine.core.idle)
    count = len(listener.deltas)
    engine.generate([TOKENS], SHORT)
    assert len(listener.deltas) == count
    assert not listener.over.is_set()
    engine.abort(ticket)  # once more does no harm


def test_several_answers_to_one_prompt_compute_it_once(engine: Engine) -> None:
    listeners = [Listener() for _ in range(3)]
    prompt = (TOKENS * 3)[:200]
    samplings = [Sampling(max_tokens=5, seed=i, ignore_eos=True) for i in range(3)]
    tickets = engine.submit_many([Ask(prompt, sampling) for sampling in samplings], listeners)
    assert all(listener.over.wait(30) for listener in listeners)
    assert [ticket.request.cached_tokens for ticket in tickets] == [0, 192, 192]


def test_followers_of_an_aborted_request_go_on(engine: Engine) -> None:
    listeners = [Listener() for _ in range(3)]
    tickets = engine.submit_many([Ask(TOKENS, SHORT)] * 3, listeners)
    engine.abort(tickets[0])
    engine.abort(tickets[1])
    assert listeners[2].over.wait(30)
    assert listeners[2].deltas[-1].finish is Finish.LENGTH
    wait_for(lambda: engine.core.idle and engine._loop._handed == 0)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (Ask(TOKENS, SHORT, kv="int8"), UnknownName, "kv_format: expected one of fp32, int4, got 'int8'"),
        (Ask(TOKENS, SHORT, kv="itn4"), UnknownName, "did you mean int4"),
        (Ask([], SHORT), UsageError, "prompt: expected at least one token"),
        (Ask([1] * 1020, SHORT), UsageError, "max_tokens: expected at most 1024 tokens together with the prompt"),
        (Ask(TOKENS, Sampling(stop=("x",))), UsageError, "stop: expected no stop strings"),
    ],
)
def test_requests_that_are_refused(engine: Engine, ask: Ask, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.submit(ask, Listener())
    assert engine.core.idle


def test_no_more_wait_than_may() -> None:
    with make(most_waiting=2, most_running=1) as engine:
        first = Listener()
        engine.submit(Ask(TOKENS, ENDLESS), first)
        wait_for(lambda: len(first.deltas) > 0)
        for _ in range(2):
            engine.submit(Ask(TOKENS, SHORT), Listener())
        with pytest.raises(Overloaded, match="2 requests wait already, of 2 at most"):
            engine.submit(Ask(TOKENS, SHORT), Listener())
        with pytest.raises(UsageError, match="n: expected at most 2 requests at once"):
            engine.submit_many([Ask(TOKENS, SHORT)] * 3, [Listener()] * 3)


def test_closing_ends_what_runs_and_draining_does_not() -> None:
    engine, listener = make(), Listener()
    engine.submit(Ask(TOKENS, ENDLESS), listener)
    engine.close()
    assert listener.over.wait(5)
    assert listener.deltas[-1].finish is Finish.ABORT
    with pytest.raises(EngineClosed, match="takes no more requests"):
        engine.submit(Ask(TOKENS, SHORT), listener)
    engine, listener = make(), Listener()
    engine.submit(Ask(TOKENS, SHORT), listener)
    engine.close(drain=True)
    assert listener.deltas[-1].finish is Finish.LENGTH


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_ours_is_told_to_everybody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down() -> None:
        raise AssertionError("books")

    monkeypatch.setattr(engine.core, "step", break_down)
    listeners = [Listener() for _ in range(3)]
    engine.submit_many([Ask(TOKENS, SHORT)] * 3, listeners)
    for listener in listeners:
        assert listener.over.wait(30)
        assert listener.deltas[-1].finish is Finish.ERROR
        assert listener.deltas[-1].error == "the engine stopped: AssertionError: books"
    with pytest.raises(EngineClosed, match="the engine stopped: AssertionError: books"):
        engine.submit(Ask(TOKENS, SHORT), Listener())


def test_a_listener_whose_loop_is_gone_does_no_harm(engine: Engine) -> None:
    def gone(_: Delta) -> None:
        raise RuntimeError("Event loop is closed")

    engine.submit(Ask(TOKENS, SHORT), gone)
    wait_for(lambda: engine.core.idle)
    assert len(engine.generate([TOKENS], SHORT)[0].tokens) == 8


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("512M", 512 << 20),
        ("512 MiB", 512 << 20),
        ("4GB", 4 * 10**9),
        ("1.5KiB", 1536),
        (1000, 1000),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "0", "8 parsecs", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="memory: expected a size such as 8GiB"):
        parse_bytes(text)
