"""How a codec presents a slab to a compiled kernel: planes of packed codes and affine terms, as plain data. No torch.

A slab is a tile with rows and columns: K [S, D] has tokens as rows and channels as columns, V [D, S] channels as rows and tokens as columns.
What a kernel reads is

    tile[row, column] = (sum over planes of 2^shift * code) * scale + zero

where the sum may first be bent by a curve (`Tile.curve`) or looked up in a table (`Tile.table`), for levels that are not evenly spaced.
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
class Slots:
    """Numbers of each token that are added to the tile, to channels of their own: `count` arrays, each with one of every token.

    offset    of the first array of numbers, float16 [S]; channels: of the first array of the channels they are added to, uint8 [S]
    """

    count: int
    offset: int
    channels: int


@dataclass(frozen=True)
class Table:
    """Levels in the constants of the layer (`SlabReader.constants`): float32, for each head the 2^bits levels that codes stand for come first.

    ranged  K: then a zero for each column, then a scale for each, in place of terms of the slab. They, and slots, come before RoPE
    slots   what is added to levels times scale plus zero
    pairs   K: so many pairs of columns (i, i + pairs) are turned by RoPE, place times angle, at last; the constants end with their angles, radians
    first   where the slab says the place of the page's first token, an int32; read if there are pairs
    """

    slots: Slots | None = None
    ranged: bool = False
    pairs: int = 0
    first: int = 0


@dataclass(frozen=True)
class Tile:
    """A slab as planes and terms; scale and zero, where both are there, are laid out alike.

    curve, table  what codes of all planes together stand for, if not for themselves; then all planes have all columns. One of them at most
    """

    planes: tuple[Plane, ...]
    scale: Term | None = None
    zero: Term | None = None
    curve: Curve | None = None
    table: Table | None = None


def plane(layout: SlabLayout, name: str, bits: int, *, kind: Kind = "uint", shift: int = 0) -> Plane:
    """The plane that the field `name` holds, uint8 or float [rows, ...], of all columns in order."""
    field = layout[name]
    rows, columns = layout.tile_shape
    return Plane(field.offset, field.nbytes // rows, bits, ((0, columns),), kind, shift)
