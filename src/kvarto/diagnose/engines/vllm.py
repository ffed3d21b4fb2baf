"""vLLM. Names from the wheels 0.8.5 to 0.32.0: v1/metrics/loggers.py, and engine/metrics.py of V0. `versions`: of those wheels, which have a name."""

from __future__ import annotations

from kvarto.diagnose.signals import Always, Answer, At, Counter, Engine, Gauge, Label, Setting, Timing

_INFO = "cache_config_info"
_SERVER = "/server_info?config_format=json"  # only with VLLM_SERVER_DEV_MODE=1

VLLM = Engine(
    name="vllm",
    title="vLLM",
    prefixes=("vllm:", "vllm_"),
    marks=("num_requests_running", "cache_config_info"),
    read_from="wheels 0.8.5, 0.9.2, 0.10.2, 0.11.2, 0.13.0, 0.18.0 and 0.32.0, the last one live too",
    gauges={
        Gauge.RUNNING: (At("num_requests_running"),),
        # waiting_by_reason{capacity} counts whoever waits for the scheduler, for whatever: it says nothing of KV by itself (0.32, loggers.py)
        Gauge.WAITING: (At("num_requests_waiting"),),
        Gauge.USAGE: (At("kv_cache_usage_perc"), At("gpu_cache_usage_perc", versions="0.8.5 to 0.11.2")),
        Gauge.POOL_TOKENS: (At(_INFO, label="kv_cache_size_tokens", versions="0.32.0"),),
        Gauge.POOL_BLOCKS: (At(_INFO, label="num_gpu_blocks"),),
        Gauge.BLOCK_TOKENS: (At(_INFO, label="block_size"),),
        Gauge.HIT_RATE: (At("gpu_prefix_cache_hit_rate", versions="V0"),),
    },
    counters={
        Counter.PREEMPTIONS: (At("num_preemptions"),),
        Counter.PROMPT_TOKENS: (At("prompt_tokens"),),
        Counter.COMPUTED_TOKENS: (
            At("prompt_tokens_by_source", {"source": ("local_compute",)}, versions="since 0.18.0"),
        ),
        Counter.CACHED_TOKENS: (At("prompt_tokens_cached", versions="since 0.18.0"),),
        Counter.QUERIES: (
            At("prefix_cache_queries"),
            At("gpu_prefix_cache_queries", versions="V1 from 0.8.5 to 0.11.2"),
        ),
        Counter.HITS: (At("prefix_cache_hits"), At("gpu_prefix_cache_hits", versions="V1 from 0.8.5 to 0.11.2")),
        Counter.GENERATED: (At("generation_tokens"),),
        Counter.CORRUPTED: (At("corrupted_requests"),),
    },
    timings={
        Timing.TTFT: (At("time_to_first_token_seconds"),),
        Timing.ITL: (
            At("inter_token_latency_seconds", versions="since 0.10.2"),
            At("time_per_output_token_seconds", versions="0.8.5 to 0.13.0"),
            At("request_time_per_output_token_seconds", versions="since 0.11.2"),
        ),
        Timing.QUEUE: (At("request_queue_time_seconds"),),
        Timing.PREFILL: (At("request_prefill_time_seconds"),),
        Timing.DECODE: (At("request_decode_time_seconds"),),
        Timing.E2E: (At("e2e_request_latency_seconds"),),
    },
    settings={
        Setting.KV_DTYPE: (Label(_INFO, "cache_dtype"),),
        Setting.PREFIX_CACHING: (Label(_INFO, "enable_prefix_caching"),),
        Setting.CHUNKED_PREFILL: (Answer(_SERVER, ("vllm_config", "scheduler_config", "enable_chunked_prefill")),),
        Setting.BACKEND: (Answer(_SERVER, ("vllm_config", "attention_config", "backend")),),
        Setting.VERSION: (Answer("/version", ("version",)),),
        Setting.MODEL: (Answer("/v1/models", ("data", "0", "root")), Answer("/v1/models", ("data", "0", "id"))),
        Setting.CONTINUOUS_BATCHING: (Always("on", "vLLM's scheduler knows nothing else"),),
        Setting.PAGED_KV: (Always("on", "vLLM's cache knows nothing else"),),
    },
    advice={
        "prefix caching": "--enable-prefix-caching",
        "chunked prefill": "--enable-chunked-prefill",
        "smaller chunks": "--max-num-batched-tokens",
        "more sequences": "--max-num-seqs",
        "pool": "--gpu-memory-utilization",
        "format": "--kv-cache-dtype",
    },
)

ENGINES = (VLLM,)
