"""Attention over packed pages against the peers, on one NVIDIA GPU: `python benchmarks/attention_gpu.py [--quick] [--out FILE] ...`.

Llama-3-8B geometry (Hq 32, Hkv 8, D 128), bfloat16 queries, pages in random order. A step of ours is `TritonKernel.attend` as PagedKV calls it:
packed pages, sink page, open page, merge; it reads just the tokens that the peers read. All contenders of a shape run in turn in every repeat,
as CUDA graphs with a cold L2 (measure_gpu.py); ratios are taken within a repeat. The bars are those that the kernels were built to clear.

Programs are compiled first, in a process for each format and each peer; --dry-run runs everything with tiny shapes in Triton's interpreter, which
says whether the program works and nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported.

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvarto.binding import BoundCodec
from kvarto.formats import Format, parse_format
from kvarto.kernels import triton_seal
from kvarto.kernels.base import PageSet, Partial, Queries
from kvarto.kernels.reference import ReferenceKernel
from kvarto.kernels.triton import TritonKernel
from kvarto.layout import Geometry, Side
from kvarto.rule import Rule
from kvarto.testing import specimen_heads
from measure import Samples, ratios
from measure_gpu import DEVICE, HAS_GPU, bandwidth, machine, measure, randperm, warm_each, write
from peers_gpu import ADAPTERS, PAGE_TOKENS, Paged, Peer, Work, gather

BASELINE = Path(__file__).parent / "baselines" / "attention_gpu.json"
QUARTILES = ("quartile_low", "median", "quartile_high")
FORMATS = ("int4", "int2", "kivi2", "kivi4", "int8", "fp8", "bf16")
PREFILL_FORMATS = ("int4", "fp8", "bf16")
DECODE = (Work(1, 131072), Work(8, 32768), Work(32, 32768), Work(64, 8192), Work(64, 1024), Work(256, 2048))
PREFILL = (Work(1, 32768, 2048), Work(1, 8192, 8192), Work(1, 32768, 32768))
WRONG_PEER = 0.1  # Relative error: FP8 queries and keys, without scales, give a few percent.
SHORT_BAR = 0.97  # of the faster BF16 peer, where a context has no more than SHORT_TOKENS
SHORT_TOKENS = 1024
CHUNK_BAR = 0.85
# Bars of decode: times as fast as the faster BF16 peer, and as the best FP8 peer (None: no bar).
BARS: dict[str, tuple[float, float | None]] = {
    "int4": (2.4, 1.5), "int2": (2.6, None), "kivi2": (2.6, None), "int8": (1.6, 1.0), "fp8": (1.6, 1.0),
}  # fmt: skip
PATTERN_PAGES = 64  # Pages are encoded once and repeated; each copy lies in memory of its own.
SEAL_PAGES = (1, 2) if "--dry-run" in sys.argv else (1, 8, 64)


@dataclass(frozen=True)
class Model:
    """What is measured: the geometry of a layer."""

    geometry: Geometry
    hq: int

    @property
    def scale(self) -> float:
        return float(self.geometry.k_dim**-0.5)


LLAMA = Model(Geometry(heads=8, k_dim=128, v_dim=128), 32)
TINY = Model(Geometry(heads=2, k_dim=64, v_dim=64), 8)
MODEL = TINY if "--dry-run" in sys.argv else LLAMA


# ---- our side --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """A call of the kernel, and the bytes of the pages that it reads."""

    queries: Queries
    sets: list[PageSet]
    rule: Rule
    scale: float

    def __call__(self) -> Partial:
        return TritonKernel().attend(self.queries, self.sets, self.rule, scale=self.scale, softcap=None)

    @property
    def nbytes(self) -> int:
        return sum(int((pages.table >= 0).sum()) * pages.layout.nbytes for pages in self.sets)

    def error(self) -> float:
        """Relative to the reference kernel's output."""
        expected = ReferenceKernel().attend(self.queries, self.sets, self.rule, scale=self.scale, softcap=None).out
        return float((self().out - expected).norm() / expected.norm())


@cache
def format_of(text: str, geometry: Geometry) -> Format:
    """The format; codecs that need constants get some of each head's own."""
    chosen, heads, S = parse_format(text), geometry.heads, geometry.page_tokens
    k, v = (
        specimen_heads(codec, side, geometry.dim(side), heads, S)
        for codec, side in ((chosen.k, Side.K), (chosen.v, Side.V))
    )
    return replace(chosen, k=k, v=v)


