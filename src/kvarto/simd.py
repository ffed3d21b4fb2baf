"""Vector code for compiled CPU code, where LLVM does not find it by itself: an emitter of LLVM's vector type, and what is made with it.

Compiled functions call the intrinsics below; plain Python cannot, and without numba they do not exist. LLVM lowers the vectors to whatever the
machine has, so only `LANES` depends on it. The inner products and the softmax of attention are in kernels/numba_vectors.py.

- `unpack_codes`   codes of 8, 4, 3 or 2 bits to a float32 tile (10 times faster than the loop in numba)
- `floats_at`, `tile_at`, `panels_at`, `ints_at`, `longs_at`, `address_of`   memory by address: views that count no references, over
  which threads would fight
- `call_reader`, `prefetch`, `fetch_add`, `power_of_two`   what their names say
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

_FEATURES = llvm.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx") else 4
"""float32 numbers in a vector register."""

f32, i8, i32, i64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)
"""2^x on -0.5 .. 0.5 is the polynomial of these and 1, highest power first, within 2e-7 (Cephes, exp2f)."""
_CODE_PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}


def integer(value: int) -> Any:
    """An int64 constant."""
    return ir.Constant(i64, value)


class Emitter:
    """An LLVM builder with the few vector operations that we need."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.context, self.builder, self.arguments = context, builder, arguments
        self._types = signature.args

    def array(self, i: int) -> Any:
        """Argument i as numba's array structure."""
        return self.context.make_array(self._types[i])(self.context, self.builder, self.arguments[i])

    def index(self, *terms: Any) -> Any:
        """Sum of products: each term is a value or a pair to multiply."""
        b = self.builder
        values = [b.mul(*term) if isinstance(term, tuple) else term for term in terms]
        total = values[0]
        for value in values[1:]:
            total = b.add(total, value)
        return total

    def load(self, pointer: Any, index: Any, lanes: int = LANES, element: Any = f32) -> Any:
        """Vector of `lanes` elements at any alignment; floats are filled up with zeros to LANES."""
        kind = ir.VectorType(element, lanes)
        place = self.builder.bitcast(self.builder.gep(pointer, [index]), kind.as_pointer())
        vector = self.builder.load(place, align=1 if element is i8 else 4)
        if element is not f32 or lanes == LANES:
            return vector
        return self.shuffle(vector, ir.Constant(kind, [0.0] * lanes), [min(i, lanes) for i in range(LANES)])

    def store(self, vector: Any, pointer: Any, index: Any, lanes: int = LANES) -> None:
        """The first `lanes` lanes, at any alignment."""
        if lanes < vector.type.count:
            vector = self.shuffle(vector, vector, range(lanes))
        place = self.builder.bitcast(self.builder.gep(pointer, [index]), vector.type.as_pointer())
        self.builder.store(vector, place, align=4)

    def runs(self, n: Any, body: Callable[[Any, int], None]) -> None:
        """Emit `body(first, lanes)` for runs that cover n numbers, n a multiple of 8."""
        whole = self.builder.and_(n, integer(-LANES))
        with self.loop(integer(0), whole, LANES) as (first, _):
            body(first, LANES)
        if LANES > 8:
            with self.builder.if_then(self.builder.icmp_signed("<", whole, n)):
                body(whole, 8)

    def shuffle(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(i32, len(lanes)), list(lanes)))

    def splat(self, scalar: Any) -> Any:
        vector = self.builder.insert_element(
            ir.Constant(ir.VectorType(f32, LANES), ir.Undefined), scalar, ir.Constant(i32, 0)
        )
        return self.shuffle(vector, vector, [0] * LANES)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        kind = x.type
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.v{kind.count}f32"
        )
        return self.builder.call(function, [x, y, z])

    def accumulators(self, count: int) -> list[Any]:
        """Stack slots that LLVM turns into registers."""
        return [cgutils.alloca_once(self.builder, ir.VectorType(f32, LANES)) for _ in range(count)]

    def clear(self, accumulators: Sequence[Any]) -> None:
        for slot in accumulators:
            self.builder.store(ir.Constant(ir.VectorType(f32, LANES), [0.0] * LANES), slot)

    def accumulate(self, slot: Any, x: Any, y: Any) -> None:
        self.builder.store(self.fma(x, y, self.builder.load(slot)), slot)

    def loop(self, start: Any, stop: Any, step: int) -> Any:
        return cgutils.for_range_slice(self.builder, start, stop, integer(step), i64)

    def length(self, i: int) -> Any:
        """Numbers in argument i, a vector."""
        return cgutils.unpack_tuple(self.builder, self.array(i).shape)[0]

    def tuple(self, values: Sequence[Any]) -> Any:
        """numba's tuple of equal types."""
        return cgutils.pack_array(self.builder, values)

    def total(self, vector: Any) -> Any:
        """Sum of the lanes."""
        return self.builder.extract_element(self.add_lanes([vector])[0][0], ir.Constant(i32, 0))

    def highest(self, vector: Any) -> Any:
        """Largest of the lanes."""
        half = LANES // 2
        while half:
            vector, half = (
                self.larger(vector, self.shuffle(vector, vector, [(i + half) % LANES for i in range(LANES)])),
                half // 2,
            )
        return self.builder.extract_element(vector, ir.Constant(i32, 0))

    def larger(self, x: Any, y: Any) -> Any:
        """The larger of each pair; y where x is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def finite_or_0(self, x: Any) -> Any:
        """x, or 0 for -inf."""
        return self.builder.select(
            self.builder.fcmp_unordered("!=", x, ir.Constant(f32, float("-inf"))), x, ir.Constant(f32, 0.0)
        )

    def where_positive(self, x: Any, y: Any) -> Any:
        """y where x > 0, else 0."""
        zero = self.constant(0.0)
        return self.builder.select(self.builder.fcmp_ordered(">", x, zero), y, zero)

    def constant(self, value: float) -> Any:
        """The value in every lane."""
        return ir.Constant(ir.VectorType(f32, LANES), [value] * LANES)

    def exp2(self, x: Any) -> Any:
        """2^x for x <= 0, within 3e-7 of it; 0 below -126 and NaN for NaN."""
        b, integers = self.builder, ir.VectorType(i32, LANES)
        kind, lowest = x.type, self.constant(-126.0)
        floor = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind]), f"llvm.floor.v{LANES}f32")
        y = self.larger(x, lowest)
        whole = b.call(floor, [b.fadd(y, self.constant(0.5))])
        fraction = b.fsub(y, whole)
        power = self.constant(EXP2[0])
        for coefficient in (*EXP2[1:], 1.0):
            power = self.fma(power, fraction, self.constant(coefficient))
        exponent = b.add(b.fptosi(whole, integers), ir.Constant(integers, [127] * LANES))
        power = b.fmul(power, b.bitcast(b.shl(exponent, ir.Constant(integers, [23] * LANES)), kind))
        tiny = b.select(b.fcmp_ordered("<", x, lowest), self.constant(0.0), x)
        return b.select(b.fcmp_ordered(">=", x, lowest), power, tiny)

    def add_lanes(self, vectors: Sequence[Any]) -> tuple[list[Any], list[list[int]]]:
        """Sums over the lanes of each vector, many at once: (results, for each result which vector each lane is the sum of).

        Two vectors are halved and put side by side, log2(LANES) times, so n sums cost about 3 n operations instead of 8 n. The order of
        addition is the same for every vector.
        """
        owners = [[i] * LANES for i in range(len(vectors))]
        vectors, half = list(vectors), LANES // 2
        while half:
            merged = [self._halve(vectors[i : i + 2], owners[i : i + 2], half) for i in range(0, len(vectors), 2)]
            vectors, owners, half = [vector for vector, _ in merged], [owner for _, owner in merged], half // 2
        return vectors, owners

    def _halve(self, vectors: Sequence[Any], owners: Sequence[list[int]], half: int) -> tuple[Any, list[int]]:
        low, owner = [], []
        for i in range(2):
            for segment in range(0, LANES, 2 * half):
                low += [i * LANES + segment + j for j in range(half)]
                owner += [owners[i][segment] if i < len(owners) else -1] * half
        if half <= 2:  # Neither input leaves its 128 bits: one cheap instruction.
            order = [
                LANES // 2 * part + group + j
                for group in range(0, LANES // 2, 2)
                for part in range(2)
                for j in range(2)
            ]
            low, owner = [low[i] for i in order], [owner[i] for i in order]
        x = vectors[0]
        y = vectors[1] if len(vectors) == 2 else ir.Constant(x.type, ir.Undefined)
        return self.builder.fadd(self.shuffle(x, y, low), self.shuffle(x, y, [lane + half for lane in low])), owner


def lowered(emit: Callable[[Emitter], Any]) -> Callable[..., Any]:
    """What numba wants of an intrinsic, from a function that emits its code and returns its value, or None."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = emit(Emitter(context, builder, signature, arguments))
        return context.get_dummy_value() if value is None else value

    return lower


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
            done = integer(0)
            for lanes in (16, 8, 1):
                end = e.builder.and_(run, integer(-lanes))
                with e.loop(done, end, lanes) as (j, _):
                    starts = [
                        e.index(first, (row, e.builder.udiv(e.builder.mul(columns, integer(width)), integer(8))), j)
                        for first, width in zip(at, planes, strict=False)
                    ]
                    step(e, starts, run, (tile.data, e.index((row, columns), j)), lanes)
                done = end

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


