"""The options of `kvarto diagnose`. Nothing here is slow to import, and nothing needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvarto.diagnose.advice import Facts, advise
from kvarto.diagnose.decide import Cause, diagnose
from kvarto.diagnose.formats import changes, stored_bits
from kvarto.diagnose.measure import Model
from kvarto.diagnose.report import Report, as_json, markdown, show
from kvarto.diagnose.scrape import Live, Watched, get_json, is_url, read_pages
from kvarto.diagnose.settings import Ask, Told, settings_of
from kvarto.diagnose.signals import Setting
from kvarto.diagnose.window import Window, make_window
from kvarto.errors import UsageError

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_INCONCLUSIVE = 3


def diagnose_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="The engine's address, such as http://host:8000, or saved metrics pages or a folder of them.",
            metavar="URL|FILE...",
        ),
    ],
    seconds: Annotated[
        float, typer.Option(min=0, max=86400, help="How long to watch an address; 0 takes one scrape.")
    ] = 30.0,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between scrapes.")] = 2.0,
    save: Annotated[Path | None, typer.Option(help="A folder that gets the pages, to be read again as files.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model, where the page is of several.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Bytes of weights that a step reads, such as 16GB: needed to tell whether reading KV limits decoding."
        ),
    ] = None,
    kv_token: Annotated[str | None, typer.Option(help="Bytes of keys and values of one token, such as 128KiB.")] = None,
    head_dim: Annotated[
        int, typer.Option(min=8, max=1024, help="D of the model, which metadata are divided by.")
    ] = 128,
    header: Annotated[
        list[str] | None, typer.Option(help="'NAME: VALUE' to send, such as a key; may be given several times.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to wait for an answer.")] = 5.0,
    as_json_: Annotated[bool, typer.Option("--json", help="One object for programs, and nothing else.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="For an issue or a pull request.")] = False,
) -> None:
    """What limits a server: memory for KV, reading KV, computing prompts, its queue, or nothing that KV has to do with.

    Reads the metrics of vLLM, SGLang, TensorRT-LLM, llama.cpp or kvarto over a window, best under the load that matters. Exit codes: 0 decided,
    3 inconclusive.
    """
    said = Model(_bytes("--weights", weights), _bytes("--kv-token", kv_token))
    if head_dim % 8:
        raise UsageError("--head-dim", "a multiple of 8", head_dim)
    watched, ask = gather(sources, seconds, every, save, read_headers(header or ()), timeout)
    report = make_report(watched, ask, model, said, head_dim)
    if as_json_:
        typer.echo(json.dumps(as_json(report), indent=2))
    elif as_markdown:
        typer.echo(markdown(report), nl=False)
    else:
        show(report, Console(highlight=False))
    raise typer.Exit(_INCONCLUSIVE if report.diagnosis.cause is Cause.UNKNOWN else 0)


def make_report(watched: Watched, ask: Ask | None, model: str | None, said: Model, head_dim: int) -> Report:
    """From pages to all that is said. Raises UsageError."""
    window = make_window(watched.pages, model, watched.notes)
    settings = settings_of(window, ask)
    if said.weights_bytes is None and Setting.WEIGHTS_BYTES in settings:
        said = replace(said, weights_bytes=float(settings[Setting.WEIGHTS_BYTES].value))
    found = diagnose(window, said)
    bits = _present_bits(window, settings, head_dim)
    switches = [
        settings[each].on if each in settings else None for each in (Setting.PREFIX_CACHING, Setting.CHUNKED_PREFILL)
    ]
    facts = Facts(window, found, switches[0], switches[1], bits)
    pool = float(settings[Setting.POOL_TOKENS].value) if Setting.POOL_TOKENS in settings else None
    listed = [] if found.cause is Cause.NOT_KV else changes(window, bits, head_dim, found.kv_share, pool)
    return Report(window, found, settings, listed, advise(facts), head_dim)


def _present_bits(window: Window, settings: Mapping[Setting, Told], head_dim: int) -> float | None:
    """Of the format that serves, as the engine tells, or by its name; None if that says nothing."""
    if Setting.KV_BITS in settings:
        return float(settings[Setting.KV_BITS].value)
    present = settings.get(Setting.KV_DTYPE)
    return None if present is None else stored_bits(window.engine, present.value, head_dim)


def gather(
    sources: Sequence[str], seconds: float, every: float, save: Path | None, headers: Mapping[str, str], timeout: float
) -> tuple[Watched, Ask | None]:
    """Pages of one address or of files, and how to ask the address for more. Raises UsageError or Unreachable."""
    urls = [source for source in sources if is_url(source)]
    if urls and len(sources) > 1:
        raise UsageError("URL|FILE", "one address, or files", ", ".join(sources[:3]), "diagnose engines one by one")
    if not urls:
        return Watched(read_pages([Path(source) for source in sources]), []), None
    live = Live(urls[0], headers, timeout)
    if save is not None:
        _make_folder(save)
    console = Console(stderr=True)
    with console.status("watching ...") as status:
        watched = live.watch(
            seconds, every, save=save,
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


def read_headers(lines: Sequence[str]) -> dict[str, str]:
    """'NAME: VALUE' each. Raises UsageError, which shows no value: it may be a key."""
    found = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not value.strip() or not line.isprintable():
            raise UsageError("--header", "'NAME: VALUE'", f"{name[:20]!r} ..." if colon else "one without a colon")
        found[name.strip()] = value.strip()
    return found


def _bytes(name: str, text: str | None) -> float | None:
    """A number of bytes with a unit. Raises UsageError."""
    if text is None:
        return None
    number, unit = text.strip(), ""
    while number and number[-1].isalpha():
        number, unit = number[:-1], number[-1] + unit
    try:
        value = float(number) * _UNITS[unit.upper().removesuffix("B")]
    except (ValueError, KeyError) as error:
        raise UsageError(name, "bytes, such as 16GB or 128KiB", repr(text)) from error
    if not 0 < value < 1e18:
        raise UsageError(name, "bytes above zero", repr(text))
    return value
