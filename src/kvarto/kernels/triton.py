"""The GPU kernel: reads packed pages in place. Needs triton and codecs that give a Tile.

Three launches and no host synchronisation, so that a CUDA graph can hold them: raw pages, packed pages (triton_decode.py), and the merge
(triton_combine.py). Under TRITON_INTERPRET=1 it runs on the CPU, slowly: that is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from kvarto.jit import torch, why_unavailable
from kvarto.kernels.base import PageSet, Partial, Queries, SlabReader, Support
from kvarto.kernels.triton_arguments import (
    is_bfloat16,
    matrix_out,
    rotation_out,
    sixteen_bits,
    tables,
    told_heads,
)
from kvarto.kernels.triton_support import can_copy, copying_programs, why_not
from kvarto.kernels.triton_tune import Tuning, tuning_for
from kvarto.layout import Geometry, PageLayout, Side
from kvarto.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

# More query tokens of one sequence are a prefill, with so many bytes of decoded history at a time.
_FEW_TOKENS = 16
_SCRATCH_BYTES = 128 << 20
# Pages of a split where the order of sums must not depend on the batch.
_FIXED_SHARE = 32
# Where so many pairs of a sequence and a head do not run at once, or hardly: how many times the splits that run at once there may be.
_TURNS = 4
_MOST_ENTRIES = 512  # every program works out the plan for all
# Of the packed launch for slabs with tables: numbers of a slab that a warp holds, if it may, and registers of a thread then.
_TABLE_WARP_NUMBERS, _TABLE_WARPS, _TABLE_REGISTERS = 1024, 8, 128


class TritonKernel:
    """See the module docstring."""

    name = "triton"

    def supports(self, layout: PageLayout, k: SlabReader, v: SlabReader, device: str) -> Support:
        """Pages on a GPU (or anywhere, in the interpreter) whose codecs both have a tile that the program can read."""
        if reason := why_unavailable("triton"):
            return Support(f"triton: {reason}; run: pip install triton")
        if device != "cuda" and not interpreted():
            return Support(f"it runs on a GPU, not on {device}")
        tokens = layout.geometry.page_tokens
        if tokens & (tokens - 1) or tokens > 128:
            return Support(f"pages of {tokens} tokens: only 32, 64 or 128")
        for side, reader in ((Side.K, k), (Side.V, v)):
            if reader.tile is None:
                return Support(f"the {side.upper()} codec has no tile")
            if (why := why_not(side, reader.tile, reader.layout.dim)) is not None:
                return Support(f"{side.upper()}: {why}")
            if (told := told_heads(reader)) not in (None, 1, layout.geometry.heads):
                return Support(f"{side.upper()}: constants of {told} heads, in pages of {layout.geometry.heads}")
        return Support()

    def attend(
        self, queries: Queries, sets: Sequence[PageSet], rule: Rule, *, scale: float, softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Partial:  # fmt: skip
        """See `base.Kernel.attend`; one raw set and one packed set at most."""
        if len(queries.q) == 0:
            nothing = queries.q.new_zeros((0, queries.q.shape[1], sets[0].layout.geometry.v_dim), dtype=torch.float32)
            return Partial(nothing, nothing.sum(-1))
        sets = [_by_row(pages) for pages in sets]
        raw, packed = ([pages for pages in sets if pages.raw is is_raw] for is_raw in (True, False))
        assert len(raw) <= 1, "more than one set of raw pages"
        assert len(packed) <= 1, "more than one set of packed pages"
        few = queries.longest <= _FEW_TOKENS and not any(_is_mixed(pages) for pages in packed)
        attend = _attend_few if few else _attend_many
        return attend(queries, next(iter(packed), None), next(iter(raw), None), rule, scale, softcap, sinks)


def _by_row(pages: PageSet) -> PageSet:
    """The same with a table whose rows have their numbers next to each other."""
    if pages.table.stride(1) == 1 or pages.table.shape[1] <= 1:
        return pages
    return replace(pages, table=pages.table.contiguous())


def _has_table(reader: SlabReader) -> bool:
    return reader.tile is not None and reader.tile.table is not None


def _is_mixed(pages: PageSet) -> bool:
    """One side has a table and the other none: then even few queries read decoded pages."""
    return _has_table(pages.k) is not _has_table(pages.v)


def _table_tuning(geometry: Geometry) -> tuple[Tuning, int]:
    """(tuning, warps) of the packed launch for slabs with tables."""
    numbers = geometry.page_tokens * _power_of_2(max(geometry.k_dim, geometry.v_dim))
    warps = max(1, min(_TABLE_WARPS, numbers // _TABLE_WARP_NUMBERS))
    return Tuning(_TABLE_REGISTERS if numbers <= warps * _TABLE_WARP_NUMBERS else 255, False), warps


def interpreted() -> bool:
    """True if Triton programs are interpreted on the CPU."""
    return bool(_programs().interpreted)


def _attend_few(
    queries: Queries, packed: PageSet | None, raw: PageSet | None, rule: Rule,
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Partial:  # fmt: skip
    programs, some = _programs(), packed or raw
    assert some is not None, "no pages"
    geometry, (T, Hq, _), device = some.layout.geometry, queries.q.shape, queries.q.device
    heads, DV, R = geometry.heads, geometry.v_dim, Hq // geometry.heads
    tuning = tuning_for(_gpu(device), some.layout, some.k.name, some.v.name)
    warps = 1
    if packed is not None and _has_table(packed.k):
        tuning, warps = _table_tuning(geometry)
    ahead = tuning.ahead and packed is not None and _can_copy(packed)
    programs_at_once = min(tuning.programs, copying_programs(some.layout)) if ahead else tuning.programs // warps
    cut = _cut(queries, rule, packed, raw, R, _multiprocessors(device) * programs_at_once)
    plan = torch.empty(cut.entries, dtype=torch.int32, device=device)
    raw_out, raw_lse = _parts(cut.entries * heads * cut.raw_parts, cut.rows, DV, device)
    shared = {
        "HEADS": heads, "R": R, "S": geometry.page_tokens, "DK": geometry.k_dim, "DV": DV, "N": cut.rows,
        "SINK": rule.sink_pages, "WINDOW": rule.window_pages, "SLIDING": rule.sliding_tokens or 0,
        "SOFTCAP": softcap is not None,
    }  # fmt: skip
    # Before the first launch: a program that begins early must find its queries written.
    q_raw, q_packed = (sixteen_bits((pages or some).k, queries.q) for pages in (raw, packed))
    if raw is not None:
        programs.attend_raw[(heads, cut.entries, cut.raw_parts)](
            q_raw, queries.start, queries.position, raw.pages, raw.table, raw_out, raw_lse, q_raw.stride(0), q_raw.stride(1),
            raw.table.stride(0), cut.groups, scale, softcap or 0.0,
            PAGE_NBYTES=raw.pages.stride(0), K_NBYTES=raw.layout.k.nbytes, PAIR_NBYTES=raw.layout.pair_nbytes, BFLOAT16=is_bfloat16(raw.k.tile),
            num_warps=4, **shared,
        )  # fmt: skip
    packed_out, packed_lse = raw_out, raw_lse
    if packed is not None:
        packed_out, packed_lse = _parts(cut.splits, cut.rows, DV, device)
        programs.attend_packed[(cut.splits,)](
            q_packed, queries.start, queries.position, packed.pages, packed.table, plan, packed_out, packed_lse,
            q_packed.stride(0), q_packed.stride(1), packed.table.stride(0),
            cut.entries, cut.groups, cut.slots, cut.fixed_share, scale, softcap or 0.0, **tables(packed, device),
            K=packed.k.tile, V=packed.v.tile, PAGE_NBYTES=packed.pages.stride(0),
            K_NBYTES=packed.layout.k.nbytes, PAIR_NBYTES=packed.layout.pair_nbytes,
            BFLOAT16=q_packed.dtype == torch.bfloat16, num_warps=warps, num_stages=1, maxnreg=tuning.registers,
            ENTRIES=1 if cut.entries == 1 else max(64, _power_of_2(cut.entries)), TURNS=cut.turns,
            AHEAD=ahead, **_follows(raw is not None, device), **shared,
        )  # fmt: skip
    out = torch.empty((T, Hq, DV), dtype=torch.float32, device=device)
    lse = torch.empty((T, Hq), dtype=torch.float32, device=device)
    rotation, matrix = ("", None) if packed is None else rotation_out(packed.v, device)
    at_once = 0 if packed is None else _at_once(cut, heads, DV)
    programs.combine[(heads * cut.rows, cut.entries)](
        raw_out, raw_lse, packed_out, packed_lse, plan, queries.start, out if matrix is None else matrix,
        out if sinks is None else sinks, out, lse, out.stride(0), out.stride(1), cut.groups, cut.raw_parts,
        HEADS=heads, R=R, DV=DV, N=cut.rows, RAW=0 if raw is None else _power_of_2(cut.raw_parts),
        AT_ONCE=at_once, ROTATION=rotation, HAS_SINKS=sinks is not None, num_warps=8 if at_once > 64 else 4,
        **_follows(True, device),
    )  # fmt: skip
    return Partial(out, lse)


def _attend_many(
    queries: Queries, packed: PageSet | None, raw: PageSet | None, rule: Rule,
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Partial:  # fmt: skip
    """Prefill: the packed history is decoded a stretch at a time (triton_prefill.py)."""
    programs, some = _programs(), packed or raw
    assert some is not None, "no pages"
    geometry, (T, Hq, _), device = some.layout.geometry, queries.q.shape, queries.q.device
    heads, S, DK, DV, B = geometry.heads, geometry.page_tokens, geometry.k_dim, geometry.v_dim, len(queries.position)
    at, history = raw or some, packed or some
    q_raw, q_packed = sixteen_bits(at.k, queries.q), sixteen_bits(history.k, queries.q)
    columns = 0 if packed is None else packed.table.shape[1]
    stretch = max(1, min(columns, _SCRATCH_BYTES // (2 * B * heads * S * (DK + DV))))
    if _deterministic():  # where a stretch ends must not depend on what else is in the batch
        stretch = max(1, min(columns, 2 * _FIXED_SHARE))
    stretches = max(1, -(-columns // stretch))
    k_scratch, v_scratch = (
        torch.empty((B, heads, stretch * S, dim), dtype=torch.float16, device=device) for dim in (DK, DV)
    )
    k_base = torch.empty((B, heads, DK), dtype=torch.float32, device=device)
    whole = packed is not None and _has_whole_blocks(geometry, rule, softcap, device)
    state = torch.empty((T, Hq, DV + 2) if stretches > 1 or whole else (1,), dtype=torch.float32, device=device)
    out = torch.empty((T, Hq, DV), dtype=torch.float32, device=device)
    lse = torch.empty((T, Hq), dtype=torch.float32, device=device)
    matrix = None if packed is None else matrix_out(packed.v, device)
    shared = {
        "HEADS": heads, "S": S, "DK": DK, "DV": DV,
        "SINK": rule.sink_pages, "WINDOW": rule.window_pages, "SLIDING": rule.sliding_tokens or 0,
    }  # fmt: skip
    # Query rows and keys of a block: what the registers and the shared memory of a Hopper multiprocessor hold.
    M, N = (128, 128) if max(DK, DV) <= 128 else (64, 64)
    roomy = _generation(device) == 9 and max(DK, DV) <= 128 and S <= 64 and not whole
    blocks = -(-queries.longest * (Hq // heads) // M)
    for i in range(stretches):
        if packed is not None:
            programs.decode_pages[(stretch, heads, B)](
                queries.start, queries.position, packed.pages, packed.table, lse if matrix is None else matrix,
                k_scratch, v_scratch, k_base, packed.table.stride(0), i * stretch, stretch, **tables(packed, device),
                K=packed.k.tile, V=packed.v.tile, PAGE_NBYTES=packed.pages.stride(0), PAIR_NBYTES=packed.layout.pair_nbytes,
                K_NBYTES=packed.layout.k.nbytes, ROTATED=matrix is not None, num_warps=4, **shared,
            )  # fmt: skip
        if whole:
            _attend_whole(
                queries, q_packed, k_scratch, v_scratch, k_base, state, rule, scale, Hq // heads, S, i * stretch
            )
        programs.attend_stretch[(blocks, heads, B)](
            q_raw, q_packed, queries.start, queries.position, at.pages, at.table, k_scratch, v_scratch, k_base,
            lse if sinks is None else sinks, state, out, lse,
            q_raw.stride(0), q_raw.stride(1), q_packed.stride(0), q_packed.stride(1), at.table.stride(0), i * stretch, stretch,
            scale, softcap or 0.0,
            RAW_BFLOAT16=is_bfloat16(at.k.tile), RAW_PAGE_NBYTES=at.pages.stride(0), RAW_PAIR_NBYTES=at.layout.pair_nbytes,
            RAW_K_NBYTES=at.layout.k.nbytes, R=Hq // heads, M=M, N=N, SOFTCAP=softcap is not None,
            HAS_RAW=raw is not None, HAS_PACKED=packed is not None, HAS_SINKS=sinks is not None,
            FIRST=i == 0, LAST=i == stretches - 1, WHOLE_DONE=whole, num_warps=M // 16, num_stages=3 if roomy else 2, **shared,
        )  # fmt: skip
    return Partial(out, lse)


def _attend_whole(
    queries: Queries, q: Tensor, k_scratch: Tensor, v_scratch: Tensor, k_base: Tensor, state: Tensor, rule: Rule,
    scale: float, R: int, S: int, first_page: int,
) -> None:  # fmt: skip
    """Attend to what needs no mask in a stretch of decoded history (triton_prefill_hopper.py)."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from kvarto.kernels import triton_prefill_hopper as hopper

    B, heads, tokens, DK = k_scratch.shape
    DV = v_scratch.shape[3]
    k_box, v_box = [hopper.N, DK], [DV, hopper.N]
    k_blocks, v_blocks = (
        TensorDescriptor.from_tensor(rows, box, gl.NVMMASharedLayout.get_default_for(box, gl.float16))
        for rows, box in ((k_scratch.view(-1, DK), k_box), (v_scratch.view(-1, tokens), v_box))
    )
    hopper.attend_whole[(-(-queries.longest * R // hopper.M), heads, B)](
        q, k_blocks, v_blocks, k_base, queries.start, queries.position, state, q.stride(0), q.stride(1), first_page, tokens // S, scale,
        HEADS=heads, R=R, S=S, DK=DK, DV=DV, SINK=rule.sink_pages, WINDOW=rule.window_pages, FIRST=first_page == 0,
        num_warps=4, maxnreg=hopper.REGISTERS,
    )  # fmt: skip


def _has_whole_blocks(geometry: Geometry, rule: Rule, softcap: float | None, device: torch.device) -> bool:
    """The program for what needs no mask can run, and there may be such."""
    dims = {geometry.k_dim, geometry.v_dim}
    return _generation(device) == 9 and dims <= {64, 128} and not rule.sliding_tokens and softcap is None


# ---- how the work is cut ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """How the work is cut and launched (triton_decode.py): `rows` of an entry, `entries` in all, `groups` of a sequence.

    Of at most `splits` of packed pages `slots` run at once, in up to `turns` turns.
    """

    rows: int
    entries: int
    groups: int
    raw_parts: int
    splits: int
    slots: int
    turns: int
    fixed_share: int


def _cut(
    queries: Queries, rule: Rule, packed: PageSet | None, raw: PageSet | None, R: int, slots: int
) -> _Cut:  # fmt: skip
    """`slots`: splits of packed pages that run at once; `turns` times as many there may be."""
    rows = 8 if queries.longest * R <= 8 else 16
    groups = -(-queries.longest * R // rows)
    entries = len(queries.position) * groups
    raw_parts = splits = turns = 1
    if raw is not None:
        crossing = 0 if queries.longest == 1 else 1  # the rows of an entry are of at most 16 tokens
        raw_parts = max(1, min(rule.sink_pages + rule.window_pages + 1 + crossing, raw.table.shape[1]))
    fixed_share = _FIXED_SHARE if _deterministic() else 0
    if packed is not None:
        heads = packed.layout.geometry.heads
        most = -(-packed.table.shape[1] // _FIXED_SHARE) * entries * heads
        turns = 1 if fixed_share or 2 * entries * heads <= slots or entries > _MOST_ENTRIES else _TURNS
        splits = max(1, most) if fixed_share else max(slots * turns, entries * heads)
    return _Cut(rows, entries, groups, raw_parts, splits, slots, turns, fixed_share)


# Numbers of partial results that a program of the merge can hold.
_AT_ONCE_NUMBERS = 1 << 15


def _at_once(cut: _Cut, heads: int, dim: int) -> int:
    """Partial results that a program of the merge reads at once: about as many as there are, or always as many, where the order of sums counts."""
    if cut.fixed_share:
        return 16
    return min(_AT_ONCE_NUMBERS // _power_of_2(dim), max(4, _power_of_2(cut.splits // (cut.entries * heads))))


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _parts(count: int, rows: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for partial results."""
    return (
        torch.empty((count, rows, dim), dtype=torch.float32, device=device),
        torch.empty((count, rows), dtype=torch.float32, device=device),
    )


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


@cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


@cache
def _multiprocessors(device: torch.device) -> int:
    """1 in the interpreter, whose results then have several parts to merge all the same."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _can_copy(pages: PageSet) -> bool:
    """Slabs can be copied to shared memory ahead of their use (triton_shared.py): everything is where the copy engine wants it."""
    if _generation(pages.pages.device) < 9 or (pages.pages.data_ptr() | pages.pages.stride(0)) % 16:
        return False
    k, v = pages.k.tile, pages.v.tile
    return k is not None and v is not None and _can_copy_layout(pages.layout, k, v)


_can_copy_layout = cache(can_copy)


def _follows(previous: bool, device: torch.device) -> dict[str, bool]:
    """Launch option: begin before the previous launch has ended; the program waits for it itself."""
    return {"launch_pdl": True} if previous and _generation(device) >= 9 else {}


@cache
def _generation(device: torch.device) -> int:
    """9 for Hopper, from which on there are dependent launches and bulk copies; 0 in the interpreter."""
    return 0 if interpreted() else int(torch.cuda.get_device_capability(device)[0])


# ---- the programs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Programs:
    attend_raw: Any
    attend_packed: Any
    combine: Any
    decode_pages: Any
    attend_stretch: Any
    interpreted: bool


@cache
def _programs() -> _Programs:
    """Imported at first use, because triton may be missing."""
    import triton

    from kvarto.kernels.triton_combine import combine
    from kvarto.kernels.triton_decode import attend_packed, attend_raw
    from kvarto.kernels.triton_prefill import attend_stretch, decode_pages

    interpreting = bool(triton.knobs.runtime.interpret)
    return _Programs(attend_raw, attend_packed, combine, decode_pages, attend_stretch, interpreting)
