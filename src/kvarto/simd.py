"""Vector code that LLVM does not find by itself: unpacking codes and the two inner products of attention, written in its vector type.

Compiled CPU code calls these functions; plain Python cannot, and without numba they do not exist. LLVM lowers the vectors to whatever the
machine has, so only `LANES` and the shapes of register blocks depend on it.

- `unpack_codes`      codes of 8, 4, 3 or 2 bits to a float32 tile (10 times faster than the loop in numba)
- `multiply_row` .. `multiply_4_rows`   tile [rows, n] times 1 to 4 vectors [n]: lanes run along n and are added up at the end; for few queries
- `multiply_panel`    tile [rows, n] times a panel [n, PANEL]: lanes are columns of the panel; for many queries
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
PANEL = 2 * LANES
"""Columns of a panel of `multiply_panel`."""
# A block of accumulators must fit the registers (32, but 16 for AVX2) and be large enough to hide the latency of a multiply-add.
_PANEL_ROWS = 4 if LANES == 8 else 8
_BLOCK = 8 if LANES == 8 else 16

_f32, _i8, _i32, _i64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_CODE_PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}


def _int(value: int) -> Any:
    return ir.Constant(_i64, value)


class _Emitter:
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

    def load(self, pointer: Any, index: Any, lanes: int, element: Any = _f32) -> Any:
        """Vector of `lanes` elements, of any alignment."""
        place = self.builder.bitcast(self.builder.gep(pointer, [index]), ir.VectorType(element, lanes).as_pointer())
        return self.builder.load(place, align=1 if element is _i8 else 4)

    def store(self, vector: Any, pointer: Any, index: Any) -> None:
        place = self.builder.bitcast(self.builder.gep(pointer, [index]), vector.type.as_pointer())
        self.builder.store(vector, place, align=4)

    def shuffle(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_i32, len(lanes)), list(lanes)))

    def splat(self, scalar: Any) -> Any:
        vector = self.builder.insert_element(ir.Constant(ir.VectorType(_f32, LANES), ir.Undefined), scalar, ir.Constant(_i32, 0))
        return self.shuffle(vector, vector, [0] * LANES)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        kind = x.type
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.v{kind.count}f32"
        )
        return self.builder.call(function, [x, y, z])

    def accumulators(self, count: int) -> list[Any]:
        """Stack slots that LLVM turns into registers."""
        return [cgutils.alloca_once(self.builder, ir.VectorType(_f32, LANES)) for _ in range(count)]

    def clear(self, accumulators: Sequence[Any]) -> None:
        for slot in accumulators:
            self.builder.store(ir.Constant(ir.VectorType(_f32, LANES), [0.0] * LANES), slot)

    def accumulate(self, slot: Any, x: Any, y: Any) -> None:
        self.builder.store(self.fma(x, y, self.builder.load(slot)), slot)

    def loop(self, start: Any, stop: Any, step: int) -> Any:
        return cgutils.for_range_slice(self.builder, start, stop, _int(step), _i64)

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
            order = [LANES // 2 * part + group + j for group in range(0, LANES // 2, 2) for part in range(2) for j in range(2)]
            low, owner = [low[i] for i in order], [owner[i] for i in order]
        x = vectors[0]
        y = vectors[1] if len(vectors) == 2 else ir.Constant(x.type, ir.Undefined)
        return self.builder.fadd(self.shuffle(x, y, low), self.shuffle(x, y, [lane + half for lane in low])), owner


def _lowered(emit: Callable[[_Emitter], Any]) -> Callable[..., Any]:
    """What numba wants of an intrinsic, from a function that emits its code and returns its value, or None."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = emit(_Emitter(context, builder, signature, arguments))
        return context.get_dummy_value() if value is None else value

    return lower


# ---- the two inner products ----------------------------------------------------------------------------------------


