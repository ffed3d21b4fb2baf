"""Log probabilities of a prompt are those of one forward pass of transformers: in chunks, in a crowd, with the prefix cached, after preemption."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny
import torch

import kvarto
from kvarto.engine.core import EngineCore, Options, Output
from kvarto.engine.request import Finish, Request, Sampling
from kvarto.engine.sampling import Choice
from kvarto.formats import parse_policy

TOP = 4
# Of a float32 model whose sums are added in another order by another implementation of attention.
CLOSE = 1e-3


def core(family: str, text: str = "fp32", step_tokens: int = 96) -> EngineCore:
    return EngineCore(
        tiny.model(family), [parse_policy(text)], Options(1 << 23, step_tokens, most_running=8, poison=True)
    )


def asking(name: str, tokens: Sequence[int], most: int = 0) -> Request:
    return Request(name, list(tokens), Sampling(max_tokens=most, temperature=0, ignore_eos=True, prompt_logprobs=TOP))


def prompt(length: int) -> list[int]:
    tokens: list[int] = tiny.prompt(length, seed=length)["input_ids"][0].tolist()
    return tokens


def drive(engine: EngineCore, preempt_every: int = 0) -> list[Output]:
    outputs: list[Output] = []
    for number in range(1, 1000):
        if engine.idle:
            return outputs
        outputs += engine.step()
        engine.check()
        if preempt_every and number % preempt_every == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])
    raise AssertionError("it never ends")


def assert_right(scored: Sequence[Choice], tokens: Sequence[int], logits: torch.Tensor, close: float = CLOSE) -> None:
    """`logits` [T, V] are of the whole prompt."""
    logs = torch.log_softmax(logits.float(), -1)
    assert [choice.token for choice in scored] == list(tokens[1:])
    for place, choice in enumerate(scored):
        row = logs[place]
        assert choice.logprob == pytest.approx(row[choice.token].item(), abs=close)
        assert [log for _, log in choice.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=close)
        assert choice.rank is not None
        assert (row > row[choice.token] + close).sum() < choice.rank <= (row > row[choice.token] - close).sum() + 1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_they_are_those_of_a_plain_forward_pass(family: str) -> None:
    engine = core(family)
    prompts = [prompt(length) for length in (2, 64, 65, 300)]
    requests = [asking(str(i), tokens) for i, tokens in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    outputs = drive(engine)
    assert [output.finish for output in outputs] == [Finish.LENGTH] * 4
    assert not any(output.choice for output in outputs)
    model = tiny.shared(family)
    for request, tokens in zip(requests, prompts, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0]
        assert_right(request.scored, tokens, logits)


@pytest.mark.parametrize("text", ["fp32", "int4"])
@pytest.mark.parametrize("most_scored", [7, 64, 1000])
def test_whatever_is_cached_and_however_it_is_cut(text: str, most_scored: int) -> None:
    """In int4 they are what the cache of transformers gives in the same format: sealed pages are read as stored."""
    engine, tokens = core("qwen2", text), prompt(200)
    engine.add(Request("before", list(tokens), Sampling(max_tokens=1)))
    drive(engine)
    engine.scheduler._most_scored = most_scored
    scoring, plain = asking("scoring", tokens, most=2), Request("plain", prompt(90), Sampling(max_tokens=3))
    for request in (scoring, plain):
        engine.add(request)
    outputs = drive(engine)
    own = [output for output in outputs if output.request is scoring]
    assert [len(output.scored) for output in own] == [len(tokens) - 1, 0]
    assert scoring.cached_tokens == 0
    model, inputs = (
        tiny.model("qwen2"),
        {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, 200).long()},
    )
    with torch.inference_mode():
        logits = tiny.feed(model, kvarto.Cache(model, text), inputs, [200])[0]
    assert_right(scoring.scored, tokens, logits, close=CLOSE if text == "fp32" else 3e-2)
    assert own[0].choice is not None
    assert own[0].choice.token == int(logits[-1].argmax())


def test_after_preemption_only_what_is_missing_is_computed() -> None:
    engine, tokens = core("qwen2", step_tokens=50), prompt(300)
    request = asking("a", tokens, most=3)
    engine.add(request)
    drive(engine, preempt_every=3)
    assert request.preemptions >= 2
    assert engine.steps < 20, "pages that were scored are found again"
    with torch.inference_mode():
        logits = tiny.shared("qwen2")(torch.tensor([tokens])).logits[0]
    assert_right(request.scored, tokens, logits)


def test_logits_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core("qwen2")
    engine.scheduler._most_scored = 10
    run, rows = engine.forward.run, list[int]()
    monkeypatch.setattr(engine.forward, "run", lambda step: rows.append(len(step.wanted)) or run(step))
    for number in range(3):
        engine.add(asking(str(number), prompt(60 + number), most=1))
    drive(engine)
    assert max(rows) <= 10 + 3
    assert sum(rows) == 59 + 60 + 61 + 3


def test_a_prompt_of_one_token_has_none() -> None:
    engine = core("qwen2")
    engine.add(asking("a", [5]))
    (output,) = drive(engine)
    assert (output.scored, output.choice, output.finish) == ((), None, Finish.LENGTH)
