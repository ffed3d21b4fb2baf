"""The options of `kvarto calibrate`. Nothing here is slow to import."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvarto.jit import require
from kvarto.models.catalog import DEFAULT_MODEL

_DEFAULT = "model"


class _ModelOrCommand(TyperGroup):
    """`kvarto calibrate MODEL ...` is `kvarto calibrate model MODEL ...`: the first word, if it is no command, is a model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


calibrate_app = typer.Typer(
    cls=_ModelOrCommand, no_args_is_help=True,
    help="Statistics of a model's keys and values, FP8 scales, and a policy for a budget of bits. Begin with: kvarto calibrate MODEL -o model.record",
)  # fmt: skip


@calibrate_app.command(_DEFAULT)
def model(
    model: Annotated[
        str, typer.Argument(help="A name from `kvarto models`, a local folder, or a hub id.")
    ] = DEFAULT_MODEL,
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The record, or with --budget-bits or --format the policy (.json), to write."),
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(help="builtin, handbook, perl, a file or a folder; may be given several times. Default: builtin."),
    ] = None,
    budget_bits: Annotated[
        float | None, typer.Option(help="Make a policy with at most so many bits a cached number, metadata included.")
    ] = None,
    one_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Make a policy of this one format, with the constants that it needs: kvquant3, int8/kvquant4 ...",
        ),
    ] = None,
    codecs: Annotated[str, typer.Option(help="What a policy may use. Default: int2,int3,int4,int8.")] = "",
    record: Annotated[
        Path | None,
        typer.Option(
            help="A record of the model: noted in a policy for a budget, taken for one of a format, which else makes its own."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many to look at. Default: 16,384 for a record; for a policy 4,096, and 4,096 held out."
        ),
    ] = None,
    window_tokens: Annotated[int, typer.Option(help="Tokens that a record's sequences have.")] = 2048,
    fisher_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Record squared gradients of so many tokens too: slower, and far more memory. Default: 0; for --format 2,048.",
        ),
    ] = None,
    little_text: Annotated[bool, typer.Option("--little-text", help="Take fewer than 2,048 tokens too.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0 ...")] = "cpu",
) -> None:
    """Look at a model's keys and values on real text: write a record of them, or a policy for a budget of bits."""
    _require_engine()
    from kvarto.calibrate.command import CalibrateOptions, calibrate_command

    chosen: Sequence[str] = text or ["builtin"]
    calibrate_command(
        CalibrateOptions(
            model=model, text=chosen, out=out, tokens=tokens, window_tokens=window_tokens, fisher_tokens=fisher_tokens,
            little_text=little_text, budget_bits=budget_bits, format=one_format, record=record,
            codecs=[name.strip() for name in codecs.split(",") if name.strip()], threads=threads, device=device,
        )
    )  # fmt: skip


@calibrate_app.command("export-scales")
def export_scales(
    record: Annotated[Path, typer.Argument(help="What `kvarto calibrate MODEL -o RECORD` wrote.")],
    checkpoint: Annotated[
        Path, typer.Argument(help="A Hugging Face folder of that model, which gets the scales. Use a copy.")
    ],
    per_head: Annotated[
        bool, typer.Option("--per-head", help="A scale for each KV head instead of each layer.")
    ] = False,
) -> None:
    """Write FP8 scales of keys and values into a checkpoint, as vLLM reads them (compressed-tensors)."""
    _require_engine()
    from kvarto.calibrate.command import export_command

    export_command(record, checkpoint, "head" if per_head else "tensor")


@calibrate_app.command("import-scales")
def import_scales(
    source: Annotated[Path, typer.Argument(help="A record, or a checkpoint with k_scale and v_scale.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The policy (.json) to write: fp8 with these scales.")],
    per_head: Annotated[bool, typer.Option("--per-head", help="Of a record: a scale for each KV head.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Take 1.0 for layers that lack scales, with a warning.")
    ] = False,
) -> None:
    """Make an FP8 policy of the scales of a record or a checkpoint."""
    _require_engine()
    from kvarto.calibrate.command import import_command

    import_command(source, out, "head" if per_head else "tensor", partial=partial)


def _require_engine() -> None:
    # Before torch is loaded: its threads should not spin while they wait for each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for package in ("torch", "transformers", "safetensors"):
        require(package)
