"""What the compiled CPU kernels share: the job, its memory, which slots a query sees, and a scalar power of two.

Everything here is called from compiled code (numba_kernel.py). Arrays are given by address. Scores are kept in units of log 2, so that a weight
is a power of two. Numbers are float32 throughout: a float64 constant would widen a loop.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvarto.jit import inlined
from kvarto.kernels.numba_memory import call_reader, get_float, get_int, get_long, power_of_two, put_float
from kvarto.simd import EXP2

LOG2_E = 1.4426950408889634
LINE_NBYTES = 64
FLOAT_NBYTES = INT_NBYTES = 4
LONG_NBYTES = 8
TILE_FIELDS = 6  # int64: row, first query, count, position, first split, end split
SPLIT_FIELDS = 4  # int64: tile, first page, end page, row of its first partial result

JOB = np.dtype(
    [(name, np.int64) for name in (
        # addresses of q [T, Hq, Dk], out [T, Hq, Dv], lse [T, Hq], table [B, N], start [B + 1], position [B], page 0, the tile readers
        "q", "out", "lse", "table", "start", "position", "pages", "read_k", "read_v",
        # address of what they are told of head 0, and bytes from head to head
        "constants_k", "constants_k_nbytes", "constants_v", "constants_v_nbytes",
        # bytes from page to page, of a K slab and of a V slab
        "page_stride", "k_nbytes", "v_nbytes",
        # shapes
        "B", "N", "Hkv", "R", "S", "Dk", "Dv",
        # the rule; -1 for no sliding window
        "sink_pages", "window_pages", "sliding_tokens", "raw",
        # what the plan counted, and the addresses of what it and the threads write (numba_kernel.py)
        "tile_count", "split_count", "partial_rows", "most_rows", "tiles", "splits", "partials", "counters",
    )]
    + [("scale", np.float64), ("softcap", np.float64)]  # 0 for no softcap
)  # fmt: skip
"""One launch: everything that the compiled code is told."""


class Queries(NamedTuple):
    """Consecutive queries of one sequence within one page, R heads each. `first` is their row in q, `position` the first one's place."""

    row: int
    first: int
    tokens: int
    position: int


class Terms(NamedTuple):
    """The affine terms of a tile (codecs/base.py), addresses of [S], [S], [D], [D]."""

    row_scale: int
    row_zero: int
    channel_scale: int
    channel_zero: int


class Unpacked(NamedTuple):
    """Where a page of a head is unpacked to: the K tile [S, Dk], then in the same memory the V tile [Dv, S], and their terms."""

    tile: int
    k: Terms
    v: Terms


@inlined
def take(at, floats):  # type: ignore[no-untyped-def]
    """(`at` rounded up to a cache line, the address after `floats` numbers from there)."""
    begin = (at + LINE_NBYTES - 1) // LINE_NBYTES * LINE_NBYTES
    return begin, begin + FLOAT_NBYTES * floats


@inlined
def take_terms(at, S, D):  # type: ignore[no-untyped-def]
    """(terms that change nothing, the address after them)."""
    row_scale, at = take(at, S)
    row_zero, at = take(at, S)
    channel_scale, at = take(at, D)
    channel_zero, at = take(at, D)
    fill(row_scale, S, np.float32(1))
    fill(row_zero, S, np.float32(0))
    fill(channel_scale, D, np.float32(1))
    fill(channel_zero, D, np.float32(0))
    return Terms(row_scale, row_zero, channel_scale, channel_zero), at


@inlined
def fill(address, n, x):  # type: ignore[no-untyped-def]
    """Write x n times."""
    for i in range(n):
        put_float(address, i, x)


@inlined
def read_k(job, page, head, unpacked):  # type: ignore[no-untyped-def]
    """Unpack the K slab of a head."""
    slab = job.pages + page * job.page_stride + head * (job.k_nbytes + job.v_nbytes)
    terms = unpacked.k
    told = job.constants_k + head * job.constants_k_nbytes
    call_reader(
        job.read_k, slab, told, unpacked.tile, terms.row_scale, terms.row_zero, terms.channel_scale, terms.channel_zero
    )


