from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

import peers_quality
import quality
import quality_arms
import quality_tensors
from kvarto.study.passages import Passage
from peers_quality import CachePeer, EncodedLayer, held_bytes
from quality_arms import Contender, Reading
from served import save_tiny, tiny_model

TOKENS, LAYERS, HEADS, D = 192, 2, 2, 16


class Rounding(DynamicLayer):
    """A peer that keeps its first `raw` tokens, and all others to whole numbers in a byte each; what a call brings it hands out raw."""

    def __init__(self, raw: int) -> None:
        super().__init__()
        self.raw = raw

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        past, count = self.get_seq_length(), key_states.shape[-2]
        k, v = super().update(key_states, value_states)
        handed = k.clone(), v.clone()
        if past + count > self.raw:
            k[..., max(past, self.raw) :, :] = k[..., max(past, self.raw) :, :].round()
        return handed


def rounding(raw: int) -> CachePeer:
    return CachePeer("rounding", "transformers", lambda _: Cache(layers=[Rounding(raw) for _ in range(LAYERS)]), "")


def exact() -> CachePeer:
    return CachePeer("exact", "transformers", lambda _: DynamicCache(), "")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def passages(count: int = 2) -> list[Passage]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (count, TOKENS + 1), generator=generator)
    return [Passage(f"document {i}", tuple(row.tolist())) for i, row in enumerate(tokens)]


class Quiet:
    def begin(self, *_: object) -> None: ...

    done = say = plan = begin


def read(model: Any, peers: list[CachePeer], formats: tuple[str, ...] = ()) -> dict[str, Contender]:
    """What `quality.py` makes of these on random tokens."""
    contenders = [quality_arms.raw(model), *quality_arms.ours(model, formats, TOKENS)]
    for peer in peers:
        reads = quality_arms._reads
        arm = quality_arms.PeerArm(peer.name, "candidate", model, peer=peer)
        contenders.append(Contender(peer.name, reads(arm), quality.RAW, one_call=reads(arm, None)))
    with torch.inference_mode():
        quality.read_all(contenders, passages(), Quiet(), lambda _: None)  # type: ignore[arg-type]
    return {each.name: each for each in contenders}


def test_an_exact_cache_loses_nothing_and_a_rounding_one_does(model: Any) -> None:
    found = read(model, [exact(), rounding(0)], ("int8",))
    none, rounded, pages, int8 = (
        found[name].result() for name in ("exact", "rounding", "kvarto raw pages", "kvarto int8")
    )
    assert none["kl"]["mean"] == 0
    assert none["top1"]["mean"] == 1
    assert abs(pages["kl"]["mean"]) < 1e-5
    assert rounded["kl"]["mean"] > 100 * max(int8["kl"]["mean"], 1e-6)
    assert rounded["kl_one_call"] == pytest.approx(0, abs=1e-6), "one call hands out what it was given"
    assert set(rounded["kl_by_document"]) == {"document 0", "document 1"}
    assert rounded["seconds_over_raw"] > 0


def test_who_fails_says_so_and_the_others_go_on(model: Any) -> None:
    def broken(_: Any) -> Cache:
        raise AttributeError("module 'numpy' has no attribute 'trapz'")

    found = read(model, [CachePeer("broken", "transformers", broken, ""), exact()])
    assert found["broken"].result() == {"skipped": "AttributeError: module 'numpy' has no attribute 'trapz'"}
    assert "kl" in found["exact"].result()


def test_not_finite_is_a_failure(model: Any) -> None:
    contender = Contender("nan", lambda _, scored: Reading(torch.full((scored, 257), torch.nan), 1.0), quality.RAW)
    with torch.inference_mode():
        quality.read_all([quality_arms.raw(model), contender], passages(), Quiet(), lambda _: None)  # type: ignore[arg-type]
    assert contender.result()["skipped"].startswith("NotFinite")


@pytest.mark.parametrize("raw", [0, 100])
def test_what_is_read_raw_is_counted(model: Any, raw: int) -> None:
    seen = [min(raw, 128) + query - 128 + 1 for query in range(128, TOKENS)]
    expected = sum(count / (query + 1) for query, count in zip(range(128, TOKENS), seen, strict=True)) / len(seen)
    assert quality_arms.peer_raw_share(model, rounding(raw), TOKENS) == pytest.approx(expected)
    assert quality_arms.peer_raw_share(model, exact(), TOKENS) == 1


def test_our_raw_share_is_that_of_the_rule() -> None:
    without, sink = (quality_arms.our_raw_share(text, TOKENS) for text in ("int4+sink0", "int4"))
    own = [(query - 127) / (query + 1) for query in range(128, TOKENS)]
    assert without == pytest.approx(sum(own) / len(own))
    assert sink == pytest.approx(without + sum(64 / (query + 1) for query in range(128, TOKENS)) / len(own))
    assert quality_arms.our_raw_share("int4+window64", TOKENS) == 1


