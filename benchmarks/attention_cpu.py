"""Attention over a packed cache against torch SDPA over a dense one, on this CPU: `python benchmarks/attention_cpu.py [--quick] [--out FILE]`.

Llama-3-8B geometry (Hq 32, Hkv 8, D 128). A step of ours is the kernel calls of one layer (packed pages, open page)
and their merge; neither side stores the new token.
SDPA is given its best case: the same tokens in one dense tensor per side, its heads passed both ways (`enable_gqa`, and the R heads of a group as R
queries), the faster one counts. All contenders run in turn in every repeat, over so many layers that no cache holds the data; ratios are taken
within a repeat. Bytes that the process holds are measured in a process of its own for each format.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvarto.binding import BoundCodec
from kvarto.cache.slab import PageStore
from kvarto.formats import parse_format
from kvarto.kernels.base import PageSet, Partial, Queries
from kvarto.kernels.numba import NumbaKernel
from kvarto.layout import Geometry, Side
from kvarto.rule import Rule
from measure import Neighbours, Samples, bandwidth, interleave, last_level_cache_bytes, machine, ratios

GEOMETRY = Geometry(heads=8, k_dim=128, v_dim=128)
HQ, S, D = 32, GEOMETRY.page_tokens, GEOMETRY.k_dim
R, SCALE = HQ // GEOMETRY.heads, D**-0.5
OPEN_TOKENS = 17  # In the open page, besides the sealed ones.
DENSE = {"bf16": torch.bfloat16, "fp32": torch.float32}
PATTERN_PAGES = 16  # Pages are encoded once and repeated; each copy lies in memory of its own.
QUARTILES = ("quartile_low", "median", "quartile_high")
BASELINE = Path(__file__).parent / "baselines" / "attention_cpu.json"


# ---- contenders ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """A few pages of K and V, float32 [pages, Hkv, S, D], that all caches repeat."""

    k: Tensor
    v: Tensor

    @classmethod
    def random(cls) -> Pattern:
        generator = torch.Generator().manual_seed(0)
        shape = (PATTERN_PAGES, GEOMETRY.heads, S, D)
        return cls(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))

    def pages(self, text: str, *, raw: bool, count: int, rows: int) -> PageSet:
        """`count` pages for each of `rows` sequences, in random order in the pool."""
        chosen = parse_format(text)
        layout = chosen.layout(GEOMETRY)
        k, v = BoundCodec(chosen.k, layout.k), BoundCodec(chosen.v, layout.v)
        encoded = torch.cat([k.encode(self.k), v.encode(self.v)], dim=-1).flatten(1)
        table = torch.randperm(rows * count).view(rows, count).int()
        pool = torch.empty((rows * count, layout.nbytes), dtype=torch.uint8)
        for j in range(count):
            pool[table[:, j].long()] = encoded[j % PATTERN_PAGES]
        return PageSet(pool, table, layout, k, v, raw)

    def dense(self, dtype: torch.dtype, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
        """K and V [B, Hkv, T, D]."""
        return self._dense(self.k, dtype, tokens, rows), self._dense(self.v, dtype, tokens, rows)

    def _dense(self, x: Tensor, dtype: torch.dtype, tokens: int, rows: int) -> Tensor:
        out = torch.empty((rows, GEOMETRY.heads, tokens, D), dtype=dtype)
        flat = x.transpose(0, 1).flatten(1, 2).to(dtype)
        for first in range(0, tokens, flat.shape[1]):
            out[:, :, first : first + flat.shape[1]] = flat[:, : tokens - first]
        return out


def packed_step(packed: PageSet, open_pages: PageSet, queries: Queries) -> Callable[[], Partial]:
    """What PagedKV does for one layer."""
    kernel, rule = NumbaKernel(), Rule(S)

    def step() -> Partial:
        return kernel.attend(queries, [open_pages, packed], rule, scale=SCALE, softcap=None)

    return step


def open_page_set(pattern: Pattern, first_page: int, count: int, rows: int) -> PageSet:
    """Raw bf16 pages first_page .. first_page + count - 1 of each sequence."""
    pages = pattern.pages("bf16", raw=True, count=count, rows=rows)
    table = torch.full((rows, first_page + count), -1, dtype=torch.int32)
    table[:, first_page:] = pages.table
    return PageSet(pages.pages, table, pages.layout, pages.k, pages.v, raw=True)


def decode_contenders(
    pattern: Pattern, formats: Iterable[str], tokens: int, rows: int, layers: int
) -> dict[str, list[Callable[[], Any]]]:
    q = torch.randn(rows, HQ, D)
    queries = Queries(q, torch.arange(rows + 1).int(), torch.full((rows,), tokens + OPEN_TOKENS - 1).int(), 1)
    open_pages = open_page_set(pattern, tokens // S, 1, rows)
    contenders: dict[str, list[Callable[[], Any]]] = {}
    for text in formats:
        contenders[text] = [
            packed_step(pattern.pages(text, raw=False, count=tokens // S, rows=rows), open_pages, queries)
            for _ in range(layers)
        ]
    for name, dtype in DENSE.items():
        caches = [pattern.dense(dtype, tokens + OPEN_TOKENS, rows) for _ in range(layers)]
        heads, groups = q.to(dtype).view(rows, HQ, 1, D), q.to(dtype).view(rows, GEOMETRY.heads, R, D)
        contenders[f"sdpa {name} gqa"] = [
            lambda k=k, v=v, heads=heads: sdpa(heads, k, v, enable_gqa=True) for k, v in caches
        ]
        contenders[f"sdpa {name} grouped"] = [lambda k=k, v=v, groups=groups: sdpa(groups, k, v) for k, v in caches]
    return contenders


def prefill_contenders(
    pattern: Pattern, formats: Iterable[str], chunk: int, history: int
) -> dict[str, list[Callable[[], Any]]]:
    q = torch.randn(chunk, HQ, D)
    queries = Queries(q, torch.tensor([0, chunk]).int(), torch.tensor([history]).int(), chunk)
    open_pages = open_page_set(pattern, history // S, chunk // S, 1)
    contenders: dict[str, list[Callable[[], Any]]] = {
        text: [packed_step(pattern.pages(text, raw=False, count=(history + chunk) // S, rows=1), open_pages, queries)]
        for text in formats
    }
    k, v = pattern.dense(torch.float32, history + chunk, 1)
    heads = q.transpose(0, 1)[None].contiguous()
    mask = torch.ones(chunk, history + chunk, dtype=torch.bool).tril(history)
    contenders["sdpa fp32 masked"] = [lambda: sdpa(heads, k, v, attn_mask=mask, enable_gqa=True)]

    def two_calls() -> None:
        """History without a mask and the chunk with one, not merged: less than the whole work, but what SDPA does fastest."""
        sdpa(heads, k[:, :, :history], v[:, :, :history], enable_gqa=True)
        sdpa(heads, k[:, :, history:], v[:, :, history:], is_causal=True, enable_gqa=True)

    contenders["sdpa fp32 two calls"] = [two_calls]
    return contenders


def check(pattern: Pattern, text: str, tokens: int) -> float:
    """Largest error of our step against SDPA in float32 over what the pages hold, relative to the largest output."""
    packed, open_pages = (
        pattern.pages(text, raw=False, count=tokens // S, rows=1),
        open_page_set(pattern, tokens // S, 1, 1),
    )
    q = torch.randn(1, HQ, D)
    got = packed_step(
        packed, open_pages, Queries(q, torch.tensor([0, 1]).int(), torch.tensor([tokens + OPEN_TOKENS - 1]).int(), 1)
    )()
    sides = []
    for side in Side:
        parts = []
        for pages, count in ((packed, tokens), (open_pages, OPEN_TOKENS)):
            first, end = pages.layout.slab_range(side)
            slabs = pages.pages.view(-1, GEOMETRY.heads, pages.layout.pair_nbytes)[..., first:end]
            reader = pages.k if side is Side.K else pages.v
            x = reader.decode(slabs[pages.table[0][pages.table[0] >= 0].long()])
            parts.append(x.transpose(0, 1).flatten(1, 2)[:, :count])
        sides.append(torch.cat(parts, dim=1))
    expected = sdpa(q.view(1, GEOMETRY.heads, R, D), sides[0][None], sides[1][None])
    return float((got.out.view_as(expected) - expected).abs().max() / expected.abs().max())


# ---- memory and bandwidth ------------------------------------------------------------------------------------------


def hold(text: str, tokens: int, layers: int) -> dict[str, int]:
    """In a process of its own: fill the caches of `layers` layers as they grow, and count what the process then holds."""
    process = psutil.Process()
    warm = PageStore(64, torch.device("cpu"))  # What torch takes at its first operations is not the cache's.
    warm.put(warm.take(1), torch.ones((1, 64), dtype=torch.uint8))
    keep: list[Any] = []
    before = process.memory_info().rss
    if text.startswith("dense "):
        dtype = DENSE[text.removeprefix("dense ")]
        payload = allocated = 0
        for _ in range(2 * layers):
            keep.append(torch.zeros((GEOMETRY.heads, tokens, D), dtype=dtype).fill_(1))
            payload = allocated = allocated + keep[-1].numel() * keep[-1].element_size()
    else:
        nbytes = parse_format(text).layout(GEOMETRY).nbytes
        stores = [PageStore(nbytes, torch.device("cpu")) for _ in range(layers)]
        for _ in range(tokens // S):
            for store in stores:
                store.put(store.take(1), torch.ones((1, nbytes), dtype=torch.uint8))
        payload, allocated = layers * tokens // S * nbytes, sum(store.allocated_bytes for store in stores)
        keep += stores
    return {"packed_bytes": payload, "allocated_bytes": allocated, "rss_bytes": process.memory_info().rss - before}


def hold_elsewhere(text: str, tokens: int, layers: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--hold", text, "--hold-tokens", str(tokens), "--hold-layers", str(layers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


# ---- report --------------------------------------------------------------------------------------------------------


def fastest_dense(times: dict[str, Samples]) -> dict[str, Samples]:
    """The better of the two ways for each dtype."""
    return {
        name: min((samples for key, samples in times.items() if key.startswith(f"sdpa {name}")), key=lambda s: s.median)
        for name in DENSE
    }


def measure_decode(
    pattern: Pattern, options: argparse.Namespace, console: Console, speed: dict[str, float]
) -> list[dict[str, Any]]:
    table = new_table(
        "decode: one layer's step",
        "B x context", "contender", "ms (median)", "quartiles", "fastest SDPA / it", "MB read", "GB/s", "of the read bandwidth",
    )  # fmt: skip
    results = []
    for tokens, rows in ((tokens, rows) for tokens in options.contexts for rows in options.batches):
        nbytes = {text: rows * tokens // S * parse_format(text).layout(GEOMETRY).nbytes for text in options.formats}
        layers = max(1, -(-4 * last_level_cache_bytes() // min(nbytes.values())))
        contenders = decode_contenders(pattern, options.formats, tokens, rows, layers)
        times = interleave(contenders, options.repeats, options.neighbours)
        del contenders
        dense = fastest_dense(times)
        best = min(dense.values(), key=lambda samples: samples.median)
        nbytes |= {
            f"sdpa {name}": 2 * rows * tokens * GEOMETRY.heads * D * dtype.itemsize for name, dtype in DENSE.items()
        }
        shown = {text: times[text] for text in options.formats} | {
            f"sdpa {name}": samples for name, samples in dense.items()
        }
        rates = {name: nbytes[name] / samples.median / 1e6 for name, samples in shown.items()}
        for name, samples in shown.items():
            low, _, high = samples.quartiles
            table.add_row(
                f"{rows} x {tokens}", name, f"{samples.median:.3f}", f"{low:.3f} .. {high:.3f}", f"{ratios(best, samples)[1]:.2f}",
                f"{nbytes[name] / 1e6:.1f}", f"{rates[name]:.1f}", f"{rates[name] / speed['read_gb_per_s']:.0%}",
            )  # fmt: skip
        table.add_section()
        results.append({
            "batch": rows, "context_tokens": tokens, "layers": layers, "others_share_of_cores": best.others_share,
            "times": {name: samples.as_json() for name, samples in times.items()},
            "fastest_sdpa_over_ours": {text: dict(zip(QUARTILES, ratios(best, times[text]), strict=True)) for text in options.formats},
            **{f"sdpa_{name}_over_ours": {text: ratios(samples, times[text])[1] for text in options.formats} for name, samples in dense.items()},
            "bytes_read_per_step": nbytes, "gb_per_s": rates,
            "share_of_read_bandwidth": {name: rate / speed["read_gb_per_s"] for name, rate in rates.items()},
        })  # fmt: skip
    console.print(table)
    return results


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def measure_prefill(pattern: Pattern, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    chunk, history = options.chunk, options.history
    contenders = prefill_contenders(pattern, options.formats, chunk, history)
    times = interleave(contenders, max(3, options.repeats // 4), options.neighbours)
    best = min(
        (samples for name, samples in times.items() if name.startswith("sdpa")), key=lambda samples: samples.median
    )
    table = new_table(
        f"prefill: {chunk} tokens on {history} packed ones, one layer",
        "contender",
        "ms (median)",
        "quartiles",
        "fastest SDPA / it",
    )
    for name, samples in times.items():
        low, _, high = samples.quartiles
        table.add_row(name, f"{samples.median:.1f}", f"{low:.1f} .. {high:.1f}", f"{ratios(best, samples)[1]:.2f}")
    console.print(table)
    return {
        "chunk_tokens": chunk, "history_tokens": history, "others_share_of_cores": best.others_share,
        "times": {name: samples.as_json() for name, samples in times.items()},
        "fastest_sdpa_over_ours": {text: ratios(best, times[text])[1] for text in options.formats},
    }  # fmt: skip


def measure_memory(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    tokens, layers = options.contexts[-1], 4
    table = new_table(
        f"bytes held for {layers} layers of {tokens} tokens, MB",
        "cache", "packed", "allocated", "slack", "resident", "bf16 / it, promised", "bf16 / it, resident",
    )  # fmt: skip
    held = {name: hold_elsewhere(name, tokens, layers) for name in [*(f"dense {d}" for d in DENSE), *options.formats]}
    base = held["dense bf16"]
    for name, counts in held.items():
        counts["slack_percent"] = round(100 * (counts["allocated_bytes"] / counts["packed_bytes"] - 1), 2)  # type: ignore[assignment]
        table.add_row(
            name, *(f"{counts[key] / 1e6:.1f}" for key in ("packed_bytes", "allocated_bytes")), f"{counts['slack_percent']} %",
            f"{counts['rss_bytes'] / 1e6:.1f}", f"{base['packed_bytes'] / counts['packed_bytes']:.2f}",
            f"{base['rss_bytes'] / counts['rss_bytes']:.2f}",
        )  # fmt: skip
    console.print(table)
    return {"layers": layers, "tokens": tokens, "held": held}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one context, one batch, few repeats, no prefill")
    parser.add_argument(
        "--out", type=Path, default=None, help=f"JSON to write (default {BASELINE}, nothing with --quick)"
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="threads of torch, and so of everything (default: torch's own)"
    )
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["int8", "int4"])
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds to wait in all for other processes to be quiet (default 60)",
    )
    parser.add_argument("--hold", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--hold-tokens", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--hold-layers", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.contexts, options.batches = ([8192], [1]) if options.quick else ([8192, 32768], [1, 4])
    options.repeats = options.repeats or (7 if options.quick else 21)
    options.chunk, options.history = 2048, 8192
    options.neighbours = Neighbours(options.patience)
    options.out = options.out or (None if options.quick else BASELINE)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.hold:
        print(json.dumps(hold(options.hold, options.hold_tokens, options.hold_layers)))
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    console, pattern = Console(width=None if sys.stdout.isatty() else 160), Pattern.random()
    report: dict[str, Any] = {"machine": machine()}
    console.print(" ".join(f"{key}={value}" for key, value in report["machine"].items()))
    report["bandwidth"] = bandwidth()
    console.print("memory: " + ", ".join(f"{key} {value:.1f}" for key, value in report["bandwidth"].items()))
    report["relative_error"] = {text: check(pattern, text, 1024) for text in options.formats}
    assert max(report["relative_error"].values()) < 1e-4, report["relative_error"]
    report["decode"] = measure_decode(pattern, options, console, report["bandwidth"])
    if not options.quick:
        report["prefill"] = measure_prefill(pattern, options, console)
    report["memory"] = measure_memory(options, console)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
