"""kvarto serve under a trace with shared prefixes, formats and peers at equal memory: `python benchmarks/serve.py [--quick] [--trace FILE]`.

trace   requests arrive when they arrive (or `--concurrency` at a time). Memory is so small that bf16 forgets prefixes which come again.
long    a document of thousands of tokens is computed once; then questions about it, four at a time, with memory enough for everybody.

Every arm is a server process of its own that begins with an empty cache and is driven over HTTP (transformers: see peers_serve.py); all compute in
float32 with the same weights and number of threads, and generate exactly as many tokens as the trace says. Arms run in turn within a repeat.
llama.cpp gets as many tokens of context as the memory holds in its cache type, and as many slots as requests have room in; transformers, whose
cache has the model's dtype, float32, as many as fit in bf16: twice the bytes. TTFT counts from when a request is due. Where other processes share the
cores, seconds say little: `server_cpu_seconds` is what the server's process computed, and with one thread (`--threads 1`) it is what the replay would
take alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import traces
from kvarto.errors import KvartoError
from measure import Neighbours, machine
from peers_serve import LLAMA_MOST_SLOTS, LLAMA_TYPES, gguf_of, missing
from replay import Answer, Ask, counters, healthy, replay_http, summary, typical

BASELINE = Path(__file__).parent / "baselines" / "serve.json"
PEERS = Path(__file__).parent / "peers_serve.py"
COUNTERS = ("kvarto_preemptions_total", "kvarto_dropped_pieces_total", "kvarto_steps_total")
START_SECONDS = 300.0
LONG_CONCURRENCY = 4
QUICK = traces.Shape(
    sessions=2,
    loners=1,
    documents=1,
    document_blocks=3,
    turns=2,
    session_seconds=0.5,
    think_seconds=0.5,
    output_tokens=8,
)


# ---- arms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What an arm is given: `first` is sent before, one after another, and not counted."""

    model: str
    asks: list[Ask]
    first: list[Ask]
    concurrency: int | None
    memory_bytes: int
    numbers_per_token: int
    threads: int
    step_tokens: int
    step_ms: float | None = None

    def tokens(self, bits: float) -> int:
        """That fit the memory at so many bits per number."""
        return int(self.memory_bytes * 8 / bits / self.numbers_per_token)


@dataclass(frozen=True)
class Server:
    base: str
    process: psutil.Process
    said: str


