"""A budget of bits, spent where it helps most. Pure arithmetic, no torch.

An item is one side of one layer; an option is a codec for it, with its bits and its cost. One option of each item is to be chosen, with the least
cost in all within a budget: the multiple-choice knapsack, solved exactly by dynamic programming, because bits of pages are multiples of a common unit
(Kellerer, Pferschy and Pisinger, Knapsack Problems (2004), 11).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvarto.errors import UsageError
from kvarto.layout import Side

Item = tuple[int, Side]


@dataclass(frozen=True)
class Option:
    """`bits`: of the item's part of a page, all KV heads and metadata included; `cost`: in nats per token."""

    codec: str
    bits: int
    cost: float


def spend(options: Mapping[Item, Sequence[Option]], budget_bits: float, numbers: int) -> dict[Item, Option]:
    """An option for each item, with at most `budget_bits` a number on average over the `numbers` of a page of all layers; the fewest bits of equals.

    Raises UsageError if the fewest bits are more than that.
    """
    fewest = {item: min(offered, key=lambda option: option.bits) for item, offered in options.items()}
    if not math.isfinite(budget_bits) or bits_per_number(fewest, numbers) > budget_bits + 1e-9:
        names = ", ".join(sorted({option.codec for option in fewest.values()}))
        least = f"at least {bits_per_number(fewest, numbers):.4g}, metadata included ({names} everywhere)"
        raise UsageError("budget_bits", least, budget_bits)
    unit = math.gcd(*(option.bits for offered in options.values() for option in offered))
    most = sum(max(option.bits for option in offered) for offered in options.values())
    room = min(math.floor(budget_bits * numbers + 1e-6), most) // unit
    ordered = {
        item: sorted(offered, key=lambda option: (option.bits, option.cost)) for item, offered in options.items()
    }
    best = np.zeros(room + 1)  # the least cost of the items so far, by how many units they may take
    tables = []
    for offered in ordered.values():
        costs = np.full((len(offered), room + 1), np.inf)
        for row, option in zip(costs, offered, strict=True):
            size = option.bits // unit
            row[size:] = best[: room + 1 - size] + option.cost
        tables.append(costs.argmin(axis=0))  # the first of equals, which has the fewest bits
        best = costs.min(axis=0)
    chosen: dict[Item, Option] = {}
    for (item, offered), table in reversed(list(zip(ordered.items(), tables, strict=True))):
        chosen[item] = offered[int(table[room])]
        room -= chosen[item].bits // unit
    return dict(reversed(chosen.items()))


def bits_per_number(chosen: Mapping[Item, Option], numbers: int) -> float:
    """The average, metadata included."""
    return sum(option.bits for option in chosen.values()) / numbers
