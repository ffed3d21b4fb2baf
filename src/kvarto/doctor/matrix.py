"""Which engine supports which KV format with which backend, GPU and kind of model: cells of matrix.toml, each with its source, version and age."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from kvarto.errors import IntegrityError

OLD_DAYS = 180
"""Engines change every few weeks; a cell that nobody looked at for half a year is a hint."""
Strings = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


class Cell(BaseModel):
    """What one source says.

    An empty list of backends or GPUs means any. `lacks`: kinds of models that it does not hold for (sinks, sliding, mla, hybrid). `head_dims`: if not
    empty, the only ones. `read`: when somebody last looked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    formats: Strings
    support: Literal["yes", "caution", "no"]
    backends: Strings = ()
    gpus: Strings = ()
    kinds: Strings = ()
    lacks: Strings = ()
    head_dims: tuple[int, ...] = ()
    note: str = ""
    source: str
    version: str
    read: date


class Matrix(BaseModel):
    """The file. `gpus`: what GPUs are called, and their architecture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: dict[str, str]
    cells: tuple[Cell, ...]

    def architecture(self, gpu: str) -> str | None:
        """sm90 of "NVIDIA H100 80GB"; None if the name is unknown."""
        text = gpu.strip().upper().replace("-", " ")
        if text.lower() in set(self.gpus.values()):
            return text.lower()
        found = [name for name in self.gpus if name.upper() in text]
        return self.gpus[max(found, key=len)] if found else None


@dataclass(frozen=True)
class Question:
    """Of one engine and format. None: not known, which excludes no cell but is told. `kinds`: of the model, such as sinks, sliding, mla, hybrid."""

    engine: str
    format: str
    backend: str | None
    architecture: str | None
    kinds: frozenset[str]
    head_dim: int | None


@lru_cache(maxsize=1)
def load() -> Matrix:
    """The matrix that comes with this version. Raises IntegrityError if the file is damaged."""
    try:
        return Matrix.model_validate(tomllib.loads(files("kvarto.doctor").joinpath("matrix.toml").read_text()))
    except (ValidationError, tomllib.TOMLDecodeError, OSError) as error:
        line = " ".join(str(error).split())
        raise IntegrityError(f"kvarto/doctor/matrix.toml is damaged ({line[:200]}); install kvarto again") from error


def cells_for(question: Question, cells: Sequence[Cell]) -> list[Cell]:
    """Those that speak of it, the gravest first: a "no" or a caution for this model, GPU or backend, then what holds in general."""
    found = [cell for cell in cells if _speaks(cell, question)]
    order = {"no": 0, "caution": 1, "yes": 2}
    return sorted(found, key=lambda cell: (order[cell.support], -cell.read.toordinal()))


def _speaks(cell: Cell, question: Question) -> bool:
    return (
        cell.engine == question.engine
        and question.format in cell.formats
        and (not cell.backends or question.backend is None or question.backend.upper() in cell.backends)
        and (not cell.gpus or question.architecture is None or question.architecture in cell.gpus)
        and (not cell.kinds or bool(question.kinds.intersection(cell.kinds)))
    )


def is_certain(cell: Cell, question: Question) -> bool:
    """Whether all is known that the cell depends on."""
    return (not cell.backends or question.backend is not None) and (not cell.gpus or question.architecture is not None)


def excluded(cell: Cell, question: Question) -> str:
    """Why a cell that says yes does not hold for this model, or ""."""
    if common := question.kinds.intersection(cell.lacks):
        return f"not for models with {', '.join(sorted(common))}"
    if cell.head_dims and question.head_dim is not None and question.head_dim not in cell.head_dims:
        return f"heads of {', '.join(map(str, cell.head_dims))} only, and the model's have {question.head_dim}"
    return ""
