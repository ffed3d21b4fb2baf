"""Seals full raw pages on a GPU: one launch for all pages, heads and sides, no synchronization, the bytes of `Codec.encode`.

What is known before a launch, for one side, is a `Plan`: where bytes lie and how they are encoded. The program is kernels/triton_seal_slab.py;
under TRITON_INTERPRET=1 it runs on the CPU, slowly: that is how it is tested without a GPU.

**Padding.** Triton's tiles have powers of two as sides. A tile of K has its columns (channels) in 16 (or 8) runs, each padded by itself, so that
the fields of packed bytes and the runs of slow channels are still runs of the tile. Fitted rows (channels of V) stand in the order in which plain
halving adds what `halving_mean` adds: padding is 0 and changes no sum.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from kvarto.jit import require, torch, why_unavailable
from kvarto.kernels.base import Support
from kvarto.layout import PageLayout, Side, SlabLayout
from kvarto.sealing import FLOAT16_MAX, Cast, Refine, Rotation, Sealing
from kvarto.tile import Plane, Term

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_TILE = 1 << 15
_ELEMENTS_PER_WARP = 1 << 10
_MOST_WARPS = 16
# So that two programs of 8 warps run on a multiprocessor, for a few spilled registers. Not measured since sums stay within a warp.
_REGISTERS = 128


# ---- sealing -------------------------------------------------------------------------------------------------------


def supports(
    raw_layout: PageLayout, layout: PageLayout, k_sealing: Sealing | None, v_sealing: Sealing | None, device: str
) -> Support:
    """Whether `seal_pages` takes pages of these layouts on this device ("cuda"; anywhere in the interpreter)."""
    if reason := why_unavailable("triton"):
        return Support(f"triton: {reason}; run: pip install triton")
    if device != "cuda" and not require("triton").knobs.runtime.interpret:
        return Support(f"it runs on a GPU, not on {device}")
    for side, sealing in ((Side.K, k_sealing), (Side.V, v_sealing)):
        if (why := _refusal(layout.slab(side), raw_layout.slab(side), sealing)) is not None:
            return Support(f"{side.upper()}: {why}")
        scales, heads = len(sealing.scales) if isinstance(sealing, Cast) else 0, layout.geometry.heads
        if scales > 1 and scales != heads:
            return Support(f"{side.upper()}: {scales} scales for {heads} KV heads")
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

    raw_pages     uint8 [Praw, raw_page_nbytes]: full pages of a raw codec, finite
    sealed_pages  uint8 [P, page_nbytes]; rows that are not named stay as they are. Rows of both are contiguous, at any distance
    raw_ids, sealed_ids   int32 [n]; a row of sealed_pages is named once
    saturated     int64 [1], to which the number of clamped elements (`Codec.saturated`) is added; None: they are not counted

    All tensors on one device, ids contiguous; their values are not looked at on the host, and nothing is allocated, but that scales of fp8 go to
    the device at the first call with them: so that call must not be the one that a CUDA graph records. `supports` must have said yes.
    """
    pages = raw_ids.numel()
    assert raw_pages.shape[1] == raw_layout.nbytes, (raw_pages.shape, raw_layout.nbytes)
    assert sealed_pages.shape[1] == layout.nbytes, (sealed_pages.shape, layout.nbytes)
    assert sealed_ids.numel() == pages, (sealed_ids.shape, raw_ids.shape)
    assert raw_ids.dtype == sealed_ids.dtype == torch.int32, (raw_ids.dtype, sealed_ids.dtype)
    assert raw_pages.stride(1) == sealed_pages.stride(1) == 1
    assert raw_ids.is_contiguous()
    assert sealed_ids.is_contiguous()
    if pages == 0:
        return
    k, v = (
        make_plan(raw_layout, layout, side, sealing) for side, sealing in ((Side.K, k_sealing), (Side.V, v_sealing))
    )
    _program()[(pages, layout.geometry.heads, 2)](
        raw_pages,
        raw_ids,
        sealed_pages,
        sealed_ids,
        saturated,
        _scales(k_sealing, str(raw_pages.device)),
        _scales(v_sealing, str(raw_pages.device)),
        raw_pages.stride(0),
        raw_layout.pair_nbytes,
        sealed_pages.stride(0),
        layout.pair_nbytes,
        k,
        v,
        **launch_options(k, v),
    )


