"""RoPE that rotates halves, turned back and forth by angles: pairs (i, i + r / 2) of the first r channels by place x angle.

Cosines and sines are float64 of our own, rounded to float32, the same on the way in and out; the model's tables play no part.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kvarto.jit import inlined, torch

if TYPE_CHECKING:
    from torch import Tensor


def turned(x: Tensor, first: Tensor, angles: tuple[float, ...], *, back: bool = False) -> Tensor:
    """Keys float32 [..., S, D] turned by RoPE, or `back`; first int32 [...]: the place of token 0, for as many leading axes of x as it has."""
    if not angles:
        return x
    cos, sin = _phases(first, x.shape[-2], angles)
    lead = (*first.shape, *[1] * (x.dim() - 2 - first.dim()))
    cos, sin = (each.reshape(*lead, *each.shape[-2:]) for each in (cos, -sin if back else sin))
    half = len(angles)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], dim=-1)


@inlined
def turn_rows(tile, first, pairs, angles, cos, sin):  # type: ignore[no-untyped-def]
    """Compiled twin of `turned`: tile float32 [S, D] in place, from the place `first` on, by angles float32 [pairs]; cos, sin [D] are scratch.

    Cosines and sines are computed once a page, those of the next token follow by the angle itself: off by 64 roundings at most.
    """
    for i in range(pairs):
        angle = np.float64(angles[i])
        cos[i], sin[i] = np.float32(np.cos(first * angle)), np.float32(np.sin(first * angle))
        cos[pairs + i], sin[pairs + i] = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    for token in range(tile.shape[0]):
        row = tile[token]
        for i in range(pairs):
            a, b, c, s = row[i], row[pairs + i], cos[i], sin[i]
            row[i], row[pairs + i] = a * c - b * s, b * c + a * s
            cos[i], sin[i] = c * cos[pairs + i] - s * sin[pairs + i], s * cos[pairs + i] + c * sin[pairs + i]


def _phases(first: Tensor, tokens: int, angles: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Cosines and sines float32 [..., S, r / 2], by the sum of angles in float64: few of them are computed for each page."""
    angle, (cos, sin) = (
        first.double().unsqueeze(-1) * _on(angles, first.device).double(),
        _slot_phases(tokens, angles, first.device),
    )
    c, s = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    return (c * cos - s * sin).float(), (s * cos + c * sin).float()


@cache
def _slot_phases(tokens: int, angles: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of slots 0 .. S - 1, float64 [S, r / 2]."""
    angle = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * _on(angles, device).double()
    return angle.cos(), angle.sin()


@cache
def _on(angles: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(angles, dtype=torch.float32, device=device)
