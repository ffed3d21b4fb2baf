"""kvarto against peers' own code, on the same keys and values and on the same model: `python benchmarks/quality.py [--quick] [--models ...]`.

keys and values   every quantizer on recorded tensors: relative errors of K and V and of attention's output, KL of attention (quality_tensors.py)
model             every cache in a model that reads real text, teacher-forced: KL of the next token against the same engine's raw cache with a 95 %
                  interval clustered by document, top-1 agreement, bits, and seconds of CPU over those of that raw cache

All read in chunks of 64 tokens, because the path decides what a test sees: peers hand the tokens of a call to attention as they are, so that a prompt
in one call meets no quantized key at all; `kl_one_call` says what that gives. What a query reads raw (its own chunk, residuals, sinks) is measured
as well, by what a cache hands out: `raw_share` of the keys that a scored position reads. Bits are of all that a cache holds of a sequence in a bf16
model (codes, scales, residuals, sinks, open pages), after the documents' length; `bits_beyond` of every further token.

transformers' caches are compared with DynamicCache in float32. llama.cpp runs the same weights to the bit (the GGUF file that the model came from,
as float32) and is compared with its own f16 cache; how far that one is from ours is the row `llama.cpp f16`.
Peers are other projects' packages as they are (peers_quality.py); who is not installed, or fails, has a row that says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvarto.errors import KvartoError, UsageError
from kvarto.files import require_writable, write_whole
from kvarto.formats import parse_policy
from kvarto.models.load import LoadedModel, load
from kvarto.models.texts import fingerprint, texts
from kvarto.progress import Bar, Lines, progress_for
from kvarto.study.fidelity import FIRST_SCORED
from kvarto.study.passages import Passage, cut_passages
from llama_engine import KINDS
from measure import Neighbours, machine
from peers_quality import CACHES, NOT_RUN, PROJECTS, TENSORS, versions
from peers_serve import gguf_of
from quality_arms import CHUNK_TOKENS, RAW, Contender, Reading, llama, numbers_per_token, others, ours, raw, score
from quality_tensors import record
from quality_tensors import rows as tensor_rows

BASELINE = Path(__file__).parent / "baselines" / "quality.json"
FORMATS = ("int8", "fp8", "int4", "int4+sink0", "kivi4", "turbo4", "int3", "turbo3", "int2", "kivi2")
WARM_TOKENS = 96
RECORDED_DOCUMENTS = 1
MODELS = {"smollm2-135m-instruct": (4, 512), "qwen2.5-coder-0.5b-instruct": (3, 512)}
"""Documents, and tokens of each."""
QUICK = (2, 192)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_all(
    contenders: Sequence[Contender],
    passages: Sequence[Passage],
    progress: Bar | Lines,
    keep: Callable[[str], None],
    *,
    one_call: bool = True,
) -> None:
    """Every document by every contender in turn; a raw cache comes before those that are compared with it. `keep` is told each that is done."""
    for contender in contenders:
        progress.begin("warm", contender.name)
        contender.attempt(contender.read, passages[0].tokens[:WARM_TOKENS], 1)
    for number, passage in enumerate(passages):
        base: dict[str, Reading] = {}
        for contender in contenders:
            progress.begin(f"document {number + 1} of {len(passages)}", contender.name)
            contender.attempt(read_document, contender, passage, base)
            if one_call and not number and contender.one_call and not contender.failed:
                read_in_one_call(contender, passage, base[RAW])
            progress.done(len(passage.tokens))
        keep(passage.name)


def read_document(contender: Contender, passage: Passage, base: dict[str, Reading]) -> None:
    """`base`: log-probabilities of raw caches on this document, to which a raw cache adds its own."""
    assert contender.read is not None
    tokens, targets = _cut(passage)
    reading = contender.read(tokens, len(targets))
    # Another engine's raw cache is compared with ours: what its own rounding hides.
    if against := base.get(contender.against or RAW):
        contender.score(passage.name, against.logits, reading, targets)
    if contender.against is None:
        base[contender.name] = Reading(reading.logits.log_softmax(-1), reading.seconds)
    elif against:
        contender.ratios.append(reading.seconds / against.seconds)


def read_in_one_call(contender: Contender, passage: Passage, base: Reading) -> None:
    """What an evaluation sees that does not mind the path. A failure here is only noted: the chunks did work."""
    tokens, targets = _cut(passage)
    alone = Contender(contender.name, contender.one_call, RAW)
    reading = alone.attempt(alone.read, tokens, len(targets))
    sums = alone.attempt(score, passage.name, base.logits, reading.logits, targets) if reading else None
    contender.about["kl_one_call"] = sums.kl_nats / sums.positions if sums else alone.failed


def _cut(passage: Passage) -> tuple[Sequence[int], torch.Tensor]:
    """Tokens to read, and the targets of those that are scored."""
    return passage.tokens[:-1], torch.tensor(passage.tokens[FIRST_SCORED + 1 :])


def measure_model(
    loaded: LoadedModel,
    passages: Sequence[Passage],
    options: argparse.Namespace,
    progress: Bar | Lines,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Both parts for one model; `keep` is given what there is after every document."""  # fmt: skip
    model, tokens, neighbours = loaded.model, len(passages[0].tokens) - 1, Neighbours(0)
    found: dict[str, Any] = {
        "identity": loaded.identity, "tokens": tokens, "scored_from": FIRST_SCORED, "documents": [], "others_share_of_cores": 0.0,
    }  # fmt: skip
    with torch.inference_mode():
        recorded = record(model, [each.tokens[:-1] for each in passages[:RECORDED_DOCUMENTS]])
        codecs = [text for text in options.formats if "+" not in text]  # Here nothing is raw anyway.
        found["tensors"] = tensor_rows(recorded, codecs, options.peers, progress.say, options.without)
        recorded.clear()
        progress.say("what caches hold")
        contenders = [
            raw(model),
            *ours(model, options.formats, tokens),
            *others(model, options.peers, tokens, options.without),
        ]
        if "llama.cpp" in options.peers:
            contenders += llama(
                lambda: gguf_of(loaded.name), options.threads, numbers_per_token(model), options.without
            )
        progress.plan(len(contenders) * len(passages) * (tokens + 1))

        def note(document: str) -> None:
            found["model"] = {each.name: each.result() for each in contenders}
            found["documents"].append(document)
            found["others_share_of_cores"] = max(found["others_share_of_cores"], round(neighbours.share(), 3))
            keep(found)

        read_all(contenders, passages, progress, note, one_call=options.one_call)


