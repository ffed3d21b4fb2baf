"""The merge of partial results, exact up to float32 rounding: the third of three launches. The Triton program; host code is in triton.py."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from kvarto.kernels.triton_tiles import wait_for_previous
from kvarto.kernels.triton_walk import LOG2E

_NOTHING = tl.constexpr(-1e30)  # a maximum of nothing: finite, so that no difference is NaN


@triton.jit(do_not_specialize=["groups", "raw_parts"])
def combine(
    raw_out, raw_lse, packed_out, packed_lse, plan, start, unrotate, sinks, out, lse, out_stride_t, out_stride_h,
    groups, raw_parts,
    HEADS: constexpr, R: constexpr, DV: constexpr, N: constexpr, RAW: constexpr, AT_ONCE: constexpr,
    ROTATION: constexpr, HAS_SINKS: constexpr,
):  # fmt: skip
    """Grid (HEADS * N, entries): one query row each.

    raw_*, packed_*  as `attend_raw` (raw_parts of each pair) and `attend_packed` left them; the latter in the tile's domain
    RAW, AT_ONCE     at least raw_parts; packed parts that are read at once; powers of two, or 0 where there are none
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
    D: constexpr = triton.next_power_of_2(DV)
    channel = tl.arange(0, D)
    query_head = head * R + row % R
    if HAS_SINKS:
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2E
    wait_for_previous()
    if RAW > 0:  # read now, looked at when the packed parts are there too
        raw_log, raw_values = _parts(
            raw_out, raw_lse, (e * HEADS + head) * raw_parts, 1, 0, raw_parts, lane, channel, DV, N, RAW
        )
    result = tl.zeros((D,), tl.float32)
    total, top = tl.full((), 0.0, tl.float32), tl.full((), _NOTHING, tl.float32)
    if AT_ONCE > 0:
        before = tl.load(plan + e - 1, mask=e > 0, other=0)
        splits = (tl.load(plan + e) - before) // HEADS
        for i in range(0, splits, AT_ONCE):
            log, values = _parts(packed_out, packed_lse, before + head, HEADS, i, splits, lane, channel, DV, N, AT_ONCE)
            result, total, top = _add(result, total, top, log, values)
        if ROTATION == "hadamard":
            result = _hadamard(result, D)
        elif ROTATION == "matrix":
            inside = (channel < DV)[:, None] & (channel < DV)[None, :]
            matrix = tl.load(unrotate + channel[:, None] * DV + channel[None, :], mask=inside, other=0.0)
            result = tl.sum(matrix * result[:, None], axis=0)
    if RAW > 0:
        result, total, top = _add(result, total, top, raw_log, raw_values)
    if HAS_SINKS:
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        result, total, top = result * shrink, total * shrink + tl.exp2(sink - new_top), new_top
    token = (begin + row // R).to(tl.int64)
    at = out + token * out_stride_t + query_head * out_stride_h + channel
    result = result / tl.where(total == 0, 1.0, total)  # NaN stays NaN
    tl.store(at, result.to(out.dtype.element_ty), mask=channel < DV)
    log = tl.where(total == 0, float("-inf"), (top + tl.log2(tl.where(total == 0, 1.0, total))) / LOG2E)
    tl.store(lse + token * (HEADS * R) + query_head, log)


@triton.jit
def _parts(
    out_parts, lse_parts, first, step, begin, end, lane, channel, DV: constexpr, N: constexpr, COUNT: constexpr
):  # fmt: skip
    """Of partial results first + step * begin, ... up to the one of `end`: logarithms float32 [COUNT], -inf beyond, and values float32 [COUNT, D].

    The numbers of a part that saw nothing were never written: they are read all the same, not to wait, and mean nothing.
    """
    part = begin + tl.arange(0, COUNT)
    at = (first + part * step).to(tl.int64) * N + lane
    log = tl.load(lse_parts + at, mask=part < end, other=float("-inf"))
    inside = (part < end)[:, None] & (channel < DV)[None, :]
    return log, tl.load(out_parts + at[:, None] * DV + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _add(result, total, top, log, values):
    """Add parts to (weighted sum float32 [D], sum of weights, the maximum that both are relative to, a finite number)."""
    new_top = tl.maximum(top, tl.max(log, axis=0))
    shrink = tl.exp2(top - new_top)
    weight = tl.exp2(log - new_top)
    values = tl.where((log == float("-inf"))[:, None], 0.0, values)
    result = result * shrink + tl.sum(values * weight[:, None], axis=0)
    return result, total * shrink + tl.sum(weight, axis=0), new_top


@triton.jit
def _hadamard(x, D: constexpr):
    """The orthogonal transform of Sylvester of x [D], which is its own inverse."""
    for i in tl.static_range(D.bit_length() - 1):
        first, second = tl.split(x.reshape(D >> (i + 1), 2, 1 << i).permute(0, 2, 1))
        x = tl.join(first + second, first - second).permute(0, 2, 1).reshape(D)
    return x * (1.0 / D**0.5)
