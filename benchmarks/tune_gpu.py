"""How the packed launch runs fastest on this GPU: `python benchmarks/tune_gpu.py [--formats int4,fp8] [--dims 64,128] [--shapes 8x32768]`.

Times every candidate of kernels/triton_tune.py at each shape, all in turn in every repeat (measure_gpu.py). The one that is fastest over all shapes,
by geometric mean, is kept in the cache folder, where the kernel finds it from then on, and printed as a line of the table that we ship. Programs are
compiled first, in a process for each format and candidate; a candidate that does not compile or run is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

if "--dry-run" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported.

import torch
from rich.console import Console
from rich.table import Table

from attention_gpu import BARS, DECODE, LLAMA, PATTERN_PAGES, TINY, Model, Work, ours
from kvarto.formats import parse_format
from kvarto.kernels.triton_tune import CANDIDATES, Tuning, key_of, trial, tune, tuning_for
from kvarto.layout import Geometry
from measure_gpu import HAS_GPU, machine, measure, warm_each

INFINITY = float("inf")


def model_of(dim: int) -> Model:
    """Llama's heads with another head dimension."""
    return Model(Geometry(LLAMA.geometry.heads, dim, dim), LLAMA.hq)


def on_trial(tuning: Tuning, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with trial(tuning):
            call()

    return run


def show(tuning: Tuning) -> str:
    return f"{tuning.registers}{' ahead' if tuning.ahead else ''}"


# ---- compiling beforehand --------------------------------------------------------------------------------------------


def warm(text: str, dim: int, candidate: int, shapes: list[Work]) -> None:
    for work in shapes:
        on_trial(CANDIDATES[candidate], ours(text, work, PATTERN_PAGES, model_of(dim)))()
    if HAS_GPU:
        torch.cuda.synchronize()


# ---- measuring -------------------------------------------------------------------------------------------------------


def times_of(text: str, model: Model, candidates: list[Tuning], options: argparse.Namespace, table: Table) -> dict[Tuning, float]:  # fmt: skip
    """Geometric mean over the shapes of each candidate's median, in milliseconds."""
    logs = dict.fromkeys(candidates, 0.0)
    for work in options.shapes:
        call = ours(text, work, model=model)
        samples, _ = measure({show(tuning): on_trial(tuning, call) for tuning in candidates}, options.repeats)
        medians = {tuning: samples[show(tuning)].median for tuning in candidates}
        fastest = min(medians.values())
        cells = [f"{medians[t]:.4f} ({medians[t] / fastest:.3f})" if t in medians else "-" for t in CANDIDATES]
        table.add_row(text, str(model.geometry.k_dim), str(work), *cells)
        for tuning in candidates:
            logs[tuning] += math.log(medians[tuning]) / len(options.shapes)
        del call
        if HAS_GPU:
            torch.cuda.empty_cache()
    return {tuning: math.exp(log) for tuning, log in logs.items()}


def tune_format(text: str, dim: int, failed: dict[tuple[str, int, int], str], options: argparse.Namespace, table: Table) -> str:  # fmt: skip
    """Measure, keep, and say what was found."""
    model = TINY if options.dry_run else model_of(dim)
    candidates = [tuning for i, tuning in enumerate(CANDIDATES) if (text, dim, i) not in failed]
    times = times_of(text, model, candidates, options, table)
    chosen, gpu = parse_format(text), torch.cuda.get_device_name() if HAS_GPU else "interpreter"
    layout = chosen.layout(model.geometry)
    used = tuning_for(gpu, layout, chosen.k.name, chosen.v.name)
    if options.dry_run:
        return f"{text}, D {model.geometry.k_dim}: nothing kept"
    best = tune(gpu, layout, chosen.k.name, chosen.v.name, lambda tuning: times.get(tuning, INFINITY))
    key = key_of(gpu, layout, chosen.k.name, chosen.v.name)
    gain = f"{times[used] / times[best]:.3f} times as fast as {show(used)}, which was in use" if used in times else ""
    return f"{json.dumps(key)}: {json.dumps(asdict(best))}   {gain}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", default=",".join(BARS), help="default %(default)s")
    parser.add_argument("--dims", default="128", help="head dimensions, such as 64,128,256 (default %(default)s)")
    parser.add_argument("--shapes", help="sequences x context, such as 8x32768,64x8192 (default: the benchmark's)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warm-seconds", type=float, default=240.0, help="to wait for the compiler (default 240)")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted where there is no GPU")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.formats = [text for text in options.formats.split(",") if text]
    options.dims = [int(dim) for dim in options.dims.split(",")]
    options.shapes = (
        [Work(*map(int, shape.split("x"))) for shape in options.shapes.split(",")]
        if options.shapes
        else [Work(2, 256)] if options.dry_run else list(DECODE[:4])
    )  # fmt: skip
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not HAS_GPU and not options.dry_run:
        raise SystemExit("no NVIDIA GPU here; --dry-run tries the program without one")
    if options.warm:
        text, dim, candidate = options.warm.split(",")
        warm(text, int(dim), int(candidate), options.shapes)
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(" ".join(f"{key}={value}" for key, value in machine(None).items()), markup=False)
    tasks = [(text, dim, i) for text in options.formats for dim in options.dims for i in range(len(CANDIDATES))]
    failed = warm_each(tasks, lambda task: ["--warm", ",".join(map(str, task))], options.warm_seconds)
    for (text, dim, i), reason in failed.items():
        console.print(f"left out: {text}, D {dim}, {show(CANDIDATES[i])}: {reason}", markup=False)
    table = Table(title="ms (times the fastest), by registers of a thread and whether slabs are copied ahead")
    for column in ("format", "D", "shape", *map(show, CANDIDATES)):
        table.add_column(column, justify="right")
    for text in options.formats:
        for dim in options.dims:
            if all((text, dim, i) in failed for i in range(len(CANDIDATES))):
                continue
            # As it comes: a run may be cut off.
            console.print(tune_format(text, dim, failed, options, table), markup=False)
    console.print(table)


if __name__ == "__main__":
    main()
