"""A cache is for the model that it was made for: with another one it is refused by name, at the first forward pass."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import kvarto
from kvarto.errors import Unsupported

SIZES: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
TOKENS = torch.tensor([[1, 2, 3]])


def llama(layers: int = 2) -> Any:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES)).eval().requires_grad_(False)


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, **SIZES)).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("other", "described"),
    [(qwen2(), r"\(qwen2, 2 layers\)"), (llama(3), r"\(llama, 3 layers\)")],
    ids=("type", "size"),
)
def test_a_cache_of_another_model_is_refused_by_name(other: Any, described: str) -> None:
    with pytest.raises(Unsupported, match="made for LlamaForCausalLM; with any other model"):
        other(TOKENS, cache=kvarto.Cache(llama(), "int4"))
    kvarto.Cache(other, "int4")  # now the other model asks kvarto too
    cache = kvarto.Cache(llama(), "int4")
    with pytest.raises(Unsupported, match=rf"LlamaForCausalLM \(llama, 2 layers\), and is used with .*{described}"):
        other(TOKENS, cache=cache)


def test_a_layer_beyond_the_cache_is_refused() -> None:
    x = torch.zeros(1, 1, 3, 16)
    with pytest.raises(Unsupported, match="layer 2 wants to be cached, .* LlamaForCausalLM with 2 layers"):
        kvarto.Cache(llama(), "int4").update(x, x, 2)


def test_a_copied_cache_still_fits_its_model() -> None:
    model = llama()
    cache = kvarto.Cache(model, "int4")
    expected = model(TOKENS, cache=copy.deepcopy(cache)).logits
    assert torch.equal(model(TOKENS, cache=pickle.loads(pickle.dumps(cache))).logits, expected)  # noqa: S301
