"""KIVI: keys per channel over tokens, values per token over channels, asymmetric with a float zero (Liu et al., ICML 2024, arXiv 2402.02750).

    K  x float32 [S, D]  ->  codes [S, D]; scale, zero float16 [S / G, D]      group: G tokens of one channel (the page, or 32)
    V  x float32 [S, D]  ->  codes [D, S]; scale, zero float16 [ceil(D / 32), S]   group: 32 channels of one token

Where the paper keeps a residual of recent tokens and empties it whole, our open page is the residual and groups never cross it: no group holds
padding or another request. Range is min to max. Constant groups, which divide by zero in the released code, have scale 0 and code 0.
Error: at most scale / 2. Bits: K b + 32 / G, V b + 1 (G = 32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarto.codecs import affine
from kvarto.codecs.base import Codec, Reader, assemble, extract, from_tile, to_tile
from kvarto.codecs.packing import code_fields, code_planes, pack, unpack, unpack_tile
from kvarto.jit import load_floats, scale_floats, torch
from kvarto.layout import PAGE_TOKENS, FieldSpec, Side, SlabLayout
from kvarto.sealing import Range
from kvarto.tile import Term, Tile

if TYPE_CHECKING:
    from torch import Tensor

_VALUE_GROUP_CHANNELS = 32


@dataclass(frozen=True)
class Kivi(Codec):
    """`group_tokens`: G along tokens for keys; the page, unless smaller."""

    group_tokens: int = PAGE_TOKENS

    @property
    def levels(self) -> int:
        """Number of codes."""
        return 1 << int(self.bits)

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """Groups of tokens must tile the page."""
        if page_tokens % self.group_tokens:
            return f"a page of {page_tokens} tokens is not a multiple of its groups of {self.group_tokens}"
        return None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, then a scale and a zero for each group."""
        if side is Side.K:
            codes, groups = code_fields(int(self.bits), page_tokens, dim), (page_tokens // self.group_tokens, dim)
        else:
            codes, groups = (
                code_fields(int(self.bits), dim, page_tokens),
                (-(-dim // _VALUE_GROUP_CHANNELS), page_tokens),
            )
        return [*codes, ("scale", "float16", groups), ("zero", "float16", groups)]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Both sides group runs of consecutive tile rows (tokens of K, channels of V) within one tile column."""
        tile = to_tile(x, layout.side)
        groups = tile.split(self._group_rows(layout.side), dim=-2)
        lo = torch.cat([affine.lowest(group, -2) for group in groups], dim=-2)
        hi = torch.cat([group.amax(-2, keepdim=True) for group in groups], dim=-2)
        scale, zero = affine.fit(lo, hi, self.levels)
        codes = affine.quantize(tile, self._spread(scale, layout), self._spread(zero, layout), self.levels)
        return assemble(layout, **pack(codes, int(self.bits)), scale=scale, zero=zero)

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """code * scale + zero of the group."""
        planes = {
            field.name: extract(slabs, layout, field.name) for field in layout.fields if field.name.startswith("codes")
        }
        scale, zero = (self._spread(extract(slabs, layout, name), layout) for name in ("scale", "zero"))
        return from_tile(affine.dequantize(unpack(planes, int(self.bits)), scale, zero), layout.side)

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond float16."""
        return affine.out_of_range(x)

    def tile(self, layout: SlabLayout) -> Tile:
        """Codes, and column terms for each group of rows."""
        groups, rows = layout["scale"].shape[0], self._group_rows(layout.side)
        scale, zero = (Term(layout[name].offset, "float16", "column", groups, rows) for name in ("scale", "zero"))
        return Tile(code_planes(layout, int(self.bits)), scale, zero)

    def sealing(self, layout: SlabLayout) -> Range:
        """Range of each group."""
        return Range(self.tile(layout))

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Keys grouped by page have plain channel terms; other groups are applied while reading."""
        bits, low, high = int(self.bits), layout.fields[0].offset, layout.fields[1].offset
        scale, zero = layout["scale"], layout["zero"]
        scale_at, zero_at, (groups, columns) = scale.offset, zero.offset, scale.shape
        rows, whole_page = self._group_rows(layout.side), layout.side is Side.K and scale.shape[0] == 1

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            if whole_page:
                load_floats(slab, scale_at, "float16", channel_scale)
                load_floats(slab, zero_at, "float16", channel_zero)
            else:
                for group in range(groups):
                    first, end = group * rows, min((group + 1) * rows, tile.shape[0])
                    for row in range(first, end):
                        scale_floats(slab, scale_at + 2 * group * columns, zero_at + 2 * group * columns, tile[row])

        return read

    def _group_rows(self, side: Side) -> int:
        return self.group_tokens if side is Side.K else _VALUE_GROUP_CHANNELS

    def _spread(self, term: Tensor, layout: SlabLayout) -> Tensor:
        """[..., groups, columns] to [..., rows, columns] of the tile."""
        return term.repeat_interleave(self._group_rows(layout.side), dim=-2)[..., : layout.tile_shape[0], :]


_SOURCE = "KIVI, ICML 2024, arXiv 2402.02750"

CODECS = (
    Kivi("kivi4", 4, _SOURCE),
    Kivi("kivi3", 3, _SOURCE, headline=False),
    Kivi("kivi2", 2, _SOURCE, headline=False),
    Kivi("kivi4-g32", 4, _SOURCE, headline=False, group_tokens=32),
    Kivi("kivi2-g32", 2, _SOURCE, headline=False, group_tokens=32),
)
