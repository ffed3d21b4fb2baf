"""What policies really do: teacher-forced KL to the model's own cache on held-out windows, every policy on the same ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvarto import stats
from kvarto.calibrate.sensitivity import FIRST_SCORED
from kvarto.calibrate.watch import as_row
from kvarto.calibrate.windows import Window
from kvarto.errors import NotFinite
from kvarto.formats import Policy
from kvarto.integrations.transformers import Cache
from kvarto.progress import Progress

_SLICE = 64


@dataclass(frozen=True)
class Measured:
    """`kl_nats`: the mean with its interval over documents; `top1`: share of positions with the same likeliest token; `bits` of a cached number."""

    kl_nats: stats.Estimate
    top1: float
    bits: float
    kernels: str


def measure(
    model: Any, policies: Mapping[str, Policy], windows: Sequence[Window], progress: Progress
) -> dict[str, Measured]:
    """By the names of the policies. Each window is read through a cache of each: by path invariance that is what decoding would read.

    Raises Unsupported if a policy cannot be used with the model, NotFinite if one gives NaN.
    """
    sums = {name: list[tuple[float, int]]() for name in policies}
    caches: dict[str, Cache] = {}
    with torch.inference_mode():
        for number, window in enumerate(windows):
            base = _logits(model, window, None)
            progress.done(len(window.tokens))
            for name, policy in policies.items():
                progress.begin("measure", f"{window.document} ({number + 1} of {len(windows)}), {name}")
                caches[name] = cache = Cache(model, policy)
                sums[name].append(_compare(base, _logits(model, window, cache), name))
                progress.done(len(window.tokens))
    scored = [len(window.tokens) - FIRST_SCORED for window in windows]
    return {
        name: Measured(
            _by_document(windows, [kl for kl, _ in sums[name]], scored), sum(same for _, same in sums[name]) / sum(scored),
            _bits(caches[name]), caches[name].kernel_names,
        )
        for name in policies
    }  # fmt: skip


def _logits(model: Any, window: Window, cache: Cache | None) -> Tensor:
    count = len(window.tokens) - FIRST_SCORED
    options = {"use_cache": False} if cache is None else {"cache": cache, "use_cache": True}
    logits: Tensor = model(as_row(window.tokens, model), logits_to_keep=count, **options).logits[0]
    return logits


def _compare(base: Tensor, other: Tensor, name: str) -> tuple[float, int]:
    """Sums over positions of KL in nats, and of equal likeliest tokens; logits [positions, vocabulary]."""
    kl = 0.0
    for first in range(0, len(base), _SLICE):
        p, q = (x[first : first + _SLICE].float().log_softmax(dim=-1) for x in (base, other))
        kl += float((p.exp() * (p - q)).sum(dim=-1, dtype=torch.float64).sum())
    if not math.isfinite(kl):
        raise NotFinite(f"{name}: expected finite log-probabilities, got NaN or infinity")
    return kl, int((base.argmax(dim=-1) == other.argmax(dim=-1)).sum())


def _by_document(windows: Sequence[Window], kl: Sequence[float], scored: Sequence[int]) -> stats.Estimate:
    """Windows of a document are one cluster."""
    totals: dict[str, list[float]] = {}
    for window, nats, count in zip(windows, kl, scored, strict=True):
        total = totals.setdefault(window.document, [0.0, 0.0])
        total[0], total[1] = total[0] + nats, total[1] + count
    return stats.clustered_mean([total[0] for total in totals.values()], [int(total[1]) for total in totals.values()])


def _bits(cache: Cache) -> float:
    layouts = [layer.layout for layer in cache.kv.layers]
    numbers = sum(layout.geometry.elements_per_token for layout in layouts)
    return 8 * sum(layout.bytes_per_token for layout in layouts) / numbers
