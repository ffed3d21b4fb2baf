"""Caches full of random keys and values: what a long prefill would leave behind, in a thousandth of its time, for timing and weighing.

Neither the time of a step nor the bytes of a page depend on the values, so unit normal noise stands in for the keys of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvarto.attention import LayerSpec, PagedKV

_RUN_TOKENS = 1024


def fill_pages(kv: PagedKV, tokens: int, *, device: torch.device | str = "cpu", seed: int = 0) -> None:
    """Append `tokens` tokens to an empty PagedKV of one sequence, in runs, as `PagedKV.extend` would; so raw pages are let go of as it does."""
    for first in range(0, tokens, _RUN_TOKENS):
        count = min(_RUN_TOKENS, tokens - first)
        for index, layer in enumerate(kv.layers):
            k, v = random_tokens(layer.spec, count, layer.dtype, device, seed + first)
            if count > 1:
                kv.append(index, k[:, :, :-1], v[:, :, :-1])
            kv.append(index, k[:, :, -1:], v[:, :, -1:])
            query = k[:, :, -1:]
            kv.attend(index, query, scale=query.shape[-1] ** -0.5)


def fill_own(
    cache: Any, specs: Sequence[LayerSpec | None], tokens: int, dtype: torch.dtype, device: Any = "cpu", seed: int = 0
) -> None:
    """The same for transformers' own cache; `specs` is None for a layer that caches no keys."""
    for first in range(0, tokens, _RUN_TOKENS):
        count = min(_RUN_TOKENS, tokens - first)
        for index, spec in enumerate(specs):
            if spec is not None:
                cache.update(*random_tokens(spec, count, dtype, device, seed + first), index)


def random_tokens(spec: LayerSpec, count: int, dtype: torch.dtype, device: Any, seed: int) -> tuple[Tensor, Tensor]:
    """K [1, Hkv, count, Dk] and V [1, Hkv, count, Dv]."""
    generator, geometry = torch.Generator().manual_seed(seed), spec.geometry
    shapes = ((1, geometry.heads, count, dim) for dim in (geometry.k_dim, geometry.v_dim))
    k, v = (torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes)
    return k, v


def own_bytes(cache: Any) -> int:
    """Bytes of the keys and values that transformers' own cache holds."""
    tensors = [getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values")]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
