"""What every way to seal a slab shares: where rows and columns stand, how codes and terms become bytes, and roundings that are the reference's.

P is a `Plan` of kernels/triton_seal.py. Triton must be importable to import this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarto import sealing

FLOAT16_MAX = tl.constexpr(sealing.FLOAT16_MAX)
SMALLEST_STEP = tl.constexpr(sealing.SMALLEST_STEP)
INT_MIN = tl.constexpr(-(2**31))


@triton.jit
def row_places(P: tl.constexpr):
    """Row of the tile that each padded row holds, [R, 1]; P.rows or more where there is none."""
    place = tl.arange(0, P.row_pad)[:, None]
    if P.odd > 1:
        among = among_odd(place, P)
        place = tl.where(among < P.odd, place // P.odd_pad * P.odd + among, P.rows)
    return place


@triton.jit
def among_odd(place, P: tl.constexpr):
    """Which of the `odd` channels that are together a padded row holds; 15 for none."""
    return (tl.full((1, 1), P.order, tl.int64) >> (4 * (place % P.odd_pad)).to(tl.int64)).to(tl.int32) & 15


@triton.jit
def column_places(COUNT: tl.constexpr, P: tl.constexpr):
    """Column, or byte of a packed row, that each of COUNT padded ones holds, [1, COUNT]; P.columns or more where there is none."""
    place = tl.arange(0, COUNT)[None, :]
    if P.run_pad > P.run:
        place = tl.where(place % P.run_pad < P.run, place // P.run_pad * P.run + place % P.run_pad, P.columns)
    return place


@triton.jit
def load_floats(raw, at, inside, P: tl.constexpr):
    """Raw numbers as float32, 0 where not inside."""
    if P.raw_dtype == "bfloat16":
        bits = tl.load(raw.to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    if P.raw_dtype == "float16":
        return tl.load(raw.to(tl.pointer_type(tl.float16)) + at, mask=inside, other=0.0).to(tl.float32)
    return tl.load(raw.to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0.0)


@triton.jit
def store_codes(codes, slab, P: tl.constexpr):
    """Pack int32 [R, C] into the planes (codecs/packing.py)."""
    for i in tl.static_range(len(P.planes)):
        _store_plane(codes, slab, i, P)


@triton.jit
def _store_plane(codes, slab, INDEX: tl.constexpr, P: tl.constexpr):
    """The bits of all codes that plane INDEX holds."""
    codes = codes >> P.planes[INDEX].shift
    row = row_places(P)
    at = slab + P.planes[INDEX].offset + row * P.planes[INDEX].row_nbytes
    if len(P.planes[INDEX].some) > 0 and len(P.planes[INDEX].runs) == 0:
        nbytes: tl.constexpr = P.planes[INDEX].row_nbytes
        for byte in tl.static_range(nbytes):
            tl.store(at + byte, _pack_byte(codes, byte, INDEX, P).to(tl.uint8), mask=row < P.rows)
    else:
        packed = _pack_runs(codes, INDEX, P) if len(P.planes[INDEX].some) > 0 else _pack(codes, P.planes[INDEX].bits, P)
        byte = column_places(packed.shape[1], P)
        tl.store(at + byte, packed.to(tl.uint8), mask=(row < P.rows) & (byte < P.planes[INDEX].row_nbytes))


@triton.jit
def _pack(codes, BITS: tl.constexpr, P: tl.constexpr):
    """Fields are equal parts of the row: [R, C] to [R, C * BITS / 8]."""
    fields: tl.constexpr = 8 // BITS
    codes = tl.reshape(codes & ((1 << BITS) - 1), (P.row_pad, fields, P.column_pad // fields))
    return tl.sum(codes << (tl.arange(0, fields) * BITS)[None, :, None], axis=1)


@triton.jit
def _pack_runs(codes, INDEX: tl.constexpr, P: tl.constexpr):
    """Field f is run f of plane INDEX: [R, C] to [R, C / runs]."""
    codes = tl.reshape(codes, (P.row_pad, P.runs, P.run_pad))
    run = tl.arange(0, P.runs)[None, :, None]
    packed = tl.zeros_like(codes)
    for field in tl.static_range(len(P.planes[INDEX].runs)):
        packed += tl.where(run == P.planes[INDEX].runs[field], codes << (field * P.planes[INDEX].bits), 0)
    return tl.sum(packed, axis=1)


@triton.jit
def place_in_plane(column, INDEX: tl.constexpr, P: tl.constexpr):
    """Which of the codes of plane INDEX, which is of some columns, is that of a column; a negative number or one too large for none."""
    first: tl.constexpr = P.planes[INDEX].some[0]
    count: tl.constexpr = P.planes[INDEX].some[1]
    second: tl.constexpr = P.planes[INDEX].some[2]
    place = column - first
    if second > first:
        place = tl.where(column < second, tl.where(place < count, place, -1), column - second + count)
    return place


@triton.jit
def codes_of(INDEX: tl.constexpr, P: tl.constexpr):
    """How many codes a row of plane INDEX has."""
    return P.planes[INDEX].row_nbytes * 8 // P.planes[INDEX].bits


@triton.jit
def _pack_byte(codes, BYTE: tl.constexpr, INDEX: tl.constexpr, P: tl.constexpr):
    """Byte BYTE of each row of plane INDEX, whose fields are no runs: [R, C] to [R, 1]."""
    place = place_in_plane(column_places(P.column_pad, P), INDEX, P)
    held = (place >= 0) & (place < codes_of(INDEX, P)) & (place % P.planes[INDEX].row_nbytes == BYTE)
    shift = tl.where(held, place // P.planes[INDEX].row_nbytes * P.planes[INDEX].bits, 0)
    return tl.sum(tl.where(held, codes << shift, 0), axis=1, keep_dims=True)


@triton.jit
def store_terms(scale, zero, slab, at, inside, P: tl.constexpr):
    """Scale and zero, float16, as number `at` of their fields."""
    tl.store((slab + P.scale_at).to(tl.pointer_type(tl.float16)) + at, scale.to(tl.float16), mask=inside)
    tl.store((slab + P.zero_at).to(tl.pointer_type(tl.float16)) + at, zero.to(tl.float16), mask=inside)


@triton.jit
def store_short(code, zero, slab, at, inside, P: tl.constexpr):
    """Short scales and float16 zeros, as number `at` of their fields."""
    tl.store(slab + P.scale_at + at, code.to(tl.uint8), mask=inside)
    tl.store((slab + P.zero_at).to(tl.pointer_type(tl.float16)) + at, zero.to(tl.float16), mask=inside)


@triton.jit
def store_joined(bits, slab, at, inside, P: tl.constexpr):
    """Scales with a low zero, as number `at` of their field."""
    tl.store((slab + P.scale_at).to(tl.pointer_type(tl.int16)) + at, bits.to(tl.int16), mask=inside)


@triton.jit
def half_bits(x):
    """Of as_half(x), which is not negative: int32."""
    return as_half(x).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def from_half_bits(bits):
    """float32 of float16 with these bits, int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def count_beyond(x, limit):
    """How many numbers are beyond +-limit, int32."""
    return tl.sum(tl.sum((tl.abs(x) > limit).to(tl.int32), axis=1), axis=0)


@triton.jit
def clamp(x, limit):
    """To +-limit."""
    x = tl.where(x > limit, limit, x)
    return tl.where(x < -limit, -limit, x)


@triton.jit
def _within(x, highest):
    """Clamped to 0 .. highest; a minus zero stays one."""
    x = tl.where(x < 0, 0.0, x)
    return tl.where(x > highest, highest, x)


@triton.jit
def as_half(x):
    """affine._half: clamped and rounded to float16."""
    return clamp(x, FLOAT16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def as_scale(x):
    """Rounded to float16, but not below its smallest number."""
    x = as_half(x)
    return tl.where(x < SMALLEST_STEP, SMALLEST_STEP, x)


@triton.jit
def rounded(x):
    """To nearest even integers, the sign of zero kept. Exact up to 2^22; beyond, where codes are clamped anyway, still beyond."""
    sign = x.to(tl.int32, bitcast=True) & INT_MIN
    size = (tl.abs(x) + 8388608.0) - 8388608.0
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def nearest_codes(x, scale, zero, highest):
    """affine.quantize: nearest codes, as floats."""
    return _within(rounded(tl.div_rn(x - zero, scale)), highest)
