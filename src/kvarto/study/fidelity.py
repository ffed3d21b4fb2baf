"""Does the model still say the same? Teacher-forced KL, top-1 agreement and perplexity on real text, against the baseline.

Every arm reads the same documents, in windows, through its own cache; the first positions are not scored, because formats below 8 bits keep
the first page raw. A window is prefilled, which by path invariance gives the numbers of decode; `path_difference` measures that it does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvarto import stats
from kvarto.errors import NotFinite, Unsupported
from kvarto.study.arms import Arm, feed
from kvarto.study.passages import Passage
from kvarto.study.result import DocumentSums, Fidelity, Interval
from kvarto.study.stage import Step

FIRST_SCORED = 128
WINDOW_TOKENS = 512
DECODED_TOKENS = 16
_STAGE = "fidelity"
_SLICE = 64
_DECODE_COST_TOKENS = 40


@dataclass
class Sums:
    """What is added up over the scored positions of one document."""

    positions: int = 0
    kl_nats: float = 0.0
    top1_matches: int = 0
    nll_nats: float = 0.0
    baseline_nll_nats: float = 0.0

    def add(self, base: Tensor, other: Tensor, targets: Tensor) -> None:
        """base, other: log-probabilities float32 [positions, vocabulary]; targets int64 [positions]. Sums are float64.

        Raises NotFinite when `other` says nothing.
        """
        kl = 0.0
        for first in range(0, len(base), _SLICE):
            p, q = base[first : first + _SLICE], other[first : first + _SLICE]
            kl += float((p.exp() * (p - q)).sum(dim=-1, dtype=torch.float64).sum())
        if not math.isfinite(kl):
            raise NotFinite("log-probabilities: expected finite values, got NaN or infinity")
        self.positions += len(base)
        self.kl_nats += kl
        self.top1_matches += int((base.argmax(dim=-1) == other.argmax(dim=-1)).sum())
        rows = torch.arange(len(base))
        self.nll_nats -= float(other[rows, targets].double().sum())
        self.baseline_nll_nats -= float(base[rows, targets].double().sum())


@dataclass
class _Reading:
    """One arm reading one document."""

    cache: Any
    sums: Sums = field(default_factory=Sums)


class FidelityStage:
    """Runs the documents one after another, every arm in turn, so that an interruption leaves the same documents for each."""

    def __init__(self, baseline: Arm, others: Sequence[Arm], passages: Sequence[Passage]) -> None:
        self.baseline, self.others, self.passages = baseline, others, passages
        self._sums: dict[tuple[str, str], DocumentSums] = {}
        self._path: dict[str, float | None] = {}
        self._readings: dict[str, _Reading] = {}
        self._base = torch.empty(0)

    def steps(self) -> Iterator[Step]:
        """One for each document, window and arm; after the first document one decode for each of our arms."""
        for number, passage in enumerate(self.passages):
            count = len(passage.tokens) - 1
            for first in range(0, count, WINDOW_TOKENS):
                window = slice(first, min(first + WINDOW_TOKENS, count))
                for arm in (self.baseline, *self.others):
                    label = f"{passage.name} ({number + 1} of {len(self.passages)}), {arm.name}"
                    yield Step(
                        _STAGE, label, window.stop - first, self._reader(arm, passage, window, decode=not number), arm
                    )

    def _reader(self, arm: Arm, passage: Passage, window: slice, *, decode: bool) -> Any:
        def read() -> None:
            logp = self._read(arm, passage, window)
            last = window.stop == len(passage.tokens) - 1
            if arm is self.baseline:
                self._base = logp
            else:
                self._readings[arm.name].sums.add(self._base, logp, _targets(passage, window))
                if last and decode:
                    self._path[arm.name] = self._decode(arm, passage, logp)
            if last:
                reading = self._readings.pop(arm.name)
                self._sums[passage.name, arm.name] = DocumentSums(document=passage.name, **vars(reading.sums))

        return read

    def _read(self, arm: Arm, passage: Passage, window: slice) -> Tensor:
        """Log-probabilities float32 [positions, vocabulary] after the scored tokens of a window."""
        if window.start == 0:
            self._readings[arm.name] = _Reading(arm.new_cache())
        scored = window.stop - max(window.start, FIRST_SCORED)
        logits = feed(arm, self._readings[arm.name].cache, passage.tokens[window], scored=scored)
        return logits.float().log_softmax(dim=-1).cpu()

    def _decode(self, arm: Arm, passage: Passage, prefilled: Tensor) -> float | None:
        """Take the last tokens back, decode them one by one, and compare with the prefill: max |log-probability difference|.

        None where tokens cannot be taken back (a recurrent state).
        """
        cache = self._readings[arm.name].cache
        try:
            cache.crop(-DECODED_TOKENS)
        except Unsupported:
            return None
        tokens = passage.tokens[-1 - DECODED_TOKENS : -1]
        decoded = torch.cat([feed(arm, cache, [token]) for token in tokens]).float().log_softmax(dim=-1).cpu()
        return float((decoded - prefilled[-DECODED_TOKENS:]).abs().max())

    def results(self, broken: Collection[str]) -> dict[str, Fidelity]:
        """By arm, over the documents that every arm has read but those named in `broken`, which keep what they have of them."""
        whole = [arm.name for arm in self.others if arm.name not in broken]
        done = [p.name for p in self.passages if all((p.name, name) in self._sums for name in whole)]
        found = {}
        for arm in self.others:
            if read := [self._sums[name, arm.name] for name in done if (name, arm.name) in self._sums]:
                found[arm.name] = summarize(read, self._path.get(arm.name))
        return found


def summarize(documents: Sequence[DocumentSums], path_difference: float | None = None) -> Fidelity:
    """Means over tokens with intervals clustered by document; the perplexity ratio is exp of the mean difference in log-likelihood."""
    weights = [document.positions for document in documents]
    kl = stats.clustered_mean([document.kl_nats for document in documents], weights)
    top1 = stats.clustered_mean([document.top1_matches for document in documents], weights)
    worse = stats.clustered_mean([document.nll_nats - document.baseline_nll_nats for document in documents], weights)
    ratio = Interval.of(worse, smallest_seen=stats.smallest_mean_seen(worse))
    return Fidelity(
        documents=tuple(documents),
        kl_nats=Interval.of(kl, smallest_seen=stats.smallest_mean_seen(kl)),
        top1=Interval.of(top1),
        perplexity=math.exp(sum(document.nll_nats for document in documents) / sum(weights)),
        perplexity_ratio=ratio.model_copy(update={name: _exp(x) for name, x in ratio.model_dump().items()}),
        path_difference=path_difference,
    )


def _exp(x: float | None) -> float | None:
    return None if x is None else math.exp(x)


def _targets(passage: Passage, window: slice) -> Tensor:
    first = max(window.start, FIRST_SCORED)
    return torch.tensor(passage.tokens[first + 1 : window.stop + 1])
