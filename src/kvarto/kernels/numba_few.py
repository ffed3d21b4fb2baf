"""Attention of a few query rows (decode): vector lanes run along the summed axis, and all rows share each unpacked tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvarto.jit import inlined
from kvarto.kernels.numba_memory import get_float, get_int, put_float
from kvarto.kernels.numba_pages import (
    FLOAT_NBYTES,
    cap,
    end_seen,
    exp2,
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
    blend_row,
    finish_row,
    fold_row,
    multiply_2_rows,
    multiply_3_rows,
    multiply_4_rows,
    multiply_row,
    take_row,
    weigh_row,
)

FEW_ROWS = 3 * PANEL // 4
"""Up to so many rows, this way is the faster one: a panel costs the same however few of its columns are used."""


class Few(NamedTuple):
    """A thread's scratch, addresses of float32 arrays; M rows."""

    q: int  # [M, Dk], times `factor`
    folded: int  # [M, Dk], times the channel scale
    scores: int  # [M, S], then weights
    product: int  # [M, Dv]
    q_sum: int  # [M], as are those below
    bias: int
    fade: int
    page_total: int
    rest: int


@inlined
def few_floats(job):  # type: ignore[no-untyped-def]
    """Numbers of scratch, with room to align each array."""
    return FEW_ROWS * (2 * job.Dk + job.S + job.Dv + 5) + 9 * 16


@inlined
def take_few(job, at):  # type: ignore[no-untyped-def]
    """The scratch from the memory at an address."""
    q, at = take(at, FEW_ROWS * job.Dk)
    folded, at = take(at, FEW_ROWS * job.Dk)
    scores, at = take(at, FEW_ROWS * job.S)
    product, at = take(at, FEW_ROWS * job.Dv)
    q_sum, at = take(at, FEW_ROWS)
    bias, at = take(at, FEW_ROWS)
    fade, at = take(at, FEW_ROWS)
    page_total, at = take(at, FEW_ROWS)
    rest, at = take(at, FEW_ROWS)
    return Few(q, folded, scores, product, q_sum, bias, fade, page_total, rest)


@inlined
def attend_few(job, queries, head, table, first_page, end_page, unpacked, few, result):  # type: ignore[no-untyped-def]
    """Attend the queries to pages first_page .. end_page - 1 of their sequence; table int32 [N].

    result: addresses of out [M, Dv], not yet divided by the sums of weights [M], and the highest scores [M].
    """
    out, top, total = result
    M = queries.tokens * job.R
    for m in range(M):
        q = ((queries.first + m // job.R) * job.Hkv + head) * job.R + m % job.R
        q_sum = take_row(job.q + FLOAT_NBYTES * q * job.Dk, job.Dk, factor(job), few.q + FLOAT_NBYTES * m * job.Dk)
        put_float(few.q_sum, m, q_sum)
    fill(out, M * job.Dv, np.float32(0))
    fill(top, M, np.float32(-np.inf))
    fill(total, M, np.float32(0))
    last = queries.position + queries.tokens - 1
    for j in range(first_page, end_page):
        page = get_int(table, j)
        first, end = first_seen(job, queries.position, j), end_seen(job, last, j)
        if page < 0 or first >= end:
            continue
        read_k(job, page, head, unpacked)
        # The bytes of the next page are asked for bit by bit during both products, so that they arrive while there is something to do.
        ahead, ahead_nbytes = next_pair(job, table, j + 1, end_page, head)
        score(job, M, unpacked, few, ahead, ahead_nbytes // 3)
        whole = seen_by_all(job, queries, j)
        if not whole:
            mask(job, queries, j, few)
        read_v(job, page, head, unpacked)
        if not whole:
            hide(job, unpacked.tile, first, end)
        add_values(job, M, unpacked, few, out, top, total, ahead + ahead_nbytes // 3, ahead_nbytes - ahead_nbytes // 3)


@inlined
def multiply(tile, rows, n, M, x, out, ahead, ahead_nbytes):  # type: ignore[no-untyped-def]
    """out [M, rows] = x [M, n] times the transposed tile [rows, n]; meanwhile prefetches."""
    m = 0
    while m < M:
        x_m, out_m = x + FLOAT_NBYTES * m * n, out + FLOAT_NBYTES * m * rows
        if M - m >= 4:
            multiply_4_rows(tile, rows, n, x_m, out_m, ahead, ahead_nbytes)
        elif M - m == 3:
            multiply_3_rows(tile, rows, n, x_m, out_m, ahead, ahead_nbytes)
        elif M - m == 2:
            multiply_2_rows(tile, rows, n, x_m, out_m, ahead, ahead_nbytes)
        else:
            multiply_row(tile, rows, n, x_m, out_m, ahead, ahead_nbytes)
        m += min(4, M - m)
        ahead_nbytes = 0


@inlined
def score(job, M, unpacked, few, ahead, ahead_nbytes):  # type: ignore[no-untyped-def]
    """Scores of all slots of the K tile, in units of log 2."""
    S, Dk, terms = job.S, job.Dk, unpacked.k
    for m in range(M):
        row = FLOAT_NBYTES * m * Dk
        put_float(few.bias, m, fold_row(few.q + row, terms.channel_scale, terms.channel_zero, Dk, few.folded + row))
    multiply(unpacked.tile, S, Dk, M, few.folded, few.scores, ahead, ahead_nbytes)
    for m in range(M):
        q_sum, bias = get_float(few.q_sum, m), get_float(few.bias, m)
        finish_row(few.scores + FLOAT_NBYTES * m * S, terms.row_scale, terms.row_zero, S, q_sum, bias)
    if job.softcap > 0:
        cap(job, few.scores, M * S)


@inlined
def mask(job, queries, page, few):  # type: ignore[no-untyped-def]
    """-inf where a query may not look."""
    for m in range(queries.tokens * job.R):
        position, row = queries.position + m // job.R, few.scores + FLOAT_NBYTES * m * job.S
        first, end = min(job.S, first_seen(job, position, page)), max(0, end_seen(job, position, page))
        fill(row, first, np.float32(-np.inf))
        fill(row + FLOAT_NBYTES * end, job.S - end, np.float32(-np.inf))


@inlined
def add_values(job, M, unpacked, few, out, top, total, ahead, ahead_nbytes):  # type: ignore[no-untyped-def]
    """One step of the online softmax: scores to weights, weights times the V tile."""
    S, Dv, terms = job.S, job.Dv, unpacked.v
    for m in range(M):
        before = get_float(top, m)
        highest, page_total, rest = weigh_row(
            few.scores + FLOAT_NBYTES * m * S, S, before, terms.row_scale, terms.row_zero
        )
        fade = exp2(before - highest) if highest > np.float32(-np.inf) else np.float32(0)
        put_float(top, m, highest)
        put_float(total, m, get_float(total, m) * fade + page_total)
        put_float(few.fade, m, fade)
        put_float(few.page_total, m, page_total)
        put_float(few.rest, m, rest)
    multiply(unpacked.tile, Dv, S, M, few.scores, few.product, ahead, ahead_nbytes)
    for m in range(M):
        row = FLOAT_NBYTES * m * Dv
        blend_row(
            out + row, few.product + row, terms.channel_scale, terms.channel_zero, Dv,
            get_float(few.fade, m), get_float(few.page_total, m), get_float(few.rest, m),
        )  # fmt: skip
