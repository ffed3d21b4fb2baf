"""What `kvarto plan` does, apart from its options: from words to a question, from an answer to a table, JSON or a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kvarto.errors import UnknownName, Unsupported, UsageError
from kvarto.files import require_writable, write_whole
from kvarto.formats import parse_policy
from kvarto.models.catalog import DEFAULT_MODEL
from kvarto.plan.answer import Answer, Question, Scenario, answer
from kvarto.plan.cached import CachedModel
from kvarto.plan.config import Config, Described, cached_model, described_model, read_config
from kvarto.plan.engines import engine_formats, engines, find_format
from kvarto.plan.gpu import Gpu, choose_gpu, gpus, parse_size
from kvarto.plan.measured import Measured, read_measured
from kvarto.plan.memory import Budget
from kvarto.plan.ours import OwnFormat, own_formats
from kvarto.plan.parameters import by_number
from kvarto.plan.prefixes import PrefixAnswer, prefix_answer
from kvarto.plan.speed import LAYER_COST_SECONDS
from kvarto.plan.trace import Cut, read_trace
from kvarto.plan.weights import Weights, as_dtype, weights_of
from kvarto.plan.written import KvFormat

_CONTEXT_TOKENS = 32_768
_OUTPUT_TOKENS = 512
_CONCURRENCY = 8
_HEADLINE_ENGINE = "vllm"


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line, as they were given."""

    model: str | None = None
    described: Described | None = None
    formats: str = ""
    context_tokens: int | None = None
    concurrency: int = _CONCURRENCY
    output_tokens: int | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    gpu_bandwidth: str | None = None
    gpu_tflops: float | None = None
    tp: int = 1
    pp: int = 1
    memory_share: float | None = None
    overhead: str = "2GiB"
    pool: str | None = None
    weights: str | None = None
    weights_bytes: str | None = None
    parameters: str | None = None
    active_parameters: str | None = None
    page_tokens: int | None = None
    layer_cost_us: float | None = None
    measured: Path | None = None
    trace: Path | None = None
    cut: Cut = field(default_factory=Cut)
    out: Path | None = None
    as_json: bool = False


def plan_command(options: PlanOptions) -> None:
    """Work it out and show it."""
    if options.out is not None:
        _check_out(options.out)
    made = answer(_question(options))
    prefixes = None
    if options.trace is not None:
        if not any(each.pool_tokens is not None for each in made.formats):
            raise UsageError(
                "--trace",
                "a pool to hold prefixes: --gpu (with weights that are known), or --pool 20GiB",
                made.weights_unknown or "none",
            )
        prefixes = prefix_answer(read_trace(options.trace, options.cut), made)
    if options.out is not None:
        _write(options.out, made, prefixes)
    if options.as_json:
        typer.echo(json.dumps(_whole(made, prefixes), indent=2, allow_nan=False))
        return
    from kvarto.plan.show import show

    show(Console(), made, prefixes, whole=bool(options.formats))
    if options.out is not None:
        Console(stderr=True).print(
            f"written: {options.out}", style="dim", highlight=False, markup=False, soft_wrap=True
        )


def list_gpus(*, as_json: bool) -> None:
    """Print the GPUs that are known."""
    if as_json:
        rows = [{"name": gpu.name, "title": gpu.title, "memory_bytes": gpu.memory_bytes, "bandwidth_bytes_per_second": gpu.bandwidth,
                 "bf16_flops": gpu.bf16_flops, "fp8_flops": gpu.fp8_flops or None, "source": gpu.source} for gpu in gpus().values()]  # fmt: skip
        typer.echo(json.dumps(rows, indent=2))
        return
    from kvarto.plan.show import show_gpus

    show_gpus(Console())


def _whole(made: Answer, prefixes: PrefixAnswer | None) -> dict[str, Any]:
    return made.to_json() | ({"trace": prefixes.to_json()} if prefixes else {})


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in (".html", ".svg", ".json"):
        raise UsageError("--out", "a name that ends in .html, .svg or .json", out)
    require_writable(out)


def _write(out: Path, made: Answer, prefixes: PrefixAnswer | None) -> None:
    if out.suffix.lower() == ".json":
        text = json.dumps(_whole(made, prefixes), indent=2, allow_nan=False)
    else:
        from kvarto.plan import report

        text = report.html(made, prefixes) if out.suffix.lower() == ".html" else report.svg(made, prefixes)
    write_whole(out, text.encode())


