"""Seals full raw pages on a CPU: all cores, no torch operations, the bytes of `Codec.encode`. Needs numba.

A thread takes one slab after another (numba_seal_slab.py), so what a slab becomes depends on nothing else. One program, compiled once, seals whatever
`Codec.sealing` can say, and takes as many threads as torch does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.jit import compile_kernel, torch, why_unavailable
from kvarto.kernels.base import Support
from kvarto.kernels.team import run_team
from kvarto.layout import PageLayout, Side, SlabLayout
from kvarto.sealing import FLOAT16_MAX, Cast, Range, Refine, Sealing
from kvarto.tile import Plane, Term

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, Any]


def supports(
    raw_layout: PageLayout, layout: PageLayout, k_sealing: Sealing | None, v_sealing: Sealing | None, device: str
) -> Support:
    """Whether `seal_pages` takes pages of these layouts on this device ("cpu")."""
    if device != "cpu":
        return Support(f"it runs on the CPU, not on {device}")
    if reason := why_unavailable("numba"):
        return Support(f"numba: {reason}; run: pip install 'kvarto[engine]'")
    for side, sealing in ((Side.K, k_sealing), (Side.V, v_sealing)):
        if (why := _refusal(raw_layout.slab(side), sealing, layout.geometry.heads)) is not None:
            return Support(f"{side.upper()}: {why}")
    return Support()


def seal_pages(
    raw_pages: Tensor,
    raw_layout: PageLayout,
    raw_ids: Tensor,
    sealed_pages: Tensor,
    layout: PageLayout,
    sealed_ids: Tensor,
    k_sealing: Sealing,
    v_sealing: Sealing,
    saturated: Tensor | None = None,
) -> None:
    """Encode row raw_ids[i] of raw_pages into row sealed_ids[i] of sealed_pages; a page with a negative sealed id is skipped.

    Arguments as in `triton_seal.seal_pages`, on the CPU. `supports` must have said yes.
    """
    assert raw_pages.shape[1] == raw_layout.nbytes, (raw_pages.shape, raw_layout.nbytes)
    assert sealed_pages.shape[1] == layout.nbytes, (sealed_pages.shape, layout.nbytes)
    assert raw_pages.stride(1) == sealed_pages.stride(1) == 1
    assert raw_ids.dtype == sealed_ids.dtype == torch.int32, (raw_ids.dtype, sealed_ids.dtype)
    assert sealed_ids.shape == raw_ids.shape, (sealed_ids.shape, raw_ids.shape)
    raw_ids, sealed_ids = raw_ids.contiguous(), sealed_ids.contiguous()
    items = len(raw_ids) * layout.geometry.heads * 2
    if items == 0:
        return
    program, counter, clamped = _compiled(), np.zeros(1, np.int64), np.zeros(items, np.int64)
    sides = [
        _side(raw_layout, layout, side, sealing) for side, sealing in zip(Side, (k_sealing, v_sealing), strict=True)
    ]
    job = np.concatenate([each.record for each in sides])
    common = {
        "raw": raw_pages.data_ptr(), "raw_ids": raw_ids.data_ptr(), "raw_stride": raw_pages.stride(0), "raw_pair": raw_layout.pair_nbytes,
        "sealed": sealed_pages.data_ptr(), "sealed_ids": sealed_ids.data_ptr(), "sealed_stride": sealed_pages.stride(0),
        "sealed_pair": layout.pair_nbytes, "clamped": clamped.ctypes.data, "counter": counter.ctypes.data,
        "pages": len(raw_ids), "heads": layout.geometry.heads,
    }  # fmt: skip
    for name, value in common.items():
        job[name] = value
    run_team(program.address, job.ctypes.data, min(torch.get_num_threads(), items))
    if saturated is not None:
        saturated += int(clamped.sum())


@dataclass(frozen=True)
class _Side:
    """What the program is told of a side, but for the job's own, and the arrays whose addresses that holds."""

    record: Array
    keep: tuple[Array, ...]


