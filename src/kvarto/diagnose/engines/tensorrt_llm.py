"""TensorRT-LLM, by trtllm-serve, by Dynamo, or as a backend of Triton.

Names from tensorrt_llm/metrics/collector.py (2026) and the documentation of Dynamo and of Triton's backend.
trtllm-serve gives its page at /prometheus/metrics; its /metrics is JSON of iterations. Times need `return_perf_metrics: true`.
"""

from __future__ import annotations

from kvarto.diagnose.signals import Always, Answer, At, Counter, Engine, Gauge, Label, Setting, Timing

_ADVICE = {
    "prefix caching": "kv_cache_config.enable_block_reuse: true",
    "chunked prefill": "enable_chunked_prefill: true",
    "smaller chunks": "max_num_tokens",
    "more sequences": "max_batch_size",
    "pool": "kv_cache_config.free_gpu_memory_fraction",
    "format": "kv_cache_config.dtype",
}

TRTLLM = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    prefixes=("trtllm_", "trtllm:"),
    marks=("kv_cache_utilization", "kv_cache_hit_rate", "request_success", "e2e_request_latency_seconds_count"),
    read_from="main of 2026, source; 1.1.0rc5, documentation of Dynamo (five names only)",
    gauges={
        Gauge.RUNNING: (At("num_requests_running"), At("num_active_requests")),
        Gauge.WAITING: (At("num_requests_waiting"), At("num_queued_requests")),
        Gauge.USAGE: (At("kv_cache_utilization"), At("kv_cache_usage_perc")),
        Gauge.POOL_BLOCKS: (At("kv_cache_max_blocks"),),
        Gauge.BLOCK_TOKENS: (At("kv_cache_tokens_per_block"),),
        Gauge.HIT_RATE: (At("kv_cache_hit_rate"),),
    },
    counters={
        Counter.PROMPT_TOKENS: (At("prompt_tokens"),),
        Counter.CACHED_TOKENS: (At("prompt_cached_tokens"),),
        Counter.GENERATED: (At("generation_tokens"),),
    },
    timings={
        Timing.TTFT: (At("time_to_first_token_seconds"),),
        Timing.ITL: (At("time_per_output_token_seconds"),),
        Timing.QUEUE: (At("request_queue_time_seconds"),),
        Timing.PREFILL: (At("request_prefill_time_seconds"),),
        Timing.DECODE: (At("request_decode_time_seconds"),),
        Timing.E2E: (At("e2e_request_latency_seconds"),),
    },
    settings={
        Setting.KV_DTYPE: (Label("kv_cache_config_info", "dtype"), Label("kv_cache_config_info", "cache_dtype")),
        Setting.PREFIX_CACHING: (Label("kv_cache_config_info", "enable_block_reuse"),),
        Setting.VERSION: (Answer("/version", ("version",)),),
        Setting.MODEL: (Label("model_config_info", "model"),),
        Setting.CONTINUOUS_BATCHING: (Always("on", "trtllm-serve schedules in flight"),),
        Setting.PAGED_KV: (Always("on", "trtllm-serve's cache is of blocks"),),
    },
    absent={Counter.PREEMPTIONS: "TensorRT-LLM counts none; num_paused_requests is of one moment"},
    paths=("/prometheus/metrics", "/metrics"),
    advice=_ADVICE,
)

TRITON = Engine(
    name="triton-tensorrt-llm",
    title="TensorRT-LLM behind Triton",
    formats_of="tensorrt-llm",
    prefixes=("nv_trt_llm_", "nv_"),
    marks=("kv_cache_block_metrics", "request_metrics"),
    read_from="documentation of tensorrtllm_backend",
    gauges={
        Gauge.RUNNING: (At("request_metrics", {"request_type": ("scheduled",)}),),
        Gauge.WAITING: (At("request_metrics", {"request_type": ("waiting",)}),),
        Gauge.USAGE: (At("kv_cache_block_metrics", {"kv_cache_block_type": ("fraction",)}),),
        Gauge.POOL_BLOCKS: (At("kv_cache_block_metrics", {"kv_cache_block_type": ("max",)}),),
        Gauge.BLOCK_TOKENS: (At("kv_cache_block_metrics", {"kv_cache_block_type": ("tokens_per",)}),),
    },
    counters={},
    timings={},
    settings={
        Setting.CONTINUOUS_BATCHING: (Always("on", "the page is of the in-flight batcher"),),
        Setting.PAGED_KV: (Always("on", "the page counts blocks"),),
    },
    absent={
        **dict.fromkeys(Timing, "Triton gives no such histogram: put trtllm-serve or a gateway beside it"),
        Counter.PREEMPTIONS: "Triton counts none",
    },
    model_label="model",
    advice=_ADVICE,
)

ENGINES = (TRTLLM, TRITON)
