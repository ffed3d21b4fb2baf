"""`kvarto plan` as users meet it: the answer, JSON, 80 columns, pages, and one line for nonsense."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kvarto import cli
from unit.plan.samples import CONFIGS, LLAMA

_BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "baselines" / "attention_gpu.json"


@pytest.fixture
def config_of(tmp_path: Path) -> Any:
    def write(name: str = LLAMA) -> str:
        path = tmp_path / f"{name.rsplit('/', 1)[-1]}.json"
        path.write_text(json.dumps(CONFIGS[name]))
        return str(path)

    return write


def plan(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    code = cli.run(["plan", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def as_json(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(*words, "--json", capsys=capsys))
    return found


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in found["formats"]}


def test_json_has_every_format_of_every_engine(config_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(config_of(), "--context", "4096", capsys=capsys)
    formats = by_name(found)
    assert {
        "bf16",
        "fp8",
        "int8",
        "int4",
        "int2",
        "kivi2",
        "turbo3",
        "vllm:fp8_e4m3",
        "sglang:fp4_e2m1",
        "tensorrt-llm:nvfp4",
        "llama.cpp:q4_0",
    } <= set(formats)
    assert formats["vllm:bf16"]["bytes_per_token"] == found["model"]["bf16_bytes_per_token"] == 131_072
    assert formats["vllm:bf16"]["bytes_per_sequence"] == 4096 * 131_072
    assert formats["int4"]["bytes_per_token"] == 35_328
    assert formats["int4"]["bits_per_number"] == pytest.approx(4.3125)
    assert formats["int4"]["sequences"] is None, "without a GPU there is no room"
    assert found["gpu"] is None
    assert found["advice"] == []


def test_room_and_bounds_with_a_gpu(config_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(
        config_of(),
        "--gpu",
        "h100",
        "--concurrency",
        "16",
        "--memory-share",
        "0.9",
        "--overhead",
        "1GiB",
        capsys=capsys,
    )
    formats = by_name(found)
    pool = int((81_559 << 20) * 0.9) - found["weights"]["nbytes"] - (1 << 30)
    assert formats["vllm:bf16"]["sequences"] == pool // (32_768 * 131_072) == 13
    assert formats["vllm:bf16"]["fits"] is False
    assert formats["int4"]["sequences"] > 3 * formats["bf16"]["sequences"]
    assert 1 < formats["fp8"]["gain_bound"] < formats["int4"]["gain_bound"] < formats["int2"]["gain_bound"]
    assert sum(piece["nbytes"] for piece in formats["int4"]["waterfall"]) == pytest.approx(81_559 << 20, abs=2)
    assert {rule["id"] for rule in found["advice"]} >= {"fp8-for-room", "way-back"}
    # What does not fit does not run: bf16 has 13 of the 16, and so fewer tokens a second than its step alone would say.
    bf16 = formats["vllm:bf16"]
    assert (
        bf16["tokens_per_second_bound"]
        < 16 / bf16["step_seconds_bound"]
        < formats["vllm:fp8_e4m3"]["tokens_per_second_bound"]
    )
    assert formats["int4"]["tokens_per_second_bound"] == pytest.approx(16 / formats["int4"]["step_seconds_bound"])
    assert "vllm:nvfp4_4over6" in {each["name"] for each in found["refused"]}
    shares = [cell["kv_share"] for cell in found["curves"] if cell["batch"] == 8]
    assert shares == sorted(shares)
    assert found["speeds_are"].startswith("upper bounds")


def test_measured_replaces_bounds_and_must_be_of_the_gpu(config_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(config_of(), "--measured", str(_BENCHMARK), "--concurrency", "32", capsys=capsys)
    assert found["gpu"]["name"] == "h200"
    formats = by_name(found)
    assert formats["int4"]["measured_step_seconds"] > formats["int4"]["step_seconds_bound"]
    assert formats["vllm:int4_per_token_head"]["measured_gain"] < 1 < formats["int4"]["measured_gain"]
    refused(
        ["--gpu", "l4", "--measured", str(_BENCHMARK), config_of()],
        "times of the NVIDIA L4, got those of NVIDIA H200; say --gpu h200",
        capsys,
    )


def test_stages_work_on_groups(config_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages: a step of 16 sequences is the way of 8 of them, and both groups make tokens."""
    one, two = (
        by_name(as_json(config_of(), "--gpu", "h200", "--concurrency", n, "--pp", pp, capsys=capsys))["int4"]
        for n, pp in (("8", "1"), ("16", "2"))
    )
    assert two["step_seconds_bound"] == one["step_seconds_bound"]
    assert two["tokens_per_second_bound"] == pytest.approx(2 * one["tokens_per_second_bound"])
    assert two["bytes_per_token"] == one["bytes_per_token"] / 2
    assert two["sequences"] > 2 * one["sequences"]