@cache
def pattern(text: str, geometry: Geometry = MODEL.geometry) -> Tensor:
    """uint8 [PATTERN_PAGES, page_nbytes]: pages of random numbers."""
    chosen, generator = format_of(text, geometry), torch.Generator(DEVICE).manual_seed(0)
    layout = chosen.layout(geometry)
    slabs = []
    for codec, slab in ((chosen.k, layout.k), (chosen.v, layout.v)):
        shape = (PATTERN_PAGES, geometry.heads, geometry.page_tokens, slab.dim)
        slabs.append(codec.encode(torch.randn(shape, generator=generator, device=DEVICE), slab))
    return torch.cat(slabs, dim=-1).flatten(1)


def page_set(
    text: str, geometry: Geometry, held: list[bool], rows: int, most_pages: int | None, *, raw: bool
) -> PageSet:
    """Pages j with held[j] of each of `rows` sequences, in random order, in a store of their own of at most `most_pages` pages (then repeated)."""
    chosen = format_of(text, geometry)
    layout = chosen.layout(geometry)
    wanted = torch.tensor(held).nonzero().flatten().to(DEVICE)
    count = rows * len(wanted)
    ids = randperm(count) % min(count, most_pages or count) if count else randperm(0)
    store = pattern(text, geometry)[torch.arange(min(count, most_pages or count), device=DEVICE) % PATTERN_PAGES]
    width = max(16, 1 << (len(held) - 1).bit_length())  # as wide as PagedKV's tables
    table = torch.full((rows, width), -1, dtype=torch.int32, device=DEVICE)
    table[:, wanted] = ids.view(rows, len(wanted))
    return PageSet(store, table, layout, BoundCodec(chosen.k, layout.k), BoundCodec(chosen.v, layout.v), raw)


