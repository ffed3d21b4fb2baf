"""The merge of partial results, exact up to float32 rounding: the third of three launches. The Triton program; host code is in triton.py."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from kvarto.kernels.triton_tiles import wait_for_previous
from kvarto.kernels.triton_walk import LOG2E


@triton.jit(do_not_specialize=["groups", "raw_parts"])
def combine(
    raw_out, raw_lse, packed_out, packed_lse, plan, start, unrotate, sinks, out, lse, out_stride_t, out_stride_h,
    groups, raw_parts,
    HEADS: constexpr, R: constexpr, DV: constexpr, N: constexpr, HAS_RAW: constexpr, HAS_PACKED: constexpr,
    ROTATION: constexpr, HAS_SINKS: constexpr, AT_ONCE: constexpr,
):  # fmt: skip
    """Grid (HEADS * N, entries): one query row each.

    raw_*, packed_*  as `attend_raw` (raw_parts of each pair) and `attend_packed` left them; the latter in the tile's domain
    ROTATION         out of that domain: "" (none), "hadamard" (the transform of Sylvester), or "matrix": times `unrotate` float32 [DV, DV]
    sinks            float [Hq], a learned logit that takes part in the softmax; read only if HAS_SINKS
    out, lse         [T, Hq, DV], strides in elements, and float32 [T, Hq] (natural logarithm); 0 and -inf where nothing was seen
    """
    head = tl.program_id(0) // N
    lane = tl.program_id(0) % N
    e = tl.program_id(1)
    sequence = e // groups
    row = e % groups * N + lane
    begin = tl.load(start + sequence)
    if row >= (tl.load(start + sequence + 1) - begin) * R:
        return
    wait_for_previous()
    D: constexpr = triton.next_power_of_2(DV)
    channel = tl.arange(0, D)
    raw = tl.zeros((D,), tl.float32)
    packed = tl.zeros((D,), tl.float32)
    raw_total, packed_total, raw_top, packed_top = 0.0, 0.0, float("-inf"), float("-inf")
    if HAS_RAW:
        first = (e * HEADS + head) * raw_parts
        raw, raw_total, raw_top = _merge(raw_out, raw_lse, first, 1, raw_parts, lane, channel, DV, N, D, 4)
    if HAS_PACKED:
        before = tl.load(plan + e - 1, mask=e > 0, other=0)
        splits = (tl.load(plan + e) - before) // HEADS
        packed, packed_total, packed_top = _merge(
            packed_out, packed_lse, before + head, HEADS, splits, lane, channel, DV, N, D, AT_ONCE
        )
        if ROTATION == "hadamard":
            packed = _hadamard(packed, D)
        elif ROTATION == "matrix":
            inside = (channel < DV)[:, None] & (channel < DV)[None, :]
            matrix = tl.load(unrotate + channel[:, None] * DV + channel[None, :], mask=inside, other=0.0)
            packed = tl.sum(matrix * packed[:, None], axis=0)
    query_head = head * R + row % R
    top = tl.maximum(raw_top, packed_top)
    if HAS_SINKS:
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    raw_weight = tl.exp2(raw_top - safe)
    packed_weight = tl.exp2(packed_top - safe)
    total = raw_total * raw_weight + packed_total * packed_weight
    if HAS_SINKS:
        total += tl.exp2(sink - safe)
    result = (raw * raw_weight + packed * packed_weight) / tl.where(total == 0, 1.0, total)  # NaN stays NaN
    token = (begin + row // R).to(tl.int64)
    at = out + token * out_stride_t + query_head * out_stride_h + channel
    tl.store(at, result.to(out.dtype.element_ty), mask=channel < DV)
    log = tl.where(total == 0, float("-inf"), (safe + tl.log2(tl.where(total == 0, 1.0, total))) / LOG2E)
    tl.store(lse + token * (HEADS * R) + query_head, log)


@triton.jit
def _hadamard(x, D: constexpr):
    """The orthogonal transform of Sylvester of x [D], which is its own inverse."""
    for i in tl.static_range(D.bit_length() - 1):
        first, second = tl.split(x.reshape(D >> (i + 1), 2, 1 << i).permute(0, 2, 1))
        x = tl.join(first + second, first - second).permute(0, 2, 1).reshape(D)
    return x * (1.0 / D**0.5)


@triton.jit
def _merge(
    out_parts, lse_parts, first, step, count, lane, channel,
    DV: constexpr, N: constexpr, D: constexpr, AT_ONCE: constexpr,
):  # fmt: skip
    """Merge partial results first, first + step ...: (weighted sum float32 [D], sum of weights, the maximum that they are relative to)."""
    tops = tl.full((AT_ONCE,), -1e30, tl.float32)
    totals = tl.zeros((AT_ONCE,), tl.float32)
    result = tl.zeros((AT_ONCE, D), tl.float32)
    for i in range(0, count, AT_ONCE):
        part = i + tl.arange(0, AT_ONCE)
        at = (first + part * step).to(tl.int64) * N + lane
        log = tl.load(lse_parts + at, mask=part < count, other=float("-inf"))
        # Numbers of a part that saw nothing are not written: they are read all the same, not to wait, and not used.
        values = tl.load(
            out_parts + at[:, None] * DV + channel[None, :],
            mask=(part < count)[:, None] & (channel < DV)[None, :],
            other=0.0,
        )
        values = tl.where((log == float("-inf"))[:, None], 0.0, values)
        new_tops = tl.maximum(tops, log)
        shrink = tl.exp2(tops - new_tops)
        weight = tl.exp2(log - new_tops)
        totals = totals * shrink + weight
        result = result * shrink[:, None] + values * weight[:, None]
        tops = new_tops
    top = tl.max(tops, axis=0)
    weights = tl.exp2(tops - top)
    total = tl.sum(totals * weights, axis=0)
    return tl.sum(result * weights[:, None], axis=0), total, tl.where(total == 0, float("-inf"), top)
