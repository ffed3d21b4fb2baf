"""8-bit integers: keys by channel of a page, values by token after a rotation. Near lossless, on models whose keys have a bias too.

    K  x float32 [S, D]  ->  codes uint8 [S, D];  scale of 8 bits, zero float16 [D]: from least to most of the channel
    V  as of int4 (codecs/rotated.py), of 8 bits: y = H x  ->  codes uint8 [D, S];  scale float16 [S], the zero in its low bits

Keys: a bias of hundreds in a few channels (Qwen2) would set the range of a whole token; of its channel it is the zero. The scale's byte is rounded
up, so that codes reach both ends: at 8 bits an end cut off costs more than coarser steps do, so nothing is fitted.
Error of a key: at most 9/8 (max - min) / 510 of its channel's range in the page, plus the rounding of the zero and the smallest scale, 2^-17.
Bits at S = 64: K 8.375, V 8 + 16 / D; together 8.25 at D = 128, 8.3125 at 64. Measured in docs/adr/0014-int8-keys-by-channel.md.
Sources: KIVI, arXiv 2402.02750 (keys by channel); QuaRot, arXiv 2404.00456; ADR 0012, ADR 0014.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarto.codecs import affine
from kvarto.codecs.base import Reader, assemble, extract
from kvarto.codecs.packing import unpack_tile
from kvarto.codecs.rotated import RotatedValues
from kvarto.jit import load_floats
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import Range, Sealing
from kvarto.tile import Term, Tile, plane

if TYPE_CHECKING:
    from torch import Tensor

_LEVELS = 256


@dataclass(frozen=True)
class Int8(RotatedValues):
    """A scale and a zero for each key channel of a page."""

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order and the terms: of channels for K, of tokens for V."""
        if side is Side.V:
            return super().fields(side, page_tokens, dim)
        return [("codes", "uint8", (page_tokens, dim)), ("zero", "float16", (dim,)), ("scale", "uint8", (dim,))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Min to max of each key channel."""
        if layout.side is Side.V:
            return super().encode(x, layout)
        scale, zero = affine.short_fit(affine.lowest(x, -2), x.amax(-2, keepdim=True), _LEVELS)
        codes = affine.quantize(x, affine.long_scale(scale), zero, _LEVELS)
        return assemble(layout, codes=codes, scale=scale.squeeze(-2), zero=zero.squeeze(-2))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """code * scale + zero."""
        if layout.side is Side.V:
            return super().decode(slabs, layout)
        codes, scale, zero = (extract(slabs, layout, name) for name in ("codes", "scale", "zero"))
        return affine.dequantize(codes, affine.long_scale(scale).unsqueeze(-2), zero.unsqueeze(-2))

    def tile(self, layout: SlabLayout) -> Tile:
        """Codes and column terms: of channels for K, of tokens for V."""
        if layout.side is Side.V:
            return super().tile(layout)
        scale, zero = layout["scale"].offset, layout["zero"].offset
        return Tile((plane(layout, "codes", 8),), Term(scale, "short", "column"), Term(zero, "float16", "column"))

    def sealing(self, layout: SlabLayout) -> Sealing:
        """Range of each key channel; values fitted after rotation."""
        return super().sealing(layout) if layout.side is Side.V else Range(self.tile(layout))

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes, and channel terms for K or row terms for V."""
        if layout.side is Side.V:
            return super().numba_reader(layout)
        codes, scale, zero = (layout[name].offset for name in ("codes", "scale", "zero"))

        def read_keys(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, codes, codes, 8, tile)
            load_floats(slab, scale, "short", channel_scale)
            load_floats(slab, zero, "float16", channel_zero)

        return read_keys


CODECS = (Int8("int8", 8, "KIVI, QuaRot, ADR 0014", version=2),)
