"""Numbers of fewer bits, for code that seals (kvarto/simd.py): float16, bfloat16, float8, codes. Called by numba_seal_vectors.py and its callers.

What becomes of a number is written once, for one or for a vector of them, and rounded as codecs/affine.py rounds: nothing is fused or reassociated.
A float16 number is held as the float32 that equals it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvarto.sealing import FLOAT16_MAX, SMALLEST_STEP
from kvarto.simd import Emitter, f32, i32, lowered

_number, _bits = types.float32, types.int32
# Added to a number of 0 .. 2^22 it leaves no bits after the point, rounded to nearest even.
_WHOLE = 1.5 * 2**23


def like(x: Any, value: float, element: Any = None) -> Any:
    """The constant as a number, or as a vector of as many as x has; of x's own type or of another one."""
    kind = x.type
    if isinstance(kind, ir.VectorType):
        return ir.Constant(ir.VectorType(element or kind.element, kind.count), [value] * kind.count)
    return ir.Constant(element or kind, value)


def kind_like(x: Any, element: Any) -> Any:
    """The type of as many elements as x has."""
    return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element


def least(e: Emitter, x: Any, y: Any) -> Any:
    """The smaller one of each pair."""
    return e.builder.select(e.builder.fcmp_ordered("<", x, y), x, y)


def most(e: Emitter, x: Any, y: Any) -> Any:
    """The larger one of each pair."""
    return e.builder.select(e.builder.fcmp_ordered(">", x, y), x, y)


def clamp(e: Emitter, x: Any, limit: float) -> Any:
    """x within +-limit."""
    return least(e, most(e, x, like(x, -limit)), like(x, limit))


def _rounded_size(e: Emitter, size: Any, mantissa: int, bias: int) -> Any:
    """Bits, without sign, of the float of that format that is nearest to the float32 whose bits, without sign, are `size`: in its range."""
    b, cut = e.builder, 23 - mantissa
    floats = kind_like(size, f32)

    def constant(value: int) -> Any:
        return like(size, value)

    odd = b.and_(b.lshr(size, constant(cut)), constant(1))
    rounding = b.add(odd, constant((1 << (cut - 1)) - 1 - ((127 - bias) << 23)))
    normal = b.lshr(b.add(size, rounding), constant(cut))
    # Below the smallest normal number: adding a power of two whose last bit is the smallest subnormal leaves the code in the low bits.
    unit = (127 - bias + cut + 1) << 23
    shifted = b.fadd(b.bitcast(size, floats), b.bitcast(constant(unit), floats))
    subnormal = b.sub(b.bitcast(shifted, size.type), constant(unit))
    return b.select(b.icmp_signed("<", size, constant((128 - bias) << 23)), subnormal, normal)


def _rounded(mantissa: int, bias: int, limit: float, sign: int) -> Callable[[Emitter, Any], Any]:
    """x, drawn within the limit, as bits of a float format, whose sign is bit `sign`."""

    def emit(e: Emitter, x: Any) -> Any:
        b = e.builder
        bits = b.bitcast(clamp(e, x, limit), kind_like(x, i32))
        code = _rounded_size(e, b.and_(bits, like(bits, 0x7FFFFFFF)), mantissa, bias)
        return b.or_(code, b.and_(b.lshr(bits, like(bits, 31 - sign)), like(bits, 1 << sign)))

    return emit


emit_half_bits = _rounded(10, 15, FLOAT16_MAX, 15)


def emit_half_float(e: Emitter, bits: Any) -> Any:
    """float32 of a finite float16's bits, int32."""
    b, floats = e.builder, kind_like(bits, f32)
    size = b.and_(bits, like(bits, 0x7FFF))
    normal = b.bitcast(b.add(b.shl(size, like(bits, 13)), like(bits, 112 << 23)), floats)
    subnormal = b.fmul(b.sitofp(size, floats), like(bits, SMALLEST_STEP, f32))
    number = b.select(b.icmp_signed("<", size, like(bits, 0x400)), subnormal, normal)
    sign = b.shl(b.and_(bits, like(bits, 0x8000)), like(bits, 16))
    return b.bitcast(b.or_(b.bitcast(number, bits.type), sign), floats)


