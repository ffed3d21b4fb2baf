"""The books of a page pool: which page ids are in use, and by how many holders. Plain integers, no torch.

A sealed page may be held by several sequences (beams, forks, shared prefixes); it is free again when the last holder lets go. Ids are handed
out lowest first, so that a pool that shrinks and grows stays dense.
"""

from __future__ import annotations

import heapq

from kvarto.errors import OutOfPages


class PagePool:
    """Reference counts of page ids 0 .. capacity - 1. `capacity_pages` None means the pool grows as asked."""

    def __init__(self, capacity_pages: int | None = None) -> None:
        self.capacity_pages = capacity_pages
        self._holders: dict[int, int] = {}
        self._free: list[int] = []
        self._next = 0

    @property
    def used_pages(self) -> int:
        """Pages with at least one holder."""
        return len(self._holders)

    @property
    def extent_pages(self) -> int:
        """One more than the highest id ever handed out: how much storage the ids need."""
        return self._next

    def take(self, count: int) -> list[int]:
        """`count` ids with one holder each. Raises OutOfPages and takes none if a fixed pool has too few."""
        self.require(count)
        return [self._take_one() for _ in range(count)]

    def require(self, count: int) -> None:
        """Raise OutOfPages if `count` more pages are not to be had."""
        if self.capacity_pages is not None and self.capacity_pages - self.used_pages < count:
            raise OutOfPages(count, self.capacity_pages - self.used_pages)

    def share(self, page: int) -> None:
        """One more holder of a page in use."""
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """One holder fewer; the last one frees the page."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            del self._holders[page]
            heapq.heappush(self._free, page)

    def holders(self, page: int) -> int:
        """How many hold the page; 0 if it is free."""
        return self._holders.get(page, 0)

    def check(self) -> None:
        """Assert that the books balance: every id ever handed out is either in use or free, and none is both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._holders.keys(), "a page is both free and in use"
        assert free | self._holders.keys() == set(range(self._next)), "a page is lost"
        assert all(count > 0 for count in self._holders.values()), "a page in use has no holder"

    def _take_one(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, self._next = self._next, self._next + 1
        self._holders[page] = 1
        return page
