"""Pages of real engines under known load (recorded/README.md): the verdict is what the load was made to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarto.diagnose.decide import Cause, diagnose
from kvarto.diagnose.formats import changes
from kvarto.diagnose.measure import Model
from kvarto.diagnose.scrape import read_pages
from kvarto.diagnose.served import by_head_dim
from kvarto.diagnose.settings import settings_of
from kvarto.diagnose.signals import Gauge, Setting
from kvarto.diagnose.window import make_window, slim

RECORDED = Path(__file__).parent / "recorded"
SMOLLM2 = Model(weights_bytes=538e6, kv_token_bytes=23040)


@pytest.mark.parametrize(
    ("folder", "cause"),
    [
        ("vllm-0.32-capacity", Cause.CAPACITY),
        ("vllm-0.32-queue", Cause.QUEUE),
        ("vllm-0.32-fp8-idle", Cause.UNKNOWN),
        ("kvarto-capacity", Cause.CAPACITY),
        ("kvarto-prefill", Cause.PREFILL),
        ("llamacpp-2026-10-queue", Cause.QUEUE),
        ("llamacpp-2026-10-prefill", Cause.PREFILL),
    ],
)
def test_the_verdict_is_what_the_load_was_made_to_be(folder, cause):
    window = make_window(read_pages([RECORDED / folder]))
    assert diagnose(window, SMOLLM2).cause is cause
    assert window.seconds > (30 if cause is not Cause.UNKNOWN else 1)


def test_vllms_pool_is_what_it_logged():
    """It said: CPU KV cache size: 46,592 tokens, and 1,056 with 33 blocks of 32."""
    assert make_window(read_pages([RECORDED / "vllm-0.32-queue"])).gauge(Gauge.POOL_TOKENS).values[-1] == 46592
    assert make_window(read_pages([RECORDED / "vllm-0.32-capacity"])).gauge(Gauge.POOL_TOKENS).values[-1] == 1056


def test_what_fp8_would_change_is_what_the_engine_logged_with_fp8():
    """It said: CPU KV cache size: 93,184 tokens, of the same GiB that holds 46,592 in bf16."""
    told = make_window(read_pages([RECORDED / "vllm-0.32-fp8-idle"])).gauge(Gauge.POOL_TOKENS).values[-1]
    plain = make_window(read_pages([RECORDED / "vllm-0.32-queue"]))
    found = {each.name: each for each in changes(plain, None, 16.0, by_head_dim(64).model, None)}
    assert found["fp8_e5m2"].pool_tokens == told == 93_184


def test_settings_of_a_file_are_those_of_its_labels():
    told = settings_of(make_window(read_pages([RECORDED / "vllm-0.32-queue"])))
    assert (told[Setting.KV_DTYPE].value, told[Setting.PREFIX_CACHING].on) == ("auto", True)
    assert Setting.CHUNKED_PREFILL not in told
    assert Setting.VERSION not in told


@pytest.mark.parametrize("folder", sorted(each.name for each in RECORDED.iterdir() if each.is_dir()))
def test_what_watching_keeps_of_a_page_is_all_that_is_looked_at(folder):
    whole = read_pages([RECORDED / folder])
    kept = [slim(page) for page in whole]
    assert sum(map(len, (page.samples for page in kept))) < sum(map(len, (page.samples for page in whole)))
    first, second = make_window(whole), make_window(kept)
    assert diagnose(first, SMOLLM2) == diagnose(second, SMOLLM2)
    assert settings_of(first) == settings_of(second)
