"""Records of tiny models against what their modules compute, seen by hooks; FP8 scales to a checkpoint and back; policies from a budget of bits."""

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
from safetensors.torch import load_file, save_file

from bytes_tokenizer import tokenizer
from kvarto import cli
from kvarto.calibrate import Record, calibrate, export_scales, make_policy, read_scales
from kvarto.calibrate.policy import Search
from kvarto.calibrate.rope import Rope
from kvarto.calibrate.scales import FILE_NAME, Scales
from kvarto.calibrate.sensitivity import sensitivities
from kvarto.calibrate.windows import cut_windows, gather
from kvarto.codecs import registry
from kvarto.errors import IntegrityError, NotFinite, Unsupported, UsageError
from kvarto.formats import parse_policy
from kvarto.layout import Side
from kvarto.models.load import LoadedModel, load
from kvarto.policy_file import write_policy_file
from kvarto.progress import Silent

TOKENS, WINDOW, S = 900, 320, 64
QUICK = Search(search_tokens=1200, measured_tokens=600, least_tokens=1)


@cache
def loaded(family: str = "llama", **changes: Any) -> LoadedModel:
    model = tiny.model(family, vocab_size=300, **changes)
    return LoadedModel(model, tokenizer(), "tiny", "7" * 64, Path())


@cache
def record(family: str = "llama", fisher_tokens: int = 0) -> Record:
    return calibrate(loaded(family), tokens=TOKENS, window_tokens=WINDOW, fisher_tokens=fisher_tokens, least_tokens=1)


def windows() -> list[tuple[int, ...]]:
    cut = cut_windows(gather(["builtin"]), tokenizer(), tokens=TOKENS, window_tokens=WINDOW, least_tokens=1)
    return [window.tokens for window in cut]


