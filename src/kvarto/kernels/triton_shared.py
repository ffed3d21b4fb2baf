"""Slabs copied to shared memory ahead of their use, by the bulk copy engine of Hopper and later GPUs. Triton functions; triton_walk.py uses them.

A program of one warp owns a block of shared memory with room for one slab of keys and one of values. The copy of the next page's keys begins when
this page's have been read for the last time, and lands while the values are worked on; and the other way round. So the latency of device memory
is paid once in a program, and no register holds what is still on its way.

Triton has no words for this: the block, the copies, their barriers and the loads are PTX. A place in the block is an int32 address where other code
has a pointer to device memory; what loads (triton_tiles.py) takes either. The interpreter never comes here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.constexpr_function
def _block_assembly(nbytes: int) -> str:
    return f"""{{ .shared .align 128 .b8 kvarto_block[{nbytes + 16}];
.reg .pred first; .reg .b32 lane;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
@first mbarrier.init.shared::cta.b64 [kvarto_block + {nbytes}], 1;
@first mbarrier.init.shared::cta.b64 [kvarto_block + {nbytes + 8}], 1;
@first fence.mbarrier_init.release.cluster;
bar.warp.sync -1;
mov.u32 $0, kvarto_block; }}"""


@triton.constexpr_function
def _copy_assembly(nbytes: int) -> str:
    return f"""{{ .reg .pred first; .reg .b32 lane; .reg .b64 state;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
bar.warp.sync -1;
@first mbarrier.arrive.expect_tx.shared::cta.b64 state, [$3], {nbytes};
@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$2], [$1], {nbytes}, [$3];
mov.b32 $0, 0; }}"""


_LANDED = tl.constexpr("""{ .reg .pred landed;
again: mbarrier.try_wait.parity.shared::cta.b64 landed, [$2], $3;
@!landed bra again;
mov.b32 $0, $1; }""")


@triton.jit
def block(NBYTES: constexpr):
    """Address of NBYTES (a multiple of 16) of shared memory of this program, and behind them of two barriers of 8 bytes. Once in a program."""
    nothing = tl.full((), 0, tl.int32)
    return tl.inline_asm_elementwise(_block_assembly(NBYTES), "=r,r", [nothing], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copy(source, to, barrier, NBYTES: constexpr):
    """Begin to copy NBYTES from `source` (a pointer) to address `to`, all three multiples of 16; what is there has been read for the last time.

    The warp's barrier stands between those reads and the copy. A write after reads needs no fence between the proxies: CUTLASS's pipelines have none.
    """
    tl.inline_asm_elementwise(
        _copy_assembly(NBYTES), "=r,l,r,r", [source.to(tl.int64), to, barrier], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def landed(to, barrier, parity):
    """Address `to`, once the copy there has ended. `parity` is 0 for the first copy of this barrier, then 1, then 0 ...

    That the address is a result keeps what is computed from it where it is: as constants of the loads, not as registers that live through a loop.
    """
    return tl.inline_asm_elementwise(_LANDED, "=r,r,r,r", [to, barrier, parity], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _read_assembly(blocks: int, stride: int, words: int) -> str:
    """`blocks` loads, `stride` bytes apart from the address on; of 1, 2 or 4 `words`, or of 16 bits for 0."""
    count, lines = max(words, 1), []
    for i in range(blocks):
        registers = ", ".join(f"${i * count + j}" for j in range(count))
        kind, to = {0: ("u16", registers), 1: ("b32", registers)}.get(words, (f"v{words}.b32", f"{{{registers}}}"))
        lines.append(f"ld.shared.{kind} {to}, [${blocks * count} + {i * stride}];")
    return "\n".join(lines)


@triton.constexpr_function
def _constraints(outputs: int) -> str:
    return "=&r," * outputs + "r"


@triton.constexpr_function
def _int32s(count: int) -> tuple[tl.dtype, ...]:
    return (tl.int32,) * count


@triton.jit
def read(at, BLOCKS: constexpr, STRIDE: constexpr, WORDS: constexpr):
    """Words from addresses `at` [8, 4] on, and again STRIDE bytes further, BLOCKS times: int32 [8 BLOCKS, 4 WORDS], WORDS 1, 2 or 4.

    WORDS 0: 16 bits instead, as int32 [8 BLOCKS, 4]. One address a lane: the rest are constants of the instructions.
    """
    COUNT: constexpr = max(WORDS, 1)
    if BLOCKS * COUNT == 1:
        words = tl.inline_asm_elementwise(
            _read_assembly(1, 0, WORDS), "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        parts = tl.inline_asm_elementwise(
            _read_assembly(BLOCKS, STRIDE, WORDS), _constraints(BLOCKS * COUNT), [at],
            dtype=_int32s(BLOCKS * COUNT), is_pure=False, pack=1,
        )  # fmt: skip
        words = _stack(parts, 0, 1, BLOCKS * COUNT).reshape(8, 4, BLOCKS, COUNT)
        words = words.permute(2, 0, 1, 3).reshape(8 * BLOCKS, 4 * COUNT)
    return words


@triton.jit
def _stack(parts, FIRST: constexpr, STEP: constexpr, COUNT: constexpr):
    """parts[FIRST], parts[FIRST + STEP] ..., COUNT of them, along new last dimensions of 2, in order."""
    if COUNT == 1:
        tile = parts[FIRST]
    else:
        even = _stack(parts, FIRST, 2 * STEP, COUNT // 2)
        tile = tl.join(even, _stack(parts, FIRST + STEP, 2 * STEP, COUNT // 2))
    return tile


@triton.jit
def lanes(at, ROW_NBYTES: constexpr, LANE_NBYTES: constexpr):
    """Addresses int32 [8, 4]: lane i of a quad reads from byte i * LANE_NBYTES of a row on."""
    return at + tl.arange(0, 8)[:, None] * ROW_NBYTES + tl.arange(0, 4)[None, :] * LANE_NBYTES
