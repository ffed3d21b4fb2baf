"""What is added up over the tokens of one layer, in bounded memory: nothing here grows with the text.

Sums are float64. Percentiles of magnitudes come from a histogram of 64 bins an octave; those of a channel exactly, from its lowest and highest
values, which alone are kept: half a percent of the tokens on either side, of at most THRESHOLD_TOKENS evenly spread tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvarto.calibrate.record import LOW, PERCENTILES
from kvarto.calibrate.tensors import Array

if TYPE_CHECKING:
    from torch import Tensor

THRESHOLD_TOKENS = 102_400
_BINS_AN_OCTAVE = 64
_OCTAVES = 32  # on either side of 1
_BINS = 2 * _OCTAVES * _BINS_AN_OCTAVE


class Moments:
    """Means and means of squares of numbers by channel, float64."""

    def __init__(self) -> None:
        self.tokens, self._sum, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, x: Tensor) -> None:
        """x: float32 [Hkv, T, D]."""
        x = x.double()
        self._sum, self._squares = self._sum + x.sum(dim=1).cpu(), self._squares + (x * x).sum(dim=1).cpu()
        self.tokens += x.shape[1]

    @property
    def mean(self) -> Array:
        """[Hkv, D]."""
        return _array(self._sum / self.tokens)

    @property
    def square(self) -> Array:
        """[Hkv, D]."""
        return _array(self._squares / self.tokens)


class Magnitudes:
    """Largest magnitude, and percentiles of magnitudes, of each KV head."""

    def __init__(self, heads: int) -> None:
        self._amax, self._counts = torch.zeros(heads), torch.zeros(heads * _BINS, dtype=torch.int64)
        self._heads = heads

    def add(self, x: Tensor) -> None:
        """x: float32 [Hkv, T, D]."""
        size = x.abs().flatten(1)
        self._amax = torch.maximum(self._amax, size.amax(dim=1).cpu())
        bins = ((size.log2() + _OCTAVES) * _BINS_AN_OCTAVE).floor().clamp(0, _BINS - 1).long()
        bins += torch.arange(self._heads, device=x.device)[:, None] * _BINS
        self._counts += torch.bincount(bins.flatten(), minlength=self._heads * _BINS).cpu()

    @property
    def amax(self) -> Array:
        """[Hkv]."""
        return _array(self._amax)

    @property
    def percentiles(self) -> Array:
        """[Hkv, 4]: no smaller than the exact ones, by less than a 64th of an octave."""
        counts = self._counts.view(self._heads, _BINS).cumsum(dim=1).numpy()
        found = np.zeros((self._heads, len(PERCENTILES)))
        for head, cumulated in enumerate(counts):
            for i, percentile in enumerate(PERCENTILES):
                at = int(np.searchsorted(cumulated, math.ceil(percentile / 100 * cumulated[-1])))
                found[head, i] = 2.0 ** ((at + 1) / _BINS_AN_OCTAVE - _OCTAVES)
        return np.minimum(found, self.amax[:, None]).astype(np.float32)


class Tails:
    """The LOW and HIGH percentiles of each channel over every `stride`-th of `tokens` tokens: exact, by nearest rank."""

    def __init__(self, tokens: int) -> None:
        self.stride = -(-tokens // THRESHOLD_TOKENS)
        self.tokens = -(-tokens // self.stride)
        self._kept = math.ceil(LOW / 100 * self.tokens)
        self._seen = 0
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """x: float32 [Hkv, T, D]."""
        chosen = x[:, -self._seen % self.stride :: self.stride].transpose(1, 2)
        self._seen += x.shape[1]
        self._low, self._high = (
            self._extreme(kept, chosen, largest) for kept, largest in ((self._low, False), (self._high, True))
        )

    def _extreme(self, kept: Tensor | None, new: Tensor, largest: bool) -> Tensor:
        every = new if kept is None else torch.cat([kept, new], dim=-1)
        return every.topk(min(self._kept, every.shape[-1]), dim=-1, largest=largest).values

    @property
    def low(self) -> Array:
        """[Hkv, D]."""
        assert self._low is not None, "no tokens"
        return _array(self._low[..., -1])

    @property
    def high(self) -> Array:
        """[Hkv, D]."""
        assert self._high is not None, "no tokens"
        return _array(self._high[..., -1])


class SideStatistics:
    """Of keys, of values, or of keys before RoPE, behind first pages."""

    def __init__(self, heads: int, tokens: int) -> None:
        self._moments, self._magnitudes, self.tails = Moments(), Magnitudes(heads), Tails(tokens)

    def add(self, x: Tensor) -> None:
        """x: float32 [Hkv, T, D]."""
        self._moments.add(x)
        self._magnitudes.add(x)
        self.tails.add(x)

    def arrays(self, name: str) -> dict[str, Array]:
        """As a record names them; `name` is "k", "v" or "pre_k"."""
        return {
            f"{name}_amax": self._magnitudes.amax,
            f"{name}_percentiles": self._magnitudes.percentiles,
            f"{name}_mean": self._moments.mean,
            f"{name}_square": self._moments.square,
            f"{name}_low": self.tails.low,
            f"{name}_high": self.tails.high,
        }


class Average:
    """A mean over tokens of something that is summed elsewhere, float64 [Hkv, D]."""

    def __init__(self) -> None:
        self._tokens, self._sum = 0, torch.zeros(())

    def add(self, total: Tensor, tokens: int) -> None:
        """total: float64 [Hkv, D], the sum over so many tokens."""
        self._sum = self._sum + total.cpu()
        self._tokens += tokens

    @property
    def mean(self) -> Array:
        """[Hkv, D]."""
        return _array(self._sum / self._tokens)


def _array(x: Tensor) -> Array:
    array: Array = x.float().cpu().numpy()
    return array
