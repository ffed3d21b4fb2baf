"""Names over engines and versions; differences; restarts; what is missing is missing."""

from __future__ import annotations

import re

import pytest

import engine_pages as pages
from kvarto.diagnose.engines import registry
from kvarto.diagnose.exposition import parse
from kvarto.diagnose.signals import Counter, Gauge, Timing
from kvarto.diagnose.window import make_window
from kvarto.errors import UsageError
from kvarto.plan.engines import engines as plan_engines


def window(*texts: str, **options):
    return make_window(pages.times([parse(text) for text in texts]), **options)


@pytest.mark.parametrize(
    ("make", "engine", "usage", "waiting"),
    [
        (pages.vllm_0_8, "vllm", 0.97, 3),
        (pages.sglang, "sglang", 0.6, 0),
        (lambda requests: pages.sglang(requests=requests, prefix="sglang_"), "sglang", 0.6, 0),
        (pages.tensorrt_llm, "tensorrt-llm", 0.96, 7),
        (lambda requests: pages.tensorrt_llm(requests=requests, prefix="trtllm:"), "tensorrt-llm", 0.96, 7),
        (pages.llamacpp_2024, "llama.cpp", 0.4, 0),
    ],
)
def test_engines_and_versions_say_the_same_in_their_names(make, engine, usage, waiting):
    seen = window(make(requests=10), make(requests=30))
    assert seen.engine.name == engine
    assert seen.gauge(Gauge.USAGE).mean == pytest.approx(usage)
    assert seen.gauge(Gauge.WAITING).peak == waiting
    assert seen.counter(Counter.GENERATED) > 0
    assert seen.seconds == 10
    if engine != "llama.cpp":
        assert seen.timing(Timing.TTFT).count == 20
        assert seen.timing(Timing.ITL).mean > 0


def test_hit_rates_come_from_what_the_engine_has():
    assert window(pages.vllm_0_8(requests=1), pages.vllm_0_8(requests=5)).hit_rate == pytest.approx(0.2)
    assert window(pages.sglang(requests=1), pages.sglang(requests=5)).hit_rate == pytest.approx(0.25)
    assert window(pages.tensorrt_llm(requests=1), pages.tensorrt_llm(requests=5)).hit_rate == pytest.approx(0.2)
    assert window(pages.llamacpp_2024(requests=1), pages.llamacpp_2024(requests=5)).hit_rate is None


def test_triton_tells_little_and_says_so():
    seen = window(pages.triton())
    assert (seen.engine.name, seen.gauge(Gauge.USAGE).mean, seen.gauge(Gauge.RUNNING).mean) == (
        "triton-tensorrt-llm",
        0.31,
        3,
    )
    assert seen.gauge(Gauge.POOL_TOKENS).mean == 640 * 64
    assert "Triton gives no such histogram" in seen.missing(Timing.TTFT)[0]


def test_one_engines_pages_of_several_data_parallel_ranks_are_added_up_but_for_usage():
    text = "".join(
        f'vllm:num_requests_running{{engine="{rank}"}} {2 + rank}\nvllm:kv_cache_usage_perc{{engine="{rank}"}} {0.4 * (rank + 1)}\n'
        for rank in range(2)
    )
    seen = window(text)
    assert seen.gauge(Gauge.RUNNING).mean == 5
    assert seen.gauge(Gauge.USAGE).mean == 0.8


def test_a_counter_that_goes_back_begins_the_window_anew_and_is_said():
    seen = make_window(pages.times([pages.vllm(requests=count) for count in (10, 20, 3, 8)]))
    assert len(seen.pages) == 2
    assert seen.counter(Counter.GENERATED) == 500
    assert any("started again" in note for note in seen.notes)


def test_a_restart_is_seen_by_the_start_time_too():
    started = [
        pages.vllm(requests=10, process_start_time_seconds=1.0),
        pages.vllm(requests=50, process_start_time_seconds=9.0),
    ]
    seen = make_window(pages.times(started))
    assert len(seen.pages) == 1
    assert any("started again" in note for note in seen.notes)


def test_one_page_is_the_engines_life_and_is_said_to_be():
    seen = make_window([pages.vllm(requests=7)])
    assert seen.lifetime
    assert seen.seconds is None
    assert seen.counter(Counter.GENERATED) == 700
    assert any("one scrape" in note for note in seen.notes)


def test_a_counter_that_appears_later_began_at_zero():
    label = 'model_name="m"'
    first = pages.text_of({"vllm:num_requests_running": {label: 0}})
    second = pages.text_of({"vllm:num_requests_running": {label: 0}, "vllm:num_preemptions_total": {label: 4}})
    assert window(first, second).counter(Counter.PREEMPTIONS) == 4


def test_what_is_not_there_is_none_and_named():
    seen = window("vllm:num_requests_running 1\n")
    assert seen.gauge(Gauge.USAGE) is None
    assert seen.timing(Timing.ITL) is None
    assert seen.missing(Gauge.USAGE, Gauge.RUNNING) == [f"{Gauge.USAGE.value}: not on this page"]


def test_a_type_without_samples_is_nothing_yet_and_not_missing():
    text = "kvarto_pool_bytes 1\n# TYPE kvarto_time_to_first_token_seconds histogram\n# TYPE kvarto_prompt_tokens_total counter\n"
    seen = window(text)
    assert seen.timing(Timing.TTFT).count == 0
    assert seen.counter(Counter.PROMPT_TOKENS) == 0
    assert seen.missing(Timing.TTFT, Timing.E2E) == [f"{Timing.E2E.value}: not on this page"]


def test_a_label_that_says_two_things_says_nothing():
    text = 'kvarto_pool_bytes 1\nkvarto_formats_info{kv_format="int4",device="cpu"} 1\nkvarto_formats_info{kv_format="bf16",device="cpu"} 1\n'
    seen = window(text)
    assert seen.label("formats_info", "kv_format") is None
    assert seen.label("formats_info", "device") == "cpu"


def test_pages_with_times_are_put_in_order_and_without_them_they_stay():
    later, sooner = pages.times([pages.vllm(requests=9), pages.vllm(requests=30)])
    seen = make_window([sooner, later])
    assert seen.counter(Counter.GENERATED) == 2100
    assert seen.notes == ()


def test_two_models_need_a_name():
    text = 'vllm:num_requests_running{model_name="a"} 1\nvllm:num_requests_running{model_name="b"} 5\n'
    with pytest.raises(UsageError, match=re.escape("2: a, b")):
        window(text)
    assert window(text, model="b").gauge(Gauge.RUNNING).mean == 5
    with pytest.raises(UsageError, match="one of a, b"):
        window(text, model="c")


def test_pages_of_two_engines_or_of_none_are_refused():
    with pytest.raises(UsageError, match="all of one engine"):
        window(pages.vllm_0_8(requests=1), pages.sglang(requests=1))
    with pytest.raises(UsageError, match="metrics of"):
        window("node_cpu_seconds_total 3\n")


@pytest.mark.parametrize("engine", registry.values(), ids=lambda engine: engine.name)
def test_every_engine_file_is_whole(engine):
    """Conformance: names without prefix and `_total`, advice for what it is asked, formats that the planner knows."""
    places = [
        place for table in (engine.gauges, engine.counters, engine.timings) for each in table.values() for place in each
    ]
    assert places
    assert not [place.name for place in places if place.name.endswith("_total") or ":" in place.name]
    assert {Gauge.RUNNING, Gauge.WAITING} <= set(engine.gauges)
    assert {"format", "pool", "more sequences"} <= set(engine.advice)
    assert engine.stores_as in {"kvarto", *plan_engines()}
    assert engine.read_from
