"""The whole job: prepare, run the steps of every stage, judge.

Everything that can be wrong with the request is found while preparing, before the long work. A step that a format breaks ends that arm alone.
On KeyboardInterrupt the step that was running is dropped and the rest of what was done is judged and returned, marked `interrupted`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from kvarto import __version__
from kvarto.errors import KvartoError, NotFinite, Unsupported, UsageError
from kvarto.formats import Policy, parse_policy
from kvarto.models.load import LoadedModel, load
from kvarto.models.texts import Document, fingerprint, texts
from kvarto.study import machine
from kvarto.study.arms import Arm, baseline_arm, candidate_arm, control_arm
from kvarto.study.fidelity import FIRST_SCORED, FidelityStage
from kvarto.study.json_check import JsonStage, build_extractions
from kvarto.study.memory import Order, measure_growth
from kvarto.study.needles import NeedleStage, build_haystack
from kvarto.study.options import StudyOptions, candidates
from kvarto.study.passages import Passages, cut_passages, paragraphs
from kvarto.study.result import ArmResult, Provenance, Scope, Skipped, StudyResult
from kvarto.study.speed import SpeedStage, layer_specs
from kvarto.study.stage import Progress, Silent, Step
from kvarto.study.verdict import judge, recommend

_MEMORY_COST_TOKENS = 600


@dataclass
class _Study:
    """A study that is ready to run."""

    options: StudyOptions
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


def run_study(
    options: StudyOptions, progress: Progress | None = None, *, loaded: LoadedModel | None = None, command: str = ""
) -> StudyResult:
    """Measure and judge. `loaded` is a model that is already there; `command` is how a user would repeat the run.

    Raises a KvartoError for a request that cannot be met, before any long work.
    """
    progress = progress or Silent()
    begun = time.perf_counter()
    with _settings(options), torch.inference_mode():
        study = _prepare(options, loaded, progress)
        study.seconds["prepare"] = time.perf_counter() - begun
        try:
            _run(study, progress)
        except KeyboardInterrupt:
            study.interrupted = True
        return _conclude(study, command, time.perf_counter() - begun)


@contextlib.contextmanager
def _settings(options: StudyOptions) -> Iterator[None]:
    """The threads asked for, and no advice from transformers between the progress bars; both put back at the end."""
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    torch.set_num_threads(options.threads or threads)
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        transformers_logging.set_verbosity(verbosity)


# ---- preparing -----------------------------------------------------------------------------------------------------


def _prepare(options: StudyOptions, loaded: LoadedModel | None, progress: Progress) -> _Study:
    policies = candidates(options)
    documents = texts(options.text)
    if loaded is None:
        progress.say(f"loading {options.model}")
        loaded = load(options.model, progress=progress.say)
    arms, skipped = _arms(loaded.model, policies, options)
    budget, tokenizer = options.budget, loaded.tokenizer
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
    return _Study(
        options, loaded, documents, arms, control, skipped, passages,
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


# ---- running -------------------------------------------------------------------------------------------------------


def _run(study: _Study, progress: Progress) -> None:
    stages = (study.fidelity, study.needles, study.json, study.speed)
    steps = [step for stage in stages for step in stage.steps()]
    if study.options.budget.speed_contexts:
        steps.append(_memory_step(study))
    progress.plan(sum(step.cost_tokens for step in steps))
    for step in steps:
        progress.begin(step.stage, step.label)
        _run_step(study, step)
        progress.done(step.cost_tokens)


def _run_step(study: _Study, step: Step) -> None:
    arm, begun = step.arm, time.perf_counter()
    if arm is not None and arm.name in study.broken:
        return
    try:
        step.run()
    except (NotFinite, Unsupported) as error:
        if arm is None or arm is study.baseline:
            raise
        study.broken[arm.name] = f"{step.stage} ({step.label}): {error}"
    study.seconds[step.stage] = study.seconds.get(step.stage, 0.0) + time.perf_counter() - begun


def _memory_step(study: _Study) -> Step:
    """Fresh processes only know formats by name: an arm whose format is no registered one is left out."""
    named = [arm for arm in study.arms if arm.policy is None or _has_name(arm.policy)]
    tokens = max(study.options.budget.speed_contexts)

    def run() -> None:
        model = study.loaded.model
        formats = tuple(None if arm.policy is None else str(arm.policy) for arm in named)
        order = Order(
            study.loaded.folder, tuple(layer_specs(model)), str(model.dtype).removeprefix("torch."), tokens, formats
        )
        study.grown = dict(zip((arm.name for arm in named), measure_growth(order), strict=True))

    return Step("memory", f"{tokens} tokens in fresh processes", _MEMORY_COST_TOKENS * (len(named) + 3), run)


def _has_name(policy: Policy) -> bool:
    try:
        return parse_policy(str(policy)) == policy
    except KvartoError:
        return False


# ---- concluding ----------------------------------------------------------------------------------------------------


def _conclude(study: _Study, command: str, duration_seconds: float) -> StudyResult:
    options, results = study.options, _arm_results(study)
    scope = _scope(study)
    return StudyResult(
        provenance=_provenance(study, command, duration_seconds),
        scope=scope,
        margins=options.margins,
        interrupted=study.interrupted,
        stage_seconds={stage: round(seconds, 2) for stage, seconds in study.seconds.items()},
        arms=tuple(results),
        skipped=tuple(study.skipped),
        recommendation=recommend(results, scope, study.skipped, interrupted=study.interrupted),
    )


def _arm_results(study: _Study) -> list[ArmResult]:
    """Baseline, control, candidates; the candidates judged."""
    fidelity, needles = study.fidelity.results(study.broken), study.needles.results(study.broken)
    json_items, speed = study.json.results(study.broken), study.speed.results(study.broken)
    found = []
    for arm in (study.baseline, study.control, *study.arms[1:]):
        found.append(
            ArmResult(
                name=arm.name,
                role=arm.role,
                kernel=arm.kernel_names(),
                bits_per_number=arm.bits_per_number(),
                fidelity=fidelity.get(arm.name),
                needles=needles.get(arm.name, ()),
                json_items=json_items.get(arm.name, ()),
                speed=speed.get(arm.name, ()),
                memory=_memory(study, arm),
                broken=study.broken.get(arm.name),
            )
        )
    judged = [arm for arm in found if arm.role == "candidate"]
    return [
        *found[:2],
        *(arm.model_copy(update={"verdict": judge(arm, found[0], study.options.margins)}) for arm in judged),
    ]


def _memory(study: _Study, arm: Arm) -> tuple[Any, ...]:
    """The bytes counted; the growth measured stands with the longest context."""
    weighed = study.speed.memory(arm)
    grown = {"rss_growth_bytes": study.grown.get(arm.name)}
    return (*weighed[:-1], *(memory.model_copy(update=grown) for memory in weighed[-1:]))


def _scope(study: _Study) -> Scope:
    budget = study.options.budget
    return Scope(
        budget=budget.name,
        documents=len(study.passages.passages),
        document_tokens=budget.document_tokens,
        first_scored=FIRST_SCORED,
        clusters="documents" if study.passages.whole_documents else "passages",
        needle_lengths=budget.needle_lengths,
        needles_per_haystack=budget.needles,
        needle_seeds=budget.needle_seeds,
        json_prompts=budget.json_prompts,
        speed_contexts=budget.speed_contexts,
    )


def _provenance(study: _Study, command: str, duration_seconds: float) -> Provenance:
    options, loaded = study.options, study.loaded
    return Provenance(
        kvarto=__version__,
        commit=machine.commit(),
        command=command,
        model=loaded.name,
        model_identity=loaded.identity,
        dtype=study.baseline.name,
        text=options.text,
        text_sha256=fingerprint(study.documents),
        seed=options.seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_seconds=round(duration_seconds, 1),
        cpu=machine.cpu_name(),
        cores=machine.cores(),
        threads=torch.get_num_threads(),
        system=machine.system_name(),
        versions=machine.library_versions(),
    )
