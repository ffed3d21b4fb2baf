"""What a warp reads of a slab: packed words of its rows, and its terms, from device memory or from shared memory. Triton functions."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from kvarto.kernels.triton_columns import load_columns
from kvarto.kernels.triton_shared import lanes, read
from kvarto.kernels.triton_spec import (
    FLOAT16,
    SHORT,
    bits_of,
    columns_count,
    columns_first,
    columns_second,
    first_part,
    groups_of,
    has_low_zero,
    has_scale,
    has_zero,
    is_curved,
    low_middle,
    nbytes_of,
    offset_of,
    planes_of,
    scale_kind,
    segments_of,
    term_dtype,
    term_offset,
    term_per,
    words_of,
)
from kvarto.kernels.triton_tiles import load_bits, load_high_words, load_pairs, load_words, read_words
from kvarto.tile import LOW_ZERO_STEPS, LOW_ZEROS

LOW_MASK = constexpr(LOW_ZEROS - 1)
LOW_PART = constexpr(1 / LOW_ZERO_STEPS)


@triton.jit
def _term_pointer(slab, TILE: constexpr, ZERO: constexpr):
    """Pointer to the numbers of the scale, or of the zero."""
    if term_dtype(TILE, ZERO) == "float16":
        pointer = (slab + term_offset(TILE, ZERO)).to(tl.pointer_type(tl.float16))
    elif term_dtype(TILE, ZERO) == "bfloat16":
        pointer = (slab + term_offset(TILE, ZERO)).to(tl.pointer_type(tl.bfloat16))
    else:
        pointer = (slab + term_offset(TILE, ZERO)).to(tl.pointer_type(tl.float32))
    return pointer


@triton.jit
def load_columns_of(pointers, N: constexpr, TILE: constexpr, NUMBERS: constexpr, PLANES: constexpr):
    """A number for each column of each segment of PLANES planes, in its fragment order: a flat tuple of [N, columns]; see `load_columns`."""
    parts = ()
    for i in tl.static_range(PLANES):
        for seg in tl.static_range(segments_of(TILE, i)):
            part = load_columns(
                pointers, N, seg, nbytes_of(TILE, i), words_of(TILE, i), bits_of(TILE, i), NUMBERS,
                columns_first(TILE, i), columns_count(TILE, i), columns_second(TILE, i),
            )  # fmt: skip
            parts = parts + (part,)
    return parts


@triton.jit
def _load_rows(slab, first_row, ROWS: constexpr, END: constexpr, TILE: constexpr):
    """Words of all planes and segments of rows first_row .. of a tile that has END rows: a flat tuple.

    A second plane of codes on a curve is loaded as `unpack_curved` takes it.
    """
    words = ()
    for i in tl.static_range(planes_of(TILE)):
        for seg in tl.static_range(segments_of(TILE, i)):
            at = slab + offset_of(TILE, i)
            if not slab.dtype.is_ptr():
                at += first_row * nbytes_of(TILE, i) + seg * 64
                words = words + (read_words(at, ROWS, nbytes_of(TILE, i), words_of(TILE, i)),)
            elif words_of(TILE, i) == 1:
                words = words + (load_bits(at, first_row, ROWS, END),)
            elif is_curved(TILE) & (i > 0):
                words = words + (load_high_words(at, first_row, ROWS, END, nbytes_of(TILE, 0), words_of(TILE, 0)),)
            elif (
                (nbytes_of(TILE, i) <= 8)
                & (nbytes_of(TILE, i) % 2 == 0)
                & (END % ROWS == 0)
                & (offset_of(TILE, i) % 2 == 0)
            ):
                words = words + (load_pairs(at, first_row, ROWS, nbytes_of(TILE, i)),)
            else:
                words = words + (load_words(at, first_row, ROWS, END, nbytes_of(TILE, i), seg, words_of(TILE, i)),)
    return words


@triton.jit
def load_groups(slab, TILE: constexpr, ROWS: constexpr, END: constexpr):
    """`_load_rows` of all groups, ROWS each, of a tile of END rows."""
    words = ()
    for g in tl.static_range(groups_of(TILE)):
        words = words + _load_rows(slab, g * ROWS, ROWS, END, TILE)
    return words


@triton.jit
def load_terms(slab, TILE: constexpr, NUMBERS: constexpr, S: constexpr, N: constexpr, BY_COLUMN: constexpr):
    """The terms of a slab, a flat tuple.

    BY_COLUMN  for each group the scales, then the zeros, of each part in its fragment order: float16 [8, columns], rows alike; a group has NUMBERS
    otherwise  the scale, then the zero, of each token, as far as there are such: float32 [S, 1 or N], columns alike; then the largest scale, []
    """
    terms = ()
    if BY_COLUMN:
        for g in tl.static_range(groups_of(TILE)):
            scales = _numbers(slab + term_offset(TILE, False), g * NUMBERS, scale_kind(TILE))
            terms = terms + load_columns_of(scales, 8, TILE, scale_kind(TILE), planes_of(TILE))
            zeros = _numbers(slab + term_offset(TILE, True), g * NUMBERS, FLOAT16)
            terms = terms + load_columns_of(zeros, 8, TILE, FLOAT16, 1)
            for _ in tl.static_range(first_part(TILE, 1), first_part(TILE, planes_of(TILE))):
                terms = terms + (terms[0],)  # nobody asks: a zero is added once
    elif slab.dtype.is_ptr():
        if has_scale(TILE):
            terms = terms + (_load_tokens(slab, TILE, False, S),)
        if has_zero(TILE):
            terms = terms + (_load_tokens(slab, TILE, True, S),)
        if has_scale(TILE):
            terms = terms + (_largest(terms[0].to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True),)
    else:
        if has_scale(TILE):
            terms = terms + (_read_tokens(slab, TILE, False, S, N),)
        if has_zero(TILE):
            terms = terms + (_read_tokens(slab, TILE, True, S, N),)
        if has_scale(TILE):
            terms = terms + (_read_largest(slab, TILE, S),)
    return terms


@triton.jit
def _largest(bits):
    """The largest of positive floats: their bits are in the same order, and one instruction finds the largest of a warp's integers."""
    return tl.max(bits)


