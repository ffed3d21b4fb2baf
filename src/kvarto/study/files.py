"""The files of a study. Each is written under another name and renamed, so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import tempfile
from datetime import datetime
from pathlib import Path

from kvarto.errors import UsageError
from kvarto.files import write_whole
from kvarto.study.render import picture
from kvarto.study.report import html
from kvarto.study.result import StudyResult

JSON_NAME, REPORT_NAME, PICTURE_NAME = "study.json", "report.html", "study.svg"


def default_folder(model: str, now: datetime) -> Path:
    """reports/<model>-<date and time>, of a name, path or hub id."""
    name = Path(model.rstrip("/")).name or "model"
    return Path("reports") / f"{name}-{now:%Y-%m-%d-%H%M%S}"


def require_writable(folder: Path) -> None:
    """Make the folder and try it, so that an hour of work does not end at a closed door. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError("--out", "a folder that can be written to", f"{folder} ({error.strerror})") from error


def remove_if_empty(folder: Path) -> None:
    """Leave no folder behind for a study that never was."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def write_files(result: StudyResult, folder: Path) -> list[Path]:
    """study.json, report.html and study.svg (what the terminal showed)."""
    contents = {
        JSON_NAME: result.model_dump_json(indent=2) + "\n",
        REPORT_NAME: html(result),
        PICTURE_NAME: picture(result),
    }
    for name, text in contents.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in contents]
