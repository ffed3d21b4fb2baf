"""An emitter of LLVM's vector code, for what numba does not make fast by itself.

LLVM lowers the vectors to whatever the machine has, so only `LANES` depends on it. Intrinsics made with the emitter are called from compiled
functions; plain Python cannot call them, and without numba their modules do not exist: kvarto/unpack.py has those of tile readers, and
kernels/numba_vectors.py the inner products and the softmax.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config
from numba.core import cgutils


def _features() -> set[str]:
    """What the machine that numba compiles for can do, in LLVM's words."""
    text = config.CPU_FEATURES
    if text is None:
        try:
            text = llvm.get_host_cpu_features().flatten()
        except RuntimeError:  # LLVM does not know how to ask this system.
            text = ""
    return set(text.split(","))


LANES = 16 if "+avx512f" in _features() else 8 if "+avx" in _features() else 4
"""float32 numbers in a vector."""
# Without its instruction LLVM would call a function for binary16 that may not exist, and abort; only old and some virtual x86 lack it.
_CONVERTS_HALF = "+f16c" in _features() or platform.machine().lower() not in ("x86_64", "amd64")
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
        """Lanes of x and y, those of y counted on from those of x."""
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(i32, len(lanes)), list(lanes)))

    def splat(self, scalar: Any) -> Any:
        """A number in every lane."""
        vector = self.builder.insert_element(
            ir.Constant(ir.VectorType(f32, LANES), ir.Undefined), scalar, ir.Constant(i32, 0)
        )
        return self.shuffle(vector, vector, [0] * LANES)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z."""
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
        """Set to 0."""
        for slot in accumulators:
            self.builder.store(ir.Constant(ir.VectorType(f32, LANES), [0.0] * LANES), slot)

    def accumulate(self, slot: Any, x: Any, y: Any) -> None:
        """slot += x * y."""
        self.builder.store(self.fma(x, y, self.builder.load(slot)), slot)

    def loop(self, start: Any, stop: Any, step: int) -> Any:
        """`with loop(...) as (i, _)`: i from start to stop in steps."""
        return cgutils.for_range_slice(self.builder, start, stop, integer(step), i64)

    def length(self, array: Any) -> Any:
        """Numbers in an array of one dimension."""
        return cgutils.unpack_tuple(self.builder, array.shape)[0]

    def pack(self, values: Sequence[Any]) -> Any:
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
        return self.builder.select(
            self.builder.fcmp_unordered("!=", x, self.constant(float("-inf"))), x, self.constant(0.0)
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

    def widen_half(self, bits: Any) -> Any:
        """binary16, as a vector of i16, to float32: exact, subnormals included."""
        b, lanes = self.builder, bits.type.count
        floats, integers = ir.VectorType(f32, lanes), ir.VectorType(i32, lanes)
        if _CONVERTS_HALF:
            return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), floats)

        def splat(value: int) -> Any:
            return ir.Constant(integers, [value] * lanes)

        wide = b.zext(bits, integers)
        size = b.shl(b.and_(wide, splat(0x7FFF)), splat(13))
        exponent = b.and_(size, splat(0x1F << 23))
        normal = b.add(size, splat((127 - 15) << 23))
        infinite = b.add(normal, splat((128 - 16) << 23))
        # A subnormal gets an exponent and loses the leading 1 that comes with it, so that no float32 subnormal arises.
        lowest = b.bitcast(splat((127 - 14) << 23), floats)
        subnormal = b.bitcast(b.fsub(b.bitcast(b.add(normal, splat(1 << 23)), floats), lowest), integers)
        size = b.select(b.icmp_unsigned("==", exponent, splat(0)), subnormal, normal)
        size = b.select(b.icmp_unsigned("==", exponent, splat(0x1F << 23)), infinite, size)
        return b.bitcast(b.or_(size, b.shl(b.and_(wide, splat(0x8000)), splat(16))), floats)

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
