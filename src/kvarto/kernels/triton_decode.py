"""Split-KV attention of few queries, in three launches: raw pages, packed pages, and the merge (triton_combine.py).

The query rows of a sequence (its tokens times R heads) are cut into *entries* of N rows; an entry and a KV head are a *pair*. All lengths are read
from the device, so a CUDA graph may be replayed as they grow.

    attend_raw     a program for each raw page (sink, recent window, the query's own page) of each pair
    attend_packed  a program for each split: a run of packed pages of one pair, read by one warp (triton_walk.py), or by several if levels
                   of both sides stand in tables (triton_levels.py)

The plan cuts each entry's packed pages into equal splits of at most `share` pages: the smallest share for which all splits run at once, or, where
there are so many pairs that this leaves much of the machine idle, the one that should end soonest. Programs that do not run at once do not wait for
turns either: one begins where one ends, so that only the end is ragged. With a fixed share the sums are added in the same order whatever else is in
the batch.

The launches overlap (programmatic dependent launch): packed pages need nothing of raw ones, so `attend_packed` waits for `attend_raw` only when
its own work is done, and the merge, which waits for it, then knows that both are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from kvarto.kernels.triton_levels import walk_levels
from kvarto.kernels.triton_spec import has_table
from kvarto.kernels.triton_tiles import launch_next, product, wait_for_previous
from kvarto.kernels.triton_walk import HIDDEN, LOG2E, store, walk

_CANDIDATES = tl.constexpr(8)
# What beginning and ending a split costs, in pages, and how much of a split the ragged end takes: as measured (docs/LOG.md).
_SPLIT_PAGES = tl.constexpr(3.0)
_RAGGED = tl.constexpr(0.25)


@triton.jit
def rows_of(start, position, entry, inside, groups, N: constexpr, R: constexpr):
    """(query rows, first token, last token) of an entry, int32, a scalar or a vector; `inside` is False where there is none."""
    sequence = entry // groups
    first_row = entry % groups * N
    tokens = tl.load(start + sequence + 1, mask=inside, other=0) - tl.load(start + sequence, mask=inside, other=0)
    base = tl.load(position + sequence, mask=inside, other=0)
    count = tl.minimum(tokens * R - first_row, N)
    last_row = first_row + tl.maximum(count, 1) - 1
    return count, base + first_row // R, base + last_row // R


@triton.jit
def packed_pages_of(count, t_low, t_high, S: constexpr, SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr):  # fmt: skip
    """(first, number) of the packed pages that an entry reads."""
    bottom = t_low * 0 + SINK
    if SLIDING > 0:
        bottom = tl.maximum(bottom, tl.maximum(t_low - SLIDING + 1, 0) // S)
    return bottom, tl.where(count > 0, tl.maximum(t_high // S - WINDOW - bottom, 0), 0)


@triton.jit
def _quotient(number, divisor):
    """number / divisor rounded up, of int32 below 2^22: by float32, which is much the faster."""
    return (((number + divisor).to(tl.float32) - 0.5) / divisor.to(tl.float32)).to(tl.int32)


@triton.jit
def _time(splits, most, slots):
    """Of so many splits of at most `most` pages, in pages."""
    waves = splits.to(tl.float32) / slots
    return tl.where(waves <= 1, 1.0, waves + _RAGGED) * (most + _SPLIT_PAGES)


@triton.jit
def plan_of(
    start, position, entries, groups, slots, fixed_share, HEADS: constexpr, N: constexpr, R: constexpr,
    S: constexpr, SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr, ENTRIES: constexpr, TURNS: constexpr,
):  # fmt: skip
    """(splits of one head of each entry; splits of all heads up to and with each entry), int32 [ENTRIES]. TURNS: times slots, most splits."""
    entry = tl.arange(0, ENTRIES)
    count, t_low, t_high = rows_of(start, position, entry, entry < entries, groups, N, R)
    _, pages = packed_pages_of(count, t_low, t_high, S, SINK, WINDOW, SLIDING)
    pages = tl.where(entry < entries, pages, 0)
    share = fixed_share
    if fixed_share == 0:
        # For each number of turns, from the even share upwards: rounding up costs each pair a split at most.
        candidate = tl.arange(0, _CANDIDATES * TURNS)
        step, turns = candidate % _CANDIDATES, candidate // _CANDIDATES + 1
        even = tl.maximum(tl.cdiv(tl.sum(pages, axis=0) * HEADS, slots * turns), 1)
        shares = even + (even * step * step + 31) // 32
        needed = tl.sum(_quotient(pages[:, None], shares[None, :]), axis=0) * HEADS
        longest = tl.maximum(tl.max(pages, axis=0), 1)
        if TURNS == 1:
            share = tl.min(tl.where(needed <= slots, shares, longest), axis=0)
        else:
            most = tl.cdiv(longest, tl.cdiv(longest, shares))  # pages of a split of the longest entry
            time = tl.where(needed <= slots * TURNS, _time(needed, most, slots), float("inf"))
            whole = _time(tl.sum((pages > 0).to(tl.int32), axis=0) * HEADS, longest, slots)
            soonest = tl.minimum(tl.min(time, axis=0), whole)
            share = tl.min(tl.where(time == soonest, shares, longest), axis=0)
    splits = _quotient(pages, share)
    return splits, tl.cumsum(splits, axis=0) * HEADS


@triton.jit
def splits_of_one(
    start, position, groups, slots, fixed_share, HEADS: constexpr, N: constexpr, R: constexpr,
    S: constexpr, SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr,
):  # fmt: skip
    """`plan_of` of a single entry: the splits of one head."""
    count, t_low, t_high = rows_of(start, position, 0, True, groups, N, R)
    _, pages = packed_pages_of(count, t_low, t_high, S, SINK, WINDOW, SLIDING)
    share = fixed_share
    if fixed_share == 0:
        share = tl.maximum(_quotient(pages, tl.maximum(slots // HEADS, 1)), 1)
    return _quotient(pages, share)


@triton.jit(do_not_specialize=["columns", "groups"])
def attend_raw(
    q, start, position, pages, table, out, lse, q_stride_t, q_stride_h, columns, groups, scale, softcap,
    PAGE_NBYTES: constexpr, K_NBYTES: constexpr, PAIR_NBYTES: constexpr, BFLOAT16: constexpr,
    HEADS: constexpr, R: constexpr, S: constexpr, DK: constexpr, DV: constexpr, N: constexpr,
    SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr, SOFTCAP: constexpr,
):  # fmt: skip
    """Grid (HEADS, entries, most raw pages of an entry, at least 1).

    q              [T, Hq, DK] of the pages' own dtype, strides in elements; start int32 [B + 1] and position int32 [B] as in base.Queries
    pages          uint8, PAGE_NBYTES from page to page; table int32 [B, columns] as in base.PageSet: K [S, DK] and V [DV, S], no terms
    scale          of the scores; softcap is read only if SOFTCAP
    out, lse       float32 [entries, HEADS, grid 2, N(, DV)]; lse in powers of two, -inf where nothing was seen
    """
    head, entry, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_next()
    slot = ((entry * HEADS + head) * tl.num_programs(2) + number).to(tl.int64)
    lane = tl.arange(0, 16)
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
    DK_PAD: constexpr = triton.next_power_of_2(DK)
    DV_PAD: constexpr = triton.next_power_of_2(DV)
    k_channel, v_channel = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    pair = pages + held.to(tl.int64) * PAGE_NBYTES + head * PAIR_NBYTES
    dtype: constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    k = pair.to(tl.pointer_type(dtype)) + tl.arange(0, S)[None, :] * DK + k_channel[:, None]
    v = (pair + K_NBYTES).to(tl.pointer_type(dtype)) + v_channel[None, :] * S + tl.arange(0, S)[:, None]
    # Slots that are not filled yet may hold anything: they must not meet a factor of 0.
    k = tl.load(k, mask=(k_channel < DK)[:, None] & (token <= t_high)[None, :], other=0.0)
    v = tl.load(v, mask=(v_channel < DV)[None, :] & (token <= t_high)[:, None], other=0.0)
    rows = (tl.load(start + sequence) + row // R).to(tl.int64) * q_stride_t + (head * R + row % R).to(
        tl.int64
    ) * q_stride_h
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
    result = product(p.to(dtype), v, tl.zeros((16, DV_PAD), tl.float32)) / tl.where(total == 0, 1.0, total)[:, None]
    at = out + (slot * N + lane)[:, None] * DV + v_channel[None, :]
    tl.store(at, result, mask=(lane < count)[:, None] & (v_channel < DV)[None, :])
    log = tl.where(total == 0, float("-inf"), top + tl.log2(tl.where(total == 0, 1.0, total)))
    tl.store(lse + slot * N + lane, log, mask=lane < count)


@triton.jit(do_not_specialize=["columns", "entries", "groups", "slots", "fixed_share"])
def attend_packed(
    q, start, position, pages, table, plan, out, lse, q_stride_t, q_stride_h, columns,
    entries, groups, slots, fixed_share, scale, softcap, k_told, k_told_stride, v_told, v_told_stride, turns, phases,
    K: constexpr, V: constexpr, PAGE_NBYTES: constexpr, K_NBYTES: constexpr, PAIR_NBYTES: constexpr, BFLOAT16: constexpr,
    HEADS: constexpr, R: constexpr, S: constexpr, DK: constexpr, DV: constexpr, N: constexpr,
    SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr, SOFTCAP: constexpr, ENTRIES: constexpr, TURNS: constexpr, AHEAD: constexpr,
):  # fmt: skip
    """Grid (at least the splits of the plan,), heads of a split next to each other; one warp. Arguments as in `attend_raw`.

    q              bfloat16 (BFLOAT16) or float16 [T, Hq, DK], in the domain of the tile
    K, V           the slabs' Tile
    plan           int32 [entries]: filled with the splits of all heads up to and with each entry
    slots          splits that run at once; fixed_share: pages of a split, or 0 for as many as fill the slots
    out, lse       float32 [grid 0, N(, DV)]
    k_told ...     if slabs have tables, as triton_levels.py says, of head 0, and how far those of the next head are; else None
    """
    launch_next()
    if ENTRIES == 1:
        e, before = 0, 0
        splits = splits_of_one(start, position, groups, slots, fixed_share, HEADS, N, R, S, SINK, WINDOW, SLIDING)
        inside = tl.program_id(0) < splits * HEADS
        if tl.program_id(0) == 0:
            tl.store(plan, splits * HEADS)
    else:
        all_splits, ends = plan_of(
            start,
            position,
            entries,
            groups,
            slots,
            fixed_share,
            HEADS,
            N,
            R,
            S,
            SINK,
            WINDOW,
            SLIDING,
            ENTRIES,
            TURNS,
        )
        entry = tl.arange(0, ENTRIES)
        if tl.program_id(0) == 0:
            tl.store(plan + entry, ends, mask=entry < entries)
        e = tl.sum((ends <= tl.program_id(0)).to(tl.int32), axis=0)
        before = tl.sum(tl.where(entry == e - 1, ends, 0), axis=0)
        splits = tl.sum(tl.where(entry == e, all_splits, 0), axis=0)
        inside = e < entries
    if inside:
        _attend_split(
            q, start, position, pages, table, out, lse, q_stride_t, q_stride_h, columns, e, groups, before, splits, scale, softcap,
            k_told, k_told_stride, v_told, v_told_stride, turns, phases,
            K, V, PAGE_NBYTES, K_NBYTES, PAIR_NBYTES, BFLOAT16, HEADS, R, S, DK, DV, N, SINK, WINDOW, SLIDING, SOFTCAP, AHEAD,
        )  # fmt: skip
    wait_for_previous()


@triton.jit
def _attend_split(
    q, start, position, pages, table, out, lse, q_stride_t, q_stride_h, columns, e, groups, before, splits, scale, softcap,
    k_told, k_told_stride, v_told, v_told_stride, turns, phases,
    K: constexpr, V: constexpr, PAGE_NBYTES: constexpr, K_NBYTES: constexpr, PAIR_NBYTES: constexpr, BFLOAT16: constexpr,
    HEADS: constexpr, R: constexpr, S: constexpr, DK: constexpr, DV: constexpr, N: constexpr,
    SINK: constexpr, WINDOW: constexpr, SLIDING: constexpr, SOFTCAP: constexpr, AHEAD: constexpr,
):  # fmt: skip
    """The split of entry e that this program has; programs from `before` on are those of the entry."""
    head = (tl.program_id(0) - before) % HEADS
    split = (tl.program_id(0) - before) // HEADS
    count, t_low, t_high = rows_of(start, position, e, e >= 0, groups, N, R)
    bottom, number = packed_pages_of(count, t_low, t_high, S, SINK, WINDOW, SLIDING)
    per = tl.cdiv(number, splits)
    first = bottom + split * per
    end = tl.minimum(first + per, bottom + number)
    sequence = e // groups
    row = e % groups * N + tl.minimum(tl.arange(0, N), count - 1)
    t = tl.load(position + sequence) + row // R
    rows = (tl.load(start + sequence) + row // R).to(tl.int64) * q_stride_t + (head * R + row % R).to(
        tl.int64
    ) * q_stride_h
    out += tl.program_id(0).to(tl.int64) * (N * DV)
    lse += tl.program_id(0).to(tl.int64) * N
    if not SOFTCAP:
        scale = scale * LOG2E
    if first < end:
        if has_table(K):
            acc, top_scale, zero_sum, top, total = walk_levels(
                pages + head * PAIR_NBYTES, table + sequence.to(tl.int64) * columns, first, end, q + rows[None, :],
                t, t_low, t_high, scale, softcap, k_told + head * k_told_stride, v_told + head * v_told_stride, turns, phases,
                K, V, PAGE_NBYTES, K_NBYTES, S, DK, DV, N, WINDOW, SLIDING, SOFTCAP,
            )  # fmt: skip
        else:
            acc, top_scale, zero_sum, top, total = walk(
                pages + head * PAIR_NBYTES, table + sequence.to(tl.int64) * columns, first, end, q + rows[:, None],
                t, t_low, t_high, scale, softcap, K, V, PAGE_NBYTES, K_NBYTES, PAIR_NBYTES - K_NBYTES, S, DK, DV, N, BFLOAT16,
                WINDOW, SLIDING, SOFTCAP, AHEAD,
            )  # fmt: skip
        store(acc, top_scale, zero_sum, top, total, out, lse, N, count, V, DV)
    else:
        tl.store(lse + tl.arange(0, N), tl.full((N,), float("-inf"), tl.float32))
