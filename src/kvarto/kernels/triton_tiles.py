"""Packed rows to tensor-core operands, without a trip through shared memory. Triton functions, no host code.

**The fragment order.** In the operand of a tensor-core instruction a quad of lanes shares a row, and each lane holds some of its columns. The sum
over columns may be taken in any order, so we choose the one in which every lane finds its share in consecutive bytes: a row of W words is cut
into four runs, and lane i of the quad loads run i with one wide load. Unpacked, the columns of the tile are in this order, slowest first:

    [ word of the run | field of the byte | lane (4) | odd (2) | pair (2) ]        byte = 4 word + odd + 2 pair, field 0 in the low bits

which is how Triton lays out a 16-bit operand whose numbers come from joined halves (kWidth 4), so that the compiler's layout conversions move
nothing. That is speed only: in an interpreter, or another version, the same code gives the same numbers.

**Codes without arithmetic.** A code masked out of a word into the low ten bits of a half is a subnormal float16: code * 2^-24, and 2^(bits f)
times that in field f of its byte. Tensor cores take subnormals at full speed; the factors go into the other operand, or to the end.

Rows of up to 8 bytes have W = 2: each lane of the quad owns two bytes. Longer rows are padded to a power of two words, and cut into segments of
16 words (64 bytes). KIND is one of the constants below, BITS the width of a code.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvarto.kernels.triton_shared import lanes, read
from kvarto.kernels.triton_spec import BFLOAT16, E5M2, UINT, byte_pair_assembly, exact_assembly, field_assembly

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def launch_next():
    """Let the next kernel of the stream begin, if it was launched to."""
    if not _INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the kernel before this one has ended and what it wrote can be read."""
    if not _INTERPRETED:
        gdc_wait()


