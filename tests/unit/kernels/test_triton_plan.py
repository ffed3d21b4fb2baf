"""How the packed pages of a batch are cut into splits (triton_decode.py), for lengths as they come, on an H200's 1,584 programs at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from kvarto.kernels.triton_decode import plan_of, splits_of_one

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, HEADS, S, TURNS = 1584, 8, 64, 4


@triton.jit  # type: ignore[untyped-decorator]
def _plan(start, position, out, entries, share, slots: tl.constexpr, ENTRIES: tl.constexpr, TURNS: tl.constexpr):  # type: ignore[no-untyped-def]
    if ENTRIES == 1:
        tl.store(out, splits_of_one(start, position, 1, slots, share, 8, 8, 4, 64, 1, 0, 0))
    else:
        splits, _ = plan_of(start, position, entries, 1, slots, share, 8, 8, 4, 64, 1, 0, 0, ENTRIES, TURNS)
        entry = tl.arange(0, ENTRIES)
        tl.store(out + entry, splits, mask=entry < entries)


def splits(pages: Sequence[int], turns: int = 1, fixed_share: int = 0) -> list[int]:
    """Splits of one head of sequences with so many packed pages, behind a sink page and before an open one."""
    count = len(pages)
    start = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    position = torch.tensor([S * (n + 1) + 5 for n in pages], dtype=torch.int32, device=DEVICE)
    out = torch.empty(count, dtype=torch.int32, device=DEVICE)
    entries = 1 if count == 1 else max(64, 1 << (count - 1).bit_length())
    _plan[(1,)](start, position, out, count, fixed_share, SLOTS, ENTRIES=entries, TURNS=turns)
    return [int(n) for n in out]


@pytest.mark.parametrize("pages", [0, 1, 10, 197, 198, 199, 2046, 100_000])
def test_one_sequence_fills_the_machine_once(pages: int) -> None:
    (found,) = splits([pages])
    assert found * HEADS <= SLOTS
    assert (found > 0) == (pages > 0)
    share = -(-pages // max(found, 1))
    if pages > SLOTS // HEADS:  # one page less for each split would not do
        assert -(-pages // (share - 1)) * HEADS > SLOTS


@pytest.mark.parametrize("pages", [[510] * 32, [126] * 64, [510] * 8, [3, 0, 2000, 40], [1] * 100, [2000] + [2] * 70])
def test_a_batch_fills_it_once(pages: list[int]) -> None:
    found = splits(pages)
    assert sum(found) * HEADS <= SLOTS
    assert all((n > 0) == (p > 0) and n <= max(p, 1) for n, p in zip(found, pages, strict=True))
    # Rounding up may cost each sequence a split; but for that no split has a third more than its share of the machine, or a page.
    even = -(-sum(pages) // (SLOTS // HEADS - sum(p > 0 for p in pages)))
    assert max(-(-p // max(n, 1)) for n, p in zip(found, pages, strict=True)) <= max(4 * even / 3, even + 1)


def test_pairs_that_do_not_fill_the_machine_evenly_are_cut_where_that_was_faster() -> None:
    assert splits([126] * 128, TURNS) == [3] * 128  # 1,024 pairs would leave a third of the machine idle
    assert splits([62] * 100, TURNS) == [3] * 100
    assert splits([126] * 198, TURNS) == [1] * 198  # they fill it
    assert splits([126] * 200, TURNS) == [3] * 200  # they would leave 16 for the end
    assert splits([30] * 256, TURNS) == [1] * 256
    assert splits([14] * 512, TURNS) == [1] * 512
    ragged = splits([5, 300, 0, 31] * 64, TURNS)
    assert sum(ragged) * HEADS <= TURNS * SLOTS
    assert ragged[1] > ragged[3] > 0 == ragged[2]


def test_a_fixed_share_looks_at_nothing_else() -> None:
    assert splits([64, 65, 0, 500], fixed_share=32) == [2, 3, 0, 16]
    assert splits([65], fixed_share=32) == [3]
