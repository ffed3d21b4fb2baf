"""KVQuant from text to pages: a record's ranges, levels and angles, the policy that carries them, and keys that know their places on every path."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny
import torch
from test_calibrate import TOKENS, WINDOW, folder, loaded, record, windows
from test_engine import GREEDY, ROOMY, alone, assert_same, core, drive, prompt

import kvarto
from kvarto import cli
from kvarto.calibrate import Record, calibrate
from kvarto.calibrate.nuq import calibrated_policy
from kvarto.codecs.base import extract
from kvarto.codecs.kvquant import KvQuant
from kvarto.codecs.rope import turned
from kvarto.engine.request import Request
from kvarto.errors import UsageError
from kvarto.formats import parse_policy
from kvarto.layout import PAGE_TOKENS, Side
from kvarto.policy_file import LayerEntry, PolicyFile, write_policy_file

__all__ = ["folder"]
FISHER = 600


@cache
def made(family: str) -> Record:
    return record(family, fisher_tokens=FISHER)


def policy(family: str, text: str, path: Path) -> str:
    write_policy_file(path / "policy.json", calibrated_policy(made(family), text, name="kvq"))
    return str(path / "policy.json")


def real_text(tokens: int) -> dict[str, torch.Tensor]:
    """What was calibrated on: keys of random tokens lie elsewhere."""
    ids = torch.tensor([windows()[0][:tokens]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_record_has_angles_and_levels(family: str) -> None:
    rope = loaded(family).model.model.rotary_emb
    kinds = getattr(loaded(family).model.config, "layer_types", [""] * 4)
    for layer, kind in zip(made(family).layers, kinds, strict=True):
        angles = getattr(rope, f"{kind}_inv_freq", None) if family == "gemma3_text" else rope.inv_freq
        assert np.allclose(layer["rope_angles"], angles.numpy(), rtol=1e-5, atol=1e-9)
        assert layer["rope_scale"] == pytest.approx(1.0)
        for side in ("pre_k", "v"):
            for bits in (2, 3, 4):
                levels = layer[f"{side}_levels_{bits}"]
                assert len(levels) == 1 << bits
                assert bool((np.diff(levels) > 0).all())
                assert float(np.abs(levels).max()) <= 1.0
                assert len(layer[f"{side}_drawn_{bits}"]) == 1 << bits


def test_scaled_angles_are_those_of_the_model_and_the_scale_stays_in_the_keys() -> None:
    changes = {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 256,
        }
    }
    own = replace(loaded(), model=tiny.model("llama", vocab_size=300, **changes))
    layer = calibrate(own, tokens=200, window_tokens=WINDOW, fisher_tokens=100, least_tokens=1).layers[0]
    rope = own.model.model.rotary_emb
    assert np.allclose(layer["rope_angles"], rope.inv_freq.numpy(), rtol=1e-5, atol=1e-9)
    assert float(layer["rope_scale"][0]) == pytest.approx(float(rope.attention_scaling))
    assert float(rope.attention_scaling) > 1.05


def test_a_policy_has_what_the_record_says(tmp_path: Path) -> None:
    read = parse_policy(policy("qwen2", "kvquant3/kvquant2", tmp_path))
    for chosen, layer in zip(read.layers, made("qwen2").layers, strict=True):
        assert isinstance(chosen.k, KvQuant)
        assert isinstance(chosen.v, KvQuant)
        assert chosen.k.calibrated is not None
        assert chosen.v.calibrated is not None
        zero, scale = (np.array(each) for each in (chosen.k.calibrated.zero, chosen.k.calibrated.scale))
        assert np.allclose(zero - scale, layer["pre_k_low"], rtol=1e-4, atol=1e-4)
        assert np.allclose(zero + scale, layer["pre_k_high"], rtol=1e-4, atol=1e-4)
        assert np.allclose(chosen.k.calibrated.levels, layer["pre_k_levels_3"], rtol=1e-5)
        assert np.allclose(chosen.v.calibrated.levels, layer["v_drawn_2"], rtol=1e-5)
        middles = (layer["v_levels_2"][1:] + layer["v_levels_2"][:-1]) / 2
        assert np.allclose(chosen.v.calibrated.thresholds, middles, rtol=1e-4, atol=1e-6)
    assert read.layers[0].sink_tokens == PAGE_TOKENS


def test_weights_are_squared_gradients_times_squared_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equation 7 of the paper, for values of one window, by hand."""
    from kvarto.calibrate import nuq

    seen: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(nuq.Histogram, "add", lambda _, u, weights: seen.append((u, weights)))
    x = torch.linspace(-3, 5, 2 * 4 * 16).view(2, 4, 16)
    gradient = torch.linspace(1, 2, 2 * 4 * 16).view(2, 4, 16)
    nuq.LevelStatistics().add_keys(x, gradient, np.full((2, 16), -2.0, np.float32), np.full((2, 16), 6.0, np.float32))
    ((u, weights),) = seen
    assert np.allclose(u, (x.numpy() - 2.0) / 4.0)
    assert np.allclose(weights, gradient.numpy() ** 2 * 16.0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_every_path_seals_the_same_keys_before_rope(family: str, tmp_path: Path) -> None:
    """Whole prompt, in pieces and token by token: places in the pages, and outputs that agree; four bits are near the model's own."""
    text, model, inputs = policy(family, "kvquant4", tmp_path), loaded(family).model, real_text(220)
    whole, own = kvarto.Cache(model, text), kvarto.Cache(model, "fp32")
    with torch.inference_mode():
        expected = tiny.feed(model, whole, inputs, [220])[0]
        raw = tiny.feed(model, own, inputs, [220])[0]
        worse = tiny.feed(model, kvarto.Cache(model, "kivi3"), inputs, [220])[0]
        assert 1e-4 < float((expected - raw).norm() / raw.norm()) < float((worse - raw).norm() / raw.norm())
        for pieces in ([100, 60, 60], [1] * 220):
            cache = kvarto.Cache(model, text)
            got = tiny.feed(model, cache, inputs, pieces)[0]
            assert float((got - expected).norm() / expected.norm()) < 0.01
    for layer in whole.kv.layers:
        for page, held in enumerate(layer.rows[0].packed):
            if held >= 0:
                firsts = layer.sealed.pages[held].view(layer.spec.geometry.heads, -1)[:, : layer.layout.k.nbytes]
                assert set(extract(firsts, layer.layout.k, "first")[:, 0].tolist()) == {page * PAGE_TOKENS}


def test_padding_on_the_left_moves_no_page(tmp_path: Path) -> None:
    text, model = policy("llama", "kvquant4", tmp_path), loaded().model
    inputs, alone_cache, cache = tiny.prompt(200, 90), kvarto.Cache(model, text), kvarto.Cache(model, text)
    with torch.inference_mode():
        both = tiny.feed(model, cache, inputs, [200])
        short = {name: x[1:, 110:] for name, x in inputs.items()}
        one = tiny.feed(model, alone_cache, short, [90])
    assert float((both[1, 110:] - one[0]).norm() / one.norm()) < 0.01


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_the_engine_gives_what_the_cache_gives_in_a_crowd_and_on_prefix_hits(family: str, tmp_path: Path) -> None:
    text, tokens = policy(family, "kvquant4", tmp_path), prompt(300)
    model = tiny.model(family)
    out = model.generate(
        torch.tensor([tokens]), cache=kvarto.Cache(model, text), max_new_tokens=GREEDY.max_tokens, do_sample=False
    )
    assert [choice.token for choice in alone(family, text, tuple(tokens))] == out[0, len(tokens) :].tolist()
    engine = core(family, text, memory=ROOMY)
    for found in (False, True):
        requests = [Request(str(length), prompt(length), GREEDY) for length in (64, 130, 300)]
        got = drive(engine, requests)
        for request in requests:
            assert_same("int4", got[request], alone(family, text, tuple(request.tokens[: request.prompt_tokens])))
            assert (request.cached_tokens > 0) == (found and request.prompt_tokens > 64)


def test_keys_come_back_after_rope(tmp_path: Path) -> None:
    """Of a sealed page, against the keys that the model computed, and not only near them where nothing turns."""
    text, model, inputs = policy("llama", "kvquant4", tmp_path), loaded().model, real_text(200)
    cache, own = kvarto.Cache(model, text), kvarto.Cache(model, "fp32+sink0")
    with torch.inference_mode():
        for each in (cache, own):
            tiny.feed(model, each, inputs, [200])
    layer, raw = cache.kv.layers[0], own.kv.layers[0]  # whose keys depend on no other page
    keys = []
    for at in (layer, raw):
        pair = at.sealed.pages[at.rows[0].packed[2]].view(at.spec.geometry.heads, -1)
        keys.append(at.k.decode(pair[:, : at.layout.k.nbytes]))
    error = float((keys[0] - keys[1]).norm() / keys[1].norm())
    assert error < 0.1
    made_constants = layer.format.k.calibrated  # type: ignore[attr-defined]
    elsewhere = turned(keys[0], torch.tensor([64], dtype=torch.int32), made_constants.angles)
    assert float((elsewhere - keys[1]).norm() / keys[1].norm()) > 3 * error


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("int4", "one with calibrated levels, such as kvquant3 or int8/kvquant4, got int4"),
        ("kvquant3", "record: expected levels, for which gradients are needed, got none; make it anew: kvarto calibrate MODEL --fisher-tokens"),
    ],
)  # fmt: skip
def test_what_a_record_cannot_give_is_said(text: str, line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        calibrated_policy(record("llama"), text)


def test_a_model_whose_rope_is_not_known_keeps_its_keys_in_another_codec() -> None:
    without = calibrate(loaded("gpt_oss"), tokens=TOKENS, window_tokens=WINDOW, fisher_tokens=200, least_tokens=1)
    with pytest.raises(
        UsageError,
        match=r"keys before RoPE, which kvquant3 writes, got none .*; use another codec for keys, such as int4/kvquant3",
    ):
        calibrated_policy(without, "kvquant3")
    assert calibrated_policy(without, "int4/kvquant3").layers[0].k_constants is None


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (
            {"format": "int4", "k_constants": {"levels": [0, 1], "thresholds": [0.5]}},
            "layers.0: k_constants: expected none, or a codec with",
        ),
        (
            {"format": "kvquant2", "v_constants": {"levels": [3, 2, 1, 0], "thresholds": [0, 1, 2]}},
            "ascending levels and thresholds",
        ),
        ({"format": "kvquant2", "v_constants": {"levels": ["a"], "thresholds": []}}, "layers.0.v_constants.levels.0"),
    ],
)
def test_constants_that_mean_nothing_are_refused_by_place(entry: dict[str, Any], line: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"kvarto_policy": 1, "layers": [entry]}))
    with pytest.raises(UsageError, match=re.escape(line)):
        parse_policy(str(tmp_path / "p.json"))


