"""Which slabs are copied to shared memory ahead of their use, and that a device's limits are kept."""

from __future__ import annotations

import pytest

from kvarto.formats import parse_format
from kvarto.kernels.triton_support import can_copy
from kvarto.layout import Geometry

PROGRAMS = 12


def copied(name: str, dim: int = 128, page_tokens: int = 64, programs: int = PROGRAMS) -> bool:
    chosen = parse_format(name)
    layout = chosen.layout(Geometry(8, dim, dim, page_tokens))
    k, v = chosen.k.tile(layout.k), chosen.v.tile(layout.v)
    assert k is not None
    assert v is not None
    return can_copy(layout, k, v, programs)


@pytest.mark.parametrize("name", ["int4", "int3", "int2", "kivi4", "kivi2", "int4/kivi2"])
def test_packed_pages_of_less_than_8_bits(name: str) -> None:
    assert copied(name)


def test_8_bits_leave_no_room_for_as_many_programs() -> None:
    assert not copied("int8")
    assert copied("int8", programs=6)


def test_rows_of_8_bytes_are_read_in_pairs() -> None:
    assert copied("kivi2-g32", page_tokens=32)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("int4", 96),  # rows of 48 bytes: lanes have shares of unlike size
        ("int4", 80),
        ("int4", 64),  # the plane of the slow channels has rows of 4 bytes
        ("fp8", 64),  # a scale in float32
    ],
)
def test_what_would_need_masks_or_other_loads(name: str, dim: int) -> None:
    assert not copied(name, dim, programs=1)
