"""Codes narrower than a byte, packed along the last axis of a tile in planes, so that unpacking yields whole runs and no interleave.

    8 bits  one code a byte
    4 bits  byte j holds code j in its low nibble and code j + n/2 in its high nibble
    2 bits  byte j holds codes j, j + n/4, j + n/2 and j + 3n/4, low bits first
    1 bit   byte j holds codes j, j + n/8, ..., low bit first
    3 bits  a plane of the low two bits as above, then a plane of the third bit

Each row (a token of K, a channel of V) is packed by itself; a plane of all rows comes before the next plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvarto.jit import available, inlined, torch
from kvarto.layout import FieldSpec, SlabLayout
from kvarto.tile import Plane, plane

if available("numba"):
    from kvarto.unpack import unpack_codes

if TYPE_CHECKING:
    from torch import Tensor

_PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}


def code_fields(bits: int, rows: int, columns: int) -> list[FieldSpec]:
    """The fields that hold `rows` x `columns` codes: `codes`, and `codes_high` for the plane of the third bit."""
    names = ("codes", "codes_high")
    return [(names[i], "uint8", (rows, columns * width // 8)) for i, width in enumerate(_PLANES[bits])]


def code_planes(layout: SlabLayout, bits: int) -> tuple[Plane, ...]:
    """The planes of `code_fields`, for `Codec.tile`."""
    planes, shift = [], 0
    for (name, _, _), width in zip(code_fields(bits, 1, 8), _PLANES[bits], strict=True):
        planes.append(plane(layout, name, width, shift=shift))
        shift += width
    return tuple(planes)


def pack(codes: Tensor, bits: int) -> dict[str, Tensor]:
    """codes: uint8 [..., rows, columns] below 2**bits. Returns the arrays of `code_fields` by name."""
    packed, shift = {}, 0
    for (name, _, _), width in zip(code_fields(bits, 1, 8), _PLANES[bits], strict=True):
        packed[name] = pack_plane((codes >> shift) & ((1 << width) - 1), width)
        shift += width
    return packed


def unpack(planes: dict[str, Tensor], bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [..., rows, columns]."""
    codes, shift = None, 0
    for packed, width in zip(planes.values(), _PLANES[bits], strict=True):
        part = unpack_plane(packed, width) << shift
        codes = part if codes is None else codes | part
        shift += width
    assert codes is not None
    return codes


def pack_plane(codes: Tensor, width: int) -> Tensor:
    """codes: uint8 [..., n] below 2**width (1, 2, 4 or 8). Returns uint8 [..., n * width / 8]."""
    packed = None
    for i, part in enumerate(codes.chunk(8 // width, dim=-1)):
        packed = part if packed is None else packed | (part << (i * width))
    assert packed is not None
    return packed.contiguous()


def unpack_plane(plane: Tensor, width: int) -> Tensor:
    """The inverse of `pack_plane`."""
    mask = (1 << width) - 1
    return torch.cat([(plane >> (i * width)) & mask for i in range(8 // width)], dim=-1)


@inlined
def unpack_tile(slab, low, high, bits, tile):  # type: ignore[no-untyped-def]
    """Compiled twin of `unpack`: codes at byte `low` (and their third bits at byte `high`) of slab uint8 [n] into tile float32 [rows, columns]."""
    unpack_codes(slab, low, high, bits, tile)


@inlined
def add_single_bits(slab, start, weight, row):  # type: ignore[no-untyped-def]
    """For compiled readers: onto row float32 [n] `weight` for each bit of a plane's row, one bit a code, from byte `start` of slab uint8 on."""
    nbytes = row.size // 8
    for part in range(8):
        for j in range(nbytes):
            row[part * nbytes + j] += weight * np.float32((slab[start + j] >> part) & 1)


@inlined
def bend_codes(codes, place):  # type: ignore[no-untyped-def]
    """For compiled readers: codes float32 [n] to their levels u (a + b u^4), in place (`kvarto.tile.Curve`).

    place  float32 (factor, offset, a, b): u = code * factor - offset
    """
    for i in range(codes.size):
        u = codes[i] * place[0] - place[1]
        square = u * u
        codes[i] = u * (place[2] + place[3] * (square * square))