def test_a_model_by_flags(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json("--layers", "32", "--kv-heads", "8", "--head-dim", "128", capsys=capsys)
    assert found["model"]["bf16_bytes_per_token"] == 131_072
    assert "say --parameters" in found["weights_unknown"]
    found = as_json(
        "--layers", "10", "--kv-heads", "2", "--head-dim", "64", "--v-dim", "32", "--window", "128", "--window-layers", "4", "--parameters", "1B",
        "--gpu", "l4", capsys=capsys,
    )  # fmt: skip
    assert found["model"]["bf16_bytes_per_token"] == 6 * 2 * 96 * 2
    assert found["model"]["bf16_constant_bytes"] == 4 * 2 * 96 * 2 * 128
    assert found["weights"]["nbytes"] == pytest.approx(2e9)
    found = as_json("--layers", "61", "--latent-dim", "576", capsys=capsys)
    assert found["model"]["bf16_bytes_per_token"] == 70_272


def test_the_catalogs_model_and_a_folder_of_its_own_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[LLAMA] | {"torch_dtype": "bfloat16"}))
    found = as_json(str(tmp_path), "--formats", "int8/int4+sink64,vllm,int4+skip=0,1", capsys=capsys)
    assert {"bf16", "int8/int4", "vllm:fp8_e4m3", "int4+skip=0,1"} <= set(by_name(found))
    assert found["weights"]["nbytes"] == pytest.approx(16.06e9, rel=0.001)


