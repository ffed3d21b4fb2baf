"""From what the stages measured to a result with verdicts, provenance and a recommendation."""

from __future__ import annotations

from datetime import UTC, datetime

import torch

from kvarto import __version__
from kvarto.models.texts import fingerprint
from kvarto.study import machine
from kvarto.study.arms import Arm
from kvarto.study.fidelity import FIRST_SCORED
from kvarto.study.prepare import Study
from kvarto.study.recommend import recommend
from kvarto.study.result import ArmResult, Memory, Provenance, Scope, StudyResult
from kvarto.study.verdict import judge


def conclude(study: Study, command: str, duration_seconds: float) -> StudyResult:
    """Judge what was done, whole or not."""
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


def _arm_results(study: Study) -> list[ArmResult]:
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


def _memory(study: Study, arm: Arm) -> tuple[Memory, ...]:
    """The bytes counted; the growth measured stands with the longest context."""
    weighed = study.speed.memory(arm)
    grown = {"rss_growth_bytes": study.grown.get(arm.name)}
    return (*weighed[:-1], *(memory.model_copy(update=grown) for memory in weighed[-1:]))


def _scope(study: Study) -> Scope:
    budget = study.budget
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


def _provenance(study: Study, command: str, duration_seconds: float) -> Provenance:
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
