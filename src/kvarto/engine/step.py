"""A step as the model's layers see it: which of the flattened tokens are whose, and where their pages lie.

Tokens of all sequences stand one after another, sequences of one policy together. Nothing here depends on the layer but where its bytes are, so a
step is prepared once, and each layer stores, seals and attends by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.cache.tables import send
from kvarto.engine.holding import Group, Placement, Scratch
from kvarto.engine.memory import Memory, Offer
from kvarto.engine.scheduler import Work
from kvarto.jit import torch
from kvarto.kernels.base import Queries

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Places:
    """In a group: raw page and slot of each token, int64 [tokens]; (raw, sealed) pages to seal; tables int32 [B, N]; nothing packed: None."""

    pages: Tensor
    slots: Tensor
    seal: tuple[list[int], list[int]]
    raw_table: Tensor
    packed_table: Tensor | None


@dataclass(frozen=True)
class _Part:
    """The sequences of one policy: their tokens of the step, and `Queries` but for q."""

    offer: Offer
    tokens: slice
    start: Tensor
    position: Tensor
    longest: int
    places: list[_Places]


class Step:
    """`works` in the order in which their tokens stand."""

    def __init__(self, memory: Memory, works: Sequence[Work], device: torch.device) -> None:
        memory.scratch.clear()
        self.works = sorted(works, key=lambda work: work.request.policy)
        self._device, self._ends = device, np.cumsum([work.count for work in self.works])
        self._wrong: Tensor | None = None
        self._parts = list(self._make_parts(memory))
        tokens, positions = [], []
        for work in self.works:
            first = work.request.holding.length
            tokens += work.request.tokens[first : first + work.count]
            positions.append(np.arange(first, first + work.count))
        self.tokens = send(np.array(tokens, np.int64), device)
        self.positions = send(np.concatenate(positions).astype(np.int64), device)

    def _make_parts(self, memory: Memory) -> Iterator[_Part]:
        begin = 0
        for number, offer in enumerate(memory.offers):
            works = [work for work in self.works if work.request.policy == number]
            if works:
                part = _make_part(offer, works, begin, memory.scratch, self._device)
                begin = part.tokens.stop
                yield part

    @property
    def wanted(self) -> Tensor:
        """Where the tokens stand whose logits are wanted, int64: of each sequence those that are scored, then the last if it samples."""
        places: list[int] = []
        for work, end in zip(self.works, self._ends.tolist(), strict=True):
            first = end - work.count - work.request.holding.length
            places += [first + place for place in work.scored]
            places += [end - 1] * work.samples
        return send(np.array(places, np.int64), self._device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Store and seal k [tokens, Hkv, Dk] and v [tokens, Hkv, Dv] of a layer, and attend: q [tokens, Hq, Dk] to [tokens, Hq, Dv], in q's dtype."""
        k, v = self._finite(k), self._finite(v)
        outs = []
        for part in self._parts:
            own, places = part.offer.layers[layer], part.places[part.offer.layers[layer].group]
            pages, at = own.pages, part.tokens
            pages.store(own.raw_numbers, k[at], v[at], places.pages, places.slots)
            if places.seal[0]:
                pages.seal(own.raw, own.raw_numbers, places.seal[0], own.sealed, places.seal[1])
            queries = Queries(q[at], part.start, part.position, part.longest)
            packed = None if places.packed_table is None else (own.sealed, places.packed_table)
            raw = own.raw, places.raw_table
            outs.append(pages.attend_pages(queries, raw, packed, scale=scale, softcap=softcap, sinks=sinks).out)
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(q.dtype)

    def _finite(self, x: Tensor) -> Tensor:
        """Note whose numbers are not finite; they become 0, so that one sequence's NaN ends no other. A GPU is not waited for, and notes only."""
        if x.device.type == "cpu":
            lowest, highest = torch.aminmax(x)
            if bool(torch.isfinite(highest - lowest)):
                return x
        finite = torch.isfinite(x)
        wrong = (~finite).flatten(1).any(1)
        self._wrong = wrong if self._wrong is None else self._wrong | wrong
        return torch.where(finite, x, 0.0) if x.device.type == "cpu" else x

    def broken(self) -> list[Work]:
        """Those whose keys or values were not finite in some layer. Waits for the device."""
        if self._wrong is None:
            return []
        wrong = self._wrong.nonzero().flatten().cpu().numpy()
        return [self.works[number] for number in sorted(set(np.searchsorted(self._ends, wrong, side="right").tolist()))]


def _make_part(offer: Offer, works: Sequence[Work], begin: int, scratch: Scratch, device: torch.device) -> _Part:
    plans = [work.request.holding.plan(scratch) for work in works]
    counts = [work.count for work in works]
    lengths = [work.request.holding.length for work in works]
    return _Part(
        offer=offer,
        tokens=slice(begin, begin + sum(counts)),
        start=send(np.cumsum([0, *counts], dtype=np.int32), device),
        position=send(np.array(lengths, np.int32), device),
        longest=max(counts),
        places=[
            _make_places(group, works, [plan[number] for plan in plans], device)
            for number, group in enumerate(offer.groups)
        ],
    )


def _make_places(group: Group, works: Sequence[Work], placements: Sequence[Placement], device: torch.device) -> _Places:
    S, pages, slots = group.rule.page_tokens, [], []
    for work, placement in zip(works, placements, strict=True):
        first = work.request.holding.length
        tokens = np.arange(first, first + work.count)
        pages.append(np.array(placement.raw, np.int64)[tokens // S - first // S])
        slots.append(tokens % S)
    pairs = [pair for placement in placements for pair in placement.seal]
    packed = _stack([work.request.holding.tables[group.sealed] for work in works])
    return _Places(
        pages=send(np.concatenate(pages), device),
        slots=send(np.concatenate(slots).astype(np.int64), device),
        seal=([raw for raw, _ in pairs], [sealed for _, sealed in pairs]),
        raw_table=send(_stack([work.request.holding.tables[group.raw] for work in works]), device),
        packed_table=send(packed, device) if (packed >= 0).any() else None,
    )


def _stack(tables: Sequence[Any]) -> Any:
    """int32 [B, N], N the width of the widest; a copy, because the books go on."""
    stacked = np.full((len(tables), max(len(table) for table in tables)), -1, np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return stacked
