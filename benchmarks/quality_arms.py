"""Who takes part in the second part of `quality.py`: a raw cache for each engine, ours, peers' caches, llama.cpp; what each holds and reads raw."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvarto.attention import LayerSpec, PagedKV
from kvarto.errors import KvartoError
from kvarto.formats import parse_policy
from kvarto.layout import PAGE_TOKENS
from kvarto.rule import Rule
from kvarto.study.arms import Arm, baseline_arm, candidate_arm, control_arm, feed
from kvarto.study.fidelity import FIRST_SCORED, Sums, summarize
from kvarto.study.filling import fill_pages, random_tokens
from kvarto.study.result import DocumentSums, Interval
from kvarto.study.speed import layer_specs
from llama_engine import KINDS, Llama
from peers_quality import CACHES, ERRORS, CachePeer, held_bytes, missing

RAW, LLAMA_RAW = "DynamicCache", "llama.cpp f16"
CHUNK_TOKENS = 64
BEYOND_TOKENS = 256  # a multiple of every peer's period, so that its residual is as full as before
IN_ONE_CALL = ("kvarto int4",)  # Of ours: by path invariance one says it for all.


@dataclass(frozen=True)
class PeerArm(Arm):
    """A peer's cache in place of ours."""

    peer: CachePeer | None = None

    def new_cache(self) -> Any:
        assert self.peer is not None
        return self.peer.make(self.model.config)


@dataclass(frozen=True)
class Reading:
    """logits float32 [scored, vocabulary], and the seconds of CPU of the pass."""

    logits: Tensor
    seconds: float


Read = Callable[[Sequence[int], int], Reading]
"""Tokens, and how many of the last are scored."""


