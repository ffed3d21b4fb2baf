"""On a tiny random model: what is simulated is what it says, and a table says what was measured."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
import tiny

import ablation
import ablation_tables
import variants
from ablation_texts import Inputs, open_inputs, save
from kvarto.codecs import registry
from kvarto.errors import Unsupported, UsageError
from kvarto.integrations.transformers import Cache
from kvarto.layout import Side
from simulated import RAW, Moments, Reading, Simulation, calibrate, compare, greedy, read_back
from sink_study import PLACES, SinkStudy, readings
from variants import (
    Variant,
    codec,
    fitted_tokens,
    formats,
    key_variants,
    of_channels,
    of_tokens,
    value_variants,
    variant,
)

TOKENS, SCORED = 300, 172
SHAPE = {"head_dim": 32, "num_hidden_layers": 2}


@cache
def simulation() -> Simulation:
    made = Simulation(tiny.model("llama", **SHAPE))
    calibrate(made, [document(seed) for seed in (11, 12)])
    return made


def document(seed: int, tokens: int = TOKENS) -> Tensor:
    return tiny.prompt(tokens, seed=seed)["input_ids"][0]


def kl(reading: Reading, seed: int = 1) -> float:
    tokens = document(seed)[None]
    base, other = (simulation().logits(tokens, each, scored=SCORED)[0] for each in (RAW, reading))
    sums = compare(base.log_softmax(dim=-1), other)
    return sums.kl_nats / sums.positions


def plain(*shape: int) -> Moments:
    """Of no use to anybody."""
    zero = torch.zeros(shape)
    return Moments(zero, zero, torch.ones(shape))


def test_nothing_coded_is_the_model_itself() -> None:
    model, tokens = tiny.model("llama", **SHAPE), document(1)[None]
    expected = model(tokens, cache=DynamicCache(config=model.config)).logits[:, -SCORED:]
    got = simulation().logits(tokens, scored=SCORED)
    assert tiny.relative(got, expected) < 1e-5
    identity = variant("identity", variants.Rounding(lambda y: y, lambda dim: 32.0))
    assert abs(kl(Reading(identity, identity))) < 1e-9


@pytest.mark.parametrize("name", ["int4", "kivi2", "fp8"])
def test_a_shipped_codec_reads_as_its_slabs_decode(name: str) -> None:
    x = torch.randn(1, 2, 3, 64, 32, generator=torch.Generator().manual_seed(0))
    for side in Side:
        layout = registry[name].layout(side, 64, 32)
        expected = registry[name].decode(registry[name].encode(x, layout), layout)
        assert torch.equal(codec(name, side).read(x, plain(2, 1, 1, 32)), expected)


@pytest.mark.parametrize("text", ["int4", "int2", "int4+sink0", "int4+sink128+window64"])
def test_the_real_cache_says_the_same(text: str) -> None:
    """What the shipped cache gives, sink and window included, up to the codes that a rounding of the keys before it flips."""
    model, tokens = tiny.model("llama", **SHAPE), document(1)[None]
    real = model(tokens, cache=Cache(model, text)).logits[0, -SCORED:]
    name = text.partition("+")[0]
    reading = Reading(
        codec(name, Side.K), codec(name, Side.V), sink_tokens=0 if "sink0" in text else 128 if "sink128" in text else 64,
        window_pages=int("window" in text),
    )  # fmt: skip
    ours = simulation().logits(tokens, reading, scored=SCORED)[0]
    between, size = compare(real.log_softmax(dim=-1), ours), kl(reading)
    assert between.kl_nats / between.positions < 0.02 * size


def test_fewer_bits_say_less() -> None:
    for side in ("k", "v"):
        found = [kl(Reading(**{side: variant("per token", of_tokens(bits))})) for bits in (8, 4, 3, 2)]
        assert found == sorted(found)
        assert found[-1] > 20 * found[0] > 0


@pytest.mark.parametrize("ladder", [key_variants, value_variants])
def test_every_rung_is_near_what_it_reads(ladder: object) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, x = (torch.randn(*shape, generator=generator) for shape in ((2, 1, 1, 64), (1, 2, 3, 64, 64)))
    x, moments = x + 0.5 * mean, Moments(0.4 * mean, 0.4 * mean, torch.full((2, 1, 1, 64), 1.1))
    for bits, most in ((4, 0.025), (3, 0.09), (2, 0.4)):
        for each in ladder(bits):  # type: ignore[operator]
            read = each.read(x, moments)
            assert read.shape == x.shape
            assert 0 < float((read - x).square().mean() / x.var()) < most, each.name
            assert bits < each.bits(64) < bits + 1.6


def test_bits_are_those_of_the_stored_terms() -> None:
    keys, values = ({each.name: each.bits(128) for each in ladder(4)} for ladder in (key_variants, value_variants))
    assert keys["per token"] == 4.25
    assert keys["page mean, balanced, Hadamard, clip"] == 4.5
    assert keys["static mean, balanced, Hadamard, clip"] == 4.25
    assert keys["per channel, fitted, slow 1/4 + 2"] == 5.0
    assert keys["per channel, groups of 32"] == values["per token, groups of 32"] == 5.0
    assert (keys["int4"], values["int4"]) == (4.5, 4.125)


def test_frames_take_away_what_they_say() -> None:
    """A constant off all keys, however large, costs a mean's frame nothing and a rounding without one nearly everything."""
    x = torch.randn(1, 1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(64)
    bias[[5, 37]] = 300.0
    moments = Moments(bias[None, None, None], bias[None, None, None], torch.ones(1, 1, 1, 64))
    error = {each.name: float((each.read(x + bias, moments) - x - bias).square().mean()) for each in key_variants(4)}
    assert error["per token"] > 20 * error["static mean"]
    assert error["Hadamard"] > 20 * error["page mean, Hadamard, clip"]
    assert error["static mean"] < 0.03


def test_an_unbiased_scale_keeps_the_product() -> None:
    x = torch.randn(1, 1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    known = {each.name: each.read(x, plain(1, 1, 1, 64)) for each in key_variants(2)}
    share = {name: float((read * x).sum() / x.square().sum()) for name, read in known.items()}
    assert share["Hadamard, clip, unbiased"] == pytest.approx(1.0, abs=1e-3)
    assert share["Hadamard, clip"] < 0.97


def test_what_stays_raw_is_raw_and_in_no_group() -> None:
    x = torch.randn(1, 2, 200, 32, generator=torch.Generator().manual_seed(0))
    x[:, :, 0] = 1000.0
    coarse = variant("per channel", of_channels(2))
    read = {sink: read_back(coarse, x, Reading(coarse, sink_tokens=sink), plain(2, 1, 1, 32)) for sink in (0, 1, 64)}
    assert torch.equal(read[64][:, :, :64], x[:, :, :64])
    assert torch.equal(read[1][:, :, :1], x[:, :, :1])
    assert not torch.equal(read[0][:, :, :64], x[:, :, :64])
    for each in read.values():
        assert torch.equal(each[:, :, 192:], x[:, :, 192:])  # The open page.
        assert not torch.equal(each[:, :, 64:192], x[:, :, 64:192])
    spoilt, kept = (float((read[sink] - x)[:, :, 1:64].square().mean()) for sink in (0, 1))
    assert spoilt > 10 * kept


def test_places_add_up_to_all() -> None:
    parts = readings(variant("per token", of_tokens(3)))
    x = torch.randn(1, 2, 256, 32, generator=torch.Generator().manual_seed(0))
    errors = {name: read_back(each.k, x, each, plain(2, 1, 1, 32)) - x for name, each in parts.items()}
    assert torch.equal(errors["first"] + errors["page"] + errors["later"], errors["all"])
    assert (errors["first"] != 0).any(dim=-1).sum() == 2


def test_the_sink_study_takes_kl_and_output_apart() -> None:
    """Masses add up to 1, and the second order's sum is close to the KL of the attention's own probabilities."""
    study = SinkStudy(simulation(), [variant(f"{bits} bits", of_tokens(bits)) for bits in (6, 3)])
    study.add(document(1))
    found = study.results()
    assert sum(found["mass"].values()) == pytest.approx(1.0, abs=1e-5)
    six, three = found["errors"]
    assert sum(six[place]["felt"] for place in PLACES) == pytest.approx(six["all"]["felt"], rel=1e-6)
    assert three["all"]["output"] > 10 * six["all"]["output"] > 0
    assert sum(six[place]["weighted"] for place in PLACES) >= 2 * six["all"]["felt"]


def test_greedy_is_what_decoding_one_by_one_writes() -> None:
    reading = Reading(codec("int4", Side.K), codec("int4", Side.V))
    prompts = [document(seed, 140 + 9 * seed).tolist() for seed in (1, 2, 3)]
    expected = []
    for prompt in prompts:
        text: list[int] = []
        while len(text) < 12 and (not text or text[-1] not in {7, 8}):
            logits = simulation().logits(torch.tensor([[*prompt, *text]]), reading, scored=1)
            text.append(int(logits.argmax()))
        expected.append(text)
    for drafts in ([[], [], []], [expected[0], [9] * 12, expected[1]]):
        assert greedy(simulation(), reading, prompts, drafts, {7, 8}, 12) == expected


def test_models_whose_attention_is_more_are_refused() -> None:
    for family in ("gemma3_text", "gpt_oss"):
        with pytest.raises(Unsupported, match="sliding_window|s_aux"):
            Simulation(tiny.model(family)).logits(document(1)[None], scored=1)
    with pytest.raises(UsageError, match="at least 128 tokens"):
        calibrate(simulation(), [document(1, 90)])


def inputs() -> Inputs:
    needle = document(5, 200).tolist()
    answered = simulation().logits(torch.tensor([needle]), scored=1)[0, -1]
    found, missed = int(answered.argmax()), int(answered.argmin())
    return Inputs(
        documents=tuple(tuple(document(seed).tolist()) for seed in (1, 2, 3)),
        calibration=(tuple(document(11).tolist()),),
        about={"text": "random", "calibration_text": "random", "documents": ["1", "2", "3"], "calibration": ["11"]},
        needles=((*needle, found), (*needle[:-40], missed, missed)),
        answer_tokens=(1, 2),
        extractions=((*needle[:140],), (*needle[:150],)),
        drafts=((3, 4, 5), (6, 7)),
        orders=({"sentence": "one", "expected": {}}, {"sentence": "two", "expected": {}}),
        line_ends=frozenset({7, 8}),
        vocabulary=tuple(f"<{token}>" for token in range(tiny.VOCABULARY)),
    )


@pytest.mark.parametrize("ending", [[3], [1, 4], [1, 5], [1]])
def test_a_line_keeps_what_shares_a_token_with_its_end(ending: list[int]) -> None:
    """Qwen closes an object and its line with one token, `"}\\n`; others with a newline or the end of the text."""
    vocabulary = (' {"a": "b', '"}', " and", '"}\n', "\n", "<end>")
    given = replace(inputs(), vocabulary=vocabulary, line_ends=frozenset({3, 4, 5}))
    assert json.loads(given.text([0, *ending])) == {"a": "b"}
    assert given.text([0, *ending, 2]).startswith(' {"a": "b"}')
    assert given.text([4]) == given.text([5]) == ""


def test_a_run_gives_all_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(inputs(), tmp_path / "inputs.npz")
    assert open_inputs(tmp_path / "inputs.npz") == inputs()
    monkeypatch.setattr(ablation, "MOST_ANSWER_TOKENS", 3)
    out = tmp_path / "result.json"
    options = ablation.parse(
        ["tiny", "--sink-study", "--bits", "4", "--out", str(out), "--commit", "none", "--batch", "3"]
    )
    result = ablation.run(
        simulation(), open_inputs(tmp_path / "inputs.npz"), options, lambda result: ablation.put(out, "tiny", result)
    )
    assert all(len(case["documents"]) == 3 for case in result["cases"])
    assert result["tasks"][0]["needles"] == [True, False]
    by_name = {
        (case["section"], case.get("side"), case.get("bits"), case["name"]): case["documents"]
        for case in result["cases"]
    }
    for name in ("per token", "int4"):
        documents = by_name["fidelity", "k", 4, name]
        assert documents[1][1] / documents[1][0] == pytest.approx(
            kl(Reading(named(key_variants(4), name)), seed=2), rel=1e-3
        )
    later = next(case for case in result["cases"] if case.get("coded") == "later" and case["name"] == "int4")
    assert [each[1] for each in later["documents"]] == pytest.approx(
        [each[1] for each in by_name["fidelity", "k", 4, "int4"]]
    )

    ablation.main(ablation.parse(["--join", str(out), "--out", str(tmp_path / "joined.json")]))
    assert json.loads((tmp_path / "joined.json").read_text()) == json.loads(out.read_text())
    guide = tmp_path / "guide.md"
    guide.write_text("\n".join(f"<!-- table: {name} -->\nlast year\n<!-- end -->" for name in ablation_tables.TABLES))
    ablation.main(ablation.parse(["--tables", str(out), "--into", str(guide)]))
    ablation.main(ablation.parse(["--tables", str(out)]))
    text, said = guide.read_text(), capsys.readouterr().out
    assert "last year" not in text
    assert "not measured" not in text
    for table in ablation_tables.TABLES.values():
        filled = table({"tiny": result})
        assert filled in text
        assert filled in said
    guide.write_text("<!-- table: nonsense -->\n<!-- end -->")
    with pytest.raises(UsageError, match="nonsense"):
        ablation.main(ablation.parse(["--tables", str(out), "--into", str(guide)]))


def named(ladder: list[Variant], name: str) -> Variant:
    return next(each for each in ladder if each.name == name)


def test_a_step_is_paired_by_document() -> None:
    """Documents differ a hundredfold, the step halves each: so says the ratio, and it is sure."""
    before = {"documents": [[10, 1.0, 9], [10, 0.01, 9], [10, 0.1, 9]]}
    after = {
        "documents": [[n, total / 2 * (1 + 0.01 * i), top] for i, (n, total, top) in enumerate(before["documents"])]
    }
    assert ablation_tables._ratio(before, after).startswith("**0.50** [0.4")
    assert not ablation_tables._ratio(after, before).startswith("**")
    assert math.isclose(float(ablation_tables._ratio(after, before).split()[0]), 1.98)


def test_tasks_say_nothing_of_a_schema_that_raw_does_not_follow() -> None:
    order = {"sentence": "", "expected": {"customer": "Ann", "quantity": 3, "item": "pens", "city": "Bonn"}}
    whole, wrong = (json.dumps({**order["expected"], "quantity": n}) for n in (3, 4))

    def row(*answers: str) -> list[str]:
        tasks = [
            {"name": name, "bits": 4, "needles": found, "answers": list(of)}
            for name, found, of in (
                ("raw", [True, False], answers[:2]),
                ("int4", [False, True], answers[2:]),
                ("a rung", [True, True], answers[2:]),
            )
        ]
        lines = ablation_tables.TABLES["tasks"]({"m": {"tasks": tasks, "orders": [order, order]}}).splitlines()
        assert len(lines) == 4
        return [cell.strip() for cell in lines[-1].strip("|").split("|")]

    assert row(whole, whole, wrong, whole) == ["int4", "1 of 2 (-1 +1)", "1 of 2", "2 of 2", "1 of 2"]
    assert row(whole[:-2], whole[:-2], whole[:-2], whole) == ["int4", "1 of 2 (-1 +1)", "1 of 2", "-", "-"]


def test_bits_are_those_that_were_measured() -> None:
    case = {"section": "fidelity", "side": "both", "bits": 4, "k_bits": 5.0, "v_bits": 4.0, "bits_128": [4.5, 4.0]}
    models = {
        "m": {
            "cases": [
                {**case, "name": name, "documents": [[10, kl, 9]]} for name, kl in (("int4", 1.0), ("kivi4", 4.0))
            ]
        }
    }
    assert "| 4 | int4 | 4.5 | 4.25 | 100, 90.0 % |" in ablation_tables.TABLES["both"](models)
    assert ablation_tables.TABLES["peers"](models).splitlines()[2:] == ["| int4 (4.5) | kivi4 (4.5) | 0.25 |"]


def test_every_step_is_between_rungs_that_are_there() -> None:
    for ladder, steps in ((key_variants, variants.KEY_STEPS), (value_variants, variants.VALUE_STEPS)):
        names = {each.name for bits in (4, 3, 2) for each in ladder(bits)}
        assert {name for _, *pair in steps for name in pair} <= names
    assert all(len(formats(bits)) >= 8 for bits in (4, 3, 2))
    assert fitted_tokens(4).bits(64) == 4.5
    assert replace(RAW, sink_tokens=0) != RAW
