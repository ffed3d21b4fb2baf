"""What the Triton programs work out, while they are compiled, from a `kvarto.tile.Tile` (a compile-time constant of theirs)."""

from __future__ import annotations

import triton
import triton.language as tl

from kvarto.tile import LOW_ZERO_STEPS, LOW_ZEROS, Tile

UINT, E4M3, E5M2, BFLOAT16, FLOAT16, SHORT = (tl.constexpr(i) for i in range(6))
_KINDS = {"uint": 0, "e4m3": 1, "e5m2": 2, "bfloat16": 3, "float16": 4, "short": 5}


@triton.constexpr_function
def padded(count: int) -> int:
    """A power of two that holds so many channels and that tensor cores take."""
    return max(16, 1 << (count - 1).bit_length())


@triton.constexpr_function
def planes_of(tile: Tile) -> int:
    """How many planes."""
    return len(tile.planes)


@triton.constexpr_function
def offset_of(tile: Tile, i: int) -> int:
    """Byte of the slab at which plane i begins."""
    return tile.planes[i].offset


@triton.constexpr_function
def nbytes_of(tile: Tile, i: int) -> int:
    """Bytes of a row of plane i."""
    return tile.planes[i].row_nbytes


@triton.constexpr_function
def kind_of(tile: Tile, i: int) -> int:
    """UINT, E4M3 ... of plane i."""
    return _KINDS[tile.planes[i].kind]


@triton.constexpr_function
def bits_of(tile: Tile, i: int) -> int:
    """Width of a code of plane i."""
    return tile.planes[i].bits


@triton.constexpr_function
def weight_of_plane(tile: Tile, i: int) -> int:
    """What a code of plane i counts."""
    return 1 << tile.planes[i].shift


@triton.constexpr_function
def columns_first(tile: Tile, i: int) -> int:
    """Column of the tile that the first code of a row stands for."""
    return tile.planes[i].columns[0][0]


@triton.constexpr_function
def columns_count(tile: Tile, i: int) -> int:
    """Codes of the first run of columns."""
    return tile.planes[i].columns[0][1]


@triton.constexpr_function
def columns_second(tile: Tile, i: int) -> int:
    """Where the second run of columns begins, or 0."""
    return tile.planes[i].columns[1][0] if len(tile.planes[i].columns) > 1 else 0


@triton.constexpr_function
def words_of(tile: Tile, i: int) -> int:
    """W of plane i: 1, 2, 4, 8 or 16 words (triton_tiles.py)."""
    nbytes = tile.planes[i].row_nbytes
    if nbytes == 2 and tile.planes[i].bits == 1:
        return 1
    return 2 if nbytes <= 8 else 4 if nbytes <= 16 else 8 if nbytes <= 32 else 16


