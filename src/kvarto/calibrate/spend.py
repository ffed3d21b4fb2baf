"""A budget of bits, spent where it helps most. Pure arithmetic, no torch.

An item is one side of one layer; an option is a codec for it, with its bits and its cost. All items begin with their fewest bits; then, again and
again, that change is made which takes away most cost for each bit that it adds, as long as the budget holds. On convex costs that is what exhaustive
search finds, but for the last bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvarto.errors import UsageError
from kvarto.layout import Side

Item = tuple[int, Side]


@dataclass(frozen=True)
class Option:
    """`bits`: of all numbers that a token has in the item, metadata included; `cost`: in nats per token."""

    codec: str
    bits: float
    cost: float


def spend(options: Mapping[Item, Sequence[Option]], budget_bits: float, numbers: int) -> dict[Item, Option]:
    """An option for each item, with at most `budget_bits` a number on average over the `numbers` that a token has in all items.

    Raises UsageError if the fewest bits are more than that.
    """
    chosen = {item: min(offered, key=lambda option: (option.bits, option.cost)) for item, offered in options.items()}
    left = budget_bits * numbers - sum(option.bits for option in chosen.values())
    if left < -1e-6 * numbers:
        least = sum(option.bits for option in chosen.values()) / numbers
        names = ", ".join(sorted({option.codec for option in chosen.values()}))
        raise UsageError("budget_bits", f"at least {least:.4g}, metadata included ({names} everywhere)", budget_bits)
    while steps := [
        ((chosen[item].cost - option.cost) / (option.bits - chosen[item].bits), item, option)
        for item, offered in options.items()
        for option in offered
        if chosen[item].bits < option.bits <= chosen[item].bits + left + 1e-9 and option.cost < chosen[item].cost
    ]:
        _, item, option = max(steps, key=lambda step: (step[0], -step[1][0], step[1][1]))
        left -= option.bits - chosen[item].bits
        chosen[item] = option
    return chosen


def bits_per_number(chosen: Mapping[Item, Option], numbers: int) -> float:
    """The average, metadata included."""
    return sum(option.bits for option in chosen.values()) / numbers
