"""`kvarto diagnose` as users meet it: tables at 80 columns, JSON, Markdown, exit codes, one line for nonsense; no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine_pages as pages
from engine_pages import answering, by_path
from kvarto import cli

RECORDED = Path(__file__).parent / "recorded"
CAPACITY, PREFILL = str(RECORDED / "vllm-0.32-capacity"), str(RECORDED / "kvarto-prefill")


def run(*words: str) -> int:
    return cli.run(["diagnose", *words])


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_a_table_of_80_columns_with_verdict_evidence_advice_and_formats(capsys):
    assert run(CAPACITY, "--weights", "270MB", "--kv-token", "22.5KiB") == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.startswith("capacity-bound: 6 requests were preempted")
    assert "KV pool held" in out
    assert "(--kv-cache-dtype)" in out
    assert "int4_per_token_head" in out
    assert "upper bounds" in " ".join(out.split())


def test_json_says_it_all(capsys):
    assert run(CAPACITY, "--json", "--weights", "270MB", "--kv-token", "23040") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["engine"], found["kv_format"], found["scrapes"]) == (
        "capacity-bound",
        "vllm",
        "auto",
        6,
    )
    assert {each["cause"] for each in found["findings"]} == {
        "capacity-bound",
        "queue-bound",
        "prefill-bound",
        "decode-bandwidth-bound",
    }
    assert {each["name"]: each["pool_tokens"] for each in found["formats"]}["fp8_e4m3"] == 2 * 1056
    assert 0 < found["kv_share"] < 0.1
    assert found["settings"]["prefix caching"]["value"] == "on"


def test_markdown_has_its_tables(capsys):
    assert run(CAPACITY, "--markdown") == 0
    out = capsys.readouterr().out
    assert out.startswith("**capacity-bound**")
    rows = [line.count("|") for line in out.splitlines() if line.startswith("| ")]
    assert len(rows) > 10


def test_a_page_of_nonsense_numbers_decides_nothing_and_is_sound_json(tmp_path, capsys):
    page = tmp_path / "nan.prom"
    page.write_text(
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc NaN\nvllm:num_preemptions_total -5\n"
        "vllm:prompt_tokens_total NaN\nvllm:time_to_first_token_seconds_sum NaN\nvllm:time_to_first_token_seconds_count -3\n"
        'vllm:cache_config_info{block_size="-16",num_gpu_blocks="nan",cache_dtype="zzz"} 1\n'
    )
    assert run(str(page), "--json") == 3
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["verdict"] == "inconclusive"
    assert {each["pool_tokens"] for each in found["formats"]} == {None}


def test_inconclusive_is_3(capsys):
    assert run(f"{CAPACITY}/1.prom", f"{CAPACITY}/1.prom") == 3
    assert "inconclusive" in capsys.readouterr().out


def test_a_live_engine_is_asked_for_its_settings_too(capsys):
    counts = iter(range(10, 1000, 10))

    def answer(handler):
        paths = {
            "/metrics": (200, pages.sglang(requests=next(counts)) if handler.path == "/metrics" else ""),
            "/server_info": (
                200,
                json.dumps({"kv_cache_dtype": "fp8_e5m2", "disable_radix_cache": True, "chunked_prefill_size": -1}),
            ),
        }
        by_path(paths)(handler)

    with answering(answer) as url:
        assert run(url, "--seconds", "0.5", "--every", "0.1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["kv_format"]) == ("prefill-bound", "fp8_e5m2")
    assert {name: told["value"] for name, told in found["settings"].items() if name in ("prefix caching", "chunked prefill")} == {
        "prefix caching": "off", "chunked prefill": "off",
    }  # fmt: skip
    assert [each["id"] for each in found["advice"]][:2] == ["prefix-caching-off", "chunked-prefill-off"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.prom"], "No such file"),
        (["localhost:1", "b.prom"], "one address, or files"),
        ([CAPACITY, "--weights", "many"], "--weights: expected a size such as"),
        ([CAPACITY, "--kv-token", "-3"], "--kv-token: expected a size"),
        ([CAPACITY, "--header", "no colon"], "'NAME: VALUE'"),
        ([CAPACITY, "--head-dim", "65"], "multiple of 8"),
        ([CAPACITY, "--head-dim", "64", "--config", "x.json"], "either it or --config"),
        ([CAPACITY, "--config", "x.json"], "model: expected a config.json"),
        ([CAPACITY, PREFILL], "all of one engine"),
        ([CAPACITY, "--model", "other"], "--model: expected one of"),
        (["http://127.0.0.1:1", "--seconds", "0"], "connection refused"),
        (["http://[::1", "--seconds", "0"], "address: expected http://HOST:PORT"),
    ],
)
def test_nonsense_is_one_line_and_code_2(words, says, capsys):
    assert run(*words) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert says in found.err
    assert found.err.count("\n") == 1


def test_needs_no_torch():
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'numba', 'prometheus_client', 'safetensors'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from kvarto.cli import run\n"
        f"sys.exit(run(['diagnose', {CAPACITY!r}, '--json']) or run(['diagnose', {PREFILL!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
