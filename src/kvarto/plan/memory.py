"""Room: what weights and overhead leave of the GPUs, and how many tokens and sequences of each format that holds. No torch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from kvarto.errors import UsageError
from kvarto.plan.cached import CachedModel, IndexKey, KeyValue, Latent, stage_layers
from kvarto.plan.gpu import Gpu
from kvarto.plan.weights import Weights
from kvarto.plan.written import Bytes, KvFormat, bytes_of

ENDLESS = 1 << 31


@dataclass(frozen=True)
class Budget:
    """GPUs and how they are used: `tp` x `pp` of them; an engine takes `share` of each, of which `overhead_bytes` are no weights and no cache."""

    gpu: Gpu
    tp: int = 1
    pp: int = 1
    share: float = 0.92
    overhead_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError("--memory-share", "above 0, at most 1", self.share)

    @property
    def gpus(self) -> int:
        """How many."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, as each of its tensor-parallel ranks sees it."""

    first_layer: int
    end_layer: int
    weights_bytes: int
    pool_bytes: int


def check_parallel(model: CachedModel, tp: int, pp: int) -> list[str]:
    """Notes on how heads spread over ranks. Raises UsageError for what engines refuse."""
    for name, value in (("--tp", tp), ("--pp", pp)):
        if not 1 <= value <= 4096:
            raise UsageError(name, "1 to 4096", value)
    if model.query_heads and model.query_heads % tp:
        raise UsageError("--tp", f"a divisor of the {model.query_heads} query heads", tp)
    stage_layers(len(model.layers), pp)
    notes = []
    heads = sorted({part.heads for part in model.parts if isinstance(part, KeyValue)})
    for count in heads:
        if tp > count:
            notes.append(
                f"{count} KV heads on {tp} ranks: each is held by {tp // count}, so the cache shrinks by {count} only"
            )
        elif count % tp:
            notes.append(
                f"{count} KV heads on {tp} ranks do not spread evenly: counted as the fullest rank has it; engines may refuse"
            )
    if tp > 1 and any(isinstance(part, Latent | IndexKey) for part in model.parts):
        notes.append(f"latents and index keys are on each of the {tp} ranks whole: more ranks give no more of them")
    return notes


def stages(model: CachedModel, weights: Weights, budget: Budget) -> list[Stage]:
    """What each stage has left. The pool is negative where weights do not fit."""
    counts, made, start = stage_layers(len(model.layers), budget.pp), [], 0
    p = weights.parameters
    table, head = p.embedding * weights.outer_bytes, p.head * weights.outer_bytes
    inner = weights.nbytes - table - head
    for number, count in enumerate(counts):
        last = number == len(counts) - 1
        nbytes = inner * count / len(model.layers) + (table if number == 0 else 0)
        # A tied table is the head too, so the last stage has a copy.
        nbytes += (head or (table if number else 0)) if last else 0
        mine = round(nbytes / budget.tp)
        pool = int(budget.gpu.memory_bytes * budget.share) - mine - budget.overhead_bytes
        made.append(Stage(start, start + count, mine, pool))
        start += count
    return made


@dataclass(frozen=True)
class Room:
    """What the pools of all stages hold in one format."""

    parts: tuple[tuple[Bytes, int], ...]

    def sequences(self, context_tokens: int) -> int:
        """How many sequences of so many tokens fit at once."""
        return max(0, min(pool // max(1, each.peak(context_tokens)) for each, pool in self.parts))

    def pool_tokens(self, context_tokens: int) -> int:
        """Tokens in the pool if every sequence has so many: what engines log (sequences, with fractions, times context)."""
        return max(0, min(int(pool * context_tokens / max(1, each.peak(context_tokens))) for each, pool in self.parts))

    def longest_context(self, sequences: int, most_tokens: int | None) -> int:
        """The longest context that so many sequences can have, at most the model's; 0 if there is no room."""
        most = most_tokens or ENDLESS

        def too_long(tokens: int) -> bool:
            return any(sequences * each.peak(tokens) > pool for each, pool in self.parts)

        return bisect.bisect_left(range(1, most + 1), True, key=too_long)


def room(kv: KvFormat, model: CachedModel, made: Sequence[Stage], tp: int) -> Room:
    """Of a format on these stages."""
    return Room(
        tuple((bytes_of(kv, model, tp, stage.first_layer, stage.end_layer), stage.pool_bytes) for stage in made)
    )
