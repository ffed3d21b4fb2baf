"""Keys before RoPE, from keys after it and the model's own cosines and sines.

RoPE that rotates halves (Llama, Qwen, Gemma ...) multiplies each pair (x[i], x[i + r / 2]) of the first r channels by [[cos, -sin], [sin, cos]] times
the model's attention scaling, so

    before = (after * cos - rotate_half(after) * sin) / (cos^2 + sin^2)

Whether a model does that is tried out, not guessed (`Rope.check`): of one token, repeated, all keys of a layer are equal before RoPE at every
position, because attention averages equal values. Keys that come out unequal were rotated in another way.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from kvarto.calibrate.tensors import Array
from kvarto.calibrate.watch import Seen, Watcher, watched
from kvarto.integrations.interface import decoders
from kvarto.layer_pages import LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

_CACHING = ("full_attention", "sliding_attention")
_PROBE_TOKENS = 96
# Of the largest key of a pair: rounding is far below in either dtype, a wrong convention far above.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_16_BITS = 0.1
# A pair that is this much smaller than the largest one is measured against that.
_FLOOR = 1e-2
_ANGLE_TOLERANCE = 1e-2


class Rope:
    """The rotations of a model: cos and sin by layer. `reason`: why there are none."""

    def __init__(self, model: Any, layers: int) -> None:
        self._model, self.reason = model, ""
        self._modules = [
            m for d in decoders(model) for m in d.children() if type(m).__name__.endswith("RotaryEmbedding")
        ]
        config = model.config.get_text_config(decoder=True)
        types = getattr(config, "layer_types", None) or []
        self._types = [kind for kind in types if kind in _CACHING] or [""] * layers
        if len(self._modules) != 1 or len(self._types) != layers:
            self.reason = f"{type(model).__name__} has no single rotary embedding for its layers"
        self._kept: dict[tuple[str, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def undo(self, x: Tensor, layer: int) -> Tensor:
        """Keys float32 [..., T, Dk] of a window from position 0 on, as they were before RoPE."""
        cos, sin = self._tables(layer, x.shape[-2])
        r = cos.shape[-1]
        return torch.cat([_turn_back(x[..., :r], cos, sin) / (cos * cos + sin * sin), x[..., r:]], dim=-1)

    def gradient(self, x: Tensor, layer: int) -> Tensor:
        """Gradients with respect to keys, as gradients with respect to keys before RoPE: the transposed map."""
        cos, sin = self._tables(layer, x.shape[-2])
        r = cos.shape[-1]
        return torch.cat([_turn_back(x[..., :r], cos, sin), x[..., r:]], dim=-1)

    def angles(self, layer: int, tokens: int) -> tuple[Array, float] | None:
        """(Angles, float32 [r / 2], in radians a token; what keys are scaled by beside), if those are all that RoPE does to so many tokens."""
        cos, sin = (x.double() for x in self._tables(layer, max(tokens, 2), torch.float32))
        half = cos.shape[-1] // 2
        scale = (cos * cos + sin * sin).mean().sqrt()
        angles = torch.atan2(sin[1, :half], cos[1, :half]).float()
        turned = torch.arange(len(cos), device=cos.device)[:, None] * angles.double().repeat(2)
        off = torch.maximum((turned.cos() * scale - cos).abs(), (turned.sin() * scale - sin).abs())
        return (angles.cpu().numpy(), float(scale)) if float(off.max()) < _ANGLE_TOLERANCE else None

    def _tables(self, layer: int, tokens: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, r], as rounded in the model's dtype, or in another."""
        dtype = dtype or self._model.dtype
        key = self._types[layer], tokens, dtype
        if key not in self._kept:
            like = torch.empty(1, 1, 1, dtype=dtype, device=self._model.device)
            positions = torch.arange(tokens, device=self._model.device)[None]
            wants_type = "layer_type" in inspect.signature(self._modules[0].forward).parameters
            found = self._modules[0](like, positions, *([key[0]] if wants_type else []))
            self._kept = {key: (found[0][0].float(), found[1][0].float())} | dict(list(self._kept.items())[:3])
        return self._kept[key]

    def check(self, token: int, specs: list[LayerSpec]) -> None:
        """Try it on a token, repeated; sets `reason` where it does not hold. The model is `watching`."""
        if self.reason:
            return
        probe = _Probe(self)
        try:
            watched(self._model, torch.full((1, _PROBE_TOKENS), token, device=self._model.device), probe, specs)
        except (
            TypeError,
            ValueError,
            IndexError,
            KeyError,
            RuntimeError,
        ) as error:  # a rotary embedding of another make
            self.reason = f"its rotary embedding is unlike those known ({type(error).__name__}: {error})"[:200]
            return
        tolerance = _TOLERANCE.get(self._model.dtype, _TOLERANCE_16_BITS)
        wrong = [layer for layer, error in enumerate(probe.errors) if not error < tolerance]
        if wrong:
            self.reason = f"keys of layer {wrong[0]} are not rotated by halves with the model's cosines and sines"


def _turn_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos - torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class _Probe(Watcher):
    """The spread over positions of keys before RoPE, by layer, relative to their size."""

    def __init__(self, rope: Rope) -> None:
        self._rope, self.errors = rope, list[float]()

    def before(self, seen: Seen) -> None:
        before = self._rope.undo(seen.key[0].float(), seen.layer)
        spread = (before.amax(dim=-2) - before.amin(dim=-2)).amax(dim=0)
        size = before.abs().amax(dim=(0, 1))
        self.errors.append(float((spread / size.clamp_min(_FLOOR * float(size.max()))).max()))
