"""The compiled CPU kernel: a plan of small pieces of work, threads that take them one after another, and the merge of their results.

    tile    consecutive queries of a sequence within one page (so that the rule of base.py is the same for all of them), R heads each
    split   a tile and a run of its pages, cut at multiples of SPLIT_PAGES when the tile is small; one KV head of a split is an item

Where a tile begins and where it is cut depends on positions alone, and the splits of a tile are merged in their order by the thread that
finishes the last one. So the result of a sequence has the same bits in any batch and on any number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from kvarto.jit import inlined
from kvarto.kernels.numba_few import FEW_ROWS, attend_few, few_floats, take_few
from kvarto.kernels.numba_many import attend_many, many_floats, take_many
from kvarto.kernels.numba_memory import address_of, fetch_add, get_float, get_int, get_long, put_float, put_long
from kvarto.kernels.numba_pages import (
    FLOAT_NBYTES,
    INT_NBYTES,
    LOG2_E,
    LONG_NBYTES,
    SPLIT_FIELDS,
    TILE_FIELDS,
    Queries,
    Unpacked,
    exp2,
    take,
    take_terms,
)
from kvarto.kernels.numba_vectors import add_row, take_row

SPLIT_PAGES = 16
SPLIT_ROWS = 64
"""A tile of at most so many rows is split: its partial results are small and there may be too few tiles to go round."""
TILE_ROWS = 256
"""A tile has at most so many rows (but one query at least), so that its scratch stays in the second-level cache."""


def plan(pointer):  # type: ignore[no-untyped-def]
    """Count the work of a job; with `tiles` and `splits` given, write it down too."""
    job = carray(pointer, 1)[0]
    most_queries = max(1, TILE_ROWS // job.R)
    tile_count, split_count, partial_rows, most_rows = 0, 0, 0, 0
    for row in range(job.B):
        first, query, end_query = get_int(job.start, row), get_int(job.start, row), get_int(job.start, row + 1)
        while query < end_query:
            position = get_int(job.position, row) + query - first
            slot = position % job.S
            count = min(job.S - slot, most_queries - slot % most_queries, end_query - query)
            first_split = split_count
            for part in range(2):
                page, end_page = page_range(job, position, part)
                while page < end_page:
                    end = (
                        end_page
                        if count * job.R > SPLIT_ROWS
                        else min(end_page, (page // SPLIT_PAGES + 1) * SPLIT_PAGES)
                    )
                    if job.splits != 0:
                        write(job.splits, split_count * SPLIT_FIELDS, (tile_count, page, end, partial_rows))
                    page = end
                    split_count += 1
                    partial_rows += count * job.R * job.Hkv
            if job.tiles != 0:
                write(job.tiles, tile_count * TILE_FIELDS, (row, query, count, position, first_split, split_count))
            tile_count += 1
            most_rows = max(most_rows, count * job.R)
            query += count
    job.tile_count, job.split_count, job.partial_rows, job.most_rows = tile_count, split_count, partial_rows, most_rows


@inlined
def write(address, i, values):  # type: ignore[no-untyped-def]
    """Write int64 numbers i .. of an array."""
    for j in range(len(values)):
        put_long(address, i + j, values[j])


@inlined
def page_range(job, position, part):  # type: ignore[no-untyped-def]
    """Pages first .. end - 1 that a query may read: packed pages are one run (part 0), raw ones two (sinks, then the recent ones)."""
    query_page = position // job.S
    first = max(0, position - job.sliding_tokens + 1) // job.S if job.sliding_tokens >= 0 else 0
    if job.raw == 0:
        return max(first, job.sink_pages), min(job.N, query_page - job.window_pages) if part == 0 else 0
    if part == 0:
        return first, min(job.N, job.sink_pages, query_page + 1)
    return max(first, job.sink_pages, query_page - job.window_pages), min(job.N, query_page + 1)


def work(pointer):  # type: ignore[no-untyped-def]
    """One thread's part of a job: take items until there are none."""
    job = carray(pointer, 1)[0]
    tile_floats = job.S * max(job.Dk, job.Dv)
    floats = tile_floats + 4 * job.S + 2 * job.Dk + 2 * job.Dv + few_floats(job) + many_floats(job) + 9 * 16
    memory = np.empty(floats, np.float32)
    tile, at = take(address_of(memory), tile_floats)
    k, at = take_terms(at, job.S, job.Dk)
    v, at = take_terms(at, job.S, job.Dv)
    unpacked, few, many = Unpacked(tile, k, v), take_few(job, at), take_many(job, at + FLOAT_NBYTES * few_floats(job))
    while True:
        # The first counter is the next item, the others count for each tile and head how many of its splits are done.
        item = fetch_add(job.counters)
        if item >= job.split_count * job.Hkv:
            break
        split, head = job.splits + LONG_NBYTES * SPLIT_FIELDS * (item // job.Hkv), item % job.Hkv
        i = get_long(split, 0)
        fields = job.tiles + LONG_NBYTES * TILE_FIELDS * i
        queries = Queries(get_long(fields, 0), get_long(fields, 1), get_long(fields, 2), get_long(fields, 3))
        first_split, end_split = get_long(fields, 4), get_long(fields, 5)
        table = job.table + INT_NBYTES * queries.row * job.N
        M = queries.tokens * job.R
        result = partial(job, get_long(split, 3) + head * M)
        if M <= FEW_ROWS:
            attend_few(job, queries, head, table, get_long(split, 1), get_long(split, 2), unpacked, few, result)
        else:
            attend_many(job, queries, head, table, get_long(split, 1), get_long(split, 2), unpacked, many, result)
        if fetch_add(job.counters + LONG_NBYTES * (1 + i * job.Hkv + head)) == end_split - first_split - 1:
            merge_splits(job, queries, head, first_split, end_split)
    address_of(memory)  # Keeps it alive until here.


@inlined
def partial(job, row):  # type: ignore[no-untyped-def]
    """Addresses of a partial result from a row on: out, the highest scores, the sums of weights."""
    top = job.partials + FLOAT_NBYTES * (job.partial_rows * job.Dv + row)
    return job.partials + FLOAT_NBYTES * row * job.Dv, top, top + FLOAT_NBYTES * job.partial_rows


@inlined
def merge_splits(job, queries, head, first_split, end_split):  # type: ignore[no-untyped-def]
    """The partial results of all splits of a tile and head into out and lse, in the order of the splits."""
    M = queries.tokens * job.R
    for m in range(M):
        query = ((queries.first + m // job.R) * job.Hkv + head) * job.R + m % job.R
        target = job.out + FLOAT_NBYTES * query * job.Dv
        highest = np.float32(-np.inf)
        for split in range(first_split, end_split):
            _, top, _ = partial(job, get_long(job.splits, split * SPLIT_FIELDS + 3) + head * M + m)
            if not get_float(top, 0) <= highest:  # So NaN is not lost.
                highest = get_float(top, 0)
        if highest == np.float32(-np.inf):
            continue
        sum_of_weights = np.float32(0)
        for split in range(first_split, end_split):
            out, top, total = partial(job, get_long(job.splits, split * SPLIT_FIELDS + 3) + head * M + m)
            weight = exp2(get_float(top, 0) - highest)
            sum_of_weights += get_float(total, 0) * weight
            add_row(target, out, job.Dv, weight)
        take_row(target, job.Dv, np.float32(1) / sum_of_weights, target)
        put_float(job.lse, query, (highest + np.float32(np.log2(sum_of_weights))) / np.float32(LOG2_E))
