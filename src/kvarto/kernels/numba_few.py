"""Attention of a few query rows (decode): vector lanes run along the summed axis, the rows share each unpacked tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvarto.jit import inlined
from kvarto.kernels.numba_pages import LOG2_E, Terms, ask_for, capped, end_seen, exp2, first_seen, hide, read_k, read_v
from kvarto.kernels.numba_vectors import (
    blend_values,
    finish_scores,
    fold_channels,
    multiply_2_rows,
    multiply_3_rows,
    multiply_4_rows,
    multiply_row,
    weigh_scores,
)
from kvarto.simd import panels_at

FEW_ROWS = 8
"""Up to so many rows this way is the faster one."""


class FewScratch(NamedTuple):
    """float32, one thread's own. The two tiles share their memory; M rows of queries."""

    k_tile: Any  # [S, Dk]
    v_tile: Any  # [Dv, S]
    k: Terms
    v: Terms
    q: Any  # [M, Dk], times scale
    folded: Any  # [M, Dk], times the channel scale
    scores: Any  # [M, S], then probabilities
    product: Any  # [M, Dv]
    q_sum: Any  # [M], as are those below
    bias: Any
    fade: Any
    page_total: Any
    page_zero: Any


@inlined
def multiply(tile, x, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out [M, rows] = x [M, n] times tile [rows, n] transposed."""
    M = x.shape[0]
    r = 0
    while M - r >= 4:
        multiply_4_rows(tile, x, r, out)
        r += 4
    if M - r == 3:
        multiply_3_rows(tile, x, r, out)
    elif M - r == 2:
        multiply_2_rows(tile, x, r, out)
    elif M - r == 1:
        multiply_row(tile, x, r, out)


@inlined
def attend_few(job, table, pages, tile, head, scratch, out, top, total):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Queries of a tile (R heads each) to the pages pages[0] .. pages[1] - 1: out [M, Dv] not divided by total [M]; top [M] is the highest score."""
    M, Dv = out.shape
    R, S = job.R, job.S
    take_queries(job, tile, head, scratch)
    for m in range(M):
        top[m] = -np.inf
        total[m] = np.float32(0)
        for d in range(Dv):
            out[m, d] = np.float32(0)
    last = tile.position + tile.count - 1
    for j in range(pages[0], pages[1]):
        page = table[j]
        first, end = first_seen(tile.position, j, S, job.sliding_tokens), end_seen(last, j, S)
        if page < 0 or first >= end:
            continue
        read_k(job, page, head, scratch.k_tile, scratch.k)
        if j + 1 < pages[1]:
            ask_for(job, table[j + 1], head)
        score(scratch, job)
        whole = end_seen(tile.position, j, S) == S and first_seen(last, j, S, job.sliding_tokens) == 0
        if not whole:
            mask(scratch.scores, tile, R, j, job.sliding_tokens)
        read_v(job, page, head, scratch.v_tile, scratch.v)
        if not whole:
            hide(scratch.v_tile, first, end)
        add_values(scratch, out, top, total)


@inlined
def take_queries(job, tile, head, scratch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Row i * R + r is query i of the tile, head r of the group."""
    R, Dk = job.R, job.Dk
    q = panels_at(job.q, tile.first_query + tile.count, R * job.Hkv, Dk)
    factor = np.float32(job.scale if job.softcap > 0 else job.scale * LOG2_E)
    for i in range(tile.count):
        for r in range(R):
            m = i * R + r
            total = np.float32(0)
            for d in range(Dk):
                value = q[tile.first_query + i, head * R + r, d] * factor
                scratch.q[m, d] = value
                total += value
            scratch.q_sum[m] = total


@inlined
def score(scratch, job):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """scores [M, S] of all slots of the K tile, in units of log 2."""
    M, S = scratch.scores.shape
    for m in range(M):
        scratch.bias[m] = fold_channels(scratch.q[m], scratch.k.channel_scale, scratch.k.channel_zero, scratch.folded[m])
    multiply(scratch.k_tile, scratch.folded, scratch.scores)
    for m in range(M):
        finish_scores(scratch.scores[m], scratch.k.row_scale, scratch.k.row_zero, scratch.q_sum[m], scratch.bias[m])
    if job.softcap > 0:
        for m in range(M):
            for s in range(S):
                scratch.scores[m, s] = capped(scratch.scores[m, s], np.float32(job.softcap)) * np.float32(LOG2_E)


@inlined
def mask(scores, tile, R, page, sliding_tokens):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """-inf where a query may not look."""
    M, S = scores.shape
    for m in range(M):
        position = tile.position + m // R
        first, end = first_seen(position, page, S, sliding_tokens), end_seen(position, page, S)
        for s in range(S):
            if s < first or s >= end:
                scores[m, s] = -np.inf


@inlined
def add_values(scratch, out, top, total):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """One step of the online softmax with the V tile."""
    M = out.shape[0]
    for m in range(M):
        highest, page_total, page_zero = weigh_scores(scratch.scores[m], top[m], scratch.v.row_scale, scratch.v.row_zero)
        fade = exp2(top[m] - highest) if highest > np.float32(-np.inf) else np.float32(0)
        top[m], total[m] = highest, total[m] * fade + page_total
        scratch.fade[m], scratch.page_total[m], scratch.page_zero[m] = fade, page_total, page_zero
    multiply(scratch.v_tile, scratch.scores, scratch.product)
    for m in range(M):
        blend_values(
            out[m], scratch.product[m], scratch.v.channel_scale, scratch.v.channel_zero,
            scratch.fade[m], scratch.page_total[m], scratch.page_zero[m],
        )  # fmt: skip
