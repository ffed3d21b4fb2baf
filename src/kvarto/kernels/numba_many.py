"""Attention of many query rows (prefill): vector lanes are query rows, in panels of `PANEL`, so nothing is ever added across lanes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvarto.jit import inlined
from kvarto.kernels.numba_memory import get_float, get_int, prefetch, put_float
from kvarto.kernels.numba_pages import (
    FLOAT_NBYTES,
    cap,
    end_seen,
    factor,
    fill,
    first_seen,
    hide,
    next_pair,
    read_k,
    read_v,
    seen_by_all,
    take,
)
from kvarto.kernels.numba_vectors import (
    PANEL,
    blend_panel,
    finish_panel,
    fold_panel,
    multiply_panel,
    scale_panel,
    weigh_panel,
)


class Many(NamedTuple):
    """A thread's scratch, addresses of float32 arrays; N panels, whose columns are the rows of queries."""

    q: int  # N of [Dk, PANEL], times `factor`
    folded: int  # [Dk, PANEL], times the channel scale
    scores: int  # N of [S, PANEL], then weights
    product: int  # [Dv, PANEL]
    out: int  # N of [Dv, PANEL]
    q_sum: int  # N of [PANEL], as are those below
    top: int
    total: int
    fade: int
    page_total: int
    column: int  # [PANEL], short-lived


@inlined
def many_floats(job):  # type: ignore[no-untyped-def]
    """Numbers of scratch, with room to align each array."""
    panels = -(-job.most_rows // PANEL)
    return PANEL * (panels * (job.Dk + job.S + job.Dv + 5) + job.Dk + job.Dv + 1) + 11 * 16


@inlined
def take_many(job, at):  # type: ignore[no-untyped-def]
    """The scratch from the memory at an address."""
    panels = -(-job.most_rows // PANEL)
    q, at = take(at, panels * job.Dk * PANEL)
    folded, at = take(at, job.Dk * PANEL)
    scores, at = take(at, panels * job.S * PANEL)
    product, at = take(at, job.Dv * PANEL)
    out, at = take(at, panels * job.Dv * PANEL)
    q_sum, at = take(at, panels * PANEL)
    top, at = take(at, panels * PANEL)
    total, at = take(at, panels * PANEL)
    fade, at = take(at, panels * PANEL)
    page_total, at = take(at, panels * PANEL)
    column, at = take(at, PANEL)
    return Many(q, folded, scores, product, out, q_sum, top, total, fade, page_total, column)


@inlined
def attend_many(job, queries, head, table, first_page, end_page, unpacked, many, result):  # type: ignore[no-untyped-def]
    """As `numba_few.attend_few`."""
    M = queries.tokens * job.R
    panels = -(-M // PANEL)
    take_panels(job, queries, head, panels, many)
    fill(many.out, panels * job.Dv * PANEL, np.float32(0))
    fill(many.top, panels * PANEL, np.float32(-np.inf))
    fill(many.total, panels * PANEL, np.float32(0))
    last = queries.position + queries.tokens - 1
    for j in range(first_page, end_page):
        page = get_int(table, j)
        first, end = first_seen(job, queries.position, j), end_seen(job, last, j)
        if page < 0 or first >= end:
            continue
        read_k(job, page, head, unpacked)
        prefetch(*next_pair(job, table, j + 1, end_page, head))
        whole = seen_by_all(job, queries, j)
        for n in range(panels):
            score_panel(job, n, unpacked, many)
            if not whole:
                mask_panel(job, queries, n, j, many)
            weigh(job, n, many)
        read_v(job, page, head, unpacked)
        if not whole:
            hide(job, unpacked.tile, first, end)
        for n in range(panels):
            add_values(job, n, unpacked, many)
    give_panels(job, M, many, result)


@inlined
def take_panels(job, queries, head, panels, many):  # type: ignore[no-untyped-def]
    """Column m of all panels is query m // R, head m % R of the group. Columns beyond the last row repeat it."""
    M, scale = queries.tokens * job.R, factor(job)
    for n in range(panels):
        panel = many.q + FLOAT_NBYTES * n * job.Dk * PANEL
        for c in range(PANEL):
            m = min(n * PANEL + c, M - 1)
            q = job.q + FLOAT_NBYTES * (((queries.first + m // job.R) * job.Hkv + head) * job.R + m % job.R) * job.Dk
            q_sum = np.float32(0)
            for d in range(job.Dk):
                x = get_float(q, d) * scale
                put_float(panel, d * PANEL + c, x)
                q_sum += x
            put_float(many.q_sum, n * PANEL + c, q_sum)


@inlined
def give_panels(job, M, many, result):  # type: ignore[no-untyped-def]
    """The panels' results as rows."""
    out, top, total = result
    for m in range(M):
        panel, c = many.out + FLOAT_NBYTES * (m // PANEL) * job.Dv * PANEL, m % PANEL
        for d in range(job.Dv):
            put_float(out, m * job.Dv + d, get_float(panel, d * PANEL + c))
        put_float(top, m, get_float(many.top, m))
        put_float(total, m, get_float(many.total, m))


@inlined
def score_panel(job, n, unpacked, many):  # type: ignore[no-untyped-def]
    """Scores of all slots of the K tile, in units of log 2."""
    S, Dk, terms, panel = job.S, job.Dk, unpacked.k, FLOAT_NBYTES * n * PANEL
    scores = many.scores + panel * S
    fold_panel(many.q + panel * Dk, terms.channel_scale, terms.channel_zero, Dk, many.folded, many.column)
    multiply_panel(unpacked.tile, S, Dk, many.folded, scores)
    finish_panel(scores, terms.row_scale, terms.row_zero, S, many.q_sum + panel, many.column)
    if job.softcap > 0:
        cap(job, scores, S * PANEL)


@inlined
def mask_panel(job, queries, n, page, many):  # type: ignore[no-untyped-def]
    """-inf where a query may not look."""
    scores = many.scores + FLOAT_NBYTES * n * PANEL * job.S
    for c in range(PANEL):
        position = queries.position + min((n * PANEL + c) // job.R, queries.tokens - 1)
        first, end = first_seen(job, position, page), end_seen(job, position, page)
        for s in range(job.S):
            if s < first or s >= end:
                put_float(scores, s * PANEL + c, np.float32(-np.inf))


@inlined
def weigh(job, n, many):  # type: ignore[no-untyped-def]
    """Scores to weights, relative to the highest score so far."""
    panel = FLOAT_NBYTES * n * PANEL
    weigh_panel(many.scores + panel * job.S, job.S, many.top + panel, many.fade + panel, many.page_total + panel)
    for c in range(n * PANEL, (n + 1) * PANEL):
        put_float(many.total, c, get_float(many.total, c) * get_float(many.fade, c) + get_float(many.page_total, c))


@inlined
def add_values(job, n, unpacked, many):  # type: ignore[no-untyped-def]
    """Weights times the V tile."""
    S, Dv, terms, panel = job.S, job.Dv, unpacked.v, FLOAT_NBYTES * n * PANEL
    weights = many.scores + panel * S
    scale_panel(weights, terms.row_scale, terms.row_zero, S, many.column)
    multiply_panel(unpacked.tile, Dv, S, weights, many.product)
    blend_panel(
        many.out + panel * Dv, many.product, terms.channel_scale, terms.channel_zero, Dv,
        many.fade + panel, many.page_total + panel, many.column,
    )  # fmt: skip
