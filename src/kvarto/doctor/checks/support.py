"""Does the engine support this format with this model, backend and GPU? By the support matrix, whose cells are shown with source, version and age."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvarto.diagnose.signals import Setting
from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.checkpoint import read_config
from kvarto.doctor.checks.format import is_plain, not_told
from kvarto.doctor.matrix import OLD_DAYS, Cell, Question, cells_for, excluded, is_certain, load
from kvarto.doctor.rollout import Rollout
from kvarto.errors import KvartoError

_NAME = "support"
_STATUS = {"yes": Status.PASS, "caution": Status.WARN, "no": Status.FAIL}


def support(rollout: Rollout) -> Iterator[Outcome]:
    """Every cell that speaks of it."""
    engine, name = rollout.candidate.engine, rollout.format
    if engine is None or name is None:
        yield not_told(_NAME, engine)
        return
    if is_plain(engine, name):
        yield Outcome(_NAME, Status.PASS, f"{name} needs no support")
        return
    question, unknown = _question(rollout, engine.stores_as, name)
    for part in _parts(engine.name, name):
        yield from _answer(Question(**{**vars(question), "format": part}), unknown, rollout)


def _answer(question: Question, unknown: list[str], rollout: Rollout) -> Iterator[Outcome]:
    """A no that holds for certain, cautions, then what allows it; and if that hangs on what is not known, the question for it."""
    said = f"{question.engine} with {question.format}"
    cells = cells_for(question, load().cells)
    sure = [cell for cell in cells if is_certain(cell, question)]
    for cell in sure:
        if cell.support != "yes":
            remedy = "choose another format, backend or GPU" if cell.support == "no" else ""
            yield Outcome(_NAME, _STATUS[cell.support], _evidence(cell, said, rollout), remedy)
    allowed = [cell for cell in sure if cell.support == "yes"]
    fitting = [cell for cell in allowed if not excluded(cell, question)]
    if fitting:
        yield Outcome(_NAME, Status.PASS, _evidence(fitting[0], said, rollout))
    elif allowed:
        why = excluded(allowed[0], question)
        yield Outcome(
            _NAME, Status.FAIL, f"{why}: {_evidence(allowed[0], said, rollout)}", "choose another format or backend"
        )
    elif open_ones := [cell for cell in cells if cell not in sure]:
        words = "; ".join(f"{cell.support} for {_where(cell)}" for cell in open_ones)
        yield Outcome(_NAME, Status.ASK, f"{said}: {words}", f"give {' and '.join(unknown)}")
    elif not sure:
        where = ", ".join(filter(None, (question.backend, question.architecture)))
        words = f"no cell of the matrix speaks of {said}" + (f" on {where}" if where else "")
        yield Outcome(_NAME, Status.ASK, words, "look into the engine's documentation")
    if cells and (age := min((rollout.today - cell.read).days for cell in cells)) > OLD_DAYS:
        words = f"the newest of these cells was read {age} days ago"
        yield Outcome(_NAME, Status.WARN, words, "look into the engine's documentation")


def _evidence(cell: Cell, said: str, rollout: Rollout) -> str:
    note = f"; {cell.note}" if cell.note else ""
    age, runs = max(0, (rollout.today - cell.read).days), rollout.candidate.settings.get(Setting.VERSION)
    other = f" (this engine is {runs.value})" if runs is not None and runs.value != cell.version else ""
    told = f"{cell.source}; version {cell.version}{other}; read {age} days ago"
    return f"{said}: {cell.support} for {_where(cell)}{note} [{told}]"


def _where(cell: Cell) -> str:
    parts = (" or ".join(each) for each in (cell.backends, cell.gpus, cell.kinds) if each)
    return " on ".join(parts) or "any backend and GPU"


def _question(rollout: Rollout, engine: str, name: str) -> tuple[Question, list[str]]:
    """What is known, and the options that would tell the rest."""
    unknown: list[str] = []
    told = rollout.candidate.settings.get(Setting.BACKEND)
    backend = rollout.backend or (None if told is None or engine == "kvarto" else told.value)
    architecture = None if rollout.gpu is None else load().architecture(rollout.gpu)
    if backend is None and architecture == "cpu" and engine == "vllm":
        backend = "CPU_ATTN"  # it has no other there
    if backend is None and engine in ("vllm", "sglang"):
        unknown.append("--backend")
    if architecture is None:
        unknown.append("--gpu")
    kinds, dim = frozenset[str](), None
    try:
        if rollout.checkpoint is None:
            unknown.append("--checkpoint")
        else:
            kinds, dim = kinds_of(read_config(rollout.checkpoint))
    except KvartoError:
        unknown.append("--checkpoint")
    return Question(engine, name, backend, architecture, kinds, dim), unknown


def _parts(engine: str, name: str) -> list[str]:
    """The codecs of a format of ours; other engines' names are whole."""
    return sorted(set(name.split("+")[0].split("/"))) if engine == "kvarto" else [name.lower()]


def kinds_of(config: dict[str, Any]) -> tuple[frozenset[str], int | None]:
    """What of a model limits formats, and D. `sliding` also where only some layers slide."""
    types = set(config.get("layer_types") or ())
    kinds = set()
    if config.get("kv_lora_rank"):
        kinds.add("mla")
    if "sliding_attention" in types or (
        not types and config.get("sliding_window") and config.get("use_sliding_window", True)
    ):
        kinds.add("sliding")
    if types - {"full_attention", "sliding_attention", "chunked_attention"}:
        kinds.add("hybrid")
    if config.get("model_type") in ("gpt_oss",):
        kinds.add("sinks")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    dim = config.get("head_dim") or (
        hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads else None
    )
    return frozenset(kinds), dim if isinstance(dim, int) else None


CHECKS = (Check(_NAME, "does the engine support this format here?", support),)
