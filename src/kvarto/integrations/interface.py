"""The two functions that kvarto registers with transformers, and how a model comes to call them. Nothing is patched.

`attach(model)` switches the model to the attention implementation "kvarto-sdpa" (or "kvarto-eager"): ours where the cache is ours, the one
named after the hyphen everywhere else. So an attached model gives the numbers it gave before with every other cache, and with none. Who is
asked is told by marks that our cache leaves on what passes through the model, so several caches and threads may use a model at once:

    mask      `Cache.get_mask_sizes` returns an int that knows its cache; from it `_mask` makes a [B, 1, 1, columns] mask marked as ours
    key       `Cache.update` returns the new keys, marked with the layer that holds them

A marked mask with unmarked keys, or the reverse, means that the model did something to them that kvarto does not know: it is refused.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvarto.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "kvarto-"
UNDERLYING = ("sdpa", "eager")
_MARK = "kvarto"


class Columns(int):
    """The number of columns a mask must cover, and the cache that says so."""

    kvarto: Any

    def __new__(cls, columns: int, cache: Any) -> Columns:
        """`cache` has `check_model(config)` and `padding_mask(q_length, attention_mask)`."""
        self = super().__new__(cls, columns)
        self.kvarto = cache
        return self


def mark(tensor: Tensor, owner: Any) -> Tensor:
    """Leave on `tensor` who made it; a copy or a slice of it has no mark."""
    setattr(tensor, _MARK, owner)
    return tensor


def attach(model: Any) -> None:
    """Let the text decoder of `model` ask kvarto where the cache is kvarto's. Doing it again changes nothing. Raises Unsupported."""
    config = model.config.get_text_config(decoder=True)
    if is_attached(config):
        return
    underlying = config._attn_implementation
    remedy = "call model.set_attn_implementation('sdpa') first"
    if underlying not in UNDERLYING:
        raise Unsupported(f"attention implementation {underlying}: kvarto stands beside sdpa or eager only; {remedy}")
    if underlying == "eager" and (missing := [m for m in decoders(model) if eager_attention(m) is None]):
        raise Unsupported(
            f"{type(missing[0]).__name__} has no eager attention that kvarto could hand back to; {remedy}"
        )
    name = _PREFIX + underlying
    AttentionInterface.register(name, partial(_attention, underlying))
    AttentionMaskInterface.register(name, partial(_mask, underlying))
    switch(model, name)
    if config._attn_implementation != name:
        raise Unsupported(
            f"{type(model).__name__} does not let its attention implementation be set; use the model's own cache"
        )


def is_attached(config: Any) -> bool:
    """True if the model of this text config asks kvarto."""
    return str(config._attn_implementation).startswith(_PREFIX)


def underlying_name(config: Any) -> str:
    """The implementation that the model of this text config has by itself."""
    return str(config._attn_implementation).removeprefix(_PREFIX)


def decoders(model: Any) -> list[Any]:
    """The (sub-)models that run on the text decoder's config."""
    config = model.config.get_text_config(decoder=True)
    return [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is config]


def detach(model: Any) -> None:
    """Give the model the attention implementation back that it had; its kvarto caches then refuse to go on."""
    config = model.config.get_text_config(decoder=True)
    if is_attached(config):
        switch(model, underlying_name(config))


def switch(model: Any, name: str) -> None:
    """Set the attention implementation of the text decoder, and of nothing else."""
    model.set_attn_implementation(_only(model.config, model.config.get_text_config(decoder=True), name))


def _only(config: Any, wanted: Any, name: str) -> dict[str, Any]:
    """The argument of `set_attn_implementation` that sets `name` for the (sub-)config `wanted` and leaves all others as they are."""
    if config is wanted:
        return {"": name}
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key)) is not None}
    for key, part in parts.items():
        if part is wanted:
            return {key: {"": name}}
        if deeper := _only(part, wanted, name):
            return {key: deeper}
    return {}


def _attention(
    underlying: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [B, Hq, T, Dk], key [B, Hkv, T, Dk], value [B, Hkv, T, Dv] to [B, T, Hq, Dv] and no weights, if the cache is ours."""
    layer, padding = getattr(key, _MARK, None), getattr(attention_mask, _MARK, None)
    if layer is not None:
        return layer.attend(module, query, value, padding, options), None
    if padding is None:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(underlying, eager_attention(module))
        return attend(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    raise Unsupported(f"{type(module).__name__} alters keys between cache and attention; use the model's own cache")


def eager_attention(module: Any) -> Any:
    """The model's own eager attention, which every modeling file that follows the interface defines under this name."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _mask(underlying: str, *, kv_length: int, **arguments: Any) -> Any:
    """A marked padding mask if the cache is ours, else what the underlying implementation makes of the arguments."""
    cache = getattr(kv_length, _MARK, None)
    if cache is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[underlying](kv_length=kv_length, **arguments)
    cache.check_model(arguments["config"])
    if not arguments.get("allow_is_causal_skip", False):
        raise Unsupported(
            "a mask beyond causal and padding (image tokens, packed sequences): use the model's own cache for this input"
        )
    return cache.padding_mask(
        arguments["q_length"], arguments["attention_mask"], sequences=arguments["batch_size"],
        window_tokens=arguments.get("local_size"), device=arguments["device"],
    )  # fmt: skip
