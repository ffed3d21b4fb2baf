"""Slabs whose levels stand in a table (`kvarto.tile.Table`: KVQuant): decoded for many queries, read page by page for few. Triton functions.

Codes are looked up one by one in a head's levels, one line of the first-level cache; slots are added where the channel is theirs; keys are turned by
RoPE. The turn of slot s of a page at place p is cut at the page's middle m = p + S / 2, so that only r / 2 angles are worked out for a page:

    turn by (p + s) angle  =  turn by (s - S / 2) angle, from a table that all pages share,  after  turn by m angle

For few queries (`walk_levels`) the second is not done to the keys but undone on the queries, in float32. Keys are then turned by half a page at most:
a channel that turns slowly keeps its middle, however far the page is. That is taken from it, so float16 holds what tells keys apart; and since what
is encoded is within a quarter of float16's range, it holds that. m angle is a product of whole numbers that wraps at a full turn, however far m is.

    told    float32 of the head: levels; of keys also zeros [D], scales [D], what is taken from keys in the frame of the page's middle [D]
    turns   int64 [pairs]: angles as parts of a full turn, 2^-64 of it
    phases  float32 [2, S, pairs]: cosines and sines of (s - S / 2) angle                        (triton_arguments.py makes the three)
"""

from __future__ import annotations

from math import factorial, tau

import triton
import triton.language as tl
from triton.language import constexpr

from kvarto.kernels.triton_spec import (
    bits_of,
    code_bits_of,
    group_rows_of,
    nbytes_of,
    offset_of,
    padded,
    pairs_of,
    place_offset,
    planes_of,
    slot_offset,
    slots_of,
    term_offset,
    weight_of_plane,
)
from kvarto.kernels.triton_tiles import product
from kvarto.kernels.triton_walk import HIDDEN, LOG2E, P_LIMIT

