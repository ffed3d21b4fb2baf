"""The server's process, killed and signalled at bad moments, with a folder of pages: whoever comes next gets the right answers."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")

import httpx

from kvarto.engine.engine import Ask, Engine
from kvarto.engine.request import Sampling
from kvarto.models.load import load
from served import Server, save_tiny, soon

pytestmark = pytest.mark.xdist_group("serve process")

KV = "fp32"  # no number lies between two codes, so texts are equal
STEMS = ["".join(random.Random(seed).choices("abcdefgh ", k=400)) for seed in range(8)]
SMALL = ("--kv", KV, "--memory", "512KiB", "--step-tokens", "128", "--max-running", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def expected(model: str) -> Iterator[dict[str, str]]:
    """What each prompt gives in an engine that never had a folder."""
    with Engine(load(model), kv=KV, memory="16MiB") as engine:
        done = engine.generate([Ask(stem, Sampling(max_tokens=12, temperature=0, ignore_eos=True)) for stem in STEMS])
        yield {stem: each.text for stem, each in zip(STEMS, done, strict=True)}


def body(stem: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": stem, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields


def assert_right(server: Server, expected: dict[str, str]) -> int:
    """All answers. Returns how many prompt tokens were found and not computed."""
    cached = 0
    for stem, text in expected.items():
        answer = httpx.post(f"{server.url}/v1/completions", json=body(stem), timeout=60).json()
        assert answer["choices"][0]["text"] == text
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


class Traffic:
    """Requests one after another from some threads, which nobody looks at, until the server is gone."""

    def __init__(self, url: str) -> None:
        self._threads = [threading.Thread(target=self._ask, args=(url, seed)) for seed in range(4)]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _ask(url: str, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=url, timeout=60) as client:
            while True:
                try:
                    client.post("/v1/completions", json=body(rng.choice(STEMS)[: rng.randrange(100, 401)]))
                except httpx.HTTPError:
                    return

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_after_kill_9_while_pages_are_written_every_answer_is_right(
    times: int, model: str, expected: dict[str, str], tmp_path: Path
) -> None:
    rng, words = random.Random(times), [model, *SMALL, "--host-memory", "64KiB", "--disk", str(tmp_path / "pages")]
    for number in range(times):
        with Server(tmp_path / "log", *words) as server:
            traffic = Traffic(server.url)
            assert soon(lambda server=server: server.metrics()["offloaded_bytes_total"] > 1e6, 60)  # type: ignore[misc]
            time.sleep(rng.random() * 2)
            server.kill()
            traffic.join()
        files = list((tmp_path / "pages").glob("??/*.kvb"))
        assert files
        if number % 2:  # a disk that forgets: bits, halves, and a file that another program lengthened
            damage(rng, files)
    with Server(tmp_path / "log", *words) as server:
        assert_right(server, expected)
        metrics = server.metrics()
        assert metrics["tier_hits_total"] > 0
        assert times > 1 or metrics["tier_refused_total"] == 0, "what kill -9 leaves is whole"
        assert not list((tmp_path / "pages").glob("??/*.part")), "what was half-written is gone"
        assert "Traceback" not in server.said


def damage(rng: random.Random, files: list[Path]) -> None:
    for path in files:
        data = bytearray(path.read_bytes())
        match rng.randrange(4):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += bytes(rng.randrange(1, 5000))
        path.write_bytes(data)


@pytest.mark.slow
def test_files_with_bits_flipped_give_no_wrong_answer(model: str, expected: dict[str, str], tmp_path: Path) -> None:
    """And two servers do not share a folder."""
    words = [model, *SMALL, "--disk", str(tmp_path / "pages")]
    with Server(tmp_path / "log", *words) as server:
        assert_right(server, expected)
        with pytest.raises(AssertionError, match="offload folder: expected one that no other engine uses"):
            Server(tmp_path / "other log", *words)
        assert server.terminate() == 0
    files = sorted((tmp_path / "pages").glob("??/*.kvb"))
    rng = random.Random(1)
    for path in files:
        data = bytearray(path.read_bytes())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    with Server(tmp_path / "log", *words) as server:
        assert assert_right(server, expected) == 0
        assert server.metrics()["tier_refused_total"] > 0
        assert "is computed again" in server.said
        assert server.terminate() == 0


_CLIENT = """
import httpx, sys
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json={json}, timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


@pytest.mark.slow
def test_signals_to_clients_and_to_the_server_in_the_middle_of_streams(model: str, tmp_path: Path) -> None:
    endless = body("abc", max_tokens=800, stream=True)
    with Server(tmp_path / "log", model, *SMALL, "--drain-seconds", "2") as server:
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", _CLIENT.replace("{json}", repr(endless)), server.url], stdout=subprocess.PIPE
            )
            for _ in range(2)
        ]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline().startswith(b"data: ")
            client.kill()
            client.wait()
            client.stdout.close()
        assert soon(lambda: server.metrics()["pool_held_bytes"] == 0)
        with (
            httpx.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=60) as one,
            httpx.stream("POST", f"{server.url}/v1/completions", json=endless | {"n": 3}, timeout=60) as other,
        ):
            lines = one.iter_lines()
            next(lines)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            last = json.loads(rest[-2].removeprefix("data: "))
            assert (
                last["error"]["code"] == "closing"
                if "error" in last
                else last["choices"][0]["finish_reason"] == "length"
            )
            other.read()
        assert server.process.wait(60) == 0
        assert time.monotonic() - began < 30
        assert "Traceback" not in server.said
