"""kvarto serve: our own names (serve/metrics.py)."""

from __future__ import annotations

from kvarto.diagnose.signals import Always, Answer, At, Counter, Engine, Gauge, Label, Setting, Timing

_MODEL = ("data", "0", "kvarto")
_PREFILL, _DECODE = ("prefill", "mixed"), ("decode",)

KVARTO = Engine(
    name="kvarto",
    title="kvarto",
    prefixes=("kvarto_",),
    marks=("pool_bytes", "kv_cache_usage_ratio"),
    read_from="this version, source and a live server",
    gauges={
        Gauge.RUNNING: (At("num_requests_running"),),
        Gauge.WAITING: (At("num_requests_waiting"),),
        Gauge.USAGE: (At("kv_cache_usage_ratio"),),
        Gauge.HELD_BYTES: (At("pool_held_bytes"),),
        Gauge.LIVE_TOKENS: (At("live_tokens"),),
    },
    counters={
        Counter.PREEMPTIONS: (At("preemptions"),),
        Counter.PROMPT_TOKENS: (At("prompt_tokens"),),
        Counter.COMPUTED_TOKENS: (At("computed_tokens", {"kind": ("prefill",)}),),
        Counter.CACHED_TOKENS: (At("cached_tokens"),),
        Counter.QUERIES: (At("prefix_cache_queries"),),
        Counter.HITS: (At("prefix_cache_hits"),),
        Counter.GENERATED: (At("computed_tokens", {"kind": ("decode",)}), At("generated_tokens")),
        Counter.PREFILL_SECONDS: (At("step_seconds_sum", {"kind": _PREFILL}),),
        Counter.DECODE_SECONDS: (At("step_seconds_sum", {"kind": _DECODE}),),
    },
    timings={
        Timing.TTFT: (At("time_to_first_token_seconds"),),
        Timing.ITL: (At("inter_token_latency_seconds"),),
        Timing.QUEUE: (At("request_queue_time_seconds"),),
        Timing.PREFILL: (At("request_prefill_time_seconds"),),
        Timing.DECODE: (At("request_decode_time_seconds"),),
        Timing.E2E: (At("e2e_request_latency_seconds"),),
    },
    settings={
        Setting.KV_DTYPE: (Answer("/v1/models", (*_MODEL, "kv_format")), Label("formats_info", "kv_format")),
        Setting.VERSION: (Answer("/v1/models", (*_MODEL, "version")),),
        Setting.MODEL: (Answer("/v1/models", ("data", "0", "root")), Label("formats_info", "model")),
        Setting.BACKEND: (Label("formats_info", "kernel"),),
        Setting.WEIGHTS_DTYPE: (Answer("/v1/models", (*_MODEL, "dtype")),),
        Setting.KV_BITS: (Answer("/v1/models", (*_MODEL, "formats", "0", "bits_per_number")),),
        Setting.POOL_TOKENS: (Answer("/v1/models", (*_MODEL, "formats", "0", "capacity_tokens")),),
        Setting.PREFIX_CACHING: (Always("on", "sealed pages are always shared by prefix"),),
        Setting.CHUNKED_PREFILL: (Always("on", "a step computes at most --step-tokens"),),
        Setting.CONTINUOUS_BATCHING: (Always("on", "requests join at any step"),),
        Setting.PAGED_KV: (Always("on", "pages of 64 tokens"),),
    },
    model_label="model",
    advice={
        "prefix caching": "it is always on; cache_salt separates tenants",
        "smaller chunks": "--step-tokens, --step-ms",
        "more sequences": "--max-running",
        "pool": "--memory",
        "format": "--kv",
    },
)

ENGINES = (KVARTO,)
