"""Pages that outlive their sequence: a tree of prefixes over one arena of blocks. Plain integers, no torch.

A node is a page of tokens behind a prefix; a *piece* is a block that holds what some layers keep of it, in one form: the node's `pieces`, by kind.
A piece is held by the sequences that read it. One that nobody holds stays where it is, and is found again by the same prefix, until its memory
is wanted: then the piece that was let go of the longest ago is dropped first. Sequences let go of their last page first, so a page is dropped
before the pages that it builds on.

A block moves when its extent is wanted by another kind and there is room for it elsewhere; `Piece.block` is then another, and `moves` has grown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvarto.cache.arena import Arena

_NEVER = float("inf")


@dataclass(eq=False, slots=True)
class Node:
    """The page of `tokens` behind `parent`; a root has none. `identity`: the root's; `holders`: sequences that go through; `digest`: for `Below`."""

    parent: Node | None
    tokens: tuple[int, ...]
    identity: Hashable = None
    digest: bytes | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    pieces: dict[int, Piece] = field(default_factory=dict)
    holders: int = 0


@dataclass(eq=False, slots=True)
class Piece:
    """A block of a kind with `holders`; `node`: whose page it is, None while nobody but its holder may know.

    since   when somebody let go of it who wants it kept; 0: nobody has
    """

    kind: int
    block: int
    holders: int = 1
    node: Node | None = None
    since: int = 0


class Below(Protocol):
    """Where pieces go that are dropped, and come back from: host memory, files."""

    def knows(self, node: Node, kind: int) -> bool:
        """It may have what `node` had of a kind; the node need not be in the tree."""

    def save(self, piece: Piece) -> None:
        """A piece of a node is about to be dropped."""

    def load(self, node: Node, kind: int, block: int) -> bool:
        """Write what the node had of a kind into a block; False if it is not to be had after all."""


def _nothing(_kind: int, _blocks: list[int]) -> None:
    """Blocks are not looked at."""


def _cannot_move(_kind: int, _moves: list[tuple[int, int]]) -> None:
    """There is nothing in the blocks."""


