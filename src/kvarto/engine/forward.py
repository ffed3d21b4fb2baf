"""A step through a transformers model: all tokens flattened into one row, [1, tokens], attention by `Step.attend`.

Nothing of the model is ours and nothing is patched: it is switched to the attention implementation "kvarto-engine", and the step travels to it as a
keyword argument of the forward pass. Positions are given for each token; there is no mask, since the rule and the page tables say what is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvarto.engine.step import Step
from kvarto.errors import Unsupported
from kvarto.integrations.quirks import check_options, plan_layers
from kvarto.layer_pages import LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

_NAME = "kvarto-engine"
_STEP = "kvarto_step"


@dataclass(frozen=True)
class Result:
    """Of a step: logits float32 [n, V] of the tokens wanted; the largest magnitude of each token's keys and values as `Step.finish` gives it."""

    logits: Tensor
    largest: Tensor | None

    def not_finite(self) -> Any:
        """Tokens of the step whose keys or values were not finite in some layer, int64 [n] of numpy. Waits for the device."""
        if self.largest is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero(~np.isfinite(self.largest.cpu().numpy()))


class Forward:
    """`model` is the engine's alone from now on. Raises Unsupported, with the reason, for a model that cannot be batched so."""

    def __init__(self, model: Any) -> None:
        planned = plan_layers(model)
        name = type(model).__name__
        if states := sum(not isinstance(layer, LayerSpec) for layer in planned):
            raise Unsupported(
                f"{name}: {states} of its layers keep a recurrent state, which flattened batches would mix up; use kvarto.Cache"
            )
        self.specs: list[LayerSpec] = planned
        self.model, self.vocabulary = model, int(model.config.get_text_config(decoder=True).vocab_size)
        self.logits_dtype = model.dtype  # in which the model gave its last logits
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, _no_mask)
        model.set_attn_implementation(_NAME)
        if model.config.get_text_config(decoder=True)._attn_implementation != _NAME:
            raise Unsupported(f"{name} does not let its attention implementation be set; use the model's own cache")

    def run(self, step: Step) -> Result:
        """Compute all tokens of the step, and logits of those that are wanted. Pages are stored, sealed and read on the way."""
        seen = _Seen(step)
        step.begin()
        with torch.inference_mode():
            out = self.model(
                input_ids=step.tokens[None], position_ids=step.positions[None], use_cache=False, logits_to_keep=step.wanted,
                **{_STEP: seen},
            )  # fmt: skip
        if seen.layers != len(self.specs):
            raise Unsupported(
                f"{type(self.model).__name__}: {seen.layers} of {len(self.specs)} layers asked kvarto for attention; use the model's own cache"
            )
        self.logits_dtype = out.logits.dtype
        return Result(out.logits[0].float(), step.finish())


class _Seen:
    """The step, and how many layers have attended; opaque to whoever looks into keyword arguments."""

    def __init__(self, step: Step) -> None:
        self.step, self.layers = step, 0


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] to [1, T, Hq, Dv]."""
    seen = options.get(_STEP)
    if seen is None:
        raise Unsupported(
            f"{type(module).__name__} does not hand keyword arguments on to its attention; use kvarto.Cache with this model"
        )
    check_options(module, query, options)
    scaling, layer = options.get("scaling"), seen.layers
    if getattr(module, "layer_idx", layer) != layer:
        raise Unsupported(f"{type(module).__name__}: layers attend out of order; use the model's own cache")
    seen.layers += 1
    out = seen.step.attend(
        layer, *(x[0].transpose(0, 1) for x in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=options.get("softcap"), sinks=options.get("s_aux"),
    )  # fmt: skip
    return out[None], None


def _no_mask(**_: Any) -> None:
    """The page tables say what is read."""
