"""Which kinds of harm were looked for? Reads studies of ours (study.json); what none of them covers is for a person to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.checks.format import is_plain
from kvarto.doctor.rollout import Rollout
from kvarto.errors import UsageError
from kvarto.study.result import ArmResult, StudyResult

_NAME = "evaluation"
_MOST_BYTES = 64 * 2**20
COVERED: Mapping[str, Callable[[ArmResult], bool]] = {
    "fidelity on text": lambda arm: arm.fidelity is not None,
    "long-context retrieval": lambda arm: bool(arm.needles),
    "structured output": lambda arm: bool(arm.json_items),
}
OTHERS = ("reasoning", "multi-turn", "tool calls")
"""What breaks too and no study of ours looks at: reasoning and long answers first (facts of SGLang, vLLM and others, docs/diagnosis.md)."""
_STATUS = {"pass": Status.PASS, "fail": Status.FAIL, "inconclusive": Status.WARN}


def evaluation(rollout: Rollout) -> Iterator[Outcome]:
    """The verdict of each file, then each category."""
    engine, name = rollout.candidate.engine, rollout.format
    if engine is not None and name is not None and is_plain(engine, name):
        yield Outcome(_NAME, Status.PASS, f"{name} is the baseline itself")
        return
    arms: list[tuple[Path, ArmResult]] = []
    for path in rollout.results:
        try:
            study = read_study(path)
        except UsageError as error:
            yield Outcome(_NAME, Status.FAIL, str(error), "give study.json of `kvarto study`")
            continue
        found = [arm for arm in study.candidates if name is None or arm.name == name]
        if not found:
            had = ", ".join(arm.name for arm in study.candidates) or "none"
            yield Outcome(
                _NAME,
                Status.FAIL,
                f"{path} has nothing on {name}, only on {had}",
                f"kvarto study MODEL --formats {name}",
            )
        arms += [(path, arm) for arm in found]
    for path, arm in arms:
        yield _verdict(path, arm)
    for category, covers in COVERED.items():
        yield _category(category, [path for path, arm in arms if covers(arm)])
    for category in OTHERS:
        yield Outcome(
            f"{_NAME}: {category}",
            Status.ASK,
            "no result file of ours covers it",
            "was it evaluated, against the baseline, at full context?",
        )


def _verdict(path: Path, arm: ArmResult) -> Outcome:
    if arm.verdict is None:
        return Outcome(_NAME, Status.WARN, f"{path}: {arm.name} was not judged", "let the study end")
    status = _STATUS[arm.verdict.status]
    remedy = "" if status is Status.PASS else "a longer study (--full), or another format"
    return Outcome(_NAME, status, f"{path}: {arm.name} {arm.verdict.status}: {arm.verdict.reason}", remedy)


def _category(category: str, covered: list[Path]) -> Outcome:
    name = f"{_NAME}: {category}"
    if covered:
        return Outcome(name, Status.PASS, f"in {', '.join(map(str, covered))}")
    return Outcome(
        name, Status.ASK, "no result file covers it", "kvarto study MODEL --formats FORMAT, then --results study.json"
    )


def read_study(path: Path) -> StudyResult:
    """Raises UsageError for what is no study."""
    path = path / "study.json" if path.is_dir() else path
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(str(path), "a study.json", f"a file of more than {_MOST_BYTES // 2**20} MiB")
        return StudyResult.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise UsageError(str(path), "a study.json", error.strerror or "a file that cannot be read") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(str(path), "a study.json", f"{where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(str(path), "a study.json", "something that is no JSON") from error


CHECKS = (Check(_NAME, "which kinds of harm were looked for?", evaluation),)
