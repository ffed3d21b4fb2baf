"""Bytes of real models: the published vectors exactly, and every other config against a second count that stores entry after entry."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import Any

import pytest

from kvarto.plan.engines import plain_bytes
from kvarto.plan.written import bytes_of
from unit.plan.samples import CONFIGS, FORMATS, VECTORS, model


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["model"])
def test_a_published_vector_is_exact(vector: dict[str, Any]) -> None:
    held = plain_bytes(model(vector["config"]))
    assert held.growth == vector["bytes_per_token_bf16"]
    assert held.constant == vector["const_bytes_per_seq"]
    assert round(held.sequence(131_072) / 2**30, 3) == vector["gib_at_131072"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["model"])
def test_the_format_bf16_is_the_vector_where_pages_are_full(vector: dict[str, Any]) -> None:
    held = bytes_of(FORMATS["bf16"], model(vector["config"]))
    assert held.growth == vector["bytes_per_token_bf16"]
    assert held.constant == vector["const_bytes_per_seq"]
    assert held.sequence(131_072) == 131_072 * held.growth + held.constant


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tokens", [1, 77, 20_000])
def test_a_config_agrees_with_a_cache_that_is_really_filled(name: str, tokens: int) -> None:
    assert plain_bytes(model(name)).sequence(tokens) == stored(CONFIGS[name], tokens)


@pytest.mark.parametrize("name", CONFIGS)
def test_growth_is_what_more_tokens_add(name: str) -> None:
    far, farther = 1 << 15, 3 << 15
    added = stored(CONFIGS[name], farther) - stored(CONFIGS[name], far)
    assert plain_bytes(model(name)).growth == Fraction(added, farther - far)


# The second count: no code of the planner's. A layer is a list of (bytes of an entry, how many entries a queue of its length then holds).


def stored(c: dict[str, Any], tokens: int) -> int:  # noqa: C901 - one branch for each architecture
    layers = c.get("num_hidden_layers") or 0
    heads = c["num_attention_heads"]
    kv = c.get("num_key_value_heads") or heads
    dim = c.get("head_dim") or c["hidden_size"] // heads
    pair = 4 * kv * dim
    family, total = c["model_type"], 0
    if family in ("deepseek_v4", "deepseek_ref"):
        for ratio in c["compress_ratios"][:layers]:
            total += 2 * dim * kept(tokens, c["sliding_window"])
            total += 2 * dim * len(range(0, tokens, ratio)) if ratio else 0
            total += 2 * c["index_head_dim"] * len(range(0, tokens, 4)) if ratio == 4 else 0
        return total
    if family == "kimi_linear":
        linear = c["linear_attn_config"]
        width, many = linear["head_dim"], linear["num_heads"]
        total += len(linear["full_attn_layers"]) * 2 * tokens * (c["kv_lora_rank"] + c["qk_rope_head_dim"])
        state = 4 * many * width * width + 2 * (3 * many * width) * (linear["short_conv_kernel_size"] - 1)
        return total + len(linear["kda_layers"]) * state
    if "kv_lora_rank" in c:
        total += layers * 2 * tokens * (c["kv_lora_rank"] + c["qk_rope_head_dim"])
        if "index_head_dim" in c:
            choosing = [kind for kind in c.get("indexer_types") or ["full"] * layers if kind == "full"]
            total += len(choosing) * 2 * tokens * c["index_head_dim"]
        return total
    if family == "nemotron_h":
        kinds = c.get("layers_block_type") or [
            {"M": "mamba", "*": "attention"}.get(letter, "") for letter in c["hybrid_override_pattern"]
        ]
        inner = c["mamba_num_heads"] * c["mamba_head_dim"]
        conv = (inner + 2 * c["n_groups"] * c["ssm_state_size"]) * (c["conv_kernel"] - 1)
        return kinds.count("attention") * pair * tokens + kinds.count("mamba") * (
            4 * inner * c["ssm_state_size"] + 2 * conv
        )
    if family.startswith("qwen3_5"):
        k, v = (
            c["linear_num_key_heads"] * c["linear_key_head_dim"],
            c["linear_num_value_heads"] * c["linear_value_head_dim"],
        )
        state = 4 * v * c["linear_key_head_dim"] + 2 * (2 * k + v) * (c["linear_conv_kernel_dim"] - 1)
        return sum(state if kind == "linear_attention" else pair * tokens for kind in c["layer_types"])
    if family == "nemotron-nas":
        blocks = [block["attention"] for block in c["block_configs"]]
        return sum(4 * dim * (heads // each["n_heads_in_group"]) * tokens for each in blocks if not each["no_op"])
    if family.startswith("mimo_v2"):
        for near in c["hybrid_layer_pattern"]:
            many = c["swa_num_key_value_heads"] if near else kv
            total += 2 * many * (dim + c["v_head_dim"]) * kept(tokens, c["sliding_window"] if near else None)
        return total
    if family.startswith("llama4"):
        return sum(pair * kept(tokens, None if (i + 1) % 4 == 0 else c["attention_chunk_size"]) for i in range(layers))
    if family.startswith("gemma4"):
        far = 4 * c["num_global_key_value_heads"] * c["global_head_dim"]
        kinds = c["layer_types"]
        return sum(
            far * tokens if kind == "full_attention" else pair * kept(tokens, c["sliding_window"]) for kind in kinds
        )
    if family.startswith("gemma3n"):
        own = range(layers - c["num_kv_shared_layers"])
        return sum(pair * kept(tokens, None if i % 5 == 4 else c["sliding_window"]) for i in own)
    if "sparse_attention_config" in c:
        sparse = c["sparse_attention_config"]
        return layers * pair * tokens + sum(sparse["sparse_attention_freq"]) * 2 * sparse["sparse_index_dim"] * tokens
    if family == "falcon":
        return layers * 4 * dim * tokens
    if "layer_types" in c and "sliding_attention" in c["layer_types"]:
        return sum(
            pair * kept(tokens, c["sliding_window"] if kind == "sliding_attention" else None)
            for kind in c["layer_types"]
        )
    return layers * pair * tokens


def kept(tokens: int, window: int | None) -> int:
    """Entries of a queue that so many tokens went through."""
    return tokens if window is None else len(deque(range(tokens), maxlen=window))
