"""The compiled CPU kernel: a plan of small pieces of work, threads that take them one after another, and the merge of their results.

    tile    consecutive queries of a sequence within one page (so that the rule of base.py is the same for all of them), R heads each
    split   a tile and a run of its pages, cut at multiples of SPLIT_PAGES when the tile is small; one KV head of a split is an item

Where a tile begins and where it is cut depends on positions alone, and the splits of a tile are merged in their order by the thread that
finishes the last one. So the result of a sequence has the same bits in any batch and on any number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from kvarto.jit import compile_kernel, inlined
from kvarto.kernels.numba_few import FEW_ROWS, FewScratch, attend_few
from kvarto.kernels.numba_many import LANE_TERMS, ManyScratch, attend_many
from kvarto.kernels.numba_pages import JOB, LOG2_E, Terms, Tile, exp2
from kvarto.kernels.numba_vectors import PANEL
from kvarto.simd import address_of, fetch_add, floats_at, ints_at, longs_at, panels_at, tile_at

SPLIT_PAGES = 16
SPLIT_ROWS = 64
"""A tile of at most so many rows is split: its partial results are small and there may be too few tiles to go round."""
TILE_ROWS = 256
"""A tile has at most so many rows (but one query at least), so that its scratch stays in the second-level cache."""

TILE_FIELDS = 6  # row, first query, count, position, first split, end split
SPLIT_FIELDS = 4  # tile, first page, end page, row of its first partial result
_LINE_FLOATS = 16


def plan(pointer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Count the work of a job; with `tiles` and `splits` given, write it down too."""
    job = carray(pointer, 1)[0]
    write = job.tiles != 0
    tiles, splits = longs_at(job.tiles, job.tile_count, TILE_FIELDS), longs_at(job.splits, job.split_count, SPLIT_FIELDS)
    start, position = ints_at(job.start, job.B + 1), ints_at(job.position, job.B)
    most_queries = max(1, TILE_ROWS // job.R)
    tile_count, split_count, partial_rows, most_rows = 0, 0, 0, 0
    for row in range(job.B):
        query, end_query = np.int64(start[row]), np.int64(start[row + 1])
        while query < end_query:
            place = position[row] + query - start[row]
            slot = place % job.S
            count = min(job.S - slot, most_queries - slot % most_queries, end_query - query)
            rows = count * job.R
            first_split = split_count
            for part in range(2):
                page, end = page_range(job, place, part)
                while page < end:
                    stop = end if rows > SPLIT_ROWS else min(end, (page // SPLIT_PAGES + 1) * SPLIT_PAGES)
                    if write:
                        splits[split_count, 0], splits[split_count, 1] = tile_count, page
                        splits[split_count, 2], splits[split_count, 3] = stop, partial_rows
                    page = stop
                    split_count += 1
                    partial_rows += rows * job.Hkv
            if write:
                tiles[tile_count, 0], tiles[tile_count, 1], tiles[tile_count, 2] = row, query, count
                tiles[tile_count, 3], tiles[tile_count, 4], tiles[tile_count, 5] = place, first_split, split_count
            tile_count += 1
            most_rows = max(most_rows, rows)
            query += count
    job.tile_count, job.split_count, job.partial_rows, job.most_rows = tile_count, split_count, partial_rows, most_rows


@inlined
def page_range(job, position, part):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Pages first .. end - 1 that a query may read: packed pages are one run (part 0), raw ones two (sinks, then the recent ones)."""
    query_page = position // job.S
    first = 0 if job.sliding_tokens < 0 else max(0, position - job.sliding_tokens + 1) // job.S
    recent = max(job.sink_pages, query_page - job.window_pages)
    if job.raw == 0:
        end = query_page - job.window_pages if part == 0 else 0
        return max(first, job.sink_pages), min(job.N, end)
    if part == 0:
        return first, min(job.N, job.sink_pages, query_page + 1)
    return max(first, recent), min(job.N, query_page + 1)


def work(pointer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """One thread's part of a job: take items until there are none."""
    job = carray(pointer, 1)[0]
    memory = np.empty(scratch_floats(job), np.float32)
    few, many = take_scratch(job, address_of(memory))
    tiles, splits = longs_at(job.tiles, job.tile_count, TILE_FIELDS), longs_at(job.splits, job.split_count, SPLIT_FIELDS)
    while True:
        # The first counter is the next item, the others count for each tile and head how many of its splits are done.
        item = fetch_add(job.counters)
        if item >= job.split_count * job.Hkv:
            break
        split, head = item // job.Hkv, item % job.Hkv
        i, pages = splits[split, 0], (splits[split, 1], splits[split, 2])
        tile = Tile(tiles[i, 0], tiles[i, 1], tiles[i, 2], tiles[i, 3])
        table = ints_at(job.table + 4 * tile.row * job.N, job.N)
        M = tile.count * job.R
        out, top, total = partial(job, splits[split, 3] + head * M, M)
        if M <= FEW_ROWS:
            attend_few(job, table, pages, tile, head, first_rows(few, M), out, top, total)
        else:
            attend_many(job, table, pages, tile, head, many, out, top, total)
        if fetch_add(job.counters + 8 * (1 + i * job.Hkv + head)) == tiles[i, 5] - tiles[i, 4] - 1:
            merge_tile(job, tile, head, splits[tiles[i, 4] : tiles[i, 5], 3])


@inlined
def scratch_floats(job):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Numbers of scratch that a thread needs, with room to align each array."""
    S, Dk, Dv, panels = job.S, job.Dk, job.Dv, -(-job.most_rows // PANEL)
    fixed = S * max(Dk, Dv) + 4 * S + 2 * Dk + 2 * Dv
    few = FEW_ROWS * (2 * Dk + S + Dv + 5)
    many = panels * PANEL * (Dk + S + Dv + LANE_TERMS) + PANEL * (Dk + Dv)
    return fixed + few + many + 24 * _LINE_FLOATS


@inlined
def take(at, floats):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """(address rounded up to a cache line, the address after `floats` numbers from there)."""
    begin = (at + 63) // 64 * 64
    return begin, begin + 4 * floats


@inlined
def take_terms(at, S, D):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """(terms that change nothing, the address after them)."""
    row_scale, at = take(at, S)
    row_zero, at = take(at, S)
    channel_scale, at = take(at, D)
    channel_zero, at = take(at, D)
    terms = Terms(floats_at(row_scale, S), floats_at(row_zero, S), floats_at(channel_scale, D), floats_at(channel_zero, D))
    for s in range(S):
        terms.row_scale[s], terms.row_zero[s] = np.float32(1), np.float32(0)
    for d in range(D):
        terms.channel_scale[d], terms.channel_zero[d] = np.float32(1), np.float32(0)
    return terms, at


@inlined
def take_scratch(job, at):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """A thread's scratch from the memory at an address, for few rows and for many; they share what is read from pages."""
    S, Dk, Dv, panels = job.S, job.Dk, job.Dv, -(-job.most_rows // PANEL)
    tile, at = take(at, S * max(Dk, Dv))
    k_terms, at = take_terms(at, S, Dk)
    v_terms, at = take_terms(at, S, Dv)
    k_tile, v_tile = tile_at(tile, S, Dk), tile_at(tile, Dv, S)
    q, at = take(at, FEW_ROWS * Dk)
    folded, at = take(at, FEW_ROWS * Dk)
    scores, at = take(at, FEW_ROWS * S)
    product, at = take(at, FEW_ROWS * Dv)
    sums, at = take(at, 5 * FEW_ROWS)
    few = FewScratch(
        k_tile, v_tile, k_terms, v_terms, tile_at(q, FEW_ROWS, Dk), tile_at(folded, FEW_ROWS, Dk),
        tile_at(scores, FEW_ROWS, S), tile_at(product, FEW_ROWS, Dv), floats_at(sums, FEW_ROWS), floats_at(sums + 4 * FEW_ROWS, FEW_ROWS),
        floats_at(sums + 8 * FEW_ROWS, FEW_ROWS), floats_at(sums + 12 * FEW_ROWS, FEW_ROWS), floats_at(sums + 16 * FEW_ROWS, FEW_ROWS),
    )  # fmt: skip
    q, at = take(at, panels * Dk * PANEL)
    folded, at = take(at, Dk * PANEL)
    scores, at = take(at, panels * S * PANEL)
    product, at = take(at, Dv * PANEL)
    out, at = take(at, panels * Dv * PANEL)
    lanes, at = take(at, panels * LANE_TERMS * PANEL)
    many = ManyScratch(
        k_tile, v_tile, k_terms, v_terms, panels_at(q, panels, Dk, PANEL), tile_at(folded, Dk, PANEL),
        panels_at(scores, panels, S, PANEL), tile_at(product, Dv, PANEL), panels_at(out, panels, Dv, PANEL),
        panels_at(lanes, panels, LANE_TERMS, PANEL),
    )  # fmt: skip
    return few, many


@inlined
def first_rows(few, M):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The scratch for M rows of queries."""
    return FewScratch(
        few.k_tile, few.v_tile, few.k, few.v, few.q[:M], few.folded[:M], few.scores[:M], few.product[:M],
        few.q_sum, few.bias, few.fade, few.page_total, few.page_zero,
    )  # fmt: skip


@inlined
def partial(job, row, M):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Where a split's result for a head goes: out [M, Dv], its highest score [M], its sum of weights [M]."""
    out = job.partials + 4 * row * job.Dv
    top = job.partials + 4 * (job.partial_rows * job.Dv + row)
    return tile_at(out, M, job.Dv), floats_at(top, M), floats_at(top + 4 * job.partial_rows, M)


@inlined
def merge_tile(job, tile, head, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The partial results of all splits of a tile and head into out and lse, in the order of the splits."""
    M = tile.count * job.R
    for m in range(M):
        query = (tile.first_query + m // job.R) * job.Hkv * job.R + head * job.R + m % job.R
        target, lse = floats_at(job.out + 4 * query * job.Dv, job.Dv), floats_at(job.lse + 4 * query, 1)
        highest = np.float32(-np.inf)
        for split in range(rows.size):
            highest = max(highest, partial(job, rows[split] + head * M, M)[1][m])
        if highest == np.float32(-np.inf):
            continue
        sum_of_weights = np.float32(0)
        for split in range(rows.size):
            out, top, total = partial(job, rows[split] + head * M, M)
            weight = exp2(top[m] - highest)
            sum_of_weights += total[m] * weight
            for d in range(job.Dv):
                target[d] += out[m, d] * weight
        for d in range(job.Dv):
            target[d] /= sum_of_weights
        lse[0] = (highest + np.float32(np.log2(sum_of_weights))) / np.float32(LOG2_E)


@cache
def compiled() -> tuple[Any, Any]:
    """(plan, work) as C functions, compiled once for all codecs and geometries."""
    return compile_kernel(plan, JOB), compile_kernel(work, JOB)
