"""The compiled program that seals slabs on a CPU: threads take slabs one after another. Host: kernels/numba_seal.py.

A slab is loaded as a tile (rows and columns as in kvarto/tile.py), encoded as `kvarto.sealing` says, and every byte of the sealed slab is written.
Casts and ranges are here, least squares is numba_seal_fit.py, what is done to columns numba_seal_vectors.py. The bytes are those of `Codec.encode`.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from kvarto.jit import inlined, load_floats
from kvarto.kernels.numba_memory import address_of, fetch_add, get_int, get_long, put_long
from kvarto.kernels.numba_seal_fit import MOST_SIGNS, clamped, joined_terms, rotate, short_terms
from kvarto.kernels.numba_seal_numbers import (
    as_half,
    as_scale,
    bfloat16_bits,
    bits_of,
    e4m3_bits,
    e5m2_bits,
    float_of,
    half_bits,
    half_float,
)
from kvarto.kernels.numba_seal_vectors import (
    bytes_at,
    choose_codes,
    pack_codes,
    range_of_columns,
    refine_columns,
    store_halves,
)
from kvarto.sealing import FLOAT16_MAX, SMALLEST_STEP
from kvarto.simd import LANES

CAST, RANGE, REFINE = range(3)
BFLOAT16, FLOAT16, FLOAT32, E4M3, E5M2, UINT = range(6)
NONE, SLAB, ROW, COLUMN = range(4)
FLOAT_NBYTES, LONG_NBYTES, HALF_NBYTES = 4, 8, 2
PLANE_FIELDS = (
    7  # int64: offset, bytes of a row, bits, shift, kind, address and number of the columns that it stands for (0: all)
)

SIDE = np.dtype(
    [(name, np.int64) for name in (
        # of the job: addresses of raw page 0, raw ids [pages], sealed page 0, sealed ids [pages], clamped [items], the next item
        "raw", "raw_ids", "sealed", "sealed_ids", "clamped", "counter",
        "pages", "heads", "raw_stride", "raw_pair", "sealed_stride", "sealed_pair",
        # of this side: byte of its slab in a pair, raw and sealed; the tile; how it is sealed
        "raw_at", "slab_at", "nbytes", "raw_kind", "rows", "columns", "method", "planes", "planes_count", "gaps", "gaps_count",
        # terms: what shares them, where they lie, whether they are short; groups of rows that share those of a column
        "shared", "short", "scale_at", "zero_at", "groups", "group_rows",
        # addresses of the highest code of each column [columns], of given scales [heads or 1], of the rotation's signs
        "highest", "scales", "scales_count", "minus", "minus_count",
    )]
    + [("limit", np.float32), ("root", np.float32), ("rotation_limit", np.float32), ("unused", np.float32)]
)  # fmt: skip
"""What the program is told of K and of V, a record each; the first half is alike. Addresses and counts are int64."""

_FLOAT16_MAX, _HALF_STEP = np.float32(FLOAT16_MAX), np.float32(SMALLEST_STEP / 2)
_ZERO, _ONE = np.float32(0), np.float32(1)
_TERM_ARRAYS = 6


def seal(pointer):  # type: ignore[no-untyped-def]
    """One thread's part: take slabs until there are none."""
    sides = carray(pointer, 2)
    k, v = sides[0], sides[1]
    numbers, longest = max(k.rows * k.columns, v.rows * v.columns), max(k.rows, k.columns, v.rows, v.columns)
    tile, codes, bits = np.empty(numbers, np.float32), np.empty(numbers, np.uint8), np.empty(longest, np.int32)
    terms, room = (
        np.empty(_TERM_ARRAYS * longest, np.float32),
        np.empty(max(3 * LANES, MOST_SIGNS) * longest, np.float32),
    )
    while True:
        item = fetch_add(k.counter)
        if item >= k.pages * k.heads * 2:
            break
        side, head = item % 2, item // 2 % k.heads
        page, job = item // 2 // k.heads, sides[side]
        sealed_id = get_int(k.sealed_ids, page)
        if sealed_id < 0:
            put_long(k.clamped, item, 0)
            continue
        raw_pair = k.raw + get_int(k.raw_ids, page) * k.raw_stride + head * k.raw_pair
        at = k.sealed + sealed_id * k.sealed_stride + head * k.sealed_pair + job.slab_at
        slab, x = carray(bytes_at(at), job.nbytes), tile[: job.rows * job.columns]
        load(bytes_at(raw_pair + job.raw_at), job.raw_kind, x)
        if job.method == REFINE:
            count = seal_refined(job, x, codes, bits, terms, room, slab)
        elif job.method == RANGE:
            count = seal_range(job, x, codes, bits, terms, slab)
        else:
            count = seal_cast(job, head, x, bits, slab)
        put_long(k.clamped, item, count)
        for i in range(job.gaps_count):
            for byte in range(get_long(job.gaps, 2 * i), get_long(job.gaps, 2 * i + 1)):
                slab[byte] = 0


