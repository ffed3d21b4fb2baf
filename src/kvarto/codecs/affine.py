"""Uniform codes with a float scale and a float zero per group: x ~ code * scale + zero, code in 0 .. levels - 1.

Scale and zero are rounded to float16 first and the codes are chosen against the rounded values, so that the rounding of the zero (an ulp of
0.25 for a key bias of 300) is made good by the codes instead of shifting the whole group. A zero is a float, not a code: a group that lies
far from 0 loses nothing.

Two ways to write the terms of a group in 24 and in 16 bits: `short_scale` and `short_fit`, a byte, beside a float16 zero, and `joined`, a float16
scale that carries the zero in its low bits. Both are exact in float16, so that a kernel may use them as such.

Error: at most scale / 2 inside the range, plus 2^-11 |zero| for a group that is constant; scale is (hi - lo) / (levels - 1) to one part in 2^11, and
never below 2^-24, float16's smallest number: groups whose step would be smaller (ranges below 1e-5 at 8 bits, 1e-6 at 4) lose accuracy.

Rounding: all arithmetic is float32, one rounding to nearest even for each +, -, *, / and square root, nothing fused, nothing divided by way
of a reciprocal (so divisors are tensors: torch multiplies by the reciprocal of a number on GPUs). Means are `halving_mean`. Codes and float16
round to nearest even. kernels/triton_seal.py and numba_seal.py compute the same, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarto.codecs.base import beyond, halving_mean
from kvarto.jit import torch
from kvarto.sealing import FLOAT16_MAX, ROUNDS, SMALLEST_STEP
from kvarto.tile import LOW_ZERO_LIMIT, LOW_ZERO_STEPS, LOW_ZEROS

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


def short_fit(lo: Tensor, hi: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """`fit` with the scale in a byte, as of `short_scale` but rounded up: steps are up to 1/8 wider, and the end of the range is still reached."""
    scale, zero = fit(lo, hi, levels)
    bits = scale.view(torch.int16).to(torch.int32)
    return ((bits + 127) >> 7).clamp(1, 247).to(torch.uint8), zero


def quantize(x: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    """Nearest codes, uint8, of x (float32); scale, which is not 0, and zero broadcast to x."""
    return ((x - zero.float()) / scale.float()).round().clamp(0, levels - 1).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 values; scale and zero broadcast to codes."""
    return codes.float() * scale.float() + zero.float()


@dataclass(frozen=True)
class Fitted:
    """What `refine` found of groups along an axis: float32 like x, with that axis of size 1, but x itself.

    x          clamped to float16's range
    scale      the one that keeps the group's variance, not yet rounded; positive
    mean       of the group; code_mean: of its codes
    largest    magnitude
    """

    x: Tensor
    scale: Tensor
    mean: Tensor
    code_mean: Tensor
    largest: Tensor


def refine(x: Tensor, dim: int, levels: Tensor) -> Fitted:
    """Fit groups along an axis: rounding and least squares in turn, from the group's range on.

    x: float32; `levels`: codes of each group, float32, broadcast to x with `dim` of size 1. The last scale is not the one of least error,
    which shrinks the group by its noise, but the one that keeps its variance: a key's noise adds to a score's spread, a shrunken key takes from
    its size, and the softmax feels both. What follows rounds the scale, puts the zero where the mean is kept, and chooses the codes.
    """
    x, highest = x.clamp(-FLOAT16_MAX, FLOAT16_MAX), levels - 1
    mean = halving_mean(x, dim)
    centred = x - mean
    variance = halving_mean(centred * centred, dim)
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, zero = _half((hi - lo) / highest).clamp_min(SMALLEST_STEP), _half(lo)
    for i in range(ROUNDS + 1):
        codes = torch.minimum(((x - zero.float()) / scale.float()).round().clamp_min(0.0), highest)
        code_mean = halving_mean(codes, dim)
        spread = codes - code_mean
        code_variance, covariance = halving_mean(spread * spread, dim), halving_mean(spread * centred, dim)
        fits = (code_variance > 0) & (covariance > 0)
        divisor = torch.where(fits, code_variance, 1.0)
        slope = covariance / divisor if i < ROUNDS else (variance / divisor).sqrt()
        slope = torch.where(fits, slope, scale.float())
        scale = _half(slope).clamp_min(SMALLEST_STEP)
        zero = _half(mean - scale.float() * code_mean)
    return Fitted(x, slope, mean, code_mean, torch.maximum(-lo, hi))


def nearest(x: Tensor, scale: Tensor, zero: Tensor, levels: Tensor) -> Tensor:
    """Nearest codes, uint8, of x; scale and zero float32, broadcast to x as `levels` is."""
    return torch.minimum(((x - zero) / scale).round().clamp_min(0.0), levels - 1).to(torch.uint8)


def short_scale(fit: Fitted) -> tuple[Tensor, Tensor]:
    """The scale in a byte, uint8: the upper half of a positive float16, sign left out (5 bits of exponent, 3 of mantissa); and a zero, float16.

    The scale is rounded to nearest: at most 6 % off, which the codes make good but for a step that is not the best (4 % more error at 4 bits).
    """
    bits = _half(fit.scale).view(torch.int16).to(torch.int32)
    code = ((bits + 64) >> 7).clamp(1, 247).to(torch.uint8)
    return code, _half(fit.mean - long_scale(code) * fit.code_mean)


def long_scale(code: Tensor) -> Tensor:
    """float32 of `short_scale`'s byte."""
    return (code.to(torch.int32) << 7).to(torch.int16).view(torch.float16).float()


def joined(fit: Fitted, levels: int) -> Tensor:
    """Scale and zero in one float16, see `parted`: for groups that lie about 0, as rotated numbers do.

    A group with a number out of reach of its codes, wherever the zero is, gets a larger scale: one outlier (a value with all of its weight in the
    rotation's first channel is one) would else be cut off. The zero goes no further than to where 0 is a code, for what is beside an outlier.
    """
    half = fit.mean.new_full((), (levels - 1) / 2)
    reach = half + LOW_ZERO_LIMIT / LOW_ZERO_STEPS
    scale = torch.maximum(fit.scale, fit.largest / reach)
    bits = _half(scale).view(torch.int16).to(torch.int32).clamp(LOW_ZEROS, 0x7BF0 - LOW_ZEROS // 2)
    upper = (bits + LOW_ZEROS // 2) // LOW_ZEROS * LOW_ZEROS
    rounded = upper.to(torch.int16).view(torch.float16).float()
    centre = fit.mean - rounded * (fit.code_mean - half)
    steps = (centre / rounded * LOW_ZERO_STEPS).round().clamp(-LOW_ZERO_LIMIT, LOW_ZERO_LIMIT)
    return (upper + steps.to(torch.int32) + LOW_ZEROS // 2).to(torch.int16).view(torch.float16)


def parted(term: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """(scale, zero), float32, of `joined`'s float16.

    The scale is the number as it is. Its low four bits, less 8, say by how many quarters of a step the middle of the codes lies above 0:
    zero = scale * ((low - 8) / 4 - (levels - 1) / 2).
    """
    low = term.view(torch.int16).to(torch.int32) & (LOW_ZEROS - 1)
    return term.float(), term.float() * ((low - LOW_ZEROS // 2).float() / LOW_ZERO_STEPS - (levels - 1) / 2)


def _half(x: Tensor) -> Tensor:
    return x.clamp(-FLOAT16_MAX, FLOAT16_MAX).half()


def out_of_range(x: Tensor) -> int:
    """Elements that a float16 zero and scale cannot reach."""
    return beyond(x, FLOAT16_MAX)
