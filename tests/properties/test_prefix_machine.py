"""The books of an engine's memory against a naive model: whatever is taken, shared, found again, dropped and moved, bytes stay what they were."""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarto.cache.arena import UNIT_BYTES, Arena
from kvarto.cache.prefix import Node, Piece, PrefixCache

S = 2
STEPS = int(os.environ.get("KVARTO_MACHINE_STEPS", "60"))
EXAMPLES = int(os.environ.get("KVARTO_MACHINE_EXAMPLES", "60"))


class Sequence:
    """Goes through nodes, of each of which it holds the pieces of some kinds; `own`: pieces that nobody else may know."""

    def __init__(self, root: Node) -> None:
        self.root, self.nodes = root, list[Node]()
        self.held: list[Piece] = []
        self.own: list[Piece] = []


class PrefixMachine(RuleBasedStateMachine):
    """`bytes_of[block]`: what stands in a block, "free" once it was given back."""

    @initialize(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3), extents=st.integers(3, 9))
    def begin(self, sizes: list[int], extents: int) -> None:
        budget = extents * 2 * max(sizes) * UNIT_BYTES
        self.kinds = range(len(sizes))
        self.arena = Arena(budget, [size * UNIT_BYTES for size in sizes])
        self.bytes_of: dict[int, object] = {}
        self.cache = PrefixCache(self.arena, move=self.moved, freed=self.freed)
        self.sequences: list[Sequence] = []
        self.contents: dict[Piece, object] = {}
        self.count = 0

    def moved(self, kind: int, moves: list[tuple[int, int]]) -> None:
        targets = [target for _, target in moves]
        assert not set(targets) & {source for source, _ in moves}
        for source, target in moves:
            assert self.bytes_of.get(target, "free") == "free"
            self.bytes_of[target] = self.bytes_of[source]

    def freed(self, kind: int, blocks: list[int]) -> None:
        for block in blocks:
            assert self.bytes_of[block] != "free"
            self.bytes_of[block] = "free"

    # ---- what sequences do -----------------------------------------------------------------------------------------

    @rule(identity=st.integers(0, 1))
    def arrive(self, identity: int) -> None:
        self.sequences.append(Sequence(self.cache.root(identity)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 12), keep=st.booleans())
    def take(self, data: st.DataObject, count: int, keep: bool) -> None:
        """Some pieces, each its sequence's own; with `keep` each becomes what a page of its own has."""
        sequence, kind = data.draw(st.sampled_from(self.sequences)), data.draw(st.sampled_from(self.kinds))
        for i in range(count):
            self.take_one(sequence, kind)
            if keep and sequence.own:
                self.share_one(sequence, (i, 0), new_page=True)

    def take_one(self, sequence: Sequence, kind: int) -> None:
        piece = self.cache.take(kind)
        if piece is None:
            # Refused only if all is held, and no extent of another kind could be emptied into others.
            assert self.cache.idle_bytes == 0
            assert self.arena.room(kind) == 0
            for number in range(self.arena.extent_count):
                other, used = self.arena.kind_of(number), self.arena.used_in(number)
                assert other in (-1, kind) or used > self.arena.free_slots(other) - self.arena.free_in(number)
            return
        assert self.bytes_of.get(piece.block, "free") == "free"
        self.count += 1
        self.bytes_of[piece.block] = self.contents[piece] = self.count
        sequence.own.append(piece)

    @precondition(lambda self: any(s.own for s in self.sequences))
    @rule(data=st.data(), tokens=st.tuples(*[st.integers(0, 1)] * S), new_page=st.booleans())
    def share(self, data: st.DataObject, tokens: tuple[int, ...], new_page: bool) -> None:
        """A piece of one's own becomes what a node has."""
        self.share_one(data.draw(st.sampled_from([s for s in self.sequences if s.own])), tokens, new_page)

    def share_one(self, sequence: Sequence, tokens: tuple[int, ...], new_page: bool) -> None:
        piece = sequence.own.pop()
        if new_page or not sequence.nodes:
            sequence.nodes.append(self.cache.enter((sequence.nodes or [sequence.root])[-1], tokens))
        node = sequence.nodes[-1]
        known = node.pieces.get(piece.kind)
        kept = self.cache.keep(piece, node)
        assert kept is (known or piece)
        if kept is not piece:
            del self.contents[piece]
        sequence.held.append(kept)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=4 * S))
    def find(self, data: st.DataObject, tokens: list[int]) -> None:
        """A sequence at its root goes down a prefix that is there, and holds all of it."""
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.nodes:
            return
        path = list(self.cache.path(sequence.root, tokens, S, list(self.kinds)))
        for i, node in enumerate(path):
            assert node.tokens == tuple(tokens[i * S : i * S + S])
            sequence.nodes.append(self.cache.enter((sequence.nodes or [sequence.root])[-1], node.tokens))
            assert sequence.nodes[-1] is node
            sequence.held += [self.cache.hold(piece) for piece in node.pieces.values()]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), keep=st.booleans())
    def depart(self, data: st.DataObject, keep: bool) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        for piece in sequence.own:
            self.cache.release(piece)
            del self.contents[piece]
        for piece in reversed(sequence.held):
            self.cache.release(piece, keep=keep)
        for node in reversed(sequence.nodes):
            self.cache.leave(node)
        self.cache.leave(sequence.root)

    # ---- what is always so -----------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.cache.check()
        held = [piece for s in self.sequences for piece in (*s.own, *s.held)]
        for piece in held:
            assert piece.holders == held.count(piece)
            assert self.bytes_of[piece.block] == self.contents[piece]
        blocks = [piece.block for piece in set(held)]
        assert len(set(blocks)) == len(blocks)

    @invariant()
    def what_is_found_is_what_was_kept(self) -> None:
        for piece in self.cache._pieces.values():
            assert self.bytes_of[piece.block] == self.contents[piece]


PrefixMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)
TestPrefixMachine = PrefixMachine.TestCase
