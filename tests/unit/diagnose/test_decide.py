"""Verdicts on made windows, where what limits the server is known."""

from __future__ import annotations

import pytest

import engine_pages as pages
from kvarto.diagnose.advice import Facts, advise
from kvarto.diagnose.decide import Cause, diagnose
from kvarto.diagnose.exposition import parse
from kvarto.diagnose.formats import changes, stored_bits
from kvarto.diagnose.measure import Model, kv_share, prefill_share
from kvarto.diagnose.window import make_window


def window(*made):
    return make_window(pages.times(made))


def busy(**same):
    """Six scrapes in which the same goes on, 20 requests between two of them."""
    return window(*(pages.vllm(requests=20 * number, **{"preempted": 0, **same}) for number in range(1, 7)))


def holds(found, cause):
    return next(each for each in found.findings if each.cause is cause).holds


def test_a_full_pool_and_a_queue_is_capacity():
    found = diagnose(busy(usage=0.98, waiting=5))
    assert found.cause is Cause.CAPACITY
    assert "5.0 requests wait" in found.reason
    assert holds(found, Cause.QUEUE) is False


def test_preemptions_in_a_full_pool_are_capacity_even_if_nobody_was_seen_waiting():
    made = window(*(pages.vllm(requests=20 * n, preempted=5 * n, usage=(0.7, 0.95)[n % 2]) for n in range(1, 7)))
    found = diagnose(made)
    assert found.cause is Cause.CAPACITY
    assert "25 requests were preempted" in found.reason


def test_preemptions_in_a_pool_that_was_never_seen_full_are_not_guessed_about():
    found = diagnose(window(*(pages.vllm(requests=20 * n, preempted=5 * n, usage=0.5) for n in range(1, 7))))
    assert holds(found, Cause.CAPACITY) is None
    assert found.cause is not Cause.CAPACITY


def test_preemptions_while_others_wait_are_capacity_even_if_what_is_free_never_looked_little():
    """A pool of few large blocks is full long before it is held to 90 %."""
    found = diagnose(window(*(pages.vllm(requests=20 * n, preempted=5 * n, usage=0.6, waiting=3) for n in range(1, 7))))
    assert found.cause is Cause.CAPACITY


