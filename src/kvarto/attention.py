"""PagedKV: the cache of a whole model. With layer.py, the one place that knows codec, cache and kernel.

kv.append(layer, k, v); kv.attend(layer, q)     or both at once, in bounded memory:     kv.extend(layer, q, k, v)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvarto.cache.slab import PageStore
from kvarto.errors import Unsupported, UsageError
from kvarto.formats import Policy, parse_policy
from kvarto.jit import torch
from kvarto.layer import Footprint, LayerKV, OpenPages
from kvarto.layer_pages import LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Footprint", "LayerKV", "LayerSpec", "OpenPages", "PagedKV"]

# Tokens of a long prefill that are appended and attended at once. A GPU decodes the history anew for each run, and has room for their raw pages.
_RUN_TOKENS_CPU, _RUN_TOKENS = 1024, 4096


class PagedKV:
    """The cache of a model: a LayerKV for each layer that caches K and V.

    `dtype` is the model's own, in which open pages are kept; `kernel` names a kernel or None for the best that supports the pages.
    `capacity_tokens`, for servers: storage for so many tokens of each layer, of at most `capacity_sequences` sequences together, is allocated at
    once and never grows; OutOfPages is raised beyond, before anything is stored. None: storage grows as needed.
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
        capacity_tokens: int | None = None,
        capacity_sequences: int = 1,
    ) -> None:
        self.policy = policy = parse_policy(policy) if isinstance(policy, str) else policy
        device = _device(device)
        self._open = OpenPages(dtype, device)
        self.layers = [
            LayerKV(
                spec,
                policy.for_layer(i, len(layers), self._open.format),
                self._open,
                device=device,
                kernel=kernel,
                index=i,
            )
            for i, spec in enumerate(layers)
        ]
        for name, capacity in (("capacity_tokens", capacity_tokens), ("capacity_sequences", capacity_sequences)):
            if capacity is not None and capacity < 1:
                raise UsageError(name, "at least 1", capacity)
        self._capacity_sequences = None if capacity_tokens is None else capacity_sequences
        if capacity_tokens is not None:
            _fix_capacity(self.layers, capacity_tokens, capacity_sequences)

    @property
    def kernel_names(self) -> str:
        """The kernels really used, for packed pages and for raw ones: one name when all agree."""
        return ", ".join(sorted({kernel.name for layer in self.layers for kernel in (layer.kernel, layer.raw_kernel)}))

    def append(self, layer: int, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
        """See `LayerKV.append`."""
        self._require_sequences("k", k.shape[0])
        self.layers[layer].append(k, v, valid)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """See `LayerKV.attend`."""
        return self.layers[layer].attend(q, scale=scale, softcap=softcap, sinks=sinks)

    def extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Append and attend in runs of a few thousand tokens, so that a long prefill holds few raw pages at a time. Options as in `attend`.

        Path invariance is what allows it: the result does not depend on where the runs are cut. Returns [B, Hq, T, Dv] in q's dtype.
        """
        run_tokens = _run_tokens(q.device)
        if q.shape[2] <= run_tokens:
            self.append(layer, k, v, valid)
            return self.attend(layer, q, **options)
        outs = []
        for first in range(0, q.shape[2], run_tokens):
            run = slice(first, first + run_tokens)
            self.append(layer, k[:, :, run], v[:, :, run], None if valid is None else valid[:, run])
            outs.append(self.attend(layer, q[:, :, run], **options))
        return torch.cat(outs, dim=2)

    def crop(self, tokens: int) -> None:
        """Take back the last tokens in every layer, or in none: raises Unsupported if one layer cannot, NotFinite as `check`."""
        if tokens < 0:
            raise UsageError("tokens", "0 or more to take back", tokens)
        self.check()
        for layer in self.layers:
            if reason := layer.why_not_crop(tokens):
                raise Unsupported(f"crop of {tokens} tokens: {reason}; prefill the sequence again")
        for layer in self.layers:
            layer.crop(tokens)

    def reorder(self, rows: Sequence[int]) -> None:
        """See `LayerKV.reorder`. Raises NotFinite as `check`."""
        self.check()
        self._require_sequences("rows", len(rows))
        for layer in self.layers:
            layer.reorder(rows)

    def clear(self) -> None:
        """Forget every sequence; storage is kept for reuse."""
        for layer in self.layers:
            layer.clear()

    def _require_sequences(self, name: str, count: int) -> None:
        if self._capacity_sequences is not None and count > self._capacity_sequences:
            raise UsageError(name, f"at most {self._capacity_sequences} sequences, this cache's capacity", count)

    @property
    def checks_due(self) -> bool:
        """True if pages were sealed since the last `check`, on a device where `append` does not check."""
        return any(layer.finite.due for layer in self.layers)

    def check(self) -> None:
        """Raise NotFinite if keys or values of any layer were not finite, until `clear`: waits for the device, once.

        On the CPU `append` has raised, before anything was stored. Elsewhere the host does not wait in `append`: call this where it waits
        anyway, and before pages or results leave.
        """
        deferred = [layer.finite for layer in self.layers if layer.finite.deferred]
        if deferred:
            for finite, largest in zip(deferred, torch.stack([f.largest for f in deferred]).tolist(), strict=True):
                finite.check(largest)

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


def _fix_capacity(layers: Sequence[LayerKV], tokens: int, sequences: int) -> None:
    """Give the stores of empty layers room for `tokens` tokens of at most `sequences` sequences together, and no more.

    A sequence keeps its sinks, its window, its open page and the last sealed page raw in every layer. While a layer extends, what a run brings is
    raw too, and sealed before a sliding window lets go of it; the layers take turns at those raw pages.
    """
    raw_pages: dict[PageStore, int] = {}
    for layer in layers:
        rule = layer.rule
        run = sequences * (-(-_run_tokens(layer.device) // rule.page_tokens) + 1)
        sealed = tokens // rule.page_tokens
        if rule.sliding_tokens is not None:
            sealed = min(sealed, sequences * (-(-rule.sliding_tokens // rule.page_tokens) + 2) + run)
        layer.sealed.fix(sealed)
        kept = sequences * (rule.sink_pages + rule.window_pages + 2)
        raw_pages[layer.open] = raw_pages.get(layer.open, run) + kept
    for store, count in raw_pages.items():
        store.fix(count)


def _run_tokens(device: torch.device) -> int:
    return _RUN_TOKENS_CPU if device.type == "cpu" else _RUN_TOKENS