@contextlib.contextmanager
def serving(command: Sequence[str], threads: int) -> Iterator[Server]:
    """A server in a process of its own, once it says where it listens. Raises RuntimeError with its last words if it does not."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                over = process.poll() is not None  # before its words are read, so that none is missed
                log.seek(0)
                said = log.read()
                if found := re.search(r"listening on (http://[\w.:]+)", said):
                    break
                if over or time.monotonic() > deadline:
                    raise RuntimeError("did not start: " + " ".join(said.split())[-300:])
                time.sleep(0.1)
            asyncio.run(healthy(found[1], deadline - time.monotonic()))
            yield Server(found[1], psutil.Process(process.pid), said)
        finally:
            if process.stdin:
                process.stdin.close()
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def drive(server: Server, job: Job) -> dict[str, Any]:
    """The job over HTTP."""
    asyncio.run(replay_http(job.first, server.base, 1))
    neighbours, cpu = Neighbours(0, [server.process]), _cpu_seconds(server.process)
    answers = asyncio.run(replay_http(job.asks, server.base, job.concurrency))
    return accounts(summary(answers), _cpu_seconds(server.process) - cpu) | {
        "others_share_of_cores": round(neighbours.share(), 3),
        "server_rss_bytes": server.process.memory_info().rss,
    }


def accounts(run: dict[str, Any], cpu_seconds: float) -> dict[str, Any]:
    """A run's summary with what its server's process computed."""
    speed = {"output_tokens_per_cpu_second": round(run["output_tokens"] / cpu_seconds, 3)} if "seconds" in run else {}
    return run | {"server_cpu_seconds": round(cpu_seconds, 1)} | speed


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run_kvarto(kv: str, job: Job) -> dict[str, Any]:
    command = [sys.executable, "-c", "from kvarto.cli import main; main()", "serve", job.model, "--kv", kv]
    command += ["--memory", str(job.memory_bytes), "--port", "0", "--threads", str(job.threads)]
    command += ["--step-tokens", str(job.step_tokens)]
    command += [] if job.step_ms is None else ["--step-ms", str(job.step_ms)]
    with serving(command, job.threads) as server:
        result = drive(server, job)
        fits = re.search(r"([\d,]+) tokens fit", server.said)
        told = asyncio.run(counters(server.base, COUNTERS))
    return result | {"fits_tokens": int(fits[1].replace(",", "")) if fits else None} | told


def run_llama(kind: str, job: Job) -> dict[str, Any]:
    tokens = job.tokens(LLAMA_TYPES[kind])
    longest = max(len(ask.prompt) + ask.output_tokens for ask in job.asks)
    slots = max(1, min(LLAMA_MOST_SLOTS, tokens // longest))
    numbers = map(str, (tokens, slots, job.threads))
    command = [sys.executable, str(PEERS), "llama.cpp", str(gguf_of(job.model)), kind, *numbers]
    with serving(command, job.threads) as server:
        return drive(server, job) | {"fits_tokens": tokens}


def run_transformers(job: Job) -> dict[str, Any]:
    asked = {
        "model": job.model, "threads": job.threads, "tokens": job.tokens(16), "step_tokens": job.step_tokens,
        "concurrency": job.concurrency, "asks": [ask.as_json() for ask in job.asks], "first": [ask.as_json() for ask in job.first],
    }  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(job.threads)}
    done = subprocess.run(
        [sys.executable, str(PEERS), "transformers"], input=json.dumps(asked), capture_output=True, text=True,
        env=environment, check=False, timeout=3600,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError("failed: " + " ".join(done.stderr.split())[-300:])
    told = json.loads(done.stdout.splitlines()[-1])
    answers = [Answer(**each) for each in told["answers"]]
    return accounts(summary(answers), told["cpu_seconds"]) | {"fits_tokens": asked["tokens"]}


Arm = Callable[[Job], dict[str, Any]]


def arms(options: argparse.Namespace) -> tuple[dict[str, Arm], dict[str, str]]:
    """Who runs, by name, and who does not, with why."""
    found: dict[str, Arm] = {f"kvarto {kv}": partial(run_kvarto, kv) for kv in options.formats}
    skipped = {}
    for peer in options.peers:
        if reason := missing(peer):
            skipped[peer] = reason
        elif peer == "transformers":
            found[peer] = run_transformers
        else:
            found |= {f"{peer} {kind}": partial(run_llama, kind) for kind in LLAMA_TYPES}
    return found, skipped


# ---- jobs ------------------------------------------------------------------------------------------------------------


def jobs(options: argparse.Namespace, requests: Sequence[traces.Request]) -> dict[str, Job]:
    """What is measured, by name. The model is looked up here."""
    from transformers import AutoConfig, AutoTokenizer

    from kvarto.engine.engine import parse_bytes
    from kvarto.models.load import resolve
    from kvarto.models.texts import texts

    folder = resolve(options.model)
    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    corpus = AutoTokenizer.from_pretrained(folder)("\n\n".join(document.text for document in texts()), verbose=False)[
        "input_ids"
    ]
    words = traces.Words(corpus, options.block_tokens)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    trace = Job(
        options.model, [Ask(each.due_seconds / options.speed, words.prompt(each), each.output_tokens) for each in requests], [],
        options.concurrency, parse_bytes(options.memory), 2 * config.num_hidden_layers * heads * width, options.threads,
        options.step_tokens, options.step_ms,
    )  # fmt: skip
    found = {"trace": trace}
    if options.long_tokens:
        document = corpus[: options.long_tokens]
        asks = [
            Ask(0.0, document + words.block(n)[:32], options.long_output_tokens) for n in range(options.long_questions)
        ]
        found["long"] = replace(
            trace,
            asks=asks,
            first=[Ask(0.0, document, 2)],
            concurrency=LONG_CONCURRENCY,
            memory_bytes=parse_bytes(options.long_memory),
        )
    return {name: job for name, job in found.items() if name in options.jobs}


# ---- report ----------------------------------------------------------------------------------------------------------


def measure(
    job: Job, found: dict[str, Arm], repeats: int, console: Console, skipped: dict[str, str]
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Runs of each arm so far, after each one; in turn within each repeat. Who fails is skipped from then on."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        for name, arm in found.items():
            if name in skipped:
                continue
            try:
                run = arm(job) | {"repeat": repeat}
            except (RuntimeError, OSError, ValueError, KvartoError, subprocess.SubprocessError) as error:
                skipped[name] = f"{type(error).__name__}: {error}"
                console.print(f"{name} {skipped[name]}", style="red", markup=False)
                continue
            runs.setdefault(name, []).append(run)
            console.print(
                f"{repeat + 1}/{repeats} {name}: {run.get('seconds')} s, {run['server_cpu_seconds']} s of CPU, hit rate {run.get('hit_rate')}"
            )
            yield runs


COLUMNS = {
    "tokens fit": "fits_tokens", "hit rate": "hit_rate", "failed": "failed", "out tok/s": "output_tokens_per_second", "CPU s": "server_cpu_seconds",
    "TTFT p50": "ttft_seconds p50", "TTFT p95": "ttft_seconds p95", "ITL p50": "itl_seconds p50", "ITL p95": "itl_seconds p95",
    "dropped": COUNTERS[1], "preempted": COUNTERS[0],
}  # fmt: skip


def show(title: str, runs: dict[str, list[dict[str, Any]]], console: Console) -> None:
    """The middle run of each arm."""
    table = Table(title=title)
    table.add_column("arm")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, each in runs.items():
        cells = [_cell(typical(each), key.split()) for key in COLUMNS.values()]
        table.add_row(name, *cells)
    console.print(table)


def _cell(run: dict[str, Any], path: Sequence[str]) -> str:
    value: Any = run
    for key in path:
        value = value.get(key, "") if value else ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def against(runs: dict[str, list[dict[str, Any]]], measure: str) -> dict[str, dict[str, list[float]]]:
    """`measure` of each arm of ours over that of each other arm, one ratio for each repeat in which both have it."""
    values = {name: {run["repeat"]: run[measure] for run in each if measure in run} for name, each in runs.items()}
    return {
        ours: {
            other: [round(values[ours][repeat] / value, 3) for repeat, value in theirs.items() if repeat in values[ours]]
            for other, theirs in values.items() if other != ours
        }
        for ours in values if ours.startswith("kvarto")
    }  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny trace, bf16 and int4, no peers, once; writes nothing"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what the trace is and who would run; needs no model"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--trace", type=Path, default=None, help="a Mooncake JSONL file instead of the made trace")
    parser.add_argument(
        "--block-tokens", type=int, default=None, help="of a hash id (default 512 with --trace, else 64)"
    )
    parser.add_argument("--write-trace", type=Path, default=None, help="write the trace that is used, as JSONL")
    parser.add_argument("--seed", type=int, default=0, help="of the made trace")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals so many times as fast")
    parser.add_argument(
        "--concurrency", type=int, default=None, help="closed loop: so many at a time, whatever the arrivals"
    )
    parser.add_argument("--memory", default="48MiB", help="for keys and values, of every arm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=512,
        help="most tokens of a step, of kvarto and transformers; llama.cpp has 512",
    )
    parser.add_argument(
        "--step-ms", type=float, default=None, help="of kvarto serve; 0: prompts take as much of a step as they can"
    )
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--jobs", type=lambda text: text.split(","), default=["trace", "long"])
    parser.add_argument("--formats", type=lambda text: text.split(","), default=None)
    parser.add_argument("--peers", type=lambda text: text.split(",") if text else [], default=None)
    parser.add_argument("--long-tokens", type=int, default=None, help="of the document of the long job; 0: none")
    parser.add_argument("--long-questions", type=int, default=8)
    parser.add_argument("--long-output-tokens", type=int, default=32)
    parser.add_argument("--long-memory", default="1GiB")
    parser.add_argument(
        "--out", type=Path, default=None, help=f"JSON to write (default {BASELINE}, nothing with --quick)"
    )
    options = parser.parse_args(arguments)
    options.formats = options.formats or (["bf16", "int4"] if options.quick else ["bf16", "int8", "int4"])
    options.peers = ([] if options.quick else ["transformers", "llama.cpp"]) if options.peers is None else options.peers
    options.repeats = options.repeats or (1 if options.quick else 2)
    options.block_tokens = options.block_tokens or (512 if options.trace else 64)
    if options.long_tokens is None:
        options.long_tokens = 0 if options.quick else 6144
    options.out = options.out or (None if options.quick else BASELINE)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if options.trace:
        requests = traces.read(options.trace, options.block_tokens)
    else:
        shape = QUICK if options.quick else traces.Shape()
        requests = traces.generate(replace(shape, seed=options.seed, block_tokens=options.block_tokens))
    if options.write_trace:
        traces.write(options.write_trace, requests)
    about = traces.facts(requests, options.block_tokens)
    console.print("trace: " + ", ".join(f"{key} {value:g}" for key, value in about.as_json().items()))
    found, skipped = arms(options)
    for name, reason in skipped.items():
        console.print(f"skipped: {name}: {reason}")
    if options.dry_run:
        for part in (1, 2, 4):
            rate = traces.lru_hit_rate(requests, options.block_tokens, about.distinct_tokens // part)
            console.print(
                f"a cache of {about.distinct_tokens // part:,} tokens finds {rate:.1%} at most, one request after another"
            )
        console.print("would run: " + ", ".join(found))
        return
    report: dict[str, Any] = {
        "machine": machine() | {"threads": options.threads},
        "trace": about.as_json(),
        "skipped": skipped,
    }
    for name, job in jobs(options, requests).items():
        runs: dict[str, list[dict[str, Any]]] = {}
        for runs in measure(job, found, options.repeats, console, skipped):
            report[name] = about_job(job, runs)
            save(options.out, report)  # after every run: a long measurement that is cut short is not lost
        if name == "trace" and runs:
            report[name]["lru_hit_rate"] = {
                arm: round(traces.lru_hit_rate(requests, options.block_tokens, each[0]["fits_tokens"]), 4)
                for arm, each in runs.items()
            }
        loop = "open loop" if job.concurrency is None else f"{job.concurrency} at a time"
        show(f"{name}: {len(job.asks)} requests, {loop}, {job.memory_bytes / 2**20:,.0f} MiB; seconds", runs, console)
    save(options.out, report)


def about_job(job: Job, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "memory_bytes": job.memory_bytes, "concurrency": job.concurrency, "requests": len(job.asks), "runs": runs,
        "throughput_over": against(runs, "output_tokens_per_second"),
        "throughput_per_cpu_second_over": against(runs, "output_tokens_per_cpu_second"),
    }  # fmt: skip


def save(out: Path | None, report: dict[str, Any]) -> None:
    """Whole or not at all."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial_file = out.with_suffix(".partial")
        partial_file.write_text(json.dumps(report, indent=1) + "\n")
        partial_file.replace(out)


if __name__ == "__main__":
    main()
