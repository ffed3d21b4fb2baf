"""One prefix, many endings: prefill once, fork the cache, score every ending in one forward. No decode steps.

Greedy decoding would produce exactly the tokens of an ending from where every one of them is the likeliest; so comparing them with the
likeliest tokens, given the ones before, is exact greedy match. That the prefill reads what a decode would read is path invariance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvarto.study.arms import Arm, feed


def likeliest(arm: Arm, prefix: Sequence[int], endings: Sequence[Sequence[int]]) -> list[Tensor]:
    """For each ending the likeliest next token after each of its tokens, int64 [len(ending)].

    Endings are padded on the right without a mask: what follows a token cannot reach it.
    """
    model, cache = arm.model, arm.new_cache()
    feed(arm, cache, prefix)
    cache.batch_repeat_interleave(len(endings))
    rows = torch.zeros((len(endings), max(map(len, endings))), dtype=torch.long)
    for row, ending in zip(rows, endings, strict=True):
        row[: len(ending)] = torch.tensor(ending)
    best = model(rows.to(model.device), cache=cache, use_cache=True).logits.argmax(dim=-1).cpu()
    return [row[: len(ending)] for row, ending in zip(best, endings, strict=True)]


def agrees(best: Tensor, ending: Sequence[int], tail: int) -> int:
    """How many of the last `tail` tokens of an ending, from their first on, greedy decoding would give; `best` as from `likeliest`."""
    first = len(ending) - tail
    same = best[first - 1 : -1] == torch.tensor(ending[first:])
    return int(same.long().cumprod(dim=0).sum())
