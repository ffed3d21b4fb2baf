"""What goes first when memory is wanted."""

from __future__ import annotations

from kvarto.cache.arena import UNIT_BYTES, Arena
from kvarto.cache.prefix import Node, Piece, PrefixCache


class Kept:
    """A tier that only counts."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def knows(self, node: Node, kind: int) -> bool:
        return False

    def save(self, piece: Piece) -> None:
        assert piece.node is not None
        self.saved.append(piece.node.tokens[0])

    def load(self, node: Node, kind: int, block: int) -> bool:
        return False


def test_what_nobody_wants_kept_goes_first_and_to_no_tier() -> None:
    cache = PrefixCache(Arena(4 * UNIT_BYTES, [UNIT_BYTES]))
    cache.below = tier = Kept()
    root = cache.root("tenant")

    def page(token: int) -> Piece:
        piece = cache.take(0)
        assert piece is not None
        return cache.keep(piece, cache.enter(root, (token,)))

    pages = [page(token) for token in range(4)]
    cache.release(pages[0])
    cache.release(cache.hold(pages[1]))  # somebody else wanted this one
    cache.release(pages[1], keep=False)
    cache.release(pages[2], keep=False)
    cache.release(pages[3], keep=False)
    cache.check()
    assert cache.idle == [pages[0], pages[1]]
    left = []
    for token in range(10, 14):
        page(token)
        cache.check()
        left.append(sorted(token for (token,) in root.children if token < 10 and root.children[token,].pieces))
    assert left == [[0, 1, 2], [0, 1], [1], []]
    assert tier.saved == [0, 1]