@pytest.mark.parametrize(
    "name", [LLAMA, "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3.2", "moonshotai/Kimi-K3", "Qwen/Qwen3.5-27B"]
)
def test_tables_are_readable_at_80_columns(
    name: str, config_of: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = plan(config_of(name), "--gpu", "h200", "--tp", "8", "--formats", "all", capsys=capsys)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "…" not in out, "nothing is cut off"
    assert "bounds" in out or "not known" in out


@pytest.mark.parametrize("ending", ["html", "svg", "json"])
def test_pages_need_nothing_else(
    ending: str, config_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"plan.{ending}"
    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": i, "input_length": 2000, "output_length": 1, "hash_ids": [i % 3, 3 + i % 3, 6 + i, 1000 + i]}
        for i in range(50)
    )
    trace.write_text("\n".join(map(json.dumps, lines)))
    plan(config_of(), "--gpu", "h100", "--trace", str(trace), "-o", str(out), capsys=capsys)
    text = out.read_text()
    if ending == "json":
        assert json.loads(text)["trace"]["formats"]
        return
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "<script" not in text
    assert all(int(width) <= 360 for width in re.findall(r"min-width: (\d+)px", text)), "on a phone charts were cut off"
    for needed in ("KV share", "at most", "Prefix hits", "keys and values that grow", "int4"):
        assert needed in text
    assert "nan" not in text.lower().replace("nano", "")
    if ending == "svg":
        ET.fromstring(text)


def test_a_trace_is_replayed_at_each_formats_room(
    config_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Round and round over documents that only the smaller formats can all hold: LRU finds nothing below that."""
    trace = tmp_path / "trace.jsonl"
    documents = [list(range(i * 100, i * 100 + 9)) for i in range(10)]
    lines = (
        {"timestamp": i, "input_length": 9 * 512, "output_length": 1, "hash_ids": documents[i % 10]} for i in range(40)
    )
    trace.write_text("\n".join(map(json.dumps, lines)))
    found = as_json(config_of(), "--pool", "5GiB", "--context", "4608", "--trace", str(trace), capsys=capsys)
    rates = {row["name"]: row["hit_rate"] for row in found["trace"]["formats"]}
    assert rates["bf16"] == 0
    assert rates["int4"] == found["trace"]["ceiling_hit_rate"] == pytest.approx(30 * 8 / (40 * 9))
    assert found["trace"]["needed_tokens"] <= 90 * 512


def refused(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert line in err, err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "expected JSON, got an empty file"),
        ("<html>no</html>", "expected JSON, got HTML"),
        ("[1]", "expected an object"),
        ("{", "expected JSON"),
        ("{}", "has no model_type"),
        ('{"model_type": "quantum"}', "model_type 'quantum' is not known, and its cache is not guessed"),
        ('{"model_type": "qwen33"}', "did you mean qwen3"),
        ('{"model_type": "llama"}', "lacks num_attention_heads"),
        ('{"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8}', "lacks num_hidden_layers"),
        (
            '{"model_type": "llama", "num_hidden_layers": -2, "num_attention_heads": 1, "hidden_size": 8}',
            "num_hidden_layers: expected a whole number from 1 on, got -2",
        ),
        (
            '{"model_type": "llama", "num_hidden_layers": 1e99, "num_attention_heads": 1, "hidden_size": 8}',
            "num_hidden_layers: expected a whole number",
        ),
        (
            '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64}',
            "a multiple of the 3 query heads",
        ),
        (
            '{"model_type": "gpt_oss", "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "layer_types": ["odd"]}',
            "layer_types has 'odd'",
        ),
        (
            '{"model_type": "gpt_oss", "num_hidden_layers": 3, "num_attention_heads": 1, "head_dim": 8, "layer_types": []}',
            "an entry for each of the 3",
        ),
        ('{"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_attention_heads": 1}', "lacks qk_rope_head_dim"),
        (
            '{"model_type": "gemma3n_text", "num_hidden_layers":2,"num_attention_heads":1,"head_dim":8,"sliding_window":8,"num_kv_shared_layers":2}',
            "fewer than the 2 layers",
        ),
    ],
)
def test_a_config_that_makes_no_sense_gets_one_line(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refused([str(path)], line, capsys)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["smollm2"], "did you mean"),
        (["./nowhere"], "a config.json, or a folder with one"),
        (["--layers", "-3", "--kv-heads", "1", "--head-dim", "8"], "--layers: expected"),
        (["--layers", "3"], "--kv-heads: expected a number"),
        (["--kv-heads", "3"], "begins with --layers"),
        (["X", "--layers", "3"], "either MODEL or --layers"),
        (["CONFIG", "--gpu", "h1000"], "did you mean h100"),
        (["CONFIG", "--tp", "2"], "a --gpu too"),
        (["CONFIG", "--gpu", "h100", "--tp", "3"], "a divisor of the 32"),
        (["CONFIG", "--gpu", "h100", "--memory-share", "2"], "above 0, at most 1"),
        (["CONFIG", "--context", "0"], "--context: expected 1 to"),
        (["CONFIG", "--concurrency", "-1"], "--concurrency: expected 1 to"),
        (["CONFIG", "--output-tokens", "99999999"], "1 to the context's"),
        (["CONFIG", "--formats", "int44"], "did you mean int4"),
        (["CONFIG", "--formats", "vllm:fp9"], "did you mean vllm:"),
        (["CONFIG", "--formats", ","], "names such as"),
        (["CONFIG", "--gpu-memory", "lots", "--gpu-bandwidth", "1TB"], "a size such as"),
        (["CONFIG", "--parameters", "many"], "a number of parameters such as"),
        (["CONFIG", "--weights", "int7"], "--weights: expected one of"),
        (["CONFIG", "--trace", "/nowhere"], "a pool to hold prefixes"),
        (["CONFIG", "--pool", "1GiB", "--trace", "/nowhere"], "a file that can be read"),
        (["CONFIG", "-o", "plan.pdf"], "ends in .html, .svg or .json"),
        (["CONFIG", "-o", "/nowhere/plan.html"], "a file that can be written"),
        (["CONFIG", "--page-tokens", "0"], "--page-tokens: expected 1"),
        (["CONFIG", "--pool", "1GiB", "--gpu", "h100"], "either a pool or a GPU"),
        (["CONFIG", "--layer-cost-us", "-1"], "--layer-cost-us: expected"),
        (["CONFIG", "--active-parameters", "1B"], "--parameters: expected"),
        (["CONFIG", "--trace-block-tokens", "0"], "--trace-block-tokens: expected"),
    ],
)
def test_options_that_make_no_sense_get_one_line(
    words: list[str], line: str, config_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    refused([config_of() if word == "CONFIG" else word for word in words], line, capsys)


def test_what_model_optimizer_says_beside_the_config_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[LLAMA]))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}})
    )
    found = as_json(str(tmp_path), capsys=capsys)
    assert found["weights"]["dtype"] == "nvfp4"
    assert any("--weights-bytes" in note for note in found["notes"])


def test_a_hub_id_is_asked_for_its_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[LLAMA]))
    asked = []

    class Hub:
        @staticmethod
        def hf_hub_download(model: str, file: str) -> str:
            asked.append((model, file))
            if model == "no/body":
                raise OSError("We couldn't connect to the hub. Check your connection.")
            return str(tmp_path / file)

    monkeypatch.setattr("kvarto.plan.config.require", lambda package: Hub)
    monkeypatch.setattr("kvarto.plan.config._reach_hub", lambda: None)
    assert by_name(as_json("some/model", capsys=capsys))["bf16"]["bytes_per_token"] == 131_072
    assert asked == [("some/model", "config.json")]
    refused(
        ["no/body"], "could not be had from the hub (We couldn't connect to the hub); give a local config.json", capsys
    )


def test_a_hub_id_without_a_connection_is_one_line_at_once_and_its_cache_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[LLAMA]))

    class Hub:
        @staticmethod
        def hf_hub_download(model: str, file: str, *, local_files_only: bool = False) -> str:
            assert local_files_only, "its client would try for half a minute, and tell of each try"
            if model == "not/cached":
                raise FileNotFoundError("not in the cache")
            return str(tmp_path / file)

    monkeypatch.setattr("kvarto.plan.config.require", lambda package: Hub)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert by_name(as_json("some/model", capsys=capsys))["bf16"]["bytes_per_token"] == 131_072
    refused(["not/cached"], "Connection refused", capsys)


def test_gpus_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "h100" in plan("--list-gpus", capsys=capsys)
    assert {"name", "memory_bytes", "source"} <= set(json.loads(plan("--list-gpus", "--json", capsys=capsys))[0])


def test_a_huge_config_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    refused([str(path)], "at most 8 MiB, got more", capsys)


def test_it_needs_no_torch(config_of: Any) -> None:
    """Not even an import of it, with all packages of the engine hidden."""
    hidden = ("torch", "transformers", "numba", "triton", "safetensors", "gguf", "accelerate", "psutil")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "from kvarto.cli import run\n"
        f"sys.exit(run(['plan', {config_of()!r}, '--gpu', 'h100', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["formats"]


# ---- advice ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--context", "512", "--concurrency", "1"], {"low-concurrency", "short-context"}),
        (["--context", "32768", "--output-tokens", "16", "--concurrency", "8"], {"prefill-heavy"}),
    ],
)  # fmt: skip
def test_work_that_gains_little_is_told_so(
    words: list[str], said: set[str], config_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(config_of(), "--gpu", "h100", *words, capsys=capsys)
    assert said <= {rule["id"] for rule in found["advice"]}
