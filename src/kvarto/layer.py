"""One layer of the cache: the two things done with its pages.

    append    new tokens go raw into the open page; a page that fills is sealed: encoded once, from raw values
    attend    the queries of those tokens read packed and raw pages by the rule (rule.py)

Which pages there are, sequences.py knows. A decode step in which no page fills waits for the device nowhere, and sends it nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvarto.binding import BoundCodec, choose_kernel, choose_sealer
from kvarto.cache.finite import FiniteCheck
from kvarto.cache.slab import PageStore
from kvarto.cache.tables import Cursor, send
from kvarto.errors import ShapeError, Unsupported, UsageError
from kvarto.formats import Format, raw_format
from kvarto.jit import torch
from kvarto.kernels.base import PageSet, Partial, Queries, merge
from kvarto.layout import Geometry, Side
from kvarto.page import CodecId, Page
from kvarto.rule import Rule
from kvarto.sequences import Row, Sequences

if TYPE_CHECKING:
    from torch import Tensor

# Numbers that are encoded at once: what fits a core's own cache. Four times more takes twice as long for each (docs/LOG.md).
_SEAL_ELEMENTS_CPU = 1 << 17
# Elsewhere few operations count, and 64 MB in float32.
_SEAL_ELEMENTS = 1 << 24


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


@dataclass(frozen=True)
class _Pending:
    """Tokens that were appended and have not attended yet: T columns, which of them are valid (None: all), and `Queries` but for q."""

    columns: int
    valid: Tensor | None
    start: Tensor
    position: Tensor
    longest: int


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
    """One layer of a PagedKV, `index` in messages: its pages and its sequences."""

    def __init__(
        self,
        spec: LayerSpec,
        chosen: Format,
        open_pages: OpenPages,
        *,
        device: torch.device,
        kernel: str | None = None,
        index: int = 0,
    ) -> None:
        self.spec, self.format, self.dtype, self.device = spec, chosen, open_pages.dtype, device
        geometry = spec.geometry
        self.layout = chosen.layout(geometry)
        self.k, self.v = BoundCodec(chosen.k, self.layout.k), BoundCodec(chosen.v, self.layout.v)
        raw = open_pages.format
        self.raw_layout = raw.layout(geometry)
        self.raw_k, self.raw_v = BoundCodec(raw.k, self.raw_layout.k), BoundCodec(raw.v, self.raw_layout.v)
        self.rule = _rule(spec, chosen)
        self.kernel = choose_kernel(kernel, self.layout, self.k, self.v, device.type)
        self.raw_kernel = choose_kernel(kernel, self.raw_layout, self.raw_k, self.raw_v, device.type)
        self._sealer = choose_sealer(self.raw_layout, self.layout, self.k, self.v, device.type)
        self.sealed = PageStore(self.layout.nbytes, device)
        self.open = open_pages.store(self.raw_layout.nbytes)
        self.sequences = Sequences(self.rule, self.sealed, self.open, device)
        self.finite = FiniteCheck(index, device)
        self._cursor = Cursor(self.rule.page_tokens, device)
        self._counts: list[int] = []
        self._start = send(np.zeros(1, np.int32), device)
        self._saturated: int | Tensor = 0
        self._pending: _Pending | None = None

    @property
    def rows(self) -> list[Row]:
        """The books of the sequences held."""
        return self.sequences.rows

    # ---- tokens in -------------------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
        """k [B, Hkv, T, Dk], v [B, Hkv, T, Dv] in the layer's dtype; valid bool [B, T], False for padding, which is not stored.

        Raises ShapeError or OutOfPages, and on the CPU NotFinite; then nothing has been stored. On other devices NaN and infinity are noted, and
        `check` raises.
        """
        self._check_shapes(k, v, valid)
        B, _, T, _ = k.shape
        counts: list[int] = [T] * B if valid is None else valid.sum(dim=1).tolist()
        if valid is not None and min(counts) == T:
            valid = None
        tokens_k, tokens_v = _ragged(k, valid), _ragged(v, valid)
        self.finite.see(tokens_k, tokens_v)
        single = T == 1 and valid is None
        if not (single and self._cursor.room):
            self.sequences.require(counts)
        if not self.rows:
            self.sequences.begin(B)
        position = self._write_one(tokens_k, tokens_v) if single else self._write(tokens_k, tokens_v, counts)
        if not self._cursor.room:
            self._seal_full_pages()
        self._pending = _Pending(T, valid, self._starts(counts), position, max(counts))

    def _check_shapes(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        geometry = self.spec.geometry
        B, T = len(self.rows) or k.shape[0], k.shape[2]
        for name, x, dim in (("k", k, geometry.k_dim), ("v", v, geometry.v_dim)):
            if x.shape != (B, geometry.heads, T, dim):
                raise ShapeError(name, f"[B, Hkv, T, D] = {(B, geometry.heads, T, dim)}", tuple(x.shape))
            if x.dtype != self.dtype:
                remedy = "convert it, or make the cache with that dtype"
                raise ShapeError(name, f"the dtype of this cache, {self.dtype}", x.dtype, remedy)
        if valid is not None and (valid.dtype != torch.bool or valid.shape != (B, T)):
            raise ShapeError("valid", f"bool [B, T] = {(B, T)}", f"{valid.dtype} {tuple(valid.shape)}")
        if B == 0:
            raise ShapeError("k", "at least one sequence", tuple(k.shape))

    def _write_one(self, k: Tensor, v: Tensor) -> Tensor:
        """One token of each sequence, k [B, Hkv, Dk], v [B, Hkv, Dv]. Returns its place in the sequence, int32 [B]."""
        cursor = self._cursor
        if not cursor.room:
            cursor.place(self.sequences.open_pages(), [row.length for row in self.rows])
        pages, slots, position = cursor.next
        self._store(k, v, pages, slots)
        self.sequences.grow([1] * len(self.rows))
        cursor.move()
        return position

    def _write(self, k: Tensor, v: Tensor, counts: list[int]) -> Tensor:
        """counts[b] tokens of sequence b, k [tokens, Hkv, Dk], v [tokens, Hkv, Dv]. Returns the places of the first ones, int32 [B]."""
        self._cursor.lose()
        position = send(np.array([row.length for row in self.rows], np.int32), self.device)
        places = send(self.sequences.places(counts), self.device)
        self._store(k, v, places[0], places[1])
        self.sequences.grow(counts)
        return position

    def _store(self, k: Tensor, v: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Tokens k [tokens, Hkv, Dk], v [tokens, Hkv, Dv] into raw pages and slots, int64 [tokens]."""
        raw_k, raw_v = self.open.view(self.spec.geometry, self._raw_views)
        raw_k.index_put_((pages, slots), k)
        raw_v.index_put_((pages, slots), v)

    def _raw_views(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Raw pages as numbers of the layer's dtype, K [P, S, Hkv, Dk] and V [P, S, Hkv, Dv], sharing their memory."""
        numbers, views = pages.view(self.dtype), []
        S, heads, size = self.rule.page_tokens, self.spec.geometry.heads, self.dtype.itemsize
        page, pair = numbers.stride(0), self.raw_layout.pair_nbytes // size
        for side, dim in ((Side.K, self.spec.geometry.k_dim), (Side.V, self.spec.geometry.v_dim)):
            first, _ = self.raw_layout.slab_range(side)
            within = (dim, pair, 1) if side is Side.K else (1, pair, S)
            views.append(numbers.as_strided((len(numbers), S, heads, dim), (page, *within), first // size))
        return views[0], views[1]

    def _starts(self, counts: list[int]) -> Tensor:
        """`Queries.start`, kept while counts stay the same."""
        if counts != self._counts:
            self._counts, self._start = counts, send(np.cumsum([0, *counts], dtype=np.int32), self.device)
        return self._start

    def _seal_full_pages(self) -> None:
        """Seal every page that is full and not yet sealed."""
        due = self.sequences.full_pages()
        sealed_ids = self.sealed.take(len(due))
        if due:
            self._seal([self.rows[row].raw[page] for row, page in due], sealed_ids)
            self.finite.due = self.finite.deferred
        self.sequences.seal(due, sealed_ids)

    def _seal(self, raw_ids: Sequence[int], sealed_ids: Sequence[int]) -> None:
        """Encode pages of the raw store into the sealed one."""
        if self._sealer is not None:
            if isinstance(self._saturated, int):
                self._saturated = torch.full((1,), self._saturated, dtype=torch.int64, device=self.device)
            ids = send(np.array([raw_ids, sealed_ids], np.int32), self.device)
            self._sealer(self.open.pages, ids[0], self.sealed.pages, ids[1], self._saturated)
            return
        raw_k, raw_v = self.open.view(self.spec.geometry, self._raw_views)
        elements = _SEAL_ELEMENTS_CPU if self.device.type == "cpu" else _SEAL_ELEMENTS
        at_once = max(1, elements // (self.spec.geometry.elements_per_token * self.rule.page_tokens))
        for i in range(0, len(raw_ids), at_once):
            ids = self.open.index(raw_ids[i : i + at_once])
            k = raw_k.transpose(1, 2)[ids].float()
            v = raw_v.permute(0, 2, 3, 1)[ids].float().transpose(-1, -2)
            self._saturated = self._saturated + self.k.saturated(k) + self.v.saturated(v)
            pages = torch.cat([self.k.encode(k), self.v.encode(v)], dim=-1).flatten(1)
            self.sealed.put(sealed_ids[i : i + at_once], pages)

    # ---- queries ---------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        """The queries of the tokens last appended: q [B, Hq, T, Dk] to [B, Hq, T, Dv], in q's dtype; 0 where a token was padding.

        scale multiplies q.k; softcap and sinks (float [Hq]) as in kernels/base.py. Raw pages that no later query may read are let go.
        """
        pending, (B, Hq, T, _) = self._take_pending(q), q.shape
        queries = Queries(_ragged(q, pending.valid), pending.start, pending.position, pending.longest)
        merged = self._attend(queries, scale, softcap, sinks).out.to(q.dtype)
        self.sequences.release_unreadable()
        if T == 1 and pending.valid is None:
            return merged.unsqueeze(2)
        shape = (B, T, Hq, self.spec.geometry.v_dim)
        if pending.valid is None:
            return merged.view(shape).transpose(1, 2)
        out = merged.new_zeros(shape)
        out[pending.valid] = merged
        return out.transpose(1, 2)

    def _take_pending(self, q: Tensor) -> _Pending:
        """What was appended and now attends, once. Raises ShapeError when q is not the queries of just that."""
        pending, geometry, expected_rows = self._pending, self.spec.geometry, len(self.rows)
        if pending is None:
            raise UsageError(
                "attend", "an append of the same tokens just before", "none", "append k and v, then attend with their q"
            )
        B, Hq, T, Dk = q.shape
        if (B, T, Dk) != (expected_rows, pending.columns, geometry.k_dim) or Hq == 0 or Hq % geometry.heads:
            shape = f"[{expected_rows}, a multiple of {geometry.heads}, {pending.columns}, {geometry.k_dim}]"
            raise ShapeError("q", f"[B, Hq, T, Dk] = {shape}", tuple(q.shape))
        self._pending = None
        return pending

    def _attend(self, queries: Queries, scale: float, softcap: float | None, sinks: Tensor | None) -> Partial:
        """In one call of one kernel, unless raw and packed pages need different ones."""
        books = self.sequences
        raw = PageSet(self.open.pages, books.raw_table.tensor, self.raw_layout, self.raw_k, self.raw_v, raw=True)
        packed = PageSet(self.sealed.pages, books.packed_table.tensor, self.layout, self.k, self.v, raw=False)
        sets = [raw, packed] if self.sealed.pool.used_pages else [raw]
        if len(sets) == 1 or self.kernel.name == self.raw_kernel.name:
            return self.raw_kernel.attend(queries, sets, self.rule, scale=scale, softcap=softcap, sinks=sinks)
        partials = [
            kernel.attend(queries, [pages], self.rule, scale=scale, softcap=softcap)
            for kernel, pages in zip((self.raw_kernel, self.kernel), sets, strict=True)
        ]
        return merge(partials, sinks)

    # ---- sequences -------------------------------------------------------------------------------------------------

    def why_not_crop(self, tokens: int) -> str | None:
        """Why the last `tokens` tokens cannot be taken back, or None if they can."""
        return self.sequences.why_not_crop(tokens)

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens of every sequence; only where `why_not_crop` gives no reason."""
        self._forget_position()
        self.sequences.crop(tokens)

    def reorder(self, rows: Sequence[int]) -> None:
        """Sequence i becomes a copy of what was sequence rows[i]; pages are shared, an open one until it is written to."""
        self._forget_position()
        self.sequences.reorder(rows)

    def clear(self) -> None:
        """Forget every sequence."""
        self.reorder([])
        self.finite.forget()

    def _forget_position(self) -> None:
        self._pending = None
        self._cursor.lose()

    # ---- reports ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise NotFinite if keys or values were not finite; it stays so until `clear`. Waits for the device; on the CPU `append` has raised."""
        self.finite.check()

    @property
    def saturated_elements(self) -> int:
        """Elements that were beyond their codec's range when their page was sealed, ever. Waits for the device."""
        return int(self._saturated)

    def sealed_page(self, row: int, page: int) -> Page:
        """Page `page` of sequence `row` as it would leave the process. Raises Unsupported if it is not sealed here, NotFinite as `check`."""
        packed = self.rows[row].packed
        if page >= len(packed) or packed[page] < 0:
            raise Unsupported(
                f"page {page} of sequence {row} is not sealed; it is open, a sink, or behind the sliding window"
            )
        self.check()
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


def _rule(spec: LayerSpec, chosen: Format) -> Rule:
    """Raises UsageError if sink and window of a format are not whole pages."""
    tokens = spec.geometry.page_tokens
    for name, raw_tokens in (("sink", chosen.sink_tokens), ("window", chosen.window_tokens)):
        if raw_tokens % tokens:
            raise UsageError(f"{name} of {chosen}", f"a multiple of this cache's pages of {tokens} tokens", raw_tokens)
    return Rule(tokens, chosen.sink_tokens // tokens, chosen.window_tokens // tokens, spec.sliding_tokens)


def _ragged(x: Tensor, valid: Tensor | None) -> Tensor:
    """[B, H, T, D] to [tokens, H, D], padding left out."""
    if valid is not None:
        return x.transpose(1, 2)[valid]
    return x.select(2, 0) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