# ---- memory --------------------------------------------------------------------------------------------------------


def _array(dtype: Any, dimensions: int) -> tuple[Any, Any]:
    """The type of a C-contiguous array, and what makes one of an address and a shape."""
    kind = types.Array(dtype, dimensions, "C")
    return kind, lowered(lambda e: _view(e, kind, e.arguments[0], e.arguments[1:]))


def _view(e: Emitter, kind: Any, address: Any, shape: Sequence[Any]) -> Any:
    """A C-contiguous array over memory that somebody else owns."""
    b, array = e.builder, e.context.make_array(kind)(e.context, e.builder)
    itemsize = e.context.get_abi_sizeof(e.context.get_data_type(kind.dtype))
    strides = [integer(itemsize)]
    for extent in reversed(shape[1:]):
        strides.insert(0, b.mul(strides[0], extent))
    populate_array(
        array,
        data=b.inttoptr(address, array.data.type),
        shape=cgutils.pack_array(b, shape, i64),
        strides=cgutils.pack_array(b, strides, i64),
        itemsize=integer(itemsize),
        meminfo=None,
    )
    return array._getvalue()


@intrinsic  # type: ignore[untyped-decorator]
def floats_at(_context: Any, address: Any, count: Any) -> Any:
    """float32 [count] at an address."""
    kind, view = _array(types.float32, 1)
    return kind(types.int64, types.int64), view


