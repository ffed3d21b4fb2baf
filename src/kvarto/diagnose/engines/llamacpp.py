"""llama.cpp's server, started with --metrics. Names from tools/server/server-task.cpp of 2026 and older README files.

No version has histograms.
"""

from __future__ import annotations

from kvarto.diagnose.signals import Always, Answer, At, Counter, Engine, Gauge, Setting, Timing

LLAMACPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    prefixes=("llamacpp:", "llamacpp_"),
    marks=("requests_processing", "tokens_predicted"),
    read_from="0.5.0-dev of 2026-10, source and a live server; b3000 to b6000, README",
    gauges={
        Gauge.RUNNING: (At("requests_processing"),),
        Gauge.WAITING: (At("requests_deferred"),),
        Gauge.USAGE: (At("kv_cache_usage_ratio", versions="until 2025"),),
        Gauge.LIVE_TOKENS: (At("kv_cache_tokens", versions="until 2025"),),
        Gauge.BUSY_SLOTS: (At("n_busy_slots_per_decode"),),
    },
    counters={
        Counter.COMPUTED_TOKENS: (At("prompt_tokens"),),  # without those of the cache
        Counter.CACHED_TOKENS: (At("prompt_tokens_cached", versions="since 2026"),),
        Counter.GENERATED: (At("tokens_predicted"),),
        Counter.PREFILL_SECONDS: (At("prompt_seconds"),),
        Counter.DECODE_SECONDS: (At("tokens_predicted_seconds"),),
    },
    timings={},
    settings={
        Setting.VERSION: (Answer("/props", ("build_info",)),),
        Setting.MODEL: (Answer("/props", ("model_path",)),),
        Setting.WEIGHTS_BYTES: (Answer("/v1/models", ("data", "0", "meta", "size")),),
        Setting.CHUNKED_PREFILL: (Always("on", "a step takes at most n_batch tokens"),),
        Setting.PAGED_KV: (Always("off", "one buffer for all slots (unified KV) or a part for each: no pages"),),
    },
    waits_for="a slot, which -c divided by -np pays for in KV memory",
    seconds_of_steps=False,  # each slot adds the time of a step that it shares with others
    absent={
        **dict.fromkeys(Timing, "llama.cpp has no histograms; only totals"),
        Gauge.USAGE: "llama.cpp dropped kv_cache_usage_ratio in 2025: whether memory is the limit cannot be seen",
        Counter.PREEMPTIONS: "llama.cpp preempts nobody: a request that does not fit fails or waits for a slot",
    },
    advice={
        "prefix caching": "cache_prompt: true (the default), --slot-prompt-similarity, --cache-reuse",
        "smaller chunks": "-ub (n_ubatch)",
        "more sequences": "-np (slots)",
        "pool": "-c (n_ctx)",
        "format": "-ctk, -ctv with -fa on",
    },
)

ENGINES = (LLAMACPP,)