@triton.constexpr_function
def segments_of(tile: Tile, i: int) -> int:
    """Segments of a row of plane i."""
    return -(-tile.planes[i].row_nbytes // 64)


@triton.constexpr_function
def width_of(tile: Tile, i: int) -> int:
    """Columns of a segment of plane i, padding included."""
    nbytes, bits = tile.planes[i].row_nbytes, tile.planes[i].bits
    if nbytes == 2 and bits == 1:
        return 16
    return 64 // bits if nbytes <= 8 else (4 if nbytes <= 16 else 8 if nbytes <= 32 else 16) * 32 // bits


@triton.constexpr_function
def first_part(tile: Tile, i: int) -> int:
    """Segments of the planes before plane i: where its parts begin in a flat tuple."""
    return sum(-(-plane.row_nbytes // 64) for plane in tile.planes[:i])


@triton.constexpr_function
def is_float(tile: Tile) -> bool:
    """The codes are floats, in one plane."""
    return tile.planes[0].kind != "uint"


@triton.constexpr_function
def fields_of(tile: Tile) -> int:
    """Codes in a byte of plane 0; 1 for floats."""
    return 8 // tile.planes[0].bits if tile.planes[0].kind == "uint" else 1


@triton.constexpr_function
def unit_of(tile: Tile) -> float:
    """An unpacked tile times this is the codes, or what they stand for."""
    return 2.0**24 if tile.planes[0].kind == "uint" and tile.curve is None and tile.table is None else 1.0


@triton.constexpr_function
def is_curved(tile: Tile) -> bool:
    """Codes stand for levels on a curve."""
    return tile.curve is not None


@triton.constexpr_function
def curve_of(tile: Tile, i: int) -> float:
    """Coefficient i of the curve."""
    assert tile.curve is not None
    return tile.curve[i]


@triton.constexpr_function
def has_table(tile: Tile) -> bool:
    """Codes stand for levels in the constants of the layer."""
    return tile.table is not None


@triton.constexpr_function
def slots_of(tile: Tile) -> int:
    """How many numbers of a token are added to the tile."""
    return 0 if tile.table is None or tile.table.slots is None else tile.table.slots.count


@triton.constexpr_function
def slot_offset(tile: Tile, channels: bool) -> int:
    """Byte of the slab at which what is added begins, or to which channels."""
    assert tile.table is not None
    assert tile.table.slots is not None
    return tile.table.slots.channels if channels else tile.table.slots.offset


@triton.constexpr_function
def pairs_of(tile: Tile) -> int:
    """How many pairs of columns RoPE turns."""
    return 0 if tile.table is None else tile.table.pairs


@triton.constexpr_function
def place_offset(tile: Tile) -> int:
    """Byte of the slab at which the place of the page's first token stands."""
    assert tile.table is not None
    return tile.table.first


@triton.constexpr_function
def code_bits_of(tile: Tile) -> int:
    """Bits of a code, of all planes together."""
    return sum(plane.bits for plane in tile.planes)


@triton.constexpr_function
def operands_of(tile: Tile) -> int:
    """How many planes are operands of products of their own: on a curve they are one."""
    return len(tile.planes) if tile.curve is None else 1


@triton.constexpr_function
def is_weighted(tile: Tile, i: int) -> bool:
    """Fields of plane i are unpacked with factors, which the other operand undoes."""
    return tile.planes[i].bits < 8 and tile.curve is None


@triton.constexpr_function
def has_scale(tile: Tile) -> bool:
    """There is a scale."""
    return tile.scale is not None


@triton.constexpr_function
def has_zero(tile: Tile) -> bool:
    """There is a zero."""
    return tile.zero is not None


@triton.constexpr_function
def term_per(tile: Tile) -> str:
    """What the terms are laid out for: "none", "row", "column" or "slab"."""
    return "none" if tile.scale is None else tile.scale.per


@triton.constexpr_function
def term_offset(tile: Tile, zero: bool) -> int:
    """Byte of the slab at which a term begins."""
    term = tile.zero if zero else tile.scale
    assert term is not None
    return term.offset


@triton.constexpr_function
def term_dtype(tile: Tile, zero: bool) -> str:
    """Of a term's numbers."""
    term = tile.zero if zero else tile.scale
    assert term is not None
    return term.dtype


@triton.constexpr_function
def has_low_zero(tile: Tile) -> bool:
    """The zero is in the low bits of the scale."""
    return tile.zero is not None and tile.zero.dtype == "low"


@triton.constexpr_function
def low_middle(tile: Tile) -> float:
    """What is added to a quarter of the low bits: zero = scale * (low / 4 + this)."""
    bits = sum(plane.bits for plane in tile.planes)
    return -(LOW_ZEROS / 2 / LOW_ZERO_STEPS) - ((1 << bits) - 1) / 2


@triton.constexpr_function
def scale_kind(tile: Tile) -> int:
    """SHORT or FLOAT16, of column scales."""
    return _KINDS["short" if tile.scale is not None and tile.scale.dtype == "short" else "float16"]


@triton.constexpr_function
def groups_of(tile: Tile) -> int:
    """Groups of rows that have column terms of their own."""
    return 1 if tile.scale is None else tile.scale.groups


@triton.constexpr_function
def group_rows_of(tile: Tile, rows: int) -> int:
    """Rows of a group, or all `rows`, padded to a power of two."""
    grouped = tile.scale is not None and tile.scale.groups > 1
    count = tile.scale.group_rows if grouped else rows  # type: ignore[union-attr]
    return 1 << max(4, (count - 1).bit_length())


@triton.constexpr_function
def float16_pair(number: float) -> int:
    """A normal float16 number, twice, as the bits of a word."""
    sign, exponent, fraction = 0x8000 if number < 0 else 0, 15, abs(number)
    while fraction >= 2:
        exponent, fraction = exponent + 1, fraction / 2
    while fraction < 1:
        exponent, fraction = exponent - 1, fraction * 2
    return (sign | exponent << 10 | int((fraction - 1) * 1024)) * 0x10001


# PTX from a word $1 of packed codes to a word $0 of two 16-bit floats; triton_tiles.py says in plain operations what each computes.


@triton.constexpr_function
def field_assembly(field: int, bits: int) -> str:
    """Field `field` of the low byte of each half, in place."""
    return f"and.b32 $0, $1, {((1 << bits) - 1 << bits * field) * 0x10001:#x};"


@triton.constexpr_function
def byte_pair_assembly(odd: int, kind: int) -> str:
    """Bytes `odd` and `odd` + 2 as halves, as they are or as float16 (E4M3, E5M2)."""
    if kind == 0:
        return f"prmt.b32 $0, $1, 0, {0x4341 if odd else 0x4240:#x};"
    if kind == 2:
        return f"prmt.b32 $0, $1, 0, {0x3414 if odd else 0x2404:#x};"
    return f"""{{ .reg .b32 t; .reg .b16 low, high;
prmt.b32 t, $1, 0, {0x4431 if odd else 0x4420:#x};
mov.b32 {{low, high}}, t;
cvt.rn.f16x2.e4m3x2 $0, low; }}"""


@triton.constexpr_function
def exact_assembly(field: int, bits: int) -> str:
    """Field `field` of the low byte of each half as whole numbers: (word & mask | 1024.0) * weight - 1024 weight."""
    exponent = 15 - bits * field
    mask = ((1 << bits) - 1 << bits * field) * 0x10001
    weight, minus = (exponent << 10) * 0x10001, (0x8000 | (exponent + 10) << 10) * 0x10001
    return f"""{{ .reg .b32 t, w, m;
lop3.b32 t, $1, {mask:#x}, 0x64006400, 0xEA;
mov.b32 w, {weight:#x};
mov.b32 m, {minus:#x};
fma.rn.f16x2 $0, t, w, m; }}"""


@triton.constexpr_function
def curve_assembly(tile: Tile, field: int, bits: int) -> str:
    """Field `field`, `bits` wide, of the low byte of each half of a word that was shifted left by one, as levels: u (a + b u^4) of `Tile.curve`.

    The bit below the code is set: behind the leading one of 1024 stands then (2 code + 1) / 2, and u is one multiply-add away, exactly.
    """
    code_bits = sum(plane.bits for plane in tile.planes)
    weight = 2.0 ** (1 - code_bits - bits * field)
    assert tile.curve is not None
    a, b = tile.curve
    numbers = {"w": weight, "m": -(1024.0 * weight + 2.0), "a": a, "b": b}
    mask, base = ((1 << code_bits) - 1 << bits * field + 1) * 0x10001, 0x64006400 | (1 << bits * field) * 0x10001
    moves = "\n".join(f"mov.b32 {name}, {float16_pair(number):#x};" for name, number in numbers.items())
    return f"""{{ .reg .b32 u, t, w, m, a, b;
{moves}
lop3.b32 u, $1, {mask:#x}, {base:#x}, 0xEA;
fma.rn.f16x2 u, u, w, m;
mul.rn.f16x2 t, u, u;
mul.rn.f16x2 t, t, t;
fma.rn.f16x2 t, t, b, a;
mul.rn.f16x2 $0, t, u; }}"""
