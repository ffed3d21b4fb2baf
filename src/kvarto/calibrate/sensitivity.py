"""What quantizing one side of one layer would cost, for all layers, sides and codecs from one backward pass over each window.

For a small change d of the outputs of a layer's attention, KL(model || changed model) summed over a window is, to second order, half the expected
square of <g, d>, where g is the gradient of the log-likelihood of tokens drawn from the model itself (the Fisher information is the Hessian of KL).
So for each window: draw a next token at every scored position, take the gradient g[t] with respect to each layer's attention outputs once, let each
codec quantize each side of each layer alone, attend by the kernels and the rule that serve, and add up

    cost = 1/2 sum over t of <g[t], d[t]>^2      nats, over the scored positions

What this leaves out: products of errors at different positions (taken as uncorrelated), and what is beyond second order. It is a ranking; `measure`
says what a policy really does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvarto.attention import PagedKV
from kvarto.calibrate.collect import Gradients
from kvarto.calibrate.spend import Item
from kvarto.calibrate.watch import Seen, as_row, watched, watching
from kvarto.calibrate.windows import Window
from kvarto.codecs import Codec
from kvarto.formats import Format, Policy, raw_format
from kvarto.layer_pages import LayerSpec
from kvarto.layout import PAGE_TOKENS, Side
from kvarto.progress import Progress

# Positions before it have no sealed page behind the sink to read.
FIRST_SCORED = 2 * PAGE_TOKENS
_STAGE = "layers"
_COST = 3  # of a backward pass and of all attentions, in forward passes


def sensitivities(
    model: Any, windows: Sequence[Window], codecs: Sequence[Codec], progress: Progress, *, seed: int = 0
) -> dict[tuple[Item, str], float]:
    """Cost in nats per scored position of each (layer, side) by each codec's name, all else raw but the first page, which stays raw anyway.

    Raises Unsupported for a model that cannot be watched.
    """
    generator = torch.Generator().manual_seed(seed)
    costs: dict[tuple[Item, str], float] = {}
    scored = 0
    with watching(model) as specs:
        for number, window in enumerate(windows):
            progress.begin(_STAGE, f"{window.document} ({number + 1} of {len(windows)})")
            keeper = _Keeper()
            gradients = _gradients(model, window, specs, keeper, generator)
            with torch.inference_mode():
                for layer, gradient in enumerate(gradients):
                    for key, cost in _layer_costs(model, specs[layer], keeper, layer, gradient, codecs):
                        costs[key] = costs.get(key, 0.0) + cost
            scored += len(window.tokens) - FIRST_SCORED
            progress.done(_COST * len(window.tokens))
    return {key: cost / scored for key, cost in costs.items()}


def cost_tokens(windows: Sequence[Window]) -> int:
    """For progress."""
    return _COST * sum(len(window.tokens) for window in windows)


class _Keeper(Gradients):
    """Everything that attention got and gave in a window."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def before(self, seen: Seen) -> None:
        super().before(seen)
        self.seen.append(seen)


def _gradients(
    model: Any, window: Window, specs: list[LayerSpec], keeper: _Keeper, generator: torch.Generator
) -> Sequence[Tensor]:
    """Of the log-likelihood of drawn tokens at the scored positions, by each layer's outputs [1, T, Hq, Dv]."""
    with torch.enable_grad():
        count = len(window.tokens) - FIRST_SCORED
        logits = watched(model, as_row(window.tokens, model), keeper, specs, scored=count)[0].float()
        drawn = torch.multinomial(logits.detach().softmax(dim=-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        return torch.autograd.grad(loss, keeper.outs)


def _layer_costs(
    model: Any, spec: LayerSpec, keeper: _Keeper, layer: int, gradient: Tensor, codecs: Sequence[Codec]
) -> list[tuple[tuple[Item, str], float]]:
    seen, out = keeper.seen[layer], keeper.outs[layer].detach().float()
    query, key, value = seen.query.detach(), seen.key.detach(), seen.value.detach()
    raw = raw_format(str(model.dtype).removeprefix("torch.")).k
    found = []
    for side in Side:
        for codec in codecs:
            pair = (codec, raw) if side is Side.K else (raw, codec)
            kv = PagedKV([spec], Policy(Format(*pair, sink_tokens=PAGE_TOKENS)), dtype=model.dtype, device=model.device)
            changed = kv.extend(0, query, key, value, **seen.attend_options).transpose(1, 2).float()
            product = ((changed - out) * gradient.float()).flatten(2).sum(dim=-1, dtype=torch.float64)
            found.append((((layer, side), codec.name), float((product * product).sum()) / 2))
    return found
