"""8-bit floats, e4m3 or e5m2: value = code * scale, as vLLM, SGLang and TensorRT-LLM store them.

    x float32 [S, D]  ->  codes float8 [S, D] (K) or [D, S] (V), and a scale
    `fp8`        scale per tensor: one number for all heads, calibrated, or 1.0 as the engines do without a record
    `fp8-head`   scale per KV head, calibrated or 1.0
    `fp8-token`  scale per token and head, from the token's own maximum: nothing saturates

Error: 2^-4 |x| (e4m3) or 2^-3 |x| (e5m2) for normal numbers. Elements beyond 448 (57,344) times the scale are clamped and counted.
Bits at D = 128: 8.02, with a token scale 8.125. The scale matters only against overflow and underflow (facts: 31.5 dB for any sigma from 0.1 to 100).
Source: OCP 8-bit floating point specification 1.0; Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvarto.codecs.base import Codec, Reader, assemble, beyond, extract, from_tile, to_tile
from kvarto.errors import ShapeError, UsageError
from kvarto.jit import load_floats, load_fp8, torch
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import Cast
from kvarto.tile import Term, Tile, plane

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Fp8(Codec):
    """`scale_per` says what shares a scale; `scales` are the calibrated ones: one, or one for each KV head.

    Calibrated scales are given with `dataclasses.replace(registry["fp8-head"], scales=(...))`; the slab stores its own, so readers need no record.
    """

    variant: Literal["e4m3", "e5m2"] = "e4m3"
    scale_per: Literal["tensor", "head", "token"] = "tensor"
    scales: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.scales or not all(0 < scale < float("inf") for scale in self.scales):
            raise UsageError(f"scales of {self.name}", "positive finite numbers", self.scales)
        if self.scale_per != "head" and len(self.scales) != 1:
            raise UsageError(
                f"scales of {self.name}", "one number", self.scales, "use fp8-head for a scale for each KV head"
            )

    @property
    def limit(self) -> float:
        """The largest finite code."""
        return 448.0 if self.variant == "e4m3" else 57344.0

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, and the scale: float32 for the slab, or bfloat16 for each token."""
        codes: FieldSpec = ("codes", "uint8", (page_tokens, dim) if side is Side.K else (dim, page_tokens))
        return [
            codes,
            ("scale", "bfloat16", (page_tokens,)) if self.scale_per == "token" else ("scale", "float32", (1,)),
        ]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """x: float32 [..., Hkv, S, D] when there is a scale for each head, else [..., S, D]. Raises ShapeError for another number of heads."""
        if len(self.scales) > 1 and x.shape[-3] != len(self.scales):
            raise ShapeError(
                f"scales of {self.name}", f"one, or one for each of {x.shape[-3]} KV heads", len(self.scales)
            )
        scale = self._scale(x)
        codes = (x / scale.float()).clamp(-self.limit, self.limit).to(self._dtype)
        stored = scale.squeeze(-1) if self.scale_per == "token" else scale.squeeze(-1).expand(*x.shape[:-2], 1)
        return assemble(layout, codes=to_tile(codes.view(torch.uint8), layout.side), scale=stored)

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """code * scale."""
        codes = from_tile(extract(slabs, layout, "codes"), layout.side).contiguous().view(self._dtype)
        return codes.float() * extract(slabs, layout, "scale").float().unsqueeze(-1)

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond the largest code times the scale; with token scales none are, but for the rounding of the scale."""
        if self.scale_per == "token" or not beyond(x, self.limit * min(self.scales)):
            return 0
        return int((x.abs() > self.limit * self._scale(x)).sum())

    def tile(self, layout: SlabLayout) -> Tile:
        """Codes as floats; a scale for each token, or one."""
        field = layout["scale"]
        if self.scale_per == "token":
            scale = Term(field.offset, "bfloat16", "row" if layout.side is Side.K else "column")
        else:
            scale = Term(field.offset, "float32", "slab")
        return Tile((plane(layout, "codes", 8, kind=self.variant),), scale)

    def sealing(self, layout: SlabLayout) -> Cast:
        """Rounded after division by the scales, or by each token's own."""
        return Cast(self.tile(layout), self.limit, () if self.scale_per == "token" else self.scales)

    @property
    def as_read(self) -> Fp8:
        """Each slab stores its own scale."""
        return replace(self, scales=(1.0,))

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Codes as floats; the scale as the row term."""
        codes, scale = layout["codes"].offset, layout["scale"].offset
        e5m2, per_token, tokens = self.variant == "e5m2", self.scale_per == "token", layout.page_tokens

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            load_fp8(slab, codes, e5m2, tile)
            if per_token:
                load_floats(slab, scale, "bfloat16", row_scale)
            else:
                load_floats(slab, scale, "float32", row_scale[:1])
                for s in range(1, tokens):
                    row_scale[s] = row_scale[0]

        return read

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.variant == "e4m3" else torch.float8_e5m2

    def _scale(self, x: Tensor) -> Tensor:
        """Broadcastable to x: [..., S, 1] bfloat16 for tokens, [Hkv or 1, 1, 1] float32 otherwise."""
        if self.scale_per == "token":
            scale = (x.abs().amax(-1, keepdim=True) / x.new_full((), self.limit)).bfloat16()
            return torch.where(scale > 0, scale, torch.ones_like(scale))
        return torch.tensor(self.scales, dtype=torch.float32, device=x.device)[:, None, None]


def _family(variant: Literal["e4m3", "e5m2"], stem: str, *, headline: bool) -> list[Fp8]:
    source = "OCP FP8 1.0; arXiv 2209.05433"
    return [
        Fp8(stem, 8, source, variant=variant, scale_per="tensor", headline=headline),
        Fp8(f"{stem}-head", 8, source, variant=variant, scale_per="head", headline=False),
        Fp8(f"{stem}-token", 8, source, variant=variant, scale_per="token", headline=False),
    ]


CODECS = (*_family("e4m3", "fp8", headline=True), *_family("e5m2", "fp8_e5m2", headline=False))
