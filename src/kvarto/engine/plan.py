"""A step in numbers: which of the flattened tokens are whose, and where their pages lie. Plain arrays, no torch.

Tokens of all sequences stand one after another, sequences of one policy together. All arrays go to the device together (`arrays`); whoever needs one
knows its number there.

A CUDA graph wants the same shapes every time, so a step of one token each may be *padded* to a `Shape`: rows that nobody wants are a first token in
a page of the scratch, which they share, and pages to be sealed that are none have a negative address.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarto.engine.holding import Group, Placement, Scratch
from kvarto.engine.scheduler import Work


@dataclass(frozen=True)
class Shape:
    """Of a step in which `rows` sequences of one policy get a token each; `columns` pages are the most that one of them has."""

    policy: int
    rows: int
    columns: int


@dataclass(frozen=True)
class GroupPlan:
    """In a group of layers, as numbers of arrays: raw page and slot of each token, int64 [tokens]; raw and sealed addresses of the pages to be
    sealed and the places of their first tokens, int32 [3, n], None without any, and how many those are; tables int32 [B, N], None where nothing is
    packed.
    """

    pages: int
    slots: int
    seal: int | None
    sealed: int
    raw_table: int
    packed_table: int | None


@dataclass(frozen=True)
class PartPlan:
    """The sequences of one policy: their tokens of the step, and `Queries` but for q, as numbers of arrays: start, int32 [B + 1]; position [B]."""

    policy: int
    tokens: slice
    longest: int
    start: int
    position: int
    groups: list[GroupPlan]


class StepPlan:
    """`works` in the order in which their tokens stand; groups[policy] are those of the policy.

    tokens, positions   numbers of int64 [T]: what goes into the model, and its places
    wanted              number of int64 [n]: tokens of the step whose logits are wanted: of each sequence those that are scored, then the last one if
                        it can be given a next one; or those that were named; padded, of each row
    ends                of each work, where its tokens end
    """

    def __init__(
        self, works: Sequence[Work], groups: Sequence[Sequence[Group]], scratch: Scratch, *,
        shape: Shape | None = None, wanted: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        scratch.clear()
        self.works = sorted(works, key=lambda work: work.request.policy)
        self.shape, self._scratch = shape, scratch
        self.arrays: list[Any] = []
        self.ends = np.cumsum([work.count for work in self.works], dtype=np.int64)
        spare = 0 if shape is None else shape.rows - len(self.works)
        self.parts = list(self._make_parts(groups, spare))
        spares = np.zeros(spare, np.int64)
        firsts = [work.request.holding.length for work in self.works]
        tokens = [
            np.array(work.request.tokens[first : first + work.count], np.int64)
            for work, first in zip(self.works, firsts, strict=True)
        ]
        places = [
            np.arange(first, first + work.count, dtype=np.int64) for work, first in zip(self.works, firsts, strict=True)
        ]
        self.tokens = self._add(np.concatenate([*tokens, spares]))
        self.positions = self._add(np.concatenate([*places, spares]))
        if wanted is None:
            wanted = range(shape.rows) if shape else self._wanted()
        self.wanted = self._add(np.array(wanted, np.int64))

    def _wanted(self) -> list[int]:
        places: list[int] = []
        for work, end in zip(self.works, self.ends.tolist(), strict=True):
            first = end - work.count - work.request.holding.length
            places += [first + place for place in work.scored]
            places += [end - 1] * work.samples
        return places

    def works_of(self, tokens: Any) -> list[Work]:
        """Whose these tokens of the step are, int64 [n]; those of padding are nobody's."""
        numbers = np.searchsorted(self.ends, tokens, side="right")
        return [self.works[number] for number in sorted(set(numbers.tolist())) if number < len(self.works)]

    def _add(self, array: Any) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def _make_parts(self, groups: Sequence[Sequence[Group]], spare: int) -> Iterator[PartPlan]:
        begin = 0
        for policy, own in enumerate(groups):
            works = [work for work in self.works if work.request.policy == policy]
            mine = spare if self.shape and self.shape.policy == policy else 0
            if works or mine:
                part = self._make_part(policy, own, works, begin, mine)
                begin = part.tokens.stop
                yield part

    def _make_part(
        self, policy: int, groups: Sequence[Group], works: Sequence[Work], begin: int, spare: int
    ) -> PartPlan:  # fmt: skip
        plans = [work.request.holding.plan(self._scratch) for work in works]
        counts = [work.count for work in works] + [1] * spare
        lengths = [work.request.holding.length for work in works] + [0] * spare
        return PartPlan(
            policy=policy,
            tokens=slice(begin, begin + sum(counts)),
            longest=max(counts),
            start=self._add(np.cumsum([0, *counts], dtype=np.int32)),
            position=self._add(np.array(lengths, np.int32)),
            groups=[
                self._make_group(group, works, [plan[number] for plan in plans], spare)
                for number, group in enumerate(groups)
            ],
        )

    def _make_group(
        self, group: Group, works: Sequence[Work], placements: Sequence[Placement], spare: int
    ) -> GroupPlan:  # fmt: skip
        S, shape, start = group.rule.page_tokens, self.shape, self._scratch.start
        pages, slots = [], []
        for work, placement in zip(works, placements, strict=True):
            first = work.request.holding.length
            tokens = np.arange(first, first + work.count)
            pages.append(np.array(placement.raw, np.int64)[tokens // S - first // S])
            slots.append(tokens % S)
        raw, packed = (
            _stack([work.request.holding.tables[kind] for work in works], spare, shape.columns if shape else 1)
            for kind in (group.raw, group.sealed)
        )
        raw[len(works) :, 0] = start
        due = [each for placement in placements for each in placement.seal]
        seal = np.full((3, shape.rows if shape else len(due)), -1, np.int32)
        seal[:, : len(due)] = np.array(due, np.int32).reshape(-1, 3).T
        return GroupPlan(
            pages=self._add(np.concatenate([*pages, np.full(spare, start, np.int64)])),
            slots=self._add(np.concatenate([*slots, np.zeros(spare, np.int64)])),
            seal=self._add(seal) if seal.size else None,
            sealed=len(due),
            raw_table=self._add(raw),
            packed_table=self._add(packed) if shape or (packed >= 0).any() else None,
        )


def _stack(tables: Sequence[Any], spare: int, least: int) -> Any:
    """int32 [B + spare, N], N the width of the widest, or `least`; a copy, because the books go on."""
    stacked = np.full((len(tables) + spare, max([least, *map(len, tables)])), -1, np.int32)
    for row, table in zip(stacked, tables, strict=False):
        row[: len(table)] = table
    return stacked
