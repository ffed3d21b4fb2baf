"""Vector code that seals (kvarto/simd.py): the fit and the range of columns, codes into bytes. Called by numba_seal_slab.py.

Every float operation is one of the reference's (codecs/affine.py), rounded once, in the same order: nothing is fused or reassociated.

Tiles are float32 [rows, columns] by address, columns a multiple of 8. A panel is LANES of their columns, all rows: it stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvarto.kernels.numba_seal_numbers import (
    clamp,
    emit_half,
    emit_nearest,
    emit_ordered,
    emit_scale,
    kind_like,
    least,
    most,
    of_one,
)
from kvarto.sealing import FLOAT16_MAX, ROUNDS
from kvarto.simd import LANES, Emitter, f32, i8, i16, i32, integer, lowered

_address = _count = types.int64

# ---- columns -----------------------------------------------------------------------------------------------------------


def _slot(e: Emitter, value: Any) -> Any:
    """A stack slot that LLVM turns into a register, with a value."""
    slot = cgutils.alloca_once(e.builder, value.type)
    e.builder.store(value, slot)
    return slot


@contextmanager
def _while_above_one(e: Emitter, count: Any) -> Iterator[None]:
    """Repeat while the int64 in the slot `count` is above 1."""
    b = e.builder
    head, body, end = (b.append_basic_block(name) for name in ("head", "body", "end"))
    b.branch(head)
    b.position_at_end(head)
    b.cbranch(b.icmp_signed(">", b.load(count), integer(1)), body, end)
    b.position_at_end(body)
    yield
    b.branch(head)
    b.position_at_end(end)


def _means(e: Emitter, work: Sequence[Any], rows: Any, terms: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """Means over rows, added as `codecs.base.halving_mean` adds.

    `terms(row)` gives a vector for each room in `work`, pointers to float32 [rows / 2 + 1, LANES]; it is asked once for each row.
    """
    b, half = e.builder, e.builder.lshr(rows, integer(1))

    def put(row: Any, vectors: Sequence[Any]) -> None:
        for vector, room in zip(vectors, work, strict=True):
            e.store(vector, room, b.mul(row, integer(LANES)))

    def get(row: Any) -> list[Any]:
        return [e.load(room, b.mul(row, integer(LANES))) for room in work]

    def add(x: Sequence[Any], y: Sequence[Any]) -> list[Any]:
        return [b.fadd(one, other) for one, other in zip(x, y, strict=True)]

    def odd(number: Any) -> Any:
        return b.icmp_signed("!=", b.and_(number, integer(1)), integer(0))

    with e.loop(integer(0), half, 1) as (row, _):
        put(row, add(terms(row), terms(b.add(row, half))))
    with b.if_then(odd(rows)):
        put(half, terms(b.shl(half, integer(1))))
    count = _slot(e, b.sub(rows, half))
    with _while_above_one(e, count):
        held = b.load(count)
        half = b.lshr(held, integer(1))
        with e.loop(integer(0), half, 1) as (row, _):
            put(row, add(get(row), get(b.add(row, half))))
        with b.if_then(odd(held)):
            put(half, get(b.shl(half, integer(1))))
        b.store(b.sub(held, half), count)
    divisor = e.splat(b.sitofp(rows, f32))
    return [b.fdiv(total, divisor) for total in get(integer(0))]


def _refine(e: Emitter) -> None:
    (x, highest, work, terms), rows, columns = e.floats(0, 3, 4, 5), e.arguments[1], e.arguments[2]
    b = e.builder
    room = b.mul(rows, integer(LANES))
    codes, first_work = work, b.gep(work, [room])
    second_work = b.gep(first_work, [room])

    def panel(first: Any, lanes: int) -> None:
        def row_of(row: Any) -> Any:
            return e.load(x, e.index((row, columns), first), lanes)

        def code_of(row: Any) -> Any:
            return e.load(codes, b.mul(row, integer(LANES)))

        lowest, largest = _slot(e, e.constant(FLOAT16_MAX)), _slot(e, e.constant(-FLOAT16_MAX))
        with e.loop(integer(0), rows, 1) as (row, _):
            number = clamp(e, row_of(row), FLOAT16_MAX)
            e.store(number, x, e.index((row, columns), first), lanes)
            b.store(least(e, number, b.load(lowest)), lowest)
            b.store(most(e, number, b.load(largest)), largest)
        (mean,) = _means(e, [first_work], rows, lambda row: [row_of(row)])

        def squared(row: Any) -> list[Any]:
            centred = b.fsub(row_of(row), mean)
            return [b.fmul(centred, centred)]

        (variance,) = _means(e, [first_work], rows, squared)
        top = e.load(highest, first, lanes)
        scale = _slot(e, emit_scale(e, b.fdiv(b.fsub(b.load(largest), b.load(lowest)), top)))
        zero = _slot(e, emit_half(e, b.load(lowest)))

        def fit(*, last: bool) -> tuple[Any, Any]:
            """One round; (slope, mean of the codes)."""
            old_scale, old_zero = b.load(scale), b.load(zero)

            def code(row: Any) -> list[Any]:
                nearest = emit_nearest(e, row_of(row), old_scale, old_zero, top)
                e.store(nearest, codes, b.mul(row, integer(LANES)))
                return [nearest]

            (code_mean,) = _means(e, [first_work], rows, code)

            def products(row: Any) -> list[Any]:
                spread = b.fsub(code_of(row), code_mean)
                return [b.fmul(spread, spread), b.fmul(spread, b.fsub(row_of(row), mean))]

            code_variance, covariance = _means(e, [first_work, second_work], rows, products)
            positive = [b.fcmp_ordered(">", each, e.constant(0.0)) for each in (code_variance, covariance)]
            fits = b.and_(*positive)
            divisor = b.select(fits, code_variance, e.constant(1.0))
            slope = b.fdiv(variance if last else covariance, divisor)
            if last:
                slope = _square_root(e, slope)
            slope = b.select(fits, slope, old_scale)
            b.store(emit_scale(e, slope), scale)
            b.store(emit_half(e, b.fsub(mean, b.fmul(b.load(scale), code_mean))), zero)
            return slope, code_mean

        with e.loop(integer(0), integer(ROUNDS), 1):
            fit(last=False)
        slope, code_mean = fit(last=True)
        magnitude = most(e, b.fneg(b.load(lowest)), b.load(largest))
        for i, found in enumerate((slope, mean, code_mean, magnitude)):
            e.store(found, terms, e.index((integer(i), columns), first), lanes)

    e.runs(columns, panel)


def _square_root(e: Emitter, x: Any) -> Any:
    function = cgutils.get_or_insert_function(
        e.builder.module, ir.FunctionType(x.type, [x.type]), f"llvm.sqrt.v{LANES}f32"
    )
    return e.builder.call(function, [x])


@intrinsic  # type: ignore[untyped-decorator]
def refine_columns(_context: Any, x: Any, rows: Any, columns: Any, highest: Any, work: Any, terms: Any) -> Any:
    """affine.refine of each column of x [rows, columns], which is clamped.

    highest [columns]: the highest code; work: room for 3 * rows * LANES numbers. Into terms [4, columns]: the scale that keeps the variance, the
    mean, the mean of the codes, the largest magnitude.
    """
    return types.void(_address, _count, _count, _address, _address, _address), lowered(_refine)


def _choose(e: Emitter) -> None:
    (x, scale, zero, highest), (rows, columns) = e.floats(0, 3, 4, 5), e.arguments[1:3]
    codes = e.builder.inttoptr(e.arguments[6], i8.as_pointer())

    def panel(first: Any, lanes: int) -> None:
        terms = [e.load(each, first, lanes) for each in (scale, zero, highest)]
        with e.loop(integer(0), rows, 1) as (row, _):
            place = e.index((row, columns), first)
            _store_codes(e, emit_nearest(e, e.load(x, place, lanes), *terms), codes, place, lanes)

    e.runs(columns, panel)


def _store_codes(e: Emitter, vector: Any, codes: Any, place: Any, lanes: int) -> None:
    """float32 codes as bytes."""
    whole = e.builder.fptosi(vector, kind_like(vector, i32))
    e.store(e.builder.trunc(whole, kind_like(vector, i8)), codes, place, lanes)


@intrinsic  # type: ignore[untyped-decorator]
def choose_codes(
    _context: Any, x: Any, rows: Any, columns: Any, scale: Any, zero: Any, highest: Any, codes: Any
) -> Any:
    """Nearest codes of x [rows, columns], into uint8 [rows, columns]; scale, zero and highest code [columns]."""
    return types.void(_address, _count, _count, *[_address] * 4), lowered(_choose)


def _range(e: Emitter) -> None:
    (x, lowest, highest), (rows, columns) = e.floats(0, 3, 4), e.arguments[1:3]
    b, integers = e.builder, ir.VectorType(i32, LANES)

    def panel(first: Any, lanes: int) -> None:
        extremes = [_slot(e, ir.Constant(integers, [value] * LANES)) for value in (2**31 - 1, -(2**31))]
        with e.loop(integer(0), rows, 1) as (row, _):
            order = emit_ordered(e, b.bitcast(e.load(x, e.index((row, columns), first), lanes), integers))
            for slot, sign in zip(extremes, "<>", strict=True):
                held = b.load(slot)
                b.store(b.select(b.icmp_signed(sign, order, held), order, held), slot)
        for slot, out in zip(extremes, (lowest, highest), strict=True):
            e.store(b.bitcast(emit_ordered(e, b.load(slot)), ir.VectorType(f32, LANES)), out, first, lanes)

    e.runs(columns, panel)


@intrinsic  # type: ignore[untyped-decorator]
def range_of_columns(_context: Any, x: Any, rows: Any, columns: Any, lowest: Any, highest: Any) -> Any:
    """Lowest and highest number of each column of x [rows, columns]; of zeros the -0.0 is the lower one (affine.lowest)."""
    return types.void(_address, _count, _count, _address, _address), lowered(_range)


def _butterflies(e: Emitter) -> None:
    (x,), (rows, columns, power) = e.floats(0), e.arguments[1:]
    b = e.builder

    def panel(first: Any, lanes: int) -> None:
        # `left` is power / half, so that it reaches 1 when the last pairs, power / 2 apart, are done.
        left, level = _slot(e, power), _slot(e, integer(0))
        with _while_above_one(e, left):
            shift = b.load(level)
            half = b.shl(integer(1), shift)
            with e.loop(integer(0), b.lshr(rows, integer(1)), 1) as (pair, _):
                row = b.add(b.shl(b.lshr(pair, shift), b.add(shift, integer(1))), b.and_(pair, b.sub(half, integer(1))))
                places = [e.index((each, columns), first) for each in (row, b.add(row, half))]
                one, other = (e.load(x, place, lanes) for place in places)
                e.store(b.fadd(one, other), x, places[0], lanes)
                e.store(b.fsub(one, other), x, places[1], lanes)
            b.store(b.add(shift, integer(1)), level)
            b.store(b.lshr(b.load(left), integer(1)), left)

    e.runs(columns, panel)


@intrinsic  # type: ignore[untyped-decorator]
def butterflies(_context: Any, x: Any, rows: Any, columns: Any, power: Any) -> Any:
    """Sylvester's Hadamard matrix of order `power`, a power of two, applied to each run of so many rows of x [rows, columns], in place."""
    return types.void(_address, _count, _count, _count), lowered(_butterflies)


