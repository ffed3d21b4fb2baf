"""`kvarto doctor` as users meet it: a table at 80 columns, JSON, Markdown, exit codes, one line for nonsense; no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "study"))  # made-up studies are those of the study's own tests
from synthetic import candidate, study

from kvarto import cli

QUEUE = str(Path(__file__).parents[1] / "diagnose" / "recorded" / "vllm-0.32-queue" / "1.prom")
KVARTO = str(Path(__file__).parents[1] / "diagnose" / "recorded" / "kvarto-prefill" / "4.prom")


def run(*words: str) -> int:
    return cli.run(["doctor", *words])


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_a_table_of_80_columns_that_fails_where_another_format_serves(capsys):
    assert run(QUEUE, "--kv", "fp8") == 1
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.startswith("not ready: ")
    assert "FAIL  format" in out
    assert "> set --kv-cache-dtype" in out


def test_json_and_its_exit_code(capsys):
    assert run(QUEUE, "--kv", "fp8", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ready"], found["exit_code"], found["engine"], found["kv_format"]) == (False, 1, "vllm", "fp8")
    assert {each["check"]: each["status"] for each in found["checks"]}["format"] == "fail"
    assert run(QUEUE, "--only", "baseline", "--json") == 3
    assert run(QUEUE, "--only", "prefix caching", "--json") == 0


def test_markdown_is_a_list_to_tick(capsys):
    assert run(QUEUE, "--kv", "fp8", "--markdown") == 1
    out = capsys.readouterr().out
    assert out.startswith("### kvarto doctor: not ready")
    assert "- [ ] **format**: fail." in out
    assert "- [x] **prefix caching**: pass." in out


def test_a_study_covers_what_it_measured(tmp_path, capsys):
    path = tmp_path / "study.json"
    path.write_text(study(candidate("int4", 4.75)).model_dump_json())
    run(KVARTO, "--kv", "int4", "--results", str(path), "--only", "evaluation", "--json")
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert found["evaluation: fidelity on text"]["status"] == "pass"
    assert found["evaluation: long-context retrieval"]["status"] == "pass"
    assert found["evaluation: reasoning"]["status"] == "ask a person"
    assert found["evaluation"]["status"] in ("pass", "warn", "fail")
    assert "int4" in found["evaluation"]["evidence"]
    assert run(KVARTO, "--kv", "int2", "--results", str(path), "--only", "evaluation") == 1
    assert "nothing on int2" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.prom"], "candidate: expected http://HOST:PORT"),
        ([QUEUE, "--baseline", "nowhere.prom"], "baseline: expected http://HOST:PORT"),
        ([QUEUE, "--only", "formet"], "did you mean format?"),
        ([QUEUE, "--prometheus", "ftp://x"], "http://HOST:PORT"),
        ([QUEUE, "--off-header", "x"], "'NAME: VALUE'"),
    ],
)
def test_nonsense_is_one_line_and_code_2(words, says, capsys):
    assert run(*words) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert says in found.err
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "<html></html>", "x" * 100, "\x00"])
def test_a_page_that_is_none_fails_its_checks_in_a_line_each(tmp_path, content, capsys):
    path = tmp_path / "page"
    path.write_text(content)
    assert run(str(path), "--json") == 1
    found = json.loads(capsys.readouterr().out)["checks"]
    assert all("\n" not in each["evidence"] for each in found)
    assert not [each for each in found if each["status"] == "pass"]


def test_needs_no_torch(tmp_path):
    path = tmp_path / "study.json"
    path.write_text(study(candidate("int4", 4.75)).model_dump_json())
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'numba', 'prometheus_client', 'safetensors'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from kvarto.cli import run\n"
        f"sys.exit(run(['doctor', {KVARTO!r}, '--kv', 'int4', '--results', {str(path)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 3, done.stderr + done.stdout
