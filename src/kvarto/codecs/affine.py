"""Uniform codes with a float scale and a float zero per group: x ~ code * scale + zero, code in 0 .. levels - 1.

Scale and zero are rounded to float16 first and the codes are chosen against the rounded values, so that the rounding of the zero (an ulp of
0.25 for a key bias of 300) is made good by the codes instead of shifting the whole group. A zero is a float, not a code: a group that lies
far from 0 loses nothing. (`refine` rounds its last zero after the codes; choosing them once more changed no KL, docs/LOG.md.)

Error: at most scale / 2 inside the range, plus 2^-11 |zero| for a group that is constant; scale is (hi - lo) / (levels - 1) to one part in 2^11, and
never below 2^-24, float16's smallest number: groups whose step would be smaller (ranges below 1e-5 at 8 bits, 1e-6 at 4) lose accuracy.

Rounding: all arithmetic is float32, one rounding to nearest even for each +, -, *, / and square root, nothing fused, nothing divided by way
of a reciprocal (so divisors are tensors: torch multiplies by the reciprocal of a number on GPUs). Means are `halving_mean`. Codes and float16
round to nearest even. kernels/triton_seal.py computes the same, to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarto.codecs.base import halving_mean
from kvarto.jit import torch
from kvarto.sealing import FLOAT16_MAX, ROUNDS, SMALLEST_STEP

if TYPE_CHECKING:
    from torch import Tensor


def lowest(x: Tensor, dim: int) -> Tensor:
    """Minimum over an axis, which is kept, of x float32; of a -0.0 and a 0.0 the -0.0, where torch's choice depends on how it runs."""
    lo = x.amin(dim, keepdim=True)
    zero = lo == 0
    if x.device.type == "cpu" and not bool(zero.any()):
        return lo  # Elsewhere one does not ask: that would wait for the device.
    # As an integer -0.0 is the smallest of all.
    minus = x.view(torch.int32).amin(dim, keepdim=True) == -(2**31)
    return torch.where(zero & minus, -0.0, lo)


def fit(lo: Tensor, hi: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, float16, for groups whose ends are lo <= hi (float32, any one shape)."""
    zero = _half(lo)
    # Half of the smallest step on top rounds up where float16 is subnormal, so that the end of the range is still reached.
    step = ((hi - zero.float()) / hi.new_full((), levels - 1)).clamp_min(0.0) + SMALLEST_STEP / 2
    return _half(step).clamp_min(SMALLEST_STEP), zero


def quantize(x: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    """Nearest codes, uint8, of x (float32); scale, which is not 0, and zero broadcast to x."""
    return ((x - zero.float()) / scale.float()).round().clamp(0, levels - 1).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 values; scale and zero broadcast to codes."""
    return codes.float() * scale.float() + zero.float()


def refine(x: Tensor, dim: int, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero of groups along an axis: rounding and least squares in turn, from the group's range on.

    x: float32, clamped to float16's range; `levels`: codes of each group, float32, broadcast to x with `dim` of size 1. Returns codes
    uint8 like x, scale and zero float16 with `dim` of size 1. The last scale is not the one of least error, which shrinks the group by its
    noise, but the one that keeps its variance: a key's noise adds to a score's spread, a shrunken key takes from its size, and the softmax
    feels both. The mean of the group is kept too.
    """
    x, highest = x.clamp(-FLOAT16_MAX, FLOAT16_MAX), levels - 1
    mean = halving_mean(x, dim)
    centred = x - mean
    variance = halving_mean(centred * centred, dim)
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, zero = _half((hi - lo) / highest).clamp_min(SMALLEST_STEP), _half(lo)
    codes = x
    for i in range(ROUNDS + 1):
        codes = torch.minimum(((x - zero.float()) / scale.float()).round().clamp_min(0.0), highest)
        code_mean = halving_mean(codes, dim)
        spread = codes - code_mean
        code_variance, covariance = halving_mean(spread * spread, dim), halving_mean(spread * centred, dim)
        fits = (code_variance > 0) & (covariance > 0)
        divisor = torch.where(fits, code_variance, 1.0)
        slope = covariance / divisor if i < ROUNDS else (variance / divisor).sqrt()
        scale = _half(torch.where(fits, slope, scale.float())).clamp_min(SMALLEST_STEP)
        zero = _half(mean - scale.float() * code_mean)
    return codes.to(torch.uint8), scale, zero


def _half(x: Tensor) -> Tensor:
    return x.clamp(-FLOAT16_MAX, FLOAT16_MAX).half()


def magnitude(x: Tensor) -> float:
    """Of the largest element; NaN if one is NaN."""
    lowest, highest = torch.aminmax(x)
    return max(-float(lowest), float(highest))


def out_of_range(x: Tensor) -> int:
    """Elements that a float16 zero and scale cannot reach."""
    if magnitude(x) <= FLOAT16_MAX:  # one pass instead of three, nearly always
        return 0
    return int((x.abs() > FLOAT16_MAX).sum())
