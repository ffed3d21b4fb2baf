"""8-bit integers, asymmetric, per token and head: the best quality at 8 bits (12 dB above fp8).

    x float32 [S, D]  ->  codes uint8 [S, D] (K) or [D, S] (V); scale, zero float16 [S]
    x ~ code * scale[s] + zero[s]

Error: at most (max - min) / 510 of the token's own range, plus float16 rounding (affine.py). Bits: 8 + 32 / D.
Source: per-token asymmetric quantization as in KIVI's baseline (arXiv 2402.02750, table 1) and LMDeploy's int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
    """One scale and zero for each token of a head."""

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, then the row terms."""
        codes: FieldSpec = ("codes", "uint8", (page_tokens, dim) if side is Side.K else (dim, page_tokens))
        return [codes, ("scale", "float16", (page_tokens,)), ("zero", "float16", (page_tokens,))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Min to max of each token."""
        scale, zero = affine.fit(affine.lowest(x, -1), x.amax(-1, keepdim=True), _LEVELS)
        codes = affine.quantize(x, scale, zero, _LEVELS)
        return assemble(layout, codes=to_tile(codes, layout.side), scale=scale.squeeze(-1), zero=zero.squeeze(-1))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """code * scale + zero."""
        scale, zero = (extract(slabs, layout, name).unsqueeze(-1) for name in ("scale", "zero"))
        return affine.dequantize(from_tile(extract(slabs, layout, "codes"), layout.side), scale, zero)

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond float16."""
        return affine.out_of_range(x)

    def tile(self, layout: SlabLayout) -> Tile:
        """Codes, a scale and a zero for each token."""
        per: Literal["row", "column"] = "row" if layout.side is Side.K else "column"
        scale, zero = (Term(layout[name].offset, "float16", per) for name in ("scale", "zero"))
        return Tile((plane(layout, "codes", 8),), scale, zero)

    def sealing(self, layout: SlabLayout) -> Range:
        """Range of each token."""
        return Range(self.tile(layout))

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes and the two row terms."""
        codes, scale, zero = (layout[name].offset for name in ("codes", "scale", "zero"))

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, codes, codes, 8, tile)
            load_floats(slab, scale, "float16", row_scale)
            load_floats(slab, zero, "float16", row_zero)

        return read


CODECS = (Int8("int8", 8, "KIVI arXiv 2402.02750, per-token baseline"),)
