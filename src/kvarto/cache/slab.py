"""The bytes of a pool: one uint8 tensor [P, page_nbytes] for each layer and format, rows by page id."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from kvarto.cache.pool import PagePool
from kvarto.jit import torch

if TYPE_CHECKING:
    from torch import Tensor

V = TypeVar("V")

_SLACK = 32


class PageStore:
    """Books and bytes of pages of one size on one device.

    Without a capacity it grows by one part in 32 when full (at least 4 pages), so that at most 3 percent of what it holds is slack, and only
    one layer's pages exist twice while they are copied.
    """

    def __init__(self, page_nbytes: int, device: torch.device, capacity_pages: int | None = None) -> None:
        self.pool = PagePool(capacity_pages)
        self.pages: Tensor = torch.empty((capacity_pages or 0, page_nbytes), dtype=torch.uint8, device=device)
        self._views: dict[Hashable, Any] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of storage, used or not."""
        return self.pages.numel()

    def fix(self, capacity_pages: int) -> None:
        """Hold storage for so many pages, and never grow beyond. For a store from which nothing was taken yet."""
        assert self.pool.extent_pages == 0, "pages would be lost"
        self.pool = PagePool(capacity_pages)
        self._replace(self.pages.new_empty((capacity_pages, self.pages.shape[1])))

    def take(self, count: int) -> list[int]:
        """Ids of `count` fresh pages, whose bytes are undefined."""
        ids = self.pool.take(count)
        if self.pool.extent_pages > len(self.pages):
            self._grow(self.pool.extent_pages)
        return ids

    def copy(self, page: int) -> int:
        """A fresh page with the bytes of another."""
        (fresh,) = self.take(1)
        self.pages[fresh] = self.pages[page]
        return fresh

    def view(self, key: Hashable, make: Callable[[Tensor], V]) -> V:
        """make(pages): views of the storage, made once for each key and again when the storage is another."""
        if key not in self._views:
            self._views[key] = make(self.pages)
        return self._views[key]  # type: ignore[no-any-return]

    def _grow(self, needed_pages: int) -> None:
        held = len(self.pages)
        grown = max(needed_pages, held + max(4, held // _SLACK))
        pages = self.pages.new_empty((grown, self.pages.shape[1]))
        pages[:held] = self.pages
        self._replace(pages)

    def _replace(self, pages: Tensor) -> None:
        self.pages, self._views = pages, {}