# ---- report ----------------------------------------------------------------------------------------------------------


def show_tensors(title: str, rows: dict[str, dict[str, Any]], console: Console) -> None:
    columns = {
        "bits": "bits", "error of K": "k_error", "of V": "v_error", "of the output": "output_error", "KL of attention": "attention_kl",
        "worst layer": "worst_layer_attention_kl",
    }  # fmt: skip
    table = new_table(f"{title}: the same keys and values, nothing raw", *columns)
    for arm, row in rows.items():
        if "skipped" not in row:
            table.add_row(arm, f"{row['bits']:.2f}", *(f"{row[key]:.4f}" for key in [*columns.values()][1:]))
    console.print(table)
    show_skipped(rows, console)


def show_model(title: str, found: dict[str, Any], console: Console) -> None:
    title += f": {len(found['documents'])} documents of {found['tokens']} tokens in chunks of {CHUNK_TOKENS}"
    table = new_table(title, "bits", "beyond", "read raw", "KL", "95 %", "top-1", "CPU / raw", "one: chunks, call")
    for arm, row in found["model"].items():
        if "kl" in row and "skipped" not in row:
            table.add_row(arm, *model_cells(row))
    console.print(table)
    show_skipped(found["model"], console)


def show_skipped(rows: dict[str, dict[str, Any]], console: Console) -> None:
    for arm, row in rows.items():
        if "skipped" in row:
            console.print(f"no result: {arm}: {row['skipped']}", markup=False)


