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

from kvarto.cache.finite import FiniteCheck
from kvarto.cache.slab import PageStore
from kvarto.cache.tables import Cursor, send
from kvarto.errors import ShapeError, Unsupported, UsageError
from kvarto.formats import Format, raw_format
from kvarto.jit import torch
from kvarto.kernels.base import Queries
from kvarto.layer_pages import LayerPages, LayerSpec
from kvarto.page import CodecId, Page
from kvarto.sequences import Row, Sequences

if TYPE_CHECKING:
    from torch import Tensor


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


class LayerKV(LayerPages):
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
        super().__init__(spec, chosen, open_pages.format, dtype=open_pages.dtype, device=device, kernel=kernel)
        self.sealed = PageStore(self.layout.nbytes, device)
        self.open = open_pages.store(self.raw_layout.nbytes)
        self.sequences = Sequences(self.rule, self.sealed, self.open, device)
        self.finite = FiniteCheck(index, device)
        self._cursor = Cursor(self.rule.page_tokens, device)
        self._counts: list[int] = []
        self._start = send(np.zeros(1, np.int32), device)
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
        self.store(self._views, k, v, pages, slots)
        self.sequences.grow([1] * len(self.rows))
        cursor.move()
        return position

    def _write(self, k: Tensor, v: Tensor, counts: list[int]) -> Tensor:
        """counts[b] tokens of sequence b, k [tokens, Hkv, Dk], v [tokens, Hkv, Dv]. Returns the places of the first ones, int32 [B]."""
        self._cursor.lose()
        position = send(np.array([row.length for row in self.rows], np.int32), self.device)
        places = send(self.sequences.places(counts), self.device)
        self.store(self._views, k, v, places[0], places[1])
        self.sequences.grow(counts)
        return position

    @property
    def _views(self) -> tuple[Tensor, Tensor]:
        return self.open.view(self.spec.geometry, self.raw_views)

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
            raw_ids = [self.rows[row].raw[page] for row, page in due]
            first = [page * self.rule.page_tokens for _, page in due]
            sent = send(np.array([raw_ids, sealed_ids, first], np.int32), self.device)
            self.seal(self.open.pages, self._views, sent[0], self.sealed.pages, sent[1], sent[2])
            self.finite.due = self.finite.deferred
        self.sequences.seal(due, sealed_ids)

    # ---- queries ---------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        """The queries of the tokens last appended: q [B, Hq, T, Dk] to [B, Hq, T, Dv], in q's dtype; 0 where a token was padding.

        scale multiplies q.k; softcap and sinks (float [Hq]) as in kernels/base.py. Raw pages that no later query may read are let go.
        """
        pending, (B, Hq, T, _) = self._take_pending(q), q.shape
        queries = Queries(_ragged(q, pending.valid), pending.start, pending.position, pending.longest)
        raw, packed = (self.open.pages, self.sequences.raw_table.tensor), None
        if self.sealed.pool.used_pages:
            packed = self.sealed.pages, self.sequences.packed_table.tensor
        merged = self.attend_pages(queries, raw, packed, scale=scale, softcap=softcap, sinks=sinks).out.to(q.dtype)
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


def _ragged(x: Tensor, valid: Tensor | None) -> Tensor:
    """[B, H, T, D] to [tokens, H, D], padding left out."""
    if valid is not None:
        return x.transpose(1, 2)[valid]
    return x.select(2, 0) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
