"""Raw storage in bfloat16, float16 or float32: the baseline, what open pages are kept in, and the file to copy for a codec of your own.

    x float32 [S, D]  ->  values [S, D] (K) or [D, S] (V) in the dtype, rounded to nearest even

Error: |x - decode| <= 2^-9 |x| (bf16), 2^-12 |x| (fp16, for 6e-5 <= |x| <= 65504), 0 (fp32). Bits: 16 or 32, no metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvarto.codecs.base import Codec, Reader, assemble, beyond, extract, from_tile, to_tile
from kvarto.jit import load_floats, torch
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import Cast
from kvarto.tile import BITS, Tile, plane

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Raw(Codec):
    """Values as they are, in `dtype`."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """One array, in tile order."""
        return [("values", self.dtype, (page_tokens, dim) if side is Side.K else (dim, page_tokens))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Round to the dtype; what lies beyond its range is clamped and counted by `saturated`."""
        limit = torch.finfo(getattr(torch, self.dtype)).max
        values = to_tile(x, layout.side).clamp(-limit, limit).to(getattr(torch, self.dtype))
        return assemble(layout, values=values)

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Exactly what was stored."""
        return from_tile(extract(slabs, layout, "values").float(), layout.side)

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond the largest number of the dtype."""
        return beyond(x, torch.finfo(getattr(torch, self.dtype)).max)

    def tile(self, layout: SlabLayout) -> Tile:
        """Values, without terms."""
        return Tile((plane(layout, "values", BITS[self.dtype], kind=self.dtype),))

    def sealing(self, layout: SlabLayout) -> Cast:
        """Rounded, without a scale."""
        return Cast(self.tile(layout), torch.finfo(getattr(torch, self.dtype)).max)

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Copy the values; no terms."""
        start, dtype = layout["values"].offset, self.dtype

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            load_floats(slab, start, dtype, tile.reshape(tile.size))

        return read


CODECS = (
    Raw("bf16", 16, "IEEE-like bfloat16, the field's baseline", dtype="bfloat16"),
    Raw("fp16", 16, "IEEE 754 binary16", dtype="float16", headline=False),
    Raw("fp32", 32, "IEEE 754 binary32", dtype="float32", headline=False),
)