def model_cells(row: dict[str, Any]) -> list[str]:
    """The last: of the first document, in chunks and in one call."""
    kl, once, first = row["kl"], row.get("kl_one_call"), next(iter(row["kl_by_document"].values()))
    both = "" if once is None else f"{first:.4f}, {once if isinstance(once, str) else f'{once:.4f}'}"
    return [
        _number(row.get("bits")), _number(row.get("bits_beyond")), _percent(row.get("raw_share")), f"{kl['mean']:.5f}",
        "" if kl["low"] is None else f"{kl['low']:.5f} .. {kl['high']:.5f}", f"{row['top1']['mean']:.3f}",
        _number(row["seconds_over_raw"]), both,
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    table.add_column("arm", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="the default model, two short documents, int8 and int4; writes nothing"
    )
    parser.add_argument("--models", type=lambda text: text.split(","), default=None, help=f"default {','.join(MODELS)}")
    parser.add_argument("--documents", type=int, default=None, help="of each model")
    parser.add_argument(
        "--tokens", type=int, default=None, help="of a document, more than the first 128, which are not scored"
    )
    parser.add_argument(
        "--one-call",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read the first document in one call as well",
    )
    parser.add_argument("--text", default="builtin", help="builtin, handbook, perl, or files (see kvarto study)")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=None, help="of ours")
    parser.add_argument(
        "--peers", type=lambda text: text.split(",") if text else [], default=None, help=f"of {','.join(PROJECTS)}"
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="ROW",
        help="leave out a row of a peer's, by name; may be repeated",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of everybody (default 1: seconds are of CPU, and say most with one)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of documents")
    parser.add_argument(
        "--out", type=Path, default=None, help=f"JSON to write (default {BASELINE}, nothing with --quick)"
    )
    options = parser.parse_args(arguments)
    options.models = options.models or ([next(iter(MODELS))] if options.quick else [*MODELS])
    options.formats = options.formats or (["int8", "int4"] if options.quick else [*FORMATS])
    options.peers = [*PROJECTS] if options.peers is None else options.peers
    options.out = options.out or (None if options.quick else BASELINE)
    return options


def check(options: argparse.Namespace) -> None:
    """Before any long work. Raises a KvartoError."""
    for peer in options.peers:
        if peer not in PROJECTS:
            raise UsageError("--peers", f"some of {', '.join(PROJECTS)}", peer)
    if options.tokens is not None and options.tokens <= FIRST_SCORED:
        raise UsageError("--tokens", f"more than {FIRST_SCORED}, which are not scored", options.tokens)
    known = {*(peer.name for peer in (*CACHES, *TENSORS)), *(f"llama.cpp {kind}" for kind in KINDS if kind != "f16")}
    for row in options.without:
        if row not in known:
            raise UsageError("--without", f"a row of a peer's: {', '.join(sorted(known))}", row)
    for text in options.formats:
        parse_policy(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        require_writable(options.out)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything asked for; kept after every document. Raises a KvartoError for what cannot be done."""
    check(options)
    torch.set_num_threads(options.threads)
    documents = texts(options.text)
    report: dict[str, Any] = {
        "machine": machine() | {"threads": options.threads}, "peers": versions(), "not_run": NOT_RUN, "chunk_tokens": CHUNK_TOKENS,
        "text": {"source": options.text, "sha256": fingerprint(documents)}, "models": {},
    }  # fmt: skip
    for name in options.models:
        with progress_for(console) as progress:
            progress.say(f"loading {name}")
            loaded = load(name)
            count, tokens = QUICK if options.quick else MODELS.get(name, (4, 512))
            cut = cut_passages(
                documents,
                loaded.tokenizer,
                count=options.documents or count,
                tokens=options.tokens or tokens,
                seed=options.seed,
            )

            def keep(found: dict[str, Any], name: str = name) -> None:
                report["models"][name] = found
                if options.out:
                    write_whole(options.out, (json.dumps(report, indent=1) + "\n").encode())

            measure_model(loaded, cut.passages, options, progress, keep)
        show_tensors(name, report["models"][name]["tensors"], console)
        show_model(name, report["models"][name], console)
        del loaded
    for package, reason in NOT_RUN.items():
        console.print(f"not run: {package}: {reason}", markup=False)
    return report


def main(arguments: list[str] | None = None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        run(parse(arguments), console)
    except KvartoError as error:
        raise SystemExit(f"quality.py: {error}") from error


if __name__ == "__main__":
    main()