def _panel(e: _Emitter) -> None:
    tile, x, out = e.array(0), e.array(1), e.array(2)
    rows, n = cgutils.unpack_tuple(e.builder, tile.shape)
    vectors = PANEL // LANES
    slots = e.accumulators(_PANEL_ROWS * vectors)
    with e.loop(_int(0), rows, _PANEL_ROWS) as (row, _):
        e.clear(slots)
        with e.loop(_int(0), n, 1) as (k, _):
            columns = [e.load(x.data, e.index((k, _int(PANEL)), _int(v * LANES)), LANES) for v in range(vectors)]
            for i in range(_PANEL_ROWS):
                code = e.splat(e.builder.load(e.builder.gep(tile.data, [e.index((e.index(row, _int(i)), n), k)])))
                for v in range(vectors):
                    e.accumulate(slots[i * vectors + v], code, columns[v])
        for i in range(_PANEL_ROWS):
            for v in range(vectors):
                place = e.index((e.index(row, _int(i)), _int(PANEL)), _int(v * LANES))
                e.store(e.builder.load(slots[i * vectors + v]), out.data, place)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_panel(_context: Any, tile: Any, x: Any, out: Any) -> Any:
    """out[row, c] = sum over k of tile[row, k] * x[k, c]. tile [rows, n], x [n, PANEL], out [rows, PANEL]; rows a multiple of 8."""
    return types.void(tile, x, out), _lowered(_panel)


def _rows(vectors: int) -> Callable[[_Emitter], None]:
    block = 8 if vectors <= 2 and _BLOCK == 16 else _BLOCK // 4

    def step(e: _Emitter, slots: Sequence[Any], places: tuple[list[Any], list[Any]], arrays: tuple[Any, Any], lanes: int) -> None:
        rest = ir.Constant(ir.VectorType(_f32, lanes), [0.0] * lanes)

        def load(pointer: Any, place: Any) -> Any:
            vector = e.load(pointer, place, lanes)
            return vector if lanes == LANES else e.shuffle(vector, rest, [min(i, lanes) for i in range(LANES)])

        xs = [load(arrays[1], place) for place in places[1]]
        for i, place in enumerate(places[0]):
            codes = load(arrays[0], place)
            for r in range(vectors):
                e.accumulate(slots[r * block + i], codes, xs[r])

    def emit(e: _Emitter) -> None:
        tile, x, out, first = e.array(0), e.array(1), e.array(3), e.arguments[2]
        rows, n = cgutils.unpack_tuple(e.builder, tile.shape)
        slots = e.accumulators(block * vectors)
        whole = e.builder.and_(n, _int(-LANES))
        with e.loop(_int(0), rows, block) as (row, _):
            e.clear(slots)

            def places(k: Any) -> tuple[list[Any], list[Any]]:
                return (
                    [e.index((e.index(row, _int(i)), n), k) for i in range(block)],
                    [e.index((e.index(first, _int(r)), n), k) for r in range(vectors)],
                )

            with e.loop(_int(0), whole, LANES) as (k, _):
                step(e, slots, places(k), (tile.data, x.data), LANES)
            if LANES == 16:  # n is a multiple of 8.
                with e.builder.if_then(e.builder.icmp_signed("<", whole, n)):
                    step(e, slots, places(whole), (tile.data, x.data), 8)
            sums, owners = e.add_lanes([e.builder.load(slot) for slot in slots])
            for r in range(vectors):
                _store_sums(e, sums, owners, range(r * block, (r + 1) * block), (out.data, e.index((e.index(first, _int(r)), rows), row)))

    return emit


def _store_sums(e: _Emitter, sums: Sequence[Any], owners: Sequence[list[int]], wanted: range, place: tuple[Any, Any]) -> None:
    """Put the sums of the vectors `wanted` side by side, in as few pieces as the results that hold them."""
    done = 0
    while done < len(wanted):
        holder = next(i for i, owner in enumerate(owners) if wanted[done] in owner)
        piece = [owner for owner in wanted[done:] if owner in owners[holder]]
        lanes = [owners[holder].index(owner) for owner in piece]
        e.store(e.shuffle(sums[holder], sums[holder], lanes), place[0], e.index(place[1], _int(done)))
        done += len(piece)


_ROWS = [_lowered(_rows(vectors)) for vectors in (1, 2, 3, 4)]


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


# ---- codes ---------------------------------------------------------------------------------------------------------


