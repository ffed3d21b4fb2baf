"""Metrics pages of engines that are not here, with the names of their source or documentation (see each engine's file)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvarto.diagnose.exposition import Page, parse

Value = float | Mapping[str, float]
"""A number, or numbers by labels as they stand on the page: {'mode="decode"': 3}."""


def text_of(values: Mapping[str, Value], timings: Mapping[str, tuple[float, float]] | None = None) -> str:
    """A page. `timings`: by name (count, mean in seconds); all observations lie in the bucket around the mean."""
    lines = []
    for name, value in values.items():
        for labels, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            lines.append(f"{name}{{{labels}}} {number}" if labels else f"{name} {number}")
    for name, (count, mean) in (timings or {}).items():
        for bound in (0.01, 0.1, 1.0, 10.0, 100.0):
            lines.append(f'{name}_bucket{{le="{bound}"}} {count if mean <= bound else 0}')
        lines += [f'{name}_bucket{{le="+Inf"}} {count}', f"{name}_sum {count * mean}", f"{name}_count {count}"]
    return "\n".join(lines) + "\n"


def page(
    values: Mapping[str, Value], timings: Mapping[str, tuple[float, float]] | None = None, at: float | None = None
) -> Page:
    """As the parser reads it."""
    return parse(text_of(values, timings), "test", at)


def vllm(
    *, usage: float = 0.5, waiting: float = 0, running: float = 8, preempted: float = 0, requests: float = 0, at: float | None = None,
    queue: float = 0.01, prefill: float = 0.2, decode: float = 4.0, hits: float = 0, blocks: int = 1000, **more: Any,
) -> Page:  # fmt: skip
    """vLLM 0.32 after so many requests of 1,000 prompt and 100 generated tokens; times are means of a request, in seconds."""
    model = 'model_name="m",engine="0"'
    values: dict[str, Value] = {
        "vllm:num_requests_running": {model: running},
        "vllm:num_requests_waiting": {model: waiting},
        "vllm:kv_cache_usage_perc": {model: usage},
        "vllm:num_preemptions_total": {model: preempted},
        "vllm:prompt_tokens_total": {model: 1000 * requests},
        "vllm:prompt_tokens_cached_total": {model: hits * 1000 * requests},
        "vllm:prefix_cache_queries_total": {model: 1000 * requests},
        "vllm:prefix_cache_hits_total": {model: hits * 1000 * requests},
        "vllm:generation_tokens_total": {model: 100 * requests},
        "vllm:cache_config_info": {
            f'block_size="16",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="{blocks}",engine="0"': 1
        },
        **more,
    }
    timings = {
        "vllm:time_to_first_token_seconds": (requests, queue + prefill),
        "vllm:inter_token_latency_seconds": (99 * requests, decode / 99),
        "vllm:request_queue_time_seconds": (requests, queue),
        "vllm:request_prefill_time_seconds": (requests, prefill),
        "vllm:request_decode_time_seconds": (requests, decode),
    }
    return page(values, timings, at)


def vllm_0_8(*, requests: float) -> str:
    """With the names before 0.9 and 0.11: gpu_cache_usage_perc, gpu_prefix_cache_*, time_per_output_token_seconds."""
    label = 'model_name="m"'
    return text_of(
        {
            "vllm:num_requests_running": {label: 4}, "vllm:num_requests_waiting": {label: 3}, "vllm:gpu_cache_usage_perc": {label: 0.97},
            "vllm:num_preemptions_total": {label: requests / 4}, "vllm:prompt_tokens_total": {label: 500 * requests},
            "vllm:generation_tokens_total": {label: 50 * requests}, "vllm:gpu_prefix_cache_queries_total": {label: 500 * requests},
            "vllm:gpu_prefix_cache_hits_total": {label: 100 * requests},
        },
        {"vllm:time_to_first_token_seconds": (requests, 0.5), "vllm:time_per_output_token_seconds": (49 * requests, 0.05)},
    )  # fmt: skip


def sglang(
    *, requests: float, prefix: str = "sglang:", usage: float = 0.6, waiting: float = 0, retracted: float = 0
) -> str:
    """SGLang 0.5.23, or with another spelling of the prefix."""
    label = 'model_name="m",tp_rank="0"'
    return text_of(
        {
            f"{prefix}num_running_reqs": {label: 6}, f"{prefix}num_queue_reqs": {label: waiting}, f"{prefix}token_usage": {label: usage},
            f"{prefix}kv_used_tokens": {label: usage * 100_000}, f"{prefix}max_total_num_tokens": {label: 100_000},
            f"{prefix}num_retracted_requests_total": {label: retracted}, f"{prefix}prompt_tokens_total": {label: 2000 * requests},
            f"{prefix}cached_tokens_total": {f'{label},cache_source="device"': 400 * requests, f'{label},cache_source="host"': 100 * requests},
            f"{prefix}generation_tokens_total": {label: 200 * requests},
            f"{prefix}realtime_tokens_total": {f'{label},mode="prefill_compute"': 1500 * requests, f'{label},mode="decode"': 200 * requests},
            f"{prefix}forward_execution_seconds_total": {f'{label},category="extend"': 0.9 * requests, f'{label},category="decode"': 0.1 * requests},
        },
        {f"{prefix}time_to_first_token_seconds": (requests, 0.9), f"{prefix}inter_token_latency_seconds": (199 * requests, 0.02)},
    )  # fmt: skip


def tensorrt_llm(*, requests: float, prefix: str = "trtllm_") -> str:
    """trtllm-serve of 2026."""
    label = 'model_name="m",engine_type="trtllm"'
    return text_of(
        {
            f"{prefix}num_requests_running": {label: 5}, f"{prefix}num_requests_waiting": {label: 7}, f"{prefix}kv_cache_utilization": {label: 0.96},
            f"{prefix}kv_cache_max_blocks": {label: 2000}, f"{prefix}kv_cache_tokens_per_block": {label: 32},
            f"{prefix}prompt_tokens_total": {label: 3000 * requests}, f"{prefix}prompt_cached_tokens_total": {label: 600 * requests},
            f"{prefix}generation_tokens_total": {label: 100 * requests}, f"{prefix}kv_cache_hit_rate": {label: 0.2},
            f"{prefix}kv_cache_config_info": {f'{label},enable_block_reuse="True",dtype="auto"': 1},
        },
        {
            f"{prefix}time_to_first_token_seconds": (requests, 2.0), f"{prefix}time_per_output_token_seconds": (requests, 0.03),
            f"{prefix}request_queue_time_seconds": (requests, 1.5),
        },
    )  # fmt: skip


def triton() -> str:
    """The TensorRT-LLM backend of Triton: blocks and requests only."""
    label = 'model="tensorrt_llm",version="1"'
    return text_of(
        {
            "nv_inference_request_success": {label: 500},
            "nv_trt_llm_request_metrics": {f'{label},request_type="scheduled"': 3, f'{label},request_type="waiting"': 0},
            "nv_trt_llm_kv_cache_block_metrics": {
                f'{label},kv_cache_block_type="fraction"': 0.31, f'{label},kv_cache_block_type="max"': 640,
                f'{label},kv_cache_block_type="tokens_per"': 64,
            },
        }
    )  # fmt: skip


def llamacpp_2024(*, requests: float) -> str:
    """llama.cpp's server before its KV gauges went."""
    return text_of(
        {
            "llamacpp:prompt_tokens_total": 1000 * requests, "llamacpp:prompt_seconds_total": 8 * requests,
            "llamacpp:tokens_predicted_total": 50 * requests,
            "llamacpp:tokens_predicted_seconds_total": 2 * requests, "llamacpp:kv_cache_usage_ratio": 0.4, "llamacpp:kv_cache_tokens": 1600,
            "llamacpp:requests_processing": 2, "llamacpp:requests_deferred": 0,
        }
    )  # fmt: skip


def times(pages: Sequence[Page]) -> list[Page]:
    """Ten seconds apart."""
    return [replace(each, at_seconds=1000.0 + 10 * number) for number, each in enumerate(pages)]


# ---- servers ----


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def reply(status: int, body: str | bytes, kind: str = "text/plain") -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.end_headers()
        handler.wfile.write(body.encode() if isinstance(body, str) else body)

    return answer


def by_path(answers: dict[str, tuple[int, str]]) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: reply(*answers.get(handler.path, (404, "nothing here")))(handler)
