"""Which slabs are copied to shared memory ahead of their use, and that a device's limits are kept."""

from __future__ import annotations

import pytest

from kvarto.formats import parse_format
from kvarto.kernels.triton_support import can_copy, copying_programs
from kvarto.layout import Geometry


def copied(name: str, dim: int = 128, page_tokens: int = 64) -> bool:
    chosen = parse_format(name)
    layout = chosen.layout(Geometry(8, dim, dim, page_tokens))
    k, v = chosen.k.tile(layout.k), chosen.v.tile(layout.v)
    assert k is not None
    assert v is not None
    return can_copy(layout, k, v)


@pytest.mark.parametrize(
    "name", ["int4", "int3", "int2", "kivi4", "kivi2", "int4/kivi2", "int8", "fp8", "turbo4", "turbo2"]
)
def test_shipped_formats(name: str) -> None:
    assert copied(name)


@pytest.mark.parametrize(("name", "programs"), [("int4", 19), ("int2", 28), ("int8", 11), ("fp8", 11)])
def test_programs_that_have_room(name: str, programs: int) -> None:
    assert copying_programs(parse_format(name).layout(Geometry(8, 128, 128))) == programs


def test_slabs_that_have_no_room() -> None:
    assert not copied("int8", 256, 128)


def test_lanes_that_share_words_are_not_copied_ahead() -> None:
    assert not copied("turbo3")


def test_rows_of_8_bytes_are_read_in_pairs() -> None:
    assert copied("kivi2-g32", page_tokens=32)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("int4", 96),  # rows of 48 bytes: lanes have shares of unlike size
        ("int4", 80),
        ("int2", 256),  # the plane of the slow channels has rows of 16 bytes, in two runs of channels
    ],
)
def test_what_would_need_masks(name: str, dim: int) -> None:
    assert not copied(name, dim)
