"""`kvarto diagnose` and `kvarto doctor` beside a live server of ours, under loads whose limit is known: they say the truth."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("llguidance")

import httpx
import uvicorn

from kvarto import cli
from kvarto.engine.engine import Engine
from kvarto.serve.app import make_app
from served import tiny_loaded

pytestmark = pytest.mark.xdist_group("serve")

WEIGHTS = "300kB"  # of the tiny model, about; no verdict here hangs on it


@contextmanager
def serving(**options: object) -> Iterator[str]:
    with Engine(tiny_loaded(), kv="int4", also=["fp32"], step_tokens=256, **options) as engine:  # type: ignore[arg-type]
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(engine), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            listener.close()


@contextmanager
def load(url: str, clients: int, prompt_tokens: int, new_tokens: int) -> Iterator[None]:
    """So many clients that ask again and again, each for another prompt."""
    over = threading.Event()

    def client(number: int) -> None:
        with httpx.Client(timeout=60) as http:
            asked = 0
            while not over.is_set():
                text = f"{number} {asked} " + "x" * prompt_tokens
                body = {"prompt": text[:prompt_tokens], "max_tokens": new_tokens, "ignore_eos": True}
                assert http.post(f"{url}/v1/completions", json=body).status_code == 200
                asked += 1

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, number) for number in range(clients)]
        try:
            yield
        finally:
            over.set()
        for each in running:
            each.result()


def diagnosis(url: str, capsys: pytest.CaptureFixture[str]) -> dict:
    code = cli.run(
        ["diagnose", url, "--seconds", "2", "--every", "0.1", "--json", "--weights", WEIGHTS, "--head-dim", "16"]
    )
    found = json.loads(capsys.readouterr().out)
    assert code == (3 if found["verdict"] == "inconclusive" else 0)
    return found


def test_too_little_memory_is_capacity_bound(capsys):
    with serving(memory="256KiB", most_running=16, most_waiting=64) as url, load(url, 5, 300, 40):
        found = diagnosis(url, capsys)
    assert (found["verdict"], found["engine"], found["kv_format"]) == ("capacity-bound", "kvarto", "int4")
    assert {each["name"] for each in found["formats"]} >= {"int3", "int2"}


def test_too_few_slots_beside_free_memory_are_queue_bound(capsys):
    with serving(memory="16MiB", most_running=1, most_waiting=64) as url, load(url, 4, 20, 30):
        assert diagnosis(url, capsys)["verdict"] == "queue-bound"


def test_long_prompts_and_short_answers_are_prefill_bound_and_an_idle_server_is_inconclusive(capsys):
    with serving(memory="16MiB", most_running=4, most_waiting=64) as url:
        assert diagnosis(url, capsys)["verdict"] == "inconclusive"
        with load(url, 1, 900, 2):
            assert diagnosis(url, capsys)["verdict"] == "prefill-bound"


def test_the_doctor_sees_what_serves_and_tries_fallback_and_off_switch(capsys):
    with serving(memory="4MiB", most_running=4, most_waiting=64) as url:
        assert cli.run(["doctor", url, "--kv", "int4", "--gpu", "cpu", "--json"]) == 3
        found = {each["check"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
        for name in (
            "format",
            "monitoring",
            "prefix caching",
            "chunked prefill",
            "paged KV",
            "calibration",
            "support",
            "fallback",
            "off switch",
        ):
            assert found[name]["status"] == "pass", found[name]
        assert "fp32" in found["fallback"]["evidence"]
        assert {found[name]["status"] for name in ("baseline", "control", "evaluation: reasoning")} == {"ask a person"}
        assert cli.run(["doctor", url, "--kv", "int8", "--json"]) == 1
        assert "int8 was wanted, and int4" in capsys.readouterr().out
        wrong = ["doctor", url, "--off-header", "X-Other: fp32", "--only", "off switch", "--json"]
        assert cli.run(wrong) == 1
        assert "not counted as fp32" in capsys.readouterr().out


def test_a_process_of_its_own_reads_a_live_server():
    with serving(memory="4MiB", most_running=4, most_waiting=64) as url, load(url, 2, 50, 20):
        words = ["diagnose", url, "--seconds", "1", "--every", "0.2"]
        code = f"import sys; from kvarto.cli import run; sys.exit(run({words!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"}, check=False
        )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    assert "kvarto, " in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
