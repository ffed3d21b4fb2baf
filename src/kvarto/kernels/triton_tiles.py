"""Packed rows to tensor-core operands, without a trip through shared memory. Triton functions, no host code.

**The fragment order.** In the operand of a tensor-core instruction a quad of lanes shares a row, and each lane holds some of its columns. The sum
over columns may be taken in any order, so we choose the one in which every lane finds its share in consecutive bytes: a row of W words is cut
into four runs, and lane i of the quad loads run i with one wide load. Unpacked, the columns of the tile are in this order, slowest first:

    [ word of the run | field of the byte | lane (4) | odd (2) | pair (2) ]        byte = 4 word + odd + 2 pair, field 0 in the low bits

which is how Triton lays out a 16-bit operand whose numbers come from joined halves (kWidth 4), so that the compiler's layout conversions move
nothing. That is speed only: in an interpreter, or another version, the same code gives the same numbers.

**Codes without arithmetic.** A code masked out of a word into the low ten bits of a half is a subnormal float16: code * 2^-24, and 2^(bits f)
times that in field f of its byte. Tensor cores take subnormals at full speed; the factors go into the other operand, or to the end.

Rows of up to 8 bytes have W = 2: each lane of the quad owns two bytes. Rows of two bytes of single bits have W = 1: each lane owns two bits of
either byte, and the fragment order is the natural one. Longer rows are padded to a power of two words, and cut into segments of
16 words (64 bytes). KIND is one of the constants below, BITS the width of a code.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvarto.kernels.triton_shared import lanes, read
from kvarto.kernels.triton_spec import (
    BFLOAT16,
    E5M2,
    UINT,
    bits_of,
    byte_pair_assembly,
    code_bits_of,
    curve_assembly,
    curve_of,
    exact_assembly,
    field_assembly,
    planes_of,
)

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
def load_high_words(slab, first_row, ROWS: constexpr, END: constexpr, NBYTES: constexpr, W: constexpr):
    """For each word of two-bit codes that `load_words` gives (of rows of NBYTES bytes, a multiple of 8), the word that holds their third bits.

    That of a code in field f is bit 2 f of its byte: a row of third bits is half as long, so a word has those of two words of codes, and each lane
    loads what it needs. `slab` is where the plane of third bits begins. int32 [ROWS, W].
    """
    HALF: constexpr = NBYTES // 8
    rows = first_row + tl.arange(0, ROWS)[:, None]
    word = tl.max_contiguous(tl.arange(0, W), W // 4)[None, :]
    pointers = slab.to(tl.pointer_type(tl.int32)) + rows * HALF + tl.where(word >= HALF, word - HALF, word)
    words = tl.load(pointers, mask=(rows < END) & (word < 2 * HALF), other=0)
    return words >> tl.where(word >= HALF, 1, 0)


@triton.jit
def load_pairs(slab, first_row, ROWS: constexpr, NBYTES: constexpr):
    """`load_words` of rows of 2, 4, 6 or 8 bytes (W = 2) on even addresses, all of which exist."""
    rows = first_row + tl.arange(0, ROWS)[:, None]
    lane = tl.max_contiguous(tl.arange(0, 4), 1)[None, :]
    pairs = slab.to(tl.pointer_type(tl.uint16)) + rows * (NBYTES // 2) + lane
    if NBYTES == 8:
        words = tl.load(pairs).to(tl.int32)
    else:
        words = tl.load(pairs, mask=(lane < NBYTES // 2) & (rows >= 0), other=0).to(tl.int32)
    return _apart(words)


@triton.jit
def load_bits(slab, first_row, ROWS: constexpr, END: constexpr):
    """Words of rows of two bytes of single bits (W = 1) on even addresses, 0 from row END on: int32 [ROWS, 4], see `_own_bits`."""
    rows = first_row + tl.arange(0, ROWS)[:, None]
    pairs = slab.to(tl.pointer_type(tl.uint16)) + rows + tl.arange(0, 4)[None, :] * 0
    if END % ROWS == 0:
        words = tl.load(pairs).to(tl.int32)
    else:
        words = tl.load(pairs, mask=rows < END, other=0).to(tl.int32)
    return _own_bits(words)


@triton.jit
def read_words(at, ROWS: constexpr, NBYTES: constexpr, W: constexpr):
    """`load_words` from address `at` in shared memory on, of rows of W words of a segment.

    A row of 4 or 6 bytes is followed by others: lanes that it has no bytes for get codes of theirs, which meet 0 in the other operand.
    """
    if W == 1:
        words = _own_bits(read(lanes(at, NBYTES, 0), ROWS // 8, 8 * NBYTES, 0))
    elif W == 2:
        words = _apart(read(lanes(at, NBYTES, 2), ROWS // 8, 8 * NBYTES, 0))
    else:
        words = read(lanes(at, NBYTES, W), ROWS // 8, 8 * NBYTES, W // 4)
    return words


@triton.jit
def _apart(pair):
    """The two low bytes of int32, in the low byte of either half."""
    return (pair & 0xFF) | ((pair & 0xFF00) << 8)


@triton.jit
def _own_bits(pair):
    """Two bytes of single bits, int32 [.., 4], as `_apart`, with the two bits that a lane of the quad owns lowest."""
    return _apart(pair) >> (2 * tl.arange(0, 4))[None, :]


@triton.jit
def halves(words, KIND: constexpr):
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
        pairs = halves(_assembled(words, byte_pair_assembly(ODD, KIND)), KIND)
    elif KIND == UINT:
        pairs = halves((words >> (8 * ODD)) & 0x00FF00FF, KIND)
    else:
        words = (words << (8 - 8 * ODD)) & -0x00FF0100  # bytes 1 and 3
        if KIND == E5M2:
            pairs = halves(words, KIND)
        else:
            # Sign, then the seven other bits one place lower, and the exponent, which in float16 begins elsewhere.
            pairs = halves((words & -0x7FFF8000) | ((words & 0x7F007F00) >> 1), KIND) * 256.0
    return pairs


@triton.jit
def _field(words, F: constexpr, BITS: constexpr):
    """Field F of the low byte of each half, as float16 [..., 2]."""
    if _INTERPRETED:
        words = words & (((1 << BITS) - 1) << (BITS * F)) * 0x10001
    else:
        words = _assembled(words, field_assembly(F, BITS))
    return halves(words, UINT)


@triton.jit
def _assembled(words, ASSEMBLY: constexpr):
    """int32 [...] through PTX, word by word. Where two halves are handled at once, a compiler that sees it takes them apart again."""
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unpack(words, ROWS: constexpr, W: constexpr, KIND: constexpr, BITS: constexpr):
    """What `load_words` gave, as a tile [ROWS, columns] of 16-bit floats in fragment order."""
    if BITS == 16:
        tile = halves(words, KIND).reshape(ROWS, 4, W // 8, 2, 2).permute(0, 2, 1, 3, 4).reshape(ROWS, 2 * W)
    elif BITS == 8:
        tile = tl.join(_byte_pairs(words, 0, KIND), _byte_pairs(words, 1, KIND))  # row, word, pair, odd
        tile = tile.reshape(ROWS, 4, W // 4, 2, 2).permute(0, 2, 1, 4, 3).reshape(ROWS, 4 * W)
    else:
        tile = ordered(_fields(words, W, BITS, False), ROWS, W, BITS)
    return tile


@triton.jit
def unpack_exact(words, ROWS: constexpr, W: constexpr, BITS: constexpr):
    """`unpack` of unsigned codes of less than 8 bits, as the codes themselves."""
    return ordered(_fields(words, W, BITS, True), ROWS, W, BITS)


@triton.jit
def unpack_curved(words, high, ROWS: constexpr, W: constexpr, TILE: constexpr):
    """`unpack` of codes that stand for levels on a curve: the levels, float16. `high`: their third bits (`load_high_words`), if there are such.

    Codes of two planes are first put together, as 3 of 4 bits: fields 0 and 2 of each byte of `words` in one word, fields 1 and 3 in another.
    """
    if planes_of(TILE) == 2:
        even = (words & 0x33333333) | ((high << 2) & 0x44444444)
        odd = ((words >> 2) & 0x33333333) | (high & 0x44444444)
        tile = tl.join(
            tl.join(_curved_bytes(even, 0, W, 4, TILE), _curved_bytes(odd, 0, W, 4, TILE)),
            tl.join(_curved_bytes(even, 1, W, 4, TILE), _curved_bytes(odd, 1, W, 4, TILE)),
        )
    elif bits_of(TILE, 0) == 4:
        tile = tl.join(_curved_bytes(words, 0, W, 4, TILE), _curved_bytes(words, 1, W, 4, TILE))
    else:
        tile = tl.join(
            tl.join(_curved_bytes(words, 0, W, 2, TILE), _curved_bytes(words, 1, W, 2, TILE)),
            tl.join(_curved_bytes(words, 2, W, 2, TILE), _curved_bytes(words, 3, W, 2, TILE)),
        )
    return ordered(tile, ROWS, W, bits_of(TILE, 0))


@triton.jit
def _curved_bytes(words, F: constexpr, W: constexpr, BITS: constexpr, TILE: constexpr):
    """`_bytes` as levels."""
    tile = _curved(words << 1, F, BITS, TILE)
    if W > 2:
        tile = tl.join(tile, _curved(words >> 7, F, BITS, TILE))
    return tile


@triton.jit
def _curved(words, F: constexpr, BITS: constexpr, TILE: constexpr):
    """Field F of bits 1 .. 8 of each half as levels, float16 [..., 2]."""
    if _INTERPRETED:
        codes = halves((words >> (BITS * F + 1)) & ((1 << code_bits_of(TILE)) - 1) * 0x10001, UINT)
        numbers = bend(codes.to(tl.float32) * 16777216.0, TILE).to(tl.float16)  # subnormal codes to whole ones
    else:
        numbers = halves(_assembled(words, curve_assembly(TILE, F, BITS)), UINT)
    return numbers


@triton.jit
def bend(codes, TILE: constexpr):
    """Codes as the levels that they stand for, float32 (`Tile.curve`)."""
    u = codes * (4.0 / (1 << code_bits_of(TILE))) + (2.0 / (1 << code_bits_of(TILE)) - 2.0)
    return u * (curve_of(TILE, 0) + curve_of(TILE, 1) * (u * u * u * u))


@triton.jit
def _fields(words, W: constexpr, BITS: constexpr, EXACT: constexpr):
    """All fields of the bytes of words, joined as `ordered` takes them; EXACT: as whole numbers."""
    tile = tl.join(_bytes(words, 0, W, BITS, EXACT), _bytes(words, 1, W, BITS, EXACT))
    if BITS <= 2 and W > 1:
        tile = tl.join(tile, tl.join(_bytes(words, 2, W, BITS, EXACT), _bytes(words, 3, W, BITS, EXACT)))
    if BITS == 1 and W > 1:
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
        numbers = halves((words & (((1 << BITS) - 1) << (BITS * F)) * 0x10001) | 0x64006400, UINT)
        numbers = numbers * tl.full((), weight, tl.float16) - tl.full((), 1024.0 * weight, tl.float16)
    else:
        numbers = halves(_assembled(words, exact_assembly(F, BITS)), UINT)
    return numbers


@triton.jit
def ordered(tile, ROWS: constexpr, W: constexpr, BITS: constexpr):
    """Fields of codes of less than 8 bits, [ROWS, word, pair, odd, f0, f1, f2] as far as there are such, into fragment order.

    For W = 2 [ROWS, lane, pair, f0, f1, f2], for W = 1 [ROWS, lane, pair, f0].
    """
    if W == 1:
        tile = tile.permute(0, 1, 3, 2).reshape(ROWS, 16)
    elif W == 2:
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
