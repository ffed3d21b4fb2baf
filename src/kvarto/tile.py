"""How a codec presents a slab to a compiled kernel: planes of packed codes and affine terms, as plain data. No torch.

A slab is a tile with rows and columns: K [S, D] has tokens as rows and channels as columns, V [D, S] channels as rows and tokens as columns.
What a kernel reads is

    tile[row, column] = (sum over planes of 2^shift * code) * scale + zero

where the sum may first be bent by a curve (`Tile.curve`), for levels that are not evenly spaced.
A codec that fits this gives a `Tile` and is read by every kernel that knows tiles (kernels/triton.py); a codec that does not gives None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvarto.layout import SlabLayout

Kind = Literal["uint", "e4m3", "e5m2", "bfloat16", "float16", "float32"]
Curve = tuple[float, float]
"""(a, b), float16: a code of n bits stands for u (a + b u^4), u = (2 code + 1) / 2^(n - 1) - 2, which is odd about the middle of the codes."""
BITS = {"e4m3": 8, "e5m2": 8, "bfloat16": 16, "float16": 16, "float32": 32}
LOW_ZEROS, LOW_ZERO_STEPS, LOW_ZERO_LIMIT = 16, 4, 6
"""A zero in a scale's low bits (`Term.dtype` "low"): how many there are, into how many parts they divide a step of the codes, how far they go."""


@dataclass(frozen=True)
class Plane:
    """Codes of one width, row after row; a row is packed as codecs/packing.py says: field f of byte j is code j + f * row_nbytes.

    offset   of the first row, bytes in the slab
    kind     unsigned integers of `bits` bits, or floats
    shift    a code counts 2^shift
    columns  runs (first, count) of the tile's columns that a row stands for, in order
    """

    offset: int
    row_nbytes: int
    bits: int
    columns: tuple[tuple[int, int], ...]
    kind: Kind = "uint"
    shift: int = 0


@dataclass(frozen=True)
class Term:
    """A scale or a zero, `dtype` numbers at byte `offset` of the slab.

    dtype    "short": a byte, the upper one of a float16 without its sign; "low": a zero in the low four bits of the scale, a float16,
             scale * ((low - 8) / 4 - highest code / 2)                                  (codecs/affine.py: short_scale, joined)
    per      what has a number of its own: a row, a column, or the whole slab
    groups   for columns: as many arrays, one after another, each for `group_rows` consecutive rows of the tile
    """

    offset: int
    dtype: Literal["float16", "bfloat16", "float32", "short", "low"]
    per: Literal["row", "column", "slab"]
    groups: int = 1
    group_rows: int = 0


@dataclass(frozen=True)
class Tile:
    """A slab as planes and terms; scale and zero, where both are there, are laid out alike.

    curve  what codes of all planes together stand for, if not for themselves; then all planes have all columns
    """

    planes: tuple[Plane, ...]
    scale: Term | None = None
    zero: Term | None = None
    curve: Curve | None = None


def plane(layout: SlabLayout, name: str, bits: int, *, kind: Kind = "uint", shift: int = 0) -> Plane:
    """The plane that the field `name` holds, uint8 or float [rows, ...], of all columns in order."""
    field = layout[name]
    rows, columns = layout.tile_shape
    return Plane(field.offset, field.nbytes // rows, bits, ((0, columns),), kind, shift)
