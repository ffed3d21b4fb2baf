"""From options to a study that is ready to run. Everything that can be wrong with a request is found here, before the long work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvarto.errors import Unsupported, UsageError
from kvarto.formats import Policy
from kvarto.models.load import LoadedModel, load
from kvarto.models.texts import Document, texts
from kvarto.progress import Progress
from kvarto.study.arms import Arm, baseline_arm, candidate_arm, control_arm
from kvarto.study.fidelity import FIRST_SCORED, FidelityStage
from kvarto.study.json_check import JsonStage, build_extractions
from kvarto.study.needles import NeedleStage, build_haystack
from kvarto.study.options import Budget, StudyOptions, candidates, within
from kvarto.study.passages import Passages, cut_passages, paragraphs
from kvarto.study.result import Skipped
from kvarto.study.speed import SpeedStage
from kvarto.study.threads import choose_threads


@dataclass
class Study:
    """A study that is ready to run."""

    options: StudyOptions
    budget: Budget
    loaded: LoadedModel
    documents: list[Document]
    arms: list[Arm]
    control: Arm
    skipped: list[Skipped]
    passages: Passages
    fidelity: FidelityStage
    needles: NeedleStage
    json: JsonStage
    speed: SpeedStage
    broken: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    grown: dict[str, int | None] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def baseline(self) -> Arm:
        """The model's own cache."""
        return self.arms[0]


def prepare(options: StudyOptions, loaded: LoadedModel | None, progress: Progress) -> Study:
    """Load and build everything. Raises a KvartoError for what cannot be done."""
    policies = candidates(options)
    documents = texts(options.text)
    if loaded is None:
        progress.say(f"loading {options.model}")
        loaded = load(options.model, progress=progress.say)
    arms, skipped = _arms(loaded.model, policies, options)
    if options.threads is None:
        torch.set_num_threads(choose_threads(arms[0]))
    limit = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    budget, tokenizer = within(options.budget, limit), loaded.tokenizer
    if budget.document_tokens <= FIRST_SCORED:
        raise UsageError("document_tokens", f"more than {FIRST_SCORED}, which are not scored", budget.document_tokens)
    passages = cut_passages(
        documents, tokenizer, count=budget.documents, tokens=budget.document_tokens, seed=options.seed
    )
    prose = paragraphs(documents)
    haystacks = [
        build_haystack(tokenizer, prose, length_tokens=length, needles=budget.needles, seed=1000 * options.seed + seed)
        for seed in range(budget.needle_seeds)
        for length in budget.needle_lengths
    ]
    extractions = build_extractions(tokenizer, count=budget.json_prompts, seed=options.seed)
    control = control_arm(loaded.model, options.kernel)
    return Study(
        options, budget, loaded, documents, arms, control, skipped, passages,
        fidelity=FidelityStage(arms[0], [control, *arms[1:]], passages.passages),
        needles=NeedleStage(arms, haystacks),
        json=JsonStage(arms, tokenizer, extractions),
        speed=SpeedStage(arms, budget),
    )  # fmt: skip


def _arms(model: Any, policies: Sequence[Policy], options: StudyOptions) -> tuple[list[Arm], list[Skipped]]:
    """The baseline and the candidates. A format that the model refuses is an error if it was asked for, else it is skipped."""
    arms, skipped = [baseline_arm(model)], []
    for policy in policies:
        arm = candidate_arm(model, policy, options.kernel)
        if arm.name == arms[0].name and not options.formats:
            continue
        try:
            arm.new_cache()
        except Unsupported as error:
            if options.formats:
                raise
            skipped.append(Skipped(name=arm.name, reason=str(error)))
        else:
            arms.append(arm)
    if not options.formats:
        arms[1:] = sorted(arms[1:], key=Arm.bits_per_number, reverse=True)
    if len(arms) == 1:
        raise Unsupported(f"no format can be tried with this model: {skipped[0].reason if skipped else 'none given'}")
    return arms, skipped
