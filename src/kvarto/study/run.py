"""The whole job: prepare, run the steps of every stage, conclude.

A step that a format breaks ends that arm alone. On KeyboardInterrupt the step that was running is dropped, and the rest of what was done is
judged and returned, marked `interrupted`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from transformers.utils import logging as transformers_logging

from kvarto.errors import KvartoError
from kvarto.formats import Policy, parse_policy
from kvarto.models.load import LoadedModel
from kvarto.progress import Progress, Silent
from kvarto.study.conclude import conclude
from kvarto.study.memory import Order, measure_growth
from kvarto.study.options import StudyOptions
from kvarto.study.prepare import Study, prepare
from kvarto.study.result import StudyResult
from kvarto.study.speed import layer_specs
from kvarto.study.stage import Step

_MEMORY_COST_TOKENS = 600


def run_study(
    options: StudyOptions, progress: Progress | None = None, *, loaded: LoadedModel | None = None, command: str = ""
) -> StudyResult:
    """Measure and judge. `loaded` is a model that is already there; `command` is how a user would repeat the run.

    Raises a KvartoError for a request that cannot be met, before any long work.
    """
    progress = progress or Silent()
    begun = time.perf_counter()
    with _settings(options), torch.inference_mode():
        study = prepare(options, loaded, progress)
        study.seconds["prepare"] = time.perf_counter() - begun
        try:
            _run(study, progress)
        except KeyboardInterrupt:
            study.interrupted = True
        return conclude(study, command, time.perf_counter() - begun)


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


def _run(study: Study, progress: Progress) -> None:
    stages = (study.fidelity, study.needles, study.json, study.speed)
    steps = [step for stage in stages for step in stage.steps()]
    if study.budget.speed_contexts:
        steps.append(_memory_step(study))
    progress.plan(sum(step.cost_tokens for step in steps))
    for step in steps:
        progress.begin(step.stage, step.label)
        _run_step(study, step)
        progress.done(step.cost_tokens)


def _run_step(study: Study, step: Step) -> None:
    arm, begun = step.arm, time.perf_counter()
    if arm is not None and arm.name in study.broken:
        return
    try:
        step.run()
    except KvartoError as error:
        if arm is None or arm is study.baseline:
            raise
        study.broken[arm.name] = f"{step.stage} ({step.label}): {error}"
    study.seconds[step.stage] = study.seconds.get(step.stage, 0.0) + time.perf_counter() - begun


def _memory_step(study: Study) -> Step:
    """Fresh processes only know formats by name: an arm whose format is no registered one is left out."""
    named = [arm for arm in study.arms if arm.policy is None or _has_name(arm.policy)]
    tokens = max(study.budget.speed_contexts)

    def run() -> None:
        model = study.loaded.model
        formats = tuple(None if arm.policy is None else _text(arm.policy) for arm in named)
        order = Order(
            study.loaded.folder, tuple(layer_specs(model)), str(model.dtype).removeprefix("torch."), tokens, formats
        )
        study.grown = dict(zip((arm.name for arm in named), measure_growth(order), strict=True))

    return Step("memory", f"{tokens} tokens in fresh processes", _MEMORY_COST_TOKENS * (len(named) + 3), run)


def _has_name(policy: Policy) -> bool:
    try:
        return parse_policy(_text(policy)) == policy
    except KvartoError:
        return False


def _text(policy: Policy) -> str:
    """What another process reads as this policy."""
    return policy.origin or str(policy)
