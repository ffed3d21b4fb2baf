"""The inner products and the softmax of attention, in vectors (kvarto/simd.py). float32; every length is a multiple of 8.

A tile [rows, n] is multiplied in one of two ways, and each has its steps of the online softmax:

- `multiply_row` .. `multiply_4_rows`   by 1 to 4 vectors [n]: lanes run along n and are added up at the end. For few queries.
- `multiply_panel`                      by a panel [n, PANEL]: lanes are columns of the panel, nothing is added across them. For many queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvarto.simd import LANES, Emitter, integer, lowered

PANEL = 2 * LANES
"""Columns of a panel."""
# A block of accumulators must fit the registers (32, but 16 for AVX2) and be large enough to hide the latency of a multiply-add.
_PANEL_ROWS = 4 if LANES == 8 else 8
_BLOCK = 8 if LANES == 8 else 16

# ---- products ------------------------------------------------------------------------------------------------------


def _panel(e: Emitter) -> None:
    tile, x, out = e.array(0), e.array(1), e.array(2)
    rows, n = cgutils.unpack_tuple(e.builder, tile.shape)
    vectors = PANEL // LANES
    slots = e.accumulators(_PANEL_ROWS * vectors)
    with e.loop(integer(0), rows, _PANEL_ROWS) as (row, _):
        e.clear(slots)
        with e.loop(integer(0), n, 1) as (k, _):
            columns = [e.load(x.data, e.index((k, integer(PANEL)), integer(v * LANES)), LANES) for v in range(vectors)]
            for i in range(_PANEL_ROWS):
                code = e.splat(e.builder.load(e.builder.gep(tile.data, [e.index((e.index(row, integer(i)), n), k)])))
                for v in range(vectors):
                    e.accumulate(slots[i * vectors + v], code, columns[v])
        for i in range(_PANEL_ROWS):
            for v in range(vectors):
                place = e.index((e.index(row, integer(i)), integer(PANEL)), integer(v * LANES))
                e.store(e.builder.load(slots[i * vectors + v]), out.data, place)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_panel(_context: Any, tile: Any, x: Any, out: Any) -> Any:
    """out[row, c] = sum over k of tile[row, k] * x[k, c]. tile [rows, n], x [n, PANEL], out [rows, PANEL]; rows a multiple of 8."""
    return types.void(tile, x, out), lowered(_panel)


def _rows(vectors: int) -> Callable[[Emitter], None]:
    block = 8 if vectors <= 2 and _BLOCK == 16 else _BLOCK // 4

    def emit(e: Emitter) -> None:
        tile, x, out, first = e.array(0), e.array(1), e.array(3), e.arguments[2]
        rows, n = cgutils.unpack_tuple(e.builder, tile.shape)
        slots = e.accumulators(block * vectors)
        with e.loop(integer(0), rows, block) as (row, _):
            e.clear(slots)

            def step(k: Any, lanes: int) -> None:
                xs = [e.load(x.data, e.index((e.index(first, integer(r)), n), k), lanes) for r in range(vectors)]
                for i in range(block):
                    codes = e.load(tile.data, e.index((e.index(row, integer(i)), n), k), lanes)
                    for r in range(vectors):
                        e.accumulate(slots[r * block + i], codes, xs[r])

            e.runs(n, step)
            sums, owners = e.add_lanes([e.builder.load(slot) for slot in slots])
            for r in range(vectors):
                _store_sums(e, sums, owners, range(r * block, (r + 1) * block), (out.data, e.index((e.index(first, integer(r)), rows), row)))

    return emit


def _store_sums(e: Emitter, sums: Sequence[Any], owners: Sequence[list[int]], wanted: range, place: tuple[Any, Any]) -> None:
    """Put the sums of the vectors `wanted` side by side, in as few pieces as the results that hold them."""
    done = 0
    while done < len(wanted):
        holder = next(i for i, owner in enumerate(owners) if wanted[done] in owner)
        piece = [owner for owner in wanted[done:] if owner in owners[holder]]
        lanes = [owners[holder].index(owner) for owner in piece]
        e.store(e.shuffle(sums[holder], sums[holder], lanes), place[0], e.index(place[1], integer(done)))
        done += len(piece)


_ROWS = [lowered(_rows(vectors)) for vectors in (1, 2, 3, 4)]


@intrinsic  # type: ignore[untyped-decorator]
def multiply_row(_context: Any, tile: Any, x: Any, first: Any, out: Any) -> Any:
    """out[first, row] = sum over k of tile[row, k] * x[first, k]. tile [rows, n], x [M, n], out [M, rows]; rows and n multiples of 8."""
    return types.void(tile, x, types.int64, out), _ROWS[0]


@intrinsic  # type: ignore[untyped-decorator]
def multiply_2_rows(_context: Any, tile: Any, x: Any, first: Any, out: Any) -> Any:
    """As `multiply_row`, for x[first] and x[first + 1]."""
    return types.void(tile, x, types.int64, out), _ROWS[1]


@intrinsic  # type: ignore[untyped-decorator]
def multiply_3_rows(_context: Any, tile: Any, x: Any, first: Any, out: Any) -> Any:
    """As `multiply_row`, for 3 rows of x."""
    return types.void(tile, x, types.int64, out), _ROWS[2]


@intrinsic  # type: ignore[untyped-decorator]
def multiply_4_rows(_context: Any, tile: Any, x: Any, first: Any, out: Any) -> Any:
    """As `multiply_row`, for 4 rows of x."""
    return types.void(tile, x, types.int64, out), _ROWS[3]


# ---- softmax for few queries: one row of scores at a time, lanes are slots -------------------------------------------


def _fold(e: Emitter) -> Any:
    q, scale, zero, folded = (e.array(i).data for i in range(4))
    (bias,) = e.accumulators(1)
    e.clear([bias])

    def step(k: Any, lanes: int) -> None:
        x = e.load(q, k, lanes)
        e.accumulate(bias, x, e.load(zero, k, lanes))
        e.store(e.builder.fmul(x, e.load(scale, k, lanes)), folded, k, lanes)

    e.runs(e.length(0), step)
    return e.total(e.builder.load(bias))


@intrinsic  # type: ignore[untyped-decorator]
def fold_channels(_context: Any, q: Any, scale: Any, zero: Any, folded: Any) -> Any:
    """folded = q * scale, all [Dk]; returns q.zero."""
    return types.float32(q, scale, zero, folded), lowered(_fold)


def _finish(e: Emitter) -> None:
    scores, scale, zero = (e.array(i).data for i in range(3))
    q_sum, bias = e.splat(e.arguments[3]), e.splat(e.arguments[4])

    def step(s: Any, lanes: int) -> None:
        rest = e.fma(e.load(zero, s, lanes), q_sum, bias)
        e.store(e.fma(e.load(scores, s, lanes), e.load(scale, s, lanes), rest), scores, s, lanes)

    e.runs(e.length(0), step)


@intrinsic  # type: ignore[untyped-decorator]
def finish_scores(_context: Any, scores: Any, scale: Any, zero: Any, q_sum: Any, bias: Any) -> Any:
    """scores = scores * scale + zero * q_sum + bias, all [S]."""
    return types.void(scores, scale, zero, types.float32, types.float32), lowered(_finish)


def _weigh(e: Emitter) -> Any:
    b, scores, scale, zero = e.builder, e.array(0).data, e.array(2).data, e.array(3).data
    highest, total, zeros = e.accumulators(3)
    b.store(e.splat(e.arguments[1]), highest)
    e.clear([total, zeros])
    e.runs(e.length(0), lambda s, lanes: b.store(e.larger(e.load(scores, s, lanes), b.load(highest)), highest))
    top = e.highest(b.load(highest))
    base = e.splat(e.finite_or_0(top))

    def step(s: Any, lanes: int) -> None:
        weight = e.exp2(b.fsub(e.load(scores, s, lanes), base))
        b.store(b.fadd(b.load(total), weight), total)
        e.accumulate(zeros, weight, e.where_positive(weight, e.load(zero, s, lanes)))
        e.store(b.fmul(weight, e.where_positive(weight, e.load(scale, s, lanes))), scores, s, lanes)

    e.runs(e.length(0), step)
    return e.tuple([top, e.total(b.load(total)), e.total(b.load(zeros))])


@intrinsic  # type: ignore[untyped-decorator]
def weigh_scores(_context: Any, scores: Any, top: Any, scale: Any, zero: Any) -> Any:
    """Scores to weights 2^(score - new top), times scale; all [S]. Returns (new top, sum of weights, sum of weights times zero).

    Where the weight is 0 the terms may be anything.
    """
    kind = types.UniTuple(types.float32, 3)
    return kind(scores, types.float32, scale, zero), lowered(_weigh)


def _blend(e: Emitter) -> None:
    out, product, scale, zero = (e.array(i).data for i in range(4))
    fade, total, rest = (e.splat(e.arguments[i]) for i in range(4, 7))

    def step(d: Any, lanes: int) -> None:
        x = e.fma(e.load(out, d, lanes), fade, e.fma(e.load(zero, d, lanes), total, rest))
        e.store(e.fma(e.load(product, d, lanes), e.load(scale, d, lanes), x), out, d, lanes)

    e.runs(e.length(0), step)


@intrinsic  # type: ignore[untyped-decorator]
def blend_values(_context: Any, out: Any, product: Any, scale: Any, zero: Any, fade: Any, total: Any, rest: Any) -> Any:  # noqa: PLR0913
    """out = out * fade + product * scale + zero * total + rest; the first four are [Dv]."""
    return types.void(out, product, scale, zero, types.float32, types.float32, types.float32), lowered(_blend)
