"""What is done with the pages of one layer: tokens are stored, full pages sealed, queries answered. Whose pages they are, others know.

Pages lie in storage of the caller's, uint8 [P, page_nbytes] with rows contiguous; rows may lie at any distance, even over one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarto.binding import BoundCodec, choose_kernel, choose_sealer
from kvarto.errors import UsageError
from kvarto.formats import Format
from kvarto.jit import torch
from kvarto.kernels.base import PageSet, Partial, Queries, merge
from kvarto.layout import Geometry, Side
from kvarto.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

# Numbers that are encoded at once: what fits a core's own cache. Four times more takes twice as long for each (docs/LOG.md).
_SEAL_ELEMENTS_CPU = 1 << 17
# Elsewhere few operations count, and 64 MB in float32.
_SEAL_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class LayerSpec:
    """What must be known of a model's layer. `sliding_tokens`: its attention window, or None for full attention."""

    geometry: Geometry
    sliding_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_tokens is not None and self.sliding_tokens < 1:
            raise UsageError("sliding_tokens", "at least 1, or None for full attention", self.sliding_tokens)


class LayerPages:
    """A layer in a format: `raw` is the identity format of the model's own `dtype`. `kernel` names one, None is the best.

    Raises Unsupported, UsageError, UnknownName or BackendUnavailable when the layer cannot have its format or kernel.
    """

    def __init__(
        self, spec: LayerSpec, chosen: Format, raw: Format, *, dtype: torch.dtype, device: torch.device, kernel: str | None
    ) -> None:  # fmt: skip
        self.spec, self.format, self.raw_format, self.dtype, self.device = spec, chosen, raw, dtype, device
        self.rule = rule_of(spec, chosen)
        self.layout, self.raw_layout = chosen.layout(spec.geometry), raw.layout(spec.geometry)
        self.k, self.v = BoundCodec(chosen.k, self.layout.k), BoundCodec(chosen.v, self.layout.v)
        self.raw_k, self.raw_v = BoundCodec(raw.k, self.raw_layout.k), BoundCodec(raw.v, self.raw_layout.v)
        self.kernel = choose_kernel(kernel, self.layout, self.k, self.v, device.type)
        self.raw_kernel = choose_kernel(kernel, self.raw_layout, self.raw_k, self.raw_v, device.type)
        self._sealer = choose_sealer(self.raw_layout, self.layout, self.k, self.v, device.type)
        # What `saturated_elements` counts; on the device as long as nobody looks.
        self.saturated: int | Tensor = 0

    # ---- tokens in -------------------------------------------------------------------------------------------------

    def raw_views(self, raw_pages: Tensor) -> tuple[Tensor, Tensor]:
        """Raw pages as numbers of the layer's dtype, K [P, S, Hkv, Dk] and V [P, S, Hkv, Dv], sharing their memory."""
        numbers, views = raw_pages.view(self.dtype), []
        S, heads, size = self.rule.page_tokens, self.spec.geometry.heads, self.dtype.itemsize
        page, pair, start = numbers.stride(0), self.raw_layout.pair_nbytes // size, numbers.storage_offset()
        for side, dim in ((Side.K, self.spec.geometry.k_dim), (Side.V, self.spec.geometry.v_dim)):
            first, _ = self.raw_layout.slab_range(side)
            within = (dim, pair, 1) if side is Side.K else (1, pair, S)
            views.append(numbers.as_strided((len(numbers), S, heads, dim), (page, *within), start + first // size))
        return views[0], views[1]

    def store(self, views: tuple[Tensor, Tensor], k: Tensor, v: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Tokens k [tokens, Hkv, Dk], v [tokens, Hkv, Dv] into raw pages and slots, int64 [tokens]; `views` as `raw_views` gives them."""
        raw_k, raw_v = views
        raw_k.index_put_((pages, slots), k)
        raw_v.index_put_((pages, slots), v)

    def seal(
        self, raw_pages: Tensor, views: tuple[Tensor, Tensor], raw_ids: Tensor, sealed_pages: Tensor, sealed_ids: Tensor, first: Tensor,
    ) -> None:  # fmt: skip
        """Encode full raw pages raw_ids, int32 [n] on the device, from raw values, into sealed ones; `first`: the places of their first tokens.

        Those with a negative sealed id are skipped, on the CPU and where `replayable`.
        """
        if self._sealer is not None:
            if isinstance(self.saturated, int):
                self.saturated = torch.full((1,), self.saturated, dtype=torch.int64, device=self.device)
            self._sealer(raw_pages, raw_ids, sealed_pages, sealed_ids, self.saturated)
            return
        raw_k, raw_v = views
        elements = _SEAL_ELEMENTS_CPU if self.device.type == "cpu" else _SEAL_ELEMENTS
        at_once = max(1, elements // (self.spec.geometry.elements_per_token * self.rule.page_tokens))
        if self.device.type == "cpu":  # elsewhere one would wait for the answer, and nobody asks for it (`replayable`)
            raw_ids, sealed_ids, first = (ids[sealed_ids >= 0] for ids in (raw_ids, sealed_ids, first))
        raw_ids, sealed_ids = raw_ids.long(), sealed_ids.long()
        for i in range(0, len(raw_ids), at_once):
            ids, targets, at = (each[i : i + at_once] for each in (raw_ids, sealed_ids, first))
            k = raw_k.transpose(1, 2)[ids].float()
            v = raw_v.permute(0, 2, 3, 1)[ids].float().transpose(-1, -2)
            self.saturated = self.saturated + self.k.saturated(k, at) + self.v.saturated(v, at)
            sealed_pages[targets] = torch.cat([self.k.encode(k, at), self.v.encode(v, at)], dim=-1).flatten(1)

    @property
    def replayable(self) -> bool:
        """A CUDA graph can hold what is done with the pages: the host decides nothing on the way, and nothing waits."""
        return self._sealer is not None and self.kernel.name == self.raw_kernel.name == "triton"

    # ---- queries ---------------------------------------------------------------------------------------------------

    def attend_pages(
        self, queries: Queries, raw: tuple[Tensor, Tensor], packed: tuple[Tensor, Tensor] | None, *,
        scale: float, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Partial:  # fmt: skip
        """Queries to what the rule lets them read of raw and packed pages, each (storage, table as in `PageSet`); options as in `Kernel.attend`.

        In one call of one kernel, unless raw and packed pages need different ones.
        """
        sets = [PageSet(*raw, self.raw_layout, self.raw_k, self.raw_v, raw=True)]
        if packed is not None:
            sets.append(PageSet(*packed, self.layout, self.k, self.v, raw=False))
        if len(sets) == 1 or self.kernel.name == self.raw_kernel.name:
            return self.raw_kernel.attend(queries, sets, self.rule, scale=scale, softcap=softcap, sinks=sinks)
        partials = [
            kernel.attend(queries, [pages], self.rule, scale=scale, softcap=softcap)
            for kernel, pages in zip((self.raw_kernel, self.kernel), sets, strict=True)
        ]
        return merge(partials, sinks)

    # ---- reports ---------------------------------------------------------------------------------------------------

    @property
    def saturated_elements(self) -> int:
        """Elements that were beyond their codec's range when their page was sealed, ever. Waits for the device."""
        return int(self.saturated)


def rule_of(spec: LayerSpec, chosen: Format) -> Rule:
    """Raises UsageError if sink and window of a format are not whole pages."""
    tokens = spec.geometry.page_tokens
    for name, raw_tokens in (("sink", chosen.sink_tokens), ("window", chosen.window_tokens)):
        if raw_tokens % tokens:
            raise UsageError(f"{name} of {chosen}", f"a multiple of this cache's pages of {tokens} tokens", raw_tokens)
    return Rule(tokens, chosen.sink_tokens // tokens, chosen.window_tokens // tokens, spec.sliding_tokens)
