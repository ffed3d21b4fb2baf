"""How many sequences at once, and how fast, in equal memory: `python benchmarks/engine_gpu.py [--kv bf16,int4] [--memory 48GiB]`.

Llama-3-8B geometry with random bfloat16 weights (a small vocabulary), the engine with its books, scheduler, sampling and CUDA graphs, one NVIDIA GPU.
As many sequences as the format has room for decode greedily, a token each in every step. Their prompts are not read: their pages are filled with
keys and values of noise, stored and sealed as the engine does, which gives the same decode steps.

A step is what clients wait for, host and device. Beside it stands the time of the graph alone, and of a step without graphs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported.

import torch
from rich.console import Console
from rich.table import Table

from generate_gpu import LLAMA, TINY, check_versions, make_model
from measure_gpu import DEVICE, HAS_GPU, machine, write

BASELINE = Path(__file__).parent / "baselines" / "engine_gpu.json"
WARM_STEPS = 3


def fill(engine: Any, request: Any, noise: tuple[torch.Tensor, torch.Tensor]) -> None:
    """All tokens of the request but the last are held, as keys and values of noise, bfloat16 [tokens of a step, Hkv, D]."""
    from kvarto.engine.scheduler import Work
    from kvarto.engine.step import Step

    memory = engine.memory
    request.holding = memory.begin(request)
    while request.missing > 1:
        work = Work(request, min(request.missing - 1, len(noise[0])))
        if not request.holding.reserve(work.count):
            raise SystemExit(
                f"{len(engine.scheduler.running)} sequences fill the memory: that is fewer than was promised"
            )
        step = Step(memory, memory.plan([work]), engine.device)
        for layer in range(len(memory.offers[0].layers)):
            step.store(layer, *(x[: work.count] for x in noise))
        request.holding.commit(request.tokens)
    engine.scheduler.running.append(request)


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def steps_of(engine: Any, count: int) -> list[float]:
    """Milliseconds of so many steps, in which everybody gets a token."""
    times = []
    for _ in range(WARM_STEPS + count):
        synchronize()
        begin = time.perf_counter()
        outputs = engine.step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
        if len(outputs) != len(engine.scheduler.running):
            raise SystemExit(f"{len(outputs)} of {len(engine.scheduler.running)} sequences got a token")
    return times[WARM_STEPS:]


def graph_ms(engine: Any, repeats: int) -> float | None:
    """Of the replay alone: the same step again and again."""
    if not engine.graphs.recorded:
        return None
    graph = list(engine.graphs.recorded.values())[-1]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def measure(model: Any, kv: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one format."""
    from kvarto.engine.core import EngineCore, Options
    from kvarto.engine.engine import parse_bytes
    from kvarto.engine.request import Request, Sampling
    from kvarto.formats import parse_policy

    chosen = Options(parse_bytes(options.memory), step_tokens=options.chunk, step_seconds=None, most_running=256)
    engine = EngineCore(model, [parse_policy(kv)], chosen)
    generated = 2 * (WARM_STEPS + options.steps) + 2
    fits = 1
    while fits < 256 and engine.memory.capacity_tokens(0, fits + 1) >= options.context + generated:
        fits += 1
    config = model.config
    noise = torch.randn(2, options.chunk, config.num_key_value_heads, config.head_dim, device=DEVICE, dtype=model.dtype)
    begin = time.perf_counter()
    with torch.inference_mode():
        for number in range(fits):
            # In different places of a page, as they are in life.
            length = options.context - number * 64 // fits
            tokens = torch.randint(0, config.vocab_size, (length,)).tolist()
            sampling = Sampling(max_tokens=generated, temperature=0, ignore_eos=True)
            fill(engine, Request(str(number), tokens, sampling), (noise[0], noise[1]))
        synchronize()
        filled = time.perf_counter() - begin
        step = steps_of(engine, options.steps)
        replays, alone = engine.graphs.replays, graph_ms(engine, options.steps)
        why_not, engine.graphs.why_not = engine.graphs.why_not, "for comparison"
        eager = steps_of(engine, options.steps)
    engine.check()
    low, median, high = statistics.quantiles(step, n=4)
    return {
        "kv": kv, "kernel": engine.memory.offers[0].kernel_names, "sequences": fits, "context_tokens": options.context,
        "held_bytes": engine.memory.prefixes.held_bytes, "memory_bytes": engine.memory.arena.nbytes, "fill_seconds": filled,
        "step_ms": {"median": median, "quartile_low": low, "quartile_high": high}, "tokens_per_second": 1e3 * fits / median,
        "graph_ms": alone, "replays": replays, "why_no_graphs": why_not, "eager_step_ms": statistics.median(eager),
    }  # fmt: skip


def report_table(results: list[dict[str, Any]]) -> Table:
    """Ratios are to the first format."""
    table = Table(title="decode in equal memory")
    for column in (
        "kv", "sequences", "context", "GB held", "ms a step (median)", "quartiles", "graph alone", "without graphs", "tokens/s",
        "sequences / first", "tokens/s / first",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for result in results:
        step, first = result["step_ms"], results[0]
        table.add_row(
            result["kv"], str(result["sequences"]), str(result["context_tokens"]), f"{result['held_bytes'] / 1e9:.1f}", f"{step['median']:.2f}",
            f"{step['quartile_low']:.2f} .. {step['quartile_high']:.2f}", "-" if result["graph_ms"] is None else f"{result['graph_ms']:.2f}",
            f"{result['eager_step_ms']:.2f}", f"{result['tokens_per_second']:.0f}", f"{result['sequences'] / first['sequences']:.2f}",
            f"{result['tokens_per_second'] / first['tokens_per_second']:.2f}",
        )  # fmt: skip
    return table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--kv", default="bf16,int8,int4", help="formats, the first one is compared with (default %(default)s)"
    )
    parser.add_argument("--memory", default="48GiB", help="for keys and values (default %(default)s)")
    parser.add_argument(
        "--context", type=int, default=32768, help="tokens that each sequence holds (default %(default)s)"
    )
    parser.add_argument("--chunk", type=int, default=2048, help="tokens that are stored at once")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--commit", help="the revision measured, where git is not at hand")
    parser.add_argument("--out", type=Path, help=f"JSON to write (default {BASELINE}, nothing with --dry-run)")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and few tokens, also without a GPU")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.memory, options.context, options.chunk, options.steps = "1MiB", 200, 256, 2
    options.out = options.out or (None if options.dry_run else BASELINE)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    check_versions()
    if not HAS_GPU and not options.dry_run:
        raise SystemExit("no NVIDIA GPU here; --dry-run tries the program without one")
    console = Console(width=None if sys.stdout.isatty() else 190)
    config = TINY if options.dry_run else LLAMA
    report: dict[str, Any] = {
        "machine": machine(options.commit),
        "model": config,
        "memory": options.memory,
        "results": [],
    }
    console.print(" ".join(f"{key}={value}" for key, value in report["machine"].items()), markup=False)
    model = make_model(config)
    for kv in options.kv.split(","):
        report["results"].append(result := measure(model, kv, options))
        console.print(
            f"{kv}: {result['sequences']} sequences, {result['tokens_per_second']:.0f} tokens/s", markup=False
        )
        if HAS_GPU:
            torch.cuda.empty_cache()
    console.print(report_table(report["results"]))
    if options.out:
        write(report, options.out)
        console.print(f"written to {options.out}", markup=False)


if __name__ == "__main__":
    main()