# ---- from words to a question ------------------------------------------------------------------------------------------


def _question(options: PlanOptions) -> Question:
    config, model = _model(options)
    measured = read_measured(options.measured) if options.measured else None
    gpu = _gpu(options, measured)
    weights, unknown = _weights(options, config)
    formats, baseline = _formats(options, model)
    notes: list[str] = []
    scenario = _scenario(options, model)
    budget = None
    if gpu is not None:
        named = {kv.engine for kv in formats} - {"kvarto"}
        share = options.memory_share
        if share is None:
            one = next(iter(named)) if len(named) == 1 else _HEADLINE_ENGINE
            share = engines()[one].memory_share
            notes.append(
                f"assumed: an engine takes {share:.0%} of a GPU (--memory-share), of which {options.overhead} is no weights and no cache (--overhead)"
            )
        budget = Budget(gpu, options.tp, options.pp, share, parse_size(options.overhead, "--overhead"))
    elif (options.tp, options.pp) != (1, 1):
        raise UsageError("--tp and --pp", "a --gpu too", "none")
    if options.page_tokens is not None and not 1 <= options.page_tokens <= 65536:
        raise UsageError("--page-tokens", "1 to 65536", options.page_tokens)
    used = sorted({kv.engine for kv in formats} & set(engines()))
    notes += [
        f"{engines()[name].title}: {engines()[name].note}" for name in used if engines()[name].note and _uneven(model)
    ]
    if weights is not None and weights.nbytes_known is None and weights.dtype not in ("bf16", "fp16", "fp32"):
        notes.append(
            f"weights: all matrices counted as {weights.dtype}; what a checkpoint leaves in 16 bits comes on top (--weights-bytes)"
        )
    cost = LAYER_COST_SECONDS if options.layer_cost_us is None else options.layer_cost_us / 1e6
    if not 0 <= cost < 1:
        raise UsageError("--layer-cost-us", "0 or more, below a second", options.layer_cost_us)
    if budget is not None and measured is None:
        notes.append(
            f"assumed: quantizing costs {cost * 1e6:.1f} us a layer and step (--layer-cost-us; vLLM's FP8 on H100); break-evens rest on it"
        )
    return Question(
        model, formats, baseline, scenario, weights, unknown, budget, parse_size(options.pool, "--pool") if options.pool else None, measured, cost,
        tuple(notes),
    )  # fmt: skip


def _uneven(model: CachedModel) -> bool:
    return model.has_states or any(getattr(part, "window_tokens", None) for part in model.parts)


def _model(options: PlanOptions) -> tuple[Config | None, CachedModel]:
    if options.described is not None:
        if options.model is not None:
            raise UsageError("model", "either MODEL or --layers", "both")
        return None, described_model(options.described)
    config = read_config(options.model or DEFAULT_MODEL)
    return config, cached_model(config)


def _gpu(options: PlanOptions, measured: Measured | None) -> Gpu | None:
    chosen = choose_gpu(options.gpu, options.gpu_memory, options.gpu_bandwidth, options.gpu_tflops)
    if chosen is not None and options.pool is not None:
        raise UsageError("--pool", "either a pool or a GPU", "both")
    if measured is None:
        return chosen
    fitting = next((gpu for gpu in gpus().values() if measured.gpu in gpu.reported), None)
    if chosen is None:
        if fitting is None:
            raise UsageError("--gpu", f"one that stands for the {measured.gpu} of --measured", "none")
        return fitting
    if chosen.reported and measured.gpu not in chosen.reported:
        remedy = f"say --gpu {fitting.name}" if fitting else ""
        raise UsageError("--measured", f"times of the {chosen.title}", f"those of {measured.gpu}", remedy)
    return chosen


