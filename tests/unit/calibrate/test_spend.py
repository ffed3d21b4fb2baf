from __future__ import annotations

import itertools
import random

import pytest

from kvarto.calibrate.spend import Option, bits_per_number, spend
from kvarto.errors import UsageError
from kvarto.layout import Side

NUMBERS = 64


def convex(seed: int, items: int) -> dict[tuple[int, Side], list[Option]]:
    """Costs that fall fourfold with each bit, as quantization errors do."""
    rng = random.Random(seed)
    return {
        (layer, side): [Option(f"int{bits}", bits * NUMBERS, scale * 4.0**-bits) for bits in (2, 3, 4, 8)]
        for layer in range(items // 2)
        for side in Side
        for scale in [rng.lognormvariate(0, 2)]
    }


def total(chosen: dict[tuple[int, Side], Option]) -> float:
    return sum(option.cost for option in chosen.values())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [2.0, 2.5, 3.0, 3.5, 5.0, 8.0])
def test_nothing_within_the_budget_costs_less(seed: int, budget: float) -> None:
    options = convex(seed, 6)
    numbers = 6 * NUMBERS
    chosen = spend(options, budget, numbers)
    assert bits_per_number(chosen, numbers) <= budget + 1e-9
    affordable = (
        sum(option.cost for option in every)
        for every in itertools.product(*options.values())
        if sum(option.bits for option in every) <= budget * numbers
    )
    assert total(chosen) == pytest.approx(min(affordable))


def test_bits_go_where_they_help() -> None:
    options = {
        (0, Side.K): [Option("a", 2, 1.0), Option("b", 4, 0.1)],
        (0, Side.V): [Option("a", 2, 0.2), Option("b", 4, 0.1)],
    }
    assert [option.codec for option in spend(options, 3.0, 2).values()] == ["b", "a"]
    assert [option.codec for option in spend(options, 4.0, 2).values()] == ["b", "b"]


def test_bits_that_help_nothing_are_not_spent() -> None:
    assert spend({(0, Side.K): [Option("a", 2, 1.0), Option("b", 4, 1.0)]}, 8, 1)[0, Side.K].codec == "a"


def test_bits_need_not_be_of_one_size() -> None:
    rng = random.Random(3)
    options = {
        (layer, Side.K): [Option(str(i), rng.randrange(3, 40), rng.random()) for i in range(4)] for layer in range(6)
    }
    chosen = spend(options, 20.5, 6)
    affordable = (
        sum(option.cost for option in every)
        for every in itertools.product(*options.values())
        if sum(option.bits for option in every) <= 20.5 * 6
    )
    assert total(chosen) == pytest.approx(min(affordable))


def test_a_budget_below_the_fewest_bits_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"budget_bits: expected at least 2, metadata included \(int2 everywhere\), got 1.5"
    ):
        spend(convex(0, 4), 1.5, 4 * NUMBERS)
    with pytest.raises(UsageError, match="budget_bits"):
        spend(convex(0, 4), float("nan"), 4 * NUMBERS)
