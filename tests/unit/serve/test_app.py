"""The application over a tiny random model: refusals, faults of the model and of the engine, as they reach a client."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from bytes_tokenizer import PLAIN, tokenizer
from kvarto.engine.engine import Engine, open_tiers
from kvarto.models.load import LoadedModel
from kvarto.serve import app as app_module
from kvarto.serve.app import make_app
from kvarto.serve.job import Job
from kvarto.serve.metrics import _forms
from kvarto.serve.rules import Caller, Config
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
    return asker(engine)


def asker(engine: Engine, config: Config | None = None) -> Callable[..., httpx.Response]:
    transport = httpx.ASGITransport(make_app(engine, config))

    def ask(path: str, body: Any = None, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://kvarto") as client:
                if body is None:
                    return await client.get(path, headers=headers)
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
    assert 0 < number("kvarto_restored_bytes_total") <= number("kvarto_offloaded_bytes_total")
    assert number('kvarto_tier_bytes{tier="host"}') > 0
    assert number("kvarto_tier_refused_total") == 0


def numbers(ask: Asker) -> dict[tuple[str, ...], float]:
    """All samples, by name and the values of their labels."""
    families = text_string_to_metric_families(ask("/metrics").text)
    return {
        (s.name.removeprefix("kvarto_"), *s.labels.values()): s.value for family in families for s in family.samples
    }


def test_the_books_in_numbers(ask: Asker, engine: Engine) -> None:
    body = {"prompt": list(range(1, 151)), "max_tokens": 3, "ignore_eos": True, "kv_format": "int8"}
    for _ in range(2):
        assert ask("/v1/completions", body).status_code == 200
    shown = numbers(ask)
    assert (shown["prefix_cache_queries_total", "int8"], shown["prefix_cache_hits_total", "int8"]) == (300, 128)
    assert (shown["prefix_cache_queries_total", "fp32"], shown["prefix_cache_hits_total", "fp32"]) == (0, 0)
    # The second page of both layers; the first one is a sink, and the second request found both.
    layers = engine.core.memory.offers[1].layers
    sealed = sum(2 - layer.pages.rule.sink_pages for layer in layers)
    assert shown["sealed_pages_total", "int8"] == sealed
    elements = layers[0].pages.spec.geometry.elements_per_token
    assert shown["sealed_elements_total", "int8"] == sealed * 64 * elements
    assert shown["saturated_elements_total", "int8"] == 0
    assert shown["computed_tokens_total", "prefill"] == 150 + 22
    assert shown["computed_tokens_total", "decode"] == 2 + 2
    assert shown["step_seconds_count", "decode"] == 4
    assert shown["step_seconds_count", "prefill"] == 3
    for name in (
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
    ):
        assert shown[name + "_count", "int8"] == 2
    assert shown["request_time_per_output_token_seconds_sum", "int8"] * 2 == pytest.approx(
        shown["request_decode_time_seconds_sum", "int8"]
    )
    assert shown["pool_bytes",] == shown["pool_idle_bytes",] + shown["pool_free_bytes",]
    assert (shown["live_tokens",], shown["held_slots",], shown["fragmentation_ratio",]) == (0, 0, 0)
    blocks = {key[1:]: value for key, value in shown.items() if key[0] == "pool_blocks"}
    assert {form for form, _, _ in blocks} == {"raw", "sealed"}
    assert sum(value for (*_, state), value in blocks.items() if state == "held") == 0
    idle = [len(kind) for kind in engine.core.memory.prefixes._idle]
    assert sum(value for (*_, state), value in blocks.items() if state == "evictable") == sum(idle)
    for kind, (form, formats) in enumerate(_forms(engine)):
        assert blocks[form, formats, "free"] == engine.core.memory.arena.room(kind)


def test_what_running_requests_waste(ask: Asker, engine: Engine) -> None:
    seen = []

    def look(*_: Any) -> None:
        if engine.core.live_tokens[0] == 70:
            seen.append(numbers(ask))

    engine.core.on_step.append(look)
    assert ask("/v1/completions", {"prompt": [5] * 70, "max_tokens": 2, "ignore_eos": True}).status_code == 200
    shown = seen[0]
    assert (shown["live_tokens",], shown["held_slots",]) == (70, 128)
    assert shown["fragmentation_ratio",] == pytest.approx(1 - 70 / 128)
    assert sum(value for key, value in shown.items() if key[0] == "pool_blocks" and key[-1] == "held") >= 2


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


RULES = Config.model_validate(
    {
        "tenants": {"acme": {"keys": ["sk-acme"]}, "beta": {"keys": ["sk-beta"], "priority": 3}},
        "rules": [
            {"tenant": ["acme"], "route": ["/v1/completions"], "kv": "int8"},
            {"model": ["tiny-int8"], "kv": "int8"},
            {"header": {"X-Team": "research"}, "kv": "int8"},
        ],
    }
)


def test_rules_choose_the_format_of_requests_that_name_none(engine: Engine) -> None:
    ask = asker(engine, RULES)

    def chosen(path: str = "/v1/completions", key: str = "sk-beta", body: Any = None, **headers: str) -> str:
        asked = (CHAT if "chat" in path else {"prompt": "hi", "max_tokens": 1}) | (body or {})
        answer = ask(path, asked, authorization=f"Bearer {key}", **headers)
        assert answer.json()["model"] == asked.get("model", "tiny")
        return str(answer.headers["x-kv-format"])

    assert chosen() == "fp32"
    assert chosen(key="sk-acme") == "int8"
    assert chosen("/v1/chat/completions", "sk-acme") == "fp32"
    assert chosen(body={"model": "tiny-int8"}) == "int8"
    assert chosen(**{"x-team": "research"}) == "int8"
    assert chosen(key="sk-acme", body={"kv_format": "fp32"}) == "fp32"
    assert chosen(key="sk-acme", **{"X-KV-Format": "fp32"}) == "fp32"
    beta = {"authorization": "Bearer sk-beta"}
    models = ask("/v1/models", **beta).json()["data"]
    assert [(each["id"], each["root"], each["kvarto"]["kv_format"]) for each in models] == [
        ("tiny", "tiny", "fp32"),
        ("tiny-int8", "tiny", "int8"),
    ]
    assert ask("/v1/models/tiny-int8", **beta).json()["id"] == "tiny-int8"
    refused = ask("/v1/completions", {"prompt": "hi", "model": "tiny-int4"}, **beta)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "one of tiny, tiny-int8" in refused.json()["error"]["message"]


def test_who_has_no_key_is_refused(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    ask = asker(engine, RULES)
    for headers in ({}, {"authorization": "Bearer sk-acme2"}):
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/tokenize", {"prompt": "hi"}),
            ("/v1/models", None),
        ):
            refused = ask(path, body, **headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "sk-" not in refused.text
    assert ask("/health").status_code == 200
    assert 'kvarto_requests_total{kv_format="",outcome="unauthorized"} 2.0' in ask("/metrics").text
    assert ask("/v1/completions", {"prompt": "hi", "max_tokens": 1}, authorization="Bearer sk-acme").status_code == 200
    assert "sk-" not in caplog.text


def test_a_tenant_finds_no_prefixes_but_its_own(engine: Engine) -> None:
    ask = asker(engine, RULES)

    def cached(key: str, **extra: str) -> int:
        body = {"prompt": [9] * 130, "max_tokens": 1, "kv_format": "fp32"} | extra
        answer = ask("/v1/completions", body, authorization=f"Bearer {key}").json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("sk-acme"), cached("sk-acme"), cached("sk-beta"), cached("sk-beta")] == [0, 128, 0, 128]
    assert [cached("sk-acme", cache_salt="beta"), cached("sk-acme", cache_salt="beta")] == [0, 128]


def test_a_tenant_s_requests_have_its_priority(engine: Engine) -> None:
    service = Service(engine, RULES)
    for route, understand, body in (
        ("/v1/completions", service.completion, {"prompt": "hi"}),
        ("/v1/chat/completions", service.chat, CHAT),
    ):
        for tenant, priority in (("beta", 3), ("acme", 0), (None, 0)):
            plan = understand(json.dumps(body).encode(), Caller(route, {}, tenant))
            assert plan.asks[0][0].priority == priority


def lm_eval(choice: Any, context: int) -> tuple[list[float], bool]:
    """What EleutherAI's harness reads: without the prompt's first tokens and the one that is generated."""
    shown = choice["logprobs"]
    tokens, logs, tops = (shown[key][context:-1] for key in ("tokens", "token_logprobs", "top_logprobs"))
    return logs, all(token == max(top, key=top.get) for token, top in zip(tokens, tops, strict=True))


def test_prompts_are_scored_as_evaluation_harnesses_ask_for_it(ask: Asker, engine: Engine) -> None:
    prompts = [[5, 6, 7, 8, 9], list(range(40, 180)), [3]]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    for _ in range(2):  # the second time all of it is in the prefix cache
        choices = ask("/v1/completions", body).json()["choices"]
        for tokens, choice in zip(prompts, choices, strict=True):
            assert len(choice["logprobs"]["token_logprobs"]) == len(tokens) + 1
            logs, greedy = lm_eval(choice, 1)
            with torch.inference_mode():
                plain = LlamaForCausalLM._from_config(deepcopy(engine.loaded.model.config), attn_implementation="eager")
                plain.load_state_dict(engine.loaded.model.state_dict())
                expected = torch.log_softmax(plain.eval()(torch.tensor([tokens])).logits[0].float(), -1)
            own = [expected[i, token].item() for i, token in enumerate(tokens[1:])]
            assert logs == pytest.approx(own, abs=1e-4)
            assert greedy == (expected[:-1].argmax(-1).tolist() == tokens[1:])
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(expected[-1].max().item(), abs=1e-4)


def test_nothing_need_be_generated_to_know_of_the_prompt(ask: Asker, engine: Engine) -> None:
    most = engine.offers[0].most_tokens
    for extra in ({"echo": True, "logprobs": 2}, {"echo": True}, {"prompt_logprobs": 2}):
        answer = ask("/v1/completions", {"prompt": "hello", "max_tokens": 0} | extra).json()
        (choice,) = answer["choices"]
        assert choice["text"] == ("hello" if "echo" in extra else "")
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert (choice["logprobs"] is not None) == ("logprobs" in extra)
        assert [place and len(place) >= 2 for place in choice.get("prompt_logprobs", [])] in ([], [None] + [True] * 4)
    assert ask("/v1/completions", {"prompt": [7] * most, "max_tokens": 0, "echo": True}).status_code == 200
    refused = ask("/v1/completions", {"prompt": [7] * (most + 1), "max_tokens": 0, "echo": True}).json()["error"]
    assert (refused["param"], refused["code"]) == ("prompt", "context_length_exceeded")
    assert ask("/v1/completions", {"prompt": "hello", "max_tokens": 0}).json()["error"]["param"] == "max_tokens"
    for wrong in ("", [300], [-1], [2**70]):
        assert ask("/v1/completions", {"prompt": wrong, "echo": True}).json()["error"]["param"] == "prompt"


def test_log_probabilities_of_a_chat_s_prompt(ask: Asker) -> None:
    answer = ask("/v1/chat/completions", CHAT | {"prompt_logprobs": 1, "n": 2}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert "<" in [entry["decoded_token"] for entry in answer["prompt_logprobs"][-11].values()]
    assert len(answer["choices"]) == 2
    refused = ask("/v1/chat/completions", CHAT | {"prompt_logprobs": 1, "stream": True}).json()["error"]
    assert refused["param"] == "prompt_logprobs"


def test_a_prompt_is_repeated_at_the_begin_of_a_stream(ask: Asker) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 0, "stream": True, "ignore_eos": True}
    events = ask("/v1/completions", body).text.split("\n\n")[:-2]
    first = json.loads(events[0].removeprefix("data: "))["choices"][0]
    assert first["text"].startswith("hello")
    assert first["logprobs"]["tokens"][:5] == list("hello")
    assert first["logprobs"]["text_offset"][:6] == [0, 1, 2, 3, 4, 5]


def test_what_is_far_too_long_is_not_read(ask: Asker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tokenized")

    long = "x" * (20 * 1024)
    with monkeypatch.context() as nobody:
        nobody.setattr(type(engine.tokenizer), "__call__", fail)
        for path, body, field in (
            ("/v1/completions", {"prompt": long}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ):
            refused = ask(path, body).json()["error"]
            assert (refused["param"], refused["code"]) == (field, "context_length_exceeded")
            assert "or more" in refused["message"]


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
    assert sums
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
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert "too many items" in answer.json()["error"]["message"]
    streamed = ask("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert (events[-1]["error"]["param"], events[-1]["error"]["type"]) == ("response_format", "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_over_is_freed_without_the_collector(
    ask: Asker, engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Rings of objects wait until Python looks for them among old ones, with a grammar each: thousands of requests long."""
    seen: list[weakref.ref[Any]] = []

    class Watched(Job):
        def submit(self) -> None:
            super().submit()
            seen.extend(weakref.ref(each) for each in (self, *self._tickets, *(t.request for t in self._tickets)))

    monkeypatch.setattr(app_module, "Job", Watched)
    gc.collect()
    gc.disable()
    try:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
        assert (
            ask("/v1/chat/completions", CHAT | {"n": 2, "response_format": form, "stream": stream}).status_code == 200
        )
        assert len(seen) == 5
        end = time.monotonic() + 10
        while any(each() is not None for each in seen) and time.monotonic() < end:
            time.sleep(0.01)
        assert [each() for each in seen] == [None] * 5
    finally:
        gc.enable()


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
