"""What the compiled CPU kernels share: where pages lie, which slots a query sees, and an exponential that fits a vector.

Everything here is called from compiled code (numba_kernel.py). Numbers are float32 throughout: a float64 constant would widen a loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvarto.jit import inlined
from kvarto.simd import bits_to_float, bytes_at, prefetch, tile_at

INFINITY = np.float32(np.inf)
_LINE = 64


class Pool(NamedTuple):
    """Where slabs lie: address of page 0, bytes from page to page, bytes of a K and of a V slab; S."""

    address: int
    page_stride: int
    k_nbytes: int
    v_nbytes: int
    page_tokens: int


class Tile(NamedTuple):
    """Consecutive queries of one sequence within one page. `first_query` is their row in q, `position` the first one's place in the sequence."""

    row: int
    first_query: int
    count: int
    position: int


class Scoring(NamedTuple):
    """How scores are made of q.k. `softcap` 0 and `sliding_tokens` -1 mean none."""

    scale: Any
    softcap: Any
    sliding_tokens: int


class Terms(NamedTuple):
    """The affine terms of a tile (codecs/base.py): float32 [S], [S], [D], [D]."""

    row_scale: Any
    row_zero: Any
    channel_scale: Any
    channel_zero: Any


@inlined
def k_slab(pool, page, head):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The K slab of a head, uint8 [k_nbytes]."""
    return bytes_at(pool.address + page * pool.page_stride + head * (pool.k_nbytes + pool.v_nbytes), pool.k_nbytes)


@inlined
def v_slab(pool, page, head):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The V slab of a head, uint8 [v_nbytes]."""
    return bytes_at(pool.address + page * pool.page_stride + head * (pool.k_nbytes + pool.v_nbytes) + pool.k_nbytes, pool.v_nbytes)


@inlined
def ask_for(pool, page, head):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Prefetch both slabs of a head; page -1 is none."""
    if page >= 0:
        pair = pool.k_nbytes + pool.v_nbytes
        prefetch(pool.address + page * pool.page_stride + head * pair, pair)


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
def hide(tile, terms, first, end):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Zero the slots of a V tile [Dv, S] outside first .. end, which may hold anything: a probability of 0 times NaN is NaN."""
    channels, slots = tile.shape
    for d in range(channels):
        for s in range(first):
            tile[d, s] = np.float32(0)
        for s in range(end, slots):
            tile[d, s] = np.float32(0)


@inlined
def exp(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """e^x for x <= 0, within 3e-7 of it; 0 below -87 and NaN for NaN. Cephes' polynomial, in operations that LLVM turns into vectors."""
    y = max(x, np.float32(-87))
    n = np.float32(np.floor(y * np.float32(1.4426950408889634) + np.float32(0.5)))
    r = y - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    p = p * bits_to_float(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
    if x >= np.float32(-87):
        return p
    return np.float32(0) if x < np.float32(-87) else x


@inlined
def capped(score, softcap):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """softcap * tanh(score / softcap), by `exp`; within 2e-7 * softcap of it."""
    e = exp(np.float32(-2) * abs(score / softcap))
    size = softcap * (np.float32(1) - e) / (np.float32(1) + e)
    return size if score >= np.float32(0) else -size