@cache
def projected(family: str) -> list[dict[str, torch.Tensor]]:
    """Of each layer what its projections give behind first pages, float32 [H, tokens, D]: values, and keys before RoPE (after the norm of qwen3)."""
    model, found = loaded(family).model, [dict[str, list[torch.Tensor]]() for _ in range(4)]
    hooks = []
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        key = attention.k_norm if family in ("qwen3", "gemma3_text") else attention.k_proj
        for name, module in (("pre_k", key), ("v", attention.v_proj)):
            keep = found[i].setdefault(name, [])
            hooks.append(module.register_forward_hook(lambda _, __, out, keep=keep: keep.append(out[0])))
    with torch.inference_mode():
        for tokens in windows():
            model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [
        {name: torch.cat([_by_head(x)[:, S:] for x in kept], dim=1) for name, kept in layer.items()} for layer in found
    ]


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[T, H * D], [T, H, D] or [H, T, D] as [H, T, D] for two heads of 16."""
    if x.dim() == 2:
        return x.view(len(x), 2, 16).transpose(0, 1)
    return x if x.shape[0] == 2 else x.transpose(0, 1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_values_and_keys_before_rope_are_those_of_the_modules(family: str) -> None:
    made = record(family)
    assert made.provenance.pre_rope == ""
    for layer, expected in zip(made.layers, projected(family), strict=True):
        for name in ("v", "pre_k"):
            x = expected[name].double()
            size = float(x.abs().max())
            assert np.allclose(layer[f"{name}_mean"], x.mean(dim=1), atol=1e-4 * size)
            assert np.allclose(layer[f"{name}_square"], x.square().mean(dim=1), rtol=1e-3, atol=1e-6 * size**2)
            assert np.allclose(layer[f"{name}_amax"], x.abs().amax(dim=(1, 2)), rtol=1e-4)
            rank = -(-x.shape[1] // 200)
            assert np.allclose(layer[f"{name}_low"], x.sort(dim=1).values[:, rank - 1], atol=1e-4 * size)
            assert np.allclose(layer[f"{name}_high"], x.sort(dim=1).values[:, -rank], atol=1e-4 * size)


def test_keys_after_rope_and_sinks_are_those_of_the_models_own_cache() -> None:
    from transformers import DynamicCache

    made, model = record(), loaded().model
    keys: list[list[torch.Tensor]] = [[] for _ in made.layers]
    with torch.inference_mode():
        for tokens in windows():
            own = DynamicCache(config=model.config)
            model(torch.tensor([tokens]), cache=own)
            for kept, layer in zip(keys, own.layers, strict=True):
                kept.append(layer.keys[0])
    for layer, kept in zip(made.layers, keys, strict=True):
        behind, sinks = torch.cat([x[:, S:] for x in kept], dim=1), torch.cat([x[:, :S] for x in kept], dim=1)
        assert np.allclose(layer["k_mean"], behind.mean(dim=1), atol=1e-5)
        assert np.allclose(layer["k_amax"], behind.abs().amax(dim=(1, 2)))
        assert np.allclose(layer["k_sink_amax"], sinks.abs().amax(dim=(1, 2)))
    assert np.allclose(made.amax("k")[2], torch.cat(keys[2], dim=1).abs().amax(dim=(1, 2)))


def test_queries_are_summed_over_their_group_and_outputs_weighed() -> None:
    made, model, squares = record(), loaded().model, []
    attention = model.model.layers[1].self_attn
    hook = attention.q_proj.register_forward_hook(lambda _, __, out: squares.append(out[0, S:].double().square()))
    with torch.inference_mode():
        for tokens in windows():
            model(torch.tensor([tokens]))
    hook.remove()
    # RoPE keeps the norm of a pair: channels i and i + D / 2.
    expected = torch.cat(squares).mean(dim=0).view(2, 2, 2, 8).sum(dim=(1, 2))
    assert np.allclose(made.layers[1]["q_square"].reshape(2, 2, 8).sum(axis=1), expected, rtol=1e-4)
    columns = attention.o_proj.weight.double().square().sum(dim=0).view(2, 2, 16).sum(dim=1)
    assert np.allclose(made.layers[1]["v_output"], columns, rtol=1e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    """Of the loss of the only window, by a value bias and by a key bias before RoPE: sums over tokens of what the record squares."""
    family = loaded("qwen2")
    made = calibrate(family, tokens=100, window_tokens=WINDOW, fisher_tokens=100, least_tokens=1)
    window = torch.tensor([windows()[0][: 100 + S]])
    for name, module in (("v", "v_proj"), ("pre_k", "k_proj")):
        projection = getattr(family.model.model.layers[2].self_attn, module)
        gradients: list[torch.Tensor] = []

        def keep(_: Any, __: Any, out: torch.Tensor, gradients: list[torch.Tensor] = gradients) -> torch.Tensor:
            out = out.detach().requires_grad_()
            gradients.append(out)
            return out

        hook = projection.register_forward_hook(keep)
        logits = family.model(window, use_cache=False).logits
        hook.remove()
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], window[0, 1:], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, gradients)
        expected = _by_head(gradient[0])[:, S:].double().square().mean(dim=1)
        assert np.allclose(made.layers[2][f"{name}_fisher"], expected, rtol=2e-3, atol=1e-6 * float(expected.max()))
    assert made.provenance.fisher_tokens == 100
    assert all(parameter.grad is None for parameter in family.model.parameters())


def test_the_same_inputs_give_the_same_record() -> None:
    once, again = record(fisher_tokens=200), record.__wrapped__(fisher_tokens=200)
    assert once.sha256 == again.sha256
    assert record().sha256 != once.sha256


def test_the_model_is_as_it_was() -> None:
    model = loaded("qwen3").model
    before = model.config._attn_implementation, model(torch.arange(3, 90)[None]).logits
    record("qwen3")
    assert model.config._attn_implementation == before[0]
    assert torch.equal(model(torch.arange(3, 90)[None]).logits, before[1])


def test_a_rotation_that_is_not_known_is_said_and_left_out() -> None:
    made = record("gpt_oss")
    assert "not rotated by halves" in made.provenance.pre_rope
    assert not any(name.startswith("pre_k") for layer in made.layers for name in layer)


def test_rotating_pairs_the_other_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    undo = Rope.undo

    def interleaved(self: Rope, x: torch.Tensor, layer: int) -> torch.Tensor:
        order = torch.arange(x.shape[-1]).view(2, -1).T.flatten()
        return undo(self, x[..., order.argsort()], layer)[..., order]

    monkeypatch.setattr(Rope, "undo", interleaved)
    made = calibrate(loaded(), tokens=200, window_tokens=WINDOW, least_tokens=1)
    assert "layer 0 are not rotated by halves" in made.provenance.pre_rope


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}}),
    ],
)  # fmt: skip
def test_partly_rotated_heads_and_scaled_rotations_are_undone(family: str, changes: dict[str, Any]) -> None:
    own = replace(loaded(), model=tiny.model(family, vocab_size=300, **changes))
    assert calibrate(own, tokens=200, window_tokens=WINDOW, least_tokens=1).provenance.pre_rope == ""


def test_too_little_text_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("To be, or not to be. " * 20)
    with pytest.raises(UsageError, match="at least 2,048 tokens behind first pages, got"):
        calibrate(loaded(), str(tmp_path / "short.txt"))
    assert calibrate(loaded(), str(tmp_path / "short.txt"), least_tokens=1).provenance.documents == 1


def test_a_model_that_computes_nan_is_refused() -> None:
    model = tiny.model("llama", vocab_size=300)
    model.model.layers[2].self_attn.v_proj.weight[3, 5] = float("nan")
    with pytest.raises(NotFinite, match="V of layer 2"):
        calibrate(replace(loaded(), model=model), tokens=200, window_tokens=WINDOW, least_tokens=1)


# ---- FP8 scales ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    loaded().model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_scales_go_into_a_checkpoint_and_come_back(per: Any, checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").read_bytes()
    assert export_scales(record(), checkpoint, per) == checkpoint / FILE_NAME
    assert (checkpoint / "model.safetensors").read_bytes() == before
    tensors = load_file(checkpoint / FILE_NAME)
    assert len(tensors) == 8
    assert tensors["model.layers.3.self_attn.v_scale"].shape == ((1,) if per == "tensor" else (2, 1, 1))
    scheme = json.loads((checkpoint / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (
        8,
        "float",
        "tensor" if per == "tensor" else "attn_head",
    )
    scales = read_scales(checkpoint)
    assert scales == Scales.of(record(), per)
    for side, values in (("k", scales.k), ("v", scales.v)):
        for layer, own in enumerate(values):
            amax = np.maximum(record().layers[layer][f"{side}_amax"], record().layers[layer][f"{side}_sink_amax"])
            assert np.allclose(own, (amax.max() if per == "tensor" else amax) / 448, rtol=1e-6)


def test_scales_become_a_policy_that_just_fits(checkpoint: Path, tmp_path: Path) -> None:
    """In the first layer, whose keys and values depend on no quantized ones: nothing saturates, and with scales a little smaller something does."""
    import kvarto

    export_scales(record(), checkpoint, "head")
    scales = read_scales(checkpoint)
    smaller = replace(scales, k=tuple(tuple(0.99 * scale for scale in layer) for layer in scales.k))
    model, saturated = loaded().model, []
    for number, each in enumerate((scales, smaller)):
        path = tmp_path / f"{number}.json"
        write_policy_file(path, each.policy("mine", {}))
        assert str(parse_policy(str(path))).startswith("mine@")
        saturated.append(0)
        for tokens in windows():
            cache = kvarto.Cache(model, str(path))
            with torch.inference_mode():
                model(torch.tensor([[*tokens, *[0] * S]]), cache=cache)
            saturated[-1] += int(cache.kv.layers[0].saturated_elements)
    assert saturated[0] == 0
    assert saturated[1] > 0


def test_half_precision_scalars_of_others_are_read(checkpoint: Path) -> None:
    """Names and shapes that vLLM takes too."""
    names = ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.attn.v_scale")
    save_file(
        {name.format(i): torch.tensor(0.5 + i, dtype=torch.bfloat16) for i in range(4) for name in names},
        checkpoint / "other.safetensors",
    )
    assert read_scales(checkpoint) == Scales("tensor", *[tuple((0.5 + i,) for i in range(4))] * 2)


def test_scales_that_lack_are_an_error_or_a_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    export_scales(record(), checkpoint)
    tensors = load_file(checkpoint / FILE_NAME)
    del tensors["model.layers.2.self_attn.k_scale"]
    save_file(tensors, checkpoint / FILE_NAME)
    line = r"scales of 4 layers expected, found 3 of K, 4 of V; layers 2 lack them"
    with pytest.raises(IntegrityError, match=line):
        read_scales(checkpoint)
    assert read_scales(checkpoint, partial=True).k[2] == (1.0,)
    assert re.search(line, caplog.text)
    (checkpoint / FILE_NAME).unlink()
    with pytest.raises(IntegrityError, match="found 0 of K, 0 of V"):  # the config promises them
        read_scales(checkpoint)


def test_checkpoints_that_do_not_fit_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="k_scale and v_scale of its layers, got none"):
        read_scales(checkpoint)
    with pytest.raises(UsageError, match="config.json"):
        read_scales(tmp_path)
    tiny.model("llama", num_hidden_layers=3).save_pretrained(tmp_path / "three")
    with pytest.raises(UsageError, match="the 4 layers .* of tiny, got 3"):
        export_scales(record(), tmp_path / "three")
    tiny.model("llama", num_key_value_heads=4).save_pretrained(tmp_path / "heads")
    with pytest.raises(UsageError, match="2 KV heads, got 4"):
        export_scales(record(), tmp_path / "heads")
    config = json.loads((checkpoint / "config.json").read_text())
    for quantization, line in (
        ({"quant_method": "gptq"}, "quantized by gptq"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "type int"),
    ):
        (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        with pytest.raises(Unsupported, match=line):
            export_scales(record(), checkpoint) if "gptq" in line else read_scales(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(config))
    save_file({"model.layers.0.self_attn.k_scale": torch.ones(1)}, checkpoint / "more.safetensors")
    with pytest.raises(UsageError, match="no scales of keys and values yet, got more.safetensors"):
        export_scales(record(), checkpoint)


def test_a_sharded_checkpoint_lists_its_scales(tmp_path: Path) -> None:
    loaded().model.save_pretrained(tmp_path, max_shard_size="100KB")
    export_scales(record(), tmp_path)
    listed = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name for name, file in listed.items() if file == FILE_NAME} == set(load_file(tmp_path / FILE_NAME))


def test_a_checkpoint_whose_weights_are_quantized_keeps_its_scheme(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    groups = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
    }
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": groups}))
    export_scales(record(), checkpoint)
    written = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert {name: written[name] for name in groups} == groups


# ---- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt_oss"])
def test_what_is_kept_raw_costs_nothing(family: str) -> None:
    """With windows, sinks and all: the change of an output is that of quantizing, and of nothing else."""
    few = cut_windows(gather(["builtin"]), tokenizer(), tokens=400, window_tokens=WINDOW, least_tokens=1)
    codecs = [registry[name] for name in ("fp32", "int2")]
    costs = sensitivities(loaded(family).model, few, codecs, Silent())
    for layer in range(4):
        for side in Side:
            assert costs[(layer, side), "fp32"] < 1e-7
            assert costs[(layer, side), "int2"] > 1000 * costs[(layer, side), "fp32"] + 1e-6


def test_costs_rank_what_is_measured() -> None:
    """Predicted costs fall with bits, and their sums are near the KL of all layers together where that is small."""
    made = make_policy(loaded(), budget_bits=6.0, search=QUICK)
    for layer in range(4):
        for side in ("k", "v"):
            costs = [made.costs[(layer, side), codec] for codec in ("int2", "int3", "int4", "int8")]  # type: ignore[index]
            assert costs == sorted(costs, reverse=True)
            assert costs[0] > 4 * costs[2] > 16 * costs[3]
    for name in ("policy", "int4"):
        assert made.predicted_nats[name] == pytest.approx(made.measured[name].kl_nats.mean, rel=0.7)
    assert made.measured["policy"].bits == made.content.provenance["bits"] <= 6.0


def test_a_budget_buys_more_than_the_uniform_format_of_as_many_bits() -> None:
    made = make_policy(loaded(), budget_bits=parse_bits("int4"), search=QUICK)
    policy, uniform = made.measured["policy"], made.measured["int4"]
    assert policy.bits <= uniform.bits
    assert policy.kl_nats.mean < uniform.kl_nats.mean


def parse_bits(text: str) -> float:
    from kvarto.layout import Geometry

    return parse_policy(text).format.layout(Geometry(2, 16, 16)).bits_per_element


def test_a_policy_names_no_document_twice_and_the_same_inputs_give_the_same_one() -> None:
    once, again = (make_policy(loaded("qwen2"), budget_bits=5.0, search=QUICK) for _ in range(2))
    assert once.content.layers == again.content.layers
    assert once.costs == again.costs
    assert once.policy.identity == again.policy.identity


def test_a_budget_that_nothing_meets_is_refused_before_any_work() -> None:
    with pytest.raises(
        UsageError, match=r"budget_bits: expected at least 3.188, metadata included \(int2 everywhere\), got 2"
    ):
        make_policy(loaded(), budget_bits=2, search=QUICK)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    loaded().model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_the_command_makes_a_record_scales_and_policies(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "tiny.record"
    few = ["--tokens", "600", "--little-text", "--threads", "1"]
    assert cli.run(["calibrate", str(folder), "-o", str(made), "--window-tokens", "256", *few]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"4 layers, 600 tokens of \d documents \(builtin\)", out)
    assert Record.load(made, model=load(str(folder))).provenance.tokens == 600
    assert cli.run(["calibrate", "import-scales", str(made), "-o", str(tmp_path / "fp8.json"), "--per-head"]) == 0
    assert len(parse_policy(str(tmp_path / "fp8.json")).layers) == 4
    policy = tmp_path / "policy.json"
    words = ["calibrate", str(folder), "--budget-bits", "5", "-o", str(policy), "--record", str(made), *few]
    words += ["--codecs", "int3,kivi2, int4,int8"]
    assert cli.run(words) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"kivi2 .*\n.*int3 .*\n.*tiny-5 .*\n.*int4 ", out), out
    content = json.loads(policy.read_text())
    assert content["record"]["path"] == str(made)
    assert len(parse_policy(str(policy)).layers) == 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["MODEL"], "Missing option '--out' / '-o'"),
        (["MODEL", "-o", "policy.json"], "a name for a record, such as model.record"),
        (["MODEL", "-o", "none/x.record"], "a file that can be written, got none/x.record"),
        (["MODEL", "-o", "x.txt", "--budget-bits", "3"], "a name that ends in .json, for a policy"),
        (["MODEL", "-o", "OUT.json", "--budget-bits", "1"], r"budget_bits: expected at least 3.188, .*, got 1"),
        (["MODEL", "-o", "OUT.record", "--text", "nowhere"], "text: expected one of a file, a folder, builtin"),
        (
            ["MODEL", "-o", "OUT.json", "--budget-bits", "5", "--codecs", "int5"],
            "codec: expected one of .*, got 'int5'",
        ),
        (["nomodel", "-o", "OUT.record"], "model: expected one of"),
        (["export-scales", "none.record", "MODEL"], "record: expected an existing file, got none.record"),
        (["import-scales", "MODEL", "-o", "OUT.json"], "k_scale and v_scale of its layers, got none"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    words: list[str], line: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [word.replace("MODEL", str(folder)).replace("OUT", str(tmp_path / "x")) for word in words]
    assert cli.run(["calibrate", *said]) == 2
    _, err = capsys.readouterr()
    assert re.search(line, err.splitlines()[-1]), err
    assert not list(tmp_path.iterdir())
