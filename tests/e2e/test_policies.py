"""A policy from a file does what its formats do layer by layer: in the cache, the engine and the study; pages of different sizes share blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny
import torch
from test_engine import GREEDY, ROOMY, SMALL, alone, assert_same, core, drive, forget, prompt
from test_study import tiny_model, tiny_study

import kvarto
from kvarto.attention import LayerKV, PagedKV
from kvarto.binding import BoundCodec
from kvarto.cache.tiers import DiskTier, HostTier, Tiers
from kvarto.codecs import registry
from kvarto.engine.engine import Engine
from kvarto.engine.memory import Compute, Memory
from kvarto.engine.request import Request, Sampling
from kvarto.errors import UnknownName, UsageError
from kvarto.formats import parse_policy
from kvarto.layer_pages import LayerSpec
from kvarto.layout import Geometry, Side
from kvarto.models.load import LoadedModel
from kvarto.policy_file import LayerEntry, PolicyFile, write_policy_file

MIXED = ("int4", "int8/int3+sink64", "fp32", "kivi2/int8")
TOKENS = tuple(prompt(300))


def written(folder: Path, *layers: str, name: str = "mixed") -> str:
    path = folder / f"{name}.json"
    write_policy_file(path, PolicyFile(layers=tuple(LayerEntry(format=text) for text in layers)))
    return str(path)


def for_an_engine() -> LoadedModel:
    """Whose model nobody else uses."""
    return replace(tiny_model(), model=tiny.model("llama"))


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    return written(tmp_path, *MIXED)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_cache_gives_what_layers_of_these_formats_give(family: str, mixed: str) -> None:
    model, inputs = tiny.shared(family), tiny.prompt(200)
    by_file, by_hand = kvarto.Cache(model, mixed), kvarto.Cache(model, "fp32")
    specs = [layer.spec for layer in by_hand.kv.layers]
    assert [str(layer.format) for layer in by_file.kv.layers] == ["int4", "int8/int3", "fp32", "kivi2/int8"]
    layers: list[LayerKV] = [
        PagedKV(specs, text, dtype=torch.float32).layers[i] for i, text in enumerate(MIXED)
    ]  # each from a cache whose layers all have that format
    by_hand.kv.layers[:] = layers
    with torch.inference_mode():
        got, expected = (tiny.feed(model, cache, inputs, [150, *[1] * 50]) for cache in (by_file, by_hand))
    assert torch.equal(got, expected)
    assert str(by_file.policy).startswith("mixed@")


def test_the_engine_gives_what_the_cache_gives(mixed: str) -> None:
    model = tiny.model("qwen2")
    out = model.generate(
        torch.tensor([TOKENS]), cache=kvarto.Cache(model, mixed), max_new_tokens=GREEDY.max_tokens, do_sample=False
    )
    assert [choice.token for choice in alone("qwen2", mixed, TOKENS)] == out[0, len(TOKENS) :].tolist()


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_in_a_crowd_on_prefix_hits_and_beside_other_formats(family: str, mixed: str) -> None:
    engine = core(family, mixed, "int4", memory=ROOMY)
    prompts = [prompt(length) for length in (1, 64, 65, 130, 300)]
    for found in (False, True):
        requests = [Request(f"{p}{i}", list(tokens), GREEDY, p) for i, tokens in enumerate(prompts) for p in (0, 1)]
        got = drive(engine, requests)
        for request in requests:
            text = (mixed, "int4")[request.policy]
            assert_same("int4", got[request], alone(family, text, tuple(request.tokens[: request.prompt_tokens])))
            assert (request.cached_tokens > 0) == (found and request.prompt_tokens > 64)


def test_in_a_memory_that_is_too_small_for_all(mixed: str) -> None:
    engine = core("qwen2", mixed, memory=SMALL)
    requests = [Request(str(i), prompt(250, seed=i), GREEDY) for i in range(6)]
    got = drive(engine, requests)
    for i, request in enumerate(requests):
        assert_same("int4", got[request], alone("qwen2", mixed, tuple(prompt(250, seed=i))))


def test_its_blocks_come_back_from_host_memory_and_after_a_restart(mixed: str, tmp_path: Path) -> None:
    def serve(engine: object) -> int:
        request = Request("a", list(TOKENS), GREEDY)
        assert_same("int4", drive(engine, [request])[request], alone("qwen2", mixed, TOKENS))  # type: ignore[arg-type]
        return request.cached_tokens

    engine = core("qwen2", mixed, tiers=Tiers(HostTier(1 << 26), DiskTier(tmp_path / "disk", 1 << 28)), identity="m")
    assert serve(engine) == 0
    forget(engine)
    assert serve(engine) == 256
    engine.close()
    engine = core("qwen2", mixed, tiers=Tiers(None, DiskTier(tmp_path / "disk", 1 << 28)), identity="m")
    assert serve(engine) == 256
    engine.close()


def test_pages_of_another_file_of_that_name_are_not_found(mixed: str, tmp_path: Path) -> None:
    """The codecs are the same and the scales are not."""
    texts = []
    for number, scale in enumerate((0.5, 0.25)):
        (tmp_path / str(number)).mkdir()
        entry = LayerEntry(format="fp8", k_scale=(scale,), v_scale=(scale,))
        write_policy_file(tmp_path / str(number) / "fp8.json", PolicyFile(layers=(entry,) * 4))
        texts.append(str(tmp_path / str(number) / "fp8.json"))
    for text, found in ((texts[0], 0), (texts[0], 256), (texts[1], 0)):
        engine = core("qwen2", text, tiers=Tiers(None, DiskTier(tmp_path / "disk", 1 << 28)), identity="m")
        request = Request("a", list(TOKENS), GREEDY)
        drive(engine, [request])
        assert request.cached_tokens == found
        engine.close()


def test_layers_of_one_rule_share_a_group_whatever_their_codecs(tmp_path: Path) -> None:
    specs, budget = [LayerSpec(Geometry(8, 128, 128))] * 32, 32 << 30
    layers = [("int2", "int3", "int4", "int8+sink64", "int8/int2")[i % 5] for i in range(32)]
    policy = parse_policy(written(tmp_path, *layers))
    made = Memory(specs, [policy], Compute(torch.bfloat16, torch.device("meta")), budget_bytes=budget, step_tokens=512)
    (offer,) = made.offers
    assert len(offer.groups) == 1
    ends = [layer.sealed.storage_offset() + layer.pages.layout.nbytes for layer in offer.layers]
    assert [layer.sealed.storage_offset() for layer in offer.layers] == [0, *ends[:-1]]
    assert made.arena.block_bytes(offer.groups[0].sealed) - ends[-1] < 256
    per_token = sum(layer.pages.layout.bytes_per_token for layer in offer.layers)
    assert made.capacity_tokens(0) == pytest.approx(budget / per_token, rel=0.01)
    assert offer.bits_per_number == pytest.approx(8 * per_token / (32 * 8 * 256))


def test_codecs_that_differ_in_scales_alone_are_read_by_one_compiled_reader() -> None:
    codecs = [replace(registry["fp8-head"], scales=scales) for scales in ((1.0, 2.0), (0.5, 0.25))]  # type: ignore[call-arg]
    readers = {BoundCodec(codec, codec.layout(Side.V, 64, 16)).numba for codec in codecs}
    assert len(readers) == 1


def test_clients_name_a_policy_by_its_name_and_open_no_file(mixed: str, tmp_path: Path) -> None:
    other = written(tmp_path, *reversed(MIXED), name="other")
    with Engine(for_an_engine(), kv="int4", also=[mixed, other], memory="4MiB") as engine:
        full = engine.formats[1]
        assert full.startswith("mixed@")
        assert {engine.policy_of(name) for name in ("mixed", full, mixed)} == {1}
        assert engine.policy_of("other") == 2
        for name in (str(tmp_path / ".." / tmp_path.name / "mixed.json"), "mixed@", "/etc/passwd.json", "third"):
            with pytest.raises(UnknownName, match="kv_format"):
                engine.policy_of(name)
        greedy = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
        ask = kvarto.Ask(list(range(3, 90)), greedy, kv="mixed")
        (done,) = engine.generate([ask])
        assert done.kv == full
    with pytest.raises(UsageError, match="formats that differ"):
        Engine(for_an_engine(), kv=mixed, also=[mixed], memory="4MiB")


def test_the_server_names_it_and_serves_it(mixed: str) -> None:
    httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")
    from test_serve import serving

    with Engine(for_an_engine(), kv=mixed, also=["int8"], memory="4MiB") as engine, serving(engine) as url:
        names = [each["kv_format"] for each in httpx.get(f"{url}/v1/models").json()["data"][0]["kvarto"]["formats"]]
        assert names == engine.formats
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
            asked = {"model": "tiny", "prompt": "abc " * 40, "max_tokens": 4}
            for extra, expected in (
                ({}, names[0]),
                ({"kv_format": "mixed"}, names[0]),
                ({"kv_format": "int8"}, "int8"),
            ):
                answer = client.completions.with_raw_response.create(**asked, extra_body=extra)
                assert answer.headers["x-kv-format"] == expected
            with pytest.raises(openai.BadRequestError, match="kv_format"):
                client.completions.create(**asked, extra_body={"kv_format": mixed + ".json"})
        assert f'kv_format="{names[0]}"' in httpx.get(f"{url}/metrics").text


def test_a_policy_for_another_number_of_layers_is_refused_everywhere(tmp_path: Path) -> None:
    text = written(tmp_path, "int4", "int8")
    for use in (
        lambda: kvarto.Cache(tiny.shared("llama"), text),
        lambda: Engine(for_an_engine(), kv=text, memory="4MiB"),
        lambda: tiny_study(text),
    ):
        with pytest.raises(UsageError, match="a format for each of the 4 layers that cache keys and values, got 2"):
            use()


def test_the_study_judges_it_like_any_format(mixed: str) -> None:
    result = tiny_study(mixed, "int4", documents=2, needle_seeds=1, json_prompts=0)
    arm = result.candidates[0]
    assert arm.name == str(parse_policy(mixed))
    assert arm.fidelity is not None
    assert arm.fidelity.path_difference is not None
    assert arm.fidelity.path_difference < 1e-3
    layouts = [layer.layout for layer in kvarto.Cache(tiny_model().model, mixed).kv.layers]
    assert arm.bits_per_number == pytest.approx(sum(layout.bits_per_element for layout in layouts) / 4)
