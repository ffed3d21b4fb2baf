"""The other operand of a product with packed rows: numbers of the columns, in fragment order (triton_tiles.py). Triton functions, no host code.

Queries and the terms of channels are loaded in that order; probabilities, which a warp holds in the order of the scores, are brought into it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from kvarto.kernels.triton_shared import lanes, read
from kvarto.kernels.triton_spec import BFLOAT16, SHORT
from kvarto.kernels.triton_tiles import halves, ordered


@triton.jit
def token_weights(S: constexpr, NBYTES: constexpr, BITS: constexpr):
    """`weight_of` for each column of a row in natural order: float32 [S]."""
    if BITS < 8:
        weights = tl.exp2((-BITS * (tl.arange(0, S) // NBYTES)).to(tl.float32))
    else:
        weights = tl.full((S,), 1.0, tl.float32)
    return weights


@triton.jit
def column_of(position, SEG: constexpr, NBYTES: constexpr, W: constexpr, BITS: constexpr):  # fmt: skip
    """Which column of the row stands at `position` (int32 tensor) of the fragment order; one that is not below the number of columns is padding."""
    pair = position & 1
    odd = (position >> 1) & 1
    lane = (position >> 2) & 3
    rest = position >> 4
    if W == 1:
        column = position
    elif W == 2:
        byte = 2 * lane + pair
        column = tl.where(byte < NBYTES, (odd + 2 * rest) * NBYTES + byte, 1 << 30)
    elif BITS == 16:
        column = SEG * 32 + 2 * (lane * (W // 4) + 2 * rest + odd) + pair
    else:
        byte = SEG * 64 + 4 * (lane * (W // 4) + rest // (8 // BITS)) + odd + 2 * pair
        column = tl.where(byte < NBYTES, rest % (8 // BITS) * NBYTES + byte, 1 << 30)
    return column


@triton.jit
def weight_of(position, W: constexpr, BITS: constexpr):
    """2^-(bits of the fields below) at each position, float32: undoes the factor of a code's field. For codes of less than 8 bits."""
    if W == 1:
        field = (position >> 1) & 1
    elif W == 2:
        field = ((position >> 1) & 1) + 2 * (position >> 4)
    else:
        field = (position >> 4) % (8 // BITS)
    return tl.exp2((-BITS * field).to(tl.float32))


@triton.jit
def load_columns(
    pointers, N: constexpr, SEG: constexpr, NBYTES: constexpr, W: constexpr, BITS: constexpr, KIND: constexpr,
    FIRST: constexpr, COUNT: constexpr, SECOND: constexpr,
):  # fmt: skip
    """A 16-bit float for each column of a row of codes, in its loading order: [N, columns], 0 at padding. See `to_codes`.

    pointers  [N, 1] of the numbers: that of channel 0; column c stands for channel FIRST + c, from COUNT on SECOND + c - COUNT
    KIND      of the numbers: FLOAT16, BFLOAT16, or SHORT (bytes, the upper ones of float16); NBYTES, W and BITS are those of the codes
    """
    if W == 1:
        tile = _load_sixteen(pointers, N, KIND, FIRST, COUNT, SECOND)
    elif W == 2:
        tile = _load_small(pointers, N, NBYTES, BITS, KIND, FIRST, COUNT, SECOND)
    elif (NBYTES % 4 != 0) | (FIRST != 0) | (SECOND != 0):
        at = tl.arange(0, W * 32 // BITS)
        if BITS < 16:  # loading order: odd and pair change places
            at = (at & -4) | ((at & 1) << 1) | ((at >> 1) & 1)
        column = column_of(at, SEG, NBYTES, W, BITS)[None, :]
        channel = _channel_of(column, FIRST, COUNT, SECOND)
        tile = _float(tl.load(pointers + channel, mask=column < (1 << 30), other=0), KIND)
    elif BITS == 16:
        word = tl.arange(0, W)[None, :]
        words = pointers.to(tl.pointer_type(tl.int32)) + SEG * 16 + word
        tile = halves(tl.load(words, mask=SEG * 32 + 2 * word < COUNT, other=0), KIND)
        tile = tile.reshape(N, 4, W // 8, 2, 2).permute(0, 2, 1, 3, 4).reshape(N, 2 * W)
    else:
        if pointers.dtype.is_ptr():
            pointers = pointers.to(tl.pointer_type(tl.int32))
        tile = _load_runs(pointers, N, SEG, NBYTES, W, BITS, KIND)
    return tile


@triton.jit
def _float(bits, KIND: constexpr):
    if KIND == BFLOAT16:
        number = bits.to(tl.bfloat16, bitcast=True)
    elif KIND == SHORT:
        number = ((bits.to(tl.int16) & 0xFF) << 7).to(tl.float16, bitcast=True)
    else:
        number = bits.to(tl.float16, bitcast=True)
    return number


@triton.jit
def _long(pairs):
    """SHORT numbers in the two low bytes of int32, as halves of one."""
    return ((pairs & 0xFF) | ((pairs & 0xFF00) << 8)) << 7


@triton.jit
def _load_runs(words, N: constexpr, SEG: constexpr, NBYTES: constexpr, W: constexpr, BITS: constexpr, KIND: constexpr):  # fmt: skip
    """`load_columns` where a lane owns W consecutive channels in each field: loads of up to 16 bytes a lane."""
    CHUNK: constexpr = 4 if W >= 8 else 2
    RUNS: constexpr = W // 2 // CHUNK
    tile = _load_field(words, 0, SEG, NBYTES, W, CHUNK, KIND, N)
    if BITS <= 4:
        tile = tl.join(tile, _load_field(words, 1, SEG, NBYTES, W, CHUNK, KIND, N))
    if BITS <= 2:
        tile = tl.join(tile, _load_fields(words, 2, SEG, NBYTES, W, CHUNK, KIND, N))
    if BITS == 1:
        upper = tl.join(
            _load_fields(words, 4, SEG, NBYTES, W, CHUNK, KIND, N),
            _load_fields(words, 6, SEG, NBYTES, W, CHUNK, KIND, N),
        )
        tile = tl.join(tile, upper)
    # Now: row, (lane, j1, pair), odd, chunk, f0, f1, f2
    if BITS == 8:
        tile = tile.reshape(N, 4, CHUNK // 2, 2, 2, RUNS).permute(0, 5, 2, 1, 3, 4)
    elif BITS == 4:
        tile = tile.reshape(N, 4, CHUNK // 2, 2, 2, RUNS, 2).permute(0, 5, 2, 6, 1, 3, 4)
    elif BITS == 2:
        tile = tile.reshape(N, 4, CHUNK // 2, 2, 2, RUNS, 2, 2).permute(0, 5, 2, 7, 6, 1, 3, 4)
    else:
        tile = tile.reshape(N, 4, CHUNK // 2, 2, 2, RUNS, 2, 2, 2).permute(0, 5, 2, 8, 7, 6, 1, 3, 4)
    return tile.reshape(N, W * 32 // BITS)


@triton.jit
def _load_fields(words, F: constexpr, SEG: constexpr, NBYTES: constexpr, W: constexpr, CHUNK: constexpr, KIND: constexpr, N: constexpr):  # fmt: skip
    low = _load_field(words, F, SEG, NBYTES, W, CHUNK, KIND, N)
    return tl.join(low, _load_field(words, F + 1, SEG, NBYTES, W, CHUNK, KIND, N))


@triton.jit
def _load_field(words, F: constexpr, SEG: constexpr, NBYTES: constexpr, W: constexpr, CHUNK: constexpr, KIND: constexpr, N: constexpr):  # fmt: skip
    """[N, 4 CHUNK, 2 halves(, 2 chunks)]: the channels of field F, in chunks of CHUNK words a lane."""
    tile = halves(_load_chunk(words, F, SEG, NBYTES, W, CHUNK, 0, N, KIND), KIND)
    if W == 16:
        tile = tl.join(tile, halves(_load_chunk(words, F, SEG, NBYTES, W, CHUNK, 4, N, KIND), KIND))
    return tile


@triton.jit
def _load_chunk(
    words, F: constexpr, SEG: constexpr, NBYTES: constexpr, W: constexpr, CHUNK: constexpr, SKIP: constexpr, N: constexpr,
    KIND: constexpr,
):  # fmt: skip
    """int32 [N, 4 CHUNK]: the words SKIP .. SKIP + CHUNK - 1 of each lane, of two numbers each; SHORT ones are widened."""
    EACH: constexpr = 4 if KIND == SHORT else 2
    LOADED: constexpr = 2 * CHUNK // EACH
    START: constexpr = (F * NBYTES + SEG * 64 + 2 * SKIP) // EACH
    if words.dtype.is_ptr():
        at = tl.arange(0, 4 * LOADED)[None, :]
        word = at // LOADED * (W // EACH) + at % LOADED
        if NBYTES >= SEG * 64 + 4 * W:
            chunk = tl.load(words + START + word)
        else:
            chunk = tl.load(words + START + word, mask=SEG * 64 + 2 * SKIP + EACH * word < NBYTES, other=0)
    else:
        chunk = read(lanes(words, 0, 4 * W // EACH) + 4 * START, 1, 0, LOADED)
    if KIND == SHORT:
        chunk = tl.join(_long(chunk), _long((chunk >> 16) & 0xFFFF)).reshape(N, 4 * CHUNK)
    return chunk


@triton.jit
def _load_sixteen(pointers, N: constexpr, KIND: constexpr, FIRST: constexpr, COUNT: constexpr, SECOND: constexpr):
    """`load_columns` for W = 1: [N, 16]."""
    if pointers.dtype.is_ptr():
        tile = _float(tl.load(pointers + _channel_of(tl.arange(0, 16)[None, :], FIRST, COUNT, SECOND)), KIND)
    else:  # a lane's four channels are neighbours
        tl.static_assert(KIND == SHORT)
        four = lanes(pointers, 0, 0) + _channel_of(4 * tl.arange(0, 4)[None, :], FIRST, COUNT, SECOND)
        words = read(four, 1, 0, 1)
        words = tl.join(_long(words), _long((words >> 16) & 0xFFFF))
        tile = halves(words, KIND).reshape(N, 16)
    return tile


@triton.jit
def _load_small(
    pointers, N: constexpr, NBYTES: constexpr, BITS: constexpr, KIND: constexpr,
    FIRST: constexpr, COUNT: constexpr, SECOND: constexpr,
):  # fmt: skip
    """`load_columns` for rows of up to 8 bytes."""
    tile = _small_two(pointers, 0, NBYTES, KIND, FIRST, COUNT, SECOND)
    if BITS <= 2:
        tile = tl.join(tile, _small_two(pointers, 2, NBYTES, KIND, FIRST, COUNT, SECOND))
    if BITS == 1:
        upper = tl.join(
            _small_two(pointers, 4, NBYTES, KIND, FIRST, COUNT, SECOND),
            _small_two(pointers, 6, NBYTES, KIND, FIRST, COUNT, SECOND),
        )
        tile = tl.join(tile, upper)
    return ordered(tile, N, 2, BITS)


@triton.jit
def _small_two(pointers, F: constexpr, NBYTES: constexpr, KIND: constexpr, FIRST: constexpr, COUNT: constexpr, SECOND: constexpr):  # fmt: skip
    low = _small_one(pointers, F, NBYTES, KIND, FIRST, COUNT, SECOND)
    return tl.join(low, _small_one(pointers, F + 1, NBYTES, KIND, FIRST, COUNT, SECOND))


@triton.jit
def _small_one(pointers, F: constexpr, NBYTES: constexpr, KIND: constexpr, FIRST: constexpr, COUNT: constexpr, SECOND: constexpr):  # fmt: skip
    """Field F of each lane's two bytes: [N, 4, 2]."""
    byte = 2 * tl.arange(0, 4)[None, :]
    if (NBYTES % 2 == 0) & (FIRST % 2 == 0) & (COUNT % 2 == 0) & (SECOND % 2 == 0):
        word = _channel_of(F * NBYTES + byte, FIRST, COUNT, SECOND) // 2
        if not pointers.dtype.is_ptr():
            inside = byte < NBYTES  # a lane without a channel reads that of lane 0, and gets 0
            word = tl.where(inside, word, _channel_of(tl.full((1, 1), F * NBYTES, tl.int32), FIRST, COUNT, SECOND) // 2)
            if KIND == SHORT:
                words = _long(read(lanes(pointers, 0, 0) + 2 * word, 1, 0, 0))
            else:
                words = read(lanes(pointers, 0, 0) + 4 * word, 1, 0, 1)
            words = tl.where(inside, words, 0)
        elif KIND == SHORT:
            pairs = tl.load(pointers.to(tl.pointer_type(tl.int16)) + word, mask=byte < NBYTES, other=0)
            words = _long(pairs.to(tl.int32))
        else:
            words = tl.load(pointers.to(tl.pointer_type(tl.int32)) + word, mask=byte < NBYTES, other=0)
        numbers = halves(words, KIND)
    else:
        low = _channel_of(F * NBYTES + byte, FIRST, COUNT, SECOND)
        high = _channel_of(F * NBYTES + byte + 1, FIRST, COUNT, SECOND)
        numbers = tl.join(
            _float(tl.load(pointers + low, mask=byte < NBYTES, other=0), KIND),
            _float(tl.load(pointers + high, mask=byte + 1 < NBYTES, other=0), KIND),
        )
    return numbers


@triton.jit
def _channel_of(column, FIRST: constexpr, COUNT: constexpr, SECOND: constexpr):
    return tl.where(column < COUNT, FIRST + column, SECOND + column - COUNT)


@triton.jit
def to_codes(tile, N: constexpr, COLUMNS: constexpr, W: constexpr, BITS: constexpr):
    """From loading to fragment order. A word of numbers holds two neighbours, a word of codes every second one: odd and pair change places."""
    if (W > 2) & (BITS < 16):
        tile = tile.reshape(N, COLUMNS // 4, 2, 2).permute(0, 1, 3, 2).reshape(N, COLUMNS)
    return tile


@triton.jit
def by_column(tile, N: constexpr, COLUMNS: constexpr):
    """[N, COLUMNS] transposed, in a way that the compiler keeps in registers (a plain transpose before a dot goes through shared memory)."""
    return tile.reshape(N, COLUMNS // 2, 2).permute(1, 2, 0).reshape(COLUMNS, N)


@triton.jit
def to_fragment_order(tile, N: constexpr, SEG: constexpr, NBYTES: constexpr, W: constexpr, BITS: constexpr):  # fmt: skip
    """A tile [columns, N] whose rows are a row's columns in natural order, in the fragment order of segment SEG: [columns of the segment, N].

    Only for rows without padding: NBYTES is W words, or a multiple of 64.
    """
    if W == 2:
        if BITS == 4:
            tile = tile.reshape(2, 4, 2, N).permute(1, 0, 2, 3)
        elif BITS == 2:
            tile = tile.reshape(2, 2, 4, 2, N).permute(0, 2, 1, 3, 4)
        else:
            tile = tile.reshape(2, 2, 2, 4, 2, N).permute(0, 1, 3, 2, 4, 5)
        tile = tile.reshape(64 // BITS, N)
    elif BITS == 16:
        tile = _segment(tile.reshape(NBYTES // 64, 2 * W, N), SEG, NBYTES // 64, 2 * W, N)
        tile = tile.reshape(4, W // 8, 2, 2, N).permute(1, 0, 2, 3, 4).reshape(2 * W, N)
    else:
        FIELDS: constexpr = 8 // BITS
        SEGS: constexpr = NBYTES // (4 * W)
        tile = tile.reshape(FIELDS, SEGS, 4 * W, N).permute(1, 0, 2, 3)
        tile = _segment(tile.reshape(SEGS, FIELDS * 4 * W, N), SEG, SEGS, FIELDS * 4 * W, N)
        tile = tile.reshape(FIELDS, 4, W // 4, 2, 2, N)  # field, lane, word, pair, odd
        tile = tile.permute(2, 0, 1, 4, 3, 5).reshape(FIELDS * 4 * W, N)
    return tile


@triton.jit
def _segment(tile, SEG: constexpr, SEGS: constexpr, ROWS: constexpr, N: constexpr):
    """Slice SEG of a tile [SEGS, ROWS, N], SEGS a power of two up to 4."""
    if SEGS == 1:
        part = tile.reshape(ROWS, N)
    elif SEGS == 2:
        first, second = tl.split(tile.permute(1, 2, 0))
        part = second if SEG == 1 else first
    else:
        even, odd = tl.split(tile.reshape(2, 2, ROWS, N).permute(0, 2, 3, 1))
        first, second = tl.split((odd if SEG % 2 == 1 else even).permute(1, 2, 0))
        part = second if SEG >= 2 else first
    return part
