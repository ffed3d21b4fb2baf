"""Sealing by least squares: affine.refine and the rotation before it, on tiles that are held folded. Triton must be importable to import this.

A fit adds over rows again and again. So a tile [R, C] that is fitted is held as [C * F, R / F], F = P.fold: of columns 2 c and 2 c + 1, row
h * F + l stands at [(c * F + l) * 2 + 0 or 1, h]. Those are neighbours in memory, so the compiler lays threads along the first axis: a thread has
all h of two columns, and the rest of a sum is between neighbouring lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarto import sealing
from kvarto.kernels.triton_seal_bytes import (
    among_odd,
    as_half,
    as_scale,
    clamp,
    codes_of,
    from_half_bits,
    half_bits,
    load_floats,
    nearest_codes,
    place_in_plane,
    rounded,
    row_places,
    store_codes,
    store_joined,
    store_short,
)
from kvarto.tile import LOW_ZERO_LIMIT as _LIMIT
from kvarto.tile import LOW_ZERO_STEPS as _STEPS
from kvarto.tile import LOW_ZEROS as _ZEROS

FLOAT16_MAX = tl.constexpr(sealing.FLOAT16_MAX)
ROUNDS = tl.constexpr(sealing.ROUNDS)
INT_MIN = tl.constexpr(-(2**31))
LOW_ZEROS, LOW_ZERO_STEPS, LOW_ZERO_LIMIT = tl.constexpr(_ZEROS), tl.constexpr(_STEPS), tl.constexpr(_LIMIT)


@triton.jit
def load_folded(raw, P: tl.constexpr):
    """The raw slab folded, padding 0; rows in plain order."""
    row, column = _folded_row(P), _folded_column(P)
    return load_floats(raw, row * P.columns + column, (row < P.rows) & (column < P.columns), P)


@triton.jit
def refine(x, slab, P: tl.constexpr):
    """affine.refine of each column of a folded tile, whose rows stand as `row_places` says."""
    rows, columns = _folded_inside(P), _folded_column(P)
    x, highest = clamp(x, FLOAT16_MAX), _highest(P)
    mean = _halving_mean(x, P)
    # A sum of minus zeros is one; but zeros of padding and the interpreter's sum, which begins with 0, take the sign.
    most = _most(tl.where(rows, x.to(tl.int32, bitcast=True), INT_MIN), P)
    mean = tl.where(most == INT_MIN, most.to(tl.float32, bitcast=True), mean)
    centred = tl.where(rows, x - mean, 0.0)
    variance = _halving_mean(centred * centred, P)
    lo = _least(tl.where(rows, x, float("inf")), P)
    hi = _most(tl.where(rows, x, float("-inf")), P)
    scale, zero = as_scale(tl.div_rn(hi - lo, highest)), as_half(lo)
    for _ in range(ROUNDS):
        slope, code_mean, fits = _slope(x, centred, scale, zero, highest, rows, variance, False, P)
        scale = as_scale(tl.where(fits, slope, scale))
        zero = as_half(mean - scale * code_mean)
    slope, code_mean, fits = _slope(x, centred, scale, zero, highest, rows, variance, True, P)
    scale = tl.where(fits, slope, scale)
    first = (_lane(P) == 0) & (columns < P.columns)
    if P.terms == "short":
        scale, zero = _short(scale, mean, code_mean, slab, columns, first, P)
    else:
        largest = tl.maximum(-lo, hi)
        scale, zero = _joined(scale, mean, code_mean, largest, slab, columns, first, P)
    store_codes(_unfold(nearest_codes(x, scale, zero, highest).to(tl.int32), P), slab, P)


@triton.jit
def _short(scale, mean, code_mean, slab, columns, inside, P: tl.constexpr):
    """affine.short_scale, stored: the scale and the zero to code with."""
    code = (half_bits(scale) + 64) >> 7
    code = tl.minimum(tl.maximum(code, 1), 247)
    scale = from_half_bits(code << 7)
    zero = as_half(mean - scale * code_mean)
    store_short(code, zero, slab, columns, inside, P)
    return scale, zero


@triton.jit
def _joined(scale, mean, code_mean, largest, slab, columns, inside, P: tl.constexpr):
    """affine.joined, stored, and `parted`: the scale and the zero to code with."""
    half: tl.constexpr = ((1 << P.bits) - 1) / 2
    reach: tl.constexpr = half + LOW_ZERO_LIMIT / LOW_ZERO_STEPS
    scale = tl.maximum(scale, tl.div_rn(largest, tl.full(largest.shape, reach, tl.float32)))
    bits = tl.minimum(tl.maximum(half_bits(scale), LOW_ZEROS), 0x7BF0 - LOW_ZEROS // 2)
    upper = (bits + LOW_ZEROS // 2) // LOW_ZEROS * LOW_ZEROS
    scale = from_half_bits(upper)
    centre = mean - scale * (code_mean - half)
    steps = clamp(rounded(tl.div_rn(centre, scale) * LOW_ZERO_STEPS), LOW_ZERO_LIMIT)
    bits = upper + steps.to(tl.int32) + LOW_ZEROS // 2
    store_joined(bits, slab, columns, inside, P)
    scale = from_half_bits(bits)
    return scale, scale * (steps / LOW_ZERO_STEPS - half)


@triton.jit
def rotate(x, P: tl.constexpr):
    """hadamard.transform over the rows of a folded tile, which stand in plain order before and as `row_places` says after; padding 0."""
    x = clamp(x, P.rotation_limit)
    power: tl.constexpr = P.rows // len(P.minus)
    for i in tl.static_range(power.bit_length() - 1):
        x = _butterfly(x, 1 << i, P)
    if len(P.minus) > 1:
        x = _fold(_signed_sums(_unfold(x, P), power, P), P)
    return x * P.root


@triton.jit
def _slope(x, centred, scale, zero, highest, rows, variance, LAST: tl.constexpr, P: tl.constexpr):
    """(next scale: of least squares, or LAST: that keeps the variance; mean of the codes; whether the scale can be used)."""
    codes = tl.where(rows, nearest_codes(x, scale, zero, highest), 0.0)
    code_mean = _halving_mean(codes, P)
    spread = tl.where(rows, codes - code_mean, 0.0)
    code_variance, covariance = _halving_mean(spread * spread, P), _halving_mean(spread * centred, P)
    fits = (code_variance > 0) & (covariance > 0)
    divisor = tl.where(fits, code_variance, 1.0)
    slope = tl.sqrt_rn(tl.div_rn(variance, divisor)) if LAST else tl.div_rn(covariance, divisor)
    return slope, code_mean, fits


@triton.jit
def _highest(P: tl.constexpr):
    """The highest code of each column, float32 [C * F, 1]."""
    bits = tl.full((P.column_pad * P.fold, 1), P.bits, tl.int32)
    for i in tl.static_range(len(P.planes)):
        if len(P.planes[i].some) > 0:
            place = place_in_plane(_folded_column(P), i, P)
            bits += tl.where((place >= 0) & (place < codes_of(i, P)), P.planes[i].bits, 0)
    return ((1 << bits) - 1).to(tl.float32)


@triton.jit
def _halving_mean(x, P: tl.constexpr):
    """codecs.base.halving_mean over rows, [C * F, 1]: halves of h first, then of l, where both of two lanes get their sum."""
    high: tl.constexpr = P.row_pad // P.fold
    for i in tl.static_range(high.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (P.column_pad * P.fold, 2, (high >> i) // 2)), axis=1)
    x = tl.reshape(x, (P.column_pad * P.fold, 1))
    for i in tl.static_range(P.fold.bit_length() - 1):
        pair = _pairs(x, P.fold >> (i + 1), P)
        x = _both(tl.sum(pair, axis=1, keep_dims=True), pair, P)
    return tl.div_rn(x, tl.full(x.shape, P.rows, tl.float32))


@triton.jit
def _most(x, P: tl.constexpr):
    """Maximum of each column, [C * F, 1]."""
    x = tl.max(x, axis=1, keep_dims=True)
    for i in tl.static_range(P.fold.bit_length() - 1):
        pair = _pairs(x, 1 << i, P)
        x = _both(tl.max(pair, axis=1, keep_dims=True), pair, P)
    return x


@triton.jit
def _least(x, P: tl.constexpr):
    """Minimum of each column, [C * F, 1]."""
    x = tl.min(x, axis=1, keep_dims=True)
    for i in tl.static_range(P.fold.bit_length() - 1):
        pair = _pairs(x, 1 << i, P)
        x = _both(tl.min(pair, axis=1, keep_dims=True), pair, P)
    return x


@triton.jit
def _pairs(x, APART: tl.constexpr, P: tl.constexpr):
    """[C * F, 1] with what has l APART along a new axis of 2."""
    return tl.reshape(x, (P.column_pad * P.fold // (4 * APART), 2, 2 * APART))


@triton.jit
def _both(x, pair, P: tl.constexpr):
    """[.., 1, ..] to both of `_pairs`, as [C * F, 1]."""
    return tl.reshape(tl.broadcast_to(x, pair.shape), (P.column_pad * P.fold, 1))


@triton.jit
def _butterfly(x, HALF: tl.constexpr, P: tl.constexpr):
    """Sum and difference of rows that are HALF apart, in place."""
    high: tl.constexpr = P.row_pad // P.fold
    apart: tl.constexpr = 2 * HALF * high if P.fold > HALF else HALF // P.fold
    x = tl.reshape(x, (P.row_pad * P.column_pad // (2 * apart), 2, apart))
    bits = x.to(tl.int32, bitcast=True)
    # The other of the two: both together, as integers, less this one.
    other = (tl.sum(bits, axis=1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    x = tl.where(tl.arange(0, 2)[None, :, None] == 0, x + other, other - x)
    return tl.reshape(x, (P.column_pad * P.fold, high))


@triton.jit
def _signed_sums(x, POWER: tl.constexpr, P: tl.constexpr):
    """hadamard._signed_sums over the first factor of rows = [base, POWER]."""
    row = row_places(P)
    inside = row < P.rows
    row = tl.where(inside, row, 0)
    # Minus zero plus or minus a number is that number or its negative, zeros too.
    total = tl.full((P.row_pad, P.column_pad), INT_MIN, tl.int32).to(tl.float32, bitcast=True)
    for j in range(len(P.minus)):
        part = tl.gather(x, tl.broadcast_to(j * POWER + row % POWER, (P.row_pad, P.column_pad)), axis=0)
        minus = 0
        for k in tl.static_range(len(P.minus)):
            minus = tl.where(j == k, P.minus[k], minus)
        total = tl.where(((minus >> (row // POWER)) & 1) == 1, total - part, total + part)
    return tl.where(inside, total, 0.0)


@triton.jit
def _folded_row(P: tl.constexpr):
    """Padded row that stands at each place of a folded tile, [C * F, R / F]."""
    return tl.arange(0, P.row_pad // P.fold)[None, :] * P.fold + _lane(P)


@triton.jit
def _lane(P: tl.constexpr):
    """l of each place of a folded tile, [C * F, 1]."""
    return tl.arange(0, P.column_pad * P.fold)[:, None] // 2 % P.fold


@triton.jit
def _padded_column(P: tl.constexpr):
    """Padded column that stands at each place of a folded tile, [C * F, 1]."""
    place = tl.arange(0, P.column_pad * P.fold)[:, None]
    return place // (2 * P.fold) * 2 + place % 2


@triton.jit
def _folded_column(P: tl.constexpr):
    """Column that stands at each place of a folded tile, [C * F, 1]; P.columns or more where there is none."""
    place = _padded_column(P)
    if P.run_pad > P.run:
        place = tl.where(place % P.run_pad < P.run, place // P.run_pad * P.run + place % P.run_pad, P.columns)
    return place


@triton.jit
def _folded_inside(P: tl.constexpr):
    """Where a folded tile whose rows stand as `row_places` says has rows, [C * F, R / F]."""
    if P.odd > 1:
        inside = among_odd(_folded_row(P), P) < P.odd
    else:
        inside = _folded_row(P) < P.rows
    return inside


@triton.jit
def _unfold(x, P: tl.constexpr):
    """[C * F, R / F] to [R, C]."""
    x = tl.reshape(x, (P.column_pad // 2, P.fold, 2, P.row_pad // P.fold))
    return tl.reshape(tl.permute(x, (3, 1, 0, 2)), (P.row_pad, P.column_pad))


@triton.jit
def _fold(x, P: tl.constexpr):
    """[R, C] to [C * F, R / F]."""
    x = tl.reshape(x, (P.row_pad // P.fold, P.fold, P.column_pad // 2, 2))
    return tl.reshape(tl.permute(x, (2, 1, 3, 0)), (P.column_pad * P.fold, P.row_pad // P.fold))