def launch_options(k: Plan, v: Plan) -> dict[str, Any]:
    """What the program is compiled with: 32 numbers of the larger tile for each thread, and no fused multiply-add."""
    elements = max(plan.row_pad * plan.column_pad for plan in (k, v))
    num_warps = min(max(elements // _ELEMENTS_PER_WARP, 1), _MOST_WARPS)
    return {"num_warps": num_warps, "maxnreg": _REGISTERS, "enable_fp_fusion": False}


@cache
def _program() -> Any:
    """Imported at first use, because triton may be missing."""
    from kvarto.kernels.triton_seal_slab import seal

    return seal


@cache
def _scales(sealing: Sealing, device: str) -> Tensor | None:
    """The scales of fp8 on the device, float32 [1 or Hkv]; kept for ever, since CUDA graphs hold their address."""
    if isinstance(sealing, Cast) and sealing.scales:
        return torch.tensor(sealing.scales, dtype=torch.float32, device=device)
    return None


# ---- plans ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """A plane: codes of `bits` bits, which are bits `shift` to shift + bits of the whole code, or floats of a kind.

    some   (first, count, second) if it is not of all columns: of `count` from `first` on, then of those from `second` on; else ()
    runs   of the tile's columns, one for each field of a byte, if it is of some columns and they are such; else ()
    """

    offset: int
    row_nbytes: int
    bits: int
    shift: int
    kind: str
    some: tuple[int, ...]
    runs: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """All that is known of one side's slabs before a launch; a constant to the compiler.

    method              "cast", "range" or "refine" (kvarto/sealing.py)
    raw_at, slab_at     byte of the slab within the pair of a head, of a raw page and of a sealed one
    rows, columns       of the tile; row_pad, column_pad: powers of two that hold them
    runs                columns come in so many equal runs, each padded by itself
    shared              what shares a scale: "slab", "row", "column"; "" without a scale
    terms               of a column: "short" or "low" (kvarto/tile.py); "" if they are float16
    groups, group_pad   groups of rows that share terms of a column, and rows of one as the padded tile holds them
    gaps                bytes of the slab that hold nothing, (first, end)
    limit               numbers beyond it are clamped and counted, after division by the scale and rotation
    scales              how many are given
    minus               the rotation's (kvarto/sealing.py); () without one, and nothing more is said
    odd, order          D = odd * 2^k; padded rows repeat, for each of the 2^k, the `odd` channels in this order: four bits each, 15 for none
    """

    method: str
    is_key: bool
    raw_dtype: str
    raw_at: int
    slab_at: int
    rows: int
    columns: int
    row_pad: int
    column_pad: int
    runs: int
    planes: tuple[Packing, ...]
    shared: str
    terms: str
    scale_at: int
    zero_at: int
    groups: int
    group_pad: int
    gaps: tuple[tuple[int, int], ...]
    limit: float
    scales: int
    minus: tuple[int, ...]
    rotation_limit: float
    odd: int
    order: int

    @property
    def run(self) -> int:
        """Columns of a run."""
        return self.columns // self.runs

    @property
    def run_pad(self) -> int:
        """Columns of a padded run."""
        return self.column_pad // self.runs

    @property
    def vector(self) -> int:
        """Columns that a thread loads at once: a warp takes whole rows, so that most of a sum over rows stays within a thread."""
        return max(self.column_pad // 32, 2)

    @property
    def fold(self) -> int:
        """F of a folded tile (kernels/triton_seal_fit.py): a thread holds 16 rows of two columns."""
        return max(self.row_pad // 16, 1)

    @property
    def bits(self) -> int:
        """Bits of the codes that all columns have."""
        return sum(plane.bits for plane in self.planes if not plane.some)

    @property
    def odd_pad(self) -> int:
        """Padded rows for `odd` channels."""
        return _power_of_two(self.odd)

    @property
    def root(self) -> float:
        """What makes the rotation orthogonal."""
        return float(self.rows**-0.5)

    @cached_property
    def _digest(self) -> str:
        known = [(name, getattr(self, name)) for name in dir(self) if not name.startswith("_")]
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        """Triton keys its caches and names functions by this: short, and different for plans that differ in anything the program reads."""
        return f"plan_{self._digest}"


@cache
def make_plan(raw_layout: PageLayout, layout: PageLayout, side: Side, sealing: Sealing) -> Plan:
    """The plan of one side; `supports` must have said yes."""
    slab, (rows, columns) = layout.slab(side), layout.slab(side).tile_shape
    scale, zero, runs = sealing.tile.scale, sealing.tile.zero, _runs(columns, side)
    group_rows, groups = _groups(scale, rows)
    rotation = sealing.rotation if isinstance(sealing, Refine) else None
    odd = _odd(rows) if rotation else 1
    return Plan(
        method=type(sealing).__name__.lower(),
        is_key=side is Side.K,
        raw_dtype=raw_layout.slab(side)["values"].dtype,
        raw_at=raw_layout.slab_range(side)[0],
        slab_at=layout.slab_range(side)[0],
        rows=rows,
        columns=columns,
        row_pad=_power_of_two(rows),
        column_pad=runs * _power_of_two(columns // runs),
        runs=runs,
        planes=tuple(
            Packing(
                plane.offset,
                plane.row_nbytes,
                plane.bits,
                plane.shift,
                plane.kind,
                _some(plane, columns),
                _fields(plane, columns),
            )
            for plane in sealing.tile.planes
        ),
        shared=scale.per if scale else "",
        terms=_terms(sealing),
        scale_at=scale.offset if scale else 0,
        zero_at=zero.offset if zero else 0,
        groups=groups,
        group_pad=group_rows if groups > 1 else _power_of_two(rows),
        gaps=slab.gaps,
        limit=sealing.limit if isinstance(sealing, Cast) else FLOAT16_MAX,
        scales=len(sealing.scales) if isinstance(sealing, Cast) else 0,
        minus=rotation.minus if rotation else (),
        rotation_limit=sealing.rotation_limit if isinstance(sealing, Refine) else 0.0,
        odd=odd,
        order=_halving_order(odd),
    )


def _refusal(slab: SlabLayout, raw: SlabLayout, sealing: Sealing | None) -> str | None:
    """Why slabs of this layout cannot be sealed here, or None if they can."""
    if sealing is None:
        return "the codec does not say how it seals (Codec.sealing)"
    if [field.name for field in raw.fields] != ["values"]:
        return "the raw pages are not of a raw codec"
    tokens, (rows, columns) = slab.page_tokens, slab.tile_shape
    if tokens & (tokens - 1):
        return f"a page of {tokens} tokens is not a power of two"
    runs = _runs(columns, slab.side)
    if _power_of_two(rows) * runs * _power_of_two(columns // runs) > _LARGEST_TILE:
        return f"a slab of {rows} x {columns} is more than {_LARGEST_TILE} numbers"
    group_rows, groups = _groups(sealing.tile.scale, rows)
    if groups > 1 and group_rows & (group_rows - 1):
        return f"groups of {group_rows} rows are not a power of two"
    if isinstance(sealing, Refine):
        return _refine_refusal(sealing, rows, slab.side)
    return None if isinstance(sealing, Cast) else _range_refusal(_terms(sealing), sealing.tile.scale, groups)


def _range_refusal(terms: str, scale: Term | None, groups: int) -> str | None:
    """The same of terms that are not fitted."""
    known = terms == "" or (terms == "short" and groups == 1)
    if scale is not None and scale.per == "column" and known:
        return None
    return "terms that are not fitted are float16, of columns; of columns of one group also short"


def _refine_refusal(sealing: Refine, rows: int, side: Side) -> str | None:
    """The same of what `Refine` alone asks for."""
    rotation: Rotation | None = sealing.rotation
    if _terms(sealing) == "":
        return "fitted terms are a short scale and a zero, or a scale with a low zero"
    if rotation is None:
        return f"{rows} fitted rows without a rotation are not a power of two" if rows & (rows - 1) else None
    if side is Side.K:
        return "keys cannot be rotated"
    return f"a head dimension of {rows} has an odd factor above 7" if _odd(rows) > 7 else None


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _odd(number: int) -> int:
    """Its largest odd factor."""
    return number // (number & -number)


def _runs(columns: int, side: Side) -> int:
    """Into how many runs columns are divided: tokens are not; channels into 16, or 8, so that a packed field is a whole number of runs."""
    if side is Side.V:
        return 1
    return 8 if columns % 16 else 16


def _groups(term: Term | None, rows: int) -> tuple[int, int]:
    """Rows of a group, and groups."""
    return (term.group_rows, term.groups) if term and term.groups > 1 else (rows, 1)


def _terms(sealing: Sealing) -> str:
    """`Plan.terms`."""
    scale, zero = sealing.tile.scale, sealing.tile.zero
    if scale is None or zero is None:
        return ""
    return "short" if scale.dtype == "short" else "low" if zero.dtype == "low" else ""


def _some(plane: Plane, columns: int) -> tuple[int, ...]:
    """`Packing.some`."""
    if plane.columns == ((0, columns),):
        return ()
    first, second = plane.columns[0], plane.columns[-1]
    return (*first, second[0])


def _fields(plane: Plane, columns: int) -> tuple[int, ...]:
    """`Packing.runs`: the run that each field is, of 16."""
    if plane.columns == ((0, columns),) or columns % 16:
        return ()
    held = [first + i for first, count in plane.columns for i in range(count)]
    fields = [held[i : i + plane.row_nbytes] for i in range(0, len(held), plane.row_nbytes)]
    run = columns // 16
    runs = tuple(field[0] // run for field in fields)
    fits = all(field == list(range(i * run, (i + 1) * run)) for field, i in zip(fields, runs, strict=True))
    return runs if fits else ()


def _halving_order(odd: int) -> int:
    """`Plan.order`: each of the numbers stands where plain halving adds it when `halving_mean`, which carries remainders, adds it."""
    tree: list[Any] = list(range(odd))
    while len(tree) > 1:
        half = len(tree) // 2
        tree = [*zip(tree[:half], tree[half : 2 * half], strict=True), *tree[2 * half :]]
    places = [15] * _power_of_two(odd)

    def put(node: Any, place: int, step: int) -> None:
        if isinstance(node, tuple):
            put(node[0], place, 2 * step)
            put(node[1], place + step, 2 * step)
        else:
            places[place] = node

    put(tree[0], 0, 1)
    return sum(number << (4 * place) for place, number in enumerate(places))
