"""The options of `kvarto diagnose`. Nothing here is slow to import, and nothing needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    config: Annotated[
        str | None,
        typer.Option(
            help="The model as `kvarto plan` takes it, such as its config.json: in place of --weights, --kv-token and --head-dim."
        ),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(
            min=8, max=1024, help="D of the model, which metadata are divided by. Default: the config's, or 128."
        ),
    ] = None,
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
    from kvarto.diagnose.command import DiagnoseOptions, run

    options = DiagnoseOptions(
        sources=sources, seconds=seconds, every_seconds=every, save=save, model=model, weights=weights, kv_token=kv_token, config=config,
        head_dim=head_dim, headers=header or (), timeout_seconds=timeout,
    )  # fmt: skip
    raise typer.Exit(run(options, as_json_=as_json_, as_markdown=as_markdown))
