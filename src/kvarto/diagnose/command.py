"""What `kvarto diagnose` does, apart from its options: from pages to all that is said."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kvarto.diagnose.advice import Facts, advise
from kvarto.diagnose.decide import Cause, diagnose
from kvarto.diagnose.formats import PLAIN_BITS, changes, known_format, page_tokens, stored_bits
from kvarto.diagnose.measure import Model, mean_prompt_tokens
from kvarto.diagnose.report import Report, as_json, markdown, show
from kvarto.diagnose.scrape import Live, Watched, get_json, is_url, read_headers, read_pages
from kvarto.diagnose.served import Served, by_config, by_head_dim
from kvarto.diagnose.settings import Ask, Told, settings_of
from kvarto.diagnose.signals import Setting
from kvarto.diagnose.window import make_window
from kvarto.errors import UsageError
from kvarto.plan.gpu import parse_size

_INCONCLUSIVE = 3
_HEAD_DIM = 128


@dataclass(frozen=True)
class DiagnoseOptions:
    """The options of the command line, as they were given."""

    sources: Sequence[str]
    seconds: float = 30.0
    every_seconds: float = 2.0
    save: Path | None = None
    model: str | None = None
    weights: str | None = None
    kv_token: str | None = None
    config: str | None = None
    head_dim: int | None = None
    headers: Sequence[str] = ()
    timeout_seconds: float = 5.0


def run(options: DiagnoseOptions, *, as_json_: bool, as_markdown: bool) -> int:
    """Look, show what was found, and return the exit code."""
    said = Model(_bytes("--weights", options.weights), _bytes("--kv-token", options.kv_token))
    served = _served(options.config, options.head_dim)
    watched, ask = gather(options)
    report = make_report(watched, ask, options.model, said, served)
    if as_json_:
        typer.echo(json.dumps(as_json(report), indent=2, allow_nan=False))
    elif as_markdown:
        typer.echo(markdown(report), nl=False)
    else:
        show(report, Console(highlight=False))
    return _INCONCLUSIVE if report.diagnosis.cause is Cause.UNKNOWN else 0


def _served(config: str | None, head_dim: int | None) -> Served:
    if head_dim is not None and head_dim % 8:
        raise UsageError("--head-dim", "a multiple of 8", head_dim)
    if config is None:
        return by_head_dim(head_dim or _HEAD_DIM)
    if head_dim is not None:
        raise UsageError("--head-dim", "either it or --config", "both")
    return by_config(config)


def make_report(watched: Watched, ask: Ask | None, name: str | None, said: Model, served: Served) -> Report:
    """From pages to all that is said; `name`: of the model, where the page is of several. Raises UsageError."""
    window = make_window(watched.pages, name, watched.notes)
    settings = settings_of(window, ask)
    told = settings.get(Setting.KV_DTYPE)
    present = None if told is None else known_format(window.engine, told.value, page_tokens(window))
    weights = said.weights_bytes or _number(settings, Setting.WEIGHTS_BYTES)
    found = diagnose(window, served.complete(replace(said, weights_bytes=weights), window, present))
    by_name = None if present is None else stored_bits(present, served.model)
    bits = _number(settings, Setting.KV_BITS) or by_name or PLAIN_BITS
    pool = _number(settings, Setting.POOL_TOKENS)
    listed = [] if found.cause is Cause.NOT_KV else changes(window, present, bits, served.model, found.kv_share, pool)
    prefixes, chunks = (
        settings[each].on if each in settings else None for each in (Setting.PREFIX_CACHING, Setting.CHUNKED_PREFILL)
    )
    facts = Facts(window, found, prefixes, chunks, bits, served.signals(mean_prompt_tokens(window)))
    return Report(window, found, settings, listed, advise(facts), served.name, served.head_dim)


def _number(settings: Mapping[Setting, Told], setting: Setting) -> float | None:
    """What the engine tells; None if it does not, or not a number above zero."""
    told = settings.get(setting)
    try:
        value = float(told.value) if told is not None else 0.0
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def gather(options: DiagnoseOptions) -> tuple[Watched, Ask | None]:
    """Pages of one address or of files, and how to ask the address for more. Raises UsageError or Unreachable."""
    sources, headers, timeout = options.sources, read_headers(options.headers), options.timeout_seconds
    urls = [source for source in sources if is_url(source)]
    if urls and len(sources) > 1:
        raise UsageError("URL|FILE", "one address, or files", ", ".join(sources[:3]), "diagnose engines one by one")
    if not urls:
        return Watched(read_pages([Path(source) for source in sources]), []), None
    live = Live(urls[0], headers, timeout)
    if options.save is not None:
        _make_folder(options.save)
    console = Console(stderr=True)
    with console.status("watching ...") as status:
        watched = live.watch(
            options.seconds, options.every_seconds, save=options.save,
            told=lambda count, left: status.update(f"watching {live.base}: {count} scrapes, {left:.0f} s left"),
        )  # fmt: skip

    def ask(path: str) -> Any:
        return get_json(live.base + path, headers=headers, seconds=timeout)

    return watched, ask


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("--save", "a folder that can be written to", f"{folder} ({error.strerror})") from error


def _bytes(name: str, text: str | None) -> float | None:
    return None if text is None else float(parse_size(text, name))
