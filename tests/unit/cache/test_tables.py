"""Page tables and cursors: the books of a layer as tensors, sent only when they change."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from kvarto.cache.tables import Cursor, PageTable

CPU = torch.device("cpu")


def table_of(shared: bool, sequences: int) -> PageTable:
    """`shared`: as on the CPU; otherwise as on a device with memory of its own."""
    table = PageTable(CPU)
    table._shared = shared
    table.reset(sequences)
    return table


@pytest.mark.parametrize("shared", [True, False])
def test_a_table_says_what_was_set(shared: bool) -> None:
    table = table_of(shared, 2)
    assert table.tensor.dtype == torch.int32
    assert table.tensor.shape == (2, 16)
    expected = torch.full((2, 16), -1, dtype=torch.int32)
    for row, page, page_id in [(0, 0, 7), (1, 3, 9), (1, 3, -1), (0, 15, 2), (1, 0, 5)]:
        table.set(row, page, page_id)
        expected[row, page] = page_id
    assert torch.equal(table.tensor, expected)
    table.set(0, 1, 4)
    expected[0, 1] = 4
    assert torch.equal(table.tensor, expected)


@pytest.mark.parametrize("shared", [True, False])
def test_a_table_keeps_its_place_and_its_shape_until_it_must_grow(shared: bool) -> None:
    table = table_of(shared, 2)
    address = table.tensor.data_ptr()
    for page in range(16):
        table.set(1, page, page)
        assert table.tensor.data_ptr() == address
    table.set(0, 16, 3)
    assert table.tensor.shape == (2, 32)
    assert table.tensor[1, :16].tolist() == list(range(16))
    table.set(0, 100, 8)
    assert table.tensor.shape == (2, 128)
    assert (int(table.tensor[0, 16]), int(table.tensor[0, 100])) == (3, 8)


@pytest.mark.parametrize("shared", [True, False])
def test_a_table_follows_its_sequences(shared: bool) -> None:
    table = table_of(shared, 2)
    table.set(0, 0, 1)
    table.set(1, 0, 2)
    table.select([1, 1, 0])
    assert table.tensor[:, 0].tolist() == [2, 2, 1]
    table.set(1, 0, 5)
    assert table.tensor[:, 0].tolist() == [2, 5, 1]
    table.select([])
    assert table.tensor.shape == (0, 16)


def test_a_cursor_knows_every_place_until_a_page_fills() -> None:
    cursor = Cursor(64, CPU)
    assert cursor.room == 0
    cursor.place([4, 9], [128 + 60, 3])
    assert cursor.room == 4
    for step in range(4):
        pages, slots, position = cursor.next
        assert (pages.tolist(), slots.tolist(), position.tolist()) == (
            [4, 9],
            [60 + step, 3 + step],
            [188 + step, 3 + step],
        )
        assert (pages.dtype, slots.dtype, position.dtype) == (torch.int64, torch.int64, torch.int32)
        cursor.move()
    assert cursor.room == 0
    cursor.place([4], [63])
    cursor.lose()
    assert cursor.room == 0