def test_bits_count_all_that_is_held(model: Any) -> None:
    assert quality_arms.peer_bits(model, exact(), TOKENS) == {"bits": 16, "bits_beyond": 16}
    ours = quality_arms.our_bits(model, "int8", TOKENS)
    assert ours["bits_beyond"] == pytest.approx(8 + (24 / 64 + 32 / D) / 2)
    assert ours["bits"] > ours["bits_beyond"], "sinks or open pages are not counted"


def test_bytes_of_nested_tensors_are_counted_once() -> None:
    x = torch.zeros(10, dtype=torch.float16)

    class Held:
        def __init__(self) -> None:
            self.parts = {"a": [x, x[:]], "b": (torch.zeros(3, dtype=torch.uint8), "text", 5)}
            self.quantizer = torch.zeros(1000)
            self.self = self

    assert held_bytes(Held()) == 20 + 3


def test_an_encoded_layer_encodes_once_and_reads_decoded() -> None:
    calls: list[int] = []

    def encode(side: str, x: Tensor) -> Tensor:
        calls.append(x.shape[-2])
        return x.round()

    layer = EncodedLayer(encode, lambda _, each: each)
    x = torch.randn(1, 1, 5, 4)
    first, _ = layer.update(x, x)
    second, _ = layer.update(x[..., :2, :], x[..., :2, :])
    assert torch.equal(first, x)
    assert torch.equal(second, torch.cat([x.round(), x[..., :2, :]], dim=-2))
    assert calls == [5, 5, 2, 2]
    assert layer.get_seq_length() == 7


def test_recorded_keys_and_values_are_compared(model: Any) -> None:
    with torch.inference_mode():
        layers = quality_tensors.record(model, [passages(1)[0].tokens])
    assert len(layers) == LAYERS
    assert layers[0].k.shape == (1, HEADS, TOKENS, D)
    same = quality_tensors.measure(layers, lambda _, x: x, lambda _, x: x)
    assert (same["k_error"], same["output_error"], same["bits"]) == (0, 0, 16)
    assert same["attention_kl"] == pytest.approx(0, abs=1e-6)
    halved = quality_tensors.measure(layers, lambda _, x: x, lambda side, x: x / 2 if side == "k" else x)
    assert (halved["k_error"], halved["v_error"]) == (0.5, 0)
    assert halved["attention_kl"] > 1e-3
    rows = quality_tensors.rows(layers, ["int8", "int4"], [], lambda _: None)
    int8, int4 = rows["kvarto int8"], rows["kvarto int4"]
    assert 0 < int8["k_error"] < int4["k_error"] < 0.2
    assert int8["bits"] > int4["bits"]


def test_absent_peers_have_a_row(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_quality, "PROJECTS", dict.fromkeys(peers_quality.PROJECTS, "no-such-package-at-all"))
    found = {each.name: each.result() for each in quality_arms.others(model, ["quanto"], TOKENS)}
    assert found["quanto 4"]["skipped"] == "not installed: pip install no-such-package-at-all"
    assert "quanto 4" not in {each.name for each in quality_arms.others(model, ["quanto"], TOKENS, ["quanto 4"])}
    (row,) = quality_arms.llama(Path, 1, 1)
    assert row.result() == {"skipped": "not installed: pip install no-such-package-at-all"}


def test_quick_runs_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program on a tiny model without peers: both tables, and the JSON."""
    folder, out = save_tiny(tmp_path / "tiny"), tmp_path / "out" / "quality.json"
    quality.main(["--quick", "--models", str(folder), "--peers", "", "--out", str(out)])
    said = " ".join(capsys.readouterr().out.split())  # a title with a long path takes two lines
    assert "the same keys and values" in said
    assert "2 documents of 192 tokens" in said
    assert "not run: turbo-attn" in said
    kept = json.loads(out.read_text())["models"][str(folder)]
    assert 0 < kept["model"]["kvarto int8"]["kl"]["mean"] < kept["model"]["kvarto int4"]["kl"]["mean"]
    assert set(kept["tensors"]) == {"kvarto int8", "kvarto int4"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--peers", "vllm"], "--peers"),
        (["--tokens", "128"], "--tokens"),
        (["--formats", "int44"], "did you mean"),
        (["--without", "quanto"], "--without"),
    ],
)
def test_mistakes_are_one_line(words: list[str], told: str) -> None:
    with pytest.raises(SystemExit, match=rf"^quality\.py: .*{told}"):
        quality.main(["--quick", *words])
