"""int4, int3, int2: our workhorses. No calibration; only the raw values of the page itself are used.

    K  x float32 [S, D]  ->  codes [S, D] of b bits, those of slow channels of more;  scale of 8 bits, zero float16 [D]
    V  x float32 [S, D]  ->  y = H x  ->  codes [D, S] of b bits;  scale float16 [S], the zero in its low bits

Keys: a channel of a page is nearly constant where RoPE turns slowly (the bias of Qwen2 models, up to hundreds, sits there, arXiv 2502.01563), so
each channel has a scale and a zero of its own, as in KIVI. The channels that turn slowest also carry most of a score's error, the same ones on every
model that rotates halves; they get more bits: two more for a quarter of the channels, but int4 from D = 128 on one more for an eighth. They are the
last ones of each half (of a partly rotated head too, nearly).
Values: codecs/rotated.py.
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

from kvarto.codecs import affine
from kvarto.codecs.base import Reader, assemble, extract
from kvarto.codecs.packing import code_fields, code_planes, pack, pack_plane, unpack, unpack_plane, unpack_tile
from kvarto.codecs.rotated import RotatedValues
from kvarto.jit import available, load_floats, torch
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import Refine, Sealing
from kvarto.tile import Plane, Term, Tile

if available("numba"):
    from kvarto.unpack import add_bits

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PageInt(RotatedValues):
    """b-bit integers, fitted to the page.

    lean_from  the head dimension from which on an eighth of the key channels has one further bit, where below a quarter has two
    """

    lean_from: int = 1 << 30

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """Values need a Hadamard matrix of the head dimension, keys a quarter of it in whole bytes."""
        if side is Side.K and dim < 16:
            return f"a head dimension of {dim} is less than 16"
        return super().refuses(side, page_tokens, dim)

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, the high bits of the slow channels, and the terms: of channels for K, of tokens for V."""
        if side is Side.V:
            return super().fields(side, page_tokens, dim)
        bits = int(self.bits)
        slow_nbytes = len(self.slow_channels(dim)) * self.slow_bits(dim) // 8
        slow: FieldSpec = ("codes_slow", "uint8", (page_tokens, slow_nbytes))
        return [*code_fields(bits, page_tokens, dim), slow, ("zero", "float16", (dim,)), ("scale", "uint8", (dim,))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Fit, round the terms, choose the codes, pack."""
        if layout.side is Side.V:
            return super().encode(x, layout)
        bits = int(self.bits)
        levels = self._key_levels(layout.dim).to(x.device)
        fit = affine.refine(x, -2, levels)
        scale, zero = affine.short_scale(fit)
        codes = affine.nearest(fit.x, affine.long_scale(scale), zero.float(), levels)
        slow = pack_plane(codes[..., self.slow_channels(layout.dim)] >> bits, self.slow_bits(layout.dim))
        low = pack(codes & ((1 << bits) - 1), bits)
        return assemble(layout, **low, codes_slow=slow, scale=scale.squeeze(-2), zero=zero.squeeze(-2))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Unpack and undo."""
        if layout.side is Side.V:
            return super().decode(slabs, layout)
        bits, dim = int(self.bits), layout.dim
        names = [name for name, _, _ in code_fields(bits, *layout.tile_shape)]
        codes = unpack({name: extract(slabs, layout, name) for name in names}, bits)
        slow = unpack_plane(extract(slabs, layout, "codes_slow"), self.slow_bits(dim))
        codes[..., self.slow_channels(dim)] += slow << bits
        scale, zero = (extract(slabs, layout, name) for name in ("scale", "zero"))
        return affine.dequantize(codes, affine.long_scale(scale).unsqueeze(-2), zero.unsqueeze(-2))

    def tile(self, layout: SlabLayout) -> Tile:
        """Codes and column terms: of channels for K, of tokens for V. The slow channels' further bits are a plane of their own."""
        if layout.side is Side.V:
            return super().tile(layout)
        bits, scale = int(self.bits), layout["scale"].offset
        planes = code_planes(layout, bits)
        channels, field = self.slow_channels(layout.dim), layout["codes_slow"]
        run = len(channels) // 2
        runs = ((channels[0], run), (channels[run], run))
        planes += (Plane(field.offset, field.shape[1], self.slow_bits(layout.dim), runs, shift=bits),)
        return Tile(planes, Term(scale, "short", "column"), Term(layout["zero"].offset, "float16", "column"))

    def sealing(self, layout: SlabLayout) -> Sealing:
        """Fitted; values after rotation."""
        return super().sealing(layout) if layout.side is Side.V else Refine(self.tile(layout))

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes, and channel terms for K or row terms for V."""
        if layout.side is Side.V:
            return super().numba_reader(layout)
        bits, low, high = int(self.bits), layout.fields[0].offset, layout.fields[1].offset
        scale = layout["scale"].offset
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


_SOURCE = "KIVI, QuaRot, ADR 0004, ADR 0012"

CODECS = (
    PageInt("int4", 4, _SOURCE, version=3, lean_from=128),
    PageInt("int3", 3, _SOURCE, version=2, headline=False),
    PageInt("int2", 2, _SOURCE, version=2),
)
