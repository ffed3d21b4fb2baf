from __future__ import annotations

import pytest

from kvarto.cache.pool import PagePool
from kvarto.errors import OutOfPages


def test_lowest_free_id_first() -> None:
    pool = PagePool()
    assert pool.take(3) == [0, 1, 2]
    pool.release(1)
    assert pool.take(2) == [1, 3]
    assert (pool.used_pages, pool.extent_pages) == (4, 4)


def test_shared_page_is_freed_by_the_last_holder() -> None:
    pool = PagePool()
    (page,) = pool.take(1)
    pool.share(page)
    pool.release(page)
    assert pool.holders(page) == 1
    pool.release(page)
    assert pool.holders(page) == pool.used_pages == 0
    pool.check()


def test_fixed_pool_refuses_and_takes_nothing() -> None:
    pool = PagePool(capacity_pages=2)
    pool.take(1)
    with pytest.raises(OutOfPages, match="expected 2 free, got 1"):
        pool.take(2)
    assert pool.used_pages == 1
    pool.check()