@inlined
def read_v(job, page, head, unpacked):  # type: ignore[no-untyped-def]
    """Unpack the V slab of a head."""
    slab = job.pages + page * job.page_stride + head * (job.k_nbytes + job.v_nbytes) + job.k_nbytes
    terms = unpacked.v
    told = job.constants_v + head * job.constants_v_nbytes
    call_reader(
        job.read_v, slab, told, unpacked.tile, terms.row_scale, terms.row_zero, terms.channel_scale, terms.channel_zero
    )


@inlined
def next_pair(job, table, j, end_page, head):  # type: ignore[no-untyped-def]
    """(address, bytes) of both slabs of a head in page j of a sequence; after its last page, of what the next item probably begins with."""
    if j >= end_page:
        item = get_long(job.counters, 0)
        if item >= job.split_count * job.Hkv:
            return job.pages, 0
        split, head = job.splits + LONG_NBYTES * SPLIT_FIELDS * (item // job.Hkv), item % job.Hkv
        row = get_long(job.tiles + LONG_NBYTES * TILE_FIELDS * get_long(split, 0), 0)
        table, j = job.table + INT_NBYTES * row * job.N, get_long(split, 1)
    page = get_int(table, j)
    pair = job.k_nbytes + job.v_nbytes
    return (
        job.pages + page * job.page_stride + head * pair,
        pair + LINE_NBYTES if page >= 0 else 0,
    )  # It may begin within a line.


@inlined
def first_seen(job, position, page):  # type: ignore[no-untyped-def]
    """The first slot of a page that a query at `position` sees; S or more if none."""
    return max(0, position - job.sliding_tokens + 1 - page * job.S) if job.sliding_tokens >= 0 else 0


@inlined
def end_seen(job, position, page):  # type: ignore[no-untyped-def]
    """One more than the last slot of a page that a query at `position` sees; 0 or less if none."""
    return min(job.S, position + 1 - page * job.S)


@inlined
def seen_by_all(job, queries, page):  # type: ignore[no-untyped-def]
    """True if every query sees every slot of the page."""
    return (
        end_seen(job, queries.position, page) == job.S
        and first_seen(job, queries.position + queries.tokens - 1, page) == 0
    )


@inlined
def hide(job, tile, first, end):  # type: ignore[no-untyped-def]
    """Zero the slots of a V tile outside first .. end - 1, which may hold anything: a weight of 0 times NaN is NaN."""
    for d in range(job.Dv):
        row = tile + FLOAT_NBYTES * d * job.S
        fill(row, first, np.float32(0))
        fill(row + FLOAT_NBYTES * end, job.S - end, np.float32(0))


@inlined
def factor(job):  # type: ignore[no-untyped-def]
    """What q is multiplied by: the scale, and unless a softcap comes first the step to units of log 2."""
    return np.float32(job.scale) if job.softcap > 0 else np.float32(job.scale * LOG2_E)


@inlined
def cap(job, scores, n):  # type: ignore[no-untyped-def]
    """Softcap of n scores, and the step to units of log 2. softcap * tanh(x / softcap), within 2e-7 * softcap of it."""
    softcap = np.float32(job.softcap)
    for i in range(n):
        x = get_float(scores, i)
        e = exp2(np.float32(-2 * LOG2_E) * abs(x / softcap))
        size = softcap * np.float32(LOG2_E) * (np.float32(1) - e) / (np.float32(1) + e)
        put_float(scores, i, size if x >= np.float32(0) else -size)


@inlined
def exp2(x):  # type: ignore[no-untyped-def]
    """2^x for x <= 0: the scalar twin of `Emitter.exp2`, 0 below -126 and NaN for NaN."""
    y = max(x, np.float32(-126))
    n = np.float32(np.floor(y + np.float32(0.5)))
    f = y - n
    p = np.float32(EXP2[0])
    p = p * f + np.float32(EXP2[1])
    p = p * f + np.float32(EXP2[2])
    p = p * f + np.float32(EXP2[3])
    p = p * f + np.float32(EXP2[4])
    p = p * f + np.float32(EXP2[5])
    p = (p * f + np.float32(1)) * power_of_two(n)
    if x >= np.float32(-126):
        return p
    return np.float32(0) if x < np.float32(-126) else x
