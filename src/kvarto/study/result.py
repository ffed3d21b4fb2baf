"""What a study found, as data: these classes are the schema of `study.json`.

Everything a verdict rests on is kept as counts and sums per document, needle and prompt, so that others can compute it again. Units stand in
names; log-probabilities are natural, KL in nats. Raise SCHEMA_VERSION when a field changes its meaning or goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvarto.stats import Estimate

SCHEMA_VERSION: Literal[1] = 1

Status = Literal["pass", "fail", "inconclusive"]
CheckStatus = Literal["pass", "fail", "inconclusive", "reported"]
Role = Literal["baseline", "control", "candidate"]


class Record(BaseModel):
    """Base of all parts: frozen, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Margins(Record):
    """How much harm is acceptable; a verdict is a statement about these numbers."""

    kl_nats: float = Field(default=0.01, gt=0, description="mean KL(baseline || candidate) per token")
    perplexity_ratio: float = Field(default=1.02, gt=1, description="perplexity over the baseline's")
    needle_loss: float = Field(default=0.15, gt=0, lt=1, description="share of the baseline's needles that may be lost")
    alpha: float = Field(
        default=0.05, gt=0, lt=0.5, description="one-sided level of the exact tests; intervals are 95 %"
    )


class Interval(Record):
    """A mean and its 95 % interval clustered by document; no bounds when there were fewer than two documents."""

    mean: float
    low: float | None
    high: float | None
    smallest_seen: float | None = Field(default=None, description="smallest true difference seen with 80 % probability")

    @classmethod
    def of(cls, estimate: Estimate, smallest_seen: float | None = None) -> Interval:
        """From an estimate; an infinite bound is none."""
        known = estimate.clusters > 1
        return cls(
            mean=estimate.mean,
            low=estimate.low if known else None,
            high=estimate.high if known else None,
            smallest_seen=smallest_seen if known else None,
        )


class DocumentSums(Record):
    """One document read by one arm: sums over its scored positions."""

    document: str
    positions: int
    kl_nats: float
    top1_matches: int
    nll_nats: float
    baseline_nll_nats: float


def baseline_perplexity(documents: Sequence[DocumentSums]) -> float:
    """The baseline's perplexity on the positions that another arm was scored at."""
    return math.exp(sum(each.baseline_nll_nats for each in documents) / sum(each.positions for each in documents))


class Fidelity(Record):
    """Teacher-forced agreement with the baseline on real text.

    path_difference: largest |log-probability difference| between the prefill and a decode of the same tokens one by one, through this arm's cache.
    """

    documents: tuple[DocumentSums, ...]
    kl_nats: Interval
    top1: Interval
    perplexity: float
    perplexity_ratio: Interval
    path_difference: float | None = None


class NeedleCell(Record):
    """One needle: `depth` is where it lies in the haystack, 0 to 1; found means that greedy decoding gives its whole value."""

    length_tokens: int
    depth: float
    seed: int
    found: bool


class JsonItem(Record):
    """One extraction prompt: what came out, and how far it is right. Each step requires the one before."""

    prompt: str
    output: str
    valid: bool
    follows_schema: bool
    right_values: bool


class Speed(Record):
    """Tokens per second with `context_tokens` in the cache: median, slowest and fastest run."""

    context_tokens: int
    prefill_tokens_per_second: tuple[float, float, float]
    decode_tokens_per_second: tuple[float, float, float]
    prefill_runs: int
    decode_steps: int


class Memory(Record):
    """Bytes of a cache of one sequence.

    payload + metadata are the sealed pages; tail is what stays raw (open page, sinks, window, the page kept for taking tokens back).
    rss_growth_bytes is what a fresh process really grew by while it filled such a cache.
    """

    context_tokens: int
    payload_bytes: int
    metadata_bytes: int
    tail_bytes: int
    allocated_bytes: int
    rss_growth_bytes: int | None = None

    @property
    def bytes_per_token(self) -> float:
        """All bytes in use over the context's tokens."""
        return (self.payload_bytes + self.metadata_bytes + self.tail_bytes) / self.context_tokens


class Check(Record):
    """One question of a verdict. `reported` cannot pass: it is too small to show safety, and only fails or is shown.

    value, low, high and margin are in the unit of the check; `needed` is how many samples in all would decide it, if that can be told.
    """

    name: str
    status: CheckStatus
    value: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    smallest_seen: float | None = None
    needed: int | None = None
    unit: str = ""
    reason: str


class Verdict(Record):
    """Any failed check fails; else any inconclusive one, or a check that was not made, leaves it open; else pass."""

    status: Status
    checks: tuple[Check, ...]
    reason: str


class ArmResult(Record):
    """Everything measured with one cache. `broken` says why an arm stopped early, if it did."""

    name: str
    role: Role
    kernel: str
    bits_per_number: float
    fidelity: Fidelity | None = None
    needles: tuple[NeedleCell, ...] = ()
    json_items: tuple[JsonItem, ...] = ()
    speed: tuple[Speed, ...] = ()
    memory: tuple[Memory, ...] = ()
    broken: str | None = None
    verdict: Verdict | None = None


class Skipped(Record):
    """A format that was not tried, and why."""

    name: str
    reason: str


class Recommendation(Record):
    """What to do. `format` is None when nothing passed; then the model's own dtype stays."""

    status: Status
    format: str | None
    headline: str
    reasons: tuple[str, ...]
    caveats: tuple[str, ...]


class Provenance(Record):
    """On what, with what and when: enough to repeat the run and to refuse to compare unlike runs."""

    kvarto: str
    commit: str | None
    command: str
    model: str
    model_identity: str
    dtype: str
    text: str
    text_sha256: str
    seed: int
    date: str
    duration_seconds: float
    cpu: str
    cores: int
    threads: int
    system: str
    versions: dict[str, str]


class Scope(Record):
    """How much was measured, and what counts as independent."""

    budget: str
    documents: int
    document_tokens: int
    first_scored: int
    clusters: Literal["documents", "passages"]
    needle_lengths: tuple[int, ...]
    needles_per_haystack: int
    needle_seeds: int
    json_prompts: int
    speed_contexts: tuple[int, ...]


class StudyResult(Record):
    """A whole study. Arms: the baseline, the A/A control, then the candidates."""

    schema_version: Literal[1] = SCHEMA_VERSION
    provenance: Provenance
    scope: Scope
    margins: Margins
    interrupted: bool
    stage_seconds: dict[str, float]
    arms: tuple[ArmResult, ...]
    skipped: tuple[Skipped, ...]
    recommendation: Recommendation

    @property
    def baseline(self) -> ArmResult:
        """The model with its own cache."""
        return next(arm for arm in self.arms if arm.role == "baseline")

    @property
    def control(self) -> ArmResult | None:
        """The baseline through another path: the noise floor."""
        return next((arm for arm in self.arms if arm.role == "control"), None)

    @property
    def candidates(self) -> tuple[ArmResult, ...]:
        """The formats tried."""
        return tuple(arm for arm in self.arms if arm.role == "candidate")
