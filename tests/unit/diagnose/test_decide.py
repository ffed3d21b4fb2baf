"""Verdicts on made windows, where what limits the server is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import engine_pages as pages
from kvarto.diagnose.advice import Facts, advise
from kvarto.diagnose.decide import Cause, diagnose
from kvarto.diagnose.engines import registry
from kvarto.diagnose.exposition import parse
from kvarto.diagnose.formats import changes, known_format, stored_bits, token_bytes
from kvarto.diagnose.measure import Model, kv_share, prefill_share
from kvarto.diagnose.served import by_config, by_head_dim
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


HEAD = by_head_dim(128).model


def test_what_a_format_changes_is_bits_over_bits_and_a_bound():
    made = busy(usage=0.98, waiting=5)
    found = {each.name: each for each in changes(made, None, 16.0, HEAD, 0.5)}
    assert found["fp8_e4m3"].pool_tokens == 2 * 16000
    assert found["fp8_e4m3"].faster_at_most == pytest.approx(1 / (0.5 + 0.25))
    assert found["int4_per_token_head"].bits_per_number == 4.25
    # 134 bytes of K and V for 2 x 128 numbers (facts of its code)
    assert found["turboquant_4bit_nc"].bits_per_number == pytest.approx(134 * 8 / 256)
    assert found["turboquant_k8v4"].bits_per_number == pytest.approx(196 * 8 / 256)
    assert "first and the last 2 layers" in found["turboquant_4bit_nc"].note
    smaller = {each.name for each in changes(made, None, 8.0, HEAD, None)}
    assert smaller.isdisjoint({"bf16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"})
    assert "turboquant_4bit_nc" not in {each.name for each in changes(made, None, 16.0, by_head_dim(80).model, None)}


@pytest.mark.parametrize(
    ("engine", "name", "dim", "bits"),
    [
        ("vllm", "auto", 128, 16), ("vllm", "half", 128, 16), ("vllm", "fp8", 128, 8), ("vllm", "int8_per_token_head", 64, 8.5),
        ("llama.cpp", "f32", 128, 32), ("llama.cpp", "q5_1", 64, 6), ("sglang", "mxfp8", 128, 8.25), ("sglang", "fp4_mx_block16", 128, 4.5),
        ("triton-tensorrt-llm", "nvfp4", 128, 4.5), ("kvarto", "fp32", 64, 32), ("kvarto", "int8/int8+sink64", 128, None),
    ],
)  # fmt: skip
def test_bits_of_a_present_format_are_the_planners(engine, name, dim, bits):
    kv = known_format(registry[engine], name)
    told = stored_bits(kv, by_head_dim(dim).model)
    assert told == (bits or stored_bits(known_format(registry[engine], "int8"), by_head_dim(dim).model))


def test_a_format_that_nobody_knows_is_none():
    assert known_format(registry["kvarto"], "nonsense") is None
    assert known_format(registry["vllm"], "nonsense") is None
    assert stored_bits(known_format(registry["llama.cpp"], "q8_0"), by_head_dim(80).model) is None


GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
    "intermediate_size": 512, "vocab_size": 1000, "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 512,
}  # fmt: skip


def test_a_config_gives_bytes_of_weights_and_of_a_token_and_windows_count(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    served = by_config(str(tmp_path))
    made = busy(usage=0.5, running=2, blocks=1000)  # 8,000 of 16,000 tokens live, 4,000 of each
    raw = known_format(registry["vllm"], "auto")
    token = token_bytes(made, raw, served.model)
    assert token == pytest.approx(4 * 2 * 64 * (4000 + 5 * 512) / 4000)
    said = served.complete(Model(), made, raw)
    assert said.kv_token_bytes == token
    assert said.weights_bytes > 2e6
    assert served.complete(Model(1e9, 5.0), made, raw) == Model(1e9, 5.0)
    assert kv_share(made, said)[0] == pytest.approx(8000 * token / (8000 * token + said.weights_bytes))


def test_a_recurrent_state_makes_a_pool_grow_by_less_than_its_bits(tmp_path):
    hybrid = GEMMA | {
        "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 5 + ["full_attention"], "linear_num_key_heads": 4,
        "linear_key_head_dim": 64, "linear_num_value_heads": 8, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    made, raw = busy(usage=0.98, waiting=5), known_format(registry["vllm"], "auto", 16)
    model = by_config(str(tmp_path)).model
    found = {each.name: each for each in changes(made, raw, 16.0, model, None)}["fp8_e4m3"]
    state, pages = 5 * (8 * 64 * 64 * 4 + (2 * 4 * 64 + 8 * 64) * 3 * 2), 1008 * 4 * 2 * 64
    assert found.bits_per_number == 8
    assert found.smaller == pytest.approx((state + pages) / (state + pages / 2))


def test_advice_begins_with_what_costs_nothing():
    made = busy(usage=0.98, waiting=5)
    told = advise(Facts(made, diagnose(made), prefix_caching=False, chunked_prefill=False, kv_bits=16.0))
    ids = [each.rule.id for each in told]
    assert ids[:2] == ["prefix-caching-off", "chunked-prefill-off"]
    assert ids.index("fp8-first") < ids.index("lower") < ids.index("way-back")
    assert told[0].how == "--enable-prefix-caching"
    already = advise(Facts(made, diagnose(made), prefix_caching=True, chunked_prefill=True, kv_bits=8.0))
    assert "fp8-first" not in [each.rule.id for each in already]


def test_prefill_bound_work_is_told_that_a_format_does_not_help():
    made = busy(running=4, prefill=3.0, decode=2.0)
    told = advise(Facts(made, diagnose(made), True, True, 16.0))
    assert "quantizing makes prefill no faster" in next(
        each.rule.say for each in told if each.rule.id == "prefill-heavy"
    )


def test_long_answers_of_few_requests_are_enough_to_decide_by():
    made = window(
        *(pages.vllm(requests=10, at=30 * i, **{"vllm:generation_tokens_total": 1000 + 400 * i}) for i in range(3))
    )
    assert "fewer than" not in diagnose(made, Model(1e9, 1e5)).reason
    fewer = window(
        *(pages.vllm(requests=10, at=30 * i, **{"vllm:generation_tokens_total": 1000 + 100 * i}) for i in range(3))
    )
    assert "0 requests got their first token" in diagnose(fewer, Model(1e9, 1e5)).reason


def test_a_window_in_which_nothing_happened_gives_no_advice_by_its_times():
    made = window(pages.vllm(requests=1, at=0), pages.vllm(requests=2, at=60, prefill=9.0, decode=0.1))
    found = diagnose(made)
    assert found.cause is Cause.UNKNOWN
    assert advise(Facts(made, found, True, True, 16.0)) == []


@pytest.mark.parametrize(("parts", "rule"), [({"latent": 1}, "latent"), ({"constant_share": 0.9}, "windows")])
def test_what_the_model_alone_tells_is_said_where_its_config_is_known(parts, rule):
    made = busy(usage=0.98, waiting=5)
    facts = Facts(made, diagnose(made), True, True, 16.0)
    assert rule not in [each.rule.id for each in advise(facts)]
    assert rule in [each.rule.id for each in advise(replace(facts, model=parts))]
