"""Whose error carries the attention's mass? Keys coded in turn within one raw forward pass, and the model with only some of its keys coded.

In the raw pass every variant meets the same queries and keys. Of a query behind the first `FIRST_SCORED` tokens, with probabilities p and errors of
scores e (both over all tokens it reads; e is 0 in its own page), output o:

    KL(p || p')  ~  1/2 sum p (e - m)^2,  m = sum p e          what the softmax feels, second order: a shift of all scores is nothing
    o' - o       ~  sum p (e - m) (v - o)                      what the output feels, first order: many small errors average, one large does not

Both sums are taken apart by where the token stands: the first, the rest of the first page, later pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvarto.layout import PAGE_TOKENS
from simulated import FIRST_SCORED, Reading, Simulation, raw_for, read_back
from variants import Variant

PLACES: dict[str, tuple[int, int | None]] = {"first": (0, 1), "page": (1, PAGE_TOKENS), "later": (PAGE_TOKENS, None)}


def readings(variant: Variant) -> dict[str, Reading]:
    """The variant for keys, with all tokens coded as they come, and with those of one place alone (`later`: a raw first page)."""
    everywhere = Reading(variant, sink_tokens=0)
    return {"all": everywhere} | {
        place: Reading(variant, sink_tokens=0, coded=tokens) for place, tokens in PLACES.items()
    }


class SinkStudy:
    """Sums over documents, layers and heads; `add` runs a document through the raw model."""

    def __init__(self, simulation: Simulation, variants: Sequence[Variant]) -> None:
        self.simulation, self.variants = simulation, variants
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._count = 0

    def add(self, document: Tensor) -> None:
        """int64 [T]."""
        self.simulation.observe = self._watch
        try:
            self.simulation.logits(document[None], scored=1)
        finally:
            self.simulation.observe = None

    def results(self) -> dict[str, Any]:
        """Means over layers, heads, queries and documents: `mass` by place, `norms` of keys, and of each variant by place its sums."""
        mean = {key: float(total) / self._count for key, total in self._sums.items()}
        return {
            "mass": {place: mean["mass", place] for place in PLACES},
            "norms": {key[1]: value for key, value in mean.items() if key[0] == "norm"},
            "errors": [
                {
                    "name": each.name,
                    **{
                        place: {what: mean[each.name, place, what] for what in ("square", "weighted", "felt", "output")}
                        for place in (*PLACES, "all")
                    },
                }
                for each in self.variants
            ],
        }

    def _add(self, *key: str, value: Tensor) -> None:
        self._sums[key] = (
            self._sums.get(key, torch.zeros((), dtype=torch.float64, device=value.device)) + value.double()
        )

    def _watch(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """One layer of one document: q [1, Hq, T, D], k and v [1, Hkv, T, D]."""
        moments, T = self.simulation.moments[module.layer_idx], k.shape[2]
        grouped = q.unflatten(1, (k.shape[1], -1))[0][..., FIRST_SCORED:, :]
        own, seen = (x[FIRST_SCORED:] for x in raw_for(T, 0, q.device))
        scores = grouped @ k[0][:, None].transpose(-1, -2) * scale
        p = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        out = p @ v[0][:, None]
        self._count += 1
        for place, (first, end) in PLACES.items():
            self._add("mass", place, value=p[..., first:end].sum(-1).mean())
        for name, x in (("key", k), ("key less static mean", k - moments.k_mean[:, 0])):
            norm = x[0].norm(dim=-1)
            self._add("norm", f"{name}, first", value=norm[:, 0].mean())
            self._add("norm", f"{name}, later", value=norm[:, PAGE_TOKENS:].mean())
        for each in self.variants:
            error = read_back(each, k, Reading(each, sink_tokens=0), moments) - k
            e = (grouped @ error[0][:, None].transpose(-1, -2) * scale).masked_fill(own | ~seen, 0.0)
            self._take_apart(each.name, e, p, v[0][:, None], out)

    def _take_apart(self, name: str, e: Tensor, p: Tensor, v: Tensor, out: Tensor) -> None:
        """e, p [Hkv, R, queries, T], v [Hkv, 1, T, D], out [Hkv, R, queries, D]."""
        away = p * (e - (p * e).sum(-1, keepdim=True))
        size = out.square().sum(-1)
        read = e != 0
        for place, (first, end) in {**PLACES, "all": (0, None)}.items():
            part, here = e[..., first:end], away[..., first:end]
            square = part.square()
            felt = (here * (here / p[..., first:end].clamp_min(1e-30))).sum(-1).mean()
            moved = here @ v[..., first:end, :] - here.sum(-1, keepdim=True) * out
            self._add(name, place, "square", value=square.sum() / read[..., first:end].sum().clamp_min(1))
            self._add(name, place, "weighted", value=(p[..., first:end] * square).sum(-1).mean())
            self._add(name, place, "felt", value=felt / 2)
            self._add(name, place, "output", value=(moved.square().sum(-1) / size).mean())
