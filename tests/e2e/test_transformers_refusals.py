"""What `kvarto.Cache` refuses: models, settings and inputs, each with its reason and before anything is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvarto
from kvarto.errors import NotFinite, ShapeError, Unsupported, UsageError
from kvarto.integrations import quirks

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip
DYNAMIC_NTK = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": LONGROPE}, "LongRoPE"),
        ({"rope_parameters": DYNAMIC_NTK}, "dynamic NTK"),
        ({"head_dim": 12}, "not a multiple of 8"),
        ({"attn_implementation": "eager", "output_attentions": True}, "attention weights"),
        ({"attn_implementation": "flex_attention"}, "sdpa or eager only"),
        ({"dtype": torch.float64}, "float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_is_refused_is_told_why(changes: dict[str, Any], reason: str) -> None:
    check_refused(tiny.model("llama", **changes), reason)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("deepseek_v3", {"num_hidden_layers": 1}, "multi-head latent attention"),
        ("minicpm3", {"num_hidden_layers": 1}, "multi-head latent attention"),
        ("falcon", {}, "AttentionInterface"),
        ("bloom", {}, "AttentionInterface"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "read the keys of other layers"),
        ("gemma3n_text", {}, "read the keys of earlier layers"),
        ("llama4_text", {"num_hidden_layers": 4}, "chunked_attention"),
        ("diffllama", {}, "regroups values"),
        ("doge", {}, "mask depends on the cached values"),
        ("minimax", {"num_hidden_layers": 2}, "cache of its own class only"),
        ("mamba", {}, "no layer caches keys"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("phi3", {"rope_parameters": LONGROPE, "hidden_size": 512}, "LongRoPE"),
        ("t5", {}, "cross-attention"),
        ("llama", {"num_hidden_layers": 1}, "offloaded to meta"),
    ],
)
def test_a_model_type_that_is_refused_is_told_why(model_type: str, changes: dict[str, Any], reason: str) -> None:
    config = CONFIG_MAPPING[model_type](**changes)
    with torch.device("meta"):
        model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)
    check_refused(model, reason)


def check_refused(model: Any, reason: str) -> None:
    """The refusal is one line with reason and remedy, and the model is as it was."""
    before = model.config.get_text_config()._attn_implementation
    with pytest.raises(Unsupported, match=reason) as error:
        kvarto.Cache(model, "int4")
    assert "\n" not in str(error.value)
    assert "; " in str(error.value)
    assert model.config.get_text_config()._attn_implementation == before


def test_what_is_no_model_or_no_format_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="PreTrainedModel"):
        kvarto.Cache("smollm2", "int4")
    with pytest.raises(UsageError, match="did you mean"):
        kvarto.Cache(tiny.shared("llama"), "int44")
    with pytest.raises(AttributeError):
        _ = kvarto.Cash  # type: ignore[attr-defined]


def test_a_model_that_alters_keys_or_values_is_noticed_without_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(quirks.MODEL_TYPES, "diffllama")
    model = tiny.model("diffllama")
    with pytest.raises(Unsupported, match="altered values"):
        model(**tiny.prompt(20), cache=kvarto.Cache(model, "int4"))


def test_a_model_that_is_switched_away_is_noticed() -> None:
    model = tiny.model("llama")
    kv = kvarto.Cache(model, "int4")
    model(**tiny.prompt(20), cache=kv)
    model.set_attn_implementation("sdpa")
    with pytest.raises(Unsupported, match="set to sdpa after the cache was made"):
        model(**tiny.one_more_token(tiny.prompt(20)), cache=kv)


@pytest.mark.parametrize("handed_on", [True, False])
def test_keys_that_never_reach_our_attention_are_noticed(handed_on: bool) -> None:
    """As a model would that copies the keys, or that has an attention of its own."""
    model = tiny.model("llama")
    kv = kvarto.Cache(model, "int4")
    k = v = torch.zeros(1, 2, 3, 16)
    mask = kv.padding_mask(3, None, sequences=1, window_tokens=None, device=torch.device("cpu"))
    keys, values = kv.update(k, v, 0)
    if handed_on:
        attention = ALL_ATTENTION_FUNCTIONS["kvarto-sdpa"]
        with pytest.raises(Unsupported, match="alters keys"):
            attention(model.model.layers[0].self_attn, torch.zeros(1, 4, 3, 16), keys.clone(), values, mask)
    with pytest.raises(Unsupported, match="never reached"):
        kv.update(k, v, 1)
    kv.reset()
    model(**tiny.prompt(5), cache=kv)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"attention_mask": torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()}, "2D attention_mask"),
        ({"output_attentions": True}, "attention weights"),
        ({"cu_seq_lens_q": torch.tensor([0, 10, 20], dtype=torch.int32)}, "packed"),
    ],
)
def test_a_forward_that_asks_for_more_is_refused(arguments: dict[str, Any], reason: str) -> None:
    model = tiny.shared("llama")
    with pytest.raises(Unsupported, match=reason):
        model(input_ids=tiny.prompt(20)["input_ids"], cache=kvarto.Cache(model, "int4"), **arguments)


def test_training_is_refused() -> None:
    model = tiny.model("llama", attention_dropout=0.1)
    with pytest.raises(Unsupported, match=r"model\.eval"):
        model.train()(**tiny.prompt(20), cache=kvarto.Cache(model, "int4"))
    model.eval().requires_grad_(True)
    with pytest.raises(Unsupported, match="inference_mode"):
        model(**tiny.prompt(20), cache=kvarto.Cache(model, "int4"))
    with torch.inference_mode():
        model(**tiny.prompt(20), cache=kvarto.Cache(model, "int4"))


def test_masks_that_do_not_fit_what_is_held_are_refused() -> None:
    model, inputs = tiny.shared("llama"), tiny.prompt(20, 12)
    kv = kvarto.Cache(model, "int4")
    model(**inputs, cache=kv)
    token = torch.full((2, 1), 5)
    with pytest.raises(ShapeError, match="attention_mask"):
        model(token, attention_mask=torch.ones(2, 1), cache=kv)
    with pytest.raises(UsageError, match="padding that the 20 cached columns"):
        model(token, cache=kv)
    with pytest.raises(ShapeError, match="sequences"):
        model(token[:1], cache=kv)
    assert tiny.feed(model, kv, tiny.one_more_token(inputs), [1]).shape == (2, 1, tiny.VOCABULARY)


def test_keys_that_are_not_as_the_config_says_are_refused() -> None:
    model = tiny.model("llama")
    model.config.num_key_value_heads = 4
    with pytest.raises(ShapeError, match=r"keys of layer 0: expected \[B, 4, T, 16\]"):
        model(**tiny.prompt(20), cache=kvarto.Cache(model, "int4"))
    model.config.num_key_value_heads = 2
    kv = kvarto.Cache(model, "int4")
    with pytest.raises(ShapeError, match="bfloat16"):
        model.to(torch.bfloat16)(**tiny.prompt(20), cache=kv)


def test_nan_is_refused_and_the_cache_says_that_it_broke_off() -> None:
    model, inputs = tiny.model("llama"), tiny.prompt(100)
    kv = kvarto.Cache(model, "int4")
    weight = model.model.layers[2].self_attn.k_proj.weight
    sound = weight[0, 0].item()
    weight[0, 0] = torch.nan
    with pytest.raises(NotFinite, match="keys"):
        model(**inputs, cache=kv)
    weight[0, 0] = sound
    with pytest.raises(Unsupported, match=r"broke off.*cache\.reset"):
        model(**inputs, cache=kv)
    kv.reset()
    assert torch.equal(model(**inputs, cache=kv).logits, model(**inputs, cache=kvarto.Cache(model, "int4")).logits)


def test_a_prefill_that_breaks_off_within_a_layer_is_noticed() -> None:
    model, inputs = tiny.model("llama", max_position_embeddings=2048), tiny.prompt(1100)
    model.model.embed_tokens.weight[7] = torch.nan
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == 7, 8)
    ids[0, 1080] = 7
    kv = kvarto.Cache(model, "int4")
    with pytest.raises(NotFinite):
        model(ids, cache=kv)
    with pytest.raises(Unsupported, match="broke off"):
        model(ids[:, :5], cache=kv)


def test_a_model_on_several_devices_is_refused() -> None:
    model = tiny.model("llama")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": "cpu"}
    check_refused(model, "spread over or offloaded to 0, cpu")
    model.hf_device_map = {"": "cpu"}
    kvarto.Cache(model, "int4")
