"""Uniform codes with a float scale and a float zero per group: x ~ code * scale + zero, code in 0 .. levels - 1.

Scale and zero are rounded to float16 first and the codes are chosen against the rounded values, so that the rounding of the zero (an ulp of
0.25 for a key bias of 300) is made good by the codes instead of shifting the whole group. A zero is a float, not a code: a group that lies
far from 0 loses nothing.

Error: at most scale / 2 inside the range, plus 2^-11 |zero| for a group that is constant; scale is (hi - lo) / (levels - 1) to one part in 2^11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarto.jit import torch

if TYPE_CHECKING:
    from torch import Tensor

FLOAT16_MAX = 65504.0


def fit(lo: Tensor, hi: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, float16, for groups whose ends are lo <= hi (float32, any one shape)."""
    zero = lo.clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
    scale = ((hi - zero.float()) / (levels - 1)).clamp(0.0, FLOAT16_MAX).half()
    return scale, zero


def quantize(x: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    """Nearest codes, uint8, of x (float32); scale and zero broadcast to x. A group of scale 0 is constant: all its codes are 0."""
    step = scale.float()
    codes = (x - zero.float()) / torch.where(step > 0, step, 1.0)
    return torch.where(step > 0, codes, 0.0).round().clamp(0, levels - 1).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 values; scale and zero broadcast to codes."""
    return codes.float() * scale.float() + zero.float()


def clip_range(x: Tensor, dim: int, clip: float) -> tuple[Tensor, Tensor]:
    """Ends (keeping the axis) of x over `dim`, drawn in around their middle to the share `clip` of their distance."""
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    middle, half = (hi + lo) * 0.5, (hi - lo) * (0.5 * clip)
    return middle - half, middle + half


def out_of_range(x: Tensor) -> int:
    """Elements that a float16 zero and scale cannot reach."""
    return int((x.abs() > FLOAT16_MAX).sum())