_FLOAT16_MAX = constexpr(65504.0)
_TURN = constexpr(2.0**-32)
_SINE_1, _SINE_3, _SINE_5, _SINE_7, _SINE_9, _SINE_11 = (
    constexpr((-1) ** (i // 2) * tau**i / factorial(i)) for i in (1, 3, 5, 7, 9, 11)
)


# ---- a slab as numbers -----------------------------------------------------------------------------------------------


@triton.jit
def _levels(slab, told, row, column, inside, TILE: constexpr):
    """The levels that codes at rows [.., 1] and columns [1, ..] stand for, float32; any where not `inside`."""
    code = tl.zeros((row + column).shape, tl.int32)
    for i in tl.static_range(planes_of(TILE)):
        byte, field = column % nbytes_of(TILE, i), column // nbytes_of(TILE, i)
        packed = tl.load(slab + offset_of(TILE, i) + row * nbytes_of(TILE, i) + byte, mask=inside, other=0).to(tl.int32)
        code += ((packed >> (field * bits_of(TILE, i))) & ((1 << bits_of(TILE, i)) - 1)) * weight_of_plane(TILE, i)
    return tl.load(told + code)


@triton.jit
def _with_slots(numbers, slab, token, channel, TILE: constexpr, S: constexpr):
    """numbers plus what slots add; tokens and channels [.., 1] and [1, ..], or the other way round. No slot has channel -1."""
    for j in tl.static_range(slots_of(TILE)):
        added = tl.load((slab + slot_offset(TILE, False)).to(tl.pointer_type(tl.float16)) + j * S + token)
        held = tl.load(slab + slot_offset(TILE, True) + j * S + token).to(tl.int32)
        numbers += tl.where(held == channel, added.to(tl.float32), 0.0)
    return numbers


@triton.jit
def _keys(slab, told, token, FIRST: constexpr, COUNT: constexpr, TILE: constexpr, S: constexpr, D: constexpr):
    """Channels FIRST .. of keys before RoPE, of tokens [.., 1]: float32 [.., padded(COUNT)], 0 beyond COUNT."""
    channel = FIRST + tl.arange(0, padded(COUNT))[None, :]
    inside = channel < FIRST + COUNT
    zeros = told + (1 << code_bits_of(TILE)) + channel
    scale, zero = tl.load(zeros + D, mask=inside, other=0.0), tl.load(zeros, mask=inside, other=0.0)
    numbers = _levels(slab, told, token, channel, inside & (token >= 0), TILE) * scale + zero
    return _with_slots(numbers, slab, token, tl.where(inside, channel, -1), TILE, S)


@triton.jit
def _values(slab, told, channel, token, inside, TILE: constexpr, S: constexpr):
    """Values at channels [.., 1] and tokens [1, ..], float32; any where not `inside`."""
    terms = slab.to(tl.pointer_type(tl.float16)) + token
    scale, zero = tl.load(terms + term_offset(TILE, False) // 2), tl.load(terms + term_offset(TILE, True) // 2)
    numbers = _levels(slab, told, channel, token, inside, TILE) * scale.to(tl.float32) + zero.to(tl.float32)
    return _with_slots(numbers, slab, token, channel, TILE, S)


@triton.jit
def _page_turn(slab, turns, pair, TILE: constexpr, S: constexpr):
    """(cosines, sines) of the angles of the middle of a slab's page, float32 of the shape of `pair`; any beyond the last pair."""
    place = tl.load((slab + place_offset(TILE)).to(tl.pointer_type(tl.int32))).to(tl.int64) + S // 2
    turn = tl.load(turns + pair, mask=pair < pairs_of(TILE), other=0) * place
    part = (turn >> 32).to(tl.int32).to(tl.float32) * _TURN  # -0.5 .. 0.5
    folded = tl.where(part > 0.25, 0.5 - part, tl.where(part < -0.25, -0.5 - part, part))
    return _sine(0.25 - tl.abs(part)), _sine(folded)


@triton.jit
def _sine(part):
    """Of -1/4 .. 1/4 turns, by the series, off by 2e-7: the library's sine looks for larger angles in every thread."""
    square = part * part
    total = square * _SINE_11 + _SINE_9
    total = total * square + _SINE_7
    total = total * square + _SINE_5
    total = total * square + _SINE_3
    return (total * square + _SINE_1) * part


@triton.jit
def _slot_turn(phases, token, TILE: constexpr, S: constexpr):
    """(cosines, sines) of tokens [.., 1] from the middle of their page: float32 [.., padded], 0 beyond the last pair."""
    pair = tl.arange(0, padded(pairs_of(TILE)))[None, :]
    at, inside = phases + token * pairs_of(TILE) + pair, (pair < pairs_of(TILE)) & (token >= 0)
    cos = tl.load(at, mask=inside, other=0.0)
    return cos, tl.load(at + S * pairs_of(TILE), mask=inside, other=0.0)


@triton.jit
def _turned(a, b, cos, sin):
    """(a, b) turned."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def within_float16(numbers):
    """Drawn to the ends of its range."""
    return tl.minimum(tl.maximum(numbers, -_FLOAT16_MAX), _FLOAT16_MAX)


# ---- to scratch, for many queries ------------------------------------------------------------------------------------


@triton.jit
def _turned_keys(slab, told, turns, phases, token, TILE: constexpr, S: constexpr, D: constexpr):
    """(a, b) of keys of tokens [.., 1], after RoPE: the channels 0 .. pairs - 1 and pairs .. 2 pairs - 1."""
    PAIRS: constexpr = pairs_of(TILE)
    cos, sin = _page_turn(slab, turns, tl.arange(0, padded(PAIRS))[None, :], TILE, S)
    slot_cos, slot_sin = _slot_turn(phases, token, TILE, S)
    cos, sin = _turned(cos, sin, slot_cos, slot_sin)
    a, b = _keys(slab, told, token, 0, PAIRS, TILE, S, D), _keys(slab, told, token, PAIRS, PAIRS, TILE, S, D)
    return _turned(a, b, cos, sin)


@triton.jit
def _store_keys(
    numbers, base, out, k_base, token, is_first, FIRST: constexpr, COUNT: constexpr, D: constexpr
):  # fmt: skip
    """numbers less base to channels FIRST .. of out, and base, if is_first, to k_base."""
    channel = tl.arange(0, padded(COUNT))[None, :]
    base = within_float16(base)
    numbers = within_float16(within_float16(numbers) - base)
    tl.store(out + token * D + FIRST + channel, numbers.to(tl.float16), mask=(channel < COUNT) & (token >= 0))
    tl.store(k_base + FIRST + channel, base, mask=(channel < COUNT) & is_first)


@triton.jit
def decode_level_keys(
    slab, first_slab, told, turns, phases, out, k_base, is_first, TILE: constexpr, S: constexpr, D: constexpr
):  # fmt: skip
    """Keys less the last row of first_slab to out float16 [S, D]; that row to k_base, if is_first."""
    token, last = tl.arange(0, S)[:, None], tl.full((1, 1), S - 1, tl.int32)
    PAIRS: constexpr = pairs_of(TILE)
    if PAIRS > 0:
        base_a, base_b = _turned_keys(first_slab, told, turns, phases, last, TILE, S, D)
        a, b = _turned_keys(slab, told, turns, phases, token, TILE, S, D)
        _store_keys(a, base_a, out, k_base, token, is_first, 0, PAIRS, D)
        _store_keys(b, base_b, out, k_base, token, is_first, PAIRS, PAIRS, D)
    if D > 2 * PAIRS:
        base = _keys(first_slab, told, last, 2 * PAIRS, D - 2 * PAIRS, TILE, S, D)
        rest = _keys(slab, told, token, 2 * PAIRS, D - 2 * PAIRS, TILE, S, D)
        _store_keys(rest, base, out, k_base, token, is_first, 2 * PAIRS, D - 2 * PAIRS, D)


@triton.jit
def decode_level_values(slab, told, out, row_stride, TILE: constexpr, D: constexpr, S: constexpr):
    """Values to out float16 [D, S], rows row_stride apart."""
    channel, token = tl.arange(0, triton.next_power_of_2(D))[:, None], tl.arange(0, S)[None, :]
    inside = (channel < D) & (token >= 0)
    numbers = within_float16(_values(slab, told, channel, token, inside, TILE, S))
    tl.store(out + channel * row_stride + token, numbers.to(tl.float16), mask=inside)


# ---- a run of pages, for few queries ---------------------------------------------------------------------------------


@triton.jit
def _queries(pointers, FIRST: constexpr, COUNT: constexpr):
    """Channels FIRST .. of query rows at pointers [1, N]: float32 [padded(COUNT), N], 0 beyond COUNT."""
    channel = tl.arange(0, padded(COUNT))[:, None]
    return tl.load(pointers + FIRST + channel, mask=channel < COUNT, other=0.0).to(tl.float32)


@triton.jit
def _taken(told, FIRST: constexpr, COUNT: constexpr, TILE: constexpr, D: constexpr):
    """What is taken from keys in the frame of their page's middle: float32 [padded(COUNT)]."""
    channel = tl.arange(0, padded(COUNT))
    return tl.load(told + (1 << code_bits_of(TILE)) + 2 * D + FIRST + channel, mask=channel < COUNT, other=0.0)


@triton.jit
def _add_scores(scores, q, keys, taken):
    """scores [S, N] plus keys [S, channels], less `taken` [channels], times q [channels, N]."""
    return product((keys - taken[None, :]).to(tl.float16), q.to(tl.float16), scores)


@triton.jit
def walk_levels(
    pages, table, first, end, q_pointers, t, t_low, t_high, scale, softcap, k_told, v_told, turns, phases,
    K: constexpr, V: constexpr, PAGE_NBYTES: constexpr, K_NBYTES: constexpr, S: constexpr, DK: constexpr, DV: constexpr, N: constexpr,
    WINDOW: constexpr, SLIDING: constexpr, SOFTCAP: constexpr,
):  # fmt: skip
    """`triton_walk.walk` for slabs with tables, of both sides, by any number of warps; what it returns `triton_walk.store` takes.

    q_pointers  [1, N]
    """
    PAIRS: constexpr = pairs_of(K)
    REST: constexpr = DK - 2 * PAIRS
    slot = tl.arange(0, S)[:, None]
    top_q = tl.full((N,), 1e-30, tl.float32)
    if PAIRS > 0:
        q_a, q_b = _queries(q_pointers, 0, PAIRS), _queries(q_pointers, PAIRS, PAIRS)
        top_q = tl.maximum(top_q, tl.max(tl.maximum(tl.abs(q_a), tl.abs(q_b)), axis=0))
        taken_a, taken_b = _taken(k_told, 0, PAIRS, K, DK), _taken(k_told, PAIRS, PAIRS, K, DK)
        slot_cos, slot_sin = _slot_turn(phases, slot, K, S)
        pair = tl.arange(0, padded(PAIRS))[:, None]
    if REST > 0:
        q_rest = _queries(q_pointers, 2 * PAIRS, REST)
        top_q = tl.maximum(top_q, tl.max(tl.abs(q_rest), axis=0))
        taken_rest = _taken(k_told, 2 * PAIRS, REST, K, DK)
    factor = tl.exp2(tl.ceil(tl.log2(top_q)) + 1)  # a turn makes no number larger than 0.71, then
    gain = factor * scale
    if PAIRS > 0:
        q_a, q_b = q_a / factor[None, :], q_b / factor[None, :]
    if REST > 0:
        q_rest = q_rest / factor[None, :]
        lack_rest = tl.sum(q_rest * taken_rest[:, None], axis=0)
    ROWS: constexpr = group_rows_of(V, DV)
    channel, column = tl.arange(0, ROWS)[:, None], tl.arange(0, S)[None, :]
    acc = tl.zeros((ROWS, N), tl.float32)
    total = tl.zeros((S, N), tl.float32)
    top = tl.full((N,), HIDDEN / 2, tl.float32)  # above HIDDEN, so that a row that has seen nothing gets p = 0
    held = tl.load(table + first)
    for page in range(first, end):
        slab = pages + held.to(tl.int64) * PAGE_NBYTES
        held = tl.load(table + tl.minimum(page + 1, end - 1))  # here before it is needed
        lack = tl.zeros((N,), tl.float32)  # of scores, for what is taken from keys: in float32
        if REST > 0:
            lack += lack_rest
        if PAIRS > 0:
            cos, sin = _page_turn(slab, turns, pair, K, S)
            back_a, back_b = _turned(q_a, q_b, cos, -sin)
            lack += tl.sum(back_a * taken_a[:, None] + back_b * taken_b[:, None], axis=0)
        scores = tl.zeros((S, N), tl.float32) + lack[None, :]
        if PAIRS > 0:
            a, b = _keys(slab, k_told, slot, 0, PAIRS, K, S, DK), _keys(slab, k_told, slot, PAIRS, PAIRS, K, S, DK)
            a, b = _turned(a, b, slot_cos, slot_sin)
            scores = _add_scores(scores, back_a, a, taken_a)
            scores = _add_scores(scores, back_b, b, taken_b)
        if REST > 0:
            rest = _keys(slab, k_told, slot, 2 * PAIRS, REST, K, S, DK)
            scores = _add_scores(scores, q_rest, rest, taken_rest)
        scores *= gain[None, :]
        if SOFTCAP:
            scores = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E / softcap))))
        token = page * S + slot
        seen = (page < t // S - WINDOW)[None, :] & (token >= 0)
        if SLIDING > 0:
            seen = seen & (token > t[None, :] - SLIDING)
        scores = tl.where(seen, scores, HIDDEN)
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        p = tl.exp2(scores - new_top[None, :])
        shrink = tl.exp2(top - new_top)[None, :]
        top = new_top
        total = total * shrink + p
        values = _values(slab + K_NBYTES, v_told, channel, column, channel < DV, V, S)
        acc = product(values.to(tl.float16), (p * P_LIMIT).to(tl.float16), acc * shrink)
    return (acc,), tl.full((), 1.0, tl.float32), tl.zeros((N,), tl.float32), top, tl.sum(total, axis=0)
