"""The page pool against a naive model, in random order."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvarto.cache.pool import PagePool
from kvarto.errors import OutOfPages

CAPACITY = 12


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(CAPACITY)
        self.model: Counter[int] = Counter()

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        free = CAPACITY - len(self.model)
        try:
            pages = self.pool.take(count)
        except OutOfPages:
            assert count > free
            return
        assert count <= free
        assert len(set(pages)) == count
        assert not set(pages) & self.model.keys()
        self.model.update(pages)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.model)))
        self.pool.share(page)
        self.model[page] += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.model)))
        self.pool.release(page)
        self.model[page] -= 1
        self.model += Counter()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.used_pages == len(self.model)
        assert all(self.pool.holders(page) == count for page, count in self.model.items())
        assert self.pool.extent_pages <= CAPACITY


TestPool = PoolMachine.TestCase
