"""The books of an engine's sequences against a naive model.

The model plays the device: a raw slot holds the tokens up to its own, a sealed block those up to the end of its page. Whatever is shared, found,
given up and moved, every query must find what the rule lets it read, in the right form and with the right prefix, and nothing else.
"""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarto.cache.arena import UNIT_BYTES, Arena
from kvarto.cache.prefix import PrefixCache
from kvarto.engine.holding import Group, Holding, Scratch
from kvarto.rule import Rule

STEPS = int(os.environ.get("KVARTO_MACHINE_STEPS", "50"))
EXAMPLES = int(os.environ.get("KVARTO_MACHINE_EXAMPLES", "80"))
S = 2
MOST_TOKENS = 24
STEP_TOKENS = 9
RULES = [
    Rule(S),
    Rule(S, sink_pages=1),
    Rule(S, sink_pages=1, window_pages=2),
    Rule(S, sliding_tokens=3),
    Rule(S, sink_pages=1, window_pages=1, sliding_tokens=5),
]
LONG = tuple(i % 2 for i in range(MOST_TOKENS))


class Request:
    def __init__(self, holding: Holding, tokens: list[int]) -> None:
        self.holding, self.tokens = holding, tokens


class HoldingMachine(RuleBasedStateMachine):
    """`device[address][slot]` of a raw page, `device[address]["sealed"]` of a sealed one."""

    @initialize(
        rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=2),
        sizes=st.lists(st.integers(1, 6), min_size=4, max_size=4),
        extents=st.integers(8, 20),
    )
    def begin(self, rules: list[Rule], sizes: list[int], extents: int) -> None:
        self.groups = [Group(rule, 2 * i, 2 * i + 1) for i, rule in enumerate(rules)]
        sizes = sizes[: 2 * len(rules)]
        self.arena = Arena(extents * 2 * max(sizes) * UNIT_BYTES, [size * UNIT_BYTES for size in sizes])
        self.cache = PrefixCache(self.arena, move=self.moved, freed=self.freed)
        scratch_start = self.arena.nbytes // UNIT_BYTES
        self.scratch = Scratch(scratch_start, {group.raw: sizes[group.raw] for group in self.groups}, STEP_TOKENS // S)
        self.device: dict[int, dict[object, tuple[int, ...]]] = {}
        self.requests: list[Request] = []

    def moved(self, kind: int, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            if source in self.device:  # else nothing was written there yet
                self.device[target] = dict(self.device[source])

    def freed(self, kind: int, blocks: list[int]) -> None:
        for block in blocks:
            self.device.pop(block, None)

    # ---- requests --------------------------------------------------------------------------------------------------

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MOST_TOKENS),
        shared=st.integers(0, MOST_TOKENS - 1),
        keep=st.booleans(),
    )
    def arrive(self, tokens: list[int], shared: int, keep: bool) -> None:
        """A request whose prompt begins as many others do."""
        tokens = [*LONG[:shared], *tokens][:MOST_TOKENS]
        self.requests.append(Request(Holding(self.cache, "model", self.groups, keep=keep), tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), most=st.integers(1, STEP_TOKENS))
    def step(self, data: st.DataObject, most: int) -> None:
        """Some requests go on together, like in an engine: those that get no room wait."""
        chosen = data.draw(st.permutations(self.requests))[: data.draw(st.integers(1, 4))]
        budget, going = STEP_TOKENS, []
        for request in chosen:
            found = request.holding.find(request.tokens)
            assert request.holding.length < len(request.tokens)
            assert found % S == 0
            count = min(most, budget, len(request.tokens) - request.holding.length)
            if count and request.holding.reserve(count):
                going.append((request, count))
                budget -= count
        self.scratch.clear()
        plans = [(request, count, request.holding.plan(self.scratch)) for request, count in going]
        for number, group in enumerate(self.groups):
            self.compute(number, group, plans)
        for address in [address for address in self.device if address >= self.arena.nbytes // UNIT_BYTES]:
            del self.device[address]
        for request, _count in going:
            request.holding.commit(request.tokens)
            if request.holding.length == len(request.tokens):
                request.tokens.append(data.draw(st.integers(0, 1)))

    def compute(self, number: int, group: Group, plans: list[tuple[Request, int, list]]) -> None:  # type: ignore[type-arg]
        """What a layer of a group does: store, seal, read."""
        for request, count, placements in plans:
            holding, tokens = request.holding, request.tokens
            first = holding.length // S
            for t in range(holding.length, holding.length + count):
                address = placements[number].raw[t // S - first]
                self.device.setdefault(address, {})[t % S] = tuple(tokens[: t + 1])
        for _request, _count, placements in plans:
            for raw, sealed, first_token in placements[number].seal:
                assert first_token % S == 0
                self.device[sealed] = {"sealed": self.device[raw][S - 1]}
        for request, count, _placements in plans:
            for t in range(request.holding.length, request.holding.length + count):
                self.read(group, request, t)

    def read(self, group: Group, request: Request, t: int) -> None:
        """A query at place t finds everything that it reads."""
        rule = group.rule
        for page in range(rule.first_page(t), t // S + 1):
            if rule.reads_raw(page, t // S):
                raw = self.device[int(request.holding.tables[group.raw][page])]
                for token in range(page * S, min(page * S + S, t + 1)):
                    hidden = rule.sliding_tokens is not None and token <= t - rule.sliding_tokens
                    assert hidden or raw[token % S] == tuple(request.tokens[: token + 1])
            else:
                sealed = self.device[int(request.holding.tables[group.sealed][page])]
                assert sealed["sealed"] == tuple(request.tokens[: page * S + S])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), again=st.booleans())
    def depart(self, data: st.DataObject, again: bool) -> None:
        """A request ends, or is preempted and starts over."""
        number = data.draw(st.integers(0, len(self.requests) - 1))
        request = self.requests.pop(number)
        request.holding.release()
        if again:
            self.requests.append(Request(Holding(self.cache, "model", self.groups), request.tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def change_of_mind(self, data: st.DataObject) -> None:
        """What was reserved is given back."""
        request = data.draw(st.sampled_from(self.requests))
        used = self.arena.used_bytes - self.cache.idle_bytes
        if request.holding.reserve(1 + data.draw(st.integers(0, STEP_TOKENS))):
            request.holding.abandon()
        assert self.arena.used_bytes - self.cache.idle_bytes == used

    # ---- what is always so -----------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.cache.check()
        holders: dict[int, int] = {}
        for request in self.requests:
            for held in request.holding._held.values():
                for piece in held.values():
                    holders[piece.block] = holders.get(piece.block, 0) + 1
        assert holders == {p.block: p.holders for p in self.cache._pieces.values() if p.holders}

    @invariant()
    def nothing_is_held_that_is_not_needed(self) -> None:
        for request in self.requests:
            holding = request.holding
            page, rest = divmod(holding.length, S)
            for group in self.groups:
                needed = {(earlier, kind) for kind, pages in group.needed(page) for earlier in pages}
                needed |= {(page, group.raw)} if rest else set()
                first = group.rule.first_page(holding.length)  # the page may be behind the window by now
                needed = {(earlier, kind) for earlier, kind in needed if earlier >= first}
                held = {(p, kind) for kind in (group.raw, group.sealed) for p in holding._held[kind]}
                assert held == needed
                for kind in (group.raw, group.sealed):
                    table = {p: int(b) for p, b in enumerate(holding.tables[kind]) if b >= 0}
                    assert table.keys() == holding._held[kind].keys()


HoldingMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)
TestHoldingMachine = HoldingMachine.TestCase
