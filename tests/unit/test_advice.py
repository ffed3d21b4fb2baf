"""The rules of advice as data: each can hold, gives its reason, and is said where it should be."""

from __future__ import annotations

import pytest

from kvarto.advice import SIGNALS, Advice, advise, rules
from kvarto.diagnose.engines import registry as engines

_GOOD = {
    "pool_bytes": 1e9, "kv_share": 0.5, "prefill_share": 0.1, "fits_bf16": 1, "fits_fp8": 1, "fits_int4": 1, "fits_int2": 1, "below_break_even": 0,
    "constant_share": 0.0, "concurrency": 32, "latent": 0, "widest_head": 128, "sm": 90,
}  # fmt: skip


_SEEN = {
    "capacity_bound": 0, "queue_bound": 0, "prefill_bound": 0, "not_kv": 0, "kv_bound": 0, "kv_bits": 16, "prefix_caching": 1, "chunked_prefill": 1,
    "hit_rate": 0.5, "long_gaps": 2.0, "waits_for_slots": 0, "corrupted": 0,
}  # fmt: skip


def test_every_rule_gives_its_reason_and_can_hold() -> None:
    assert set(_GOOD) | set(_SEEN) == set(SIGNALS)
    switches = {option for engine in engines.values() for option in engine.advice}
    assert len({rule.id for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule.say.endswith((".", ")"))
        assert rule.because.endswith((".", ")"))
        assert rule.source
        assert 1 <= rule.step <= 4
        assert rule.option in ("", *switches)
        for case in rule.when:
            best = _GOOD | _SEEN
            for name, sign, number in case:
                best[name] = number + {"<": -1e-6, ">": 1e-6}.get(sign, 0)
            assert rule.holds(best), rule.id
            for name, _, _ in case:
                assert not Advice(**vars(rule) | {"when": (case,)}).holds({k: v for k, v in best.items() if k != name})


def test_a_signal_that_no_rule_could_know_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="kv_shared"):
        advise({"kv_shared": 1})


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({}, {"fp8-enough", "way-back"}, {"low-share", "lower", "prefill-heavy"}),
        ({"prefill_share": 0.8}, {"prefill-heavy"}, set()),
        ({"below_break_even": 1}, {"short-context"}, {"fp8-enough"}),
        ({"kv_share": 0.02, "concurrency": 1}, {"low-share", "low-concurrency"}, {"fp8-enough", "way-back"}),
        ({"fits_bf16": 0}, {"fp8-for-room"}, {"fp8-enough"}),
        ({"fits_bf16": 0, "fits_fp8": 0}, {"lower"}, {"fp8-for-room", "fp8-enough"}),
        ({"fits_bf16": 0, "fits_fp8": 0, "fits_int4": 0}, {"nothing-fits", "two-bits"}, {"lower"}),
        ({"pool_bytes": -1}, {"weights-do-not-fit"}, {"fp8-enough"}),
        ({"sm": 80}, {"old-gpu"}, set()),
        ({"latent": 1}, {"latent"}, set()),
        ({"constant_share": 0.9}, {"windows"}, set()),
        (_SEEN, set(), {"larger-pool", "fp8-first", "not-kv", "prefixes-differ", "nan"}),
        (
            _SEEN | {"kv_bound": 1, "capacity_bound": 1},
            {"larger-pool", "fp8-first", "lower", "way-back"},
            {"prefixes-differ"},
        ),
        (_SEEN | {"kv_bound": 1, "capacity_bound": 1, "hit_rate": 0.01}, {"prefixes-differ"}, set()),
        (_SEEN | {"kv_bound": 1, "kv_bits": 8}, {"lower"}, {"fp8-first", "larger-pool"}),
        (_SEEN | {"queue_bound": 1}, {"more-sequences"}, {"more-slots"}),
        (_SEEN | {"queue_bound": 1, "waits_for_slots": 1}, {"more-slots"}, {"more-sequences"}),
        (_SEEN | {"prefill_bound": 1}, {"prefill-heavy"}, {"fp8-first"}),
        (_SEEN | {"prefix_caching": 0, "chunked_prefill": 0}, {"prefix-caching-off", "chunked-prefill-off"}, set()),
        (_SEEN | {"not_kv": 1, "long_gaps": 9.0, "corrupted": 1}, {"not-kv", "smaller-chunks", "nan"}, set()),
    ],
)
def test_advice_by_scenario(changes: dict[str, float], said: set[str], unsaid: set[str]) -> None:
    ids = {rule.id for rule in advise(_GOOD | changes)}
    assert said <= ids
    assert not unsaid & ids
