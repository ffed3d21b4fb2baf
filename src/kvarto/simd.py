"""Vector code for compiled CPU code, where LLVM does not find it by itself: an emitter of LLVM's vector type, and what is made with it.

Compiled functions call the intrinsics below; plain Python cannot, and without numba they do not exist. LLVM lowers the vectors to whatever the
machine has, so only `LANES` depends on it. Here is what tile readers need; kernels/numba_vectors.py has the inner products and the softmax.

- `unpack_codes`                 codes of 8, 4, 3 or 2 bits to float32 (10 times faster than a loop in numba)
- `add_two_bits`                 two more bits for some columns
- `load_numbers`, `load_fp8s`    stored floats to float32
- `scale_numbers`                by stored scales and zeros
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic



def _lanes() -> int:
    """float32 numbers in the widest vector that numba compiles for here."""
    features = config.CPU_FEATURES
    if features is None:
        try:
            features = llvm.get_host_cpu_features().flatten()
        except RuntimeError:  # LLVM does not know how to ask this system.
            features = ""
    known = features.split(",")
    return 16 if "+avx512f" in known else 8 if "+avx" in known else 4


LANES = _lanes()
"""float32 numbers in a vector."""
f32, i8, i16, i32, i64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
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

    def floats(self, *arguments: int) -> list[Any]:
        """Arguments that are addresses, as pointers to float32."""
        return [self.builder.inttoptr(self.arguments[i], f32.as_pointer()) for i in arguments]

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

    def any_runs(self, n: Any, body: Callable[[Any, int], None]) -> None:
        """Emit `body(first, lanes)` for runs of 16, 8, 4 and 1 that cover n numbers, any n."""
        done = integer(0)
        for lanes in (16, 8, 4, 1):
            end = self.builder.and_(n, integer(-lanes))
            with self.loop(done, end, lanes) as (first, _):
                body(first, lanes)
            done = end

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

    def prefetch(self, address: Any) -> None:
        """Ask for a cache line that will be read soon, into the second-level cache."""
        place = i8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [place, i32, i32, i32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        read, locality, data = (ir.Constant(i32, mode) for mode in (0, 2, 1))
        self.builder.call(function, [self.builder.inttoptr(address, place), read, locality, data])

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

    def length(self, array: Any) -> Any:
        """Numbers in an array of one dimension."""
        return cgutils.unpack_tuple(self.builder, array.shape)[0]

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
        """The larger of each pair; x where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", y, x), y, x)

    def finite_or_0(self, x: Any) -> Any:
        """x, or 0 for -inf."""
        return self.builder.select(self.builder.fcmp_unordered("!=", x, self.constant(float("-inf"))), x, self.constant(0.0))

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


def _add_two_bits(e: Emitter) -> None:
    b, slab, tile = e.builder, e.array(0).data, e.array(3)
    rows, columns = cgutils.unpack_tuple(b, tile.shape)
    run = e.arguments[6]
    with e.loop(integer(0), rows, 1) as (row, _):

        def step(j: Any, lanes: int) -> None:
            integers, floats = ir.VectorType(i32, lanes), ir.VectorType(f32, lanes)
            byte = b.zext(e.load(slab, e.index(e.arguments[1], (row, run), j), lanes, i8), integers)
            weight = b.insert_element(ir.Constant(floats, ir.Undefined), e.arguments[2], ir.Constant(i32, 0))
            weights = e.shuffle(weight, weight, [0] * lanes)
            for part in range(4):
                code = b.and_(b.lshr(byte, ir.Constant(integers, [2 * part] * lanes)), ir.Constant(integers, [3] * lanes))
                place = e.index((row, columns), e.arguments[4 + part // 2], (run, integer(part % 2)), j)
                old = b.load(b.bitcast(b.gep(tile.data, [place]), floats.as_pointer()), align=4)
                e.store(e.fma(b.sitofp(code, floats), weights, old), tile.data, place, lanes)

        e.any_runs(run, step)


@intrinsic  # type: ignore[untyped-decorator]
def add_two_bits(_context: Any, slab: Any, start: Any, weight: Any, tile: Any, first: Any, second: Any, run: Any) -> Any:  # noqa: PLR0913
    """Onto some columns of tile [rows, columns]: `weight` times codes of two bits, packed as in docs/page-format.md from byte `start` of slab.

    The columns are `first` and the 2 * run after it, then `second` and the 2 * run after it.
    """
    return types.void(slab, types.int64, types.float32, tile, types.int64, types.int64, types.int64), lowered(_add_two_bits)


# ---- stored floats -------------------------------------------------------------------------------------------------


def _wide(e: Emitter, dtype: str, at: Any, lanes: int) -> Any:
    """`lanes` stored floats at byte `at` of the slab, which is argument 0, as float32."""
    b, slab = e.builder, e.array(0).data
    floats = ir.VectorType(f32, lanes)
    if dtype == "float32":
        return b.bitcast(e.load(slab, at, 4 * lanes, i8), floats)
    bits = b.bitcast(e.load(slab, at, 2 * lanes, i8), ir.VectorType(i16, lanes))
    if dtype == "float16":
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), floats)
    integers = ir.VectorType(i32, lanes)
    return b.bitcast(b.shl(b.zext(bits, integers), ir.Constant(integers, [16] * lanes)), floats)


def _load(dtype: str) -> Callable[[Emitter], None]:
    size = 4 if dtype == "float32" else 2

    def emit(e: Emitter) -> None:
        out = e.array(3)

        def step(i: Any, lanes: int) -> None:
            e.store(_wide(e, dtype, e.index(e.arguments[1], (i, integer(size))), lanes), out.data, i, lanes)

        e.any_runs(e.length(out), step)

    return emit


_LOAD = {dtype: lowered(_load(dtype)) for dtype in ("float16", "bfloat16", "float32")}


@intrinsic  # type: ignore[untyped-decorator]
def load_numbers(_context: Any, slab: Any, start: Any, dtype: Any, out: Any) -> Any:
    """Numbers of `dtype` (a constant) at byte `start` of slab uint8 [nbytes] into float32 out [n]."""
    if not isinstance(dtype, types.StringLiteral):
        return None
    return types.void(slab, types.int64, dtype, out), _LOAD[dtype.literal_value]


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
            number = b.fpext(b.bitcast(half, ir.VectorType(ir.HalfType(), lanes)), ir.VectorType(f32, lanes))
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
