"""Attention of many queries (prefill): packed pages are decoded once for all of them, then attended with full tensor-core tiles. Triton programs.

A packed page that thousands of queries read would be unpacked by every block of them again. Instead `decode_pages` writes a bounded stretch of the
history as float16 into a scratch, and `attend_stretch` goes over it, raw pages included. A longer history comes in several stretches, between
which the softmax's state waits in memory. Nothing dense of the size of the cache ever exists.

    scratch  K float16 [B, HEADS, tokens, DK], V float16 [B, HEADS, DV, tokens]: as in a page, but one stretch wide, and in the values' own domain
    k_base   float32 [B, HEADS, DK]: the last key of the stretch's first page (the first one of a text is unlike all others). It has been taken from
             all keys, so that float16 holds what tells them apart: with a bias of 200 in a channel it could not. Scores lack the product of a query
             with it, one number for all keys. 0 for pages of 16-bit floats.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from kvarto.kernels.triton_levels import decode_level_keys, decode_level_values, within_float16
from kvarto.kernels.triton_slab import low_zero
from kvarto.kernels.triton_spec import (
    bits_of,
    columns_count,
    columns_first,
    columns_second,
    fields_of,
    group_rows_of,
    groups_of,
    has_scale,
    has_table,
    has_zero,
    is_curved,
    is_float,
    kind_of,
    nbytes_of,
    offset_of,
    planes_of,
    term_dtype,
    term_offset,
    term_per,
    weight_of_plane,
)
from kvarto.kernels.triton_tiles import bend, product
from kvarto.kernels.triton_walk import HIDDEN, LOG2E

# ---- packed pages to numbers -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["columns", "first_page", "stretch_pages"])
def decode_pages(
    start, position, pages, table, unrotate, k_scratch, v_scratch, k_base, columns, first_page, stretch_pages,
    k_told, k_told_stride, v_told, v_told_stride, turns, phases,
    K: constexpr, V: constexpr, PAGE_NBYTES: constexpr, PAIR_NBYTES: constexpr, K_NBYTES: constexpr,
    HEADS: constexpr, S: constexpr, DK: constexpr, DV: constexpr, SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr,
    ROTATED: constexpr,
):  # fmt: skip
    """Grid (pages of the stretch, HEADS, B): page first_page + i of each sequence, if one of its queries reads it.

    unrotate   float32 [DV, DV], from the right takes a row of the V tile's domain to the values' own; read only if ROTATED
    k_told ... of sides with a table, as triton_levels.py says, of head 0, and how far those of the next head are; else None
    """
    page = first_page + tl.program_id(0)
    head, sequence = tl.program_id(1), tl.program_id(2)
    tokens = tl.load(start + sequence + 1) - tl.load(start + sequence)
    base = tl.load(position + sequence)
    bottom = base * 0 + SINK
    if SLIDING > 0:
        bottom = tl.maximum(bottom, tl.maximum(base - SLIDING + 1, 0) // S)
    if (tokens == 0) | (page < bottom) | (page >= (base + tokens - 1) // S - WINDOW):
        return
    table += sequence.to(tl.int64) * columns
    slab = pages + tl.load(table + page).to(tl.int64) * PAGE_NBYTES + head * PAIR_NBYTES
    first = tl.maximum(bottom, first_page)
    first_slab = pages + tl.load(table + first).to(tl.int64) * PAGE_NBYTES + head * PAIR_NBYTES
    pair = sequence.to(tl.int64) * HEADS + head
    k_out = k_scratch + (pair * stretch_pages + tl.program_id(0)) * S * DK
    k_base += pair * DK
    if has_table(K):
        decode_level_keys(
            slab, first_slab, k_told + head * k_told_stride, turns, phases, k_out, k_base, page == first, K, S, DK
        )
    else:
        _decode_keys(slab, first_slab, k_out, k_base, page == first, K, S, DK)
    v_out = v_scratch + pair * stretch_pages * S * DV + tl.program_id(0) * S
    if has_table(V):
        decode_level_values(slab + K_NBYTES, v_told + head * v_told_stride, v_out, stretch_pages * S, V, DV, S)
    else:
        _decode_values(slab + K_NBYTES, v_out, unrotate, stretch_pages * S, V, DV, S, ROTATED)


@triton.jit
def _decode_keys(slab, first_slab, out, k_base, is_first, TILE: constexpr, S: constexpr, D: constexpr):
    """Keys less the last row of first_slab to out float16 [S, D]; that row to k_base, if is_first."""
    row = tl.arange(0, triton.next_power_of_2(S))[:, None]
    for field in tl.static_range(fields_of(TILE)):
        column, inside = _columns(field, TILE, D)
        base = _numbers(first_slab, row * 0 + S - 1, column, field, inside & (row >= 0), TILE, S, D)
        if bits_of(TILE, 0) == 16:  # these are float16 numbers as they are; their differences are not
            base = tl.zeros(base.shape, tl.float32)
        numbers = within_float16(_numbers(slab, row, column, field, inside & (row < S), TILE, S, D) - base)
        tl.store(out + row * D + column, numbers.to(tl.float16), mask=inside & (row < S))
        tl.store(k_base + column + row * 0, base, mask=inside & (row == 0) & is_first)


@triton.jit
def _decode_values(
    slab, out, unrotate, row_stride, TILE: constexpr, D: constexpr, S: constexpr, ROTATED: constexpr
):  # fmt: skip
    """Values to out float16 [D, S], rows row_stride apart; ROTATED: the rotation undone first."""
    ROW_PAD: constexpr = triton.next_power_of_2(D)
    row = tl.arange(0, ROW_PAD)[:, None]
    for field in tl.static_range(fields_of(TILE)):
        column, inside = _columns(field, TILE, S)
        inside = inside & (row < D)
        numbers = _numbers(slab, row, column, field, inside, TILE, D, S)
        if ROTATED:
            channel = tl.arange(0, ROW_PAD)
            square = (channel < D)[:, None] & (channel < D)[None, :]
            # The matrix times sqrt(D) holds small numbers, +-1 for Hadamard's: exact in float16.
            root = tl.sqrt_rn(tl.full((), D, tl.float32))
            matrix = tl.load(unrotate + channel[None, :] * D + channel[:, None], mask=square, other=0.0) * root
            total = tl.zeros(numbers.shape, tl.float32)
            numbers = product(matrix.to(tl.float16), numbers.to(tl.float16), total) / root
        tl.store(out + row * row_stride + column, numbers.to(tl.float16), mask=inside)


@triton.jit
def _columns(FIELD: constexpr, TILE: constexpr, COLUMNS: constexpr):
    """(columns of the codes in field FIELD of the first plane's bytes, [1, power of 2]; which of them there are)."""
    WIDTH: constexpr = COLUMNS // fields_of(TILE)
    column = FIELD * WIDTH + tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    return column, column < (FIELD + 1) * WIDTH


@triton.jit
def _numbers(slab, row, column, FIELD: constexpr, inside, TILE: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """Decoded numbers at rows [.., 1] and columns [1, ..] of a tile [ROWS, COLUMNS], float32 within float16's range."""
    numbers = _codes(slab, row, column, FIELD, inside, TILE)
    if is_curved(TILE):
        numbers = bend(numbers, TILE)
    if has_scale(TILE):
        numbers *= _term(slab, row, column, inside, TILE, False, ROWS, COLUMNS)
    if has_zero(TILE):
        numbers += _term(slab, row, column, inside, TILE, True, ROWS, COLUMNS)
    return within_float16(numbers)


@triton.jit
def _codes(slab, row, column, FIELD: constexpr, inside, TILE: constexpr):
    """Float32 codes of all planes at rows [.., 1] and columns [1, ..], those of field FIELD of the first plane."""
    if is_float(TILE):
        if kind_of(TILE, 0) <= 2:
            stored: constexpr = tl.float8e4nv if kind_of(TILE, 0) == 1 else tl.float8e5
        else:
            stored: constexpr = tl.bfloat16 if kind_of(TILE, 0) == 3 else tl.float16
        numbers = (slab + offset_of(TILE, 0)).to(tl.pointer_type(stored))
        codes = tl.load(
            numbers + row * (nbytes_of(TILE, 0) * 8 // bits_of(TILE, 0)) + column, mask=inside, other=0.0
        ).to(tl.float32)
    else:
        byte = column - FIELD * nbytes_of(TILE, 0)
        packed = tl.load(slab + offset_of(TILE, 0) + row * nbytes_of(TILE, 0) + byte, mask=inside, other=0).to(tl.int32)
        total = (packed >> (bits_of(TILE, 0) * FIELD)) & ((1 << bits_of(TILE, 0)) - 1)
        for i in tl.static_range(1, planes_of(TILE)):
            total += _more_bits(slab, row, column, inside, TILE, i)
        codes = total.to(tl.float32)
    return codes


@triton.jit
def _more_bits(slab, row, column, inside, TILE: constexpr, I: constexpr):
    """What plane I, which may stand for some columns only, adds to the codes: int32."""
    count: constexpr = columns_count(TILE, I)
    index = tl.where(
        column >= columns_first(TILE, I) + count,
        column - columns_second(TILE, I) + count,
        column - columns_first(TILE, I),
    )
    fields: constexpr = 8 // bits_of(TILE, I)
    held = inside & (column >= columns_first(TILE, I)) & (index >= 0) & (index < nbytes_of(TILE, I) * fields)
    if columns_second(TILE, I) > 0:
        held = held & ((column < columns_first(TILE, I) + count) | (column >= columns_second(TILE, I)))
    byte = index % nbytes_of(TILE, I)
    packed = tl.load(slab + offset_of(TILE, I) + row * nbytes_of(TILE, I) + byte, mask=held, other=0).to(tl.int32)
    code = (packed >> (bits_of(TILE, I) * (index // nbytes_of(TILE, I)))) & ((1 << bits_of(TILE, I)) - 1)
    return tl.where(held, code * weight_of_plane(TILE, I), 0)


@triton.jit
def _term(slab, row, column, inside, TILE: constexpr, ZERO: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """The scale, or the zero, of each number of a tile, float32."""
    if term_dtype(TILE, ZERO) == "short":
        stored: constexpr = tl.uint8
    elif term_dtype(TILE, ZERO) == "low":
        stored: constexpr = tl.int16
    elif term_dtype(TILE, ZERO) == "float16":
        stored: constexpr = tl.float16
    elif term_dtype(TILE, ZERO) == "bfloat16":
        stored: constexpr = tl.bfloat16
    else:
        stored: constexpr = tl.float32
    numbers = (slab + term_offset(TILE, ZERO)).to(tl.pointer_type(stored))
    if term_per(TILE) == "row":
        at = row + column * 0
    elif term_per(TILE) == "slab":
        at = row * 0 + column * 0
    elif groups_of(TILE) > 1:
        at = row // group_rows_of(TILE, ROWS) * COLUMNS + column
    else:
        at = row * 0 + column
    terms = tl.load(numbers + at, mask=inside, other=0)
    if term_dtype(TILE, ZERO) == "short":
        terms = (terms.to(tl.int16) << 7).to(tl.float16, bitcast=True)
    elif term_dtype(TILE, ZERO) == "low":
        terms = low_zero(terms, TILE)
    return terms.to(tl.float32)


# ---- attention -------------------------------------------------------------------------------------------------------


@triton.jit
def _update(scores, scale, v, acc, top, total, DTYPE: constexpr):
    """One step of the online softmax: scores [M, n], times scale > 0 in powers of two, v [n, DV]. Returns the new (acc, top, total)."""
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    p = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, axis=1)
    return product(p.to(DTYPE), v, acc * shrink[:, None]), new_top, total


@triton.jit
def _scores(q, k, lack, scale, softcap, SOFTCAP: constexpr, M: constexpr, COLUMNS: constexpr):
    """q [M, DK] times k [DK, n], plus `lack` [M]; with SOFTCAP scaled and capped."""
    scores = product(q, k, tl.broadcast_to(lack[:, None], (M, COLUMNS)))
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * 2.0 * LOG2E / softcap))))
    return scores


@triton.jit
def whole_blocks(
    t_low, t_high, first_page, stretch_pages,
    S: constexpr, SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr, N: constexpr,
):  # fmt: skip
    """(low, whole): tokens of a stretch, counted from its first. Rows of tokens t_low to t_high read from low on, and see all of low .. whole - 1.

    whole - low is a multiple of N.
    """
    low = t_low * 0 + SINK
    if SLIDING > 0:
        low = tl.maximum(low, tl.maximum(t_low - SLIDING + 1, 0) // S)
    low = tl.maximum(low - first_page, 0) * S
    whole = low
    if SLIDING == 0:
        high = tl.minimum(t_high // S - WINDOW - first_page, stretch_pages) * S
        whole = tl.minimum(tl.minimum(t_low // S - WINDOW - first_page, stretch_pages) * S, high)
    return low, low + tl.maximum(whole - low, 0) // N * N


@triton.jit(do_not_specialize=["raw_columns", "first_page", "stretch_pages"])
def attend_stretch(
    q_raw, q_packed, start, position, raw_pages, raw_table, k_scratch, v_scratch, k_base, sinks, state, out, lse,
    q_raw_stride_t, q_raw_stride_h, q_packed_stride_t, q_packed_stride_h, raw_columns, first_page, stretch_pages, scale, softcap,
    RAW_BFLOAT16: constexpr, RAW_PAGE_NBYTES: constexpr, RAW_PAIR_NBYTES: constexpr, RAW_K_NBYTES: constexpr,
    HEADS: constexpr, R: constexpr, S: constexpr, DK: constexpr, DV: constexpr, M: constexpr, N: constexpr,
    SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr, SOFTCAP: constexpr,
    HAS_RAW: constexpr, HAS_PACKED: constexpr, HAS_SINKS: constexpr, FIRST: constexpr, LAST: constexpr, WHOLE_DONE: constexpr,
):  # fmt: skip
    """Grid (blocks of M query rows, HEADS, B): the rows attend to raw pages (if FIRST) and to a stretch of packed ones.

    q_*      [T, Hq, DK], in the dtype of the raw pages and in the packed tile's domain; strides in elements
    state    float32 [T, Hq, DV + 2]: sums, maximum and sum of weights between stretches; with WHOLE_DONE those of this one's whole blocks are in it
    scale    of the scores, positive
    out, lse [T, Hq, DV] and float32 [T, Hq] (natural logarithm), written if LAST; 0 and -inf where nothing was seen
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin = tl.load(start + sequence)
    count = (tl.load(start + sequence + 1) - begin) * R
    first_row = tl.program_id(0) * M
    if first_row >= count:
        return
    rows = first_row + tl.arange(0, M)
    row = tl.minimum(rows, count - 1)
    base = tl.load(position + sequence)
    t = base + row // R
    t_low, t_high = base + first_row // R, base + tl.minimum(first_row + M - 1, count - 1) // R
    token = (begin + row // R).to(tl.int64)
    query_head = (head * R + row % R).to(tl.int64)
    DK_PAD: constexpr = triton.next_power_of_2(DK)
    DV_PAD: constexpr = triton.next_power_of_2(DV)
    kc, vc = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    at = (token * (HEADS * R) + query_head) * (DV + 2)
    gain = scale * LOG2E
    if SOFTCAP:
        gain = scale * 0.0 + LOG2E
    if FIRST and not WHOLE_DONE:
        acc = tl.zeros((M, DV_PAD), tl.float32)
        top = tl.full((M,), HIDDEN, tl.float32)  # finite, so that a row that has seen nothing gets p = 0
        total = tl.zeros((M,), tl.float32)
    else:
        acc = tl.load(state + at[:, None] + vc[None, :], mask=(vc < DV)[None, :], other=0.0)
        top = tl.load(state + at + DV)
        total = tl.load(state + at + DV + 1)

    if HAS_RAW and FIRST:
        dtype: constexpr = tl.bfloat16 if RAW_BFLOAT16 else tl.float16
        q_at = token * q_raw_stride_t + query_head * q_raw_stride_h
        q = tl.load(q_raw + q_at[:, None] + kc[None, :], mask=(kc < DK)[None, :], other=0.0).to(dtype)
        sink_pages = tl.minimum(t_high // S + 1, SINK)
        recent = tl.maximum(sink_pages, t_low // S - WINDOW)
        slot = tl.arange(0, S)
        lack = tl.zeros((M,), tl.float32)
        for i in range(sink_pages + t_high // S + 1 - recent):
            page = tl.where(i < sink_pages, i, i - sink_pages + recent)
            held = tl.load(raw_table + sequence.to(tl.int64) * raw_columns + page)
            inside = (page * S + slot <= t_high) & (held >= 0)  # others may hold anything
            pair = raw_pages + tl.maximum(held, 0).to(tl.int64) * RAW_PAGE_NBYTES + head * RAW_PAIR_NBYTES
            k = pair.to(tl.pointer_type(dtype)) + slot[None, :] * DK + kc[:, None]
            v = (pair + RAW_K_NBYTES).to(tl.pointer_type(dtype)) + vc[None, :] * S + slot[:, None]
            k = tl.load(k, mask=(kc < DK)[:, None] & inside[None, :], other=0.0)
            v = tl.load(v, mask=(vc < DV)[None, :] & inside[:, None], other=0.0)
            key = page * S + slot[None, :]
            seen = ((page < SINK) | (page >= t // S - WINDOW))[:, None] & (key <= t[:, None]) & inside[None, :]
            if SLIDING > 0:
                seen = seen & (key > t[:, None] - SLIDING)
            scores = tl.where(seen, _scores(q, k, lack, scale, softcap, SOFTCAP, M, S), float("-inf"))
            acc, top, total = _update(scores, gain, v, acc, top, total, dtype)

    if HAS_PACKED:
        q_at = token * q_packed_stride_t + query_head * q_packed_stride_h
        q = tl.load(q_packed + q_at[:, None] + kc[None, :], mask=(kc < DK)[None, :], other=0.0).to(tl.float16)
        pair = (sequence.to(tl.int64) * HEADS + head) * stretch_pages * S
        k_pair = k_scratch + pair * DK
        v_pair = v_scratch + pair * DV
        low, whole = whole_blocks(t_low, t_high, first_page, stretch_pages, S, SINK, WINDOW, SLIDING, N)
        high = tl.minimum(t_high // S - WINDOW - first_page, stretch_pages) * S
        if WHOLE_DONE:
            low = whole
        base_at = k_base + (sequence.to(tl.int64) * HEADS + head) * DK + kc
        lack = tl.sum(q.to(tl.float32) * tl.load(base_at, mask=(kc < DK) & (low < high), other=0.0)[None, :], axis=1)
        key = tl.arange(0, N)
        for i in range(low, whole, N):
            k = tl.load(k_pair + (i + key)[None, :] * DK + kc[:, None], mask=(kc < DK)[:, None], other=0.0)
            v = tl.load(
                v_pair + vc[None, :] * (stretch_pages * S) + (i + key)[:, None], mask=(vc < DV)[None, :], other=0.0
            )
            acc, top, total = _update(
                _scores(q, k, lack, scale, softcap, SOFTCAP, M, N), gain, v, acc, top, total, tl.float16
            )
        for i in range(whole, high, N):
            inside = i + key < high
            k = tl.load(
                k_pair + (i + key)[None, :] * DK + kc[:, None], mask=(kc < DK)[:, None] & inside[None, :], other=0.0
            )
            v = tl.load(
                v_pair + vc[None, :] * (stretch_pages * S) + (i + key)[:, None],
                mask=(vc < DV)[None, :] & inside[:, None],
                other=0.0,
            )
            place = first_page * S + i + key[None, :]
            seen = (place // S < (t // S - WINDOW)[:, None]) & inside[None, :]
            if SLIDING > 0:
                seen = seen & (place > t[:, None] - SLIDING)
            scores = tl.where(seen, _scores(q, k, lack, scale, softcap, SOFTCAP, M, N), float("-inf"))
            acc, top, total = _update(scores, gain, v, acc, top, total, tl.float16)

    if LAST:
        if HAS_SINKS:
            sink = tl.load(sinks + query_head).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            acc = acc * shrink[:, None]
            total = total * shrink + tl.exp2(sink - new_top)
            top = new_top
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(
            out + ((token * (HEADS * R) + query_head) * DV)[:, None] + vc[None, :],
            result.to(out.dtype.element_ty),
            mask=(rows < count)[:, None] & (vc < DV)[None, :],
        )
        log = tl.where(total == 0, float("-inf"), (top + tl.log2(tl.where(total == 0, 1.0, total))) / LOG2E)
        tl.store(lse + token * (HEADS * R) + query_head, log, mask=rows < count)
    else:
        tl.store(state + at[:, None] + vc[None, :], acc, mask=(rows < count)[:, None] & (vc < DV)[None, :])
        tl.store(state + at + DV, top, mask=rows < count)
        tl.store(state + at + DV + 1, total, mask=rows < count)
