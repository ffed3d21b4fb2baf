"""A policy for a budget of bits: which side of which layer needs how many, by one backward pass; then measured on text that was held out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvarto.calibrate.collect import versions
from kvarto.calibrate.measure import Measured, measure
from kvarto.calibrate.sensitivity import FIRST_SCORED, cost_tokens, sensitivities
from kvarto.calibrate.spend import Item, Option, bits_per_number, spend
from kvarto.calibrate.windows import LEAST_TOKENS, Window, cut_windows, gather, split
from kvarto.codecs import Codec, registry
from kvarto.errors import UsageError
from kvarto.formats import Format, Policy
from kvarto.integrations.quirks import plan_layers
from kvarto.layer_pages import LayerSpec
from kvarto.layout import PAGE_TOKENS, Side
from kvarto.models.load import LoadedModel, load
from kvarto.models.texts import fingerprint
from kvarto.policy_file import LayerEntry, PolicyFile, RecordEntry
from kvarto.progress import Progress, Silent

_WINDOW_TOKENS = 512


@dataclass(frozen=True)
class Search:
    """How a policy is looked for: among which `codecs`, on how many tokens; and on how many of other documents it is measured, beside what is
    `compared`: one codec everywhere, with the first page raw too."""

    codecs: Sequence[str] = ("int2", "int3", "int4", "int8")
    compared: Sequence[str] = ("int2", "int3", "int4")
    search_tokens: int = 4096
    measured_tokens: int = 4096
    least_tokens: int = LEAST_TOKENS


@dataclass(frozen=True)
class Made:
    """What came of it: the file's content, the costs that it was made from, and what was measured, by name; `policy` is "policy" there.

    `predicted_nats`: what the costs say of all layers in one codec, and of the policy.
    """

    content: PolicyFile
    policy: Policy
    costs: Mapping[tuple[Item, str], float]
    predicted_nats: Mapping[str, float]
    measured: Mapping[str, Measured]
    held_out_documents: int


def make_policy(
    model: LoadedModel | str, text: str | Sequence[str] = "builtin", *, budget_bits: float, search: Search | None = None,
    record: RecordEntry | None = None, name: str = "", progress: Progress | None = None,
) -> Made:  # fmt: skip
    """The policy with the smallest predicted KL under `budget_bits` a cached number, metadata counted by layout, and its measured KL.

    The first page stays raw in all layers, and the rest is quantized: `budget_bits` is what a long context costs. `record` is noted in the file.
    Raises UsageError for a budget that no choice of codecs meets, or too little text; Unsupported for a model that cannot be watched.
    """
    search = search or Search()
    progress = progress or Silent()
    sources = [text] if isinstance(text, str) else list(text)
    documents = gather(sources)
    loaded = load(model, progress=progress.say) if isinstance(model, str) else model
    specs = [layer for layer in plan_layers(loaded.model) if isinstance(layer, LayerSpec)]
    offered = {codec: registry[codec] for codec in search.codecs}
    compared = {codec: Policy(Format(registry[codec], registry[codec], PAGE_TOKENS)) for codec in search.compared}
    _sizes(specs, {codec: registry[codec] for codec in compared})  # says now if one cannot write a layer
    numbers = sum(spec.geometry.elements_per_token * spec.geometry.page_tokens for spec in specs)
    free = {(item, codec): 0.0 for item, codec, _ in _sizes(specs, offered)}
    spend(_options(specs, offered, free), budget_bits, numbers)  # says now if no choice meets the budget
    kept, held_out = split(documents)
    looked_at = _windows(kept, loaded, search.search_tokens, search.least_tokens)
    held = _windows(held_out, loaded, search.measured_tokens, search.least_tokens)
    measured_cost = sum(len(window.tokens) for window in held) * (2 + len(compared))
    progress.plan(cost_tokens(looked_at) + measured_cost)
    costs = sensitivities(loaded.model, looked_at, list(offered.values()), progress)
    chosen = spend(_options(specs, offered, costs), budget_bits, numbers)
    formats = [
        Format(registry[chosen[layer, Side.K].codec], registry[chosen[layer, Side.V].codec], PAGE_TOKENS)
        for layer in range(len(specs))
    ]
    policy = Policy.by_layer(formats, name=name or _name(loaded, budget_bits))
    measured = measure(loaded.model, compared | {"policy": policy}, held, progress)
    predicted = {codec: sum(cost for (_, name), cost in costs.items() if name == codec) for codec in offered}
    predicted["policy"] = sum(option.cost for option in chosen.values())
    content = PolicyFile(
        name=policy.name, layers=tuple(LayerEntry(format=str(each)) for each in formats), record=record,
        provenance={
            "model": loaded.name, "identity": loaded.identity, "source": ", ".join(sources), "text_sha256": fingerprint(documents),
            "budget_bits": budget_bits, "bits": bits_per_number(chosen, numbers),
            "predicted_kl_nats": _rounded(predicted["policy"]), "measured_kl_nats": _rounded(measured["policy"].kl_nats.mean),
            "search_tokens": sum(len(window.tokens) for window in looked_at), "measured_tokens": sum(len(window.tokens) for window in held),
            "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )  # fmt: skip
    return Made(content, policy, costs, predicted, measured, len({window.document for window in held}))


def shares(policy: Policy) -> dict[Side, Counter[str]]:
    """How many layers have each codec, for K and for V."""
    return {
        Side.K: Counter(each.k.name for each in policy.layers),
        Side.V: Counter(each.v.name for each in policy.layers),
    }


def _windows(documents: Sequence[Any], loaded: LoadedModel, tokens: int, least_tokens: int) -> list[Window]:
    """Of at most 512 tokens, each with scored positions."""
    limit = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = min(_WINDOW_TOKENS, limit or _WINDOW_TOKENS)
    cut = cut_windows(documents, loaded.tokenizer, tokens=tokens, window_tokens=length, least_tokens=least_tokens)
    windows = [window for window in cut if len(window.tokens) > FIRST_SCORED]
    if not windows:
        raise UsageError(
            "text", f"a document of more than {FIRST_SCORED} tokens", "none", "give longer text with --text"
        )
    return windows


def _sizes(specs: Sequence[LayerSpec], codecs: Mapping[str, Codec]) -> list[tuple[Item, str, int]]:
    """(item, codec, bits of its part of a page). Raises Unsupported if a codec cannot write a layer."""
    found: list[tuple[Item, str, int]] = []
    for layer, spec in enumerate(specs):
        for name, codec in codecs.items():
            layout = Format(codec, codec, PAGE_TOKENS).layout(spec.geometry)
            for side in Side:
                bits = layout.slab(side).nbytes * 8 * spec.geometry.heads
                found.append(((layer, side), name, bits))
    return found


def _options(
    specs: Sequence[LayerSpec], codecs: Mapping[str, Codec], costs: Mapping[tuple[Item, str], float]
) -> dict[Item, list[Option]]:
    options: dict[Item, list[Option]] = {}
    for item, codec, bits in _sizes(specs, codecs):
        options.setdefault(item, []).append(Option(codec, bits, costs[item, codec]))
    return options


def _name(loaded: LoadedModel, budget_bits: float) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{loaded.name}-{budget_bits:g}").strip("-._")[:64]


def _rounded(nats: float) -> float:
    return float(f"{nats:.4g}")