@dataclass
class Contender:
    """`against`: the raw cache of its engine, None for that one itself. `about` is kept as it is."""

    name: str
    read: Read | None
    against: str | None
    about: dict[str, Any] = field(default_factory=dict)
    one_call: Read | None = None
    documents: list[DocumentSums] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    failed: str = ""

    def attempt(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` gives; None if it fails, or did before: then `failed` says how."""
        if self.failed:
            return None
        try:
            return work(*arguments)
        except (*ERRORS, KvartoError) as error:
            self.failed = f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]
            return None

    def score(self, document: str, base: Tensor, reading: Reading, targets: Tensor) -> None:
        """Add a document; base: log-probabilities of what it is compared with."""
        self.documents.append(score(document, base, reading.logits, targets))

    def result(self) -> dict[str, Any]:
        """As it is kept."""
        if self.failed:
            return self.about | {"skipped": self.failed}
        if not self.documents:
            return self.about
        fidelity = summarize(self.documents)
        return self.about | {
            "against": self.against or RAW, "kl": _bounds(fidelity.kl_nats), "top1": _bounds(fidelity.top1),
            "perplexity": fidelity.perplexity, "seconds_over_raw": statistics.median(self.ratios) if self.ratios else None,
            "kl_by_document": {each.document: each.kl_nats / each.positions for each in self.documents},
        }  # fmt: skip


def score(document: str, base: Tensor, logits: Tensor, targets: Tensor) -> DocumentSums:
    """Raises NotFinite."""
    sums = Sums()
    sums.add(base, logits.log_softmax(-1), targets)
    return DocumentSums(document=document, **vars(sums))


def _bounds(interval: Interval) -> dict[str, float | None]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


# ---- transformers ----------------------------------------------------------------------------------------------------


def through_cache(arm: Arm, tokens: Sequence[int], scored: int) -> Reading:
    cache, begin = arm.new_cache(), time.process_time()
    logits = feed(arm, cache, tokens, scored=scored)
    return Reading(logits.float(), time.process_time() - begin)


def _reads(arm: Arm, chunk_tokens: int | None = CHUNK_TOKENS) -> Read:
    return partial(through_cache, replace(arm, chunk_tokens=chunk_tokens))


def raw(model: Any) -> Contender:
    return Contender(RAW, _reads(baseline_arm(model)), None)


def ours(model: Any, formats: Sequence[str], tokens: int) -> Iterator[Contender]:
    """Raw pages as a control, then the formats."""
    control = control_arm(model, None)
    yield Contender("kvarto raw pages", _reads(control), RAW, {"kernel": control.kernel_names()})
    for text in formats:
        arm, name = candidate_arm(model, parse_policy(text), None), f"kvarto {text}"
        about = our_bits(model, text, tokens) | {"raw_share": our_raw_share(text, tokens), "kernel": arm.kernel_names()}
        yield Contender(name, _reads(arm), RAW, about, _reads(arm, None) if name in IN_ONE_CALL else None)


def others(model: Any, projects: Sequence[str], tokens: int, without: Sequence[str] = ()) -> Iterator[Contender]:
    """Peers' caches but those named in `without`; one that is not installed, or breaks at once, has `failed`."""
    for peer in CACHES:
        if peer.project in projects and peer.name not in without:
            arm = PeerArm(peer.name, "candidate", model, peer=peer)
            contender = Contender(peer.name, _reads(arm), RAW, {"default": peer.default}, _reads(arm, None))
            contender.failed = missing(peer.project) or ""
            contender.attempt(_weigh, contender, model, peer, tokens)
            yield contender


def _weigh(contender: Contender, model: Any, peer: CachePeer, tokens: int) -> None:
    contender.about |= peer_bits(model, peer, tokens) | {"raw_share": peer_raw_share(model, peer, tokens)}


# ---- bits, and what is read raw --------------------------------------------------------------------------------------


def our_bits(model: Any, text: str, tokens: int) -> dict[str, float]:
    """Of pages, sinks and open pages in a bf16 model, without the slack of storage."""
    sizes = []
    for length in (tokens, tokens + BEYOND_TOKENS):
        kv = PagedKV(_specs(model), text, dtype=torch.bfloat16)
        fill_pages(kv, length)
        held = kv.footprint()
        sizes.append(held.payload_bytes + held.metadata_bytes + held.raw_bytes)
    return _as_bits(sizes, model, tokens)


def our_raw_share(text: str, tokens: int) -> float:
    """Of the keys that scored positions read, by the rule."""
    chosen = parse_policy(text).format
    rule = Rule(PAGE_TOKENS, chosen.sink_tokens // PAGE_TOKENS, chosen.window_tokens // PAGE_TOKENS)
    shares = []
    for query in range(FIRST_SCORED, tokens):
        own = query // PAGE_TOKENS
        whole = PAGE_TOKENS * sum(rule.reads_raw(page, own) for page in range(own))
        shares.append((whole + query % PAGE_TOKENS + 1) / (query + 1))
    return statistics.fmean(shares)


def fed(
    model: Any, peer: CachePeer, dtype: torch.dtype, ends: Sequence[int]
) -> Iterator[tuple[Any, int, list[tuple[Tensor, Tensor]]]]:
    """A peer's cache with random keys in chunks, one of which ends at each of `ends`: (cache, tokens held before the chunk, by layer the keys as
    they were and as they were handed out).
    """
    specs, cache, first = _specs(model), peer.make(model.config), 0
    exact: list[Tensor | None] = [None] * len(specs)
    while first < ends[-1]:
        count, handed = min(CHUNK_TOKENS, next(end for end in ends if end > first) - first), []
        for index, spec in enumerate(specs):
            k, v = random_tokens(spec, count, dtype, "cpu", first)
            past = exact[index]
            exact[index] = k if past is None else torch.cat([past, k], dim=-2)
            handed.append((exact[index], cache.update(k, v, index)[0]))
        yield cache, first, handed
        first += count


def peer_bits(model: Any, peer: CachePeer, tokens: int) -> dict[str, float]:
    """Of all tensors that a peer's cache holds for a sequence of a bf16 model."""
    ends, sizes = (tokens, tokens + BEYOND_TOKENS), {}
    for cache, _, handed in fed(model, peer, torch.bfloat16, ends):
        if (held := handed[0][0].shape[-2]) in ends:
            sizes[held] = held_bytes(cache)
    return _as_bits([sizes[end] for end in ends], model, tokens)


def peer_raw_share(model: Any, peer: CachePeer, tokens: int) -> float:
    """Of the keys that scored positions read, those handed out as they came in; mean over positions and layers."""
    shares = []
    for _, first, layers in fed(model, peer, torch.float32, (tokens,)):
        same = [int((exact[..., :first, :] == out[..., :first, :]).all(-1).all(1).sum()) for exact, out in layers]
        end = layers[0][0].shape[-2]
        shares += [
            (statistics.fmean(same) + query - first + 1) / (query + 1) for query in range(max(first, FIRST_SCORED), end)
        ]
    return statistics.fmean(shares)


def numbers_per_token(model: Any) -> int:
    return sum(spec.geometry.elements_per_token for spec in _specs(model))


def _as_bits(sizes: Sequence[int], model: Any, tokens: int) -> dict[str, float]:
    numbers = numbers_per_token(model)
    return {
        "bits": 8 * sizes[0] / (tokens * numbers),
        "bits_beyond": 8 * (sizes[1] - sizes[0]) / (BEYOND_TOKENS * numbers),
    }


def _specs(model: Any) -> list[LayerSpec]:
    return [spec for spec in layer_specs(model) if spec]


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def llama(gguf: Callable[[], Path], threads: int, numbers: int, without: Sequence[str] = ()) -> list[Contender]:
    """Its cache types, f16 first; one row that says why there are none. `gguf` brings the file."""
    nobody = Contender("llama.cpp", None, LLAMA_RAW, failed=missing("llama.cpp") or "")
    engine = nobody.attempt(lambda: Llama(gguf(), threads))
    return (
        [nobody]
        if engine is None
        else [_llama(engine, kind, numbers) for kind in KINDS if f"llama.cpp {kind}" not in without]
    )


def _llama(engine: Llama, kind: str, numbers: int) -> Contender:
    name = f"llama.cpp {kind}"
    # It writes every key before it reads any.
    about: dict[str, Any] = {"raw_share": 1.0 if name == LLAMA_RAW else 0.0, "compiled_for": engine.system()}
    read = partial(_through_llama, engine, kind, numbers, about)
    return Contender(name, read, None if name == LLAMA_RAW else LLAMA_RAW, about)


def _through_llama(
    engine: Llama, kind: str, numbers: int, about: dict[str, Any], tokens: Sequence[int], scored: int
) -> Reading:
    logits, seconds, sizes = engine.read(kind, tokens, scored, CHUNK_TOKENS)
    about["bits"] = 8 * sizes[-1] / (len(tokens) * numbers)
    if len(sizes) > 2:
        about["bits_beyond"] = 8 * (sizes[-2] - sizes[0]) / ((len(sizes) - 2) * CHUNK_TOKENS * numbers)
    return Reading(logits, seconds)
