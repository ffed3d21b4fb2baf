"""The first part of `quality.py`: what a quantizer does to recorded keys and values, everything quantized and nothing raw.

Recorded are queries, keys (after RoPE) and values of every layer while the model reads real text. A page mean or a scale by channel needs many tokens
at once: each quantizer gets the tokens as its own cache would hand them over (ours pages of 64, the others all of them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvarto.binding import BoundCodec
from kvarto.calibrate.watch import Seen, Watcher, watched, watching
from kvarto.formats import parse_format
from kvarto.layout import PAGE_TOKENS, Geometry
from kvarto.study.fidelity import FIRST_SCORED
from peers_quality import ERRORS, TENSORS, held_bytes, missing


@dataclass(frozen=True)
class Layer:
    """What one layer saw of one document: q [Hq, T, D], k and v [1, Hkv, T, D], and the factor of its scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


class _Recorder(Watcher):
    def __init__(self) -> None:
        self.seen: list[Layer] = []

    def before(self, seen: Seen) -> None:
        self.seen.append(
            Layer(seen.query[0].clone(), seen.key.clone(), seen.value.clone(), seen.attend_options["scale"])
        )


def record(model: Any, documents: Sequence[Sequence[int]]) -> list[Layer]:
    """All layers of all documents; tokens are cut to whole pages."""
    found = []
    with watching(model) as specs:
        for document in documents:
            recorder = _Recorder()
            whole = len(document) // PAGE_TOKENS * PAGE_TOKENS
            watched(model, torch.tensor([document[:whole]], device=model.device), recorder, specs)
            found += recorder.seen
    return found


Encode, Decode = Callable[[str, Tensor], Any], Callable[[str, Any], Tensor]


def our_codec(text: str, geometry: Geometry) -> tuple[Encode, Decode]:
    """A format of ours, page by page, no sink."""
    chosen = parse_format(text)
    layout = chosen.layout(geometry)
    sides = {"k": BoundCodec(chosen.k, layout.k), "v": BoundCodec(chosen.v, layout.v)}

    def encode(side: str, x: Tensor) -> Tensor:
        pages = x[0].unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
        return sides[side].encode(pages.float())

    def decode(side: str, slabs: Tensor) -> Tensor:
        return sides[side].decode(slabs).transpose(0, 1).flatten(1, 2)[None]

    return encode, decode


def compare(layer: Layer, k: Tensor, v: Tensor) -> dict[str, float]:
    """Relative errors of K, V and the output (root of mean squares), and KL in nats of attention, for queries from FIRST_SCORED on, causal."""
    tokens, group = layer.k.shape[2], layer.q.shape[0] // layer.k.shape[1]
    first = min(FIRST_SCORED, tokens // 2)
    q = layer.q[:, first:].float()
    hidden = torch.ones(tokens - first, tokens, dtype=torch.bool).triu(first + 1)
    both, outputs = [], []
    for keys, values in ((layer.k, layer.v), (k, v)):
        scores = q @ keys[0].float().repeat_interleave(group, 0).mT * layer.scale
        both.append(scores.masked_fill(hidden, -torch.inf).log_softmax(-1))
        outputs.append(both[-1].exp() @ values[0].float().repeat_interleave(group, 0))
    p, other = both
    kl = (p.exp() * (p - other).masked_fill(hidden, 0.0)).sum(-1).mean()
    return {
        "k_error": _relative(layer.k, k),
        "v_error": _relative(layer.v, v),
        "output_error": _relative(*outputs),
        "attention_kl": float(kl),
    }


def _relative(exact: Tensor, other: Tensor) -> float:
    return float((other.float() - exact).norm() / exact.norm())


def bits(encode: Encode, layer: Layer) -> float:
    """Bits of a number as encoded from a model in bf16."""
    k, v = layer.k.bfloat16(), layer.v.bfloat16()
    return 8 * (held_bytes(encode("k", k)) + held_bytes(encode("v", v))) / (k.numel() + v.numel())


def measure(layers: Sequence[Layer], encode: Encode, decode: Decode) -> dict[str, float]:
    """Means over layers and documents; a layer that is not finite raises ValueError."""
    found = [
        compare(
            layer, *(decode(side, encode(side, x)).reshape(x.shape) for side, x in (("k", layer.k), ("v", layer.v)))
        )
        for layer in layers
    ]
    means = {key: sum(each[key] for each in found) / len(found) for key in found[0]}
    if not all(torch.isfinite(torch.tensor([*means.values()]))):
        raise ValueError("keys or values that are not finite")
    return means | {
        "bits": bits(encode, layers[0]),
        "worst_layer_attention_kl": max(each["attention_kl"] for each in found),
    }


def rows(
    layers: Sequence[Layer],
    formats: Sequence[str],
    peers: Sequence[str],
    say: Callable[[str], None],
    without: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """By name: what was measured, or {"skipped": why}."""
    geometry = Geometry(heads=layers[0].k.shape[1], k_dim=layers[0].k.shape[3], v_dim=layers[0].v.shape[3])
    found: dict[str, dict[str, Any]] = {}
    for text in formats:
        say(f"keys and values: kvarto {text}")
        found[f"kvarto {text}"] = measure(layers, *our_codec(text, geometry))
    for peer in TENSORS:
        if peer.project not in peers or peer.name in without:
            continue
        say(f"keys and values: {peer.name}")
        if reason := missing(peer.project):
            found[peer.name] = {"skipped": reason}
            continue
        try:
            found[peer.name] = measure(layers, *peer.codec(geometry.k_dim))
        except ERRORS as error:
            found[peer.name] = {"skipped": f"{type(error).__name__}: {error}"[:200]}
    return found
