"""The program that seals a slab, one for each page, head and side: functions that Triton compiles. Host and plans: kernels/triton_seal.py.

A program loads the raw slab as a tile (rows and columns as in kvarto/tile.py), encodes it as `kvarto.sealing` says, and writes every byte of the
sealed slab. Here are casts and ranges; least squares is kernels/triton_seal_fit.py, and what all share kernels/triton_seal_bytes.py.

The bytes are those of `Codec.encode`: each float operation of the reference in the same order, rounded once (division and square root exact, no
fused multiply-add), means added by halves, and roundings done with integers where GPU and interpreter could differ.

Shapes: [R, C] is the padded tile, P a `Plan`. Floats are float32 throughout; a float16 number is held as the float32 that equals it.
Triton must be importable to import this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarto import sealing
from kvarto.kernels.triton_seal_bytes import (
    as_half,
    as_scale,
    clamp,
    column_places,
    count_beyond,
    from_half_bits,
    half_bits,
    load_floats,
    nearest_codes,
    store_codes,
    store_short,
    store_terms,
)
from kvarto.kernels.triton_seal_fit import load_folded, refine, rotate

SMALLEST_STEP = tl.constexpr(sealing.SMALLEST_STEP)
INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def seal(
    raw,
    raw_ids,
    sealed,
    sealed_ids,
    saturated,
    k_scales,
    v_scales,
    RAW_PAGE: tl.constexpr,
    RAW_PAIR: tl.constexpr,
    PAGE: tl.constexpr,
    PAIR: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Program (page of the list, head, side)."""
    page, head = tl.program_id(0), tl.program_id(1)
    sealed_id = tl.load(sealed_ids + page).to(tl.int64)
    if sealed_id >= 0:
        raw_pair = raw + tl.load(raw_ids + page).to(tl.int64) * RAW_PAGE + head.to(tl.int64) * RAW_PAIR
        pair = sealed + sealed_id * PAGE + head.to(tl.int64) * PAIR
        if tl.program_id(2) == 0:
            _seal_slab(raw_pair + K.raw_at, pair + K.slab_at, saturated, k_scales, head, K)
        else:
            _seal_slab(raw_pair + V.raw_at, pair + V.slab_at, saturated, v_scales, head, V)


@triton.jit
def _seal_slab(raw, slab, saturated, scales, head, P: tl.constexpr):
    """raw: the raw slab, slab: where the sealed one goes; pointers to uint8."""
    if P.method == "refine":
        x = load_folded(raw, P)
        if len(P.minus) > 0:
            x = rotate(x, P)
        clamped = count_beyond(x, P.limit)
        refine(x, slab, P)
    else:
        x = _load_raw(raw, P)
        if P.method == "cast":
            clamped = _cast(x, slab, scales, head, P)
        else:
            clamped = count_beyond(x, P.limit)
            _range(x, slab, P)
    for i in tl.static_range(len(P.gaps)):
        byte = P.gaps[i][0] + tl.arange(0, 16)
        tl.store(slab + byte, tl.zeros((16,), tl.uint8), mask=byte < P.gaps[i][1])
    if saturated is not None:  # noqa: SIM102 - known when compiled; the next only when run
        if clamped > 0:
            tl.atomic_add(saturated, clamped.to(tl.int64))


@triton.jit
def _load_raw(raw, P: tl.constexpr):
    """The raw slab as a tile, padding 0; rows in plain order."""
    vector: tl.constexpr = P.vector
    row, column = tl.arange(0, P.row_pad)[:, None], tl.max_contiguous(tl.arange(0, P.column_pad), vector)[None, :]
    x = load_floats(raw, row * P.columns + column, (row < P.rows) & (column < P.columns), P)
    if P.run_pad > P.run:
        # Loaded as they lie, then put in their runs: loads stay wide, and the compiler gives warps whole rows.
        place = column_places(P.column_pad, P)
        index = tl.broadcast_to(tl.where(place < P.columns, place, 0), (P.row_pad, P.column_pad))
        x = tl.where(place < P.columns, tl.gather(x, index, axis=1), 0.0)
    return x


