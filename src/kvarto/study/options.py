"""What a study measures and how much of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from kvarto.codecs import registry
from kvarto.errors import UsageError
from kvarto.formats import Format, Policy, parse_policy
from kvarto.models.catalog import DEFAULT_MODEL
from kvarto.study.result import Margins


@dataclass(frozen=True)
class Budget:
    """How much is measured. Lengths are in tokens; `name` is what reports call it.

    documents, document_tokens    texts for fidelity, and how much of each
    needle_lengths, needles, needle_seeds    haystacks: one for each length and seed, each with `needles` needles at as many depths
    json_prompts                  extraction prompts, 0 for none
    speed_contexts                tokens in the cache when speed and memory are measured; () for none
    prefill_tokens, prefill_runs, decode_steps    what is timed there
    """

    name: str
    documents: int
    document_tokens: int
    needle_lengths: tuple[int, ...]
    needles: int
    needle_seeds: int
    json_prompts: int
    speed_contexts: tuple[int, ...]
    prefill_tokens: int = 256
    prefill_runs: int = 1
    decode_steps: int = 8


_QUESTION_TOKENS = 64

QUICK = Budget(
    "quick", documents=8, document_tokens=512, needle_lengths=(512, 1024), needles=8, needle_seeds=3, json_prompts=8,
    speed_contexts=(1024, 4096),
)  # fmt: skip
FULL = Budget(
    "full", documents=12, document_tokens=2048, needle_lengths=(512, 1024, 2048), needles=8, needle_seeds=4, json_prompts=24,
    speed_contexts=(1024, 4096, 16384), prefill_runs=3, decode_steps=24,
)  # fmt: skip


def within(budget: Budget, most_tokens: int | None) -> Budget:
    """The part of a budget that a model of `most_tokens` positions can be asked for; None for no limit."""
    if most_tokens is None:
        return budget
    timed = budget.prefill_tokens * (budget.prefill_runs + 1) + budget.decode_steps
    return replace(
        budget,
        document_tokens=min(budget.document_tokens, most_tokens),
        needle_lengths=tuple(length for length in budget.needle_lengths if length + _QUESTION_TOKENS <= most_tokens),
        speed_contexts=tuple(context for context in budget.speed_contexts if context + timed <= most_tokens),
    )


@dataclass(frozen=True)
class StudyOptions:
    """The arguments of `run_study`.

    model      a catalog name, a local folder or a hub id
    formats    candidates as text, Format or Policy; none: the headline codecs of a quick study, every codec of a full one
    text       `builtin`, `handbook`, `perl`, a file or a folder (`kvarto.models.texts`)
    threads    CPU threads, or None for the faster of one and torch's number
    kernel     a kernel's name, or None for the best one
    """

    model: str = DEFAULT_MODEL
    formats: tuple[str | Format | Policy, ...] = ()
    budget: Budget = QUICK
    text: str = "builtin"
    seed: int = 0
    threads: int | None = None
    kernel: str | None = None
    margins: Margins = field(default_factory=Margins)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError("threads", "at least 1", self.threads)


def split_formats(text: str) -> tuple[str, ...]:
    """Formats separated by commas. A number after a comma goes on with the layers of +skip=0,1,-1."""
    pieces: list[str] = []
    for piece in text.split(","):
        if pieces and re.fullmatch(r"\s*-?\d+\s*(\+.*)?", piece):
            pieces[-1] += "," + piece
        elif piece.strip():
            pieces.append(piece)
    return tuple(piece.strip() for piece in pieces)


def margins(kl_nats: float, perplexity_ratio: float, needle_loss: float) -> Margins:
    """Margins from a user's numbers. Raises UsageError."""
    try:
        return Margins(kl_nats=kl_nats, perplexity_ratio=perplexity_ratio, needle_loss=needle_loss)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"margin {first['loc'][0]}", first["msg"].lower().removeprefix("input should be "), first["input"]
        ) from None


def candidates(options: StudyOptions) -> list[Policy]:
    """The policies to try, in order, each once. Raises UnknownName or UsageError."""
    wanted = options.formats or tuple(
        name
        for name, codec in registry.items()
        if codec.complete and (codec.headline or options.budget.name == FULL.name)
    )
    return list(dict.fromkeys(_policy(each) for each in wanted))


def _policy(wanted: str | Format | Policy) -> Policy:
    if isinstance(wanted, str):
        return parse_policy(wanted)
    return Policy(wanted) if isinstance(wanted, Format) else wanted