# ---- bytes -------------------------------------------------------------------------------------------------------------


@cache
def _packed(bits: int) -> Any:
    def emit(e: Emitter) -> None:
        b, (rows, columns, row_nbytes) = e.builder, e.arguments[1:4]
        codes, out = (b.inttoptr(e.arguments[i], i8.as_pointer()) for i in (0, 6))

        def row_of(row: Any) -> Callable[[Any, int], None]:
            def step(j: Any, lanes: int) -> None:
                kind, byte = ir.VectorType(i32, lanes), None
                shift = b.insert_element(ir.Constant(kind, ir.Undefined), b.trunc(e.arguments[5], i32), integer(0))
                shift = e.shuffle(shift, shift, [0] * lanes)
                for field in range(8 // bits):
                    place = e.index((row, columns), (row_nbytes, integer(field)), j)
                    code = b.lshr(b.zext(e.load(codes, place, lanes, i8), kind), shift)
                    code = b.and_(code, ir.Constant(kind, [(1 << bits) - 1] * lanes))
                    code = b.shl(code, ir.Constant(kind, [bits * field] * lanes))
                    byte = code if byte is None else b.or_(byte, code)
                vector = b.trunc(byte, ir.VectorType(i8, lanes))
                place = b.gep(out, [e.index((row, row_nbytes), j)])
                b.store(vector, b.bitcast(place, vector.type.as_pointer()), align=1)

            return step

        with e.loop(integer(0), rows, 1) as (row, _):
            e.any_runs(row_nbytes, row_of(row))

    return lowered(emit)


@intrinsic  # type: ignore[untyped-decorator]
def pack_codes(
    _context: Any, codes: Any, rows: Any, columns: Any, row_nbytes: Any, bits: Any, shift: Any, out: Any
) -> Any:
    """`bits` bits (a constant; 8, 4, 2 or 1), from bit `shift` on, of codes uint8 [rows, columns] as a plane (codecs/packing.py) at address `out`."""
    if not isinstance(bits, types.IntegerLiteral):
        return None
    signature = types.void(_address, _count, _count, _count, bits, _count, _address)
    return signature, _packed(bits.literal_value)


def _store_halves(e: Emitter) -> None:
    b, n = e.builder, e.arguments[1]
    bits, out = b.inttoptr(e.arguments[0], i32.as_pointer()), b.inttoptr(e.arguments[2], i16.as_pointer())

    def step(i: Any, lanes: int) -> None:
        vector = b.trunc(e.load(bits, i, lanes, i32), ir.VectorType(i16, lanes))
        b.store(vector, b.bitcast(b.gep(out, [i]), vector.type.as_pointer()), align=1)

    e.any_runs(n, step)


@intrinsic  # type: ignore[untyped-decorator]
def store_halves(_context: Any, bits: Any, n: Any, out: Any) -> Any:
    """The low 16 bits of int32 [n] as numbers of two bytes at address `out`."""
    return types.void(_address, _count, _address), lowered(_store_halves)


@intrinsic  # type: ignore[untyped-decorator]
def bytes_at(_context: Any, address: Any) -> Any:
    """An address as a pointer to uint8, for numba's carray."""
    return types.CPointer(types.uint8)(_address), of_one(lambda e, at: e.builder.inttoptr(at, i8.as_pointer()))
