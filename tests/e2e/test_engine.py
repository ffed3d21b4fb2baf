"""The engine computes for each request what the model computes for it alone: in a crowd, in chunks, on a prefix hit, after preemption, in any mix of
formats. Freed memory is NaN throughout, so whoever read a page that is not his would show it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny
import torch

import kvarto
from kvarto.engine import core as core_module
from kvarto.engine.core import EngineCore, Options, Output
from kvarto.engine.graphs import Graphs
from kvarto.engine.plan import Shape, StepPlan
from kvarto.engine.probe import Probing
from kvarto.engine.request import Finish, Request, Sampling
from kvarto.engine.sampling import Choice
from kvarto.engine.scheduler import Work
from kvarto.errors import Unsupported, UsageError
from kvarto.formats import parse_policy

FORMATS = ["fp32", "int8", "int4", "kivi2", "int4+window64", "int4/int8+sink0", "int4+skip=0,-1"]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)
SMALL = 1 << 19  # holds a few hundred tokens of a tiny model
ROOMY = 1 << 23
# Log probabilities of a tiny float32 model. Sums in another order change them, and keys and values, a little; but a number that lies where two codes
# meet may then get the other one. Who reads a page that is not his finds NaN, or another prefix.
CLOSE = {"fp32": 2e-4, "int8": 2e-3}
CLOSE_BELOW_8_BITS = 3e-2


def core(family: str, *formats: str, memory: int = ROOMY, step_tokens: int = 96, **options: Any) -> EngineCore:
    chosen = Options(memory, step_tokens, most_running=8, poison=True, **options)
    return EngineCore(tiny.model(family), [parse_policy(text) for text in formats], chosen)


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = tiny.prompt(length, seed=1000 * seed + length)["input_ids"][0].tolist()
    return tokens


def drive(engine: EngineCore, requests: Sequence[Request]) -> dict[Request, list[Choice]]:
    """Add all, step until nobody is left, and check the books after each step."""
    for request in requests:
        engine.add(request)
    outputs: list[Output] = []
    for _ in range(10_000):
        if engine.idle:
            break
        outputs += engine.step()
        engine.check()
    assert engine.idle
    assert not [output.error for output in outputs if output.error]
    assert engine.memory.prefixes.held_bytes == 0
    return {r: [o.choice for o in outputs if o.request is r and o.choice is not None] for r in requests}


@cache
def alone(family: str, text: str, tokens: tuple[int, ...], most: int = GREEDY.max_tokens) -> list[Choice]:
    """What a request gives that has the engine for itself."""
    request = Request("alone", list(tokens), Sampling(max_tokens=most, temperature=0, ignore_eos=True, logprobs=3))
    return drive(core(family, text, step_tokens=512), [request])[request]


def assert_same(text: str, got: Sequence[Choice], expected: Sequence[Choice]) -> None:
    close = CLOSE.get(text, CLOSE_BELOW_8_BITS)
    assert [choice.token for choice in got] == [choice.token for choice in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=close)
        assert [log for _, log in one.top] == pytest.approx([log for _, log in other.top], abs=close)


# ---- the same numbers on every path ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["fp32", "int4"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_engine_agrees_with_generate(family: str, text: str) -> None:
    tokens = prompt(150)
    model = tiny.model(family)
    out = model.generate(
        torch.tensor([tokens]), cache=kvarto.Cache(model, text), max_new_tokens=GREEDY.max_tokens, do_sample=False
    )
    assert [choice.token for choice in alone(family, text, tuple(tokens))] == out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.slow), "gemma3_text"])
def test_in_a_crowd_in_chunks_and_on_a_prefix_hit(family: str, text: str) -> None:
    engine = core(family, text)
    prompts = [prompt(length) for length in (1, 63, 64, 65, 130, 300)]
    first = drive(engine, requests := [Request(str(i), list(p), GREEDY) for i, p in enumerate(prompts)])
    for request, tokens in zip(requests, prompts, strict=True):
        assert_same(text, first[request], alone(family, text, tuple(tokens)))
        assert request.cached_tokens == 0
    again = drive(engine, requests := [Request(str(i), list(p), GREEDY) for i, p in enumerate(prompts)])
    for request, tokens in zip(requests, prompts, strict=True):
        assert_same(text, again[request], alone(family, text, tuple(tokens)))
        assert request.cached_tokens == (len(tokens) - 1) // 64 * 64


@pytest.mark.parametrize("text", ["fp32", "int4"])
def test_prompts_that_make_room_for_others_give_the_same(text: str) -> None:
    """A pace that nobody can keep: prompts get the least share of each step in which somebody generates, and all of the others."""
    engine = core("llama", text, step_seconds=1e-6)
    first, long = Request("first", prompt(70), GREEDY), Request("long", prompt(300), GREEDY)
    steps, outputs = list[tuple[int, int]](), list[Output]()
    engine.on_step.append(lambda prompts, decodes, _: steps.append((prompts, decodes)))
    engine.add(first)
    outputs += engine.step()
    engine.add(long)
    while not engine.idle:
        outputs += engine.step()
        engine.check()
    assert {prompts for prompts, decodes in steps if decodes} == {0, 16}
    assert max(prompts for prompts, decodes in steps if not decodes) == 96
    for request in (first, long):
        got = [output.choice for output in outputs if output.request is request and output.choice is not None]
        assert_same(text, got, alone("llama", text, tuple(request.tokens[: request.prompt_tokens])))


@pytest.mark.parametrize("found_again", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", FORMATS)
def test_after_preemption(text: str, found_again: bool) -> None:
    """At any place of a page, while the prompt is computed and afterwards; with pages that are still there, and with none."""
    engine, most = core("qwen2", text), Sampling(max_tokens=70, temperature=0, ignore_eos=True, logprobs=3)
    # In some other texts a code lies so near an edge that decode and prefill round it apart: .034 in log probabilities of int4, .008 of int8.
    requests = [Request(str(i), prompt(90 + i, seed=18 + i), most) for i in range(3)]
    got: dict[Request, list[Choice]] = {request: [] for request in requests}
    for request in requests:
        engine.add(request)
    rng = random.Random(1)
    while not engine.idle:
        for output in engine.step():
            assert output.choice is not None
            got[output.request].append(output.choice)
        for request in [request for request in engine.scheduler.running if rng.random() < 0.1]:
            engine.scheduler.preempt(request)
        if not found_again:
            forget(engine)
        engine.check()
    assert engine.scheduler.preemptions > 5
    for request in requests:
        assert_same(
            text, got[request], alone("qwen2", text, tuple(request.tokens[: request.prompt_tokens]), most.max_tokens)
        )


def forget(engine: EngineCore) -> None:
    """Drop everything that nobody holds, as if others had wanted the memory."""
    prefixes = engine.memory.prefixes
    for idle in prefixes._idle:
        for piece in list(idle.values()):
            prefixes._drop(piece)


def test_several_formats_in_one_step_and_one_budget() -> None:
    texts = ["int4", "fp32", "kivi2"]
    engine = core("gemma3_text", *texts)
    tokens = prompt(200)
    requests = [Request(str(i), list(tokens), GREEDY, policy=i % 3) for i in range(6)]
    got = drive(engine, requests)
    for request in requests:
        assert_same(texts[request.policy], got[request], alone("gemma3_text", texts[request.policy], tuple(tokens)))


def test_a_later_request_jumps_to_where_an_earlier_one_is() -> None:
    engine = core("llama", "int4", step_tokens=64)
    tokens = prompt(400)
    first, second = Request("a", list(tokens), GREEDY), Request("b", list(tokens), GREEDY)
    engine.add(first)
    for _ in range(3):
        engine.step()
    got = drive(engine, [second])
    assert_same("int4", got[second], alone("llama", "int4", tuple(tokens)))
    assert second.cached_tokens > 3 * 64


def test_tenants_do_not_share_prefixes() -> None:
    engine = core("llama", "int4")
    tokens = prompt(200)
    requests = [Request(name, list(tokens), GREEDY, identity=name) for name in ("a", "b", "a")]
    for request in requests:
        drive(engine, [request])
    assert [request.cached_tokens for request in requests] == [0, 0, 192]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_random_traffic_finds_no_corruption(seed: int) -> None:
    """Arrivals with shared prefixes, aborts, priorities and two formats in memory that is much too small; every other time all are probed as well."""
    # Float32 pages show whether the books are right to the last digit; the others whether codes are.
    rng, texts = random.Random(seed), ["int4", "int8"] if seed < 2 else ["fp32", "int4"]
    family = ["qwen2", "gemma3_text"][seed % 2]
    step_tokens, probe = rng.choice([64, 96, 200]), Probing(seed % 2)
    engine = core(family, *texts, memory=SMALL, step_tokens=step_tokens, probe=probe)
    stems = [prompt(length, seed=length) for length in (64, 130, 200)]
    requests: list[Request] = []
    got: dict[Request, list[Choice]] = {}
    while len(requests) < 40 or not engine.idle:
        if len(requests) < 40 and rng.random() < 0.4:
            tokens = rng.choice(stems)[: rng.randrange(1, 200)] + prompt(rng.randrange(1, 60), seed=rng.randrange(3))
            most = Sampling(max_tokens=rng.choice([1, 5, 40]), temperature=0, ignore_eos=True, logprobs=3)
            request = Request(str(len(requests)), tokens, most, policy=rng.randrange(2), priority=rng.randrange(2))
            requests.append(request)
            got[request] = []
            engine.add(request)
        if rng.random() < 0.05 and engine.scheduler.running:
            engine.abort(rng.choice(engine.scheduler.running))
        for output in engine.step():
            assert not output.error
            assert output.choice is not None
            got[output.request].append(output.choice)
        engine.check()
    assert engine.scheduler.preemptions or engine.memory.prefixes.dropped
    assert engine.memory.prefixes.held_bytes == 0
    assert engine.probe is None or engine.probe.outcomes
    for request in requests:
        expected = alone(
            family, texts[request.policy], tuple(request.tokens[: request.prompt_tokens]), request.sampling.max_tokens
        )
        assert_same(texts[request.policy], got[request], expected[: len(got[request])])
        assert (request.finish is Finish.ABORT) == (len(got[request]) < request.sampling.max_tokens)


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd() -> None:
    sampling = Sampling(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    engine = core("llama", "int8")
    one = Request("one", prompt(70), sampling)
    drive(engine, [one])
    crowd = [Request(str(i), prompt(70 + i), sampling) for i in range(4)]
    drive(engine, crowd)
    assert crowd[0].generated == one.generated
    other = Request("other", prompt(70), Sampling(max_tokens=20, temperature=1.0, top_p=0.9, seed=8, ignore_eos=True))
    drive(engine, [other])
    assert other.generated != one.generated


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_one_request_with_nan_does_not_end_the_others() -> None:
    engine = core("llama", "int4")
    engine.forward.model.get_input_embeddings().weight.data[5] = torch.nan
    healthy = [token if token != 5 else 6 for token in prompt(130)]
    good, bad = Request("good", list(healthy), GREEDY), Request("bad", [*healthy[:40], 5, *healthy[40:]], GREEDY)
    engine.add(good)
    engine.add(bad)
    outputs = []
    while not engine.idle:
        outputs += engine.step()
        engine.check()
    assert [output.error for output in outputs if output.request is bad and output.finish] == [
        "keys or values were not finite; check the model's weights"
    ]
    assert bad.finish is Finish.ERROR
    assert len(good.generated) == GREEDY.max_tokens
    assert_same(
        "int4", [o.choice for o in outputs if o.request is good and o.choice], alone("llama", "int4", tuple(healthy))
    )


def test_nan_in_a_decode_step_leaves_the_others_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core("llama", "int4")
    requests = [Request(str(i), prompt(60 + i, seed=i), GREEDY) for i in range(3)]
    for request in requests:
        engine.add(request)
    got: dict[Request, list[Choice]] = {request: [] for request in requests}
    outputs = [engine.step() for _ in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(core_module, "_broken", lambda plan, _: [w for w in plan.works if w.request is requests[0]])
        outputs.append(engine.step())
    while not engine.idle:
        outputs.append(engine.step())
        engine.check()
    for output in [output for step in outputs for output in step if output.choice is not None]:
        got[output.request].append(output.choice)
    assert requests[0].finish is Finish.ERROR
    for request in requests[1:]:
        tokens = tuple(request.tokens[: request.prompt_tokens])
        assert_same("int4", got[request], alone("llama", "int4", tokens))


@pytest.mark.parametrize(("family", "text"), [("llama", "int4"), ("gemma3_text", "int8+window64")])
def test_a_step_padded_for_a_graph_gives_everybody_the_same(family: str, text: str) -> None:
    engine, padded = core(family, text), list[int]()

    class Padding(Graphs):
        """Decode steps in the shape of a graph, which are then run without one."""

        def shape_of(self, works: Sequence[Work]) -> Shape | None:
            return Shape(0, len(works) + 2, 64) if all(work.count == 1 for work in works) else None

        def run(self, plan: StepPlan) -> None:
            padded.append(len(plan.works))

    engine.graphs = Padding(engine.forward, engine.memory, engine.device, None)
    requests = [Request(str(i), prompt(60 + 2 * i, seed=i), GREEDY) for i in range(3)]
    got = drive(engine, requests)
    assert len(padded) > GREEDY.max_tokens // 2
    for request in requests:
        tokens = tuple(request.tokens[: request.prompt_tokens])
        assert_same(text, got[request], alone(family, text, tokens))


def test_what_is_said_to_fit_runs_to_its_end_with_a_window_too() -> None:
    for text in ("int4+sink64+window128", "int4", "int8"):
        engine = core("gemma3_text", text, memory=SMALL, step_tokens=256)
        most = min(engine.memory.capacity_tokens(0), 1000)
        request = Request("whole", prompt(most - 3), Sampling(max_tokens=3, temperature=0, ignore_eos=True))
        drive(engine, [request])
        assert len(request.tokens) == most


def test_a_guide_that_fails_ends_its_request_and_no_other() -> None:
    class Broken:
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("no rule")

        def accept(self, token: int) -> None: ...

    engine = core("llama", "int4")
    good, bad = Request("good", prompt(100), GREEDY), Request("bad", prompt(90), GREEDY, guide=Broken())
    engine.add(bad)
    engine.add(good)
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    assert [(o.request, o.error) for o in outputs if o.error] == [(bad, "ZeroDivisionError: no rule")]
    assert_same(
        "int4",
        [o.choice for o in outputs if o.request is good and o.choice],
        alone("llama", "int4", tuple(prompt(100))),
    )


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core("llama", "int4")
    run = engine.forward.run

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.forward, "run", fail)
    lost = Request("lost", prompt(100), GREEDY)
    engine.add(lost)
    (output,) = engine.step()
    assert (output.finish, output.error) == (Finish.ERROR, "RuntimeError: out of memory")
    engine.check()
    assert engine.memory.prefixes.held_bytes == 0
    monkeypatch.setattr(engine.forward, "run", run)
    request = Request("next", prompt(100), GREEDY)
    assert_same("int4", drive(engine, [request])[request], alone("llama", "int4", tuple(prompt(100))))


def test_a_request_that_finds_no_room_ends_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core("llama", "int4")
    monkeypatch.setattr(engine.memory.prefixes, "take", lambda _: None)
    request = Request("unlucky", prompt(100), GREEDY)
    engine.add(request)
    outputs = [output for _ in range(5) for output in engine.step()]
    assert [(output.request, output.finish) for output in outputs] == [(request, Finish.ERROR)]
    assert engine.idle
    assert engine.step() == []


@pytest.mark.parametrize(
    ("tokens", "most", "message"),
    [
        ([5, 999], 5, "prompt: expected tokens from 0 to 191, got 999"),
        ([5] * 1000, 100, "max_tokens: expected at most 1024 tokens together with the prompt, got a prompt of 1000 and max_tokens 100"),
        ([5] * 900, 100, "max_tokens: expected a request that fits the memory, got 1000 tokens need"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_served(tokens: list[int], most: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        core("llama", "fp32", memory=SMALL).add(Request("big", tokens, Sampling(max_tokens=most)))


def test_models_that_cannot_be_flattened_are_refused() -> None:
    with pytest.raises(Unsupported, match="recurrent state, which flattened batches would mix up"):
        core("qwen3_next", "int4")


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="memory: expected at least"):
        core("llama", "int4", memory=1 << 16)
