"""Whether keys and values are finite: asked at once on the CPU, and later on a device that the host should not wait for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvarto.errors import NotFinite
from kvarto.jit import torch

if TYPE_CHECKING:
    from torch import Tensor

SIDES = ("keys", "values")


class FiniteCheck:
    """Of one layer, `layer` by its index.

    On the CPU `see` raises before anything is stored. On other devices it keeps the largest magnitude so far there, in which NaN and infinity
    stay, and `check` raises. Until then a bad token may have been attended to and sealed; whoever hands pages on checks first.

    due   pages were sealed since the last check
    """

    def __init__(self, layer: int, device: torch.device) -> None:
        self.layer, self.deferred, self.due = layer, device.type != "cpu", False
        self._largest = [torch.zeros((), device=device) for _ in SIDES]

    def see(self, k: Tensor, v: Tensor) -> None:
        """New keys and values, of any shape. Raises NotFinite on the CPU."""
        for side, x, largest in zip(SIDES, (k, v), self._largest, strict=True):
            if x.numel() == 0:
                continue
            if self.deferred:
                magnitude = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
                torch.maximum(largest, magnitude, out=largest)
                continue
            lowest, highest = torch.aminmax(x)
            if not math.isfinite(lowest.item() - highest.item()):
                bad = int((~torch.isfinite(x)).sum())
                raise self._error(side, f"{bad} of {x.numel()} NaN or infinite")

    @property
    def largest(self) -> Tensor:
        """float32 [2]: of K and V, on the device."""
        return torch.stack(self._largest)

    def check(self, largest: list[float] | None = None) -> None:
        """Raise NotFinite if one was not; waits for the device unless its answer, `largest`, is there already."""
        if self.deferred:
            for side, magnitude in zip(SIDES, largest or self.largest.tolist(), strict=True):
                if not math.isfinite(magnitude):
                    raise self._error(side, "NaN or infinity")
        self.due = False

    def forget(self) -> None:
        """Nothing of what was seen is held any more."""
        self.due = False
        for largest in self._largest:
            largest.zero_()

    def _error(self, side: str, got: str) -> NotFinite:
        return NotFinite(
            f"layer {self.layer}, {side}: expected finite values, got {got}; check the model's weights and dtype"
        )
