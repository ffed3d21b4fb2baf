"""8-bit integers: keys by channel of a page, values by token, from the least to the most of each. Near lossless, whatever bias keys have.

    K  x float32 [S, D]  ->  codes uint8 [S, D];  scale of 8 bits, zero float16 [D]
    V  x float32 [S, D]  ->  codes uint8 [D, S];  scale, zero float16 [S]

Keys: a bias of hundreds in a few channels (Qwen2) would set the range of a whole token; of its channel it is the zero. The scale's byte is rounded
up, so that codes reach both ends: at 8 bits an end cut off costs more than coarser steps do. For the same reason nothing is fitted, and then a code
that another path rounds the other way moves no other one.
Error: at most (max - min) / 510 of a token's values, 9/8 of that of a key channel, plus the rounding of the zero and the least scale (2^-17 of keys).
Bits at S = 64: K 8.375, V 8 + 32 / D; together 8.3125 at D = 128, 8.4375 at 64. Measured in docs/adr/0014-int8-keys-by-channel.md.
Sources: KIVI, arXiv 2402.02750 (keys by channel, values by token); ADR 0012, ADR 0014.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarto.codecs import affine
from kvarto.codecs.base import Codec, Reader, assemble, extract, from_tile, to_tile
from kvarto.codecs.packing import unpack_tile
from kvarto.jit import load_floats
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import Range
from kvarto.tile import Term, Tile, plane

if TYPE_CHECKING:
    from torch import Tensor

_LEVELS = 256


@dataclass(frozen=True)
class Int8(Codec):
    """A scale and a zero for each key channel of a page, and for the values of each token."""

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order and the terms: of channels for K, of tokens for V."""
        if side is Side.K:
            return [("codes", "uint8", (page_tokens, dim)), ("zero", "float16", (dim,)), ("scale", "uint8", (dim,))]
        terms: list[FieldSpec] = [(name, "float16", (page_tokens,)) for name in ("scale", "zero")]
        return [("codes", "uint8", (dim, page_tokens)), *terms]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Min to max of each column of the tile."""
        x, fit = to_tile(x, layout.side), affine.short_fit if layout.side is Side.K else affine.fit
        scale, zero = fit(affine.lowest(x, -2), x.amax(-2, keepdim=True), _LEVELS)
        step = affine.long_scale(scale) if layout.side is Side.K else scale
        codes = affine.quantize(x, step, zero, _LEVELS)
        return assemble(layout, codes=codes, scale=scale.squeeze(-2), zero=zero.squeeze(-2))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """code * scale + zero."""
        codes, scale, zero = (extract(slabs, layout, name) for name in ("codes", "scale", "zero"))
        step = affine.long_scale(scale) if layout.side is Side.K else scale
        return from_tile(affine.dequantize(codes, step.unsqueeze(-2), zero.unsqueeze(-2)), layout.side)

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond float16."""
        return affine.out_of_range(x)

    def tile(self, layout: SlabLayout) -> Tile:
        """Codes and column terms: of channels for K, of tokens for V."""
        scale = Term(layout["scale"].offset, "short" if layout.side is Side.K else "float16", "column")
        return Tile((plane(layout, "codes", 8),), scale, Term(layout["zero"].offset, "float16", "column"))

    def sealing(self, layout: SlabLayout) -> Range:
        """Range of each column."""
        return Range(self.tile(layout))

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes, and channel terms for K or row terms for V."""
        codes, scale, zero = (layout[name].offset for name in ("codes", "scale", "zero"))
        if layout.side is Side.V:

            def read_values(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
                unpack_tile(slab, codes, codes, 8, tile)
                load_floats(slab, scale, "float16", row_scale)
                load_floats(slab, zero, "float16", row_zero)

            return read_values

        def read_keys(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, codes, codes, 8, tile)
            load_floats(slab, scale, "short", channel_scale)
            load_floats(slab, zero, "float16", channel_zero)

        return read_keys


CODECS = (Int8("int8", 8, "KIVI, ADR 0014", version=2),)