@triton.jit
def product(a, b, total):
    """total (float32) + a b, 16-bit operands on the tensor cores."""
    if _INTERPRETED:  # whose dot takes bfloat16 for integers
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def load_words(slab, first_row, ROWS: constexpr, END: constexpr, NBYTES: constexpr, SEG: constexpr, W: constexpr):  # fmt: skip
    """Words of segment SEG of rows first_row .. of NBYTES bytes each, at `slab` (uint8 pointer); 0 beyond a row's end and from row END on.

    int32 [ROWS, W]; for W = 2 int32 [ROWS, 4]: the two bytes of a lane in the low byte of either half.
    """
    rows = first_row + tl.arange(0, ROWS)[:, None]
    if W == 2:
        byte = 2 * tl.max_contiguous(tl.arange(0, 4), 1)[None, :]
        low = tl.load(slab + rows * NBYTES + byte, mask=(rows < END) & (byte < NBYTES), other=0).to(tl.int32)
        high = tl.load(slab + rows * NBYTES + byte + 1, mask=(rows < END) & (byte + 1 < NBYTES), other=0).to(tl.int32)
        words = low | (high << 16)
    else:
        # The hint keeps a lane to its own run: the compiler would else load 16 bytes a lane where a run is shorter.
        word = tl.max_contiguous(tl.arange(0, W), W // 4)[None, :]
        if NBYTES % 4 != 0:
            words = tl.zeros((ROWS, W), tl.int32)
            for i in tl.static_range(4):
                byte = SEG * 64 + 4 * word + i
                part = tl.load(slab + rows * NBYTES + byte, mask=(rows < END) & (byte < NBYTES), other=0)
                words |= part.to(tl.int32) << (8 * i)
        else:
            pointers = slab.to(tl.pointer_type(tl.int32)) + rows * (NBYTES // 4) + SEG * 16 + word
            if (END % ROWS != 0) | (NBYTES < SEG * 64 + 4 * W):
                words = tl.load(pointers, mask=(rows < END) & (SEG * 64 + 4 * word < NBYTES), other=0)
            else:
                words = tl.load(pointers)
    return words


@triton.jit
def load_pairs(slab, first_row, ROWS: constexpr):
    """`load_words` of rows of exactly 8 bytes (W = 2) on even addresses, all of which exist."""
    rows = first_row + tl.arange(0, ROWS)[:, None]
    pointers = slab.to(tl.pointer_type(tl.uint16)) + rows * 4 + tl.max_contiguous(tl.arange(0, 4), 1)[None, :]
    pair = tl.load(pointers).to(tl.int32)
    return (pair & 0xFF) | ((pair & 0xFF00) << 8)


@triton.jit
def read_words(at, ROWS: constexpr, NBYTES: constexpr, W: constexpr):
    """`load_words` from address `at` in shared memory on, of rows of W words of a segment."""
    if W == 2:
        pair = read(lanes(at, NBYTES, 2), ROWS // 8, 8 * NBYTES, 0)
        words = (pair & 0xFF) | ((pair & 0xFF00) << 8)
    else:
        words = read(lanes(at, NBYTES, W), ROWS // 8, 8 * NBYTES, W // 4)
    return words


@triton.jit
def _halves(words, KIND: constexpr):
    """int32 [...] to float16 (bfloat16 for BFLOAT16) [..., 2]: low half, high half."""
    low = (words & 0xFFFF).to(tl.int16)
    high = (words >> 16).to(tl.int16)
    if KIND == BFLOAT16:
        pair = tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))
    else:
        pair = tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    return pair


@triton.jit
def _byte_pairs(words, ODD: constexpr, KIND: constexpr):
    """Bytes ODD and ODD + 2 of each word as the two halves of one: 8-bit codes as float16, [..., 2]."""
    if not _INTERPRETED:
        pairs = _halves(_assembled(words, byte_pair_assembly(ODD, KIND)), KIND)
    elif KIND == UINT:
        pairs = _halves((words >> (8 * ODD)) & 0x00FF00FF, KIND)
    else:
        words = (words << (8 - 8 * ODD)) & -0x00FF0100  # bytes 1 and 3
        if KIND == E5M2:
            pairs = _halves(words, KIND)
        else:
            # Sign, then the seven other bits one place lower, and the exponent, which in float16 begins elsewhere.
            pairs = _halves((words & -0x7FFF8000) | ((words & 0x7F007F00) >> 1), KIND) * 256.0
    return pairs


@triton.jit
def _field(words, F: constexpr, BITS: constexpr):
    """Field F of the low byte of each half, as float16 [..., 2]."""
    if _INTERPRETED:
        words = words & (((1 << BITS) - 1) << (BITS * F)) * 0x10001
    else:
        words = _assembled(words, field_assembly(F, BITS))
    return _halves(words, UINT)


@triton.jit
def _assembled(words, ASSEMBLY: constexpr):
    """int32 [...] through PTX, word by word. Where two halves are handled at once, a compiler that sees it takes them apart again."""
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unpack(words, ROWS: constexpr, W: constexpr, KIND: constexpr, BITS: constexpr):
    """What `load_words` gave, as a tile [ROWS, columns] of 16-bit floats in fragment order."""
    if BITS == 16:
        tile = _halves(words, KIND).reshape(ROWS, 4, W // 8, 2, 2).permute(0, 2, 1, 3, 4).reshape(ROWS, 2 * W)
    elif BITS == 8:
        tile = tl.join(_byte_pairs(words, 0, KIND), _byte_pairs(words, 1, KIND))  # row, word, pair, odd
        tile = tile.reshape(ROWS, 4, W // 4, 2, 2).permute(0, 2, 1, 4, 3).reshape(ROWS, 4 * W)
    else:
        tile = _ordered(_fields(words, W, BITS, False), ROWS, W, BITS)
    return tile


@triton.jit
def unpack_exact(words, ROWS: constexpr, W: constexpr, BITS: constexpr):
    """`unpack` of unsigned codes of less than 8 bits, as the codes themselves."""
    return _ordered(_fields(words, W, BITS, True), ROWS, W, BITS)


@triton.jit
def _fields(words, W: constexpr, BITS: constexpr, EXACT: constexpr):
    """All fields of the bytes of words, joined as `_ordered` takes them; EXACT: as whole numbers."""
    tile = tl.join(_bytes(words, 0, W, BITS, EXACT), _bytes(words, 1, W, BITS, EXACT))
    if BITS <= 2:
        tile = tl.join(tile, tl.join(_bytes(words, 2, W, BITS, EXACT), _bytes(words, 3, W, BITS, EXACT)))
    if BITS == 1:
        upper = tl.join(
            tl.join(_bytes(words, 4, W, BITS, EXACT), _bytes(words, 5, W, BITS, EXACT)),
            tl.join(_bytes(words, 6, W, BITS, EXACT), _bytes(words, 7, W, BITS, EXACT)),
        )
        tile = tl.join(tile, upper)
    return tile


@triton.jit
def _bytes(words, F: constexpr, W: constexpr, BITS: constexpr, EXACT: constexpr):
    """Field F of each byte: of the low byte of each half, and of the high one too where W > 2."""
    if EXACT:
        tile = _exact(words, F, BITS)
        if W > 2:
            tile = tl.join(tile, _exact(words >> 8, F, BITS))
    else:
        tile = _field(words, F, BITS)
        if W > 2:
            tile = tl.join(tile, _field(words >> 8, F, BITS))
    return tile


@triton.jit
def _exact(words, F: constexpr, BITS: constexpr):
    """`_field` as whole numbers: the code is put behind the leading one of 1024, which is then taken away, exactly."""
    if _INTERPRETED:
        weight = 1.0 / (1 << (BITS * F))
        halves = _halves((words & (((1 << BITS) - 1) << (BITS * F)) * 0x10001) | 0x64006400, UINT)
        halves = halves * tl.full((), weight, tl.float16) - tl.full((), 1024.0 * weight, tl.float16)
    else:
        halves = _halves(_assembled(words, exact_assembly(F, BITS)), UINT)
    return halves


@triton.jit
def _ordered(tile, ROWS: constexpr, W: constexpr, BITS: constexpr):
    """Fields of codes of less than 8 bits, [ROWS, word, pair, odd, f0, f1, f2] as far as there are such, into fragment order.

    For W = 2 [ROWS, lane, pair, f0, f1, f2].
    """
    if W == 2:
        if BITS == 1:
            tile = tile.permute(0, 5, 4, 1, 3, 2)  # row, f2, f1, lane, f0, pair
        elif BITS == 2:
            tile = tile.permute(0, 4, 1, 3, 2)
        else:
            tile = tile.permute(0, 1, 3, 2)
        tile = tile.reshape(ROWS, 64 // BITS)
    else:
        if BITS == 1:
            tile = tile.reshape(ROWS, 4, W // 4, 2, 2, 2, 2, 2).permute(0, 2, 7, 6, 5, 1, 4, 3)
        elif BITS == 2:
            tile = tile.reshape(ROWS, 4, W // 4, 2, 2, 2, 2).permute(0, 2, 6, 5, 1, 4, 3)
        else:
            tile = tile.reshape(ROWS, 4, W // 4, 2, 2, 2).permute(0, 2, 5, 1, 4, 3)
        tile = tile.reshape(ROWS, W * 32 // BITS)
    return tile


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
    if W == 2:
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
    if W == 2:
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

    pointers  [N, 1] of 16-bit elements: number of channel 0; column c stands for channel FIRST + c, from COUNT on SECOND + c - COUNT
    KIND      of the numbers: FLOAT16 or BFLOAT16; NBYTES, W and BITS are those of the codes
    """
    if W == 2:
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
        tile = _halves(tl.load(words, mask=SEG * 32 + 2 * word < COUNT, other=0), KIND)
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
    else:
        number = bits.to(tl.float16, bitcast=True)
    return number


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
    tile = _halves(_load_chunk(words, F, SEG, NBYTES, W, CHUNK, 0, N), KIND)
    if W == 16:
        tile = tl.join(tile, _halves(_load_chunk(words, F, SEG, NBYTES, W, CHUNK, 4, N), KIND))
    return tile


@triton.jit
def _load_chunk(words, F: constexpr, SEG: constexpr, NBYTES: constexpr, W: constexpr, CHUNK: constexpr, SKIP: constexpr, N: constexpr):  # fmt: skip
    """int32 [N, 4 CHUNK]: the words SKIP .. SKIP + CHUNK - 1 of each lane."""
    START: constexpr = (F * NBYTES + SEG * 64) // 2 + SKIP
    if words.dtype.is_ptr():
        at = tl.arange(0, 4 * CHUNK)[None, :]
        word = at // CHUNK * (W // 2) + at % CHUNK
        if NBYTES >= SEG * 64 + 4 * W:
            chunk = tl.load(words + START + word)
        else:
            chunk = tl.load(words + START + word, mask=SEG * 64 + 2 * (word + SKIP) < NBYTES, other=0)
    else:
        chunk = read(lanes(words, 0, 2 * W) + 4 * START, 1, 0, CHUNK)
    return chunk


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
    return _ordered(tile, N, 2, BITS)


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
        if pointers.dtype.is_ptr():
            words = tl.load(pointers.to(tl.pointer_type(tl.int32)) + word, mask=byte < NBYTES, other=0)
        else:
            words = read(lanes(pointers, 0, 0) + 4 * word, 1, 0, 1)
        numbers = _halves(words, KIND)
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
