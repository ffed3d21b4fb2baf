"""Greedy decode of a model with a quantized cache, end to end, on one NVIDIA GPU: `python benchmarks/generate_gpu.py [--out FILE] ...`.

Llama-3-8B geometry with random bfloat16 weights (a small vocabulary, to save memory), transformers' own model code and generation by its forward
pass; `kvarto.Cache` against `DynamicCache`, and `StaticCache`, which does not copy the whole cache at every step. The prompt is random tokens,
read in chunks; for batches above 1 random keys and values are appended to every layer instead (--fill), which costs no prefill and gives the same
decode steps.

A step is what the user waits for, host and device. How much of it the device was busy is reported beside it: in eager mode the host may well be
the slower of the two, and then a faster cache shows in memory, and in larger batches, first. --dry-run: a tiny model, also without a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported.

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from measure_gpu import DEVICE, HAS_GPU, machine, write

NEEDED = (5, 24)  # transformers, as in pyproject.toml
BASELINE = Path(__file__).parent / "baselines" / "generate_gpu.json"
CACHES = ("dynamic", "static", "int4", "int8", "kivi2")
LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1 << 18, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
TINY = LLAMA | {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
PROFILED_STEPS = 4
FILL_TOKENS = 1024


def check_versions() -> None:
    """Say clearly what is missing: transformers hands caches to models in a new way since `NEEDED`."""
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < NEEDED:
        wanted = ".".join(map(str, NEEDED))
        raise SystemExit(
            f"transformers {transformers.__version__} is too old: kvarto.Cache needs {wanted} or newer; run: pip install 'transformers>={wanted}'"
        )


def make_model(config: dict[str, Any]) -> Any:
    """The model with random weights, made where it will run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if HAS_GPU else torch.float32)
    try:
        with torch.device(DEVICE):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def make_cache(name: str, model: Any, tokens: int) -> Any:
    """An empty cache with room for `tokens` tokens."""
    if name == "dynamic":
        return transformers.DynamicCache(config=model.config)
    if name == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=tokens)
    import kvarto

    return kvarto.Cache(model, name)


def cache_bytes(cache: Any) -> int:
    """What the cache holds, slack included."""
    if hasattr(cache, "footprint"):
        return int(cache.footprint().allocated_bytes)
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


# ---- the prompt ------------------------------------------------------------------------------------------------------


def prefill(model: Any, cache: Any, prompt: Tensor, chunk: int) -> Tensor:
    """prompt int64 [B, tokens], read `chunk` tokens at a time. Returns the next tokens [B, 1]."""
    for part in prompt.split(chunk, dim=1):
        logits = model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1:].argmax(dim=-1)  # type: ignore[no-any-return]


def fill(model: Any, cache: Any, prompt: Tensor) -> Tensor:
    """As if the prompt had been read: random keys and values in every layer. Returns the next tokens [B, 1]."""
    (B, tokens), config = prompt.shape, model.config
    for index in range(len(cache.layers)):
        for first in range(0, tokens, FILL_TOKENS):
            shape = (B, config.num_key_value_heads, min(FILL_TOKENS, tokens - first), config.head_dim)
            k, v = (torch.randn(shape, dtype=model.dtype, device=DEVICE) for _ in range(2))
            if hasattr(cache, "kv"):
                # What `kvarto.Cache` does between update and attention, but for attention; raw pages are let go as after it.
                cache.kv.append(index, k, v)
                cache.kv.layers[index].sequences.release_unreadable()
            else:
                cache.update(k, v, index)
    if hasattr(cache, "kv"):
        cache.adopt(B, tokens)
    return prompt[:, -1:]


# ---- steps -----------------------------------------------------------------------------------------------------------


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def decode(model: Any, cache: Any, token: Tensor, steps: int) -> Iterator[float]:
    """Seconds of each greedy step."""
    for _ in range(steps):
        synchronize()
        begin = time.perf_counter()
        token = model(input_ids=token, cache=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)
        synchronize()
        yield time.perf_counter() - begin


def device_ms(model: Any, cache: Any, token: Tensor) -> float | None:
    """Milliseconds of a step in which the device was busy, from torch's profiler."""
    if not HAS_GPU:
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in decode(model, cache, token, PROFILED_STEPS):
            pass
    return float(sum(event.self_device_time_total for event in profiled.key_averages())) / PROFILED_STEPS / 1e3


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if HAS_GPU else 0


