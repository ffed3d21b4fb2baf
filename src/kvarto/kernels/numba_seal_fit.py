"""Sealing by least squares on a CPU (`kvarto.sealing.Refine`): rotation, and what becomes of the fit of each column. Called from compiled code.

Written as codecs/affine.py and codecs/hadamard.py compute, to the bit: one rounding an operation, means by halves. A tile is float32
[rows * columns], and what is fitted are its columns: channels of K, tokens of V.
"""

from __future__ import annotations

import numpy as np

from kvarto.jit import inlined
from kvarto.kernels.numba_memory import address_of
from kvarto.kernels.numba_seal_numbers import half_bits, half_float
from kvarto.kernels.numba_seal_vectors import butterflies, store_halves
from kvarto.tile import LOW_ZERO_LIMIT, LOW_ZERO_STEPS, LOW_ZEROS

_ONE, _HALF, _WHOLE = np.float32(1), np.float32(0.5), np.float32(1.5 * 2**23)
_STEPS, _LIMIT = np.float32(LOW_ZERO_STEPS), np.float32(LOW_ZERO_LIMIT)
_LOW, _LOW_MIDDLE = np.int32(LOW_ZEROS), np.int32(LOW_ZEROS // 2)
_LARGEST_UPPER = np.int32(0x7BF0 - LOW_ZEROS // 2)
MOST_SIGNS = 28
"""Rows of the largest rotation that is no power of two."""


@inlined
def clamped(x, limit):  # type: ignore[no-untyped-def]
    """x within +-limit."""
    x = x if x > -limit else -limit
    return x if x < limit else limit


@inlined
def rotate(x, rows, columns, minus, root, limit, held):  # type: ignore[no-untyped-def]
    """hadamard.transform over the rows of x, in place; `minus` as in kvarto.sealing.Rotation; `held` float32 [28 * columns] is room."""
    base = minus.size
    power = rows // base
    for i in range(x.size):
        x[i] = clamped(x[i], limit)
    butterflies(address_of(x), rows, columns, power)
    if base > 1:
        for p in range(power):
            for b in range(base):
                for column in range(columns):
                    held[b * columns + column] = x[(b * power + p) * columns + column]
            for b in range(base):
                out = x[(b * power + p) * columns : (b * power + p + 1) * columns]
                sign = -_ONE if (minus[0] >> b) & 1 else _ONE
                for column in range(columns):
                    out[column] = held[column] * sign
                for other in range(1, base):
                    # Adding the opposite is subtracting.
                    sign = -_ONE if (minus[other] >> b) & 1 else _ONE
                    for column in range(columns):
                        out[column] += held[other * columns + column] * sign
    for i in range(x.size):
        x[i] *= root


@inlined
def short_terms(fit, scale, zero, bits, scale_at, zero_at):  # type: ignore[no-untyped-def]
    """affine.short_scale of a fit [4, columns] (`refine_columns`): a byte each into `scale_at` uint8, zeros to address `zero_at`, both as floats too.

    bits: int32 [columns], room.
    """
    slope, mean, code_mean = fit[0], fit[1], fit[2]
    for column in range(scale.size):
        code = (half_bits(slope[column]) + np.int32(64)) >> np.int32(7)
        code = min(max(code, np.int32(1)), np.int32(247))
        scale_at[column] = np.uint8(code)
        scale[column] = half_float(code << np.int32(7))
    for column in range(scale.size):
        bits[column] = half_bits(mean[column] - scale[column] * code_mean[column])
        zero[column] = half_float(bits[column])
    store_halves(address_of(bits), scale.size, zero_at)


@inlined
def joined_terms(fit, highest, scale, zero, bits, scale_at):  # type: ignore[no-untyped-def]
    """affine.joined of a fit, to address `scale_at`, and affine.parted; otherwise as `short_terms`."""
    slope, mean, code_mean, largest = fit[0], fit[1], fit[2], fit[3]
    for column in range(scale.size):
        half = highest[column] * _HALF
        step = largest[column] / (half + _LIMIT / _STEPS)
        step = step if step > slope[column] else slope[column]
        held = min(max(half_bits(step), _LOW), _LARGEST_UPPER)
        upper = (held + _LOW_MIDDLE) // _LOW * _LOW
        rounded = half_float(upper)
        centre = mean[column] - rounded * (code_mean[column] - half)
        steps = (clamped(centre / rounded * _STEPS, _LIMIT) + _WHOLE) - _WHOLE
        bits[column] = upper + np.int32(steps) + _LOW_MIDDLE
        scale[column] = half_float(bits[column])
        low = np.float32((bits[column] & (_LOW - np.int32(1))) - _LOW_MIDDLE)
        zero[column] = scale[column] * (low / _STEPS - half)
    store_halves(address_of(bits), scale.size, scale_at)
