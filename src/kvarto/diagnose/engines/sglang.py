"""SGLang, started with --enable-metrics. Names from the wheels 0.4.3 to 0.5.23 (srt/observability/metrics_collector.py).

With priority scheduling the queue is told in all (priority="") and by priority: adding those up would count everybody twice.
"""

from __future__ import annotations

from kvarto.diagnose.signals import Always, Answer, At, Counter, Engine, Gauge, Label, Setting, Timing

_SERVER = "/server_info"
_ALL = {"priority": ("",)}

SGLANG = Engine(
    name="sglang",
    title="SGLang",
    prefixes=("sglang:", "sglang_"),
    marks=("num_running_reqs", "token_usage"),
    read_from="wheels 0.4.3, 0.4.6.post5, 0.5.3, 0.5.10 and 0.5.23",
    gauges={
        Gauge.RUNNING: (At("num_running_reqs", _ALL),),
        Gauge.WAITING: (At("num_queue_reqs", _ALL),),
        Gauge.USAGE: (At("token_usage"),),
        Gauge.LIVE_TOKENS: (At("kv_used_tokens", versions="0.5.23"), At("num_used_tokens")),
        Gauge.POOL_TOKENS: (At("max_total_num_tokens"),),
        Gauge.POOL_BLOCKS: (
            At("num_pages", versions="0.5.23"),
            At("cache_config_info", label="num_pages", versions="0.5.10"),
        ),
        Gauge.BLOCK_TOKENS: (
            At("page_size", versions="0.5.23"),
            At("cache_config_info", label="page_size", versions="0.5.10"),
        ),
        Gauge.HIT_RATE: (At("cache_hit_rate"),),
    },
    counters={
        Counter.PREEMPTIONS: (At("num_retracted_requests", versions="since 0.5.10"),),
        Counter.PROMPT_TOKENS: (At("prompt_tokens"),),
        Counter.COMPUTED_TOKENS: (At("realtime_tokens", {"mode": ("prefill_compute",)}),),
        Counter.CACHED_TOKENS: (At("cached_tokens"),),
        Counter.GENERATED: (At("generation_tokens"),),
        Counter.PREFILL_SECONDS: (
            At("forward_execution_seconds", {"category": ("extend", "mixed", "EXTEND", "MIXED")}),
        ),
        Counter.DECODE_SECONDS: (At("forward_execution_seconds", {"category": ("decode", "DECODE")}),),
    },
    timings={
        Timing.TTFT: (At("time_to_first_token_seconds"),),
        Timing.ITL: (
            At("inter_token_latency_seconds", versions="since 0.4.6.post5"),
            At("time_per_output_token_seconds", versions="0.4.3"),
            At("request_time_per_output_token_seconds"),
        ),
        Timing.QUEUE: (At("queue_time_seconds", versions="since 0.5.3"),),
        Timing.E2E: (At("e2e_request_latency_seconds"),),
    },
    settings={
        Setting.KV_DTYPE: (Answer(_SERVER, ("kv_cache_dtype",)),),
        Setting.PREFIX_CACHING: (Answer(_SERVER, ("disable_radix_cache",), inverted=True),),
        Setting.CHUNKED_PREFILL: (Answer(_SERVER, ("chunked_prefill_size",), above_zero=True),),
        Setting.BACKEND: (Answer(_SERVER, ("attention_backend",)),),
        Setting.VERSION: (Answer(_SERVER, ("version",)),),
        Setting.MODEL: (Answer(_SERVER, ("model_path",)), Label("num_running_reqs", "model_name")),
        Setting.CONTINUOUS_BATCHING: (Always("on", "SGLang's scheduler knows nothing else"),),
        Setting.PAGED_KV: (Always("on", "SGLang's pool is of pages, of one token where --page-size is 1"),),
    },
    absent={
        Timing.PREFILL: "SGLang gives the seconds of forward passes instead",
        Timing.DECODE: "SGLang gives the seconds of forward passes instead",
    },
    advice={
        "prefix caching": "leave out --disable-radix-cache",
        "chunked prefill": "--chunked-prefill-size",
        "smaller chunks": "--chunked-prefill-size",
        "more sequences": "--max-running-requests",
        "pool": "--mem-fraction-static",
        "format": "--kv-cache-dtype",
    },
)

ENGINES = (SGLANG,)
