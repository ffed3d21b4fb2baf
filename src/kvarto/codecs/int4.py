"""int4, int3, int2: our workhorses. No calibration; only the raw values of the page itself are used.

    K  x float32 [S, D]  ->  codes [S, D] of b bits, those of the slow quarter of channels of b + 2;  scale, zero float16 [D]
    V  x float32 [S, D]  ->  y = H x  ->  codes [D, S] of b bits;  scale, zero float16 [S]

Keys: a channel of a page is nearly constant where RoPE turns slowly (the bias of Qwen2 models, up to hundreds, sits there, arXiv 2502.01563), so
each channel has a scale and a zero of its own, as in KIVI. The channels that turn slowest also carry most of a score's error, the same ones on every
model that rotates halves; they get two more bits. They are the last D / 8 channels of each half (of a partly rotated head too, nearly).
Values: what errors remain are averaged by the softmax, so a rotation (QuaRot) and one scale for each token suffice.
Scale and zero are fitted by least squares between roundings (affine.refine) and keep the variance of their group, so that scores do not shrink.

Bits: K b + 0.5 + 32 / S, V b + 32 / D; int4 at D = 128: 4.63. Measured against KIVI and others in docs/adr/0004-int4.md.
Sources: KIVI, arXiv 2402.02750; QuaRot, arXiv 2404.00456; ADR 0004.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvarto.codecs import affine, hadamard
from kvarto.codecs.base import Codec, Reader, assemble, extract, from_tile, to_tile
from kvarto.codecs.packing import code_fields, code_planes, pack, pack_plane, unpack, unpack_plane, unpack_tile
from kvarto.jit import available, load_floats, torch
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import FLOAT16_MAX, Refine, Rotation
from kvarto.tile import Plane, Term, Tile

if available("numba"):
    from kvarto.unpack import add_two_bits

if TYPE_CHECKING:
    from torch import Tensor

_EXTRA_BITS = 2
_ROTATION_LIMIT = 1e30


@dataclass(frozen=True)
class PageInt(Codec):
    """b-bit integers, fitted to the page."""

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """Values need a Hadamard matrix of the head dimension, keys a quarter of it in whole bytes."""
        if side is Side.V and hadamard.order_base(dim) is None:
            return f"no Hadamard transform of order {dim} (2^k, 12, 20 or 28 times 2^k)"
        if side is Side.K and dim < 16:
            return f"a head dimension of {dim} is less than 16"
        return None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, the high bits of the slow channels, and the terms: of channels for K, of rows for V."""
        bits = int(self.bits)
        if side is Side.V:
            return [
                *code_fields(bits, dim, page_tokens),
                ("scale", "float16", (page_tokens,)),
                ("zero", "float16", (page_tokens,)),
            ]
        slow: FieldSpec = ("codes_slow", "uint8", (page_tokens, len(_slow_channels(dim)) * _EXTRA_BITS // 8))
        return [*code_fields(bits, page_tokens, dim), slow, ("scale", "float16", (dim,)), ("zero", "float16", (dim,))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Fit, round, pack."""
        bits = int(self.bits)
        if layout.side is Side.V:
            codes, scale, zero = affine.refine(_rotated(x), -1, x.new_full((), 1 << bits))
            return assemble(
                layout, **pack(to_tile(codes, Side.V), bits), scale=scale.squeeze(-1), zero=zero.squeeze(-1)
            )
        codes, scale, zero = affine.refine(x, -2, self._key_levels(layout.dim).to(x.device))
        slow = pack_plane(codes[..., _slow_channels(layout.dim)] >> bits, _EXTRA_BITS)
        low = pack(codes & ((1 << bits) - 1), bits)
        return assemble(layout, **low, codes_slow=slow, scale=scale.squeeze(-2), zero=zero.squeeze(-2))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Unpack and undo."""
        bits, dim = int(self.bits), layout.dim
        names = [name for name, _, _ in code_fields(bits, *layout.tile_shape)]
        codes = unpack({name: extract(slabs, layout, name) for name in names}, bits)
        scale, zero = extract(slabs, layout, "scale"), extract(slabs, layout, "zero")
        if layout.side is Side.V:
            y = affine.dequantize(from_tile(codes, Side.V), scale.unsqueeze(-1), zero.unsqueeze(-1))
            return hadamard.transform(y, inverse=True)
        codes[..., _slow_channels(dim)] += unpack_plane(extract(slabs, layout, "codes_slow"), _EXTRA_BITS) << bits
        return affine.dequantize(codes, scale.unsqueeze(-2), zero.unsqueeze(-2))

    def rotate(self, x: Tensor, side: Side) -> Tensor:
        """Values: multiply by the Hadamard matrix."""
        return x @ hadamard.matrix(x.shape[-1]).to(x) if side is Side.V else x

    def unrotate(self, y: Tensor, side: Side) -> Tensor:
        """Values: multiply by its transpose."""
        return y @ hadamard.matrix(y.shape[-1]).to(y).T if side is Side.V else y

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond float16, of values after rotation: those are what is clamped."""
        if side is Side.V and affine.magnitude(x) * x.shape[-1] ** 0.5 <= FLOAT16_MAX:
            return 0  # a rotation makes nothing larger than its row is long, so it need not be computed a second time
        return affine.out_of_range(_rotated(x) if side is Side.V else x)

    def tile(self, layout: SlabLayout) -> Tile:
        """Codes and column terms: of channels for K, of tokens for V. The slow channels' two more bits are a plane of their own."""
        bits = int(self.bits)
        scale, zero = (Term(layout[name].offset, "float16", "column") for name in ("scale", "zero"))
        planes = code_planes(layout, bits)
        if layout.side is Side.K:
            channels, field = _slow_channels(layout.dim), layout["codes_slow"]
            run = len(channels) // 2
            runs = ((channels[0], run), (channels[run], run))
            planes += (Plane(field.offset, field.shape[1], _EXTRA_BITS, runs, shift=bits),)
        return Tile(planes, scale, zero)

    def sealing(self, layout: SlabLayout) -> Refine:
        """Fitted; values after rotation."""
        rotation = Rotation(hadamard.minus_signs(layout.dim)) if layout.side is Side.V else None
        return Refine(self.tile(layout), rotation, _ROTATION_LIMIT)

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes, and channel terms for K or row terms for V."""
        bits, low, high = int(self.bits), layout.fields[0].offset, layout.fields[1].offset
        scale, zero, is_key = layout["scale"].offset, layout["zero"].offset, layout.side is Side.K
        slow, channels = (layout["codes_slow"].offset, _slow_channels(layout.dim)) if is_key else (0, [0])
        first, second, run = channels[0], channels[len(channels) // 2], len(channels) // 4

        def read(slab, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            if is_key:
                add_two_bits(slab, slow, np.float32(1 << bits), tile, first, second, run)
                load_floats(slab, scale, "float16", channel_scale)
                load_floats(slab, zero, "float16", channel_zero)
            else:
                load_floats(slab, scale, "float16", row_scale)
                load_floats(slab, zero, "float16", row_zero)

        return read

    def _key_levels(self, dim: int) -> Tensor:
        """Number of codes of each key channel, float32 [D]."""
        levels = torch.full((dim,), float(1 << int(self.bits)))
        levels[_slow_channels(dim)] = float(1 << (int(self.bits) + _EXTRA_BITS))
        return levels


def _rotated(x: Tensor) -> Tensor:
    """Values in the tile's domain; first drawn in so far that sums of 256 of them stay finite."""
    return hadamard.transform(x.clamp(-_ROTATION_LIMIT, _ROTATION_LIMIT))


def _slow_channels(dim: int) -> list[int]:
    """The quarter of channels that RoPE turns slowest: the end of each half, 4 (D // 16) of them in all."""
    half, count = dim // 2, 2 * (dim // 16)
    return [*range(half - count, half), *range(dim - count, dim)]


_SOURCE = "KIVI, QuaRot, ADR 0004"

CODECS = (
    PageInt("int4", 4, _SOURCE),
    PageInt("int3", 3, _SOURCE, headline=False),
    PageInt("int2", 2, _SOURCE),
)
