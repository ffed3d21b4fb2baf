"""Split-KV attention of few queries, in three launches: raw pages and the plan, packed pages, and the merge (triton_combine.py).

The query rows of a sequence (its tokens times R heads) are cut into *entries* of N rows; an entry and a KV head are a *pair*. All lengths are read
from the device, so a CUDA graph may be replayed as they grow.

    attend_raw     a program for each raw page (sink, recent window, the query's own page) of each pair; and one that writes the plan
    attend_packed  a program for each split: a run of packed pages of one pair, read by one warp (triton_walk.py)

The plan cuts each entry's packed pages into equal splits of at most `share` pages, the smallest share for which all splits run at once. With a
fixed share the sums are added in the same order whatever else is in the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarto.kernels.triton_tiles import product
from kvarto.kernels.triton_walk import HIDDEN, LOG2E, store, walk

_CANDIDATES = tl.constexpr(32)


@triton.jit
def rows_of(start, position, entry, inside, groups, N: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """(query rows, first token, last token) of an entry, int32, a scalar or a vector; `inside` is False where there is none."""
    sequence = entry // groups
    first_row = entry % groups * N
    tokens = tl.load(start + sequence + 1, mask=inside, other=0) - tl.load(start + sequence, mask=inside, other=0)
    base = tl.load(position + sequence, mask=inside, other=0)
    count = tl.minimum(tokens * R - first_row, N)
    last_row = first_row + tl.maximum(count, 1) - 1
    return count, base + first_row // R, base + last_row // R


@triton.jit
def packed_pages_of(count, t_low, t_high, S: tl.constexpr, SINK: tl.constexpr, WINDOW: tl.constexpr, SLIDING: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """(first, number) of the packed pages that an entry reads."""
    bottom = t_low * 0 + SINK
    if SLIDING > 0:
        bottom = tl.maximum(bottom, tl.maximum(t_low - SLIDING + 1, 0) // S)
    return bottom, tl.where(count > 0, tl.maximum(t_high // S - WINDOW - bottom, 0), 0)


@triton.jit
def _write_plan(
    plan, start, position, entries, groups, slots, fixed_share, HEADS: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SINK: tl.constexpr, WINDOW: tl.constexpr, SLIDING: tl.constexpr, ENTRIES: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """plan int32 [1 + entries]: the share, then for each entry the number of splits up to and with it, all heads."""
    entry = tl.arange(0, ENTRIES)
    count, t_low, t_high = rows_of(start, position, entry, entry < entries, groups, N, R)
    _, pages = packed_pages_of(count, t_low, t_high, S, SINK, WINDOW, SLIDING)
    pages = tl.where(entry < entries, pages, 0)
    if fixed_share > 0:
        share = fixed_share
    else:
        # From the even share upwards, in steps of a sixteenth: rounding up costs a split for each pair at most.
        even = tl.maximum(tl.cdiv(tl.sum(pages, axis=0) * HEADS, slots), 1)
        shares = even + tl.cdiv(even * tl.arange(0, _CANDIDATES), 16)
        splits = tl.sum(tl.cdiv(pages[:, None], shares[None, :]), axis=0) * HEADS
        longest = tl.maximum(tl.max(pages, axis=0), 1)
        share = tl.min(tl.where(splits <= slots, shares, longest), axis=0)
    tl.store(plan, share)
    tl.store(plan + 1 + entry, tl.cumsum(tl.cdiv(pages, share), axis=0) * HEADS, mask=entry < entries)


@triton.jit(do_not_specialize=["columns", "entries", "groups", "slots", "fixed_share"])
def attend_raw(
    q, start, position, pages, table, plan, out, lse, q_stride_t, q_stride_h, columns,
    entries, groups, slots, fixed_share, scale, softcap,
    K_NBYTES: tl.constexpr, PAIR_NBYTES: tl.constexpr, BFLOAT16: tl.constexpr, HAS_RAW: tl.constexpr,
    HEADS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr, ENTRIES: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Grid (HEADS, entries, most raw pages of an entry, at least 1).

    q              [T, Hq, DK] of the pages' own dtype, strides in elements; start int32 [B + 1] and position int32 [B] as in base.Queries
    pages          uint8, table int32 [B, columns] as in base.PageSet: K [S, DK] and V [DV, S], no terms
    plan           int32 [1 + entries], see `_write_plan`; slots: splits that run at once; fixed_share: 0, or pages of a split
    scale          of the scores; softcap is read only if SOFTCAP
    out, lse       float32 [entries, HEADS, grid 2, N(, DV)]; lse in powers of two, -inf where nothing was seen
    """
    head, entry, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if (head == 0) & (entry == 0) & (number == 0):
        _write_plan(
            plan, start, position, entries, groups, slots, fixed_share, HEADS, N, R, S, SINK, WINDOW, SLIDING, ENTRIES
        )
    slot = ((entry * HEADS + head) * tl.num_programs(2) + number).to(tl.int64)
    lane = tl.arange(0, 16)
    if not HAS_RAW:
        tl.store(lse + slot * N + lane, tl.full((16,), float("-inf"), tl.float32), mask=lane < N)
        return
    count, t_low, t_high = rows_of(start, position, entry, entry >= 0, groups, N, R)
    sequence = entry // groups
    sinks = tl.minimum(t_high // S + 1, SINK)
    page = tl.where(number < sinks, number, tl.maximum(sinks, t_low // S - WINDOW) + number - sinks)
    held = -1
    if (page <= t_high // S) & (count > 0):
        held = tl.load(table + sequence.to(tl.int64) * columns + page)
    if held < 0:  # not so many pages, or one that the sliding window hides
        tl.store(lse + slot * N + lane, tl.full((16,), float("-inf"), tl.float32), mask=lane < N)
        return

    row = entry % groups * N + tl.minimum(lane, count - 1)
    t = tl.load(position + sequence) + row // R
    token = page * S + tl.arange(0, S)
    DK_PAD: tl.constexpr = triton.next_power_of_2(DK)
    DV_PAD: tl.constexpr = triton.next_power_of_2(DV)
    k_channel, v_channel = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    pair = pages + held.to(tl.int64) * (HEADS * PAIR_NBYTES) + head * PAIR_NBYTES
    dtype: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    k = pair.to(tl.pointer_type(dtype)) + tl.arange(0, S)[None, :] * DK + k_channel[:, None]
    v = (pair + K_NBYTES).to(tl.pointer_type(dtype)) + v_channel[None, :] * S + tl.arange(0, S)[:, None]
    # Slots that are not filled yet may hold anything: they must not meet a factor of 0.
    k = tl.load(k, mask=(k_channel < DK)[:, None] & (token <= t_high)[None, :], other=0.0)
    v = tl.load(v, mask=(v_channel < DV)[None, :] & (token <= t_high)[:, None], other=0.0)
    rows = (tl.load(start + sequence) + row // R).to(tl.int64) * q_stride_t + (head * R + row % R) * q_stride_h
    queries = tl.load(q + rows[:, None] + k_channel[None, :], mask=(k_channel < DK)[None, :], other=0.0)

    scores = product(queries.to(dtype), k, tl.zeros((16, S), tl.float32)) * scale
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E / softcap))))
    scores = scores * LOG2E
    seen = ((page < SINK) | (page >= t // S - WINDOW))[:, None] & (token[None, :] <= t[:, None])
    if SLIDING > 0:
        seen = seen & (token[None, :] > t[:, None] - SLIDING)
    scores = tl.where(seen, scores, HIDDEN)
    top = tl.maximum(tl.max(scores, axis=1), HIDDEN / 2)
    p = tl.exp2(scores - top[:, None])
    total = tl.sum(p, axis=1)
    result = product(p.to(dtype), v, tl.zeros((16, DV_PAD), tl.float32)) / tl.maximum(total, 1e-30)[:, None]
    at = out + (slot * N + lane)[:, None] * DV + v_channel[None, :]
    tl.store(at, result, mask=(lane < count)[:, None] & (v_channel < DV)[None, :])
    log = tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
    tl.store(lse + slot * N + lane, log, mask=lane < count)


@triton.jit(do_not_specialize=["columns", "entries", "groups"])
def attend_packed(
    q, start, position, pages, table, plan, out, lse, q_stride_t, q_stride_h, columns, entries, groups, scale, softcap,
    K: tl.constexpr, V: tl.constexpr, K_NBYTES: tl.constexpr, PAIR_NBYTES: tl.constexpr, BFLOAT16: tl.constexpr,
    HEADS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr, ENTRIES: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Grid (at least the splits of the plan,), heads of a split next to each other; one warp. Arguments as in `attend_raw`.

    q              bfloat16 (BFLOAT16) or float16 [T, Hq, DK], in the domain of the tile
    K, V           the slabs' Tile
    out, lse       float32 [grid 0, N(, DV)]
    """
    entry = tl.arange(0, ENTRIES)
    ends = tl.load(plan + 1 + entry, mask=entry < entries, other=1 << 30)
    e = tl.sum((ends <= tl.program_id(0)).to(tl.int32), axis=0)
    if e >= entries:
        return
    before = tl.where(e > 0, tl.load(plan + e), 0)  # plan[0] is the share
    head = (tl.program_id(0) - before) % HEADS
    split = (tl.program_id(0) - before) // HEADS
    splits = (tl.load(plan + 1 + e) - before) // HEADS
    count, t_low, t_high = rows_of(start, position, e, e >= 0, groups, N, R)
    bottom, number = packed_pages_of(count, t_low, t_high, S, SINK, WINDOW, SLIDING)
    per = tl.cdiv(number, splits)
    first = bottom + split * per
    end = tl.minimum(first + per, bottom + number)
    sequence = e // groups
    row = e % groups * N + tl.minimum(tl.arange(0, N), count - 1)
    t = tl.load(position + sequence) + row // R
    rows = (tl.load(start + sequence) + row // R).to(tl.int64) * q_stride_t + (head * R + row % R) * q_stride_h
    out += tl.program_id(0).to(tl.int64) * (N * DV)
    lse += tl.program_id(0).to(tl.int64) * N
    if not SOFTCAP:
        scale = scale * LOG2E
    if first < end:
        acc, top_scale, zero_sum, top, total = walk(
            pages + head * PAIR_NBYTES, table + sequence.to(tl.int64) * columns, first, end, q + rows[:, None],
            t, t_low, t_high, scale, softcap, K, V, HEADS * PAIR_NBYTES, K_NBYTES, S, DK, DV, N, BFLOAT16,
            WINDOW, SLIDING, SOFTCAP, PREFETCH,
        )  # fmt: skip
        store(acc, top_scale, zero_sum, top, total, out, lse, N, count, V, DV)
    else:
        tl.store(lse + tl.arange(0, N), tl.full((N,), float("-inf"), tl.float32))
