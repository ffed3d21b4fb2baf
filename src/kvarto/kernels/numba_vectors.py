"""The inner products and the softmax of attention, in vectors (kvarto/simd.py).

Arrays are float32 and given by address: numba's own arrays count references, which costs more than the work of a page. Lengths are multiples
of 8. A tile [rows, n] is multiplied in one of two ways, and each has its steps of the online softmax:

- `multiply_row` .. `multiply_4_rows`   by 1 to 4 vectors [n]: lanes run along n and are added up at the end. For few queries.
- `multiply_panel`                      by a panel [n, PANEL]: lanes are columns of the panel, nothing is added across them. For many queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.extending import intrinsic

from kvarto.simd import LANES, Emitter, integer, lowered

PANEL = 2 * LANES
"""Columns of a panel."""
# A block of accumulators must fit the registers (32, but 16 for AVX2) and be large enough to hide the latency of a multiply-add.
_PANEL_ROWS = 4 if LANES == 8 else 8
_BLOCK = 8 if LANES == 8 else 16
_VECTORS = PANEL // LANES

_address = _count = types.int64
_number = types.float32

# ---- products ------------------------------------------------------------------------------------------------------


def _panel(e: Emitter) -> None:
    (tile, x, out), rows, n = e.floats(0, 3, 4), e.arguments[1], e.arguments[2]
    slots = e.accumulators(_PANEL_ROWS * _VECTORS)
    with e.loop(integer(0), rows, _PANEL_ROWS) as (row, _):
        e.clear(slots)
        with e.loop(integer(0), n, 1) as (k, _):
            columns = [e.load(x, _column(e, k, v)) for v in range(_VECTORS)]
            for i in range(_PANEL_ROWS):
                code = e.splat(e.builder.load(e.builder.gep(tile, [e.index((e.index(row, integer(i)), n), k)])))
                for v in range(_VECTORS):
                    e.accumulate(slots[i * _VECTORS + v], code, columns[v])
        for i in range(_PANEL_ROWS):
            for v in range(_VECTORS):
                e.store(e.builder.load(slots[i * _VECTORS + v]), out, _column(e, e.index(row, integer(i)), v))


def _column(e: Emitter, row: Any, v: int) -> Any:
    """Index of vector v of a row of a panel."""
    return e.index((row, integer(PANEL)), integer(v * LANES))


@intrinsic  # type: ignore[untyped-decorator]
def multiply_panel(_context: Any, tile: Any, rows: Any, n: Any, x: Any, out: Any) -> Any:
    """out[row, c] = sum over k of tile[row, k] * x[k, c]. tile [rows, n], x [n, PANEL], out [rows, PANEL]."""
    return types.void(_address, _count, _count, _address, _address), lowered(_panel)


def _rows(vectors: int) -> Callable[[Emitter], None]:
    block = 8 if vectors <= 2 and _BLOCK == 16 else _BLOCK // 4

    def emit(e: Emitter) -> None:
        (tile, x, out), rows, n = e.floats(0, 3, 4), e.arguments[1], e.arguments[2]
        slots = e.accumulators(block * vectors)
        with e.loop(integer(0), rows, block) as (row, _):
            _prefetch_share(e, e.arguments[5], e.arguments[6], row, rows, block)
            e.clear(slots)

            def step(k: Any, lanes: int) -> None:
                xs = [e.load(x, e.index((n, integer(r)), k), lanes) for r in range(vectors)]
                for i in range(block):
                    codes = e.load(tile, e.index((e.index(row, integer(i)), n), k), lanes)
                    for r in range(vectors):
                        e.accumulate(slots[r * block + i], codes, xs[r])

            e.runs(n, step)
            sums, owners = e.add_lanes([e.builder.load(slot) for slot in slots])
            for r in range(vectors):
                _store_sums(e, sums, owners, range(r * block, (r + 1) * block), (out, e.index((rows, integer(r)), row)))

    return emit


def _prefetch_share(e: Emitter, address: Any, nbytes: Any, row: Any, rows: Any, block: int) -> None:
    """The share of a block of rows in prefetching `nbytes` bytes, a multiple of 64 bytes for each block but the last."""
    b = e.builder
    lines = b.add(b.udiv(nbytes, b.mul(rows, integer(64 // block))), integer(1))
    begin = b.mul(b.udiv(row, integer(block)), b.mul(lines, integer(64)))
    end = b.add(begin, b.mul(lines, integer(64)))
    stop = b.select(b.icmp_signed("<", end, nbytes), end, nbytes)
    with e.loop(begin, stop, 64) as (offset, _):
        e.prefetch(b.add(address, offset))


def _store_sums(
    e: Emitter, sums: Sequence[Any], owners: Sequence[list[int]], wanted: range, place: tuple[Any, Any]
) -> None:
    """Put the sums of the vectors `wanted` side by side, in as few pieces as the results that hold them."""
    done = 0
    while done < len(wanted):
        holder = next(i for i, owner in enumerate(owners) if wanted[done] in owner)
        piece = [owner for owner in wanted[done:] if owner in owners[holder]]
        lanes = [owners[holder].index(owner) for owner in piece]
        e.store(e.shuffle(sums[holder], sums[holder], lanes), place[0], e.index(place[1], integer(done)))
        done += len(piece)


_ROWS = [lowered(_rows(vectors)) for vectors in (1, 2, 3, 4)]
_ROWS_SIGNATURE = types.void(_address, _count, _count, _address, _address, _address, _count)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_row(_context: Any, tile: Any, rows: Any, n: Any, x: Any, out: Any, ahead: Any, ahead_nbytes: Any) -> Any:
    """out[row] = sum over k of tile[row, k] * x[k]. tile [rows, n], x [n], out [rows]. Meanwhile prefetches bytes that will be read soon."""
    return _ROWS_SIGNATURE, _ROWS[0]


@intrinsic  # type: ignore[untyped-decorator]
def multiply_2_rows(
    _context: Any, tile: Any, rows: Any, n: Any, x: Any, out: Any, ahead: Any, ahead_nbytes: Any
) -> Any:
    """As `multiply_row`, for x [2, n] and out [2, rows]."""
    return _ROWS_SIGNATURE, _ROWS[1]


@intrinsic  # type: ignore[untyped-decorator]
def multiply_3_rows(
    _context: Any, tile: Any, rows: Any, n: Any, x: Any, out: Any, ahead: Any, ahead_nbytes: Any
) -> Any:
    """As `multiply_row`, for x [3, n] and out [3, rows]."""
    return _ROWS_SIGNATURE, _ROWS[2]


@intrinsic  # type: ignore[untyped-decorator]
def multiply_4_rows(
    _context: Any, tile: Any, rows: Any, n: Any, x: Any, out: Any, ahead: Any, ahead_nbytes: Any
) -> Any:
    """As `multiply_row`, for x [4, n] and out [4, rows]."""
    return _ROWS_SIGNATURE, _ROWS[3]


# ---- few queries: one row at a time, lanes are slots or channels -----------------------------------------------------


def _take(e: Emitter) -> Any:
    source, out = e.floats(0, 3)
    factor, (total,) = e.splat(e.arguments[2]), e.accumulators(1)
    e.clear([total])

    def step(k: Any, lanes: int) -> None:
        x = e.builder.fmul(e.load(source, k, lanes), factor)
        e.builder.store(e.builder.fadd(e.builder.load(total), x), total)
        e.store(x, out, k, lanes)

    e.runs(e.arguments[1], step)
    return e.total(e.builder.load(total))


@intrinsic  # type: ignore[untyped-decorator]
def take_row(_context: Any, source: Any, n: Any, factor: Any, out: Any) -> Any:
    """out [n] = source [n] * factor; returns the sum of out."""
    return _number(_address, _count, _number, _address), lowered(_take)


def _fold(e: Emitter) -> Any:
    q, scale, zero, folded = e.floats(0, 1, 2, 4)
    (bias,) = e.accumulators(1)
    e.clear([bias])

    def step(k: Any, lanes: int) -> None:
        x = e.load(q, k, lanes)
        e.accumulate(bias, x, e.load(zero, k, lanes))
        e.store(e.builder.fmul(x, e.load(scale, k, lanes)), folded, k, lanes)

    e.runs(e.arguments[3], step)
    return e.total(e.builder.load(bias))


@intrinsic  # type: ignore[untyped-decorator]
def fold_row(_context: Any, q: Any, scale: Any, zero: Any, n: Any, folded: Any) -> Any:
    """folded = q * scale; returns q.zero. All [n]."""
    return _number(_address, _address, _address, _count, _address), lowered(_fold)


def _finish(e: Emitter) -> None:
    scores, scale, zero = e.floats(0, 1, 2)
    q_sum, bias = e.splat(e.arguments[4]), e.splat(e.arguments[5])

    def step(s: Any, lanes: int) -> None:
        rest = e.fma(e.load(zero, s, lanes), q_sum, bias)
        e.store(e.fma(e.load(scores, s, lanes), e.load(scale, s, lanes), rest), scores, s, lanes)

    e.runs(e.arguments[3], step)


@intrinsic  # type: ignore[untyped-decorator]
def finish_row(_context: Any, scores: Any, scale: Any, zero: Any, S: Any, q_sum: Any, bias: Any) -> Any:
    """scores = scores * scale + zero * q_sum + bias; the first three are [S]."""
    return types.void(_address, _address, _address, _count, _number, _number), lowered(_finish)


def _weigh(e: Emitter) -> Any:
    b, (scores, scale, zero), S = e.builder, e.floats(0, 3, 4), e.arguments[1]
    highest, total, zeros = e.accumulators(3)
    b.store(e.splat(e.arguments[2]), highest)
    e.clear([total, zeros])
    with e.loop(integer(0), S, LANES) as (s, _):  # S is a multiple of 32.
        b.store(e.larger(e.load(scores, s), b.load(highest)), highest)
    top = e.highest(b.load(highest))
    base = e.finite_or_0(e.splat(top))
    with e.loop(integer(0), S, LANES) as (s, _):
        weight = e.exp2(b.fsub(e.load(scores, s), base))
        b.store(b.fadd(b.load(total), weight), total)
        e.accumulate(zeros, weight, e.where_positive(weight, e.load(zero, s)))
        e.store(b.fmul(weight, e.where_positive(weight, e.load(scale, s))), scores, s)
    return e.pack([top, e.total(b.load(total)), e.total(b.load(zeros))])


@intrinsic  # type: ignore[untyped-decorator]
def weigh_row(_context: Any, scores: Any, S: Any, top: Any, scale: Any, zero: Any) -> Any:
    """Scores to weights 2^(score - new top), times scale. Returns (new top, sum of weights, sum of weights times zero). Arrays are [S].

    Where the weight is 0 the terms may be anything.
    """
    return types.UniTuple(_number, 3)(_address, _count, _number, _address, _address), lowered(_weigh)


def _blend(e: Emitter) -> None:
    out, product, scale, zero = e.floats(0, 1, 2, 3)
    fade, total, rest = (e.splat(e.arguments[i]) for i in (5, 6, 7))

    def step(d: Any, lanes: int) -> None:
        x = e.fma(e.load(out, d, lanes), fade, e.fma(e.load(zero, d, lanes), total, rest))
        e.store(e.fma(e.load(product, d, lanes), e.load(scale, d, lanes), x), out, d, lanes)

    e.runs(e.arguments[4], step)


@intrinsic  # type: ignore[untyped-decorator]
def blend_row(
    _context: Any, out: Any, product: Any, scale: Any, zero: Any, n: Any, fade: Any, total: Any, rest: Any
) -> Any:
    """out = out * fade + product * scale + zero * total + rest; the first four are [n]."""
    return types.void(*[_address] * 4, _count, _number, _number, _number), lowered(_blend)


def _add(e: Emitter) -> None:
    out, x = e.floats(0, 1)
    weight = e.splat(e.arguments[3])
    e.runs(
        e.arguments[2],
        lambda d, lanes: e.store(e.fma(e.load(x, d, lanes), weight, e.load(out, d, lanes)), out, d, lanes),
    )


@intrinsic  # type: ignore[untyped-decorator]
def add_row(_context: Any, out: Any, x: Any, n: Any, weight: Any) -> Any:
    """out = out + x * weight, both [n]."""
    return types.void(_address, _address, _count, _number), lowered(_add)


# ---- many queries: lanes are the columns of a panel ------------------------------------------------------------------


def _columns(e: Emitter, array: Any, row: Any = None) -> list[Any]:
    """The vectors of a row of a panel, or of a lone one."""
    return [e.load(array, _column(e, integer(0) if row is None else row, v)) for v in range(_VECTORS)]


def _store_columns(e: Emitter, vectors: Sequence[Any], array: Any, row: Any = None) -> None:
    for v, vector in enumerate(vectors):
        e.store(vector, array, _column(e, integer(0) if row is None else row, v))


def _at(e: Emitter, array: Any, i: Any) -> Any:
    """Number i of an array, in every lane."""
    return e.splat(e.builder.load(e.builder.gep(array, [i])))


def _fold_panel(e: Emitter) -> None:
    q, scale, zero, folded, bias = e.floats(0, 1, 2, 4, 5)
    sums = e.accumulators(_VECTORS)
    e.clear(sums)
    with e.loop(integer(0), e.arguments[3], 1) as (d, _):
        x, a, b = _columns(e, q, d), _at(e, scale, d), _at(e, zero, d)
        for v in range(_VECTORS):
            e.accumulate(sums[v], x[v], b)
        _store_columns(e, [e.builder.fmul(vector, a) for vector in x], folded, d)
    _store_columns(e, [e.builder.load(slot) for slot in sums], bias)


@intrinsic  # type: ignore[untyped-decorator]
def fold_panel(_context: Any, q: Any, scale: Any, zero: Any, n: Any, folded: Any, bias: Any) -> Any:
    """folded = q * scale, bias = q.zero. q and folded [n, PANEL], scale and zero [n], bias [PANEL]."""
    return types.void(_address, _address, _address, _count, _address, _address), lowered(_fold_panel)


def _finish_panel(e: Emitter) -> None:
    scores, scale, zero, q_sum, bias = e.floats(0, 1, 2, 4, 5)
    sums, biases = _columns(e, q_sum), _columns(e, bias)
    with e.loop(integer(0), e.arguments[3], 1) as (s, _):
        x, a, b = _columns(e, scores, s), _at(e, scale, s), _at(e, zero, s)
        _store_columns(e, [e.fma(x[v], a, e.fma(b, sums[v], biases[v])) for v in range(_VECTORS)], scores, s)


@intrinsic  # type: ignore[untyped-decorator]
def finish_panel(_context: Any, scores: Any, scale: Any, zero: Any, S: Any, q_sum: Any, bias: Any) -> Any:
    """scores = scores * scale + zero * q_sum + bias. scores [S, PANEL], scale and zero [S], q_sum and bias [PANEL]."""
    return types.void(_address, _address, _address, _count, _address, _address), lowered(_finish_panel)


def _weigh_panel(e: Emitter) -> None:
    b, (scores, top, fade, page_total), S = e.builder, e.floats(0, 2, 3, 4), e.arguments[1]
    highest, totals = e.accumulators(_VECTORS), e.accumulators(_VECTORS)
    before = _columns(e, top)
    for v in range(_VECTORS):
        b.store(before[v], highest[v])
    e.clear(totals)
    with e.loop(integer(0), S, 1) as (s, _):
        for slot, x in zip(highest, _columns(e, scores, s), strict=True):
            b.store(e.larger(x, b.load(slot)), slot)
    after = [b.load(slot) for slot in highest]
    base = [e.finite_or_0(vector) for vector in after]
    with e.loop(integer(0), S, 1) as (s, _):
        weights = [e.exp2(b.fsub(x, base[v])) for v, x in enumerate(_columns(e, scores, s))]
        for slot, weight in zip(totals, weights, strict=True):
            b.store(b.fadd(b.load(slot), weight), slot)
        _store_columns(e, weights, scores, s)
    _store_columns(e, after, top)
    _store_columns(e, [e.exp2(b.fsub(before[v], base[v])) for v in range(_VECTORS)], fade)
    _store_columns(e, [b.load(slot) for slot in totals], page_total)


@intrinsic  # type: ignore[untyped-decorator]
def weigh_panel(_context: Any, scores: Any, S: Any, top: Any, fade: Any, page_total: Any) -> Any:
    """Scores [S, PANEL] to weights 2^(score - new top). Updates top; fade is 2^(old top - new top), page_total the sum of weights; [PANEL]."""
    return types.void(_address, _count, _address, _address, _address), lowered(_weigh_panel)


def _scale_panel(e: Emitter) -> None:
    weights, scale, zero, rest = e.floats(0, 1, 2, 4)
    sums = e.accumulators(_VECTORS)
    e.clear(sums)
    with e.loop(integer(0), e.arguments[3], 1) as (s, _):
        x, a, b = _columns(e, weights, s), _at(e, scale, s), _at(e, zero, s)
        for v in range(_VECTORS):
            e.accumulate(sums[v], x[v], e.where_positive(x[v], b))
        _store_columns(e, [e.builder.fmul(vector, e.where_positive(vector, a)) for vector in x], weights, s)
    _store_columns(e, [e.builder.load(slot) for slot in sums], rest)


@intrinsic  # type: ignore[untyped-decorator]
def scale_panel(_context: Any, weights: Any, scale: Any, zero: Any, S: Any, rest: Any) -> Any:
    """rest = weights.zero, then weights = weights * scale. weights [S, PANEL], scale and zero [S], rest [PANEL].

    Where the weight is 0 the terms may be anything.
    """
    return types.void(_address, _address, _address, _count, _address), lowered(_scale_panel)


def _blend_panel(e: Emitter) -> None:
    out, product, scale, zero, fade, total, rest = e.floats(0, 1, 2, 3, 5, 6, 7)
    fades, totals, rests = _columns(e, fade), _columns(e, total), _columns(e, rest)
    with e.loop(integer(0), e.arguments[4], 1) as (d, _):
        old, new, a, b = _columns(e, out, d), _columns(e, product, d), _at(e, scale, d), _at(e, zero, d)
        blended = [e.fma(new[v], a, e.fma(old[v], fades[v], e.fma(b, totals[v], rests[v]))) for v in range(_VECTORS)]
        _store_columns(e, blended, out, d)


@intrinsic  # type: ignore[untyped-decorator]
def blend_panel(
    _context: Any, out: Any, product: Any, scale: Any, zero: Any, n: Any, fade: Any, total: Any, rest: Any
) -> Any:
    """out = out * fade + product * scale + zero * total + rest. out, product [n, PANEL]; scale, zero [n]; the last three [PANEL]."""
    return types.void(*[_address] * 4, _count, *[_address] * 3), lowered(_blend_panel)
