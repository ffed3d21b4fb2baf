"""The options of `kvarto doctor`. Nothing here is slow to import, and nothing needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvarto.diagnose.scrape import base_of, is_url, read_headers
from kvarto.doctor.check import Check, Outcome, Status, overall
from kvarto.doctor.checks import ORDER, registry
from kvarto.doctor.report import as_json, markdown, show
from kvarto.doctor.rollout import Arm, Rollout
from kvarto.errors import KvartoError, UsageError


def doctor_command(
    candidate: Annotated[
        str,
        typer.Argument(
            help="The engine that is to go live, http://HOST:PORT, or a saved metrics page.", metavar="URL|FILE"
        ),
    ],
    kv: Annotated[str | None, typer.Option(help="The KV format that should serve, as the engine names it.")] = None,
    baseline: Annotated[str | None, typer.Option(help="The same engine and model in 16 bits.")] = None,
    control: Annotated[str | None, typer.Option(help="A second baseline, of the canary's share and age.")] = None,
    before: Annotated[
        str | None,
        typer.Option(help="The candidate before the format: an address or a saved page. Default: the baseline."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The model's folder: its scales are counted, its shape is looked up.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Such as H100, 'RTX 4090', sm89 or cpu.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="The attention backend, as the engine names it, such as FLASH_ATTN.")
    ] = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="study.json of `kvarto study`; may be given several times.")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(help="Address of the Prometheus that should scrape the engine.")
    ] = None,
    gateway: Annotated[str | None, typer.Option(help="Address that routes requests, for the off switch.")] = None,
    off_header: Annotated[str | None, typer.Option(help="'NAME: VALUE' that takes a request off the format.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model, where an engine serves several.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="'NAME: VALUE' to send, such as a key; may be given several times.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to wait for metrics and settings.")] = 5.0,
    answer_timeout: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds to wait for a generated token.")
    ] = 60.0,
    send: Annotated[
        bool,
        typer.Option(
            "--requests/--no-requests", help="Send requests of one token, for the fallback and the off switch."
        ),
    ] = True,
    only: Annotated[list[str] | None, typer.Option(help="This check only; may be given several times.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="One object for programs, and nothing else.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="For a pull request.")] = False,
) -> None:
    """Is a server with a quantized KV cache ready to go live? Every point of the checklist as a check that looks.

    Exit codes: 0 ready (warnings are shown), 1 a check failed, 3 a person must be asked.
    """
    sent = read_headers(header or ())

    def arm(role: str, source: str | None) -> Arm | None:
        return None if source is None else Arm(role, _source(role, source), sent, timeout, model)

    rollout = Rollout(
        candidate=Arm("candidate", _source("candidate", candidate), sent, timeout, model),
        baseline=arm("baseline", baseline),
        control=arm("control", control),
        before=arm("before", before),
        wanted=kv,
        checkpoint=checkpoint,
        gpu=gpu,
        backend=backend,
        results=results or (),
        prometheus=None if prometheus is None else base_of(prometheus),
        gateway=None if gateway is None else base_of(gateway),
        off_header=next(iter(read_headers([off_header]).items()), None) if off_header else None,
        may_send=send,
        answer_seconds=answer_timeout,
    )
    outcomes = examine(rollout, only or ())
    if as_json_:
        typer.echo(json.dumps(as_json(rollout, outcomes), indent=2))
    elif as_markdown:
        typer.echo(markdown(rollout, outcomes), nl=False)
    else:
        show(rollout, outcomes, Console(highlight=False))
    raise typer.Exit(overall(outcomes))


def examine(rollout: Rollout, only: list[str] | tuple[str, ...] = ()) -> list[Outcome]:
    """Run the checks, all or those that are named. Raises UnknownName."""
    chosen = [registry[name] for name in only] or sorted(registry.values(), key=_place)
    return [outcome for check in chosen for outcome in _outcomes(check, rollout)]


def _outcomes(check: Check, rollout: Rollout) -> list[Outcome]:
    """A check that raises has failed; the others go on."""
    try:
        return list(check.run(rollout))
    except KvartoError as error:
        return [Outcome(check.name, Status.FAIL, str(error))]


def _place(check: Check) -> tuple[int, str]:
    return (ORDER.index(check.name) if check.name in ORDER else len(ORDER), check.name)


def _source(role: str, text: str) -> str:
    """An address in full, or a file that is there. Raises UsageError."""
    if is_url(text):
        return text if "://" in text else f"http://{text}"
    if not Path(text).exists():
        raise UsageError(role, "http://HOST:PORT, or a file with a metrics page", repr(text))
    return text
