"""To see queries, keys, values and outputs of every layer of a transformers model, through its attention interface: nothing is patched.

For the time of `watching` the model is switched to an attention implementation that computes what its own one does, and shows it to the Watcher that
travels along as a keyword argument of the forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvarto.errors import Unsupported
from kvarto.integrations.interface import UNDERLYING, eager_attention, switch, underlying_name
from kvarto.integrations.quirks import plan_layers
from kvarto.layer_pages import LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "kvarto-watch-"
_WATCHER = "kvarto_watcher"


@dataclass(frozen=True)
class Seen:
    """What a layer's attention got: query [B, Hq, T, Dk], key [B, Hkv, T, Dk], value [B, Hkv, T, Dv], and what it does with them.

    `layer` counts those that cache keys and values; `module` is the model's.
    """

    layer: int
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]

    @property
    def attend_options(self) -> dict[str, Any]:
        """Scale, softcap and sinks as `PagedKV.extend` takes them."""
        scaling = self.options.get("scaling")
        return {
            "scale": self.query.shape[-1] ** -0.5 if scaling is None else scaling,
            "softcap": self.options.get("softcap"),
            "sinks": self.options.get("s_aux"),
        }


class Watcher:
    """Is shown every layer of a forward pass in turn; to be derived from."""

    layers = 0

    def before(self, seen: Seen) -> None:
        """A layer is about to attend."""

    def after(self, seen: Seen, out: Tensor) -> None:
        """It gave out [B, T, Hq, Dv]."""


@contextlib.contextmanager
def watching(model: Any) -> Iterator[list[LayerSpec]]:
    """Let `watched` be called; gives the layers that cache keys and values. Afterwards the model is as it was. Raises Unsupported."""
    specs = [layer for layer in plan_layers(model) if isinstance(layer, LayerSpec)]
    config = model.config.get_text_config(decoder=True)
    before, underlying = config._attn_implementation, underlying_name(config)
    if underlying not in UNDERLYING:
        raise Unsupported(
            f"attention implementation {underlying}: kvarto watches sdpa or eager only; call model.set_attn_implementation('sdpa') first"
        )
    name = _PREFIX + underlying
    AttentionInterface.register(name, partial(_attention, underlying))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[underlying])
    switch(model, name)
    try:
        yield specs
    finally:
        switch(model, before)


def watched(model: Any, tokens: Tensor, watcher: Watcher, specs: list[LayerSpec], *, scored: int = 1) -> Tensor:
    """Run tokens int64 [B, T] through a model that is `watching`. Returns logits [B, scored, vocabulary] of the last ones. Raises Unsupported."""
    watcher.layers = 0
    logits: Tensor = model(tokens, use_cache=False, logits_to_keep=scored, **{_WATCHER: watcher}).logits
    if watcher.layers != len(specs):
        name = type(model).__name__
        raise Unsupported(f"{name}: {watcher.layers} of {len(specs)} layers could be watched; it cannot be calibrated")
    return logits


def _attention(
    underlying: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    watcher = options.pop(_WATCHER, None)
    if watcher is None:
        name = type(module).__name__
        raise Unsupported(f"{name} does not hand keyword arguments on to its attention; it cannot be calibrated")
    seen = Seen(watcher.layers, module, query, key, value, options)
    watcher.layers += 1
    watcher.before(seen)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(underlying, eager_attention(module))
    out, weights = attend(module, query, key, value, attention_mask, **options)
    watcher.after(seen, out)
    return out, weights


def as_row(tokens: tuple[int, ...], model: Any) -> Tensor:
    """int64 [1, T] where the model is."""
    return torch.tensor([tokens], device=model.device)
