"""What the quality probe found, as operators and clients see it: metrics, the line at the start, and the format that was used after all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
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
from kvarto.engine.engine import Engine
from kvarto.engine.probe import Probing
from kvarto.models.load import LoadedModel
from kvarto.serve.app import make_app
from kvarto.serve.command import describe


def make(*also: str, probe: Probing) -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, eos_token_id=256, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(eos_token_id=256)
    loaded = LoadedModel(model, tokenizer(PLAIN), "tiny", "none", Path())
    return Engine(loaded, kv="int2+sink0", also=also, memory="2MiB", step_tokens=128, most_running=4, probe=probe)


def ask(engine: Engine, path: str, body: Any = None, **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://kvarto") as to:
            return await (to.get(path) if body is None else to.post(path, json=body, headers=headers))

    return asyncio.run(send())


def complete(engine: Engine, number: int, **headers: str) -> httpx.Response:
    """A prompt of its own, and the probe of it."""
    tokens = torch.randint(256, (150,), generator=torch.Generator().manual_seed(number)).tolist()
    answer = ask(engine, "/v1/completions", {"prompt": tokens, "max_tokens": 8, "ignore_eos": True}, **headers)
    assert answer.status_code == 200
    wait_for(lambda: engine.core.idle)
    return answer


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def metric(engine: Engine, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(ask(engine, "/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    assert samples, name
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def test_metrics_show_what_it_found() -> None:
    with make(probe=Probing(1.0)) as engine:
        engine.warm_up()
        assert describe(engine)[-1] == "  probe: 100 % of the requests in other formats are read again in bf16"
        assert metric(engine, "kvarto_probe_requests_total") == 0  # warming up is no request
        complete(engine, 0)
        where = {"kv_format": "int2+sink0", "context": "1k"}
        assert metric(engine, "kvarto_probe_kl_count", **where) == 8
        assert metric(engine, "kvarto_probe_kl_bucket", le="+Inf", **where) == 8
        assert metric(engine, "kvarto_probe_kl_bucket", le="1e-06", **where) == 0
        assert metric(engine, "kvarto_probe_kl_sum", **where) > 0.1
        agreed = [
            metric(engine, "kvarto_probe_top1_agreement_total", agrees=agrees, **where) for agrees in ("true", "false")
        ]
        assert sum(agreed) == 8
        assert agreed[1] > 0
        assert metric(engine, "kvarto_probe_requests_total", outcome="done", **where) == 1
        assert metric(engine, "kvarto_probe_requests_total") == 1
        assert "kvarto_routed_to_bf16" not in ask(engine, "/metrics").text
        refused = ask(engine, "/v1/completions", {"prompt": "x", "kv_format": "bf16"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_format")


def test_without_it_metrics_are_silent() -> None:
    with make(probe=Probing()) as engine:
        complete(engine, 0)
        assert "probe" not in ask(engine, "/metrics").text


def test_routing_shows_in_metrics_headers_and_fingerprints(caplog: pytest.LogCaptureFixture) -> None:
    with make("bf16", probe=Probing(1.0, 0.05)) as engine:
        assert metric(engine, "kvarto_routed_to_bf16") == 0
        answers = [complete(engine, number) for number in range(12)]
        assert answers[0].headers["x-kv-format"] == "int2+sink0"
        assert answers[-1].headers["x-kv-format"] == "bf16"
        assert answers[-1].json()["system_fingerprint"].endswith("-bf16")
        assert complete(engine, 0, **{"X-KV-Format": "int2+sink0"}).headers["x-kv-format"] == "int2+sink0"
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert ask(engine, "/v1/chat/completions", chat).headers["x-kv-format"] == "bf16"
        named = ask(engine, "/v1/chat/completions", chat | {"kv_format": "int2+sink0"})
        assert named.headers["x-kv-format"] == "int2+sink0"
        assert metric(engine, "kvarto_routed_to_bf16", kv_format="int2+sink0", context="1k") == 1
        assert metric(engine, "kvarto_routed_to_bf16") == 1
        assert sum("requests that name no format get bf16" in record.message for record in caplog.records) == 1