@inlined
def load(at, kind, x):  # type: ignore[no-untyped-def]
    """Raw numbers at a pointer into x float32 [n]."""
    if kind == BFLOAT16:
        load_floats(carray(at, 2 * x.size), 0, "bfloat16", x)
    elif kind == FLOAT16:
        load_floats(carray(at, 2 * x.size), 0, "float16", x)
    else:
        load_floats(carray(at, 4 * x.size), 0, "float32", x)


@inlined
def longs_at(address, count):  # type: ignore[no-untyped-def]
    """int64 numbers at an address."""
    return carray(bytes_at(address), LONG_NBYTES * count).view(np.int64)


@inlined
def floats_at(address, count):  # type: ignore[no-untyped-def]
    """float32 numbers at an address."""
    return carray(bytes_at(address), FLOAT_NBYTES * count).view(np.float32)


@inlined
def count_beyond(x, limit):  # type: ignore[no-untyped-def]
    """Numbers of x float32 [n] of a magnitude above the limit."""
    largest = np.int32(0)
    for i in range(x.size):
        largest = max(largest, bits_of(x[i]) & np.int32(0x7FFFFFFF))
    count = 0
    if float_of(largest) > limit:
        for i in range(x.size):
            count += abs(x[i]) > limit
    return count


@inlined
def store_codes(job, codes, slab):  # type: ignore[no-untyped-def]
    """Codes uint8 [rows * columns] into the planes of the slab. Those of some columns only are the last, since codes are lost by it."""
    for i in range(job.planes_count):
        plane = longs_at(job.planes + LONG_NBYTES * PLANE_FIELDS * i, PLANE_FIELDS)
        offset, row_nbytes, bits, shift, chosen = plane[0], plane[1], plane[2], plane[3], longs_at(plane[5], plane[6])
        columns = job.columns
        if chosen.size > 0:
            columns = chosen.size
            for row in range(job.rows):
                for j in range(columns):  # never behind where it is read from
                    codes[row * columns + j] = codes[row * job.columns + chosen[j]]
        at, out = address_of(codes), address_of(slab) + offset
        if bits == 8:
            pack_codes(at, job.rows, columns, row_nbytes, 8, shift, out)
        elif bits == 4:
            pack_codes(at, job.rows, columns, row_nbytes, 4, shift, out)
        elif bits == 2:
            pack_codes(at, job.rows, columns, row_nbytes, 2, shift, out)
        else:
            pack_codes(at, job.rows, columns, row_nbytes, 1, shift, out)


# ---- least squares -----------------------------------------------------------------------------------------------------


@inlined
def seal_refined(job, x, codes, bits, terms, room, slab):  # type: ignore[no-untyped-def]
    """`Refine`. Returns how many numbers were clamped."""
    rows, n = job.rows, job.columns
    fit, scale, zero = terms[: 4 * n].reshape(4, n), terms[4 * n : 5 * n], terms[5 * n : 6 * n]
    if job.minus_count > 0:
        rotate(x, rows, n, longs_at(job.minus, job.minus_count), job.root, job.rotation_limit, room)
    count = count_beyond(x, _FLOAT16_MAX)
    refine_columns(address_of(x), rows, n, job.highest, address_of(room), address_of(terms))
    at = address_of(slab)
    if job.short:
        short_terms(fit, scale, zero, bits[:n], slab[job.scale_at : job.scale_at + n], at + job.zero_at)
    else:
        joined_terms(fit, floats_at(job.highest, n), scale, zero, bits[:n], at + job.scale_at)
    choose_codes(address_of(x), rows, n, address_of(scale), address_of(zero), job.highest, address_of(codes))
    store_codes(job, codes, slab)
    return count


# ---- ranges ------------------------------------------------------------------------------------------------------------


@inlined
def seal_range(job, x, codes, bits, terms, slab):  # type: ignore[no-untyped-def]
    """`Range`. Returns how many numbers were clamped."""
    count = count_beyond(x, _FLOAT16_MAX)
    for group in range(job.groups):
        range_by_column(job, group, x, codes, bits, terms, slab)
    store_codes(job, codes, slab)
    return count


