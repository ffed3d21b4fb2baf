"""What the compiled CPU kernels share: where pages lie, which slots a query sees, and an exponential that fits a vector.

Scores are kept in units of log 2, so that a probability is a power of two and needs no careful reduction of its argument.

Everything here is called from compiled code (numba_kernel.py). Numbers are float32 throughout: a float64 constant would widen a loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvarto.jit import inlined
from kvarto.simd import EXP2, address_of, call_reader, power_of_two, prefetch

LOG2_E = 1.4426950408889634


JOB = np.dtype(
    [(name, np.int64) for name in (
        # addresses of q [T, Hq, Dk], out [T, Hq, Dv], lse [T, Hq], table [B, N], start [B + 1], position [B], page 0, the tile readers
        "q", "out", "lse", "table", "start", "position", "pages", "read_k", "read_v",
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


class Tile(NamedTuple):
    """Consecutive queries of one sequence within one page. `first_query` is their row in q, `position` the first one's place in the sequence."""

    row: int
    first_query: int
    count: int
    position: int


class Terms(NamedTuple):
    """The affine terms of a tile (codecs/base.py): float32 [S], [S], [D], [D]."""

    row_scale: Any
    row_zero: Any
    channel_scale: Any
    channel_zero: Any


@inlined
def read_k(job, page, head, tile, terms):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Unpack the K slab of a head: tile [S, Dk] and its terms."""
    call(job.read_k, job.pages + page * job.page_stride + head * (job.k_nbytes + job.v_nbytes), tile, terms)


@inlined
def read_v(job, page, head, tile, terms):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Unpack the V slab of a head: tile [Dv, S] and its terms."""
    call(job.read_v, job.pages + page * job.page_stride + head * (job.k_nbytes + job.v_nbytes) + job.k_nbytes, tile, terms)


@inlined
def call(reader, slab, tile, terms):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Call a tile reader."""
    call_reader(
        reader,
        slab,
        address_of(tile),
        address_of(terms.row_scale),
        address_of(terms.row_zero),
        address_of(terms.channel_scale),
        address_of(terms.channel_zero),
    )


@inlined
def ask_for(job, page, head):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Prefetch both slabs of a head; page -1 is none."""
    if page >= 0:
        pair = job.k_nbytes + job.v_nbytes
        prefetch(job.pages + page * job.page_stride + head * pair, pair)


@inlined
def first_seen(position, page, page_tokens, sliding_tokens):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The first slot of a page that a query at `position` sees; beyond S if none."""
    if sliding_tokens < 0:
        return 0
    return max(0, position - sliding_tokens + 1 - page * page_tokens)


@inlined
def end_seen(position, page, page_tokens):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """One more than the last slot of a page that a query at `position` sees; 0 or less if none."""
    return min(page_tokens, position + 1 - page * page_tokens)


@inlined
def hide(tile, first, end):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Zero the slots of a V tile [Dv, S] outside first .. end, which may hold anything: a probability of 0 times NaN is NaN."""
    channels, slots = tile.shape
    for d in range(channels):
        for s in range(first):
            tile[d, s] = np.float32(0)
        for s in range(end, slots):
            tile[d, s] = np.float32(0)


@inlined
def exp2(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """2^x for x <= 0, within 3e-7 of it; 0 below -126 and NaN for NaN. Cephes' polynomial, in operations that LLVM turns into vectors."""
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


@inlined
def capped(score, softcap):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """softcap * tanh(score / softcap), within 2e-7 * softcap of it."""
    e = exp2(np.float32(-2 * LOG2_E) * abs(score / softcap))
    size = softcap * (np.float32(1) - e) / (np.float32(1) + e)
    return size if score >= np.float32(0) else -size
