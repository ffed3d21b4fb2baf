"""What one sequence holds of the engine's memory: which blocks, of which pages. Plain integers, no torch.

A sequence has two page tables for each group of layers, raw and sealed, whose entries are addresses in the arena or -1. It grows in steps:

    find      pages of its prefix that somebody else has left, or is just using: no need to compute them
    reserve   blocks for the next tokens, or none at all
    plan      where those tokens go and what must be sealed, once every sequence of the step has its blocks (taking them may move others)
    commit    the tokens are there: full pages go into the tree of prefixes, what no later query reads is let go of

A page that fills within a step and that no later query reads raw needs its raw values in one layer at a time only: it gets no block, but a place in
the *scratch*, which all layers use one after another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from kvarto.cache.prefix import Node, Piece, PrefixCache
from kvarto.rule import Rule

_SMALLEST_WIDTH = 16


@dataclass(frozen=True)
class Group:
    """Layers whose pages come and go together: their rule, and the kinds of their raw and of their sealed blocks."""

    rule: Rule
    raw: int
    sealed: int

    def needed(self, page: int) -> Iterator[tuple[int, range]]:
        """(kind, pages) of all that a sequence must hold when the next token is the first one of `page`."""
        rule, first = self.rule, self.rule.first_page(page * self.rule.page_tokens)
        recent = max(first, rule.sink_pages, page - rule.window_pages)
        yield self.raw, range(first, min(rule.sink_pages, page))
        yield self.raw, range(recent, page)
        yield self.sealed, range(max(first, rule.sink_pages), page)

    def most_blocks(self, tokens: int, step_tokens: int, sequences: int = 1) -> dict[int, int]:
        """The most blocks of each kind that sequences hold until each has so many tokens; a step adds `step_tokens` at most, to all together."""
        rule = self.rule
        pages, brought = -(-tokens // rule.page_tokens), -(-step_tokens // rule.page_tokens) + 1
        sealed = max(0, pages - rule.sink_pages)
        # The old window is held until the step is over that brings a new one.
        raw = sequences * min(pages, rule.sink_pages + rule.window_pages + 1)
        raw = min(raw + min(sequences * rule.window_pages, brought), sequences * pages)
        if rule.sliding_tokens is not None:
            kept = min(sealed, -(-rule.sliding_tokens // rule.page_tokens) + 1)
            return {self.raw: raw, self.sealed: min(sequences * sealed, sequences * kept + brought)}
        return {self.raw: raw, self.sealed: sequences * sealed}


@dataclass(frozen=True)
class Placement:
    """A step of one sequence in one group: raw addresses of the pages that its tokens fall into, and (raw, sealed, first token) of those to
    be sealed."""

    raw: list[int]
    seal: list[tuple[int, int, int]]


class Scratch:
    """Addresses for raw pages of one layer that live no longer than its part of a step: `capacity_pages` from `start` on, in units.

    The first one is always there, for tokens that nobody wants.
    """

    def __init__(self, start: int, page_units: dict[int, int], capacity_pages: int) -> None:
        self.start, self._page_units, self._capacity = start, page_units, capacity_pages
        self.clear()

    def clear(self) -> None:
        """A step is over."""
        self._used = dict.fromkeys(self._page_units, 0)

    def take(self, kind: int) -> int:
        """A place for a raw page of the group whose raw blocks are of this kind. Groups share the places: their layers take turns."""
        number = self._used[kind]
        assert number < self._capacity, "a step fills more pages than it has tokens for"
        self._used[kind] = number + 1
        return self.start + number * self._page_units[kind]


class Holding:
    """The books of one sequence. `identity`: what its prefixes may be shared with (model, policy, tenant); `keep`: its pages should outlive it."""

    def __init__(self, cache: PrefixCache, identity: Hashable, groups: Sequence[Group], *, keep: bool = True) -> None:
        self._keep = keep
        self._cache, self.groups, self._page_tokens = cache, groups, groups[0].rule.page_tokens
        self.length = 0
        self._root = cache.root(identity)
        self._nodes: list[Node] = []
        kinds = [kind for group in groups for kind in (group.raw, group.sealed)]
        self._held: dict[int, dict[int, Piece]] = {kind: {} for kind in kinds}
        self.tables: dict[int, Any] = {kind: np.full(_SMALLEST_WIDTH, -1, np.int32) for kind in kinds}
        self._left: dict[int, int] = {}  # pages before it are behind the sliding window
        self._moves = cache.moves
        self._reserved: list[tuple[int, int]] = []
        self._count = 0

    # ---- growing ---------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> int:
        """Hold as many further pages of `tokens` as are there in every form that will be read, the last token's never. Returns how many tokens."""
        S, known = self._page_tokens, len(self._nodes)
        if self.length % S:
            return 0
        parent = self._nodes[-1] if self._nodes else self._root
        found = list(self._cache.path(parent, tokens[self.length : len(tokens) - 1], S, list(self._held)))
        # Twice, because what is below the tree may fail to give back what it seemed to have.
        for from_below in (True, False):
            depth = self._depth([*self._nodes, *found], from_below=from_below) if found else known
            if depth == known:
                return 0
            if self._follow(found[: depth - known]):
                return (depth - known) * S
        return 0

    def _depth(self, path: Sequence[Node], *, from_below: bool) -> int:
        """How many pages of a path could be held in every form that will be read."""
        missing: dict[int, list[int]] = {}  # of each kind how many pages of the first j are not there
        for kind, held in self._held.items():
            absent = (
                kind not in node.pieces
                and page not in held
                and not (from_below and self._cache.can_restore(node, kind))
                for page, node in enumerate(path)
            )
            missing[kind] = [0, *accumulate(absent)]
        for depth in range(len(path), len(self._nodes), -1):
            needed = [pair for group in self.groups for pair in group.needed(depth)]
            if all(missing[kind][pages.start] == missing[kind][pages.stop] for kind, pages in needed if pages):
                return depth
        return len(self._nodes)

    def _follow(self, nodes: Sequence[Node]) -> bool:
        """Go through these pages and hold what will be read; False, and nothing has changed, if something is not to be had."""
        known = len(self._nodes)
        for node in nodes:
            self._nodes.append(self._cache.enter(self._nodes[-1] if self._nodes else self._root, node.tokens))
        needed = [
            (kind, page)
            for group in self.groups
            for kind, pages in group.needed(len(self._nodes))
            for page in pages
            if page not in self._held[kind]
        ]
        # First what is in the tree, since room for the others may be made of what nobody holds.
        new = {
            (kind, page): self._cache.hold(piece)
            for kind, page in needed
            if (piece := self._nodes[page].pieces.get(kind))
        }
        for kind, page in needed:
            if (kind, page) not in new:
                piece = self._cache.restore(self._nodes[page], kind)
                if piece is None:
                    for other in reversed(new.values()):
                        self._cache.release(other)
                    for node in reversed(self._nodes[known:]):
                        self._cache.leave(node)
                    del self._nodes[known:]
                    return False
                new[kind, page] = piece
        for (kind, page), piece in new.items():
            self._put(kind, page, piece)
        self.length = len(self._nodes) * self._page_tokens
        self._release_unreadable()
        return True

    def reserve(self, count: int) -> bool:
        """Blocks for the next `count` tokens; False, and nothing is taken, if there is no room."""
        assert not self._reserved, "reserved twice"
        assert count > 0
        for group in self.groups:
            for page in self._touched(count):
                for kind in self._wanted(group, page, count):
                    piece = self._cache.take(kind)
                    if piece is None:
                        self.abandon()
                        return False
                    self._reserved.append((kind, page))
                    self._held[kind][page] = piece
        self._count = count
        return True

    def abandon(self) -> None:
        """Give back what was reserved."""
        for kind, page in reversed(self._reserved):
            self._cache.release(self._held[kind].pop(page))
        self._reserved, self._count = [], 0

    def plan(self, scratch: Scratch) -> list[Placement]:
        """Where the reserved tokens go, for each group; the tables show it too. Nothing may be taken until the step's commits."""
        self._refresh()
        end, full = self._pages_after(self._count)
        placements = []
        for group in self.groups:
            table, sealed = self._table(group.raw, end), self._table(group.sealed, end)
            for page in self._touched(self._count):
                piece = self._held[group.raw].get(page)
                table[page] = scratch.take(group.raw) if piece is None else piece.block
            for page in range(len(self._nodes), full):
                if page >= group.rule.sink_pages:
                    sealed[page] = self._held[group.sealed][page].block
            seal = [
                (int(table[page]), int(sealed[page]), page * self._page_tokens)
                for page in range(max(len(self._nodes), group.rule.sink_pages), full)
            ]
            placements.append(Placement([int(table[page]) for page in self._touched(self._count)], seal))
        return placements

    def commit(self, tokens: Sequence[int]) -> None:
        """The reserved tokens are stored, and full pages sealed; `tokens` are the sequence's, at least so far."""
        S = self._page_tokens
        touched, (_, full) = self._touched(self._count), self._pages_after(self._count)
        self.length, self._reserved, self._count = self.length + self._count, [], 0
        for page in range(len(self._nodes), full):
            parent = self._nodes[-1] if self._nodes else self._root
            self._nodes.append(self._cache.enter(parent, tuple(tokens[page * S : page * S + S])))
            for group in self.groups:
                kinds = [group.sealed] * (page >= group.rule.sink_pages)
                kinds += [group.raw] * (page < group.rule.sink_pages or group.rule.window_pages > 0)
                for kind in kinds:
                    if page in self._held[kind]:
                        self._put(kind, page, self._cache.keep(self._held[kind][page], self._nodes[page]))
        for group in self.groups:
            for page in touched:
                if page not in self._held[group.raw]:
                    self.tables[group.raw][page] = -1
        self._release_unreadable()

    def release(self) -> None:
        """Let go of everything, of the last page first."""
        self.abandon()
        pages = sorted(((page, kind) for kind, held in self._held.items() for page in held), reverse=True)
        for page, kind in pages:
            self._drop(kind, page)
        for node in reversed(self._nodes):
            self._cache.leave(node)
        self._cache.leave(self._root)
        self._nodes, self.length = [], 0

    # ---- which pages -----------------------------------------------------------------------------------------------

    def _touched(self, count: int) -> range:
        """The pages that the next `count` tokens fall into."""
        return range(self.length // self._page_tokens, -(-(self.length + count) // self._page_tokens))

    def _pages_after(self, count: int) -> tuple[int, int]:
        """(pages, full pages) once there are `count` tokens more."""
        return -(-(self.length + count) // self._page_tokens), (self.length + count) // self._page_tokens

    def _wanted(self, group: Group, page: int, count: int) -> Iterator[int]:
        """Kinds of the blocks that a page needs, and does not have, for the next `count` tokens."""
        rule, (_, full) = group.rule, self._pages_after(count)
        if rule.reads_raw(page, full) and page not in self._held[group.raw]:
            yield group.raw
        if rule.sink_pages <= page < full:
            yield group.sealed

    def _release_unreadable(self) -> None:
        """What no query to come reads. Raw pages are few; of sealed ones only those leave that a sliding window leaves behind."""
        next_page = self.length // self._page_tokens
        for group in self.groups:
            first = group.rule.first_page(self.length)
            for page in [
                page for page in self._held[group.raw] if page < first or not group.rule.reads_raw(page, next_page)
            ]:
                self._drop(group.raw, page)
            for page in range(self._left.get(group.sealed, 0), first):
                if page in self._held[group.sealed]:
                    self._drop(group.sealed, page)
            self._left[group.sealed] = first

    def columns(self, count: int) -> int:
        """How wide its widest table is once there are `count` tokens more, at most; a power of two."""
        pages, _ = self._pages_after(count)
        return max(1 << (pages - 1).bit_length(), *(len(table) for table in self.tables.values()))

    # ---- tables ----------------------------------------------------------------------------------------------------

    def _put(self, kind: int, page: int, piece: Piece) -> None:
        self._held[kind][page] = piece
        self._table(kind, page + 1)[page] = piece.block

    def _drop(self, kind: int, page: int) -> None:
        self._cache.release(self._held[kind].pop(page), keep=self._keep)
        if page < len(self.tables[kind]):
            self.tables[kind][page] = -1

    def _table(self, kind: int, pages: int) -> Any:
        """The table of a kind, wide enough for so many pages."""
        table = self.tables[kind]
        if pages > len(table):
            self.tables[kind] = np.full(1 << (pages - 1).bit_length(), -1, np.int32)
            self.tables[kind][: len(table)] = table
        return self.tables[kind]

    def _refresh(self) -> None:
        """Blocks may have moved since the tables were written."""
        if self._moves != self._cache.moves:
            self._moves = self._cache.moves
            for kind, held in self._held.items():
                for page, piece in held.items():
                    self._table(kind, page + 1)[page] = piece.block
