"""The part of a prefill that is all tensor cores, for Hopper: blocks of decoded history that every query row of a block sees. Gluon, no host code.

`attend_stretch` (triton_prefill.py) does all of a prefill; Triton lets it use half of what the tensor cores can do, because scores, softmax and
values follow one another. Where this program can run it goes first over what needs no mask, and leaves the state from which `attend_stretch` goes on.

Three teams share a multiprocessor (as in FlashAttention-3, Shah et al. 2024): one fetches blocks of keys and values with the copy engine, and two
groups of warps, with 64 query rows each, work on them. A group's softmax runs while its own last products with the values, and the other group's
products, are on the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvarto.kernels.triton_prefill import whole_blocks

# Query rows of a group and of both, tokens of a block, blocks under way.
GROUP = 64
M = 2 * GROUP
N = 128
STAGES = 2
# Of each thread when the program begins; the groups then take what the fetching team gives up.
REGISTERS = 168
_G = gl.constexpr(GROUP)
_N = gl.constexpr(N)
_STAGES = gl.constexpr(STAGES)
_NOTHING = gl.constexpr(-1e30)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit(do_not_specialize=["first_page", "stretch_pages"])
def attend_whole(
    q, k_blocks, v_blocks, k_base, start, position, state, q_stride_t, q_stride_h, first_page, stretch_pages, scale,
    HEADS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
    SINK: gl.constexpr, WINDOW: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of M query rows, HEADS, B), 4 warps. Arguments as in `attend_stretch`.

    q         [T, Hq, DK] in the packed tile's domain, DK and DV 64 or 128
    k_blocks  descriptor of the scratch of keys [B * HEADS * tokens, DK], of boxes [N, DK]; v_blocks of [B * HEADS * DV, tokens], of [DV, N]
    state     float32 [T, Hq, DV + 2]: written, and read before if not FIRST
    """
    head, sequence = gl.program_id(1), gl.program_id(2)
    begin = gl.load(start + sequence)
    count = (gl.load(start + sequence + 1) - begin) * R
    first_row = gl.program_id(0) * (2 * _G)
    base = gl.load(position + sequence)
    t_low, t_high = base + first_row // R, base + gl.minimum(first_row + 2 * _G - 1, count - 1) // R
    low, whole = whole_blocks(t_low, t_high, first_page, stretch_pages, S, SINK, WINDOW, 0, _N)
    blocks = gl.where(first_row < count, gl.maximum(whole - low, 0) // _N, 0)

    q_rows = gl.allocate_shared_memory(
        gl.float16, [2, _G, DK], gl.NVMMASharedLayout.get_default_for([_G, DK], gl.float16)
    )
    for group in gl.static_range(2):
        _load_queries(
            q, q_rows.index(group), begin, head, first_row + group * _G, count, q_stride_t, q_stride_h, HEADS, R, DK
        )
    fence_async_shared()
    k_ring = gl.allocate_shared_memory(gl.float16, [_STAGES, _N, DK], k_blocks.layout)
    v_ring = gl.allocate_shared_memory(gl.float16, [_STAGES, DV, _N], v_blocks.layout)
    k_here = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_here = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(k_here.index(i), count=1)
        mbarrier.init(v_here.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # when both groups are done with them
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    pair = sequence * HEADS + head
    rows = (begin, head, first_row, count, k_base + pair * DK)
    ring = (q_rows, k_ring, v_ring, k_here, v_here, k_free, v_free)
    gl.warp_specialize(
        [
            (_attend, (rows, ring, state, blocks, scale * _LOG2E, gl.constexpr(0), HEADS, R, DK, DV, FIRST)),
            (_attend, (rows, ring, state, blocks, scale * _LOG2E, gl.constexpr(1), HEADS, R, DK, DV, FIRST)),
            (_fetch, (k_blocks, v_blocks, ring, pair * (stretch_pages * S) + low, pair * DV, low, blocks)),
        ],
        [4, 4],
        [240, 24],
    )


@gluon.jit
def _load_queries(
    q, to, begin, head, first, count, stride_t, stride_h,
    HEADS: gl.constexpr, R: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    """Rows first .. of the queries to shared memory, float16; 0 beyond the last one."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    row = first + gl.arange(0, _G, gl.SliceLayout(1, layout))
    at = (begin + row // R).to(gl.int64) * stride_t + (head * R + row % R).to(gl.int64) * stride_h
    channel = gl.arange(0, DK, gl.SliceLayout(0, layout))
    rows = gl.load(q + at[:, None] + channel[None, :], mask=(row < count)[:, None], other=0.0)
    to.store(rows.to(gl.float16))


@gluon.jit
def _fetch(k_blocks, v_blocks, ring, k_row, v_row, low, blocks):
    """The team that fetches."""
    _, k_ring, v_ring, k_here, v_here, k_free, v_free = ring
    for j in range(blocks):
        slot = j % _STAGES
        free = (j // _STAGES & 1) ^ 1  # the first wait of each slot is for nothing
        mbarrier.wait(k_free.index(slot), free)
        mbarrier.expect(k_here.index(slot), k_blocks.block_type.nbytes)
        tma.async_copy_global_to_shared(k_blocks, [k_row + j * _N, 0], k_here.index(slot), k_ring.index(slot))
        mbarrier.wait(v_free.index(slot), free)
        mbarrier.expect(v_here.index(slot), v_blocks.block_type.nbytes)
        tma.async_copy_global_to_shared(v_blocks, [v_row, low + j * _N], v_here.index(slot), v_ring.index(slot))


@gluon.jit
def _attend(
    rows, ring, state, blocks, gain, GROUP: gl.constexpr,
    HEADS: gl.constexpr, R: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The team that works on rows 64 * GROUP .. of the block."""
    begin, head, first_row, count, k_base = rows
    q_rows, k_ring, v_ring, k_here, v_here, k_free, v_free = ring
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    out_by_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    row = first_row + GROUP * _G + gl.arange(0, _G, out_by_row)
    inside = row < count
    token = (begin + gl.minimum(row, count - 1) // R).to(gl.int64)
    at = state + (token * (HEADS * R) + head * R + row % R) * (DV + 2)
    channel = gl.arange(0, DV, gl.SliceLayout(0, out_layout))
    nothing = gl.zeros([_G, _N], gl.float32, scores_layout)
    if FIRST:
        out = gl.zeros([_G, DV], gl.float32, out_layout)
        top = gl.full([_G], _NOTHING, gl.float32, by_row)
        total = gl.zeros([_G], gl.float32, by_row)
    else:
        out = gl.load(at[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
        top = gl.convert_layout(gl.load(at + DV, mask=inside, other=0.0), by_row)
        total = gl.convert_layout(gl.load(at + DV + 1, mask=inside, other=0.0), by_row)

    queries = q_rows.index(GROUP)
    lack = gl.zeros([_G], gl.float32, by_row)
    if blocks > 0:
        lack = _dot(queries, k_base, DK, scores_layout) * gain
        top -= lack  # of scores that lack it, until the end
        mbarrier.wait(k_here.index(0), 0)
        scores = warpgroup_mma(queries, k_ring.index(0).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(k_free.index(0), count=1)
        weights, shrink, top, total = _softmax(scores, gain, top, total, weights_layout)
        out = out * gl.convert_layout(shrink, out_by_row)[:, None]
        mbarrier.wait(k_here.index(1 % _STAGES), 1 // _STAGES & 1, pred=blocks > 1)
        for j in range(1, blocks):
            slot, last_slot, last_phase = j % _STAGES, (j - 1) % _STAGES, (j - 1) // _STAGES & 1
            scores_soon = warpgroup_mma(
                queries, k_ring.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            mbarrier.wait(v_here.index(last_slot), last_phase)
            out_soon = warpgroup_mma(weights, v_ring.index(last_slot).permute((1, 0)), out, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores_soon])
            mbarrier.arrive(k_free.index(slot), count=1)
            next_weights, shrink, top, total = _softmax(scores, gain, top, total, weights_layout)
            # The weights are named, and the next keys awaited here, so that the compiler works out the weights before it waits for the products.
            next_slot, next_phase = (j + 1) % _STAGES, (j + 1) // _STAGES & 1
            mbarrier.wait(k_here.index(next_slot), next_phase, pred=j + 1 < blocks)
            out, weights = warpgroup_mma_wait(0, deps=[out_soon, next_weights])
            mbarrier.arrive(v_free.index(last_slot), count=1)
            out = out * gl.convert_layout(shrink, out_by_row)[:, None]
        slot, phase = (blocks - 1) % _STAGES, (blocks - 1) // _STAGES & 1
        mbarrier.wait(v_here.index(slot), phase)
        out = warpgroup_mma(weights, v_ring.index(slot).permute((1, 0)), out)

    gl.store(at[:, None] + channel[None, :], out, mask=inside[:, None])
    gl.store(at + DV, gl.convert_layout(top + lack, out_by_row), mask=inside)
    gl.store(at + DV + 1, gl.convert_layout(total, out_by_row), mask=inside)


@gluon.jit
def _dot(queries, base, DK: gl.constexpr, rows_layout: gl.constexpr):
    """float32 [GROUP]: query rows times `base`, a pointer to float32 [DK]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    numbers = gl.load(base + gl.arange(0, DK, gl.SliceLayout(0, layout)))
    products = queries.load(layout).to(gl.float32) * numbers[None, :]
    return gl.convert_layout(gl.sum(products, axis=1), gl.SliceLayout(1, rows_layout))


@gluon.jit
def _softmax(scores, gain, top, total, weights_layout: gl.constexpr):
    """One step of the online softmax: (weights float16, what the sums so far shrink by, new maximum in powers of two, new sum)."""
    new_top = gl.maximum(top, gl.max(scores, axis=1) * gain)
    weights = gl.exp2(scores * gain - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    total = total * shrink + gl.sum(weights, axis=1)
    return gl.convert_layout(weights.to(gl.float16), weights_layout), shrink, new_top, total
