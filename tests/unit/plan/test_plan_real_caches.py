"""The caches that transformers' own model code fills, of small random models of each family, number for number.

transformers keeps one token less of a window (the newest is in the query), and one more input of a convolution than engines do.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from kvarto.plan.cached import KeyValue, State, held
from kvarto.plan.config import cached_model, make_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_WITH_HEADS = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PLAIN = {key: value for key, value in _WITH_HEADS.items() if key != "head_dim"}
_MHA = {key: value for key, value in _PLAIN.items() if key != "num_key_value_heads"}
_WINDOW = {**_WITH_HEADS, "sliding_window": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_expand": 2}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _WITH_HEADS, "qwen2": _PLAIN, "qwen3": _WITH_HEADS, "mistral": _WINDOW, "gemma2": _WINDOW, "gemma3_text": _WINDOW, "cohere2": _WINDOW,
    "olmo3": _WINDOW, "exaone4": {**_WINDOW, "sliding_window_pattern": 4}, "gpt_oss": {**_WINDOW, **_EXPERTS}, "phi3": _PLAIN, "smollm3": _PLAIN,
    "gpt2": {"vocab_size": 128, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2},
    "falcon": {**_MHA, "multi_query": True}, "gpt_neox": _MHA, "opt": {**_MHA, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"vocab_size": 128, "hidden_size": 64, "n_layer": 3, "n_head": 4}, "mixtral": {**_PLAIN, **_EXPERTS, "sliding_window": None},
    "qwen3_moe": {**_WITH_HEADS, **_EXPERTS}, "starcoder2": _PLAIN, "glm4": _WITH_HEADS, "granite": _PLAIN, "minimax_m2": {**_WITH_HEADS, **_EXPERTS},
    "llama4_text": {**_WITH_HEADS, **_EXPERTS, "attention_chunk_size": 16, "intermediate_size_mlp": 96},
    "gemma3n_text": {**_WINDOW, "num_kv_shared_layers": 2, "num_hidden_layers": 10, "intermediate_size": [96] * 10, "vocab_size_per_layer_input": 128,
                     "hidden_size_per_layer_input": 16, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 10, "altup_num_inputs": 2},
    "gemma4_text": {**_WINDOW, "num_global_key_value_heads": 1, "global_head_dim": 32, "vocab_size_per_layer_input": 128,
                    "hidden_size_per_layer_input": 16, "attention_k_eq_v": True},
    "mimo_v2_flash": {**_WINDOW, **_EXPERTS, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "qwen3_next": {**_WITH_HEADS, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}, "qwen3_5_text": {**_WITH_HEADS, **_DELTA},
    "jamba": {**_PLAIN, "num_experts": 2, "use_mamba_kernels": False, "mamba_dt_rank": 8}, "bamba": {**_PLAIN, **_MAMBA2, "attn_layer_indices": [2]},
    "granitemoehybrid": {**_PLAIN, **_MAMBA2, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                         "num_local_experts": 2, "shared_intermediate_size": 32},
    "falcon_h1": {**_WITH_HEADS, **_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 128}, "lfm2": {**_PLAIN, "full_attn_idxs": [2, 5]},
    "nemotron_h": {**_WITH_HEADS, "layers_block_type": ["mamba", "attention", "mlp", "mamba", "moe"], "num_hidden_layers": 5, "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 32,
                   "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False},
}  # fmt: skip
_TOKENS = 65
_FLOAT32, _BF16 = 4, 2


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_familys_cache_holds_what_the_planner_says(family: str) -> None:
    config, cache = _filled(family)
    planned = cached_model(make_config(family, config.to_dict()))
    numbers = sum(
        count * (held(part, _TOKENS) - (part.window_tokens is not None)) * part.heads * (part.k_dim + part.v_dim)
        for part, count in planned.parts.items()
        if isinstance(part, KeyValue)
    )
    really = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers if _has_keys(layer))
    assert numbers == really
    states = sum(count * part.nbytes for part, count in planned.parts.items() if isinstance(part, State))
    assert states == _state_bytes(cache)


def _filled(family: str) -> tuple[Any, Any]:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family](**_FAMILIES[family])
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            model(torch.randint(0, 100, (1, _TOKENS - 1)), past_key_values=cache, use_cache=True)
            model(torch.randint(0, 100, (1, 1)), past_key_values=cache, use_cache=True)
    return config, cache


def _has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None and layer.keys.numel() > 0


def _state_bytes(cache: Any) -> int:
    total = 0
    for layer in cache.layers:
        for states, nbytes, spare in (("conv_states", _BF16, 1), ("recurrent_states", _FLOAT32, 0)):
            for state in (getattr(layer, states, None) or {}).values():
                if state is not None:
                    total += nbytes * state.numel() // state.shape[-1] * (state.shape[-1] - spare)
    return total