def ours(text: str, work: Work, most_pages: int | None = None, model: Model = MODEL) -> Ours:
    """The kernel call of some work in the format `text`, with the pages that PagedKV would give it."""
    geometry, S = model.geometry, model.geometry.page_tokens
    chosen = format_of(text, geometry)
    rule = Rule(S, chosen.sink_tokens // S, chosen.window_tokens // S)
    pages, first = geometry.pages_for(work.context), (work.context - work.queries) // S
    raw = [rule.reads_raw(j, max(j, first)) for j in range(pages)]
    packed = [rule.sink_pages <= j < pages - 1 - rule.window_pages for j in range(pages)]
    sets = [page_set("bf16", geometry, raw, work.rows, most_pages, raw=True)]
    if any(packed):
        sets.append(page_set(_without_options(chosen), geometry, packed, work.rows, most_pages, raw=False))
    q = torch.randn(work.rows * work.queries, model.hq, geometry.k_dim, device=DEVICE, dtype=torch.bfloat16)
    start = torch.arange(work.rows + 1, dtype=torch.int32, device=DEVICE) * work.queries
    position = torch.full((work.rows,), work.context - work.queries, dtype=torch.int32, device=DEVICE)
    return Ours(Queries(q, start, position, work.queries), sets, rule, model.scale)


def _without_options(chosen: Format) -> str:
    return f"{chosen.k.name}/{chosen.v.name}"


# ---- compiling beforehand --------------------------------------------------------------------------------------------


def warm(what: str, options: argparse.Namespace) -> None:
    """In a process of its own: run "decode FORMAT" (and its sealing), "prefill FORMAT" or "peer NAME" once, on few pages, for the caches on disk."""
    kind, name = what.split(" ", 1)
    if kind == "peer":
        for work in (Work(1, 1024), Work(64, 1024), Work(1, 1024, 256)):
            paged = Paged(work, MODEL.hq, MODEL.geometry.heads, MODEL.geometry.k_dim)
            gather(paged, {other: "ImportError: not asked for" for other in ADAPTERS if other != name})
    else:
        for work in options.decode if kind == "decode" else options.prefill:
            ours(name, work, most_pages=PATTERN_PAGES)()
        for pages in SEAL_PAGES if kind == "decode" else ():
            if call := sealing(name, pages):
                call()
    if HAS_GPU:
        torch.cuda.synchronize()


def warm_all(options: argparse.Namespace, console: Console) -> dict[str, str]:
    """What could not be compiled and run in time, and why."""
    tasks = [f"decode {text}" for text in options.formats] + [f"prefill {text}" for text in options.prefill_formats]
    if not options.skip_peers:
        tasks += [f"peer {name}" for name in ADAPTERS]
    begin = time.monotonic()
    failed = warm_each(tasks, lambda task: ["--warm", task], options.warm_seconds)
    console.print(f"compiled in {len(tasks)} processes: {time.monotonic() - begin:.0f} s")
    return failed


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Times of some work by contender, what each read, and the fastest peers of a kind."""

    work: Work
    times: dict[str, Samples]
    loose: set[str]
    nbytes: dict[str, int]
    peers: list[Peer]
    formats: list[str]

    def best(self, kind: str) -> str | None:
        """The fastest peer of a kind."""
        names = [peer.name for peer in self.peers if peer.kind == kind]
        return min(names, key=lambda name: self.times[name].median, default=None)

    def over(self, text: str, kind: str) -> tuple[float, float, float] | None:
        """How many times as fast as the fastest peer of a kind a format is: quartiles."""
        best = self.best(kind)
        return None if best is None else ratios(self.times[best], self.times[text])

    def bars(self, text: str) -> list[dict[str, Any]]:
        """For each bar of a format: of which peers, how high, what was reached, whether that passes."""
        wanted: list[tuple[str, float]] = []
        if self.work.queries > 1:
            wanted = [("bf16", CHUNK_BAR)] if text == "int4" and self.work.queries < self.work.context else []
        elif text in BARS and self.work.context <= SHORT_TOKENS:
            wanted = [("bf16", SHORT_BAR)]
        elif text in BARS and self.work in DECODE[:4]:
            dense, fp8 = BARS[text]
            wanted = [("bf16", dense)] + ([("fp8", fp8)] if fp8 else [])
        reached = [(kind, bar, over[1]) for kind, bar in wanted if (over := self.over(text, kind))]
        return [{"of": kind, "bar": bar, "reached": value, "pass": value >= bar} for kind, bar, value in reached]

    def as_json(self, speed: dict[str, float]) -> dict[str, Any]:
        rates = {name: self.nbytes[name] / samples.median / 1e6 for name, samples in self.times.items()}
        over = {
            f"over_{kind}": {
                text: dict(zip(QUARTILES, found, strict=True))
                for text in self.formats
                if (found := self.over(text, kind))
            }
            for kind in ("bf16", "fp8")
        }
        return {
            "batch": self.work.rows, "context_tokens": self.work.context, "query_tokens": self.work.queries,
            "times": {name: samples.as_json() for name, samples in self.times.items()}, "without_graph": sorted(self.loose),
            "bytes_read": self.nbytes, "gb_per_s": rates,
            "share_of_read_bandwidth": {name: rate / speed["read_gb_per_s"] for name, rate in rates.items()},
            "share_of_copy_bandwidth": {name: rate / speed["copy_gb_per_s"] for name, rate in rates.items()},
            "best_bf16": self.best("bf16"), "best_fp8": self.best("fp8"), **over,
            "bars": {text: bars for text in self.formats if (bars := self.bars(text))},
        }  # fmt: skip


def measure_work(work: Work, formats: list[str], options: argparse.Namespace, report: dict[str, Any]) -> Measured:
    calls: dict[str, Callable[[], Any]] = {}
    nbytes: dict[str, int] = {}
    for text in formats:
        call = ours(text, work)
        calls[text], nbytes[text] = call, call.nbytes
    peers: list[Peer] = []
    if not options.skip_peers:
        paged = Paged(work, MODEL.hq, MODEL.geometry.heads, MODEL.geometry.k_dim)
        peers = gather(paged, report["skipped"], report["peer_relative_error"].setdefault(str(work), {}))
    calls |= {peer.name: peer.call for peer in peers}
    nbytes |= {peer.name: peer.nbytes for peer in peers}
    repeats = options.repeats if work.queries == 1 else max(3, options.repeats // 3)
    times, loose = measure(calls, repeats, fragile={peer.name for peer in peers})
    report["skipped"] |= {peer.name: f"broke off at {work}" for peer in peers if peer.name not in times}
    peers = [peer for peer in peers if peer.name in times]
    return Measured(work, times, loose, nbytes, peers, formats)


def rows_of(measured: Measured, speed: dict[str, float]) -> Iterator[list[str]]:
    """Lines of the printed table."""
    for name, samples in measured.times.items():
        low, _, high = samples.quartiles
        rate = measured.nbytes[name] / samples.median / 1e6
        over = [found[1] if (found := measured.over(name, kind)) else None for kind in ("bf16", "fp8")]
        bars = measured.bars(name) if name in measured.formats else []
        verdict = ", ".join(f"{bar['bar']:g} of {bar['of']}: {'pass' if bar['pass'] else 'MISS'}" for bar in bars)
        yield [
            str(measured.work), name + (" (no graph)" if name in measured.loose else ""), f"{samples.median:.4f}", f"{low:.4f} .. {high:.4f}",
            f"{measured.nbytes[name] / 1e6:.1f}", f"{rate:.0f}", f"{rate / speed['read_gb_per_s']:.0%}", f"{rate / speed['copy_gb_per_s']:.0%}",
            *("-" if value is None else f"{value:.2f}" for value in over), verdict,
        ]  # fmt: skip


def measure_all(
    title: str,
    works: tuple[Work, ...],
    formats: list[str],
    options: argparse.Namespace,
    report: dict[str, Any],
    console: Console,
) -> list[Measured]:
    """Measure, print a table for each shape as it comes, and put the figures into the report."""
    results: list[Measured] = []
    for work in works:
        measured = measure_work(work, formats, options, report)
        table = Table(title=f"{title}: {work}")
        for column in (
            "shape",
            "contender",
            "ms (median)",
            "quartiles",
            "MB read",
            "GB/s",
            "of read",
            "of copy",
            "/ bf16",
            "/ fp8",
            "bars",
        ):
            table.add_column(column, justify="left" if column in ("contender", "bars") else "right")
        for line in rows_of(measured, report["bandwidth"]):
            table.add_row(*line)
        console.print(table)
        wrong = {
            name: error
            for name, error in report["peer_relative_error"].get(str(work), {}).items()
            if error > WRONG_PEER
        }
        if wrong:
            console.print(f"these peers' results are wrong, and so their times say nothing: {wrong}", markup=False)
        report.setdefault(title, []).append(measured.as_json(report["bandwidth"]))
        results.append(measured)
        if options.out:  # as far as it is: a run may be cut off
            write(report, options.out)
        if HAS_GPU:
            torch.cuda.empty_cache()
    return results


# ---- sealing ---------------------------------------------------------------------------------------------------------


def sealing(text: str, pages: int) -> Callable[[], None] | None:
    """One launch that seals `pages` pages of all KV heads; None if the format has no such program."""
    chosen = format_of(text, MODEL.geometry)
    layout, raw_layout = chosen.layout(MODEL.geometry), parse_format("bf16").layout(MODEL.geometry)
    k, v = chosen.k.sealing(layout.k), chosen.v.sealing(layout.v)
    if k is None or v is None or not triton_seal.supports(raw_layout, layout, k, v, DEVICE):
        return None
    raw_pages = pattern("bf16")[torch.arange(pages, device=DEVICE) % PATTERN_PAGES]
    sealed = torch.empty((pages, layout.nbytes), dtype=torch.uint8, device=DEVICE)
    ids, count = randperm(pages), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return lambda: triton_seal.seal_pages(raw_pages, raw_layout, ids, sealed, layout, ids, k, v, count)


def measure_seal(options: argparse.Namespace, decode: list[Measured], console: Console) -> dict[str, Any]:
    """Microseconds a page; and what sealing adds to decode steps of as many sequences, each of which fills a page every S steps."""
    S = MODEL.geometry.page_tokens
    step_ms: dict[tuple[str, int], tuple[float, Work]] = {}
    for measured in decode:
        step_ms |= {
            (text, measured.work.rows): (measured.times[text].median, measured.work) for text in measured.formats
        }
    table = Table(title="sealing: one layer")
    for column in ("format", "pages", "ms (median)", "us a page", "of the decode step of so many sequences"):
        table.add_column(column, justify="right")
    found: dict[str, Any] = {}
    for text in decode[0].formats if decode else []:
        calls = {str(n): call for n in SEAL_PAGES if (call := sealing(text, n))}
        if not calls:
            console.print(f"left out: no program seals {text}", markup=False)
            continue
        times, _ = measure(calls, options.repeats)
        for n in SEAL_PAGES:
            median, share = times[str(n)].median, None
            if (text, n) in step_ms:
                step, work = step_ms[text, n]
                share = median / S / step
            shown = "-" if share is None else f"{share:.2%} ({work}, every {S} steps)"
            table.add_row(text, str(n), f"{median:.4f}", f"{1e3 * median / n:.2f}", shown)
            found.setdefault(text, []).append(
                {"pages": n, **times[str(n)].as_json(), "us_per_page": 1e3 * median / n, "share_of_decode": share}
            )
    console.print(table)
    return found


# ---- the program -----------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def shapes(text: str) -> tuple[Work, ...]:
        return tuple(Work(*map(int, shape.split("x"))) for shape in names(text))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two shapes, int4 and fp8, few repeats, no prefill")
    parser.add_argument("--formats", type=names, help=f"of decode and sealing (default {','.join(FORMATS)})")
    parser.add_argument("--prefill-formats", type=names, help=f"default {','.join(PREFILL_FORMATS)}")
    parser.add_argument("--shapes", type=shapes, help="of decode, such as 8x32768,64x1024 (sequences x context)")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--skip-peers", action="store_true", help="only ours: no ratios")
    parser.add_argument("--repeats", type=int, help="of decode (default 21); prefill has a third")
    parser.add_argument(
        "--warm-seconds", type=float, default=240.0, help="to wait for programs to be compiled (default 240)"
    )
    parser.add_argument("--commit", help="the revision measured, where git is not at hand")
    parser.add_argument(
        "--out", type=Path, help=f"JSON to write (default {BASELINE}, nothing with --quick or --dry-run)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes, in Triton's interpreter where there is no GPU"
    )
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    small = options.quick or options.dry_run
    options.formats = options.formats or (["int4", "fp8"] if small else list(FORMATS))
    options.prefill_formats = options.prefill_formats or (["int4"] if small else list(PREFILL_FORMATS))
    options.decode = options.shapes or (DECODE[1:5:3] if options.quick else DECODE)
    options.prefill = PREFILL
    if options.dry_run:
        options.decode, options.prefill = (Work(2, 256), Work(3, 128)), (Work(1, 192, 64),)
    if options.no_prefill or options.quick:
        options.prefill, options.prefill_formats = (), []
    options.repeats = options.repeats or (3 if options.dry_run else 9 if options.quick else 21)
    options.out = options.out or (None if small else BASELINE)
    return options


def without_failed(formats: list[str], kind: str, failed: dict[str, str], console: Console) -> list[str]:
    """The formats whose programs were compiled in time; the others are named."""
    for text in formats:
        if reason := failed.get(f"{kind} {text}"):
            console.print(f"left out: {kind} {text}: {reason}", markup=False)
    return [text for text in formats if f"{kind} {text}" not in failed]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not HAS_GPU and not options.dry_run:
        raise SystemExit("no NVIDIA GPU here; --dry-run tries the program without one")
    if options.warm:
        warm(options.warm, options)
        return
    console = Console(width=None if sys.stdout.isatty() else 190)
    report: dict[str, Any] = {
        "machine": machine(options.commit),
        "peer_page_tokens": PAGE_TOKENS,
        "skipped": {},
        "peer_relative_error": {},
    }
    console.print(" ".join(f"{key}={value}" for key, value in report["machine"].items()), markup=False)
    failed = warm_all(options, console)
    formats = without_failed(options.formats, "decode", failed, console)
    report["left_out"] = failed
    report["bandwidth"] = bandwidth()
    console.print("memory: " + ", ".join(f"{key} {value:.0f}" for key, value in report["bandwidth"].items()))
    small = Work(3, 256 if options.dry_run else 1024)
    report["relative_error"] = {text: ours(text, small).error() for text in formats}
    console.print(
        "relative error: " + ", ".join(f"{text} {error:.1e}" for text, error in report["relative_error"].items())
    )
    decode = measure_all("decode", options.decode, formats, options, report, console)
    prefill_formats = without_failed(options.prefill_formats, "prefill", failed, console)
    measure_all("prefill", options.prefill, prefill_formats, options, report, console)
    report["seal"] = measure_seal(options, decode, console)
    for name, reason in report["skipped"].items():
        console.print(f"peer left out: {name}: {reason}", markup=False)
    if options.out:
        write(report, options.out)
        console.print(f"written to {options.out}", markup=False)
    if max(report["relative_error"].values(), default=0.0) > 1e-2:
        raise SystemExit("the results are wrong: see the relative errors")


if __name__ == "__main__":
    main()
