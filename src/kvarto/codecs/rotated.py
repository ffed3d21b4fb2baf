"""Values of int8, int4, int3 and int2: rotated, b-bit codes, one float16 for each token. Their keys differ: int8.py, int4.py.

    V  x float32 [S, D]  ->  y = H x  ->  codes [D, S] of b bits;  scale float16 [S], the zero in its low bits

What errors remain are averaged by the softmax, so a rotation and one scale for each token suffice. The scale is fitted by least squares between
roundings (affine.refine) and keeps the variance of the token. Bits: b + 16 / D. Sources: QuaRot, arXiv 2404.00456; ADR 0012.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarto.codecs import affine, hadamard
from kvarto.codecs.base import Codec, Reader, assemble, beyond, extract, from_tile, to_tile
from kvarto.codecs.packing import code_fields, code_planes, pack, unpack, unpack_tile
from kvarto.jit import load_floats, load_low_zeros
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import FLOAT16_MAX, Refine, Rotation, Sealing
from kvarto.tile import Term, Tile

if TYPE_CHECKING:
    from torch import Tensor

_ROTATION_LIMIT = 1e30


@dataclass(frozen=True)
class RotatedValues(Codec):
    """The value side of a codec; what concerns slabs of keys is to be overridden."""

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """Values need a Hadamard matrix of the head dimension."""
        if side is Side.V and hadamard.order_base(dim) is None:
            return f"no Hadamard transform of order {dim} (2^k, 12, 20 or 28 times 2^k)"
        return None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, and the terms of tokens."""
        return [*code_fields(int(self.bits), dim, page_tokens), ("scale", "float16", (page_tokens,))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Rotate, fit, round the term, choose the codes, pack."""
        bits = int(self.bits)
        levels = x.new_full((), 1 << bits)
        fit = affine.refine(_rotated(x), -1, levels)
        term = affine.joined(fit, 1 << bits)
        codes = affine.nearest(fit.x, *affine.parted(term, 1 << bits), levels)
        return assemble(layout, **pack(to_tile(codes, Side.V), bits), scale=term.squeeze(-1))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Unpack and undo."""
        bits = int(self.bits)
        names = [name for name, _, _ in code_fields(bits, *layout.tile_shape)]
        codes = unpack({name: extract(slabs, layout, name) for name in names}, bits)
        scale, zero = affine.parted(extract(slabs, layout, "scale").unsqueeze(-1), 1 << bits)
        return hadamard.transform(affine.dequantize(from_tile(codes, Side.V), scale, zero), inverse=True)

    def rotate(self, x: Tensor, side: Side) -> Tensor:
        """Values: multiply by the Hadamard matrix."""
        return x @ hadamard.matrix(x.shape[-1]).to(x) if side is Side.V else x

    def unrotate(self, y: Tensor, side: Side) -> Tensor:
        """Values: multiply by its transpose."""
        return y @ hadamard.matrix(y.shape[-1]).to(y).T if side is Side.V else y

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond float16, of values after rotation: those are what is clamped."""
        if side is Side.K:
            return affine.out_of_range(x)
        # Rotation makes no number larger than sqrt(D) times the largest.
        near = beyond(x, FLOAT16_MAX / x.shape[-1] ** 0.5)
        return affine.out_of_range(_rotated(x)) if near else 0

    def tile(self, layout: SlabLayout) -> Tile:
        """Codes and terms of columns, which are tokens."""
        scale = layout["scale"].offset
        planes = code_planes(layout, int(self.bits))
        return Tile(planes, Term(scale, "float16", "column"), Term(scale, "low", "column"))

    def sealing(self, layout: SlabLayout) -> Sealing:
        """Fitted after rotation."""
        return Refine(self.tile(layout), Rotation(hadamard.minus_signs(layout.dim)), _ROTATION_LIMIT)

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes and row terms."""
        bits, scale, highest = int(self.bits), layout["scale"].offset, (1 << int(self.bits)) - 1
        low, high = layout.fields[0].offset, layout.fields[1].offset

        def read_values(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            load_floats(slab, scale, "float16", row_scale)
            load_low_zeros(slab, scale, highest, row_scale, row_zero)

        return read_values


def _rotated(x: Tensor) -> Tensor:
    """Values in the tile's domain; first drawn in so far that sums of 256 of them stay finite."""
    return hadamard.transform(x.clamp(-_ROTATION_LIMIT, _ROTATION_LIMIT))
