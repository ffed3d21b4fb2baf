"""PagedKV: the cache of a whole model. With layer.py, the one place that knows codec, cache and kernel.

kv.append(layer, k, v); kv.attend(layer, q)     or both at once, in bounded memory:     kv.extend(layer, q, k, v)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvarto.errors import Unsupported, UsageError
from kvarto.formats import Policy, parse_policy
from kvarto.jit import torch
from kvarto.layer import Footprint, LayerKV, LayerSpec, OpenPages

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Footprint", "LayerKV", "LayerSpec", "OpenPages", "PagedKV"]

_RUN_TOKENS = 1024


class PagedKV:
    """The cache of a model: a LayerKV for each layer that caches K and V.

    `dtype` is the model's own, in which open pages are kept; `kernel` names a kernel or None for the best that supports the pages.
    Raises Unsupported, UsageError or BackendUnavailable when a layer cannot have its format.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        policy: Policy | str,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kernel: str | None = None,
    ) -> None:
        self.policy = policy = parse_policy(policy) if isinstance(policy, str) else policy
        device = _device(device)
        self._open = OpenPages(dtype, device)
        self.layers = [
            LayerKV(spec, policy.for_layer(i, len(layers), self._open.format), self._open, device=device, kernel=kernel)
            for i, spec in enumerate(layers)
        ]

    @property
    def kernel_names(self) -> str:
        """The kernels really used, for packed pages and for raw ones: one name when all agree."""
        return ", ".join(sorted({kernel.name for layer in self.layers for kernel in (layer.kernel, layer.raw_kernel)}))

    def append(self, layer: int, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
        """See `LayerKV.append`."""
        self.layers[layer].append(k, v, valid)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """See `LayerKV.attend`."""
        return self.layers[layer].attend(q, scale=scale, softcap=softcap, sinks=sinks)

    def extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Append and attend in runs of `_RUN_TOKENS`, so that a long prefill holds few raw pages at a time. Options as in `attend`.

        Path invariance is what allows it: the result does not depend on where the runs are cut. Returns [B, Hq, T, Dv] in q's dtype.
        """
        outs = []
        for first in range(0, max(1, q.shape[2]), _RUN_TOKENS):
            run = slice(first, first + _RUN_TOKENS)
            self.append(layer, k[:, :, run], v[:, :, run], None if valid is None else valid[:, run])
            outs.append(self.attend(layer, q[:, :, run], **options))
        return torch.cat(outs, dim=2)

    def crop(self, tokens: int) -> None:
        """Take back the last tokens in every layer, or in none: raises Unsupported if one layer cannot."""
        if tokens < 0:
            raise UsageError("tokens", "0 or more to take back", tokens)
        for layer in self.layers:
            if reason := layer.why_not_crop(tokens):
                raise Unsupported(f"crop of {tokens} tokens: {reason}; prefill the sequence again")
        for layer in self.layers:
            layer.crop(tokens)

    def reorder(self, rows: Sequence[int]) -> None:
        """See `LayerKV.reorder`."""
        for layer in self.layers:
            layer.reorder(rows)

    def clear(self) -> None:
        """Forget every sequence; storage is kept for reuse."""
        for layer in self.layers:
            layer.clear()

    @property
    def saturated_elements(self) -> int:
        """Elements that were beyond their codec's range when their page was sealed, ever: a page sealed again after a crop counts again."""
        return sum(layer.saturated_elements for layer in self.layers)

    def footprint(self) -> Footprint:
        """Bytes in use and allocated, all layers."""
        return sum((layer.footprint() for layer in self.layers), Footprint(allocated_bytes=self._open.allocated_bytes))


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise UsageError("device", "one that torch knows, such as cpu or cuda", repr(device)) from None