def measure_cache(name: str, model: Any, prompt: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one cache and batch."""
    if HAS_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    B, tokens = prompt.shape
    cache = make_cache(name, model, tokens + options.steps + options.warm_steps + PROFILED_STEPS)
    synchronize()
    begin, reads = time.perf_counter(), options.fill == "prompt" or (options.fill == "mixed" and B == 1)
    token = prefill(model, cache, prompt, options.chunk) if reads else fill(model, cache, prompt)
    synchronize()
    filled, prefill_peak = time.perf_counter() - begin, peak_bytes()
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds = list(decode(model, cache, token, options.warm_steps + options.steps))[options.warm_steps :]
    low, median, high = statistics.quantiles(seconds, n=4)
    return {
        "cache": name, "batch": B, "context_tokens": tokens, "fill": "prompt" if reads else "random", "fill_seconds": filled,
        "kernel": getattr(cache, "kernel_names", None), "step_ms": {"median": 1e3 * median, "quartile_low": 1e3 * low, "quartile_high": 1e3 * high},
        "tokens_per_second": B / median, "cache_bytes": cache_bytes(cache), "fill_peak_bytes": prefill_peak, "decode_peak_bytes": peak_bytes(),
        "device_ms": device_ms(model, cache, token),
    }  # fmt: skip


def attempt(
    name: str, model: Any, prompt: Tensor, options: argparse.Namespace, console: Console
) -> dict[str, Any] | None:
    """`measure_cache`, or None and a line that says why not."""
    try:
        with torch.inference_mode():
            return measure_cache(name, model, prompt, options)
    except Exception as error:
        if options.debug:
            raise
        first_line = (str(error).strip() or "no message").splitlines()[0]
        console.print(
            f"left out: {name}, batch {len(prompt)}: {type(error).__name__}: {first_line[:200]}", markup=False
        )
        return None
    finally:
        with suppress(Exception):
            from kvarto.integrations.interface import detach

            detach(model)  # so that the next cache meets the model as it was


def report_table(results: list[dict[str, Any]]) -> Table:
    """Ratios are to DynamicCache with the same batch."""
    table = Table(title="greedy decode, eager")
    for column in (
        "batch x context", "cache", "ms a step (median)", "quartiles", "device ms", "tokens/s", "/ dynamic", "cache GB", "dynamic / it",
        "peak GB, decode", "peak GB, fill", "fill s",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    base = {result["batch"]: result for result in results if result["cache"] == "dynamic"}
    for result in results:
        dynamic, step = base.get(result["batch"]), result["step_ms"]
        faster = f"{result['tokens_per_second'] / dynamic['tokens_per_second']:.2f}" if dynamic else "-"
        smaller = f"{dynamic['cache_bytes'] / result['cache_bytes']:.2f}" if dynamic else "-"
        busy = "-" if result["device_ms"] is None else f"{result['device_ms']:.2f}"
        table.add_row(
            f"{result['batch']} x {result['context_tokens']}", result["cache"], f"{step['median']:.2f}",
            f"{step['quartile_low']:.2f} .. {step['quartile_high']:.2f}", busy, f"{result['tokens_per_second']:.1f}", faster,
            *(f"{nbytes / 1e9:.2f}" if isinstance(nbytes, int) else nbytes for nbytes in (result["cache_bytes"], smaller,
              result["decode_peak_bytes"], result["fill_peak_bytes"])), f"{result['fill_seconds']:.1f}",
        )  # fmt: skip
    return table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--caches", type=lambda text: text.split(","), default=list(CACHES), help=f"default {','.join(CACHES)}"
    )
    parser.add_argument("--batches", type=lambda text: [int(x) for x in text.split(",")], help="default 1,8")
    parser.add_argument("--context", type=int, help="tokens of the prompt (default 32768)")
    parser.add_argument("--chunk", type=int, default=2048, help="of the prompt that is read at once")
    parser.add_argument(
        "--fill",
        choices=("prompt", "random"),
        default="prompt",
        help="read a prompt, or fill the caches with random numbers",
    )
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--commit", help="the revision measured, where git is not at hand")
    parser.add_argument("--out", type=Path, help=f"JSON to write (default {BASELINE}, nothing with --dry-run)")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and few tokens, also without a GPU")
    parser.add_argument("--debug", action="store_true", help="stop at the first error, with a traceback")
    options = parser.parse_args(arguments)
    options.warm_steps = 4
    if options.dry_run:
        options.context, options.steps, options.chunk = options.context or 150, 4, 100
    options.context, options.batches = (
        options.context or 32768,
        options.batches or ([1, 2] if options.dry_run else [1, 8]),
    )
    options.out = options.out or (None if options.dry_run else BASELINE)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    check_versions()
    if not HAS_GPU and not options.dry_run:
        raise SystemExit("no NVIDIA GPU here; --dry-run tries the program without one")
    console = Console(width=None if sys.stdout.isatty() else 190)
    config = TINY if options.dry_run else LLAMA
    report: dict[str, Any] = {"machine": machine(options.commit), "model": config, "results": []}
    console.print(" ".join(f"{key}={value}" for key, value in report["machine"].items()), markup=False)
    model = make_model(config)
    report["weight_bytes"] = sum(x.numel() * x.element_size() for x in model.parameters())
    for batch in options.batches:
        prompt = torch.randint(0, config["vocab_size"], (batch, options.context), device=DEVICE)
        for name in options.caches:
            if (result := attempt(name, model, prompt, options, console)) is not None:
                report["results"].append(result)
                console.print(f"{name}, batch {batch}: {result['tokens_per_second']:.1f} tokens/s", markup=False)
    console.print(report_table(report["results"]))
    if options.out:
        write(report, options.out)
        console.print(f"written to {options.out}", markup=False)


if __name__ == "__main__":
    main()