@intrinsic  # type: ignore[untyped-decorator]
def tile_at(_context: Any, address: Any, rows: Any, columns: Any) -> Any:
    """float32 [rows, columns] at an address."""
    kind, view = _array(types.float32, 2)
    return kind(types.int64, types.int64, types.int64), view


@intrinsic  # type: ignore[untyped-decorator]
def panels_at(_context: Any, address: Any, count: Any, rows: Any, columns: Any) -> Any:
    """float32 [count, rows, columns] at an address."""
    kind, view = _array(types.float32, 3)
    return kind(*[types.int64] * 4), view


@intrinsic  # type: ignore[untyped-decorator]
def ints_at(_context: Any, address: Any, count: Any) -> Any:
    """int32 [count] at an address."""
    kind, view = _array(types.int32, 1)
    return kind(types.int64, types.int64), view


@intrinsic  # type: ignore[untyped-decorator]
def longs_at(_context: Any, address: Any, rows: Any, columns: Any) -> Any:
    """int64 [rows, columns] at an address."""
    kind, view = _array(types.int64, 2)
    return kind(types.int64, types.int64, types.int64), view


@intrinsic  # type: ignore[untyped-decorator]
def address_of(_context: Any, array: Any) -> Any:
    """Address of the first element, int64. The caller keeps the array alive."""
    return types.int64(array), lowered(lambda e: e.builder.ptrtoint(e.array(0).data, i64))


def _call(e: Emitter) -> None:
    b = e.builder
    pointers = [b.inttoptr(address, i8.as_pointer()) for address in e.arguments[1:]]
    kind = ir.FunctionType(ir.VoidType(), [i8.as_pointer()] * len(pointers))
    b.call(b.inttoptr(e.arguments[0], kind.as_pointer()), pointers)


@intrinsic  # type: ignore[untyped-decorator]
def call_reader(
    _context: Any,
    function: Any,
    slab: Any,
    tile: Any,
    row_scale: Any,
    row_zero: Any,
    channel_scale: Any,
    channel_zero: Any,
) -> Any:
    """Call a tile reader (`kvarto.jit.compile_reader`) by its address, with the addresses of its arrays."""
    return types.void(*[types.int64] * 7), lowered(_call)


def _prefetch(e: Emitter) -> None:
    b, place = e.builder, i8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [place, i32, i32, i32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    with e.loop(integer(0), e.arguments[1], 64) as (offset, _):
        # Read, into the second-level cache, data.
        modes = [ir.Constant(i32, mode) for mode in (0, 2, 1)]
        b.call(function, [b.inttoptr(b.add(e.arguments[0], offset), place), *modes])


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, address: Any, nbytes: Any) -> Any:
    """Ask for `nbytes` bytes that will be read soon."""
    return types.void(types.int64, types.int64), lowered(_prefetch)


def _fetch_add(e: Emitter) -> Any:
    place = e.builder.inttoptr(e.arguments[0], i64.as_pointer())
    return e.builder.atomic_rmw("add", place, integer(1), "acq_rel")


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(_context: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, in one piece; returns what it was. What a thread wrote before is seen by those that count after it."""
    return types.int64(types.int64), lowered(_fetch_add)


# ---- numbers -------------------------------------------------------------------------------------------------------


def _power_of_two(e: Emitter) -> Any:
    b = e.builder
    exponent = b.add(b.fptosi(e.arguments[0], i32), ir.Constant(i32, 127))
    return b.bitcast(b.shl(exponent, ir.Constant(i32, 23)), f32)


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(_context: Any, n: Any) -> Any:
    """2^n for a whole float32 n from -126 to 127; a loop around it becomes vectors."""
    return types.float32(types.float32), lowered(_power_of_two)
