"""int4, int3, int2: our workhorses, data-free. Page mean removed, Hadamard rotation, clipped range and float zero per token and head.

    K  x float32 [S, D]  ->  mean float16 [D];  y = H (x - mean)  ->  codes [S, D]; scale, zero float16 [S]
    V  x float32 [S, D]  ->  y = H x  ->  codes [D, S]; scale, zero float16 [S]

Keys carry a bias (up to hundreds in Qwen2 models) that a rotation alone would spread over every channel; a page's own mean takes most of it
out, because the bias sits in channel pairs that RoPE turns slowly (arXiv 2502.01563). The mean is stored rotated, as the channel term of the
affine tile, and is removed as rounded, so that it costs no accuracy.
Bits: K b + 32 / D + 16 / S, V b + 32 / D.
Sources: QuaRot, arXiv 2404.00456 (rotation); KIVI, arXiv 2402.02750 (float zero); clip constants: minimum squared error for a Gaussian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarto.codecs import affine, hadamard
from kvarto.codecs.base import Codec, Reader, assemble, extract, from_tile, halving_mean, to_tile
from kvarto.codecs.packing import code_fields, pack, unpack, unpack_tile
from kvarto.jit import load_floats
from kvarto.layout import FieldSpec, Side, SlabLayout

if TYPE_CHECKING:
    from torch import Tensor

_CLIP = {4: 0.93, 3: 0.80, 2: 0.60}


@dataclass(frozen=True)
class RotatedInt(Codec):
    """`page_mean`: remove the page's mean from keys; without it this is plain rotated int4."""

    page_mean: bool = True

    @property
    def levels(self) -> int:
        """Number of codes."""
        return 1 << int(self.bits)

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """A Hadamard matrix of the head dimension must be known."""
        if hadamard.order_base(dim) is None:
            return f"no Hadamard transform of order {dim} (2^k, 12, 20 or 28 times 2^k)"
        return None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, row terms, and the rotated mean of keys."""
        rows, columns = (page_tokens, dim) if side is Side.K else (dim, page_tokens)
        terms: list[FieldSpec] = [("scale", "float16", (page_tokens,)), ("zero", "float16", (page_tokens,))]
        if self._has_mean(side):
            terms.append(("mean", "float16", (dim,)))
        return [*code_fields(int(self.bits), rows, columns), *terms]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Rotate, remove the rounded mean, clip, round."""
        y = hadamard.transform(x)
        terms = {}
        if self._has_mean(layout.side):
            mean = halving_mean(y, -2).clamp(-affine.FLOAT16_MAX, affine.FLOAT16_MAX).half()
            y, terms["mean"] = y - mean.float(), mean.squeeze(-2)
        lo, hi = affine.clip_range(y, -1, _CLIP[int(self.bits)])
        scale, zero = affine.fit(lo, hi, self.levels)
        codes = pack(to_tile(affine.quantize(y, scale, zero, self.levels), layout.side), int(self.bits))
        return assemble(layout, **codes, scale=scale.squeeze(-1), zero=zero.squeeze(-1), **terms)

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Undo each step."""
        planes = {
            field.name: extract(slabs, layout, field.name) for field in layout.fields if field.name.startswith("codes")
        }
        scale, zero = (extract(slabs, layout, name).unsqueeze(-1) for name in ("scale", "zero"))
        y = affine.dequantize(from_tile(unpack(planes, int(self.bits)), layout.side), scale, zero)
        if self._has_mean(layout.side):
            y = y + extract(slabs, layout, "mean").float().unsqueeze(-2)
        return hadamard.transform(y, inverse=True)

    def rotate(self, x: Tensor) -> Tensor:
        """Multiply by the Hadamard matrix."""
        return x @ hadamard.matrix(x.shape[-1]).to(x)

    def unrotate(self, y: Tensor) -> Tensor:
        """Multiply by its transpose."""
        return y @ hadamard.matrix(y.shape[-1]).to(y).T

    def saturated(self, x: Tensor) -> int:
        """Elements beyond float16."""
        return affine.out_of_range(x)

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes, row terms, and the mean as channel term."""
        bits, low, high = int(self.bits), layout.fields[0].offset, layout.fields[1].offset
        scale, zero = layout["scale"].offset, layout["zero"].offset
        has_mean = self._has_mean(layout.side)
        mean = layout["mean"].offset if has_mean else 0

        def read(slab, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            load_floats(slab, scale, "float16", row_scale)
            load_floats(slab, zero, "float16", row_zero)
            if has_mean:
                load_floats(slab, mean, "float16", channel_zero)

        return read

    def _has_mean(self, side: Side) -> bool:
        return self.page_mean and side is Side.K


_SOURCE = "ADR 0004; QuaRot arXiv 2404.00456"

CODECS = (
    RotatedInt("int4", 4, _SOURCE),
    RotatedInt("int3", 3, _SOURCE, headline=False),
    RotatedInt("int2", 2, _SOURCE),
)
