"""The options of `kvarto plan`. Nothing here is slow to import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODEL, _LOAD, _GPU, _WEIGHTS, _TRACE, _SHOW = (
    "The model by flags, in place of MODEL", "The load", "GPUs", "Weights", "Prefix cache", "What is shown",
)  # fmt: skip


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A config.json, a folder with one, a name from `kvarto models`, or a hub id.")
    ] = None,
    *,
    formats: Annotated[
        str,
        typer.Option(
            help="Such as int4,int8/int4+sink64,vllm:fp8_e4m3; kvarto, vllm, sglang, tensorrt-llm, llama.cpp for all of theirs, or all. "
            "Default: our main ones and vLLM's; with --json or --out all.",
            rich_help_panel=_SHOW,
        ),
    ] = "",
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence, prompt and answer. Default: 32,768, or the model's.", rich_help_panel=_LOAD
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences at once.", rich_help_panel=_LOAD)] = 8,
    output_tokens: Annotated[
        int | None, typer.Option(help="How many of the context are the answer. Default: 512.", rich_help_panel=_LOAD)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Such as h100, h200, l4, mi300x; see --list-gpus.", rich_help_panel=_GPU)
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Such as 80GiB: of a GPU of your own.", rich_help_panel=_GPU)
    ] = None,
    gpu_bandwidth: Annotated[str | None, typer.Option(help="Such as 3.35TB/s.", rich_help_panel=_GPU)] = None,
    gpu_tflops: Annotated[float | None, typer.Option(help="Dense, at 16 bits.", rich_help_panel=_GPU)] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", rich_help_panel=_GPU)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", rich_help_panel=_GPU)] = 1,
    memory_share: Annotated[
        float | None, typer.Option(help="What an engine takes of a GPU. Default: vLLM's 0.92.", rich_help_panel=_GPU)
    ] = None,
    overhead: Annotated[
        str, typer.Option(help="Of that: activations, graphs, the runtime.", rich_help_panel=_GPU)
    ] = "2GiB",
    pool: Annotated[
        str | None,
        typer.Option(help="Bytes for keys and values, such as 20GiB, in place of a GPU.", rich_help_panel=_GPU),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="JSON of benchmarks/attention_gpu.py: times of kernels in place of bounds.", rich_help_panel=_GPU
        ),
    ] = None,
    layer_cost_us: Annotated[
        float | None, typer.Option(help="What quantizing costs a layer and step. Default: 4.4.", rich_help_panel=_GPU)
    ] = None,
    page_tokens: Annotated[
        int | None, typer.Option(help="Page size of other engines, in place of their own.", rich_help_panel=_GPU)
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="bf16, fp8, int8, int4, nvfp4, mxfp4. Default: the checkpoint's.", rich_help_panel=_WEIGHTS),
    ] = None,
    weights_bytes: Annotated[
        str | None, typer.Option(help="What they weigh, such as 16GB.", rich_help_panel=_WEIGHTS)
    ] = None,
    parameters: Annotated[str | None, typer.Option(help="Such as 8B.", rich_help_panel=_WEIGHTS)] = None,
    active_parameters: Annotated[
        str | None, typer.Option(help="Those that a token uses, of a model with experts.", rich_help_panel=_WEIGHTS)
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers that cache.", rich_help_panel=_MODEL)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", rich_help_panel=_MODEL)] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head dimension, of K and V.", rich_help_panel=_MODEL)] = None,
    v_dim: Annotated[int | None, typer.Option(help="Of V, if it is another.", rich_help_panel=_MODEL)] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads, for speeds.", rich_help_panel=_MODEL)] = None,
    window: Annotated[int | None, typer.Option(help="Sliding window in tokens.", rich_help_panel=_MODEL)] = None,
    window_layers: Annotated[
        int | None, typer.Option(help="How many layers have it. Default: all.", rich_help_panel=_MODEL)
    ] = None,
    latent_dim: Annotated[
        int | None, typer.Option(help="MLA: numbers of a token's latent.", rich_help_panel=_MODEL)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay requests: Mooncake or AIPerf JSONL, ShareGPT, OTel GenAI spans. Needs --gpu or --pool.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    trace_block_tokens: Annotated[
        int, typer.Option(help="Tokens that a hash id stands for.", rich_help_panel=_TRACE)
    ] = 512,
    chars_per_token: Annotated[float, typer.Option(help="To estimate tokens of text.", rich_help_panel=_TRACE)] = 4.0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="A page with curves (.html), the curves alone (.svg), or .json.", rich_help_panel=_SHOW
        ),
    ] = None,
    list_gpus: Annotated[
        bool, typer.Option("--list-gpus", help="GPUs by name, and nothing else.", rich_help_panel=_SHOW)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="An object for programs.", rich_help_panel=_SHOW)] = False,
) -> None:
    """Is the KV cache the bottleneck, and what would a format buy: bytes, room, bounds of speed, advice. Speeds are upper bounds.

    kvarto plan config.json --gpu h100 --context 32768 --concurrency 16
    """
    from kvarto.plan.command import PlanOptions, plan_command
    from kvarto.plan.command import list_gpus as print_gpus
    from kvarto.plan.config import Described
    from kvarto.plan.trace import Cut

    if list_gpus:
        print_gpus(as_json=as_json)
        return
    described = None
    shape = (kv_heads, head_dim, v_dim, heads, window, window_layers, latent_dim)
    if layers is not None:
        described = Described(layers, *shape)
    elif any(value is not None for value in shape):
        raise typer.BadParameter("a model by flags begins with --layers")
    plan_command(
        PlanOptions(
            model=model, described=described, formats=formats, context_tokens=context, concurrency=concurrency, output_tokens=output_tokens,
            gpu=gpu, gpu_memory=gpu_memory, gpu_bandwidth=gpu_bandwidth, gpu_tflops=gpu_tflops, tp=tp, pp=pp, memory_share=memory_share,
            overhead=overhead, pool=pool, weights=weights, weights_bytes=weights_bytes, parameters=parameters,
            active_parameters=active_parameters, page_tokens=page_tokens, layer_cost_us=layer_cost_us, measured=measured, trace=trace,
            cut=Cut(trace_block_tokens, chars_per_token=chars_per_token), out=out, as_json=as_json,
        )
    )  # fmt: skip
