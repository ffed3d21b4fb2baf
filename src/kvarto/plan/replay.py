"""What a prefix cache of some size would have found: a trace under LRU, for all sizes in one pass. No torch.

A request finds the longest run of its first blocks that is still held, computes the rest, and is then the latest user of all its blocks, of the first
one last: so of a prefix never the beginning goes first, as in engines. Under that order a block is held by a cache of C blocks exactly if fewer than
C others were used since (Mattson et al., 1970), and never without those before it. So one number a block, its distance, answers for every size.
All memory counts as cache, and blocks of answers are left out: running sequences need room too, so this is a ceiling.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import accumulate

from kvarto.plan.trace import Prompt, Trace


@dataclass(frozen=True)
class Replay:
    """Distances, sorted, and the tokens that a cache beyond each of them saves in all. `prompt_tokens`: of all prompts; `blocks`: different ones."""

    block_tokens: int
    requests: int
    prompt_tokens: int
    blocks: int
    distances: tuple[int, ...]
    saved: tuple[int, ...]

    def saved_tokens(self, capacity_tokens: int) -> int:
        """Prompt tokens that need not be computed with room for so many."""
        at = bisect.bisect_left(self.distances, capacity_tokens // self.block_tokens)
        return self.saved[at - 1] if at else 0

    def hit_rate(self, capacity_tokens: int) -> float:
        """Share of all prompt tokens."""
        return self.saved_tokens(capacity_tokens) / self.prompt_tokens

    @property
    def most_tokens(self) -> int:
        """Room for all that is ever used again; more saves nothing."""
        return (self.distances[-1] + 1) * self.block_tokens if self.distances else 0


def replay(trace: Trace) -> Replay:
    """One pass over a trace."""
    stack = _Stack(sum(len(prompt.blocks) for prompt in trace.prompts))
    found: dict[int, int] = {}
    for prompt in trace.prompts:
        for distance, tokens in _found(stack, prompt, trace.block_tokens):
            found[distance] = found.get(distance, 0) + tokens
        for block in reversed(prompt.blocks):
            stack.use(block)
    distances = sorted(found)
    saved = tuple(accumulate(found[distance] for distance in distances))
    return Replay(trace.block_tokens, len(trace.prompts), trace.tokens, len(stack.last), tuple(distances), saved)


def _found(stack: _Stack, prompt: Prompt, block_tokens: int) -> list[tuple[int, int]]:
    """(Distance, tokens) of the leading blocks that were used before. The last token is always computed, and with it its block."""
    pairs, deepest = [], 0
    for block in prompt.blocks[: (prompt.tokens - 1) // block_tokens]:
        distance = stack.distance(block)
        if distance is None:
            break
        deepest = max(deepest, distance)  # where ids are no prefixes of each other, all before must be held too
        pairs.append((deepest, block_tokens))
    return pairs


class _Stack:
    """Blocks by their last use, in a binary indexed tree over time."""

    def __init__(self, uses: int) -> None:
        self.last: dict[int, int] = {}
        self._tree, self._now, self._size = [0] * (uses + 1), 0, uses

    def use(self, block: int) -> None:
        """Now."""
        before = self.last.get(block)
        if before is not None:
            self._add(before, -1)
        self._now += 1
        self.last[block] = self._now
        self._add(self._now, 1)

    def distance(self, block: int) -> int | None:
        """How many others were used since; None if it never was."""
        before = self.last.get(block)
        return None if before is None else len(self.last) - self._sum(before)

    def _add(self, at: int, number: int) -> None:
        while at <= self._size:
            self._tree[at] += number
            at += at & -at

    def _sum(self, at: int) -> int:
        total = 0
        while at:
            total += self._tree[at]
            at -= at & -at
        return total
