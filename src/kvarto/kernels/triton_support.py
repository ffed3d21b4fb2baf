"""Which slabs the Triton programs read, and which they may copy to shared memory first: questions about a `kvarto.tile.Tile`. No torch, no triton."""

from __future__ import annotations

from kvarto.layout import PageLayout, Side, SlabLayout
from kvarto.tile import Plane, Tile

MAX_DIM = 256
# Shared memory of a Hopper multiprocessor; what a program takes of it beside its slabs: the system's share, barriers, and what layouts need;
# and how large slabs may be, because a compiler takes no more than 48 KB with what layouts need.
_SHARED_NBYTES = 228 << 10
_SYSTEM_NBYTES = (1 << 10) + 16
_MOST_NBYTES = 43 << 10


def why_not(side: Side, tile: Tile, dim: int) -> str | None:
    """Why the program cannot read a tile, or None."""
    if dim > MAX_DIM or dim < 16:
        return f"a head dimension of {dim}: only 16 to {MAX_DIM}"
    if tile.table is not None:
        return None  # decoded number by number: rows of any length
    for plane in tile.planes:
        if plane.kind == "float32":
            return "float32 values: tensor cores have no such operand"
        if tile.curve is not None and plane.bits > 4:
            return f"codes of {plane.bits} bits on a curve"
        if side is Side.V and (plane.row_nbytes < 8 or plane.row_nbytes & (plane.row_nbytes - 1)):
            return f"rows of {plane.row_nbytes} bytes"
    low = tile.planes[0]
    if tile.curve is not None and len(tile.planes) > 1 and (low.row_nbytes % 8 or low.row_nbytes < 16):
        return f"codes of several planes on a curve, {low.row_nbytes} bytes in a row: only multiples of 8 from 16 on"
    per = None if tile.scale is None else tile.scale.per
    if side is Side.V and per == "row":
        return "a scale for each channel of all tokens"
    scale = tile.scale
    if side is Side.K and scale is not None and per == "column":
        readable = scale.groups <= 2 and tile.zero is not None and scale.dtype in ("float16", "short")
        return None if readable else f"column terms of {scale.groups} groups, {scale.dtype}"
    return None


def can_copy(layout: PageLayout, k: Tile, v: Tile) -> bool:
    """A program can copy its slabs ahead (triton_shared.py)."""
    return (
        k.table is None
        and v.table is None
        and layout.pair_nbytes <= _MOST_NBYTES
        and _reads_whole(k, layout.k)
        and _reads_whole(v, layout.v)
    )


def copying_programs(layout: PageLayout) -> int:
    """How many programs that copy their slabs ahead have room on a Hopper multiprocessor at once."""
    layouts = max(2 << 10, 32 * layout.geometry.page_tokens)
    return _SHARED_NBYTES // (layout.pair_nbytes + _SYSTEM_NBYTES + layouts)


def _reads_whole(tile: Tile, layout: SlabLayout) -> bool:
    """Every load of the tile is whole and on a multiple of its own size: nothing has to be masked."""
    rows, _ = layout.tile_shape
    if tile.curve is not None and len(tile.planes) > 1:
        return False  # lanes share words of the second plane
    if rows < 16 or rows & (rows - 1) or not all(_is_whole(plane) for plane in tile.planes):
        return False
    return all(
        term is None or (term.offset % 16 == 0 and (term.dtype == "float32") == (term.per == "slab"))
        for term in (tile.scale, tile.zero)
    )


def _is_whole(plane: Plane) -> bool:
    nbytes = plane.row_nbytes
    if nbytes <= 8 and nbytes % 2 == 0:
        together = 4 if nbytes == 2 and plane.bits == 1 else 2
        return plane.offset % 2 == 0 and all(
            first % together == count % together == 0 for first, count in plane.columns
        )
    whole = nbytes in (16, 32) or nbytes % 64 == 0
    return whole and plane.offset % min(nbytes // 4, 16) == 0 and len(plane.columns) == 1 and plane.columns[0][0] == 0