def test_one_preemption_in_a_thousand_requests_limits_nothing():
    made = window(*(pages.vllm(requests=1000 * n, preempted=n // 6, usage=0.95) for n in range(1, 7)))
    assert holds(diagnose(made), Cause.CAPACITY) is False


def test_a_queue_beside_free_memory_is_the_queue():
    found = diagnose(busy(usage=0.3, waiting=40, queue=3.0))
    assert found.cause is Cause.QUEUE
    assert holds(found, Cause.CAPACITY) is False


def test_a_queue_in_a_pool_too_full_for_the_next_prompt_is_capacity():
    found = diagnose(busy(usage=0.8, waiting=2, blocks=200))  # 640 of 3,200 tokens are free, and a prompt has 1,000
    assert found.cause is Cause.CAPACITY
    assert "640 tokens are free" in found.reason


def test_the_pool_may_be_known_from_what_is_in_it_alone():
    """1,600 tokens fill 40 %, so 2,400 more would fit, and a prompt has 3,000."""
    text = (
        "kvarto_pool_bytes 8e9\nkvarto_num_requests_running 4\nkvarto_num_requests_waiting 3\nkvarto_kv_cache_usage_ratio 0.4\n"
        "kvarto_live_tokens 1600\nkvarto_prompt_tokens_total %d\n"
    )
    made = [
        parse(text % (length * 20 * n) + pages.text_of({}, {"kvarto_time_to_first_token_seconds": (20 * n, 0.5)}))
        for length, n in ((3000, 1), (3000, 2))
    ]
    assert diagnose(window(*made)).cause is Cause.CAPACITY


def test_long_prompts_and_short_answers_are_prefill():
    found = diagnose(busy(running=4, prefill=3.0, decode=2.0), Model(16e9, 131072))
    assert found.cause is Cause.PREFILL
    assert holds(found, Cause.DECODE) is False


def test_generating_beside_a_large_cache_is_decode_and_beside_a_small_one_is_not_kv():
    large = diagnose(
        busy(usage=0.5, decode=60.0), Model(weights_bytes=1e9, kv_token_bytes=131072)
    )  # 8,000 tokens: 1.05 GB
    assert large.cause is Cause.DECODE
    assert large.kv_share == pytest.approx(0.512, abs=0.001)
    small = diagnose(busy(usage=0.5, decode=60.0), Model(weights_bytes=16e9, kv_token_bytes=131072))
    assert small.cause is Cause.NOT_KV
    assert small.kv_share == pytest.approx(0.0615, abs=0.001)


def test_without_the_weights_the_share_of_kv_is_asked_for_and_not_guessed():
    found = diagnose(busy(decode=60.0))
    assert found.cause is Cause.UNKNOWN
    assert "--weights" in found.reason
    assert holds(found, Cause.DECODE) is None


@pytest.mark.parametrize("requests", [(5, 5), (5, 8)])
def test_a_window_in_which_too_little_happened_is_inconclusive(requests):
    found = diagnose(window(*(pages.vllm(requests=count) for count in requests)), Model(1e9, 1e5))
    assert found.cause is Cause.UNKNOWN
    assert "watch for longer" in found.reason


def test_missing_metrics_are_named_instead_of_guessed():
    text = 'vllm:num_requests_running{model_name="m"} 3\nvllm:generation_tokens_total{model_name="m"} %d\n'
    found = diagnose(window(parse(text % 1000), parse(text % 2000)))
    assert found.cause is Cause.UNKNOWN
    assert holds(found, Cause.CAPACITY) is None
    assert any("KV pool" in line for line in found.missing)
    assert any("first token" in line for line in found.missing)


def test_sglang_counts_seconds_of_forward_passes():
    made = window(*(parse(pages.sglang(requests=20 * n)) for n in range(1, 7)))
    share, basis = prefill_share(made)
    assert share == pytest.approx(0.9)
    assert basis == "the steps' time"
    assert diagnose(made).cause is Cause.PREFILL


def test_tensorrt_with_a_full_pool_and_a_queue_is_capacity():
    assert diagnose(window(*(parse(pages.tensorrt_llm(requests=20 * n)) for n in range(1, 7)))).cause is Cause.CAPACITY


def test_llamacpps_seconds_are_of_slots_and_are_divided_by_how_many_run():
    share, basis = prefill_share(window(*(parse(pages.llamacpp_2024(requests=20 * n)) for n in range(1, 7))))
    assert share == pytest.approx(8 / (8 + 2 / 2))
    assert "2.0 generating at once" in basis


def test_held_bytes_of_kvarto_need_no_bytes_of_a_token():
    text = (
        "kvarto_pool_bytes 8e9\nkvarto_pool_held_bytes 3e9\nkvarto_num_requests_running 4\nkvarto_num_requests_waiting 0\n"
        "kvarto_kv_cache_usage_ratio 0.4\n"
    )
    share, missing = kv_share(window(parse(text)), Model(weights_bytes=1e9))
    assert (share, missing) == (0.75, "")
    assert "--weights" in kv_share(window(parse(text)), Model())[1]


def test_what_a_format_changes_is_bits_over_bits_and_a_bound():
    made = busy(usage=0.98, waiting=5)
    found = {each.name: each for each in changes(made, 16.0, 128, 0.5)}
    assert found["fp8"].pool_tokens == 2 * 16000
    assert found["fp8"].faster_at_most == pytest.approx(1 / (0.5 + 0.25))
    assert found["int4_per_token_head"].bits_per_number == 4.25
    assert found["turboquant_4bit_nc"].bits_per_number == pytest.approx(
        134 * 8 / 256
    )  # 134 bytes of K and V for 2 x 128 numbers (facts of its code)
    assert found["turboquant_k8v4"].bits_per_number == pytest.approx(196 * 8 / 256)
    assert {each.name for each in changes(made, 8.0, 128, None)}.isdisjoint({"fp8", "fp8_e5m2", "int8_per_token_head"})


def test_bits_of_a_present_format():
    from kvarto.diagnose.engines import registry

    assert stored_bits(registry["vllm"], "auto", 128) == 16
    assert stored_bits(registry["vllm"], "int8_per_token_head", 64) == 8.5
    assert stored_bits(registry["kvarto"], "int8/int8+sink64", 128) == stored_bits(registry["kvarto"], "int8", 128)
    assert stored_bits(registry["kvarto"], "nonsense", 128) is None
    assert stored_bits(registry["llama.cpp"], "f32", 128) == 32


def test_advice_begins_with_what_costs_nothing():
    made = busy(usage=0.98, waiting=5)
    told = advise(Facts(made, diagnose(made), prefix_caching=False, chunked_prefill=False, kv_bits=16.0))
    names = [each.name for each in told]
    assert names[:2] == ["prefix caching", "chunked prefill"]
    assert names.index("FP8") < names.index("below 8 bits")
    assert told[0].how == "--enable-prefix-caching"
    already = advise(Facts(made, diagnose(made), prefix_caching=True, chunked_prefill=True, kv_bits=8.0))
    assert "FP8" not in [each.name for each in already]


def test_prefill_bound_work_is_told_that_a_format_does_not_help():
    made = busy(running=4, prefill=3.0, decode=2.0)
    told = advise(Facts(made, diagnose(made), True, True, 16.0))
    assert "Do not change the KV format for speed" in [each.says for each in told]
