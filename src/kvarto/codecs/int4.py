"""int4, int3, int2: our workhorses. No calibration; only the raw values of the page itself are used.

    K  x float32 [S, D]  ->  codes [S, D] of b bits, those of slow channels of more;  scale of 8 bits, zero float16 [D]
    V  x float32 [S, D]  ->  y = H x  ->  codes [D, S] of b bits;  scale float16 [S], the zero in its low bits

Keys: a channel of a page is nearly constant where RoPE turns slowly (the bias of Qwen2 models, up to hundreds, sits there, arXiv 2502.01563), so
each channel has a scale and a zero of its own, as in KIVI. The channels that turn slowest also carry most of a score's error, the same ones on every
model that rotates halves; they get more bits: two more for a quarter of the channels, but int4 from D = 128 on one more for an eighth. They are the
last ones of each half (of a partly rotated head too, nearly).
Values: what errors remain are averaged by the softmax, so a rotation (QuaRot) and one scale for each token suffice.
Scales are fitted by least squares between roundings (affine.refine) and keep the variance of their group, so that scores do not shrink.

Bits at S = 64: K b + 0.375 + 0.5, or 0.125 (int4 from D = 128 on); V b + 16 / D. int4 at D = 128: 4.3125, 3.71 times fewer than bf16; at 64: 4.5625.
Measured against KIVI and others in docs/adr/0012-lean-int4.md.
Sources: KIVI, arXiv 2402.02750; QuaRot, arXiv 2404.00456; ADR 0004, ADR 0012.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvarto.codecs import affine, hadamard
from kvarto.codecs.base import Codec, Reader, assemble, beyond, extract, from_tile, to_tile
from kvarto.codecs.packing import code_fields, code_planes, pack, pack_plane, unpack, unpack_plane, unpack_tile
from kvarto.jit import available, load_floats, load_low_zeros, torch
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import FLOAT16_MAX, Refine, Rotation
from kvarto.tile import Plane, Term, Tile

if available("numba"):
    from kvarto.unpack import add_bits

if TYPE_CHECKING:
    from torch import Tensor

_ROTATION_LIMIT = 1e30


@dataclass(frozen=True)
class PageInt(Codec):
    """b-bit integers, fitted to the page.

    lean_from  the head dimension from which on an eighth of the key channels has one further bit, where below a quarter has two
    """

    lean_from: int = 1 << 30

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """Values need a Hadamard matrix of the head dimension, keys a quarter of it in whole bytes."""
        if side is Side.V and hadamard.order_base(dim) is None:
            return f"no Hadamard transform of order {dim} (2^k, 12, 20 or 28 times 2^k)"
        if side is Side.K and dim < 16:
            return f"a head dimension of {dim} is less than 16"
        return None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, the high bits of the slow channels, and the terms: of channels for K, of tokens for V."""
        bits = int(self.bits)
        if side is Side.V:
            return [*code_fields(bits, dim, page_tokens), ("scale", "float16", (page_tokens,))]
        slow_nbytes = len(self.slow_channels(dim)) * self.slow_bits(dim) // 8
        slow: FieldSpec = ("codes_slow", "uint8", (page_tokens, slow_nbytes))
        return [*code_fields(bits, page_tokens, dim), slow, ("zero", "float16", (dim,)), ("scale", "uint8", (dim,))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Fit, round the terms, choose the codes, pack."""
        bits = int(self.bits)
        if layout.side is Side.V:
            levels = x.new_full((), 1 << bits)
            fit = affine.refine(_rotated(x), -1, levels)
            term = affine.joined(fit, 1 << bits)
            codes = affine.nearest(fit.x, *affine.parted(term, 1 << bits), levels)
            return assemble(layout, **pack(to_tile(codes, Side.V), bits), scale=term.squeeze(-1))
        levels = self._key_levels(layout.dim).to(x.device)
        fit = affine.refine(x, -2, levels)
        scale, zero = affine.short_scale(fit)
        codes = affine.nearest(fit.x, affine.long_scale(scale), zero.float(), levels)
        slow = pack_plane(codes[..., self.slow_channels(layout.dim)] >> bits, self.slow_bits(layout.dim))
        low = pack(codes & ((1 << bits) - 1), bits)
        return assemble(layout, **low, codes_slow=slow, scale=scale.squeeze(-2), zero=zero.squeeze(-2))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Unpack and undo."""
        bits, dim = int(self.bits), layout.dim
        names = [name for name, _, _ in code_fields(bits, *layout.tile_shape)]
        codes = unpack({name: extract(slabs, layout, name) for name in names}, bits)
        scale = extract(slabs, layout, "scale")
        if layout.side is Side.V:
            scale, zero = affine.parted(scale.unsqueeze(-1), 1 << bits)
            return hadamard.transform(affine.dequantize(from_tile(codes, Side.V), scale, zero), inverse=True)
        slow = unpack_plane(extract(slabs, layout, "codes_slow"), self.slow_bits(dim))
        codes[..., self.slow_channels(dim)] += slow << bits
        zero = extract(slabs, layout, "zero")
        return affine.dequantize(codes, affine.long_scale(scale).unsqueeze(-2), zero.unsqueeze(-2))

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
        """Codes and column terms: of channels for K, of tokens for V. The slow channels' further bits are a plane of their own."""
        bits, scale = int(self.bits), layout["scale"].offset
        planes = code_planes(layout, bits)
        if layout.side is Side.V:
            return Tile(planes, Term(scale, "float16", "column"), Term(scale, "low", "column"))
        channels, field = self.slow_channels(layout.dim), layout["codes_slow"]
        run = len(channels) // 2
        runs = ((channels[0], run), (channels[run], run))
        planes += (Plane(field.offset, field.shape[1], self.slow_bits(layout.dim), runs, shift=bits),)
        return Tile(planes, Term(scale, "short", "column"), Term(layout["zero"].offset, "float16", "column"))

    def sealing(self, layout: SlabLayout) -> Refine:
        """Fitted; values after rotation."""
        rotation = Rotation(hadamard.minus_signs(layout.dim)) if layout.side is Side.V else None
        return Refine(self.tile(layout), rotation, _ROTATION_LIMIT)

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes, and channel terms for K or row terms for V."""
        bits, low, high = int(self.bits), layout.fields[0].offset, layout.fields[1].offset
        scale, highest = layout["scale"].offset, (1 << bits) - 1
        if layout.side is Side.V:

            def read_values(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
                unpack_tile(slab, low, high, bits, tile)
                load_floats(slab, scale, "float16", row_scale)
                load_low_zeros(slab, scale, highest, row_scale, row_zero)

            return read_values
        zero, slow, slow_bits = layout["zero"].offset, layout["codes_slow"].offset, self.slow_bits(layout.dim)
        first, slow_nbytes = self.slow_channels(layout.dim)[0], layout["codes_slow"].shape[1]

        def read_keys(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            add_bits(slab, slow, slow_bits, np.float32(1 << bits), tile, first, slow_nbytes)
            load_floats(slab, scale, "short", channel_scale)
            load_floats(slab, zero, "float16", channel_zero)

        return read_keys

    def slow_bits(self, dim: int) -> int:
        """Further bits of a slow channel."""
        return 1 if dim >= self.lean_from else 2

    def slow_channels(self, dim: int) -> list[int]:
        """The channels that RoPE turns slowest, the end of each half: a quarter, or an eighth; in two bytes a token at least."""
        bits = self.slow_bits(dim)
        nbytes = max(2, dim * bits * bits // 64)
        each, half = nbytes * 8 // bits // 2, dim // 2
        return [*range(half - each, half), *range(dim - each, dim)]

    def _key_levels(self, dim: int) -> Tensor:
        """Number of codes of each key channel, float32 [D]."""
        levels = torch.full((dim,), float(1 << int(self.bits)))
        levels[self.slow_channels(dim)] = float(1 << (int(self.bits) + self.slow_bits(dim)))
        return levels


def _rotated(x: Tensor) -> Tensor:
    """Values in the tile's domain; first drawn in so far that sums of 256 of them stay finite."""
    return hadamard.transform(x.clamp(-_ROTATION_LIMIT, _ROTATION_LIMIT))


_SOURCE = "KIVI, QuaRot, ADR 0004, ADR 0012"

CODECS = (
    PageInt("int4", 4, _SOURCE, version=3, lean_from=128),
    PageInt("int3", 3, _SOURCE, version=2, headline=False),
    PageInt("int2", 2, _SOURCE, version=2),
)
