"""What really fits is what was predicted, and what the layout's bytes say, for models of different kinds."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from kvarto.engine.memory import Compute, Memory
from kvarto.engine.request import Request, Sampling
from kvarto.formats import parse_policy
from kvarto.layer_pages import LayerSpec
from kvarto.layout import Geometry

MODELS = {
    "llama 8B": [LayerSpec(Geometry(8, 128, 128))] * 32,
    "qwen2 7B": [LayerSpec(Geometry(4, 128, 128))] * 28,
    "gemma3 4B": [LayerSpec(Geometry(4, 256, 256), None if i % 6 == 5 else 1024) for i in range(34)],
}
# Memory without bytes: only the books are asked. Each kind of block has an extent that is not full; of a smaller budget that is more than 1 %.
NOWHERE = Compute(torch.bfloat16, torch.device("meta"))
BUDGET = 32 << 30
STEP_TOKENS = 512


def memory(model: str, *formats: str) -> Memory:
    policies = [parse_policy(text) for text in formats]
    return Memory(MODELS[model], policies, NOWHERE, budget_bytes=BUDGET, step_tokens=STEP_TOKENS)


def fill(made: Memory, policy: int, sequences: int) -> int:
    """Grow sequences in turn until one finds no room. Returns the tokens of the shortest."""
    holdings = []
    for i in range(sequences):
        request = Request(str(i), [i] * 3_000_000, Sampling(), policy)
        holdings.append((made.begin(request), request.tokens))
    while True:
        for holding, tokens in holdings:
            if not holding.reserve(STEP_TOKENS):
                made.prefixes.check()
                return min(holding.length for holding, _ in holdings)
            made.scratch.clear()
            holding.plan(made.scratch)
            holding.commit(tokens)


@pytest.mark.parametrize("sequences", [1, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", ["bf16", "int4"])
@pytest.mark.parametrize("model", MODELS)
def test_as_many_tokens_fit_as_predicted(model: str, text: str, sequences: int) -> None:
    made = memory(model, text)
    predicted, really = made.capacity_tokens(0, sequences), fill(made, 0, sequences)
    assert really == pytest.approx(predicted, rel=0.01, abs=2 * STEP_TOKENS)
    assert predicted == pytest.approx(tokens_by_layout(model, text, sequences), rel=0.01)


def tokens_by_layout(model: str, text: str, sequences: int) -> float:
    """Bytes of the budget over bytes of a token, by nothing but the layout; windows, sinks and open pages are paid first."""
    policy, raw = parse_policy(text), parse_policy("bf16").format
    per_token, fixed = 0.0, 0.0
    for spec in MODELS[model]:
        page, raw_page = policy.format.layout(spec.geometry), raw.layout(spec.geometry)
        sinks = policy.format.sink_tokens // 64
        fixed += (sinks + 1) * raw_page.nbytes
        if spec.sliding_tokens is None:
            per_token += page.bytes_per_token
            fixed -= sinks * page.nbytes
        else:  # the window, and what a step brings before it lets go
            fixed += (spec.sliding_tokens // 64 + 1 + (STEP_TOKENS // 64 + 1) / sequences) * page.nbytes
    return (BUDGET / sequences - fixed) / per_token


def test_int4_holds_as_many_times_the_tokens_as_its_bits_say() -> None:
    made, geometry = memory("llama 8B", "int4", "bf16"), MODELS["llama 8B"][0].geometry
    bits = parse_policy("int4").format.layout(geometry).bits_per_element
    times = made.capacity_tokens(0) / made.capacity_tokens(1)
    assert times == pytest.approx(16 / bits, rel=0.01)
    assert times >= 3.7


def test_a_request_that_can_never_fit_is_refused_with_the_bytes() -> None:
    made = memory("llama 8B", "bf16")
    most = made.capacity_tokens(0)
    assert made.why_not(Request("a", [1], Sampling(max_tokens=most - 1))) is None
    reason = made.why_not(Request("a", [1], Sampling(max_tokens=most + 64)))
    assert reason is not None
    assert "bytes of cache, of" in reason
