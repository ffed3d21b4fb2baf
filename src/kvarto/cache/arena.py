"""One budget of bytes for blocks of several sizes. Plain integers, no torch.

A *block* is what S tokens take in all layers of a group, in one form; a *kind* is a size of block that somebody asks for. The budget is one stretch
of bytes, cut into *extents* of equal size. An extent belongs to one kind while any of its blocks is in use, and to nobody else otherwise, so memory
flows between kinds (formats, layer groups, raw and sealed pages). A block is known by its address in units of UNIT_BYTES: one view of the whole
stretch, with rows a unit apart, then serves every kind, and kernels need not know of extents.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarto.errors import UsageError

UNIT_BYTES = 256
# Sizes of an extent that are tried for each kind: so many multiples of its block.
_CANDIDATES = 512


@dataclass
class _Extent:
    """Slots are counted from 0; `kind` is -1 while none is used."""

    kind: int = -1
    free: list[int] = field(default_factory=list)  # a heap: the lowest first, so that extents empty from the top
    used: set[int] = field(default_factory=set)


class Arena:
    """Which blocks of which kind are in use. `block_bytes[kind]` is rounded up to whole units.

    Raises UsageError if the budget has no room for a block of every kind.
    """

    def __init__(self, budget_bytes: int, block_bytes: Sequence[int]) -> None:
        self.block_units = tuple(-(-nbytes // UNIT_BYTES) for nbytes in block_bytes)
        units = budget_bytes // UNIT_BYTES
        self._extent_units = _extent_units(units, self.block_units)
        count = units // self._extent_units
        if count < len(self.block_units):
            needed = len(self.block_units) * max(self.block_units) * UNIT_BYTES
            raise UsageError("memory", f"at least {needed} bytes, a block of each kind", budget_bytes)
        self._slots = tuple(self._extent_units // size for size in self.block_units)
        self._extents = [_Extent() for _ in range(count)]
        self._unused = list(range(count))  # a heap of extents that belong to nobody
        self._open: list[set[int]] = [set() for _ in self.block_units]  # extents of each kind with a free slot

    @property
    def extent_count(self) -> int:
        """Extents in all."""
        return len(self._extents)

    @property
    def nbytes(self) -> int:
        """Bytes that blocks may lie in."""
        return len(self._extents) * self._extent_units * UNIT_BYTES

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks in use."""
        return sum(len(extent.used) * self.block_units[extent.kind] * UNIT_BYTES for extent in self._extents)

    def census(self) -> tuple[int, list[tuple[int, int]]]:
        """Extents that belong to nobody, and of each kind (its extents, its blocks in use). Another thread may ask, and gets about what is so."""
        extents, blocks = [0] * (len(self.block_units) + 1), [0] * (len(self.block_units) + 1)
        for extent in self._extents:
            extents[extent.kind] += 1  # nobody's is -1, the last one
            blocks[extent.kind] += len(extent.used)
        return extents[-1], list(zip(extents[:-1], blocks[:-1], strict=True))

    def extent_slots(self, kind: int) -> int:
        """Blocks of this kind that an extent has room for."""
        return self._slots[kind]

    def capacity(self, kind: int) -> int:
        """Blocks of this kind, were all memory theirs."""
        return len(self._extents) * self._slots[kind]

    def fits(self, counts: dict[int, int]) -> bool:
        """So many blocks of each kind could be in use together."""
        return sum(-(-count // self._slots[kind]) for kind, count in counts.items()) <= len(self._extents)

    def room(self, kind: int) -> int:
        """Blocks of this kind that can be taken now."""
        return len(self._unused) * self._slots[kind] + self.free_slots(kind)

    def block_bytes(self, kind: int) -> int:
        """Bytes that a block of this kind takes."""
        return self.block_units[kind] * UNIT_BYTES

    def free_in(self, number: int) -> int:
        """Free blocks of an extent that belongs to a kind."""
        return len(self._extents[number].free)

    def free_slots(self, kind: int) -> int:
        """Free blocks in extents that this kind has already."""
        return sum(len(self._extents[number].free) for number in self._open[kind])

    def take(self, kind: int) -> int | None:
        """The address of a fresh block, in units, or None if there is no room."""
        if not self._open[kind]:
            if not self._unused:
                return None
            self._begin(heapq.heappop(self._unused), kind)
        # The fullest one: others may become empty, and then another kind's.
        number = max(self._open[kind], key=lambda number: (len(self._extents[number].used), -number))
        return self._take_from(number)

    def release(self, block: int) -> None:
        """Give a block back."""
        number, slot = self._place(block)
        extent = self._extents[number]
        extent.used.remove(slot)
        heapq.heappush(extent.free, slot)
        self._open[extent.kind].add(number)
        if not extent.used:
            self._open[extent.kind].remove(number)
            self._extents[number] = _Extent()
            heapq.heappush(self._unused, number)

    def extent_of(self, block: int) -> int:
        """The number of the extent that a block lies in."""
        return block // self._extent_units

    def kind_of(self, number: int) -> int:
        """The kind that an extent belongs to, or -1."""
        return self._extents[number].kind

    def used_in(self, number: int) -> int:
        """Blocks in use in an extent."""
        return len(self._extents[number].used)

    def blocks_in(self, number: int) -> list[int]:
        """Addresses of the blocks in use in an extent."""
        return [self._address(number, slot) for slot in sorted(self._extents[number].used)]

    def vacate(self, number: int) -> list[tuple[int, int]]:
        """Move all blocks of an extent into free slots of its kind elsewhere, of which there are enough: (from, to) of each."""
        extent, moves = self._extents[number], []
        self._open[extent.kind].discard(number)
        for slot in sorted(extent.used):
            target = max(self._open[extent.kind], key=lambda other: (len(self._extents[other].used), -other))
            moves.append((self._address(number, slot), self._take_from(target)))
        self._extents[number] = _Extent()
        heapq.heappush(self._unused, number)
        return moves

    def check(self) -> None:
        """Assert that the books balance."""
        for number, extent in enumerate(self._extents):
            assert (extent.kind < 0) == (number in self._unused), f"extent {number} is both a kind's and nobody's"
            if extent.kind < 0:
                continue
            free = set(extent.free)
            assert len(free) == len(extent.free), "a slot is free twice"
            assert not free & extent.used, "a slot is both free and used"
            assert free | extent.used == set(range(self._slots[extent.kind])), "a slot is lost"
            assert extent.used, "an empty extent was not given back"
            assert bool(free) == (number in self._open[extent.kind]), "an extent with free slots cannot be found"
        assert len(set(self._unused)) == len(self._unused), "an extent is unused twice"

    def _begin(self, number: int, kind: int) -> None:
        self._extents[number] = _Extent(kind, list(range(self._slots[kind])))
        self._open[kind].add(number)

    def _take_from(self, number: int) -> int:
        extent = self._extents[number]
        slot = heapq.heappop(extent.free)
        extent.used.add(slot)
        if not extent.free:
            self._open[extent.kind].remove(number)
        return self._address(number, slot)

    def _address(self, number: int, slot: int) -> int:
        return number * self._extent_units + slot * self.block_units[self._extents[number].kind]

    def _place(self, block: int) -> tuple[int, int]:
        number = self.extent_of(block)
        return number, (block - number * self._extent_units) // self.block_units[self._extents[number].kind]


def _extent_units(units: int, block_units: Sequence[int]) -> int:
    """The size of an extent that wastes least: behind its last block, for the kind that suffers most; behind the last extent; and in extents that
    are not full, of which each kind has one: about half of it."""
    largest = max(block_units)
    candidates = {
        extent
        for size in block_units
        for i in range(_CANDIDATES)
        if (extent := (-(-largest // size) + i) * size) * len(block_units) <= units
    }

    def waste(extent: int) -> float:
        usable = min((units // extent) * (extent // size) * size for size in block_units)
        return 1 - usable / units + len(block_units) * extent / units / 2

    return min(sorted(candidates), key=waste, default=largest)