@inlined
def range_by_column(job, group, x, codes, bits, terms, slab):  # type: ignore[no-untyped-def]
    """A scale and a zero for each column of a group of rows."""
    n, first = job.columns, group * job.group_rows
    rows = min(job.group_rows, job.rows - first)
    at, top_codes = address_of(x) + FLOAT_NBYTES * first * n, floats_at(job.highest, n)
    scales, zeros = terms[:n], terms[n : 2 * n]
    range_of_columns(at, rows, n, address_of(scales), address_of(zeros))
    for column in range(n):
        scales[column], zeros[column] = fit_range(scales[column], zeros[column], top_codes[column])
    if job.short:
        round_up(scales, slab[job.scale_at : job.scale_at + n])
    choose_codes(at, rows, n, address_of(scales), address_of(zeros), job.highest, address_of(codes) + first * n)
    term, at = HALF_NBYTES * group * n, address_of(slab)
    if not job.short:
        store_terms(scales, bits, at + job.scale_at + term)
    store_terms(zeros, bits, at + job.zero_at + term)


@inlined
def fit_range(lowest, highest, top_code):  # type: ignore[no-untyped-def]
    """affine.fit of a group: scale and zero."""
    zero = as_half(lowest)
    step = (highest - zero) / top_code
    step = step if step > _ZERO else _ZERO
    return as_scale(step + _HALF_STEP), zero


@inlined
def round_up(scales, slab):  # type: ignore[no-untyped-def]
    """affine.short_fit of float16 scales [n], in place, and their bytes into uint8 [n]."""
    for i in range(scales.size):
        code = min(max((half_bits(scales[i]) + np.int32(127)) >> np.int32(7), np.int32(1)), np.int32(247))
        slab[i] = np.uint8(code)
        scales[i] = half_float(code << np.int32(7))


@inlined
def store_terms(numbers, bits, at):  # type: ignore[no-untyped-def]
    """float16 numbers [n], exact, to an address; bits int32 is room."""
    for i in range(numbers.size):
        bits[i] = half_bits(numbers[i])
    store_halves(address_of(bits), numbers.size, at)


# ---- casts -------------------------------------------------------------------------------------------------------------


@inlined
def seal_cast(job, head, x, bits, slab):  # type: ignore[no-untyped-def]
    """`Cast`. Returns how many numbers were clamped."""
    count = 0
    if job.shared == NONE:
        count = count_beyond(x, job.limit)
    elif job.shared == SLAB:
        scale = floats_at(job.scales, job.scales_count)[head if job.scales_count > 1 else 0]
        count = count_beyond(x, job.limit * scale)
        for i in range(x.size):
            x[i] /= scale
        slab[job.scale_at : job.scale_at + FLOAT_NBYTES].view(np.float32)[0] = scale
    else:
        divide_by_largest(job, x, bits, slab)
    plane = longs_at(job.planes, PLANE_FIELDS)
    kind, out = plane[4], slab[plane[0] : plane[0] + plane[1] * job.rows]
    if kind == E4M3:
        for i in range(x.size):
            out[i] = np.uint8(e4m3_bits(x[i]))
    elif kind == E5M2:
        for i in range(x.size):
            out[i] = np.uint8(e5m2_bits(x[i]))
    elif kind == BFLOAT16:
        halves = out.view(np.uint16)
        for i in range(x.size):
            halves[i] = np.uint16(bfloat16_bits(clamped(x[i], job.limit)))
    elif kind == FLOAT16:
        halves = out.view(np.uint16)
        for i in range(x.size):
            halves[i] = np.uint16(half_bits(x[i]))
    else:
        numbers = out.view(np.float32)
        for i in range(x.size):
            numbers[i] = clamped(x[i], job.limit)
    return count


@inlined
def divide_by_largest(job, x, bits, slab):  # type: ignore[no-untyped-def]
    """x by the scale of each row or column, its largest magnitude by the limit, in bfloat16 (1 instead of 0); scales into the slab."""
    n = job.rows if job.shared == ROW else job.columns
    across, along = (job.columns, 1) if job.shared == ROW else (1, job.columns)
    for i in range(n):
        largest = np.int32(0)
        for j in range(x.size // n):
            largest = max(largest, bits_of(x[i * across + j * along]) & np.int32(0x7FFFFFFF))
        held = bfloat16_bits(float_of(largest) / job.limit)
        bits[i] = held if held > 0 else np.int32(0x3F80)
        scale = float_of(bits[i] << np.int32(16))
        for j in range(x.size // n):
            x[i * across + j * along] /= scale
    store_halves(address_of(bits), n, address_of(slab) + job.scale_at)