def emit_half(e: Emitter, x: Any) -> Any:
    """Rounded to float16."""
    return emit_half_float(e, emit_half_bits(e, x))


def emit_scale(e: Emitter, x: Any) -> Any:
    """Rounded to float16, and no less than its smallest number."""
    return most(e, emit_half(e, x), like(x, SMALLEST_STEP))


def emit_ordered(e: Emitter, bits: Any) -> Any:
    """Bits of numbers as int32 that are ordered as the numbers are, -0.0 before 0.0; its own inverse."""
    b = e.builder
    return b.xor(bits, b.and_(b.ashr(bits, like(bits, 31)), like(bits, 0x7FFFFFFF)))


def emit_nearest(e: Emitter, x: Any, scale: Any, zero: Any, highest: Any) -> Any:
    """Code of x: drawn into its range before it is rounded, which comes to the same as after."""
    b = e.builder
    code = b.fdiv(b.fsub(x, zero), scale)
    code = least(e, most(e, code, like(x, 0.0)), highest)
    return b.fsub(b.fadd(code, like(x, _WHOLE)), like(x, _WHOLE))


def of_one(emit: Callable[..., Any]) -> Callable[..., Any]:
    """What numba wants of an intrinsic, from a function of the emitter and the arguments."""
    return lowered(lambda e: emit(e, *e.arguments))


@intrinsic  # type: ignore[untyped-decorator]
def half_bits(_context: Any, x: Any) -> Any:
    """float16 nearest to x, which is drawn into its range first: its bits, int32."""
    return _bits(_number), of_one(emit_half_bits)


@intrinsic  # type: ignore[untyped-decorator]
def half_float(_context: Any, bits: Any) -> Any:
    """float32 of a finite float16's bits, int32."""
    return _number(_bits), of_one(emit_half_float)


@intrinsic  # type: ignore[untyped-decorator]
def as_half(_context: Any, x: Any) -> Any:
    """x rounded to float16."""
    return _number(_number), of_one(emit_half)


@intrinsic  # type: ignore[untyped-decorator]
def as_scale(_context: Any, x: Any) -> Any:
    """x rounded to float16 and no less than its smallest number."""
    return _number(_number), of_one(emit_scale)


@intrinsic  # type: ignore[untyped-decorator]
def bfloat16_bits(_context: Any, x: Any) -> Any:
    """bfloat16 nearest to finite x: its bits, int32."""

    def emit(e: Emitter, x: Any) -> Any:
        b, bits = e.builder, e.builder.bitcast(x, i32)
        odd = b.and_(b.lshr(bits, like(bits, 16)), like(bits, 1))
        return b.lshr(b.add(b.add(bits, odd), like(bits, 0x7FFF)), like(bits, 16))

    return _bits(_number), of_one(emit)


@intrinsic  # type: ignore[untyped-decorator]
def e4m3_bits(_context: Any, x: Any) -> Any:
    """float8 e4m3 nearest to x, which is drawn into its range first: its bits, int32."""
    return _bits(_number), of_one(_rounded(3, 7, 448.0, 7))


@intrinsic  # type: ignore[untyped-decorator]
def e5m2_bits(_context: Any, x: Any) -> Any:
    """float8 e5m2 nearest to x, which is drawn into its range first: its bits, int32."""
    return _bits(_number), of_one(_rounded(2, 15, 57344.0, 7))


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(_context: Any, x: Any) -> Any:
    """The bits of a float32, int32."""
    return _bits(_number), of_one(lambda e, x: e.builder.bitcast(x, i32))


@intrinsic  # type: ignore[untyped-decorator]
def float_of(_context: Any, bits: Any) -> Any:
    """The float32 of these bits, int32."""
    return _number(_bits), of_one(lambda e, bits: e.builder.bitcast(bits, f32))
