"""Attention of many query rows (prefill): vector lanes are query rows, in panels of `PANEL`, so nothing is ever added across lanes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvarto.jit import inlined
from kvarto.kernels.numba_pages import LOG2_E, Terms, ask_for, capped, end_seen, exp2, first_seen, hide, read_k, read_v
from kvarto.kernels.numba_vectors import PANEL, multiply_panel
from kvarto.simd import panels_at


class ManyScratch(NamedTuple):
    """float32, one thread's own. The two tiles share their memory; N panels; the rows of a panel are lanes."""

    k_tile: Any  # [S, Dk]
    v_tile: Any  # [Dv, S]
    k: Terms
    v: Terms
    q: Any  # N of [Dk, PANEL], times scale
    folded: Any  # [Dk, PANEL], times the channel scale
    scores: Any  # N of [S, PANEL], then probabilities
    product: Any  # [Dv, PANEL]
    out: Any  # N of [Dv, PANEL]
    lanes: Any  # N of [LANE_TERMS, PANEL]


TOP, TOTAL, Q_SUM, FADE, PAGE_TOTAL, FIRST, END, BIAS, LANE_TERMS = range(9)


@inlined
def attend_many(job, table, pages, tile, head, scratch, out, top, total):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """As `numba_few.attend_few`."""
    M, Dv = out.shape
    R, S = job.R, job.S
    panels = -(-M // PANEL)
    for n in range(panels):
        take_panel(job, tile, head, n, scratch.q[n], scratch.lanes[n])
        for d in range(Dv):
            for c in range(PANEL):
                scratch.out[n, d, c] = np.float32(0)
    last = tile.position + tile.count - 1
    for j in range(pages[0], pages[1]):
        page = table[j]
        first, end = first_seen(tile.position, j, S, job.sliding_tokens), end_seen(last, j, S)
        if page < 0 or first >= end:
            continue
        whole = end_seen(tile.position, j, S) == S and first_seen(last, j, S, job.sliding_tokens) == 0
        if whole:
            first, end = 0, S
        read_k(job, page, head, scratch.k_tile, scratch.k)
        if j + 1 < pages[1]:
            ask_for(job, table[j + 1], head)
        for n in range(panels):
            score_panel(scratch, scratch.q[n], scratch.scores[n], scratch.lanes[n], job)
            if not whole:
                mask_panel(scratch.scores[n], scratch.lanes[n], tile, R, n, j, job.sliding_tokens)
            weigh_panel(scratch.scores[n], scratch.lanes[n])
        read_v(job, page, head, scratch.v_tile, scratch.v)
        if not whole:
            hide(scratch.v_tile, first, end)
        for n in range(panels):
            add_panel(scratch, first, end, scratch.scores[n], scratch.lanes[n], scratch.out[n])
    for m in range(M):
        n, c = m // PANEL, m % PANEL
        top[m], total[m] = scratch.lanes[n, TOP, c], scratch.lanes[n, TOTAL, c]
        for d in range(Dv):
            out[m, d] = scratch.out[n, d, c]


@inlined
def take_panel(job, tile, head, n, panel, lanes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Row i * R + r of the tile is query i, head r of the group. Lanes beyond the last row repeat it."""
    R, Dk = job.R, job.Dk
    M = tile.count * R
    q = panels_at(job.q, tile.first_query + tile.count, R * job.Hkv, Dk)
    factor = np.float32(job.scale if job.softcap > 0 else job.scale * LOG2_E)
    for c in range(PANEL):
        m = min(n * PANEL + c, M - 1)
        q_sum = np.float32(0)
        for d in range(Dk):
            value = q[tile.first_query + m // R, head * R + m % R, d] * factor
            panel[d, c] = value
            q_sum += value
        lanes[Q_SUM, c] = q_sum
        lanes[TOP, c] = -np.inf
        lanes[TOTAL, c] = np.float32(0)


@inlined
def score_panel(scratch, q, scores, lanes, job):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """scores [S, PANEL] of all slots of the K tile, in units of log 2."""
    Dk = q.shape[0]
    S = scores.shape[0]
    plain_scale, plain_zero = True, True
    for d in range(Dk):
        plain_scale &= scratch.k.channel_scale[d] == np.float32(1)
        plain_zero &= scratch.k.channel_zero[d] == np.float32(0)
    if plain_scale:
        multiply_panel(scratch.k_tile, q, scores)
    else:
        for d in range(Dk):
            for c in range(PANEL):
                scratch.folded[d, c] = q[d, c] * scratch.k.channel_scale[d]
        multiply_panel(scratch.k_tile, scratch.folded, scores)
    for c in range(PANEL):
        lanes[BIAS, c] = np.float32(0)
    if not plain_zero:
        for d in range(Dk):
            for c in range(PANEL):
                lanes[BIAS, c] += q[d, c] * scratch.k.channel_zero[d]
    for s in range(S):
        for c in range(PANEL):
            scores[s, c] = scores[s, c] * scratch.k.row_scale[s] + (scratch.k.row_zero[s] * lanes[Q_SUM, c] + lanes[BIAS, c])
    if job.softcap > 0:
        softcap = np.float32(job.softcap)
        for s in range(S):
            for c in range(PANEL):
                scores[s, c] = capped(scores[s, c], softcap) * np.float32(LOG2_E)


@inlined
def mask_panel(scores, lanes, tile, R, n, page, sliding_tokens):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """-inf where a query may not look."""
    S, M = scores.shape[0], tile.count * R
    for c in range(PANEL):
        position = tile.position + min(n * PANEL + c, M - 1) // R
        lanes[FIRST, c] = np.float32(first_seen(position, page, S, sliding_tokens))
        lanes[END, c] = np.float32(end_seen(position, page, S))
    for s in range(S):
        slot = np.float32(s)
        for c in range(PANEL):
            seen = (slot >= lanes[FIRST, c]) & (slot < lanes[END, c])
            scores[s, c] = scores[s, c] if seen else np.float32(-np.inf)


@inlined
def weigh_panel(scores, lanes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Scores to probabilities relative to the highest so far; FADE is what earlier sums are worth now."""
    S = scores.shape[0]
    for c in range(PANEL):
        lanes[FADE, c] = lanes[TOP, c]
    for s in range(S):
        for c in range(PANEL):
            lanes[TOP, c] = max(lanes[TOP, c], scores[s, c])
    for c in range(PANEL):
        base = lanes[TOP, c] if lanes[TOP, c] > np.float32(-np.inf) else np.float32(0)
        lanes[FADE, c] = exp2(lanes[FADE, c] - base)
        lanes[BIAS, c] = base
        lanes[PAGE_TOTAL, c] = np.float32(0)
    for s in range(S):
        for c in range(PANEL):
            scores[s, c] = exp2(scores[s, c] - lanes[BIAS, c])
    for s in range(S):
        for c in range(PANEL):
            lanes[PAGE_TOTAL, c] += scores[s, c]
    for c in range(PANEL):
        lanes[TOTAL, c] = lanes[TOTAL, c] * lanes[FADE, c] + lanes[PAGE_TOTAL, c]


@inlined
def add_panel(scratch, first, end, weights, lanes, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """One step of the online softmax, over the slots first .. end - 1; the other weights are 0."""
    Dv = out.shape[0]
    for c in range(PANEL):
        lanes[BIAS, c] = np.float32(0)
    for s in range(first, end):
        for c in range(PANEL):
            lanes[BIAS, c] += weights[s, c] * scratch.v.row_zero[s]
            weights[s, c] *= scratch.v.row_scale[s]
    multiply_panel(scratch.v_tile, weights, scratch.product)
    for d in range(Dv):
        scale, zero = scratch.v.channel_scale[d], scratch.v.channel_zero[d]
        for c in range(PANEL):
            out[d, c] = out[d, c] * lanes[FADE, c] + (scratch.product[d, c] * scale + (lanes[BIAS, c] + zero * lanes[PAGE_TOTAL, c]))
