"""The program that seals a slab, one for each page, head and side: functions that Triton compiles. Host and plans: kernels/triton_seal.py.

A program loads the raw slab as a tile (rows and columns as in kvarto/tile.py), encodes it as `kvarto.sealing` says, and writes every byte of the
sealed slab. The bytes are those of `Codec.encode`: each float operation of the reference in the same order, rounded once (division and square root
exact, no fused multiply-add), means added by halves, and roundings done with integers where GPU and interpreter could differ.

Shapes: [R, C] is the padded tile, P a `Plan`. Floats are float32 throughout; a float16 number is held as the float32 that equals it.
Triton must be importable to import this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarto import sealing

FLOAT16_MAX = tl.constexpr(sealing.FLOAT16_MAX)
SMALLEST_STEP = tl.constexpr(sealing.SMALLEST_STEP)
ROUNDS = tl.constexpr(sealing.ROUNDS)
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
        x = _load_folded(raw, P)
        if len(P.minus) > 0:
            x = _rotate(x, P)
        clamped = _count(x, P.limit)
        _refine(x, slab, P)
    else:
        x = _load_raw(raw, P)
        if P.method == "cast":
            clamped = _cast(x, slab, scales, head, P)
        else:
            clamped = _count(x, P.limit)
            _range(x, slab, P)
    for i in tl.static_range(len(P.gaps)):
        byte = P.gaps[i][0] + tl.arange(0, 16)
        tl.store(slab + byte, tl.zeros((16,), tl.uint8), mask=byte < P.gaps[i][1])
    if saturated is not None:  # noqa: SIM102 - known when compiled; the next only when run
        if clamped > 0:
            tl.atomic_add(saturated, clamped.to(tl.int64))


# ---- where things stand --------------------------------------------------------------------------------------------


@triton.jit
def _rows(P: tl.constexpr):
    """Row of the tile that each padded row holds, [R, 1]; P.rows or more where there is none."""
    place = tl.arange(0, P.row_pad)[:, None]
    if P.odd > 1:
        among = _among(place, P)
        place = tl.where(among < P.odd, place // P.odd_pad * P.odd + among, P.rows)
    return place


@triton.jit
def _among(place, P: tl.constexpr):
    """Which of the `odd` channels that are together a padded row holds; 15 for none."""
    return (tl.full((1, 1), P.order, tl.int64) >> (4 * (place % P.odd_pad)).to(tl.int64)).to(tl.int32) & 15


@triton.jit
def _columns(COUNT: tl.constexpr, P: tl.constexpr):
    """Column, or byte of a packed row, that each of COUNT padded ones holds, [1, COUNT]; P.columns or more where there is none."""
    place = tl.arange(0, COUNT)[None, :]
    if P.run_pad > P.run:
        place = tl.where(place % P.run_pad < P.run, place // P.run_pad * P.run + place % P.run_pad, P.columns)
    return place


@triton.jit
def _load_raw(raw, P: tl.constexpr):
    """The raw slab as a tile, padding 0; rows in plain order."""
    vector: tl.constexpr = P.vector
    row, column = tl.arange(0, P.row_pad)[:, None], tl.max_contiguous(tl.arange(0, P.column_pad), vector)[None, :]
    x = _load(raw, row * P.columns + column, (row < P.rows) & (column < P.columns), P)
    if P.run_pad > P.run:
        # Loaded as they lie, then put in their runs: loads stay wide, and the compiler gives warps whole rows.
        place = _columns(P.column_pad, P)
        index = tl.broadcast_to(tl.where(place < P.columns, place, 0), (P.row_pad, P.column_pad))
        x = tl.where(place < P.columns, tl.gather(x, index, axis=1), 0.0)
    return x


@triton.jit
def _load(raw, at, inside, P: tl.constexpr):
    """Raw numbers as float32, 0 where not inside."""
    if P.raw_dtype == "bfloat16":
        bits = tl.load(raw.to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    if P.raw_dtype == "float16":
        return tl.load(raw.to(tl.pointer_type(tl.float16)) + at, mask=inside, other=0.0).to(tl.float32)
    return tl.load(raw.to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0.0)


@triton.jit
def _load_folded(raw, P: tl.constexpr):
    """The raw slab folded, padding 0; rows in plain order.

    A fit adds over rows again and again. So a tile [R, C] that is fitted is held as [C * F, R / F], F = P.fold: of columns 2 c and 2 c + 1, row
    h * F + l stands at [(c * F + l) * 2 + 0 or 1, h]. Those are neighbours in memory, so the compiler lays threads along the first axis: a thread has
    all h of two columns, and the rest of a sum is between neighbouring lanes.
    """
    row, column = _folded_row(P), _folded_column(P)
    return _load(raw, row * P.columns + column, (row < P.rows) & (column < P.columns), P)


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
    """Where a folded tile whose rows stand as `_rows` says has rows, [C * F, R / F]."""
    if P.odd > 1:
        inside = _among(_folded_row(P), P) < P.odd
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


# ---- floats to floats ----------------------------------------------------------------------------------------------


@triton.jit
def _cast(x, slab, scales, head, P: tl.constexpr):
    """Write a slab of floats; returns how many were clamped."""
    y, clamped = x, 0
    if P.shared == "slab":
        scale = tl.load(scales + (head if P.scales > 1 else 0))
        y, clamped = tl.div_rn(x, scale), _count(x, P.limit * scale)
        tl.store((slab + P.scale_at).to(tl.pointer_type(tl.float32)), scale)
    elif P.shared == "":
        clamped = _count(x, P.limit)
    else:
        largest = tl.max(tl.abs(x), axis=1 if P.is_key else 0, keep_dims=True)
        bits = _bfloat16_bits(tl.div_rn(largest, tl.full(largest.shape, P.limit, tl.float32)))
        bits = tl.where(bits > 0, bits, 0x3F80)
        y = tl.div_rn(x, (bits << 16).to(tl.float32, bitcast=True))
        at = tl.arange(0, P.rows)[:, None] if P.is_key else _columns(P.column_pad, P)
        tl.store((slab + P.scale_at).to(tl.pointer_type(tl.uint16)) + at, bits.to(tl.uint16))
    _store_floats(_clamp(y, P.limit), slab, P)
    return clamped


@triton.jit
def _store_floats(x, slab, P: tl.constexpr):
    rows, columns = tl.arange(0, P.row_pad)[:, None], _columns(P.column_pad, P)
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


# ---- ranges --------------------------------------------------------------------------------------------------------


@triton.jit
def _range(x, slab, P: tl.constexpr):
    """affine.fit and affine.quantize of each group."""
    columns = _columns(P.column_pad, P)
    highest: tl.constexpr = (1 << P.bits) - 1.0
    if P.shared == "row":
        scale, zero = _fit(x, columns < P.columns, 1, highest)
        _store_codes(_quantize(x, scale, zero, highest).to(tl.int32), slab, P)
        at = tl.arange(0, P.rows)[:, None]
        _store_terms(scale, zero, slab, at, at < P.rows, P)
    else:
        groups: tl.constexpr = P.row_pad // P.group_pad
        x = tl.reshape(x, (groups, P.group_pad, P.column_pad))
        row = tl.reshape(tl.arange(0, P.row_pad), (groups, P.group_pad, 1))
        scale, zero = _fit(x, row < P.rows, 1, highest)
        codes = _quantize(x, scale, zero, highest).to(tl.int32)
        _store_codes(tl.reshape(codes, (P.row_pad, P.column_pad)), slab, P)
        group, column = tl.arange(0, groups)[:, None, None], columns[None, :, :]
        inside = (group < P.groups) & (column < P.columns)
        _store_terms(scale, zero, slab, group * P.columns + column, inside, P)


@triton.jit
def _fit(x, inside, AXIS: tl.constexpr, HIGHEST: tl.constexpr):
    """affine.fit over an axis, which is kept: scale and zero."""
    lo = tl.min(tl.where(inside, x, float("inf")), axis=AXIS, keep_dims=True)
    hi = tl.max(tl.where(inside, x, float("-inf")), axis=AXIS, keep_dims=True)
    # affine.lowest: of zeros, the minus zero, if there is one.
    least = tl.min(tl.where(inside, x.to(tl.int32, bitcast=True), INT_MAX), axis=AXIS, keep_dims=True)
    lo = tl.where(lo == 0, tl.where(least == INT_MIN, least, 0).to(tl.float32, bitcast=True), lo)
    zero = _half(lo)
    step = tl.div_rn(hi - zero, tl.full(hi.shape, HIGHEST, tl.float32))
    return _scale(tl.where(step < 0, 0.0, step) + SMALLEST_STEP / 2), zero


@triton.jit
def _quantize(x, scale, zero, highest):
    """affine.quantize: nearest codes, as floats."""
    return _within(_round(tl.div_rn(x - zero, scale)), highest)


# ---- least squares: folded tiles -----------------------------------------------------------------------------------


@triton.jit
def _refine(x, slab, P: tl.constexpr):
    """affine.refine of each column of a folded tile, whose rows stand as `_rows` says."""
    rows, columns = _folded_inside(P), _folded_column(P)
    x, highest = _clamp(x, FLOAT16_MAX), _highest(P)
    mean = _halving_mean(x, P)
    # A sum of minus zeros is one; but zeros of padding and the interpreter's sum, which begins with 0, take the sign.
    most = _most(tl.where(rows, x.to(tl.int32, bitcast=True), INT_MIN), P)
    mean = tl.where(most == INT_MIN, most.to(tl.float32, bitcast=True), mean)
    centred = tl.where(rows, x - mean, 0.0)
    variance = _halving_mean(centred * centred, P)
    lo = _least(tl.where(rows, x, float("inf")), P)
    hi = _most(tl.where(rows, x, float("-inf")), P)
    scale, zero = _scale(tl.div_rn(hi - lo, highest)), _half(lo)
    for _ in range(ROUNDS):
        slope, code_mean, fits = _slope(x, centred, scale, zero, highest, rows, variance, False, P)
        scale = _scale(tl.where(fits, slope, scale))
        zero = _half(mean - scale * code_mean)
    # The codes are those of this scale; the one that is stored with them keeps the variance.
    _store_codes(_unfold(_quantize(x, scale, zero, highest).to(tl.int32), P), slab, P)
    slope, code_mean, fits = _slope(x, centred, scale, zero, highest, rows, variance, True, P)
    scale = _scale(tl.where(fits, slope, scale))
    zero = _half(mean - scale * code_mean)
    _store_terms(scale, zero, slab, columns, (_lane(P) == 0) & (columns < P.columns), P)


@triton.jit
def _slope(x, centred, scale, zero, highest, rows, variance, LAST: tl.constexpr, P: tl.constexpr):
    """(next scale: of least squares, or LAST: that keeps the variance; mean of the codes; whether the scale can be used)."""
    codes = tl.where(rows, _quantize(x, scale, zero, highest), 0.0)
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
    run = _padded_column(P) // P.run_pad
    bits = tl.full((P.column_pad * P.fold, 1), P.bits, tl.int32)
    for i in tl.static_range(len(P.planes)):
        for field in tl.static_range(len(P.planes[i].runs)):
            bits += tl.where(run == P.planes[i].runs[field], P.planes[i].bits, 0)
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
def _rotate(x, P: tl.constexpr):
    """hadamard.transform over the rows of a folded tile, which stand in plain order before and as `_rows` says after; padding 0."""
    x = _clamp(x, P.rotation_limit)
    power: tl.constexpr = P.rows // len(P.minus)
    for i in tl.static_range(power.bit_length() - 1):
        x = _butterfly(x, 1 << i, P)
    if len(P.minus) > 1:
        x = _fold(_signed_sums(_unfold(x, P), power, P), P)
    return x * P.root


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
    row = _rows(P)
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


# ---- what all share ------------------------------------------------------------------------------------------------


@triton.jit
def _store_codes(codes, slab, P: tl.constexpr):
    """Pack int32 [R, C] into the planes (codecs/packing.py)."""
    for i in tl.static_range(len(P.planes)):
        _store_plane(codes, slab, i, P)


@triton.jit
def _store_plane(codes, slab, INDEX: tl.constexpr, P: tl.constexpr):
    """The bits of all codes that plane INDEX holds."""
    codes = codes >> P.planes[INDEX].shift
    packed = _pack(codes, P.planes[INDEX].bits, P) if len(P.planes[INDEX].runs) == 0 else _pack_runs(codes, INDEX, P)
    row, byte = _rows(P), _columns(packed.shape[1], P)
    at = P.planes[INDEX].offset + row * P.planes[INDEX].row_nbytes + byte
    tl.store(slab + at, packed.to(tl.uint8), mask=(row < P.rows) & (byte < P.planes[INDEX].row_nbytes))


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
def _store_terms(scale, zero, slab, at, inside, P: tl.constexpr):
    """Scale and zero, float16, as number `at` of their fields."""
    tl.store((slab + P.scale_at).to(tl.pointer_type(tl.float16)) + at, scale.to(tl.float16), mask=inside)
    tl.store((slab + P.zero_at).to(tl.pointer_type(tl.float16)) + at, zero.to(tl.float16), mask=inside)


@triton.jit
def _count(x, limit):
    """How many numbers are beyond +-limit, int32."""
    return tl.sum(tl.sum((tl.abs(x) > limit).to(tl.int32), axis=1), axis=0)


@triton.jit
def _clamp(x, limit):
    x = tl.where(x > limit, limit, x)
    return tl.where(x < -limit, -limit, x)


@triton.jit
def _within(x, highest):
    """Clamped to 0 .. highest; a minus zero stays one."""
    x = tl.where(x < 0, 0.0, x)
    return tl.where(x > highest, highest, x)


@triton.jit
def _half(x):
    """affine._half: clamped and rounded to float16."""
    return _clamp(x, FLOAT16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def _scale(x):
    """Rounded to float16, but not below its smallest number."""
    x = _half(x)
    return tl.where(x < SMALLEST_STEP, SMALLEST_STEP, x)


@triton.jit
def _round(x):
    """To nearest even integers, the sign of zero kept. Exact up to 2^22; beyond, where codes are clamped anyway, still beyond."""
    sign = x.to(tl.int32, bitcast=True) & INT_MIN
    size = (tl.abs(x) + 8388608.0) - 8388608.0
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
