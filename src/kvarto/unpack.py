"""What compiled tile readers are made of (kvarto/simd.py): codes and stored floats to float32. Arrays are numba's; byte offsets count from the slab.

- `unpack_codes`    codes of 8, 4, 3 or 2 bits (10 times faster than a loop in numba)
- `add_bits`        one or two more bits for some columns
- `load_numbers`, `load_low`, `load_fp8s`, `scale_numbers`    stored floats, and scaling by them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvarto.simd import Emitter, f32, i8, i16, i32, integer, lowered
from kvarto.tile import LOW_ZERO_STEPS, LOW_ZEROS

_CODE_PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}

# ---- codes ---------------------------------------------------------------------------------------------------------


def _unpack(bits: int) -> Callable[[Emitter], None]:
    planes = _CODE_PLANES[bits]
    runs = 8 // min(planes)  # A row falls into as many runs as a byte of the narrowest plane holds codes.

    def step(e: Emitter, starts: Sequence[Any], run: Any, target: tuple[Any, Any], lanes: int) -> None:
        """`lanes` codes of every run, those of run 0 beginning at target; starts: byte of the first of them in each plane."""
        b, kind = e.builder, ir.VectorType(i32, lanes)
        slab = e.array(0).data
        loaded = [
            [b.zext(e.load(slab, e.index(start, (run, integer(i))), lanes, i8), kind) for i in range(runs * width // 8)]
            for start, width in zip(starts, planes, strict=True)
        ]
        for part in range(runs):
            code, shift = None, 0
            for plane, width in zip(loaded, planes, strict=True):
                byte, position = plane[part % len(plane)], part // len(plane) * width
                bits_here = b.lshr(byte, ir.Constant(kind, [position] * lanes)) if position else byte
                if position + width < 8:
                    bits_here = b.and_(bits_here, ir.Constant(kind, [(1 << width) - 1] * lanes))
                bits_here = b.shl(bits_here, ir.Constant(kind, [shift] * lanes)) if shift else bits_here
                code, shift = bits_here if code is None else b.or_(code, bits_here), shift + width
            e.store(
                b.sitofp(code, ir.VectorType(f32, lanes)), target[0], e.index(target[1], (run, integer(part))), lanes
            )

    def emit(e: Emitter) -> None:
        tile, at = e.array(4), (e.arguments[1], e.arguments[2])
        rows, columns = cgutils.unpack_tuple(e.builder, tile.shape)
        run = e.builder.udiv(columns, integer(runs))
        with e.loop(integer(0), rows, 1) as (row, _):
            row_nbytes = [e.builder.udiv(e.builder.mul(columns, integer(width)), integer(8)) for width in planes]

            def codes(j: Any, lanes: int) -> None:
                starts = [e.index(first, (row, nbytes), j) for first, nbytes in zip(at, row_nbytes, strict=False)]
                step(e, starts, run, (tile.data, e.index((row, columns), j)), lanes)

            e.any_runs(run, codes)

    return emit


_UNPACK = {bits: lowered(_unpack(bits)) for bits in _CODE_PLANES}


@intrinsic  # type: ignore[untyped-decorator]
def unpack_codes(_context: Any, slab: Any, low: Any, high: Any, bits: Any, tile: Any) -> Any:
    """Codes of `bits` bits (a constant; 8, 4, 3 or 2) into tile float32 [rows, columns], columns a multiple of 8.

    slab uint8 [n]; their bytes begin at `low`, the plane of third bits at `high` (docs/page-format.md).
    """
    if not isinstance(bits, types.IntegerLiteral):
        return None
    return types.void(slab, types.int64, types.int64, bits, tile), _UNPACK[bits.literal_value]


_WORD_NBYTES = 4


def _add_bits(bits: int, row_nbytes: int) -> Callable[[Emitter], None]:
    """Field f of byte j is the code of column j + f * row_nbytes, counted over both runs of columns."""
    fields = 8 // bits

    def emit(e: Emitter) -> None:
        b, slab, tile = e.builder, e.array(0).data, e.array(4)
        rows, columns = cgutils.unpack_tuple(b, tile.shape)
        firsts = e.arguments[5], e.index(e.arguments[5], b.udiv(columns, integer(2)))

        def add(codes: Any, lanes: int, place: Any) -> None:
            """Weight times the codes, i32 [lanes] with other bits above them, onto the tile from `place` on."""
            integers, floats = codes.type, ir.VectorType(f32, lanes)
            weight = b.insert_element(ir.Constant(floats, ir.Undefined), e.arguments[3], ir.Constant(i32, 0))
            codes = b.and_(codes, ir.Constant(integers, [(1 << bits) - 1] * lanes))
            old = b.load(b.bitcast(b.gep(tile.data, [place]), floats.as_pointer()), align=4)
            weights = e.shuffle(weight, weight, [0] * lanes)
            e.store(e.fma(b.sitofp(codes, floats), weights, old), tile.data, place, lanes)

        def row_of_words(row: Any) -> None:
            """A row is so short that each run of columns is one vector: the whole row, shifted by another number of bits in each lane."""
            word = ir.Constant(i32, 0)
            for j in range(row_nbytes):
                byte = b.load(b.gep(slab, [e.index(e.arguments[1], (row, integer(row_nbytes)), integer(j))]))
                word = b.or_(word, b.shl(b.zext(byte, i32), ir.Constant(i32, 8 * j)))
            lanes = fields // 2 * row_nbytes
            integers = ir.VectorType(i32, lanes)
            words = b.insert_element(ir.Constant(integers, ir.Undefined), word, ir.Constant(i32, 0))
            words = e.shuffle(words, words, [0] * lanes)
            for half in range(2):
                held = range(half * lanes, (half + 1) * lanes)
                shifts = [8 * (i % row_nbytes) + bits * (i // row_nbytes) for i in held]
                place = e.index((row, columns), firsts[half])
                add(b.lshr(words, ir.Constant(integers, shifts)), lanes, place)

        def row_of_bytes(row: Any) -> None:
            def step(j: Any, lanes: int) -> None:
                integers = ir.VectorType(i32, lanes)
                byte = e.load(slab, e.index(e.arguments[1], (row, integer(row_nbytes)), j), lanes, i8)
                for field in range(fields):
                    shift = ir.Constant(integers, [bits * field] * lanes)
                    run = integer(field % (fields // 2) * row_nbytes)
                    place = e.index((row, columns), firsts[field // (fields // 2)], run, j)
                    add(b.lshr(b.zext(byte, integers), shift), lanes, place)

            e.any_runs(integer(row_nbytes), step)

        with e.loop(integer(0), rows, 1) as (row, _):
            (row_of_words if bits == 1 and row_nbytes <= _WORD_NBYTES else row_of_bytes)(row)

    return emit


@cache
def _added(bits: int, row_nbytes: int) -> Any:
    return lowered(_add_bits(bits, row_nbytes))


@intrinsic  # type: ignore[untyped-decorator]
def add_bits(
    _context: Any, slab: Any, start: Any, bits: Any, weight: Any, tile: Any, first: Any, row_nbytes: Any
) -> Any:
    """Onto some columns of tile float32 [rows, columns]: `weight` times codes of `bits` bits (a constant; 1 or 2) from byte `start` of slab on.

    They are packed as in docs/page-format.md, `row_nbytes` (a constant) bytes a row; half of them stand for the columns from `first` on, the
    other half for those half a row of the tile further.
    """
    if not isinstance(bits, types.IntegerLiteral) or not isinstance(row_nbytes, types.IntegerLiteral):
        return None
    emit = _added(bits.literal_value, row_nbytes.literal_value)
    return types.void(slab, types.int64, bits, types.float32, tile, types.int64, row_nbytes), emit


# ---- stored floats -------------------------------------------------------------------------------------------------


def _wide(e: Emitter, dtype: str, at: Any, lanes: int) -> Any:
    """`lanes` stored floats at byte `at` of the slab, which is argument 0, as float32."""
    b, slab = e.builder, e.array(0).data
    floats = ir.VectorType(f32, lanes)
    if dtype == "float32":
        return b.bitcast(e.load(slab, at, 4 * lanes, i8), floats)
    if dtype == "short":
        upper = b.zext(e.load(slab, at, lanes, i8), ir.VectorType(i16, lanes))
        return e.widen_half(b.shl(upper, ir.Constant(upper.type, [7] * lanes)))
    bits = b.bitcast(e.load(slab, at, 2 * lanes, i8), ir.VectorType(i16, lanes))
    if dtype == "float16":
        return e.widen_half(bits)
    integers = ir.VectorType(i32, lanes)
    return b.bitcast(b.shl(b.zext(bits, integers), ir.Constant(integers, [16] * lanes)), floats)


def _load(dtype: str) -> Callable[[Emitter], None]:
    size = {"float32": 4, "short": 1}.get(dtype, 2)

    def emit(e: Emitter) -> None:
        out = e.array(3)

        def step(i: Any, lanes: int) -> None:
            e.store(_wide(e, dtype, e.index(e.arguments[1], (i, integer(size))), lanes), out.data, i, lanes)

        e.any_runs(e.length(out), step)

    return emit


_LOAD = {dtype: lowered(_load(dtype)) for dtype in ("float16", "bfloat16", "float32", "short")}


@intrinsic  # type: ignore[untyped-decorator]
def load_numbers(_context: Any, slab: Any, start: Any, dtype: Any, out: Any) -> Any:
    """Numbers of `dtype` (a constant) at byte `start` of slab uint8 [nbytes] into float32 out [n]."""
    if not isinstance(dtype, types.StringLiteral):
        return None
    return types.void(slab, types.int64, dtype, out), _LOAD[dtype.literal_value]


def _load_low(e: Emitter) -> None:
    b, slab, scales, out = e.builder, e.array(0).data, e.array(3), e.array(4)

    def step(i: Any, lanes: int) -> None:
        integers, floats = ir.VectorType(i32, lanes), ir.VectorType(f32, lanes)
        place = e.index(e.arguments[1], (i, integer(2)))
        bits = b.bitcast(e.load(slab, place, 2 * lanes, i8), ir.VectorType(i16, lanes))
        low = b.and_(b.zext(bits, integers), ir.Constant(integers, [LOW_ZEROS - 1] * lanes))
        part = ir.Constant(floats, [1 / LOW_ZERO_STEPS] * lanes)
        middle = b.insert_element(ir.Constant(floats, ir.Undefined), e.arguments[2], ir.Constant(i32, 0))
        steps = e.fma(b.sitofp(low, floats), part, e.shuffle(middle, middle, [0] * lanes))
        scale = b.load(b.bitcast(b.gep(scales.data, [i]), floats.as_pointer()), align=4)
        e.store(b.fmul(scale, steps), out.data, i, lanes)

    e.any_runs(e.length(out), step)


@intrinsic  # type: ignore[untyped-decorator]
def load_low(_context: Any, slab: Any, start: Any, middle: Any, scales: Any, out: Any) -> Any:
    """Zeros in the low bits of float16 scales at byte `start` of slab: out = scales * (low / 4 + middle), float32 [n]; see kvarto/tile.py."""
    return types.void(slab, types.int64, types.float32, scales, out), lowered(_load_low)


def _load_fp8(e5m2: bool) -> Callable[[Emitter], None]:
    def emit(e: Emitter) -> None:
        b, slab, out = e.builder, e.array(0).data, e.array(3)

        def step(i: Any, lanes: int) -> None:
            bits = ir.VectorType(i16, lanes)

            def splat(value: int) -> Any:
                return ir.Constant(bits, [value] * lanes)

            byte = b.zext(e.load(slab, e.index(e.arguments[1], i), lanes, i8), bits)
            # e5m2 is the upper byte of a binary16; e4m3 is one with another bias, 2^8 off, if exponent and mantissa are shifted by one less.
            half = b.shl(byte, splat(8))
            if not e5m2:
                half = b.or_(b.and_(half, splat(0x8000)), b.shl(b.and_(byte, splat(0x7F)), splat(7)))
            number = e.widen_half(half)
            if not e5m2:
                number = b.fmul(number, ir.Constant(number.type, [256.0] * lanes))
            e.store(number, out.data, i, lanes)

        e.any_runs(e.length(out), step)

    return emit


_LOAD_FP8 = {e5m2: lowered(_load_fp8(e5m2)) for e5m2 in (False, True)}


@intrinsic  # type: ignore[untyped-decorator]
def load_fp8s(_context: Any, slab: Any, start: Any, e5m2: Any, out: Any) -> Any:
    """float8 numbers, e5m2 or e4m3 (a constant), at byte `start` of slab uint8 [nbytes] into float32 out [n]. Exact, subnormals included."""
    if not isinstance(e5m2, types.BooleanLiteral):
        return None
    return types.void(slab, types.int64, e5m2, out), _LOAD_FP8[e5m2.literal_value]


def _scale(e: Emitter) -> None:
    out = e.array(3)

    def step(i: Any, lanes: int) -> None:
        scale, zero = (_wide(e, "float16", e.index(e.arguments[j], (i, integer(2))), lanes) for j in (1, 2))
        number = e.builder.load(e.builder.bitcast(e.builder.gep(out.data, [i]), scale.type.as_pointer()), align=4)
        e.store(e.fma(number, scale, zero), out.data, i, lanes)

    e.any_runs(e.length(out), step)


@intrinsic  # type: ignore[untyped-decorator]
def scale_numbers(_context: Any, slab: Any, scale_at: Any, zero_at: Any, out: Any) -> Any:
    """out[i] = out[i] * scale[i] + zero[i], with float16 scales and zeros at those bytes of slab uint8 [nbytes]; out float32 [n]."""
    return types.void(slab, types.int64, types.int64, out), lowered(_scale)