@cache
def _side(raw_layout: PageLayout, layout: PageLayout, side: Side, sealing: Sealing) -> _Side:
    from kvarto.kernels import numba_seal_slab as program

    slab, (rows, columns) = layout.slab(side), layout.slab(side).tile_shape
    scale, zero, rotation = sealing.tile.scale, sealing.tile.zero, getattr(sealing, "rotation", None)
    chosen = [_chosen(plane, columns) for plane in sealing.tile.planes]
    kinds = {"bfloat16": program.BFLOAT16, "float16": program.FLOAT16, "float32": program.FLOAT32, "e4m3": program.E4M3,
             "e5m2": program.E5M2, "uint": program.UINT}  # fmt: skip
    planes = np.array(
        [
            (plane.offset, plane.row_nbytes, plane.bits, plane.shift, kinds[plane.kind], held.ctypes.data, len(held))
            for plane, held in zip(sealing.tile.planes, chosen, strict=True)
        ],
        np.int64,
    )
    gaps = np.array(slab.gaps, np.int64).reshape(-1, 2)
    scales = np.array(sealing.scales if isinstance(sealing, Cast) else (), np.float32)
    minus = np.array(rotation.minus if rotation else (), np.int64)
    highest = _highest(sealing.tile.planes, columns)
    record = np.zeros(1, program.SIDE)
    shared = {"": program.NONE, "slab": program.SLAB, "row": program.ROW, "column": program.COLUMN}
    grouped = scale is not None and scale.groups > 1
    values = {
        "raw_at": raw_layout.slab_range(side)[0], "slab_at": layout.slab_range(side)[0], "nbytes": slab.nbytes,
        "raw_kind": kinds[raw_layout.slab(side)["values"].dtype], "rows": rows, "columns": columns,
        "method": (Cast, Range, Refine).index(type(sealing)),
        "planes": planes.ctypes.data, "planes_count": len(planes), "gaps": gaps.ctypes.data, "gaps_count": len(gaps),
        "shared": shared[scale.per if scale else ""], "short": scale is not None and scale.dtype == "short",
        "scale_at": scale.offset if scale else 0, "zero_at": zero.offset if zero else 0,
        "groups": scale.groups if scale is not None and grouped else 1, "group_rows": scale.group_rows if scale is not None and grouped else rows,
        "highest": highest.ctypes.data, "scales": scales.ctypes.data, "scales_count": len(scales),
        "minus": minus.ctypes.data, "minus_count": len(minus),
        "limit": sealing.limit if isinstance(sealing, Cast) else FLOAT16_MAX,
        "root": rows**-0.5, "rotation_limit": sealing.rotation_limit if isinstance(sealing, Refine) else 0.0,
    }  # fmt: skip
    for name, value in values.items():
        record[name] = value
    return _Side(record, (planes, gaps, scales, minus, highest, *chosen))


def _chosen(plane: Plane, columns: int) -> Array:
    """The columns that a plane stands for, int64; none if it is all of them in order."""
    if plane.columns == ((0, columns),):
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(first, first + count) for first, count in plane.columns]).astype(np.int64)


def _highest(planes: tuple[Plane, ...], columns: int) -> Array:
    """The highest code of each column, float32 [columns]."""
    codes = np.zeros(columns, np.int64)
    for plane in planes:
        for first, count in plane.columns:
            codes[first : first + count] += ((1 << plane.bits) - 1) << plane.shift
    return codes.astype(np.float32)


def _refusal(raw: SlabLayout, sealing: Sealing | None, heads: int) -> str | None:
    """Why slabs cannot be sealed here, or None if they can."""
    if sealing is None:
        return "the codec does not say how it seals (Codec.sealing)"
    if [field.name for field in raw.fields] != ["values"]:
        return "the raw pages are not of a raw codec"
    if isinstance(sealing, Cast):
        scales = len(sealing.scales)
        return f"{scales} scales for {heads} KV heads" if scales not in (0, 1, heads) else None
    return _terms_refusal(sealing, sealing.tile.scale, sealing.tile.zero)


def _terms_refusal(sealing: Range | Refine, scale: Term | None, zero: Term | None) -> str | None:
    """The same of terms."""
    if scale is None or zero is None:
        return "a scale and a zero are expected"
    if isinstance(sealing, Range):
        short = scale.dtype == "short" and scale.groups == 1
        plain = zero.dtype == "float16" and (short or scale.dtype == "float16") and scale.per == "column"
        return (
            None if plain else "terms that are not fitted are float16, of columns; of columns of one group also short"
        )
    fitted = (scale.dtype, zero.dtype) in (("short", "float16"), ("float16", "low")) and scale.per == "column"
    return None if fitted else "fitted terms are a short scale and a zero, or a scale with a low zero, of columns"


@cache
def _compiled() -> Any:
    """Compiled once for all codecs and geometries; numba is imported only here."""
    from kvarto.kernels.numba_seal_slab import SIDE, seal

    return compile_kernel(seal, SIDE, exact=True)
