"""Tiny random models, seeded: real transformers architectures that run in milliseconds. Weights are large, so that logits are not flat."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY = 192
WINDOW_TOKENS = 48

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": WINDOW_TOKENS, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {"sliding_window": WINDOW_TOKENS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Those that the equality suite walks: plain, key biases, query-key norms, sliding windows, learned sinks."""

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
}  # fmt: skip
"""Attention layers among layers that keep a state: recurrent, or a short convolution's."""


def config(model_type: str, **changes: Any) -> Any:
    """The tiny configuration of a model type."""
    own = FAMILIES.get(model_type) or HYBRIDS.get(model_type) or {}
    return CONFIG_MAPPING[model_type](**{**_COMMON, **own, **changes})


def model(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with random weights, biases and sinks, ready for inference."""
    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(config(model_type, **changes), dtype=dtype)
    for name, parameter in built.requires_grad_(False).named_parameters():
        if name.endswith(("sinks", "bias")):
            parameter.normal_(std=1.0)
    return built.eval()


def prompt(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens, one sequence for each length, padded on the left: input_ids and attention_mask, int64 [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


@cache
def shared(family: str) -> Any:
    """A float32 model that tests may use but not change."""
    return model(family)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number expected."""
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def feed(model: Any, kv: Any, inputs: dict[str, torch.Tensor], pieces: list[int]) -> torch.Tensor:
    """Logits [B, T, V] of the tokens that the cache does not hold yet, given to the model in pieces."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    out, first = [], kv.get_seq_length()
    for size in pieces:
        run = slice(first, first + size)
        seen = mask[:, : first + size]
        out.append(model(ids[:, run], attention_mask=seen, position_ids=positions[:, run], cache=kv).logits)
        first += size
    return torch.cat(out, dim=1)


def one_more_token(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same inputs, longer by one token in each row."""
    B = inputs["input_ids"].shape[0]
    return {name: torch.cat([tensor, torch.ones(B, 1, dtype=torch.long)], dim=1) for name, tensor in inputs.items()}
