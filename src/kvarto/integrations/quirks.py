"""What kvarto must know of model families: which it refuses, with the reason, and how a config describes its layers.

Everything here is read off the model's config before the first token. What a config cannot tell is caught while the model runs
(`interface`, `transformers`), so a family that is missing from these tables is refused at its first step, not answered wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from kvarto.attention import LayerSpec
from kvarto.errors import Unsupported, UsageError
from kvarto.integrations.interface import decoders
from kvarto.layout import Geometry

if TYPE_CHECKING:
    from torch import Tensor

_OWN_CACHE = "use the model's own cache"
_ATTENTION_TYPES = ("full_attention", "sliding_attention")
_STATE_TYPES = ("linear_attention", "conv", "dummy")

MODEL_TYPES = {
    "diffllama": "it regroups values between cache and attention",
    "doge": "its attention mask depends on the cached values",
    "gemma3n_text": "its last layers read the keys of earlier layers",
    "idefics": "it normalizes keys between cache and attention",
    "inkling_text": "its attention adds a bias that depends on positions",
    "inkling2_text": "its attention adds a bias that depends on positions",
    "inkling2_loop_text": "its attention adds a bias that depends on positions",
    "jetmoe": "it repeats keys between cache and attention",
    "minimax": "it takes a cache of its own class only",
    "minimax_m3_vl_text": "its attention selects blocks of the cached keys",
    "moonshine": "it pads keys between cache and attention",
}
"""Families whose config does not show why they are refused."""

OPTIONS = {
    "block_indices": "sparse attention over selected blocks",
    "cu_seq_lens_q": "several sequences packed into one row",
    "indices": "sparse attention over selected tokens",
    "output_attentions": "attention weights as an output, which kvarto never forms",
    "position_bias": "a bias on the attention scores",
    "sinks": "sinks with keys and values of their own",
}
"""Arguments of an attention function that change what it computes in a way that kvarto does not."""


@dataclass(frozen=True)
class _Refusal:
    """`applies(config)` is true for the text config of a model that is refused."""

    applies: Callable[[Any], bool]
    reason: str
    remedy: str = _OWN_CACHE


_REFUSALS = (
    _Refusal(
        lambda c: bool(getattr(c, "kv_lora_rank", None)),
        "multi-head latent attention (MLA) caches latents, which have no heads to page",
    ),
    _Refusal(
        lambda c: (
            bool(getattr(c, "num_kv_shared_layers", 0)) or "reuse" in (getattr(c, "kv_sharing_modes", None) or ())
        ),
        "some of its layers read the keys of other layers",
    ),
    _Refusal(
        lambda c: "longrope" in _rope_types(c),
        "LongRoPE changes all rotations once a sequence outgrows the original context",
    ),
    _Refusal(
        lambda c: "dynamic" in _rope_types(c),
        "dynamic NTK RoPE changes rotations as the sequence grows, cached keys do not follow",
    ),
    _Refusal(
        lambda c: getattr(c, "use_bidirectional_attention", None) in (True, "all") or not getattr(c, "is_causal", True),
        "its attention is bidirectional",
        "use it without a cache",
    ),
    _Refusal(
        lambda c: bool(getattr(c, "output_attentions", False)),
        "output_attentions is on, and kvarto never forms attention weights",
        "set model.config.output_attentions = False, or " + _OWN_CACHE,
    ),
)


def plan_layers(model: Any) -> list[Any]:
    """For each layer of the text decoder a LayerSpec, or transformers' own cache layer where no keys are cached.

    Raises Unsupported, with the reason and a remedy, if the model cannot use kvarto; UsageError if it is no transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        remedy = "pass the model itself, not its name or a wrapper"
        raise UsageError("model", "a transformers PreTrainedModel", type(model).__name__, remedy)
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    _raise_first(name, _reasons(model, config))
    layers = list(_layers(name, config))
    _raise_first(name, _placement_reasons(model))
    return layers


def _raise_first(name: str, reasons: Iterator[tuple[str, str]]) -> None:
    for reason, remedy in reasons:
        raise Unsupported(f"{name}: {reason}; {remedy}")


def _reasons(model: Any, config: Any) -> Iterator[tuple[str, str]]:
    if model.config.is_encoder_decoder or getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models keep cross-attention keys in their cache", _OWN_CACHE
    if config.model_type in MODEL_TYPES:
        yield MODEL_TYPES[config.model_type], _OWN_CACHE
    for refusal in _REFUSALS:
        if refusal.applies(config):
            yield refusal.reason, refusal.remedy
    if not all(part._can_set_attn_implementation() for part in [model, *decoders(model)]):
        yield "it does not call attention through transformers' AttentionInterface", _OWN_CACHE


def _placement_reasons(model: Any) -> Iterator[tuple[str, str]]:
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    devices |= {str(parameter.device) for parameter in model.parameters()} if len(devices) < 2 else set()
    if len({"cuda:" + device if device.isdigit() else device for device in devices}) > 1 or "meta" in devices:
        yield (
            f"its weights are spread over or offloaded to {', '.join(sorted(devices))}",
            "load it on one device, without device_map",
        )


def _rope_types(config: Any) -> set[str]:
    """The RoPE types of a config, whose parameters are one dict or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", part.get("type", "default"))) for part in nested or [parameters]}


def _layers(name: str, config: Any) -> Iterator[Any]:
    caching = False
    types, arguments = get_layer_types_and_kwargs(config)
    for index, (kind, options) in enumerate(zip(types, arguments, strict=True)):
        if kind in _ATTENTION_TYPES:
            caching = True
            yield LayerSpec(_geometry(name, config.per_layer_config[index]), options.get("sliding_window"))
        elif kind in _STATE_TYPES:
            yield DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)
        else:
            raise Unsupported(f"{name}: layer {index} is of type {kind}, which kvarto cannot page; {_OWN_CACHE}")
    if not caching:
        raise Unsupported(f"{name}: no layer caches keys and values; {_OWN_CACHE}")


def _geometry(name: str, config: Any) -> Geometry:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    k_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    v_dim = getattr(config, "v_head_dim", None) or k_dim
    if k_dim % 8 or v_dim % 8:
        raise Unsupported(f"{name}: head dimension {k_dim} (values {v_dim}) is not a multiple of 8; {_OWN_CACHE}")
    return Geometry(heads, k_dim, v_dim)


def check_options(module: Any, query: Tensor, options: dict[str, Any]) -> None:
    """Raise Unsupported if the attention function is asked for something that kvarto does not compute."""
    name = type(module).__name__
    for option, meaning in OPTIONS.items():
        if options.get(option) is not None and options[option] is not False:
            raise Unsupported(f"{name} asks for {meaning}; use the model's own cache")
    if options.get("dropout"):
        raise Unsupported(f"{name} asks for dropout; call model.eval()")
    if query.requires_grad:
        raise Unsupported(
            f"{name} wants gradients, and kvarto is for inference; call the model under torch.inference_mode()"
        )
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Unsupported(f"{name} attends in both directions; use the model's own cache")
