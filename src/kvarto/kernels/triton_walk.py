"""Attention of up to N query rows of one KV head to a run of pages, packed or raw, by one warp. Triton functions; triton_decode.py calls `walk`.

Scores are K q^T with tokens as the rows, so that unpacked keys are the register operand and N query rows the narrow side; values are stored
channel-major, so that V^T p has channels as the rows. The terms of the affine tile stay outside the products:

    K  column scale (of channels)   into q, for each page             V  column scale (of tokens)   into p
       column zero                  q . zero, one more product           column zero                sum of p * zero, one number a row
       row scale, row zero          after the product

Codes that stand for levels on a curve (TurboQuant) are read as levels, five more instructions for two numbers, all planes at once.
Where several groups of channels have terms of their own (KIVI), values are decoded to float16 instead, two more instructions for two numbers.
q is brought to magnitudes of at most 1/2 and p times its scale to at most 2^12, so that all of these are safe in float16; the powers of two are
undone in float32. A side is described by a constant, its Tile (triton_spec.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from kvarto.kernels.triton_columns import by_column, to_codes, to_fragment_order, token_weights, weight_of
from kvarto.kernels.triton_shared import block, copy, landed
from kvarto.kernels.triton_slab import load_columns_of, load_groups, load_terms
from kvarto.kernels.triton_spec import (
    BFLOAT16,
    FLOAT16,
    bits_of,
    first_part,
    group_rows_of,
    groups_of,
    has_scale,
    has_zero,
    is_curved,
    is_weighted,
    kind_of,
    nbytes_of,
    operands_of,
    planes_of,
    term_per,
    unit_of,
    weight_of_plane,
    width_of,
    words_of,
)
from kvarto.kernels.triton_tiles import product, unpack, unpack_curved, unpack_exact

P_LIMIT = tl.constexpr(4096.0)
LOG2E = tl.constexpr(1.4426950408889634)
HIDDEN = tl.constexpr(-1e30)


# ---- queries ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load_queries(pointers, N: constexpr, TILE: constexpr, NUMBERS: constexpr):
    """pointers [N, 1] to query rows. (q in fragment order, at most 1/2, a flat tuple; what it was divided by and its sums, float32 [N])."""
    parts = load_columns_of(pointers, N, TILE, NUMBERS, planes_of(TILE))
    top = tl.full((N,), 1e-30, tl.float32)
    for i in tl.static_range(first_part(TILE, 1)):
        top = tl.maximum(top, tl.max(tl.abs(parts[i].to(tl.float32)), axis=1))
    factor = tl.exp2(tl.ceil(tl.log2(top)) + 1)
    total = tl.zeros((N,), tl.float32)
    scaled = ()
    for i in tl.static_range(first_part(TILE, planes_of(TILE))):
        part = parts[i].to(tl.float32) / factor[:, None]
        if kind_of(TILE, 0) == BFLOAT16:
            part = part.to(tl.bfloat16)
        else:
            part = part.to(tl.float16)
        if i < first_part(TILE, 1):
            total += tl.sum(part.to(tl.float32), axis=1)
        scaled = scaled + (part,)
    return scaled, factor, total


@triton.jit
def _repeat(tile, N: constexpr, COLUMNS: constexpr):
    """[8, COLUMNS] with equal rows as [N, COLUMNS]."""
    if N > 8:
        tile = tl.broadcast_to(tile[None, :, :], (N // 8, 8, COLUMNS)).reshape(N, COLUMNS)
    return tile


# ---- one page --------------------------------------------------------------------------------------------------------


@triton.jit
def _operand(words, AT: constexpr, I: constexpr, ROWS: constexpr, TILE: constexpr):
    """words[AT], of plane I, unpacked: codes, or levels on a curve, of which the plane after it holds more bits, if there is one."""
    if is_curved(TILE):
        HIGH: constexpr = 1 if planes_of(TILE) == 2 else AT
        tile = unpack_curved(words[AT], words[HIGH], ROWS, words_of(TILE, I), TILE)
    else:
        tile = unpack(words[AT], ROWS, words_of(TILE, I), kind_of(TILE, I), bits_of(TILE, I))
    return tile


@triton.jit
def _product(
    scores, words, part, scales, AT: constexpr, I: constexpr, ROWS: constexpr, TILE: constexpr, N: constexpr,
    SCALED: constexpr,
):  # fmt: skip
    """scores [ROWS, N] plus the product of words[AT], one segment of plane I, with its part of q [* scales]."""
    W: constexpr = words_of(TILE, I)
    COLUMNS: constexpr = width_of(TILE, I)
    if SCALED:
        part = part * _repeat(scales, N, COLUMNS)
    part = to_codes(part, N, COLUMNS, W, bits_of(TILE, I))
    if is_weighted(TILE, I):
        weight = weight_of(tl.arange(0, COLUMNS), W, bits_of(TILE, I)) * weight_of_plane(TILE, I)
        part = part * weight[None, :].to(tl.float16)
    return product(_operand(words, AT, I, ROWS, TILE), by_column(part, N, COLUMNS), scores)


@triton.jit
def _products(words, q, terms, GROUP: constexpr, ROWS: constexpr, TILE: constexpr, N: constexpr, SCALED: constexpr):  # fmt: skip
    """Sum over planes and segments of unpacked codes or levels . q [* scales]: float32 [ROWS, N]; times `unit_of` it is that of the codes."""
    ALL: constexpr = first_part(TILE, planes_of(TILE))
    scores = tl.zeros((ROWS, N), tl.float32)
    for i in tl.static_range(operands_of(TILE)):
        for at in tl.static_range(first_part(TILE, i), first_part(TILE, i + 1)):
            if SCALED:
                scales = terms[GROUP * 2 * ALL + at]
            else:
                scales = q[at]
            scores = _product(scores, words, q[at], scales, GROUP * ALL + at, i, ROWS, TILE, N, SCALED)
    return scores


@triton.jit
def _zeros_dot(terms, q, GROUP: constexpr, TILE: constexpr, N: constexpr):
    """Sum over channels of zero * q: float32 [16, N], rows alike. The zeros are those of the first plane, which has all channels."""
    COLUMNS: constexpr = width_of(TILE, 0)
    FIRST: constexpr = (2 * GROUP + 1) * first_part(TILE, planes_of(TILE))
    bias = tl.zeros((16, N), tl.float32)
    for at in tl.static_range(first_part(TILE, 1)):
        bias = product(_repeat(terms[FIRST + at], 16, COLUMNS), by_column(q[at], N, COLUMNS), bias)
    return bias


@triton.jit
def _group_scores(words, terms, q, q_sum, gain, GROUP: constexpr, TILE: constexpr, S: constexpr, N: constexpr):  # fmt: skip
    """Scores of one group of tokens times gain [N], float32 [S / groups, N]."""
    ROWS: constexpr = S // groups_of(TILE)
    code_gain = (gain * unit_of(TILE))[None, :]
    if term_per(TILE) == "column":
        scores = _products(words, q, terms, GROUP, ROWS, TILE, N, True)
        bias = _zeros_dot(terms, q, GROUP, TILE, N) * gain[None, :]
        scores = (scores * code_gain).reshape(ROWS // 16, 16, N) + bias[None, :, :]
        scores = scores.reshape(ROWS, N)
    else:
        scores = _products(words, q, terms, GROUP, ROWS, TILE, N, False) * code_gain
        if has_scale(TILE):
            scores *= terms[0]
        if has_zero(TILE):
            scores += terms[1] * (q_sum * gain)[None, :]
    return scores


@triton.jit
def _page_scores(words, terms, q, q_sum, gain, TILE: constexpr, S: constexpr, N: constexpr):  # fmt: skip
    """Scores of a page times gain [N], float32 [S, N]."""
    scores = _group_scores(words, terms, q, q_sum, gain, 0, TILE, S, N)
    if groups_of(TILE) == 2:
        second = _group_scores(words, terms, q, q_sum, gain, 1, TILE, S, N)
        scores = tl.join(scores, second).permute(2, 0, 1).reshape(S, N)
    return scores


@triton.jit
def _page_values(acc, words, p, ROWS: constexpr, TILE: constexpr, N: constexpr):
    """acc float32 [ROWS, N] plus V^T p; p float32 [S, N], scale included."""
    for i in tl.static_range(operands_of(TILE)):
        for at in tl.static_range(first_part(TILE, i), first_part(TILE, i + 1)):
            acc = _values(acc, words, p, at, i, at - first_part(TILE, i), ROWS, TILE, N)
    return acc


@triton.jit
def _values(acc, words, p, AT: constexpr, I: constexpr, SEG: constexpr, ROWS: constexpr, TILE: constexpr, N: constexpr):  # fmt: skip
    """`_page_values` for words[AT], one segment of plane I."""
    W: constexpr = words_of(TILE, I)
    tile = _operand(words, AT, I, ROWS, TILE)
    part = to_fragment_order(p, N, SEG, nbytes_of(TILE, I), W, bits_of(TILE, I))
    if is_weighted(TILE, I) & (planes_of(TILE) > 1):
        weight = weight_of(tl.arange(0, width_of(TILE, I)), W, bits_of(TILE, I)) * weight_of_plane(TILE, I)
        part *= weight[:, None]
    return product(tile, part.to(tile.dtype), acc)


@triton.jit
def _grouped_values(acc, words, terms, p, GROUP: constexpr, ROWS: constexpr, TILE: constexpr, N: constexpr):  # fmt: skip
    """acc float32 [ROWS, N] plus V^T p for one of several groups of channels. Each has terms of its own, so values are decoded in registers."""
    ALL: constexpr = first_part(TILE, planes_of(TILE))
    for i in tl.static_range(planes_of(TILE)):
        for at in tl.static_range(first_part(TILE, i), first_part(TILE, i + 1)):
            codes, scales, zeros = (
                words[GROUP * ALL + at],
                terms[GROUP * 2 * ALL + at],
                terms[(GROUP * 2 + 1) * ALL + at],
            )
            acc = _decoded_values(acc, codes, scales, zeros, p, i, at - first_part(TILE, i), ROWS, TILE, N)
    return acc


@triton.jit
def _decoded_values(acc, words, scales, zeros, p, I: constexpr, SEG: constexpr, ROWS: constexpr, TILE: constexpr, N: constexpr):  # fmt: skip
    """`_grouped_values` for one segment of plane I."""
    W: constexpr = words_of(TILE, I)
    WIDTH: constexpr = width_of(TILE, I)
    codes = unpack_exact(words, ROWS, W, bits_of(TILE, I)).reshape(ROWS // 8, 8, WIDTH)
    scales = to_codes(scales, 8, WIDTH, W, bits_of(TILE, I))
    values = codes * (scales * weight_of_plane(TILE, I))[None, :, :]
    if I == 0:
        values += to_codes(zeros, 8, WIDTH, W, bits_of(TILE, I))[None, :, :]
    part = to_fragment_order(p, N, SEG, nbytes_of(TILE, I), W, bits_of(TILE, I))
    return product(values.reshape(ROWS, WIDTH), part.to(tl.float16), acc)


# ---- a run of pages --------------------------------------------------------------------------------------------------


@triton.jit
def walk(pages, table, first, end, q_pointers, t, t_low, t_high, scale, softcap,
          K: constexpr, V: constexpr, PAGE_NBYTES: constexpr, K_NBYTES: constexpr, V_NBYTES: constexpr,
          S: constexpr, DK: constexpr, DV: constexpr, N: constexpr, Q_BFLOAT16: constexpr,
          WINDOW: constexpr, SLIDING: constexpr, SOFTCAP: constexpr, AHEAD: constexpr):  # fmt: skip
    """Attend to pages first .. end - 1 of a sequence, all of which it holds packed.

    pages    uint8 pointer to the pair of this head in page 0; table int32 pointer to this sequence's row
    t        int32 [N]: the token that each query row is; t_low and t_high the first and last of them
    scale    of the scores, times log2(e) unless SOFTCAP

    Returns (sums over V: a tuple of float32 [rows, N], one for each group of channels; their factor, float32 []; sums of p * zero, float32 [N];
    maximum and sum of the softmax, float32 [N], in powers of two).
    """
    V_GROUPS: constexpr = groups_of(V)
    ROWS: constexpr = group_rows_of(V, DV)
    next_held = tl.load(table + first)
    if AHEAD:
        k_room = block(K_NBYTES + V_NBYTES)
        v_room = k_room + K_NBYTES
        k_barrier = v_room + V_NBYTES
        v_barrier = k_barrier + 8
        slab = pages + next_held.to(tl.int64) * PAGE_NBYTES
        copy(slab, k_room, k_barrier, K_NBYTES)
        copy(slab + K_NBYTES, v_room, v_barrier, V_NBYTES)
    q, factor, q_sum = _load_queries(
        q_pointers.to(tl.pointer_type(tl.int16)), N, K, BFLOAT16 if Q_BFLOAT16 else FLOAT16
    )
    gain = factor * scale
    GROUPED: constexpr = V_GROUPS > 1
    acc = ()
    for g in tl.static_range(V_GROUPS):
        acc = acc + (tl.zeros((ROWS, N), tl.float32),)
    zero_sum = tl.zeros((8, N), tl.float32)  # sums over every eighth token: the lanes of a warp are added up at the end
    top_scale = tl.full((), 1e-30, tl.float32)
    top = tl.full((N,), HIDDEN / 2, tl.float32)  # above HIDDEN, so that a row that has seen nothing gets p = 0
    total = tl.zeros((8, N), tl.float32)
    slot = tl.arange(0, S)
    # AHEAD: wait for the keys, use them, begin to copy the next page's; then the same with the values.
    for page in range(first, end):
        if not AHEAD:
            k_at = pages + next_held.to(tl.int64) * PAGE_NBYTES
            v_at = k_at + K_NBYTES
        next_held = tl.load(table + tl.minimum(page + 1, end - 1))  # here before it is needed
        if AHEAD:
            k_at = landed(k_room, k_barrier, (page - first) & 1)
        k_words = load_groups(k_at, K, S // groups_of(K), S)
        k_terms = load_terms(k_at, K, DK, S, N, term_per(K) == "column")
        if not AHEAD:  # all loads of a page before the first use
            v_words = load_groups(v_at, V, ROWS, DV)
            if not GROUPED:
                v_terms = load_terms(v_at, V, S, S, N, False)
        scores = _page_scores(k_words, k_terms, q, q_sum, gain, K, S, N)
        if AHEAD:
            slab = pages + next_held.to(tl.int64) * PAGE_NBYTES
            if page + 1 < end:
                copy(slab, k_room, k_barrier, K_NBYTES)
            v_at = landed(v_room, v_barrier, (page - first) & 1)
            v_words = load_groups(v_at, V, ROWS, DV)
            if not GROUPED:
                v_terms = load_terms(v_at, V, S, S, N, False)
        if GROUPED:  # so many that they take the registers of the keys
            v_terms = load_terms(v_at, V, S, S, N, True)
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)); the argument of exp2 is 2 x log2(e)
            scores = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E / softcap))))
        partly = page >= t_low // S - WINDOW
        if SLIDING > 0:
            partly = partly | (page * S <= t_high - SLIDING)
        if partly:
            token = page * S + slot[:, None]
            seen = (page < t // S - WINDOW)[None, :] & (token >= 0)
            if SLIDING > 0:
                seen = seen & (token > t[None, :] - SLIDING)
            scores = tl.where(seen, scores, HIDDEN)
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        p = tl.exp2(scores - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink[None, :] + tl.sum(p.reshape(S // 8, 8, N), axis=0)
        new_acc = ()
        if GROUPED:
            for g in tl.static_range(V_GROUPS):
                new_acc = new_acc + (
                    _grouped_values(acc[g] * shrink[None, :], v_words, v_terms, p * P_LIMIT, g, ROWS, V, N),
                )
        else:
            weighted = p * P_LIMIT
            if has_zero(V):
                zeros = (p * v_terms[1]).reshape(S // 8, 8, N)
                zero_sum = zero_sum * shrink[None, :] + tl.sum(zeros, axis=0)
            if has_scale(V):
                scales = v_terms[0]
                largest = tl.maximum(top_scale, v_terms[2 if has_zero(V) else 1])
                shrink = shrink * (top_scale / largest)
                top_scale = largest
                if (planes_of(V) == 1) & (not is_curved(V)):
                    scales *= token_weights(S, nbytes_of(V, 0), bits_of(V, 0))[:, None]
                weighted = p * (scales * (P_LIMIT / largest))
            new_acc = new_acc + (_page_values(acc[0] * shrink[None, :], v_words, weighted, ROWS, V, N),)
        if AHEAD and page + 1 < end:
            copy(slab + K_NBYTES, v_room, v_barrier, V_NBYTES)
        acc = new_acc
    return acc, top_scale, tl.sum(zero_sum, axis=0), top, tl.sum(total, axis=0)


@triton.jit
def store(acc, top_scale, zero_sum, top, total, out, lse, N: constexpr, count, V: constexpr, DV: constexpr):  # fmt: skip
    """Write a partial: out float32 [count, DV] normalised, lse float32 [count] in powers of two."""
    V_GROUPS: constexpr = groups_of(V)
    ROWS: constexpr = group_rows_of(V, DV)
    row = tl.arange(0, N)
    share = 1.0 / tl.where(total == 0, 1.0, total)  # NaN stays NaN
    for g in tl.static_range(V_GROUPS):
        if V_GROUPS > 1:
            result = acc[g] * (1.0 / P_LIMIT)
        else:
            result = acc[g] * (unit_of(V) / P_LIMIT)
            if has_scale(V):
                result = result * top_scale
            if has_zero(V):
                result = result + zero_sum[None, :]
        channel = g * ROWS + tl.arange(0, ROWS)
        tl.store(
            out + row[None, :] * DV + channel[:, None],
            result * share[None, :],
            mask=(row[None, :] < count) & (channel[:, None] < DV),
        )
    tl.store(
        lse + row,
        tl.where(total == 0, float("-inf"), top + tl.log2(tl.where(total == 0, 1.0, total))),
        mask=row < count,
    )