def _unpack(bits: int) -> Callable[[_Emitter], None]:
    planes = _CODE_PLANES[bits]
    runs = 8 // min(planes)  # A row falls into as many runs as a byte of the narrowest plane holds codes.

    def step(e: _Emitter, starts: Sequence[Any], run: Any, target: tuple[Any, Any], lanes: int) -> None:
        """`lanes` codes of every run, those of run 0 beginning at target; starts: byte of the first of them in each plane."""
        b, kind = e.builder, ir.VectorType(_i32, lanes)
        slab = e.array(0).data
        loaded = [
            [b.zext(e.load(slab, e.index(start, (run, _int(i))), lanes, _i8), kind) for i in range(runs * width // 8)]
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
            e.store(b.sitofp(code, ir.VectorType(_f32, lanes)), target[0], e.index(target[1], (run, _int(part))))

    def emit(e: _Emitter) -> None:
        tile, at = e.array(4), (e.arguments[1], e.arguments[2])
        rows, columns = cgutils.unpack_tuple(e.builder, tile.shape)
        run = e.builder.udiv(columns, _int(runs))
        with e.loop(_int(0), rows, 1) as (row, _):
            done = _int(0)
            for lanes in (16, 8, 1):
                end = e.builder.and_(run, _int(-lanes))
                with e.loop(done, end, lanes) as (j, _):
                    starts = [
                        e.index(first, (row, e.builder.udiv(e.builder.mul(columns, _int(width)), _int(8))), j)
                        for first, width in zip(at, planes, strict=False)
                    ]
                    step(e, starts, run, (tile.data, e.index((row, columns), j)), lanes)
                done = end

    return emit


_UNPACK = {bits: _lowered(_unpack(bits)) for bits in _CODE_PLANES}


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
    return kind, _lowered(lambda e: _view(e, kind, e.arguments[0], e.arguments[1:]))


def _view(e: _Emitter, kind: Any, address: Any, shape: Sequence[Any]) -> Any:
    """A C-contiguous array over memory that somebody else owns."""
    b, array = e.builder, e.context.make_array(kind)(e.context, e.builder)
    itemsize = e.context.get_abi_sizeof(e.context.get_data_type(kind.dtype))
    strides = [_int(itemsize)]
    for extent in reversed(shape[1:]):
        strides.insert(0, b.mul(strides[0], extent))
    populate_array(
        array,
        data=b.inttoptr(address, array.data.type),
        shape=cgutils.pack_array(b, shape, _i64),
        strides=cgutils.pack_array(b, strides, _i64),
        itemsize=_int(itemsize),
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
    return types.int64(array), _lowered(lambda e: e.builder.ptrtoint(e.array(0).data, _i64))


def _call(e: _Emitter) -> None:
    b = e.builder
    pointers = [b.inttoptr(address, _i8.as_pointer()) for address in e.arguments[1:]]
    kind = ir.FunctionType(ir.VoidType(), [_i8.as_pointer()] * len(pointers))
    b.call(b.inttoptr(e.arguments[0], kind.as_pointer()), pointers)


@intrinsic  # type: ignore[untyped-decorator]
def call_reader(_context: Any, function: Any, slab: Any, tile: Any, row_scale: Any, row_zero: Any, channel_scale: Any, channel_zero: Any) -> Any:  # noqa: PLR0913
    """Call a tile reader (`kvarto.jit.compile_reader`) by its address, with the addresses of its arrays."""
    return types.void(*[types.int64] * 7), _lowered(_call)


def _prefetch(e: _Emitter) -> None:
    b, place = e.builder, _i8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [place, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    with e.loop(_int(0), e.arguments[1], 64) as (offset, _):
        # Read, into the second-level cache, data.
        modes = [ir.Constant(_i32, mode) for mode in (0, 2, 1)]
        b.call(function, [b.inttoptr(b.add(e.arguments[0], offset), place), *modes])


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, address: Any, nbytes: Any) -> Any:
    """Ask for `nbytes` bytes that will be read soon."""
    return types.void(types.int64, types.int64), _lowered(_prefetch)


def _fetch_add(e: _Emitter) -> Any:
    place = e.builder.inttoptr(e.arguments[0], _i64.as_pointer())
    return e.builder.atomic_rmw("add", place, _int(1), "acq_rel")


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(_context: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, in one piece; returns what it was. What a thread wrote before is seen by those that count after it."""
    return types.int64(types.int64), _lowered(_fetch_add)


# ---- numbers -------------------------------------------------------------------------------------------------------


def _power_of_two(e: _Emitter) -> Any:
    b = e.builder
    exponent = b.add(b.fptosi(e.arguments[0], _i32), ir.Constant(_i32, 127))
    return b.bitcast(b.shl(exponent, ir.Constant(_i32, 23)), _f32)


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(_context: Any, n: Any) -> Any:
    """2^n for a whole float32 n from -126 to 127; a loop around it becomes vectors."""
    return types.float32(types.float32), _lowered(_power_of_two)