def test_policies_differ_if_constants_do() -> None:
    entries = [LayerEntry(format=each) for each in ("int4", "int4", "int4", "int4")]
    one, two = calibrated_policy(made("llama"), "kvquant4"), calibrated_policy(made("qwen2"), "kvquant4")
    assert one.layers[0].k_constants != two.layers[0].k_constants
    assert PolicyFile.model_validate_json(one.to_json()) == one
    assert len(one.layers) == len(entries)


def test_the_command_makes_a_record_and_a_policy_and_takes_a_record_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--tokens", "600", "--little-text", "--threads", "1", "--window-tokens", "256", "--fisher-tokens", "200"]
    out = tmp_path / "kvq.json"
    assert cli.run(["calibrate", str(folder), "--format", "kvquant3", "-o", str(out), *few]) == 0
    shown, _ = capsys.readouterr()
    assert re.search(r"keys before RoPE: yes; gradients: [1-9][0-9]+ tokens", shown)
    assert re.search(r"written: .*kvq.json, kvq@[0-9a-f]{16}", shown)
    content = json.loads(out.read_text())
    assert content["record"]["path"] == str(tmp_path / "kvq.record")
    assert content["provenance"]["record_sha256"] == Record.load(tmp_path / "kvq.record").sha256
    assert cli.run(["calibrate", str(folder), "--format", "kvquant4", "-o", str(out), *few]) == 2
    assert "take it with --record" in capsys.readouterr().err
    again = tmp_path / "again.json"
    words = [
        "calibrate",
        str(folder),
        "--format",
        "int8/kvquant4",
        "-o",
        str(again),
        "--record",
        str(tmp_path / "kvq.record"),
    ]
    assert cli.run(words) == 0
    assert not (tmp_path / "again.record").exists()
    assert [chosen.k.name for chosen in parse_policy(str(again)).layers] == ["int8"] * 4
    for side, codec in zip(Side, ("kvquant3", "kvquant3"), strict=True):
        assert getattr(parse_policy(str(out)).layers[0], side.value).name == codec


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["MODEL", "--format", "kvquant3", "-o", "OUT.record"], "a name that ends in .json, for a policy"),
        (
            ["MODEL", "--format", "kvquant3", "--budget-bits", "3", "-o", "OUT.json"],
            "--format: expected none with --budget-bits",
        ),
        (["nomodel", "--format", "int4", "-o", "OUT.json"], "one with calibrated levels"),
        (["nomodel", "--format", "kvquant5", "-o", "OUT.json"], "got 'kvquant5'"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    words: list[str], line: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [word.replace("MODEL", str(folder)).replace("OUT", str(tmp_path / "x")) for word in words]
    assert cli.run(["calibrate", *said]) == 2
    _, err = capsys.readouterr()
    assert line in err.splitlines()[-1], err


def test_a_record_of_another_model_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made("llama").save(tmp_path / "other.record")
    words = [
        "calibrate",
        str(folder),
        "--format",
        "kvquant3",
        "-o",
        str(tmp_path / "x.json"),
        "--record",
        str(tmp_path / "other.record"),
    ]
    assert cli.run(words) == 2
    _, err = capsys.readouterr()
    assert "got one of tiny (777777777777)" in err.splitlines()[-1]
    assert not (tmp_path / "x.json").exists()
