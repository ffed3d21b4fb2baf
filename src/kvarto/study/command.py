"""`kvarto study` behind its options: run, show, write, and say how it ended."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rich.console import Console

from kvarto.models.catalog import DEFAULT_MODEL
from kvarto.progress import progress_for
from kvarto.study.files import default_folder, remove_if_empty, require_writable, write_files
from kvarto.study.options import FULL, StudyOptions
from kvarto.study.render import render
from kvarto.study.result import Margins, StudyResult
from kvarto.study.run import run_study

INTERRUPTED = 130
MARGIN_OPTIONS = {"--max-kl": "kl_nats", "--max-ppl-ratio": "perplexity_ratio", "--max-needle-loss": "needle_loss"}
_EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}
_NARROWEST_COLUMNS = 132


def study_command(options: StudyOptions, *, out: Path | None, as_json: bool) -> int:
    """Run a study and return the exit code. `as_json`: only JSON on standard output, and files only where `out` says."""
    if out is None and not as_json:
        out = default_folder(options.model, datetime.now())
    with contextlib.ExitStack() as leaving:
        if out is not None:
            leaving.callback(remove_if_empty, out)
            require_writable(out)
        progress = progress_for(Console(stderr=True))
        try:
            with progress, _terminable():
                result = run_study(options, progress, command=command_line(options))
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted before anything was measured; nothing was written")
            return INTERRUPTED
        with _undisturbed():
            _show(result, as_json=as_json)
            if out is not None:
                _tell_files(write_files(result, out), result)
    return exit_code(result)


def exit_code(result: StudyResult) -> int:
    """0 pass, 1 fail, 3 inconclusive: of the only candidate, or of the recommendation among several; 130 if interrupted."""
    if result.interrupted:
        return INTERRUPTED
    only = result.candidates[0].verdict if len(result.candidates) == 1 else None
    return _EXIT_CODES[only.status if only else result.recommendation.status]


def command_line(options: StudyOptions) -> str:
    """The command that repeats a study."""
    words = ["kvarto", "study", *([options.model] if options.model != DEFAULT_MODEL else [])]
    if options.formats:
        words += ["--formats", ",".join(str(each) for each in options.formats)]
    words.append("--full" if options.budget.name == FULL.name else "--quick")
    words += ["--text", options.text, "--seed", str(options.seed)]
    if options.threads is not None:
        words += ["--threads", str(options.threads)]
    if options.kernel is not None:
        words += ["--kernel", options.kernel]
    for option, field in MARGIN_OPTIONS.items():
        if getattr(options.margins, field) != getattr(Margins(), field):
            words += [option, f"{getattr(options.margins, field):g}"]
    return shlex.join(words)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A job system's SIGTERM keeps what is done, like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep a second Ctrl-C from spoiling the report; it takes a second."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show(result: StudyResult, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(result.model_dump_json(indent=2) + "\n")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _NARROWEST_COLUMNS))
    console.print(render(result))


def _tell_files(paths: list[Path], result: StudyResult) -> None:
    console = Console(stderr=True, soft_wrap=True)
    if result.interrupted:
        console.print("interrupted: what was done is in the report, marked as such", style="yellow")
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, markup=False)
