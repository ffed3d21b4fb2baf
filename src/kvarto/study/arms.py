"""A cache that takes part in a study, and how tokens are fed to a model through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvarto.formats import Policy, raw_format
from kvarto.integrations.transformers import Cache
from kvarto.study.result import Role

CONTROL_CHUNK_TOKENS = 100


@dataclass(frozen=True)
class Arm:
    """One way to keep K and V: the model's own cache (`policy` None), or ours in a format.

    chunk_tokens   feed at most so many tokens at a time; None for all at once
    """

    name: str
    role: Role
    model: Any
    policy: Policy | None = None
    kernel: str | None = None
    chunk_tokens: int | None = None

    def new_cache(self) -> Any:
        """An empty cache. Raises Unsupported if the format or the kernel cannot be used with the model."""
        if self.policy is None:
            return DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return Cache(self.model, self.policy, kernel=self.kernel)

    def kernel_names(self) -> str:
        """What attends: the kernels of ours, or transformers' implementation."""
        if self.policy is None:
            implementation: str = self.model.config.get_text_config(decoder=True)._attn_implementation
            return "torch " + implementation.removeprefix("kvarto-")
        return str(self.new_cache().kernel_names)

    def bits_per_number(self) -> float:
        """Bits of one cached number in a sealed page, metadata included, averaged over the layers; of the dtype for the model's own cache."""
        if self.policy is None:
            return float(self.model.dtype.itemsize * 8)
        layers = self.new_cache().kv.layers
        bits = sum(layer.layout.nbytes * 8 for layer in layers)
        return float(bits / sum(layer.spec.geometry.elements_per_token * layer.rule.page_tokens for layer in layers))


def baseline_arm(model: Any) -> Arm:
    """The model with its own cache in its own dtype."""
    return Arm(dtype_name(model), "baseline", model)


def control_arm(model: Any, kernel: str | None) -> Arm:
    """The baseline through another path, raw pages in chunks that fit no page: what differs is rounding, the noise floor."""
    raw = Policy(raw_format(str(model.dtype).removeprefix("torch.")))
    return Arm("A/A control", "control", model, raw, kernel, CONTROL_CHUNK_TOKENS)


def candidate_arm(model: Any, policy: Policy, kernel: str | None) -> Arm:
    """A format to judge."""
    return Arm(str(policy), "candidate", model, policy, kernel)


def dtype_name(model: Any) -> str:
    """The model's dtype as users write it: bf16, fp16 or fp32."""
    return str(raw_format(str(model.dtype).removeprefix("torch.")))


def feed(arm: Arm, cache: Any, tokens: Sequence[int], *, scored: int = 1) -> Tensor:
    """Append `tokens` to a cache of one sequence. Returns the logits after each of the last `scored` tokens, [scored, vocabulary]."""
    step = arm.chunk_tokens or len(tokens)
    kept = []
    for first in range(0, len(tokens), step):
        chunk = torch.tensor([tokens[first : first + step]], device=arm.model.device)
        wanted = min(chunk.shape[1], first + chunk.shape[1] - (len(tokens) - scored))
        logits = arm.model(chunk, cache=cache, use_cache=True, logits_to_keep=max(wanted, 1)).logits[0]
        if wanted > 0:
            kept.append(logits)
    return torch.cat(kept)