@triton.jit
def _numbers(at, FIRST: constexpr, KIND: constexpr):
    """A pointer to number FIRST of those at `at`, or its address, [8, 1], rows alike; KIND is SHORT (bytes) or of 16 bits."""
    if KIND == SHORT:
        at += FIRST
        if at.dtype.is_ptr():
            at = at.to(tl.pointer_type(tl.int8))
    else:
        at += 2 * FIRST
        if at.dtype.is_ptr():
            at = at.to(tl.pointer_type(tl.int16))
    return at + tl.arange(0, 8)[:, None] * 0


@triton.jit
def _load_tokens(slab, TILE: constexpr, ZERO: constexpr, S: constexpr):
    """A term that has a number for each token, or one for all: float32 [S, 1]."""
    token = tl.arange(0, S)
    if term_per(TILE) == "slab":
        token *= 0
    if ZERO and has_low_zero(TILE):
        pointer = (slab + term_offset(TILE, ZERO)).to(tl.pointer_type(tl.int16))
        numbers = low_zero(tl.load(pointer + token), TILE)
    else:
        numbers = tl.load(_term_pointer(slab, TILE, ZERO) + token).to(tl.float32)
    return numbers[:, None]


@triton.jit
def low_zero(bits, TILE: constexpr):
    """float32 zeros of int16 `bits`, float16 scales with a zero in their low bits."""
    steps = (bits & (LOW_MASK)).to(tl.float32) * LOW_PART + low_middle(TILE)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * steps


@triton.jit
def _read_tokens(slab, TILE: constexpr, ZERO: constexpr, S: constexpr, N: constexpr):
    """`_load_tokens` from shared memory, of a number of 16 bits for each or a float32 for all: float32 [S, N], columns alike."""
    at = slab + term_offset(TILE, ZERO)
    if term_per(TILE) == "slab":
        number = read(lanes(at, 0, 0), 1, 0, 1).to(tl.float32, bitcast=True)
        numbers = tl.broadcast_to(number[None, :, :], (S // 8, 8, 4)).reshape(S, 4)
    elif ZERO and has_low_zero(TILE):
        numbers = low_zero(read(lanes(at, 2, 0), S // 8, 16, 0).to(tl.int16), TILE)
    else:
        numbers = _float(read(lanes(at, 2, 0), S // 8, 16, 0).to(tl.int16), TILE)
    return tl.broadcast_to(numbers[:, :, None], (S, 4, N // 4)).reshape(S, N)


@triton.jit
def _read_largest(slab, TILE: constexpr, S: constexpr):
    """The largest scale, float32 [], of those that `_read_tokens` reads."""
    at = slab + term_offset(TILE, False)
    if term_per(TILE) == "slab":
        largest = _largest(read(lanes(at, 0, 0), 1, 0, 1)).to(tl.float32, bitcast=True)
    else:
        words = read(at + 4 * tl.arange(0, S // 2), 1, 0, 1)
        largest = _float(_largest(tl.maximum(words & 0xFFFF, (words >> 16) & 0xFFFF)).to(tl.int16), TILE)
    return largest


@triton.jit
def _float(bits, TILE: constexpr):
    """int16 as numbers of the 16-bit dtype of a tile's scale and zero, float32."""
    if term_dtype(TILE, False) == "bfloat16":
        numbers = bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return numbers
