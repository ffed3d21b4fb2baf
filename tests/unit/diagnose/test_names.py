"""Every version that was looked into tells what it tells, by the names that stand in its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import engine_pages as pages
from kvarto.diagnose.exposition import parse
from kvarto.diagnose.signals import Counter, Gauge, Timing
from kvarto.diagnose.window import make_window

NAMES = json.loads((Path(__file__).parent / "recorded" / "names.json").read_text())
ALWAYS = (
    Gauge.RUNNING,
    Gauge.WAITING,
    Gauge.USAGE,
    Counter.PROMPT_TOKENS,
    Counter.GENERATED,
    Timing.TTFT,
    Timing.ITL,
    Timing.E2E,
)
ALSO = {
    "vllm": (Counter.PREEMPTIONS, Timing.QUEUE, Timing.PREFILL, Timing.DECODE),
    "sglang": (Gauge.LIVE_TOKENS, Gauge.HIT_RATE),
}
SINCE = {
    Counter.QUERIES: (
        "vllm 0.8.5",
        "vllm 0.9.2",
        "vllm 0.10.2",
        "vllm 0.11.2",
        "vllm 0.13.0",
        "vllm 0.18.0",
        "vllm 0.32.0",
    ),
    Counter.CACHED_TOKENS: (
        "vllm 0.18.0",
        "vllm 0.32.0",
        "sglang 0.4.6.post5",
        "sglang 0.5.3",
        "sglang 0.5.10",
        "sglang 0.5.23",
    ),
    Counter.PREEMPTIONS: (*(name for name in NAMES if name.startswith("vllm")), "sglang 0.5.10", "sglang 0.5.23"),
    Counter.PREFILL_SECONDS: ("sglang 0.5.23",),
    Counter.CORRUPTED: ("vllm 0.11.2", "vllm 0.13.0", "vllm 0.18.0", "vllm 0.32.0"),
    Timing.QUEUE: (
        *(name for name in NAMES if name.startswith("vllm")),
        "sglang 0.5.3",
        "sglang 0.5.10",
        "sglang 0.5.23",
    ),
}


def page_of(version: str) -> str:
    """All of its names; what ends in seconds is a histogram."""
    timings = {name: (3, 0.5) for name in NAMES[version] if name.endswith("_seconds")}
    return pages.text_of({name: 1.0 for name in NAMES[version] if name not in timings}, timings)


def told(version: str, signal: Gauge | Counter | Timing) -> bool:
    window = make_window([parse(page_of(version))])
    assert window.engine.name == version.split()[0]
    return not window.missing(signal)


@pytest.mark.parametrize("version", NAMES)
def test_what_every_version_tells(version):
    for signal in (*ALWAYS, *ALSO[version.split()[0]]):
        assert told(version, signal), signal


@pytest.mark.parametrize("signal", SINCE, ids=lambda signal: signal.name)
def test_what_only_some_versions_tell(signal):
    assert {version for version in NAMES if told(version, signal)} == set(SINCE[signal])


def test_sglangs_queue_by_priority_counts_nobody_twice():
    text = "".join(
        f'sglang:num_queue_reqs{{model_name="m",priority="{priority}"}} {count}\n'
        for priority, count in (("", 5), ("0", 2), ("1", 3))
    )
    assert make_window([parse(text + "sglang:num_running_reqs 1\n")]).gauge(Gauge.WAITING).peak == 5
