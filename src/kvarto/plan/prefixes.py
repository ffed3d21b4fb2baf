"""`--trace`: what a bigger prefix cache is worth, by format. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvarto.plan.answer import Answer
from kvarto.plan.replay import Replay, replay
from kvarto.plan.trace import Trace


@dataclass(frozen=True)
class PrefixRow:
    """A format, the tokens that its pool holds, and what a cache of that size saves of the trace."""

    name: str
    capacity_tokens: int
    hit_rate: float
    saved_tokens: int


@dataclass(frozen=True)
class PrefixAnswer:
    """A trace replayed. `ceiling`: the hit rate of a cache without end; `curve`: (capacity in tokens, hit rate)."""

    trace: Trace
    replayed: Replay
    rows: tuple[PrefixRow, ...]
    ceiling: float
    curve: tuple[tuple[int, float], ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "path": self.trace.name, "kind": self.trace.kind, "block_tokens": self.trace.block_tokens, "requests": self.replayed.requests,
            "prompt_tokens": self.replayed.prompt_tokens, "blocks": self.replayed.blocks, "estimated_tokens": self.trace.estimated,
            "ceiling_hit_rate": self.ceiling, "needed_tokens": self.replayed.most_tokens,
            "formats": [vars(row) for row in self.rows], "curve": [list(point) for point in self.curve], "notes": list(self.notes),
        }  # fmt: skip


def prefix_answer(trace: Trace, answer: Answer) -> PrefixAnswer:
    """Replay once, and look up each format's capacity."""
    replayed = replay(trace)
    rows = []
    for each in answer.formats:
        if each.pool_tokens is not None:
            rows.append(
                PrefixRow(
                    each.name,
                    each.pool_tokens,
                    replayed.hit_rate(each.pool_tokens),
                    replayed.saved_tokens(each.pool_tokens),
                )
            )
    notes = ["the whole pool counts as cache: running sequences need room too, so these are ceilings"]
    if trace.estimated:
        notes.append("tokens of text are estimated by its characters")
    if answer.model.has_states or any(getattr(part, "window_tokens", None) for part in answer.model.parts):
        notes.append(
            "windows and states: to reuse a prefix engines keep more of it than bytes a token say; expect less than this"
        )
    ceiling = replayed.hit_rate(replayed.most_tokens)
    return PrefixAnswer(
        trace,
        replayed,
        tuple(rows),
        ceiling,
        tuple(_curve(replayed, [row.capacity_tokens for row in rows])),
        tuple(notes),
    )


def _curve(replayed: Replay, capacities: Sequence[int]) -> list[tuple[int, float]]:
    """Hit rates at sizes that double, until nothing more is found and beyond the largest capacity."""
    tokens, end = replayed.block_tokens, max([replayed.most_tokens, *capacities, 1])
    points = []
    while tokens < 2 * end:
        points.append((tokens, replayed.hit_rate(tokens)))
        tokens *= 2
    return points
