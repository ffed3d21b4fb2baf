"""The application over a tiny random model: refusals, faults of the model and of the engine, as they reach a client."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")

import httpx
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from bytes_tokenizer import PLAIN, tokenizer
from kvarto.engine.engine import Engine, open_tiers
from kvarto.models.load import LoadedModel
from kvarto.serve import app as app_module
from kvarto.serve.app import make_app
from kvarto.serve.service import Service

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, eos_token_id=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(eos_token_id=256)
    loaded = LoadedModel(model, tokenizer(PLAIN), "tiny", "none", Path())
    tiers = open_tiers("1MiB", tmp_path / "pages")
    with Engine(
        loaded, kv="fp32", also=["int8"], memory=1 << 20, tiers=tiers, step_tokens=128, most_running=4
    ) as engine:
        yield engine


@pytest.fixture
def ask(engine: Engine) -> Callable[..., httpx.Response]:
    transport = httpx.ASGITransport(make_app(engine))

    def ask(path: str, body: Any = None, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://kvarto") as client:
                if body is None:
                    return await client.get(path)
                return await client.post(path, json=body, headers=headers)

        return asyncio.run(send())

    return ask


Asker = Callable[..., httpx.Response]


def test_it_answers(ask: Asker) -> None:
    answer = ask("/v1/chat/completions", CHAT | {"ignore_eos": True})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.headers["x-kv-format"] == "fp32"
    assert ask("/v1/models/tiny").json()["kvarto"]["kv_format"] == "fp32"
    assert ask("/v1/models/other").status_code == 404


def test_tiers_are_counted(ask: Asker, engine: Engine) -> None:
    def number(name: str) -> float:
        return float(next(line for line in ask("/metrics").text.splitlines() if line.startswith(name)).split()[-1])

    body = {"prompt": [7] * 200, "max_tokens": 1}
    assert ask("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prefixes = engine.core.memory.prefixes
    while prefixes.idle_bytes:  # as if others had wanted the memory
        prefixes._drop_oldest(next(kind for kind, idle in enumerate(prefixes._idle) if idle))
    assert number("kvarto_offloaded_bytes_total") > 0
    assert ask("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert number('kvarto_tier_hits_total{tier="host"}') == 3
    assert number("kvarto_tier_refused_total") == 0


def test_field_and_header_must_agree(ask: Asker) -> None:
    body = {"prompt": "hi", "kv_format": "int8"}
    assert ask("/v1/completions", body, **{"X-KV-Format": "int8"}).status_code == 200
    refused = ask("/v1/completions", body, **{"X-KV-Format": "fp32"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_format")


def test_what_needs_more_memory_than_there_is(ask: Asker, engine: Engine) -> None:
    most = engine.offers[0].most_tokens
    assert most == min(1024, engine.offers[0].capacity_tokens or 0)
    assert ask("/v1/completions", {"prompt": [1] * (most - 1), "max_tokens": 1}).status_code == 200
    assert (
        ask("/v1/completions", {"prompt": [1] * (most - 1), "max_tokens": 2}).json()["error"]["param"] == "max_tokens"
    )
    refused = ask("/v1/completions", {"prompt": [1] * most, "max_tokens": 1}).json()["error"]
    assert (refused["param"], refused["code"]) == ("prompt", "context_length_exceeded")


def test_a_body_that_is_too_large(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_MOST_BODY_BYTES", 100)
    assert ask("/v1/completions", {"prompt": "x" * 100}).status_code == 413


def test_a_text_that_cannot_have_room_is_not_even_tokenized(
    ask: Asker, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("64 MiB of text would take minutes and gigabytes")

    monkeypatch.setattr(type(engine.tokenizer), "__call__", fail)
    text = "x" * 6000
    for path, body, field in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/tokenize", {"prompt": text}, "prompt"),
    ):
        refused = ask(path, body)
        assert refused.status_code == 400
        assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (field, "context_length_exceeded")


def test_a_clock_that_jumps_is_in_no_metric(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    days = iter(range(10_000))
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + (-1) ** next(days) * 86_400)
    for stream in (False, True):
        assert ask("/v1/chat/completions", CHAT | {"stream": stream, "ignore_eos": True}).status_code == 200
    sums = [line.split() for line in ask("/metrics").text.splitlines() if re.match(r"kvarto_\w+_seconds_sum", line)]
    assert len(sums) == 4
    assert all(0 <= float(value) < 100 for _, value in sums)


def test_what_is_refused_is_not_sent_back_or_logged_at_length(ask: Asker, caplog: pytest.LogCaptureFixture) -> None:
    long = "x" * 100_000
    with caplog.at_level("INFO"):
        for body in ({"prompt": "x", "model": long}, {"prompt": "x", "kv_format": long}, {"prompt": "x", long: 1}):
            assert 400 <= ask("/v1/completions", body).status_code <= 404
            assert len(ask("/v1/completions", body).text) < 3000
    assert len(caplog.text) < 20_000


def test_a_fault_of_the_model_ends_its_requests_only(
    ask: Asker, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as broken:
        broken.setattr(engine.core.forward, "run", fail)
        whole = ask("/v1/chat/completions", CHAT)
        streamed = ask("/v1/chat/completions", CHAT | {"stream": True})
    assert whole.status_code == 500
    assert "out of luck" in whole.json()["error"]["message"]
    events = streamed.text.split("\n\n")
    assert "out of luck" in json.loads(events[-3].removeprefix("data: "))["error"]["message"]
    assert events[-2:] == ["data: [DONE]", ""]
    assert 'kvarto_requests_total{kv_format="fp32",outcome="error"} 2.0' in ask("/metrics").text
    assert ask("/health").status_code == 200
    assert ask("/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_stopped_says_so(ask: Asker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(engine.core.scheduler, "schedule", fail)
    assert ask("/v1/chat/completions", CHAT).status_code == 500
    for refused in (ask("/health"), ask("/v1/chat/completions", CHAT)):
        assert refused.status_code == 503
        assert "a fault of ours" in refused.json()["error"]["message"]


def test_a_grammar_that_grows_too_complex_is_an_error(
    ask: Asker, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvarto.serve.structured import GrammarGuide

    def give_up(guide: GrammarGuide, logits: torch.Tensor) -> torch.Tensor:
        guide.failure = "too many items"
        return logits

    monkeypatch.setattr(GrammarGuide, "apply", give_up)
    answer = ask("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}})
    assert answer.status_code == 500
    assert "too many items" in answer.json()["error"]["message"]


def test_a_fault_of_ours_is_a_500(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Service, "tokenize", fail)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(engine), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvarto") as client:
            return await client.post("/tokenize", json={"prompt": "x"})

    answer = asyncio.run(send())
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error: ZeroDivisionError"
