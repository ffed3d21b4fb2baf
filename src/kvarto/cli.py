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
from kvarto.jit import available
from kvarto.layout import PAGE_TOKENS, Side

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
    for heading, justify in (("name", "left"), ("K bits", "right"), ("V bits", "right"), ("readers", "left"), ("source", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(row["name"], f"{row['k_bits']:.2f}", f"{row['v_bits']:.2f}", ", ".join(row["readers"]), row["source"])
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


if __name__ == "__main__":
    main()