def _weights(options: PlanOptions, config: Config | None) -> tuple[Weights | None, str]:
    """Weights, or why they are not known: only memory and speed need them."""
    if options.parameters is not None:
        active = parse_count(options.active_parameters, "--active-parameters") if options.active_parameters else None
        made = as_dtype(by_number(parse_count(options.parameters, "--parameters"), active), options.weights or "bf16")
        return _with_bytes(made, options), ""
    if options.active_parameters is not None:
        raise UsageError("--parameters", "the number of all, beside --active-parameters", "none")
    if config is None:
        if options.weights_bytes is None:
            return None, "a model by flags has no weights: say --parameters 8B or --weights-bytes 16GB"
        nbytes = parse_size(options.weights_bytes, "--weights-bytes")
        return as_dtype(by_number(max(2, nbytes // 2), None), "bf16"), ""
    try:
        return _with_bytes(weights_of(config, options.weights), options), ""
    except Unsupported as error:
        if options.weights_bytes is None:
            return None, str(error)
        nbytes = parse_size(options.weights_bytes, "--weights-bytes")
        return as_dtype(by_number(max(2, nbytes // 2), None), "bf16"), ""


def _with_bytes(made: Weights, options: PlanOptions) -> Weights:
    if options.weights_bytes is None:
        return made
    known = parse_size(options.weights_bytes, "--weights-bytes")
    scale = known / made.nbytes
    return Weights(
        made.parameters,
        made.dtype,
        made.inner_bytes * scale,
        made.expert_bytes * scale,
        made.outer_bytes * scale,
        known,
    )


def parse_count(text: str, name: str) -> int:
    """Such as 8B, 671e9, 1.5T or 500M."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text.strip()[-1:].lower(), 1.0)
    try:
        value = float(text.strip().rstrip("kKmMbBtT")) * factor
    except ValueError:
        value = -1.0
    if not 2 <= value <= 1e15:
        raise UsageError(name, "a number of parameters such as 8B, 500M or 671e9", repr(text)[:60])
    return int(value)


def _scenario(options: PlanOptions, model: CachedModel) -> Scenario:
    context = options.context_tokens
    if context is None:
        context = min(_CONTEXT_TOKENS, model.max_tokens or _CONTEXT_TOKENS)
    for name, value, most in (("--context", context, 1 << 24), ("--concurrency", options.concurrency, 1 << 20)):
        if not 1 <= value <= most:
            raise UsageError(name, f"1 to {most}", value)
    output = min(_OUTPUT_TOKENS, max(1, context // 8)) if options.output_tokens is None else options.output_tokens
    if not 1 <= output <= context:
        raise UsageError("--output-tokens", f"1 to the context's {context}", output)
    return Scenario(context, options.concurrency, output)


def _formats(options: PlanOptions, model: CachedModel) -> tuple[list[KvFormat], KvFormat]:
    """What is asked for, and what it is compared with: bf16 of ours, or where our pages cannot be written vLLM's."""
    others: dict[str, KvFormat] = {kv.name: kv for kv in engine_formats(options.page_tokens)}
    own = OwnFormat(parse_policy("bf16"))
    baseline: KvFormat = others["vllm:bf16"] if own.refuses(model) else own
    if not options.formats:
        return [*own_formats(), *others.values()], baseline
    chosen: dict[str, KvFormat] = {baseline.name: baseline}
    for word in _words(options.formats):
        for kv in _spelled(word, others):
            chosen.setdefault(kv.name, kv)
    return list(chosen.values()), baseline


def _words(text: str) -> list[str]:
    """Separated by commas, but those within +skip=0,1 belong to it."""
    words: list[str] = []
    for word in text.split(","):
        word = word.strip()
        if words and "+skip=" in words[-1] and word.lstrip("-").isdigit():
            words[-1] += f",{word}"
        elif word:
            words.append(word)
    if not words:
        raise UsageError("--formats", "names such as int4,fp8,vllm:fp8_e4m3,llama.cpp", repr(text))
    return words


def _spelled(word: str, others: dict[str, KvFormat]) -> Sequence[KvFormat]:
    if word == "all":
        return [*own_formats(), *others.values()]
    if word == "kvarto":
        return own_formats()
    if word in engines():
        return [kv for kv in others.values() if kv.engine == word]
    if ":" in word:
        return [others[find_format(word).name]]
    try:
        return [OwnFormat(parse_policy(word))]
    except UnknownName as error:
        raise UnknownName("format", error.got.strip("'") if isinstance(error.got, str) else word,
                          [*(kv.name for kv in own_formats()), *engines(), "all", *others]) from None  # fmt: skip
