"""Memory by address, for compiled code: reads and writes of single numbers, a call of a tile reader, a counter that threads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvarto.simd import Emitter, f32, i8, i32, i64, integer, lowered


def _place(e: Emitter, kind: Any) -> Any:
    """Pointer to element arguments[1] of an array at arguments[0]."""
    return e.builder.gep(e.builder.inttoptr(e.arguments[0], kind.as_pointer()), [e.arguments[1]])


def _get(kind: Any) -> Callable[[Emitter], Any]:
    return lambda e: e.builder.load(_place(e, kind))


def _put(kind: Any) -> Callable[[Emitter], None]:
    def emit(e: Emitter) -> None:
        e.builder.store(e.arguments[2], _place(e, kind))

    return emit


@intrinsic  # type: ignore[untyped-decorator]
def get_float(_context: Any, address: Any, i: Any) -> Any:
    """float32 number i of an array."""
    return types.float32(types.int64, types.int64), lowered(_get(f32))


@intrinsic  # type: ignore[untyped-decorator]
def put_float(_context: Any, address: Any, i: Any, x: Any) -> Any:
    """Write float32 number i of an array."""
    return types.void(types.int64, types.int64, types.float32), lowered(_put(f32))


@intrinsic  # type: ignore[untyped-decorator]
def get_int(_context: Any, address: Any, i: Any) -> Any:
    """int32 number i of an array, as int64."""
    return types.int64(types.int64, types.int64), lowered(lambda e: e.builder.sext(e.builder.load(_place(e, i32)), i64))


@intrinsic  # type: ignore[untyped-decorator]
def get_long(_context: Any, address: Any, i: Any) -> Any:
    """int64 number i of an array."""
    return types.int64(types.int64, types.int64), lowered(_get(i64))


@intrinsic  # type: ignore[untyped-decorator]
def put_long(_context: Any, address: Any, i: Any, x: Any) -> Any:
    """Write int64 number i of an array."""
    return types.void(types.int64, types.int64, types.int64), lowered(_put(i64))


@intrinsic  # type: ignore[untyped-decorator]
def address_of(_context: Any, array: Any) -> Any:
    """Address of the first element of a numba array; the caller keeps the array alive."""
    return types.int64(array), lowered(lambda e: e.builder.ptrtoint(e.array(0).data, i64))


def _call(e: Emitter) -> None:
    b = e.builder
    pointers = [b.inttoptr(address, i8.as_pointer()) for address in e.arguments[1:]]
    kind = ir.FunctionType(ir.VoidType(), [i8.as_pointer()] * len(pointers))
    b.call(b.inttoptr(e.arguments[0], kind.as_pointer()), pointers)


@intrinsic  # type: ignore[untyped-decorator]
def call_reader(
    _context: Any,
    reader: Any,
    slab: Any,
    constants: Any,
    tile: Any,
    row_scale: Any,
    row_zero: Any,
    channel_scale: Any,
    channel_zero: Any,
) -> Any:
    """Call a tile reader (`kvarto.jit.compile_reader`) by its address, with the addresses of its arrays."""
    return types.void(*[types.int64] * 8), lowered(_call)


def _prefetch(e: Emitter) -> None:
    with e.loop(integer(0), e.arguments[1], 64) as (offset, _):
        e.prefetch(e.builder.add(e.arguments[0], offset))


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, address: Any, nbytes: Any) -> Any:
    """Ask for `nbytes` bytes that will be read soon."""
    return types.void(types.int64, types.int64), lowered(_prefetch)


def _fetch_add(e: Emitter) -> Any:
    return e.builder.atomic_rmw("add", e.builder.inttoptr(e.arguments[0], i64.as_pointer()), integer(1), "acq_rel")


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(_context: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, in one piece; returns what it was. What a thread wrote before is seen by those that count after it."""
    return types.int64(types.int64), lowered(_fetch_add)


def _power_of_two(e: Emitter) -> Any:
    b = e.builder
    exponent = b.add(b.fptosi(e.arguments[0], i32), ir.Constant(i32, 127))
    return b.bitcast(b.shl(exponent, ir.Constant(i32, 23)), f32)


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(_context: Any, n: Any) -> Any:
    """2^n for a whole float32 n from -126 to 127; a loop around it becomes vectors."""
    return types.float32(types.float32), lowered(_power_of_two)
