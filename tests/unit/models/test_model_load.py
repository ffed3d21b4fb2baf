"""Loading: names, folders and hub ids; safetensors only; an identity that follows the weights and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvarto.errors import (
    BackendUnavailable,
    FetchError,
    IntegrityError,
    KvartoError,
    UnknownName,
    Unsupported,
    UsageError,
)
from kvarto.models.identity import identify
from kvarto.models.load import load, resolve


def write_tiny_model(folder: Path, **options: object) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=16, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder, **options)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(16)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def test_a_folder_loads_in_float32_quietly(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(str(tiny))
    assert (loaded.name, loaded.folder) == ("tiny", tiny)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer("w1 w2").input_ids == [1, 2]
    assert load(str(tiny), dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")


def test_identity_follows_the_weights_and_not_the_files(tiny: Path, tmp_path: Path) -> None:
    identity = identify(tiny)
    assert len(identity) == 64
    sharded = write_tiny_model(tmp_path / "sharded", max_shard_size="5KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert identify(sharded) == identity

    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert identify(tiny) == identity
    (tiny / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert identify(tiny) != identity
    (tiny / "config.json").write_text(json.dumps(config))

    weights = load_file(tiny / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, tiny / "model.safetensors", metadata={"format": "pt"})
    assert identify(tiny) != identity


def test_a_missing_weight_is_refused_not_made_up(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tiny / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"lacks 1 weights \(model\.layers\.1\.self_attn\.k_proj"):
        load(str(tiny))


def test_damaged_weights_are_refused(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    data = file.read_bytes()
    for damaged in (data[:-100], b"\xff" * 100, b"", b"\x02" + bytes(7) + b"[]"):
        file.write_bytes(damaged)
        with pytest.raises(IntegrityError, match="get the model again"):
            load(str(tiny))


def write_header(file: Path, header: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


@pytest.mark.parametrize(
    "offsets", ["[-8,8]", "[8,0]", "[0,1e3]", "[0,true]", "[0]", "7", "[0,99999999999999999999999]"]
)
def test_offsets_that_lie_nowhere_are_refused(tiny: Path, offsets: str) -> None:
    header = f'{{"w":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}'
    write_header(tiny / "model.safetensors", header.encode())
    check_one_line(IntegrityError, tiny, "get the model again")


def test_a_header_that_nests_too_deep_is_refused(tiny: Path) -> None:
    write_header(tiny / "model.safetensors", b"[" * 200_000)
    check_one_line(IntegrityError, tiny, "sound safetensors")


@pytest.mark.parametrize("text", ["[]", "7", "[" * 200_000, "{"])
def test_a_config_that_is_no_object_is_refused(tiny: Path, text: str) -> None:
    (tiny / "config.json").write_text(text)
    check_one_line(IntegrityError, tiny, "not a JSON object")


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"num_attention_heads": 0}, Unsupported, "cannot be loaded"),
        ({"hidden_size": "many"}, Unsupported, "cannot be loaded"),
        ({"num_hidden_layers": None}, Unsupported, "cannot be loaded"),
        ({"rope_parameters": [1]}, Unsupported, "cannot be loaded"),
        ({"intermediate_size": 48}, IntegrityError, r"wants model\.layers\.0\.mlp\.down_proj\.weight to be \[32, 48\]"),
        ({"num_hidden_layers": 1}, IntegrityError, "has 1 layers, the weights go on with layer 1"),
        ({"num_hidden_layers": 3}, IntegrityError, "lacks 9 weights"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_is_refused(
    tiny: Path, changes: dict[str, object], error: type[KvartoError], reason: str
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | changes))
    check_one_line(error, tiny, reason)


def check_one_line(error: type[KvartoError], folder: Path, reason: str) -> None:
    with pytest.raises(error, match=reason) as refusal:
        load(str(folder))
    assert "\n" not in str(refusal.value)


def test_pickled_weights_are_never_loaded(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    torch.save(weights, tiny / "pytorch_model.bin")
    with pytest.raises(Unsupported, match="no safetensors weights"):
        load(str(tiny))


def test_code_of_a_repository_is_never_run(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "made-up", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (tiny / "config.json").write_text(json.dumps(config))
    (tiny / "evil.py").write_text(f"open({str(tiny / 'ran')!r}, 'w')")
    with pytest.raises(Unsupported, match="cannot be loaded"):
        load(str(tiny))
    assert not (tiny / "ran").exists()


def test_what_a_name_can_mean(tiny: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny)) == tiny
    assert resolve("owner/name-1.5B") == "owner/name-1.5B"
    with pytest.raises(UsageError, match=r"expected a folder with config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(UsageError, match="an existing folder"):
        resolve("./not/there")
    with pytest.raises(UnknownName, match="did you mean smollm2-135m-instruct"):
        resolve("smollm2-135m")


def test_a_hub_id_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match="hub cannot be reached; give a local folder, or one of smollm2"):
        load("kvarto-tests/not-there")


def test_devices(tiny: Path) -> None:
    for device in ("gpu please", "meta", "cpu:1", "cuda:", "mps", "cuda:-1"):
        with pytest.raises(UsageError, match="device: expected cpu"):
            load(str(tiny), device=device)
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="no GPU"):
            load(str(tiny), device="cuda")


@pytest.mark.model
def test_the_default_model_says_something_sensible() -> None:
    loaded = load("default")
    assert loaded.name == "smollm2-135m-instruct"
    tokens = loaded.tokenizer("The capital of France is", return_tensors="pt")
    output = loaded.model.generate(**tokens, max_new_tokens=3, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(output[0])
    assert "<|im_start|>" in loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
