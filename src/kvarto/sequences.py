"""The sequences of one layer: which pages each holds, and in which form. Plain integers, mirrored in the page tables that kernels read.

Each sequence has a list of sealed page ids and a few raw pages: the sinks, the recent window, the open page, and the last sealed page, whose raw
values wait until the next page seals so that tokens can be taken back over one page boundary (`crop`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvarto.cache.slab import PageStore
from kvarto.cache.tables import PageTable
from kvarto.errors import UsageError
from kvarto.jit import torch
from kvarto.rule import Rule


@dataclass
class Row:
    """One sequence. `packed[j]` is the id of sealed page j, or -1 if it is a sink or has left the sliding window; `first`: all before have left."""

    length: int = 0
    packed: list[int] = field(default_factory=list)
    raw: dict[int, int] = field(default_factory=dict)
    first: int = 0


class Sequences:
    """The books of a layer. `sealed` and `raw` are the stores that its page ids are of; others may take pages from `raw` too."""

    def __init__(self, rule: Rule, sealed: PageStore, raw: PageStore, device: torch.device) -> None:
        self.rule, self.sealed, self.raw = rule, sealed, raw
        self.rows: list[Row] = []
        self.packed_table, self.raw_table = PageTable(device), PageTable(device)
        self._grown: set[int] = set()

    def begin(self, count: int) -> None:
        """`count` empty sequences, where there are none."""
        self.rows = [Row() for _ in range(count)]
        for table in (self.packed_table, self.raw_table):
            table.reset(count)

    # ---- tokens in -------------------------------------------------------------------------------------------------

    def require(self, counts: Sequence[int]) -> None:
        """Raise OutOfPages if the stores have no room for so many more tokens of each sequence, or of new ones if there are none."""
        if self.sealed.pool.capacity_pages is None and self.raw.pool.capacity_pages is None:
            return
        opened = sealed = 0
        for row, count in zip(self.rows or [Row() for _ in counts], counts, strict=True):
            opened += sum(not self._is_writable(row, page) for page in self._touched(row, count))
            full = (row.length + count) // self.rule.page_tokens
            sealed += max(0, full - max(len(row.packed), self.rule.sink_pages))
        self.raw.pool.require(opened)
        self.sealed.pool.require(sealed)

    def open_pages(self) -> list[int]:
        """The raw page that each sequence writes its next token to, its own alone."""
        return [self._writable(i, row, row.length // self.rule.page_tokens) for i, row in enumerate(self.rows)]

    def places(self, counts: Sequence[int]) -> Any:
        """Raw page and slot of each new token, numpy int64 [2, sum(counts)]. Pages are opened as needed, and are each sequence's own."""
        S, places = self.rule.page_tokens, [np.empty((2, 0), np.int64)]
        for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            touched, tokens = self._touched(row, count), np.arange(row.length, row.length + count)
            ids = np.array([self._writable(i, row, page) for page in touched], np.int64)
            places.append(np.stack([ids[tokens // S - touched.start], tokens % S]))
        return np.concatenate(places, axis=1)

    def grow(self, counts: Sequence[int]) -> None:
        """So many tokens were written."""
        for row, count in zip(self.rows, counts, strict=True):
            row.length += count

    def full_pages(self) -> list[tuple[int, int]]:
        """(sequence, page) of what is full and not sealed; sinks are never sealed."""
        S, sink_pages = self.rule.page_tokens, self.rule.sink_pages
        return [
            (i, page)
            for i, row in enumerate(self.rows)
            for page in range(max(len(row.packed), sink_pages), row.length // S)
        ]

    def seal(self, due: Sequence[tuple[int, int]], sealed_ids: Sequence[int]) -> None:
        """The pages of `full_pages` were sealed, under these ids."""
        for i, row in enumerate(self.rows):
            if missing := row.length // self.rule.page_tokens - len(row.packed):
                row.packed += [-1] * missing
                self._grown.add(i)
        for (i, page), sealed_id in zip(due, sealed_ids, strict=True):
            self.rows[i].packed[page] = sealed_id
            self.packed_table.set(i, page, sealed_id)

    def _touched(self, row: Row, count: int) -> range:
        """The pages that the next `count` tokens fall into."""
        S = self.rule.page_tokens
        return (
            range(row.length // S, -(-(row.length + count) // S)) if count else range(row.length // S, row.length // S)
        )

    def _is_writable(self, row: Row, page: int) -> bool:
        return page in row.raw and self.raw.pool.holders(row.raw[page]) == 1

    def _writable(self, i: int, row: Row, page: int) -> int:
        """The raw page that sequence i may write to: a new one, its own, or its own copy of one that others hold too."""
        if not self._is_writable(row, page):
            shared = row.raw.get(page)
            row.raw[page] = self.raw.take(1)[0] if shared is None else self.raw.copy(shared)
            if shared is not None:
                self.raw.pool.release(shared)
            self.raw_table.set(i, page, row.raw[page])
        return row.raw[page]

    # ---- pages out -------------------------------------------------------------------------------------------------

    def release_unreadable(self) -> None:
        """Let go of raw pages that no query to come, nor one after a crop, may read, and of pages behind the sliding window."""
        for i in sorted(self._grown):
            row = self.rows[i]
            reachable = row.length // self.rule.page_tokens - 1
            last = reachable - self.rule.window_pages
            for page in [page for page in row.raw if self.rule.sink_pages <= page < last]:
                self._close(i, row, page)
            if self.rule.sliding_tokens is not None:
                first = self.rule.first_page(reachable * self.rule.page_tokens)
                self._leave(i, row, min(first, len(row.packed)))
        self._grown.clear()

    def _close(self, i: int, row: Row, page: int) -> None:
        self.raw.pool.release(row.raw.pop(page))
        self.raw_table.set(i, page, -1)

    def _leave(self, i: int, row: Row, end: int) -> None:
        """Pages before `end` are behind the sliding window."""
        for page in range(row.first, end):
            if row.packed[page] >= 0:
                self.sealed.pool.release(row.packed[page])
                row.packed[page] = -1
                self.packed_table.set(i, page, -1)
            if page in row.raw:
                self._close(i, row, page)
        row.first = max(row.first, end)

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

    def _missing(self, row: Row, length: int) -> list[int]:
        """The pages that a query at position `length` reads by the rule and that are not held in the form it wants."""
        S = self.rule.page_tokens
        return [
            page
            for page in range(self.rule.first_page(length), -(-length // S))
            if (page not in row.raw if self.rule.reads_raw(page, length // S) else row.packed[page] < 0)
        ]

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens of every sequence; only where `why_not_crop` gives no reason."""
        S = self.rule.page_tokens
        for i, row in enumerate(self.rows):
            row.length -= tokens
            full = row.length // S
            for page in range(full, len(row.packed)):
                if row.packed[page] >= 0:
                    self.sealed.pool.release(row.packed[page])
                    self.packed_table.set(i, page, -1)
            del row.packed[full:]
            row.first = min(row.first, full)
            for page in [page for page in row.raw if page >= -(-row.length // S)]:
                self._close(i, row, page)

    def reorder(self, rows: Sequence[int]) -> None:
        """Sequence i becomes a copy of what was sequence rows[i]; pages are shared, an open one until it is written to."""
        if wrong := [i for i in rows if not 0 <= i < len(self.rows)]:
            raise UsageError("rows", f"sequences 0 to {len(self.rows) - 1}", wrong[0])
        old = self.rows
        self.rows = [Row(old[i].length, list(old[i].packed), dict(old[i].raw), old[i].first) for i in rows]
        self._grown = {new for new, i in enumerate(rows) if i in self._grown}
        for row in self.rows:
            _hold(row, self.sealed.pool.share, self.raw.pool.share)
        for row in old:
            _hold(row, self.sealed.pool.release, self.raw.pool.release)
        for table in (self.packed_table, self.raw_table):
            table.select(rows)


def _hold(row: Row, sealed: Callable[[int], None], raw: Callable[[int], None]) -> None:
    for page in row.packed:
        if page >= 0:
            sealed(page)
    for page in row.raw.values():
        raw(page)