class PrefixCache:
    """The pieces of an arena.

    move    called before books change, with the kind and the (from, to) blocks whose bytes must be copied, in this order
    freed   called with the kind and the blocks that hold nothing any more
    below   set afterwards: where what is dropped may go
    """

    below: Below | None = None

    def __init__(
        self,
        arena: Arena,
        *,
        move: Callable[[int, list[tuple[int, int]]], None] = _cannot_move,
        freed: Callable[[int, list[int]], None] = _nothing,
    ) -> None:
        self.arena, self.moves, self.dropped, self.released = arena, 0, 0, 0
        self._move, self._freed = move, freed
        self._roots: dict[Hashable, Node] = {}
        self._pieces: dict[int, Piece] = {}
        # For each kind what nobody holds, let go of the longest ago first.
        self._idle: list[OrderedDict[int, Piece]] = [OrderedDict() for _ in arena.block_units]
        self._held_in = [0] * arena.extent_count
        self._clock = 0
        self._patience = 0

    # ---- prefixes --------------------------------------------------------------------------------------------------

    def root(self, identity: Hashable) -> Node:
        """One more sequence whose prefix is of this identity: model, policy, tenant ... It begins at this node."""
        root = self._roots.setdefault(identity, Node(None, (), identity))
        root.holders += 1
        return root

    def path(self, root: Node, tokens: Sequence[int], page_tokens: int, kinds: Sequence[int]) -> Iterator[Node]:
        """The nodes of the whole pages that `tokens` begins with, as far as the tree, or what is below, has anything of these kinds.

        Those of what is below are not in the tree until `enter`.
        """
        for first in range(0, len(tokens) - page_tokens + 1, page_tokens):
            page = tuple(tokens[first : first + page_tokens])
            node = root.children.get(page) or Node(root, page, root.identity)
            if not node.pieces and not node.children and not any(self.can_restore(node, kind) for kind in kinds):
                return
            yield node
            root = node

    def can_restore(self, node: Node, kind: int) -> bool:
        """What is below may have this piece of a node."""
        return self.below is not None and self.below.knows(node, kind)

    def restore(self, node: Node, kind: int) -> Piece | None:
        """A piece of a node of the tree from below, held once and seen by nobody before it is whole; None if it is not to be had, or has no room."""
        piece = self.take(kind)
        if piece is None:
            return None
        assert self.below is not None
        if not self.below.load(node, kind, piece.block):
            self.release(piece)
            return None
        return self.keep(piece, node)

    @property
    def idle(self) -> list[Piece]:
        """All that nobody holds and somebody wanted kept, the least recently used first."""
        wanted = (piece for idle in self._idle for piece in idle.values() if piece.since)
        return sorted(wanted, key=lambda piece: piece.since)

    def enter(self, parent: Node, tokens: tuple[int, ...]) -> Node:
        """One more sequence goes through the page of `tokens` behind `parent`."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, parent.identity)
        node.holders += 1
        return node

    def leave(self, node: Node) -> None:
        """One sequence fewer goes through a page, or begins at a root."""
        node.holders -= 1
        self._prune(node)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def take(self, kind: int) -> Piece | None:
        """A fresh piece, held once, or None if all memory is held. What nobody holds makes room."""
        while (block := self.arena.take(kind)) is None:
            if not self._make_room(kind):
                return None
        piece = self._pieces[block] = Piece(kind, block)
        self._held_in[self.arena.extent_of(block)] += 1
        return piece

    def keep(self, piece: Piece, node: Node) -> Piece:
        """The holder of `piece` shares it as what `node` has of its kind. Returns what it holds from now on: the node's own, if there was one."""
        if (known := node.pieces.get(piece.kind)) is not None:
            self.hold(known)
            self.release(piece)
            return known
        piece.node, node.pieces[piece.kind] = node, piece
        return piece

    def hold(self, piece: Piece) -> Piece:
        """One more holder."""
        if piece.holders == 0:
            del self._idle[piece.kind][piece.block]
            self._held_in[self.arena.extent_of(piece.block)] += 1
        piece.holders += 1
        return piece

    def release(self, piece: Piece, *, keep: bool = True) -> None:
        """One holder fewer; without any a piece of no node is gone, and one of a node may go: first of all if no holder said `keep`."""
        piece.holders -= 1
        keep = keep or piece.since > 0
        if keep:
            self._clock += 1
            piece.since = self._clock
        if piece.holders == 0:
            self.released += 1
            self._held_in[self.arena.extent_of(piece.block)] -= 1
            if piece.node is None:
                self._free(piece)
                return
            self._idle[piece.kind][piece.block] = piece
            if not keep:
                self._idle[piece.kind].move_to_end(piece.block, last=False)

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks that somebody holds."""
        return self.arena.used_bytes - self.idle_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of blocks that nobody holds and that may be found again."""
        return sum(len(idle) * self.arena.block_bytes(kind) for kind, idle in enumerate(self._idle))

    def idle_count(self, kind: int) -> int:
        """Blocks of a kind that nobody holds and that may be found again."""
        return len(self._idle[kind])

    # ---- room ------------------------------------------------------------------------------------------------------

    def _make_room(self, kind: int) -> bool:
        """Drop or move something, so that a block of this kind comes nearer; False if all that there is is held."""
        own, other = self._oldest(kind), min((self._oldest(k) for k in self._others(kind)), default=_NEVER)
        if other < own or own == _NEVER:
            if self._patience == 0 or own == _NEVER:
                since, number = self._cheapest_extent(kind)
                if number is not None and since < own:
                    self._empty(number)
                    return True
                # A search that found nothing is not made again until so many of our own were dropped.
                self._patience = 1 + self.arena.capacity(kind) // 64
            self._patience -= 1
        if own != _NEVER:
            self._drop_oldest(kind)
            return True
        if other == _NEVER:
            return False
        # Nothing of ours to drop and no extent that could be emptied: what is idle elsewhere stands in the way of moves.
        self._drop_oldest(min(self._others(kind), key=self._oldest))
        return True

    def _others(self, kind: int) -> list[int]:
        return [other for other in range(len(self._idle)) if other != kind]

    def _oldest(self, kind: int) -> float:
        """When the piece of a kind that is dropped next was let go of."""
        return next((piece.since for piece in self._idle[kind].values()), _NEVER)

    def _cheapest_extent(self, kind: int) -> tuple[float, int | None]:
        """(When its youngest idle piece was let go of, number) of another kind's extent that is missed least; what is held has room elsewhere."""
        best: tuple[float, int | None] = (_NEVER, None)
        free = [self.arena.free_slots(other) for other in range(len(self._idle))]
        for number in range(self.arena.extent_count):
            other = self.arena.kind_of(number)
            if other in (-1, kind) or self._held_in[number] > free[other] - self.arena.free_in(number):
                continue
            if self._held_in[number] == self.arena.used_in(number):
                return 0, number  # nothing is lost
            since = max(piece.since for piece in self._pieces_in(number) if piece.holders == 0)
            best = min(best, (since, number), key=lambda found: found[0])
        return best

    def _pieces_in(self, number: int) -> list[Piece]:
        return [self._pieces[block] for block in self.arena.blocks_in(number)]

    def _empty(self, number: int) -> None:
        """Drop what is idle in an extent, and move what is held."""
        kind, pieces = self.arena.kind_of(number), self._pieces_in(number)
        for piece in pieces:
            if piece.holders == 0:
                self._drop(piece)
        if held := [piece for piece in pieces if piece.holders > 0]:
            moves = self.arena.vacate(number)
            self._move(kind, moves)
            for piece, (source, target) in zip(held, moves, strict=True):
                assert piece.block == source, "moves are in the order of the blocks"
                del self._pieces[source]
                piece.block, self._pieces[target] = target, piece
                self._held_in[self.arena.extent_of(target)] += 1
            self._held_in[number] = 0
            self._freed(kind, [source for source, _ in moves])
            self.moves += 1

    def _drop_oldest(self, kind: int) -> None:
        self._drop(next(iter(self._idle[kind].values())))

    def _drop(self, piece: Piece) -> None:
        """Forget an idle piece."""
        assert piece.node is not None, "an idle piece has a node"
        if self.below is not None and piece.since:
            self.below.save(piece)
        del self._idle[piece.kind][piece.block], piece.node.pieces[piece.kind]
        self._prune(piece.node)
        self.dropped += 1
        self._free(piece)

    def _free(self, piece: Piece) -> None:
        del self._pieces[piece.block]
        self.arena.release(piece.block)
        self._freed(piece.kind, [piece.block])

    def _prune(self, node: Node) -> None:
        """Take nodes out of the tree that nobody goes through and that have nothing."""
        current: Node | None = node
        while current is not None and not (current.holders or current.pieces or current.children):
            if current.parent is None:
                del self._roots[current.identity]
            else:
                del current.parent.children[current.tokens]
            current = current.parent

    # ---- balance ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that the books balance."""
        self.arena.check()
        extents = range(self.arena.extent_count)
        used = {block: self.arena.kind_of(number) for number in extents for block in self.arena.blocks_in(number)}
        assert used == {block: piece.kind for block, piece in self._pieces.items()}, "blocks and pieces differ"
        held = [sum(piece.holders > 0 for piece in self._pieces_in(number)) for number in extents]
        assert held == self._held_in, "held pieces of an extent are counted wrong"
        for piece in self._pieces.values():
            is_idle = self._idle[piece.kind].get(piece.block) is piece
            assert is_idle == (piece.holders == 0), "a piece is idle and held, or neither"
            assert piece.node is not None or piece.holders == 1, "a piece that nobody else may know has other holders"
            assert piece.node is None or piece.node.pieces[piece.kind] is piece, "a node does not know its piece"
        for idle in self._idle:
            since = [piece.since for piece in idle.values()]
            assert since == sorted(since), "what is idle is out of order"
        for root in self._roots.values():
            nodes = [root]
            while nodes:
                node = nodes.pop()
                assert node.holders or node.pieces or node.children, "a node without any use"
                assert all(self._pieces.get(piece.block) is piece for piece in node.pieces.values())
                assert all(child.parent is node for child in node.children.values())
                nodes += node.children.values()
