"""`kvarto calibrate` behind its options: run, show, write."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kvarto.calibrate.collect import calibrate
from kvarto.calibrate.nuq import FISHER_TOKENS, calibrated_policy, require_calibrated
from kvarto.calibrate.policy import Made, Search, make_policy, shares
from kvarto.calibrate.record import Record
from kvarto.calibrate.scales import Per, Scales, export_scales, read_scales
from kvarto.calibrate.windows import LEAST_TOKENS
from kvarto.codecs import registry
from kvarto.errors import UsageError
from kvarto.files import require_writable
from kvarto.formats import parse_policy
from kvarto.models.load import LoadedModel, load
from kvarto.policy_file import PolicyFile, RecordEntry, write_policy_file
from kvarto.progress import Progress, progress_for

_NARROWEST_COLUMNS = 110


@dataclass(frozen=True)
class CalibrateOptions:
    """The options of the command: with `budget_bits` make a policy, of `codecs` if there are any, in which `record` is noted; with `format` a policy
    with constants of `record`, or of one made beside it; else a record."""

    model: str
    text: Sequence[str]
    out: Path
    tokens: int | None
    window_tokens: int
    fisher_tokens: int | None
    little_text: bool
    budget_bits: float | None
    format: str | None
    codecs: Sequence[str]
    record: Path | None
    threads: int | None
    device: str

    @property
    def least_tokens(self) -> int:
        """Less is an error."""
        return 1 if self.little_text else LEAST_TOKENS


def calibrate_command(options: CalibrateOptions) -> None:
    """Make a record or a policy, and write it. Raises what `calibrate` and `make_policy` raise, before long work where that can be."""
    _check(options)
    require_writable(options.out)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    with progress_for(console) as progress:
        loaded, made = load(options.model, device=options.device, progress=progress.say), None
        record = (options.record or options.out.with_suffix(".record")) if options.format else options.out
        if options.budget_bits is not None:
            made = _policy(options, loaded, progress)
            write_policy_file(options.out, made.content)
        elif not (options.format and options.record):
            _record(options, loaded, progress).save(record)
        if options.format:
            write_policy_file(
                options.out, calibrated_policy(Record.load(record, model=loaded), options.format, noted=_noted(record))
            )
    if made is not None:
        _show_policy(made, options.out)
        return
    _show_record(Record.load(record, model=loaded), record)
    if options.format:
        Console().print(
            f"written: {options.out}, {parse_policy(str(options.out))}", highlight=False, markup=False, soft_wrap=True
        )


def _check(options: CalibrateOptions) -> None:
    """Raises UsageError for options that do not go together."""
    if options.budget_bits is not None and options.format is not None:
        raise UsageError("--format", "none with --budget-bits", options.format, "choose one of them")
    policy = options.budget_bits is not None or options.format is not None
    if policy and options.out.suffix.lower() != ".json":
        raise UsageError("--out", "a name that ends in .json, for a policy", options.out)
    if not policy and options.out.suffix.lower() in (".json", ".toml"):
        remedy = "give --budget-bits or --format for a policy"
        raise UsageError("--out", "a name for a record, such as model.record", options.out, remedy)
    if options.format is not None:
        require_calibrated(options.format)
        own = options.out.with_suffix(".record")
        if options.record is None and own.exists():
            remedy = f"take it with --record {own}, or write the policy under another name"
            raise UsageError("--record", f"a record, or a policy beside which no {own.name} lies", "none", remedy)


def _record(options: CalibrateOptions, loaded: LoadedModel, progress: Progress) -> Record:
    fisher = options.fisher_tokens if options.fisher_tokens is not None else FISHER_TOKENS if options.format else 0
    return calibrate(
        loaded, options.text, window_tokens=options.window_tokens, fisher_tokens=fisher, least_tokens=options.least_tokens,
        progress=progress, **({} if options.tokens is None else {"tokens": options.tokens}),
    )  # fmt: skip


def _noted(record: Path) -> RecordEntry:
    return RecordEntry(path=str(record), sha256=hashlib.sha256(record.read_bytes()).hexdigest())


def _policy(options: CalibrateOptions, loaded: LoadedModel, progress: Progress) -> Made:
    assert options.budget_bits is not None
    record = None
    if options.record is not None:
        Record.load(options.record, model=loaded)
        record = _noted(options.record)
    search = Search(least_tokens=options.least_tokens)
    if options.codecs:
        few = [codec for codec in options.codecs if registry[codec].bits < 8]
        search = replace(search, codecs=options.codecs, compared=few or options.codecs)
    if options.tokens is not None:
        search = replace(search, search_tokens=options.tokens, measured_tokens=options.tokens)
    return make_policy(
        loaded, options.text, budget_bits=options.budget_bits, search=search, record=record, progress=progress
    )


def export_command(record: Path, checkpoint: Path, per: Per) -> None:
    """Scales of a record into a checkpoint."""
    read = Record.load(record)
    path = export_scales(read, checkpoint, per)
    Console().print(
        f"written: {path} ({len(read.layers)} layers, per {per}) and config.json",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def import_command(source: Path, out: Path, per: Per, *, partial: bool) -> None:
    """Scales of a record or a checkpoint as a policy."""
    if source.is_dir():
        scales, provenance = read_scales(source, partial=partial), {"checkpoint": str(source)}
    else:
        record = Record.load(source)
        scales = Scales.of(record, per)
        provenance = {
            "model": record.provenance.model,
            "identity": record.provenance.identity,
            "record_sha256": record.sha256,
        }
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", out.stem).strip("-._")[:64]
    content: PolicyFile = scales.policy(name, provenance)
    write_policy_file(out, content)
    Console().print(f"written: {out}, {parse_policy(str(out))}", highlight=False, markup=False, soft_wrap=True)


def _show_record(record: Record, path: Path) -> None:
    said = record.provenance
    lines = [
        f"written: {path}, sha256 {record.sha256[:16]}",
        f"  {said.model}, {len(record.layers)} layers, {said.tokens:,} tokens of {said.documents} documents ({said.source}), "
        f"{said.sink_tokens:,} of first pages apart",
        f"  keys before RoPE: {(said.pre_rope and 'none, ' + said.pre_rope) or 'yes'}; gradients: {said.fisher_tokens:,} tokens",
    ]
    k, v = (max(float(layer.max()) for layer in record.amax(side)) for side in ("k", "v"))
    lines.append(f"  largest key {k:.4g}, largest value {v:.4g}; e4m3 ends at 448")
    Console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _show_policy(made: Made, path: Path) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _NARROWEST_COLUMNS))
    title = f"KL to the model's own cache, {made.held_out_documents} documents held out (95 % intervals)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("format", "bits", "KL nats", "interval", "top-1", "predicted"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "format" else "right")
    for name, found in sorted(made.measured.items(), key=lambda each: each[1].bits):
        predicted = made.predicted_nats.get(name)
        table.add_row(
            str(made.policy.name) if name == "policy" else name, f"{found.bits:.3f}", f"{found.kl_nats.mean:.4g}",
            f"[{found.kl_nats.low:.3g}, {found.kl_nats.high:.3g}]".replace("[", r"\["), f"{found.top1:.1%}",
            "" if predicted is None else f"{predicted:.3g}",
        )  # fmt: skip
    console.print(table)
    for side, counts in shares(made.policy).items():
        layers = ", ".join(f"{codec} in {count}" for codec, count in sorted(counts.items()))
        console.print(f"{side.upper()}: {layers} layers", highlight=False, markup=False)
    console.print(f"written: {path}", highlight=False, markup=False, soft_wrap=True)
