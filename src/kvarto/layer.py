"""One layer of the cache: its pages, its sequences, and the two things done with them.

    append    new tokens go raw into the open page; a page that fills is sealed: encoded once, from raw values
    attend    the queries of those tokens read packed and raw pages by the rule of kernels/base.py

Each sequence has a list of sealed page ids and a few raw pages: the sinks, the recent window, the open page, and the last sealed page, whose raw
values wait until the next page seals so that tokens can be taken back over one page boundary (`crop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvarto.binding import BoundCodec, choose_kernel
from kvarto.cache.slab import PageStore
from kvarto.errors import NotFinite, ShapeError, Unsupported, UsageError
from kvarto.formats import Format, raw_format
from kvarto.jit import torch
from kvarto.kernels.base import Kernel, PageSet, Queries, Rule, merge
from kvarto.layout import Geometry, Side
from kvarto.page import CodecId, Page

if TYPE_CHECKING:
    from torch import Tensor

# Numbers that are encoded at once: what fits a core's own cache. Four times more takes twice as long for each (docs/LOG.md).
_SEAL_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class LayerSpec:
    """What PagedKV must know of a model's layer. `sliding_tokens`: its attention window, or None for full attention."""

    geometry: Geometry
    sliding_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_tokens is not None and self.sliding_tokens < 1:
            raise UsageError("sliding_tokens", "at least 1, or None for full attention", self.sliding_tokens)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a cache. `allocated_bytes` is what the process holds for it, slack included; the others count what is in use."""

    payload_bytes: int = 0
    metadata_bytes: int = 0
    raw_bytes: int = 0
    allocated_bytes: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.payload_bytes + other.payload_bytes,
            self.metadata_bytes + other.metadata_bytes,
            self.raw_bytes + other.raw_bytes,
            self.allocated_bytes + other.allocated_bytes,
        )


@dataclass
class _Row:
    """One sequence of one layer. `packed[j]` is the id of sealed page j, or -1 if it is a sink or has left the sliding window."""

    length: int = 0
    packed: list[int] = field(default_factory=list)
    raw: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pending:
    """Tokens that were appended and have not attended yet: how many of each sequence, columns T, which of them are valid (None: all)."""

    counts: list[int]
    columns: int
    valid: Tensor | None


class OpenPages:
    """The stores of raw pages, one for each page size, shared by all layers: what one layer lets go of after a prefill the next one takes."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.format, self._device = dtype, raw_format(str(dtype).removeprefix("torch.")), device
        self._stores: dict[int, PageStore] = {}

    def store(self, page_nbytes: int) -> PageStore:
        """The store of raw pages of this size."""
        if page_nbytes not in self._stores:
            self._stores[page_nbytes] = PageStore(page_nbytes, self._device)
        return self._stores[page_nbytes]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of storage, used or not."""
        return sum(store.allocated_bytes for store in self._stores.values())


class LayerKV:
    """One layer of a PagedKV: its pages and its sequences."""

    def __init__(
        self, spec: LayerSpec, chosen: Format, open_pages: OpenPages, *, device: torch.device, kernel: str | None = None
    ) -> None:
        self.spec, self.format, self.dtype = spec, chosen, open_pages.dtype
        geometry = spec.geometry
        self.layout = chosen.layout(geometry)
        self.k, self.v = BoundCodec(chosen.k, self.layout.k), BoundCodec(chosen.v, self.layout.v)
        raw = open_pages.format
        self.raw_layout = raw.layout(geometry)
        self.raw_k, self.raw_v = BoundCodec(raw.k, self.raw_layout.k), BoundCodec(raw.v, self.raw_layout.v)
        tokens = geometry.page_tokens
        for name, raw_tokens in (("sink", chosen.sink_tokens), ("window", chosen.window_tokens)):
            if raw_tokens % tokens:
                raise UsageError(
                    f"{name} of {chosen}", f"a multiple of this cache's pages of {tokens} tokens", raw_tokens
                )
        self.rule = Rule(tokens, chosen.sink_tokens // tokens, chosen.window_tokens // tokens, spec.sliding_tokens)
        self.kernel = choose_kernel(kernel, self.layout, self.k, self.v, device.type)
        self.raw_kernel = choose_kernel(kernel, self.raw_layout, self.raw_k, self.raw_v, device.type)
        self.sealed = PageStore(self.layout.nbytes, device)
        self.open = open_pages.store(self.raw_layout.nbytes)
        self.rows: list[_Row] = []
        self.saturated_elements = 0
        self._pending: _Pending | None = None

    # ---- tokens in -------------------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
        """k [B, Hkv, T, Dk], v [B, Hkv, T, Dv] in the layer's dtype; valid bool [B, T], False for padding, which is not stored.

        Raises ShapeError or NotFinite; then nothing has been stored.
        """
        self._check(k, v, valid)
        B, _, T, _ = k.shape
        if valid is not None and bool(valid.all()):
            valid = None
        counts = [T] * B if valid is None else valid.sum(dim=1).tolist()
        tokens_k, tokens_v = (_ragged(x.transpose(1, 2), valid) for x in (k, v))
        self._check_finite(tokens_k, "keys")
        self._check_finite(tokens_v, "values")
        if not self.rows:
            self.rows = [_Row() for _ in range(B)]
        pages, slots = self._open_slots(counts)
        raw_k, raw_v = self._raw_views()
        raw_k[pages, :, slots] = tokens_k
        raw_v[pages, :, :, slots] = tokens_v
        for row, count in zip(self.rows, counts, strict=True):
            row.length += count
        self._seal_full_pages()
        self._pending = _Pending(counts, T, valid)

    def _check(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        geometry = self.spec.geometry
        for name, x, dim in (("k", k, geometry.k_dim), ("v", v, geometry.v_dim)):
            rows = len(self.rows) or x.shape[0]
            expected = (rows, geometry.heads, k.shape[2], dim)
            if tuple(x.shape) != expected:
                raise ShapeError(name, f"[B, Hkv, T, D] = {expected}", tuple(x.shape))
            if x.dtype != self.dtype:
                raise ShapeError(
                    name,
                    f"the dtype of this cache, {self.dtype}",
                    x.dtype,
                    "convert it, or make the cache with that dtype",
                )
        columns = (k.shape[0], k.shape[2])
        if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != columns):
            raise ShapeError("valid", f"bool [B, T] = {columns}", f"{valid.dtype} {tuple(valid.shape)}")
        if k.shape[0] == 0:
            raise ShapeError("k", "at least one sequence", tuple(k.shape))

    def _check_finite(self, tokens: Tensor, side: str) -> None:
        if not bool(torch.isfinite(tokens).all()):
            bad = int((~torch.isfinite(tokens)).sum())
            raise NotFinite(
                f"{side}: expected finite values, got {bad} of {tokens.numel()} NaN or infinite; check the model's weights and dtype"
            )

    def _open_slots(self, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Raw page id and slot of each new token, int64 [sum(counts)], taking and un-sharing pages as needed."""
        S, device = self.rule.page_tokens, self.open.pages.device
        pages, slots = [], []
        for row, count in zip(self.rows, counts, strict=True):
            tokens = torch.arange(row.length, row.length + count, device=device)
            first, end = row.length // S, self.spec.geometry.pages_for(row.length + count)
            ids = torch.tensor(
                [self._writable(row, page) for page in range(first, end if count else first)], device=device
            )
            pages.append(ids[tokens // S - first] if count else tokens)
            slots.append(tokens % S)
        return torch.cat(pages), torch.cat(slots)

    def _writable(self, row: _Row, page: int) -> int:
        """The raw page that `row` may write to: a new one, its own, or its own copy of one that others hold too."""
        if page not in row.raw:
            row.raw[page] = self.open.take(1)[0]
        elif self.open.pool.holders(row.raw[page]) > 1:
            shared = row.raw[page]
            row.raw[page] = self.open.copy(shared)
            self.open.pool.release(shared)
        return row.raw[page]

    def _raw_views(self) -> tuple[Tensor, Tensor]:
        """The open pages as numbers: K [P, Hkv, S, Dk] and V [P, Hkv, Dv, S] of the layer's dtype, sharing memory with the store."""
        views = []
        for side in (Side.K, Side.V):
            first, end = self.raw_layout.slab_range(side)
            slabs = self.open.pages.view(-1, self.spec.geometry.heads, self.raw_layout.pair_nbytes)[..., first:end]
            views.append(slabs.view(self.dtype).unflatten(-1, self.raw_layout.slab(side).tile_shape))
        return views[0], views[1]

    def _seal_full_pages(self) -> None:
        """Encode every page that is full and not yet sealed; sinks are never encoded."""
        due: list[tuple[_Row, int]] = []
        for row in self.rows:
            full = row.length // self.rule.page_tokens
            for page in range(len(row.packed), full):
                row.packed.append(-1)
                if page >= self.rule.sink_pages:
                    due.append((row, page))
        at_once = max(1, _SEAL_ELEMENTS // (self.spec.geometry.elements_per_token * self.rule.page_tokens))
        for i in range(0, len(due), at_once):
            self._seal(due[i : i + at_once])

    def _seal(self, due: list[tuple[_Row, int]]) -> None:
        raw_k, raw_v = self._raw_views()
        raw_ids = torch.tensor([row.raw[page] for row, page in due], device=raw_k.device)
        k, v = raw_k[raw_ids].float(), raw_v[raw_ids].float().transpose(-1, -2)
        self.saturated_elements += self.k.saturated(k) + self.v.saturated(v)
        ids = self.sealed.take(len(due))
        self.sealed.put(ids, torch.cat([self.k.encode(k), self.v.encode(v)], dim=-1).flatten(1))
        for (row, page), sealed_id in zip(due, ids, strict=True):
            row.packed[page] = sealed_id

    # ---- queries ---------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        """The queries of the tokens last appended: q [B, Hq, T, Dk] to [B, Hq, T, Dv], in q's dtype; 0 where a token was padding.

        scale multiplies q.k; softcap and sinks (float [Hq]) as in kernels/base.py. Raw pages that no later query may read are let go.
        """
        pending, geometry = self._take_pending(q), self.spec.geometry
        B, Hq, T, _ = q.shape
        counts, valid = pending.counts, pending.valid
        device = q.device
        start = torch.tensor([0, *counts], device=device).cumsum(0).int()
        position = torch.tensor(
            [row.length - n for row, n in zip(self.rows, counts, strict=True)], dtype=torch.int32, device=device
        )
        queries = Queries(_ragged(q.transpose(1, 2), valid).float(), start, position)
        partials = [
            kernel.attend(queries, pages, self.rule, scale=scale, softcap=softcap)
            for kernel, pages in self._page_sets(device)
        ]
        merged = merge(partials, sinks).out.to(q.dtype)
        self._release_unreadable()
        if valid is None:
            return merged.view(B, T, Hq, geometry.v_dim).transpose(1, 2)
        out = merged.new_zeros((B, T, Hq, geometry.v_dim))
        out[valid] = merged
        return out.transpose(1, 2)

    def _take_pending(self, q: Tensor) -> _Pending:
        """What was appended and now attends, once. Raises ShapeError when q is not the queries of just that."""
        pending, geometry = self._pending, self.spec.geometry
        if pending is None:
            raise UsageError(
                "attend", "an append of the same tokens just before", "none", "append k and v, then attend with their q"
            )
        B, Hq, T, Dk = q.shape
        if (B, T, Dk) != (len(pending.counts), pending.columns, geometry.k_dim) or Hq == 0 or Hq % geometry.heads:
            shape = f"[{len(pending.counts)}, a multiple of {geometry.heads}, {pending.columns}, {geometry.k_dim}]"
            raise ShapeError("q", f"[B, Hq, T, Dk] = {shape}", tuple(q.shape))
        self._pending = None
        return pending

    def _page_sets(self, device: torch.device) -> list[tuple[Kernel, PageSet]]:
        """The raw pages, and the packed ones if there are any."""
        width = max((self.spec.geometry.pages_for(row.length) for row in self.rows), default=0)
        raw = [[row.raw.get(page, -1) for page in range(width)] for row in self.rows]
        sets = [
            (
                self.raw_kernel,
                PageSet(self.open.pages, _table(raw, device), self.raw_layout, self.raw_k, self.raw_v, raw=True),
            )
        ]
        if any(page >= 0 for row in self.rows for page in row.packed):
            packed = [row.packed + [-1] * (width - len(row.packed)) for row in self.rows]
            sets.append(
                (
                    self.kernel,
                    PageSet(self.sealed.pages, _table(packed, device), self.layout, self.k, self.v, raw=False),
                )
            )
        return sets

    def _release_unreadable(self) -> None:
        """Let go of raw pages that no query to come, nor one after a crop, may read, and of pages behind the sliding window."""
        S = self.rule.page_tokens
        for row in self.rows:
            reachable = row.length // S - 1
            for page in [page for page in row.raw if self.rule.sink_pages <= page < reachable - self.rule.window_pages]:
                self.open.pool.release(row.raw.pop(page))
            if self.rule.sliding_tokens is not None:
                first_token = max(0, reachable * S - self.rule.sliding_tokens + 1)
                self._drop(row, range(min(first_token // S, len(row.packed))))

    def _drop(self, row: _Row, pages: Sequence[int]) -> None:
        for page in pages:
            if row.packed[page] >= 0:
                self.sealed.pool.release(row.packed[page])
                row.packed[page] = -1
            if page in row.raw:
                self.open.pool.release(row.raw.pop(page))

    # ---- sequences -------------------------------------------------------------------------------------------------

    def why_not_crop(self, tokens: int) -> str | None:
        """Why the last `tokens` tokens cannot be taken back, or None if they can."""
        for row in self.rows:
            if row.length < tokens:
                return f"only {row.length} tokens are held"
            if missing := self._missing(row, row.length - tokens):
                sealed = row.packed[missing[0]] >= 0
                gone = (
                    "is sealed and its raw values are gone"
                    if sealed
                    else "was let go of, it lay behind the sliding window"
                )
                return f"page {missing[0]} {gone}"
        return None

    def _missing(self, row: _Row, length: int) -> list[int]:
        """The pages that a query at position `length` reads by the rule and that are not held in the form it wants."""
        query_page, sliding = length // self.rule.page_tokens, self.rule.sliding_tokens
        first = 0 if sliding is None else max(0, length - sliding + 1) // self.rule.page_tokens
        return [
            page
            for page in range(first, self.spec.geometry.pages_for(length))
            if (page not in row.raw if self.rule.reads_raw(page, query_page) else row.packed[page] < 0)
        ]

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens of every sequence; only where `why_not_crop` gives no reason."""
        self._pending = None
        for row in self.rows:
            row.length -= tokens
            full = row.length // self.rule.page_tokens
            for page in row.packed[full:]:
                if page >= 0:
                    self.sealed.pool.release(page)
            del row.packed[full:]
            for page in [page for page in row.raw if page >= self.spec.geometry.pages_for(row.length)]:
                self.open.pool.release(row.raw.pop(page))

    def reorder(self, rows: Sequence[int]) -> None:
        """Sequence i becomes a copy of what was sequence rows[i]; pages are shared, an open one until it is written to."""
        if wrong := [i for i in rows if not 0 <= i < len(self.rows)]:
            raise UsageError("rows", f"sequences 0 to {len(self.rows) - 1}", wrong[0])
        old, self._pending = self.rows, None
        self.rows = [_Row(old[i].length, list(old[i].packed), dict(old[i].raw)) for i in rows]
        for row in self.rows:
            self._hold(row, self.sealed.pool.share, self.open.pool.share)
        for row in old:
            self._hold(row, self.sealed.pool.release, self.open.pool.release)

    def clear(self) -> None:
        """Forget every sequence."""
        self.reorder([])

    @staticmethod
    def _hold(row: _Row, sealed: Any, raw: Any) -> None:
        for page in row.packed:
            if page >= 0:
                sealed(page)
        for page in row.raw.values():
            raw(page)

    # ---- reports ---------------------------------------------------------------------------------------------------

    def sealed_page(self, row: int, page: int) -> Page:
        """Page `page` of sequence `row` as it would leave the process. Raises Unsupported if it is not sealed here."""
        packed = self.rows[row].packed
        if page >= len(packed) or packed[page] < 0:
            raise Unsupported(
                f"page {page} of sequence {row} is not sealed; it is open, a sink, or behind the sliding window"
            )
        ids = [CodecId(codec.name, codec.version) for codec in (self.format.k, self.format.v)]
        return Page(ids[0], ids[1], self.spec.geometry, self.sealed.pages[packed[page]].cpu().numpy().tobytes())

    def footprint(self) -> Footprint:
        """Bytes in use, and allocated for sealed pages; the stores of raw pages are shared by the layers (`PagedKV.footprint`)."""
        payload = self.layout.payload_nbytes * self.sealed.pool.used_pages
        return Footprint(
            payload_bytes=payload,
            metadata_bytes=self.layout.nbytes * self.sealed.pool.used_pages - payload,
            raw_bytes=self.raw_layout.nbytes * len({page for row in self.rows for page in row.raw.values()}),
            allocated_bytes=self.sealed.allocated_bytes,
        )


def _ragged(x: Tensor, valid: Tensor | None) -> Tensor:
    """[B, T, ...] to [tokens, ...], padding left out."""
    return x.flatten(0, 1) if valid is None else x[valid]


def _table(pages: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(pages, dtype=torch.int32, device=device).view(len(pages), -1)