@triton.jit
def _cast(x, slab, scales, head, P: tl.constexpr):
    """Write a slab of floats; returns how many were clamped."""
    y, clamped = x, 0
    if P.shared == "slab":
        scale = tl.load(scales + (head if P.scales > 1 else 0))
        y, clamped = tl.div_rn(x, scale), count_beyond(x, P.limit * scale)
        tl.store((slab + P.scale_at).to(tl.pointer_type(tl.float32)), scale)
    elif P.shared == "":
        clamped = count_beyond(x, P.limit)
    else:
        largest = tl.max(tl.abs(x), axis=1 if P.is_key else 0, keep_dims=True)
        bits = _bfloat16_bits(tl.div_rn(largest, tl.full(largest.shape, P.limit, tl.float32)))
        bits = tl.where(bits > 0, bits, 0x3F80)
        y = tl.div_rn(x, (bits << 16).to(tl.float32, bitcast=True))
        at = tl.arange(0, P.rows)[:, None] if P.is_key else column_places(P.column_pad, P)
        tl.store((slab + P.scale_at).to(tl.pointer_type(tl.uint16)) + at, bits.to(tl.uint16))
    _store_floats(clamp(y, P.limit), slab, P)
    return clamped


@triton.jit
def _store_floats(x, slab, P: tl.constexpr):
    rows, columns = tl.arange(0, P.row_pad)[:, None], column_places(P.column_pad, P)
    at, inside = rows * P.columns + columns, (rows < P.rows) & (columns < P.columns)
    start = slab + P.planes[0].offset
    if P.planes[0].kind == "bfloat16":
        tl.store(start.to(tl.pointer_type(tl.uint16)) + at, _bfloat16_bits(x).to(tl.uint16), mask=inside)
    elif P.planes[0].kind == "float16":
        tl.store(start.to(tl.pointer_type(tl.float16)) + at, x.to(tl.float16), mask=inside)
    elif P.planes[0].kind == "float32":
        tl.store(start.to(tl.pointer_type(tl.float32)) + at, x, mask=inside)
    elif P.planes[0].kind == "e4m3":
        tl.store(start + at, _float8_bits(x, 3, 7), mask=inside)
    else:
        tl.store(start + at, _float8_bits(x, 2, 15), mask=inside)


@triton.jit
def _bfloat16_bits(x):
    """Of finite x, rounded to nearest even; int32, low 16 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Of x within the largest number, rounded to nearest even, subnormals included; uint8."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & INT_MAX
    cut: tl.constexpr = 23 - MANTISSA
    normal = (size + ((BIAS - 127) << 23) + (1 << (cut - 1)) - 1 + ((size >> cut) & 1)) >> cut
    # Below the smallest normal number: adding a power of two whose last bit is the smallest subnormal leaves the code in the low bits.
    unit: tl.constexpr = (127 - BIAS + cut + 1) << 23
    shifted = size.to(tl.float32, bitcast=True) + tl.full(size.shape, unit, tl.int32).to(tl.float32, bitcast=True)
    subnormal = shifted.to(tl.int32, bitcast=True) - unit
    code = tl.where(size < (128 - BIAS) << 23, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _range(x, slab, P: tl.constexpr):
    """affine.fit, or short_fit, and affine.quantize of each group."""
    columns = column_places(P.column_pad, P)
    highest: tl.constexpr = (1 << P.bits) - 1.0
    groups: tl.constexpr = P.row_pad // P.group_pad
    x = tl.reshape(x, (groups, P.group_pad, P.column_pad))
    row = tl.reshape(tl.arange(0, P.row_pad), (groups, P.group_pad, 1))
    scale, zero = _fit(x, row < P.rows, 1, highest)
    group, column = tl.arange(0, groups)[:, None, None], columns[None, :, :]
    inside = (group < P.groups) & (column < P.columns)
    if P.terms == "short":
        code = tl.minimum(tl.maximum((half_bits(scale) + 127) >> 7, 1), 247)
        scale = from_half_bits(code << 7)
        store_short(code, zero, slab, column, inside, P)
    else:
        store_terms(scale, zero, slab, group * P.columns + column, inside, P)
    codes = nearest_codes(x, scale, zero, highest).to(tl.int32)
    store_codes(tl.reshape(codes, (P.row_pad, P.column_pad)), slab, P)


@triton.jit
def _fit(x, inside, AXIS: tl.constexpr, HIGHEST: tl.constexpr):
    """affine.fit over an axis, which is kept: scale and zero."""
    lo = tl.min(tl.where(inside, x, float("inf")), axis=AXIS, keep_dims=True)
    hi = tl.max(tl.where(inside, x, float("-inf")), axis=AXIS, keep_dims=True)
    # affine.lowest: of zeros, the minus zero, if there is one.
    least = tl.min(tl.where(inside, x.to(tl.int32, bitcast=True), INT_MAX), axis=AXIS, keep_dims=True)
    lo = tl.where(lo == 0, tl.where(least == INT_MIN, least, 0).to(tl.float32, bitcast=True), lo)
    zero = as_half(lo)
    step = tl.div_rn(hi - zero, tl.full(hi.shape, HIGHEST, tl.float32))
    return as_scale(tl.where(step < 0, 0.0, step) + SMALLEST_STEP / 2), zero
