"""The verdict as a function of the numbers: what passes, what fails, what stays open, and what is recommended."""

from __future__ import annotations

import pytest
from synthetic import baseline, candidate, fidelity, json_items, needles, scope, study

from kvarto.study.recommend import recommend
from kvarto.study.result import Margins, Skipped
from kvarto.study.verdict import json_check, judge, needle_check

MARGINS = Margins()


def checks(**measured):
    verdict = judge(candidate("x", 4.75, **measured), baseline(), MARGINS)
    return verdict.status, {check.name: check for check in verdict.checks}


def test_small_kl_all_needles_and_json_pass():
    status, found = checks()
    assert status == "pass"
    assert {name: check.status for name, check in found.items()} == {
        "KL": "pass", "perplexity ratio": "pass", "needles": "pass", "JSON": "reported",
    }  # fmt: skip


def test_kl_above_the_margin_with_its_whole_interval_fails():
    status, found = checks(fidelity=fidelity([0.19, 0.21, 0.18, 0.20]))
    assert (status, found["KL"].status) == ("fail", "fail")
    assert "above 0.01" in found["KL"].reason


def test_kl_whose_interval_spans_the_margin_says_how_many_documents_would_decide():
    status, found = checks(fidelity=fidelity([0.004, 0.016, 0.008, 0.005]))
    assert (status, found["KL"].status) == ("inconclusive", "inconclusive")
    assert found["KL"].needed is not None
    assert found["KL"].needed > 4
    assert f"needs {found['KL'].needed - 4} more documents ({found['KL'].needed} in all)" in found["KL"].reason


def test_one_document_is_not_enough():
    status, found = checks(fidelity=fidelity([0.001]))
    assert status == "inconclusive"
    assert "needs at least 2 documents, 1 measured" in found["KL"].reason


def test_perplexity_beyond_its_margin_fails_whatever_the_kl():
    status, found = checks(fidelity=fidelity([0.001, 0.0012, 0.0011, 0.001], worse_nats=0.05))
    assert (status, found["KL"].status, found["perplexity ratio"].status) == ("fail", "pass", "fail")


def test_what_was_not_measured_was_not_shown_to_be_safe():
    assert checks(fidelity=None)[0] == "inconclusive"
    assert checks(needles=())[0] == "inconclusive"


def test_a_broken_arm_fails_with_its_reason():
    status, found = checks(broken="fidelity: expected finite values, got 3 NaN")
    assert status == "fail"
    assert found["runs"].reason.endswith("3 NaN")


@pytest.mark.parametrize(
    ("lost", "gained", "status"),
    [(0, 0, "pass"), (1, 0, "pass"), (2, 0, "inconclusive"), (5, 0, "fail"), (12, 0, "fail")],
)
def test_needles_by_how_many_were_lost(lost, gained, status):
    base = needles([True] * (32 - gained) + [False] * gained)
    other = needles([False] * lost + [True] * (32 - lost))
    assert needle_check(base, other, MARGINS).status == status


def test_needles_lost_and_gained_alike_are_noise_and_stay_open():
    base = needles([False] * 6 + [True] * 26)
    other = needles([True] * 6 + [False] * 6 + [True] * 20)
    check = needle_check(base, other, MARGINS)
    assert check.status == "inconclusive"
    assert "lost 6, gained 6 of 32" in check.reason


def test_few_needles_say_how_many_more_are_needed():
    check = needle_check(needles([True] * 8), needles([True] * 8), MARGINS)
    assert (check.status, check.needed) == ("inconclusive", 19)
    assert "needs 11 more needles (19 in all)" in check.reason


def test_a_baseline_that_finds_little_cannot_show_safety():
    found = needles([True] * 10 + [False] * 22)
    check = needle_check(found, found, MARGINS)
    assert check.status == "inconclusive"
    assert "the baseline itself finds only 10 of 32" in check.reason


def test_json_fails_when_significantly_worse_and_never_passes():
    right = json_items([True] * 8)
    assert json_check(right, json_items([False] * 5 + [True] * 3), MARGINS).status == "fail"
    check = json_check(right, json_items([False] * 4 + [True] * 4), MARGINS)
    assert check.status == "reported"
    assert check.smallest_seen == pytest.approx(5 / 8)


def test_the_passing_format_with_fewest_bits_is_recommended_and_the_smaller_ones_are_explained():
    bad = candidate("int2", 2.75, fidelity=fidelity([0.03, 0.04, 0.035, 0.03]))
    found = study(candidate("int8", 8.5), candidate("int4", 4.75), bad).recommendation
    assert (found.status, found.format) == ("pass", "int4")
    assert "4.75 bits" in found.headline
    assert any(reason.startswith("Not int2 (2.75 bits): KL") for reason in found.reasons)
    assert not any("int8" in reason for reason in found.reasons)


def test_of_equal_bits_the_nearer_is_recommended():
    near = candidate("near", 4.75, fidelity=fidelity([0.0005, 0.0006, 0.0005, 0.0006]))
    assert study(candidate("far", 4.75), near).recommendation.format == "near"


def test_slower_is_said_plainly():
    slow = candidate("int4", 4.75)
    slow = slow.model_copy(
        update={"speed": tuple(s.model_copy(update={"decode_tokens_per_second": (10, 9, 11)}) for s in slow.speed)}
    )
    assert any("decode 0.46x (slower)" in reason for reason in study(slow).recommendation.reasons)


def test_nothing_passes_means_stay():
    bad = candidate("int2", 2.75, fidelity=fidelity([0.3, 0.4, 0.35, 0.3]))
    found = study(bad).recommendation
    assert (found.status, found.format, found.headline) == ("fail", None, "No format passed: stay on fp32.")


def test_an_open_format_leaves_the_recommendation_open():
    bad = candidate("int2", 2.75, fidelity=fidelity([0.3, 0.4, 0.35, 0.3]))
    unsure = candidate("int3", 3.75, fidelity=fidelity([0.004, 0.016, 0.008, 0.005]))
    found = study(bad, unsure).recommendation
    assert (found.status, found.format) == ("inconclusive", None)
    assert any("int3" in reason and "more documents" in reason for reason in found.reasons)


def test_caveats_name_the_context_that_was_measured_and_what_was_skipped():
    arms = study(candidate("int4", 4.75)).arms
    caveats = " ".join(recommend(arms, scope(), [Skipped(name="kivi4", reason="D of 72")], interrupted=True).caveats)
    assert "1,024 tokens" in caveats
    assert "128K" in caveats
    assert "kivi4 (D of 72)" in caveats
    assert "interrupted" in caveats
