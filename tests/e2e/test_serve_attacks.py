"""Clients that are broken, hostile or gone: each hears what is wrong, or nothing, and the server goes on for the others with nothing held."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
import uvicorn

from kvarto.engine.engine import Engine
from kvarto.serve import connection
from kvarto.serve.app import make_app
from served import soon, tiny_loaded

MESSAGES = [{"role": "user", "content": "hi"}]
ENDLESS = {"prompt": "abc " * 30, "max_tokens": 700, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        tiny_loaded(), kv="int4", also=["fp32"], memory="4MiB", step_tokens=128, most_running=8, most_waiting=300
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[tuple[str, int]]:
    with serving(engine) as address:
        yield address


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        make_app(engine), http=connection.TimedProtocol, log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def url(address: tuple[str, int], engine: Engine) -> Iterator[str]:
    """Whatever a test does, the server answers afterwards, and holds nothing."""
    yield f"http://127.0.0.1:{address[1]}"
    answer = httpx.post(
        f"http://127.0.0.1:{address[1]}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60
    )
    assert answer.status_code == 200
    assert soon(lambda: not engine.running and not engine.waiting and engine.core.memory.prefixes.held_bytes == 0)


def http(body: bytes, path: str = "/v1/completions") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


def say(address: tuple[str, int], data: bytes, seconds: float = 10) -> bytes:
    """What comes back until the server closes, or stays silent for so long."""
    got = b""
    with socket.create_connection(address, timeout=seconds) as client:
        try:
            client.sendall(data)
            while more := client.recv(65536):
                got += more
        except (TimeoutError, ConnectionError):  # it waits for more, or closed before it had heard all
            pass
    return got


# ---- connections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
    ids=["TLS", "zeros", "version", "long header", "many headers", "negative length", "two lengths", "bad chunk"],
)
def test_what_is_no_http_is_a_400_or_nothing(data: bytes, address: tuple[str, int], url: str) -> None:
    got = say(address, data, seconds=2)
    assert not got or got.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), got[:200]


def test_paths_and_headers_of_any_bytes(address: tuple[str, int], url: str) -> None:
    for path in (b"/%ff%fe", b"/v1/models/" + b"%00" * 100, b"/v1/models/../../etc/passwd", b"/" + b"a" * 50_000):
        assert b" 404 " in say(address, b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path)
    body = b'{"prompt": "x", "max_tokens": 1}'
    for value in (b"\xff\xfe", b"int4\xc3\xa9"):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-KV-Format: %s\r\nContent-Length: %d\r\n\r\n"
        assert b" 400 " in say(address, head % (value, len(body)) + body)


def test_slow_clients_do_not_keep_others_waiting(address: tuple[str, int], url: str) -> None:
    """Headers and bodies that never end, and streams that nobody reads."""
    begun = [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-", http(b"{" + b" " * 100)[:-50]]
    asked = http(json.dumps(ENDLESS | {"stream": True, "max_tokens": 100}).encode())
    clients = [socket.create_connection(address) for _ in range(100)]
    try:
        for number, client in enumerate(clients):
            client.sendall(begun[number % 2] if number >= 4 else asked)
        began = time.monotonic()
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
        assert answer.status_code == 200
        assert time.monotonic() - began < 30
    finally:
        for client in clients:
            client.close()


def trickle(address: tuple[str, int], parts: Iterable[bytes], pause: float = 0.1) -> tuple[bytes, float]:
    """What comes back, and seconds until the server closed; it must, within ten."""
    got, began = b"", time.monotonic()
    with socket.create_connection(address, timeout=10) as client:
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            while more := client.recv(65536):
                got += more
        except ConnectionError:
            with contextlib.suppress(ConnectionError):
                while more := client.recv(65536):
                    got += more
    return got, time.monotonic() - began


def test_who_sends_too_slowly_is_closed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READ_SECONDS", 1.0)
    monkeypatch.setattr(connection, "LEAST_BYTES_PER_SECOND", 1000)
    body = json.dumps({"prompt": "x" * 500, "max_tokens": 1}).encode()
    head, health = http(body)[: -len(body)], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(engine) as address:
        for parts in ([], [health[:10]], [health[i : i + 1] for i in range(len(health))], [health, health[:9]]):
            got, seconds = trickle(address, parts)
            assert got.count(b"200 OK") == parts.count(health)
            assert 0.9 < seconds < 5, parts
        for parts in ([head], [head, b"{"], [head, *(b" " for _ in range(300))]):
            got, seconds = trickle(address, parts, 0.02)
            assert got.startswith(b"HTTP/1.1 408 "), got[:100]
            assert b"the body did not come within 1 seconds" in got
            assert 0.9 < seconds < 5
        # Who sends enough may take his time, and so may the answer.
        pieces = [
            head.replace(b"Host", b"Connection: close\r\nHost"),
            *(body[i : i + 50] for i in range(0, len(body), 50)),
        ]
        got, seconds = trickle(address, pieces, 0.11)
        assert b"200 OK" in got
        assert seconds > 1.2
        monkeypatch.setattr(connection, "READ_SECONDS", 0.1)
        busy = json.dumps(ENDLESS | {"max_tokens": 400, "prompt": "abc"}).encode()
        answer = httpx.post(f"http://{address[0]}:{address[1]}/v1/completions", content=busy, timeout=60)
        assert answer.status_code == 200
        assert answer.elapsed.total_seconds() > 0.2
        monkeypatch.setattr(connection, "READ_SECONDS", 1.0)
        for late in (b"", b"x" * 100):  # refused before its body is read, which then never ends
            got, seconds = trickle(address, [head.replace(b"completions", b"nothing"), *[late] * 5])
            assert b"404" in got
            assert seconds < 8


def test_hundreds_that_close_at_once_hold_nothing(address: tuple[str, int], url: str, engine: Engine) -> None:
    bodies = [json.dumps(ENDLESS | {"stream": stream, "n": n}).encode() for stream in (True, False) for n in (1, 3)]

    def ask_and_leave(number: int) -> None:
        with socket.create_connection(address) as client:
            if number % 3 == 0:  # a reset, where others say goodbye
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(http(bodies[number % 4])[: None if number % 5 else 200])
            time.sleep(0.05 * (number % 4 == 0))

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(ask_and_leave, range(200)))
    assert soon(lambda: not engine.running and not engine.waiting, 60)


# ---- bodies ------------------------------------------------------------------------------------------------------------

BODIES: list[bytes] = [
    b"", b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"a":' * 5000,
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": 1e999}', b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", b'{"prompt": [' + b"9" * 4000 + b"]}",
    b'{"prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}", b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}",
    b'{"prompt": "a", "n": ' + b"9" * 30 + b"}", b'{"prompt": [[1], [-1]]}', b'{"prompt": [true]}', b'{"prompt": [1.5]}', b'{"prompt": ""}',
    b'{"prompt": "a", "stop": ["", "a"]}', b'{"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}', b'{"prompt": "a", "logit_bias": {"1": 100}}',
    b'{"prompt": "a", "kv_format": "int4+skip=' + b"1," * 5000 + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:40].decode(errors="replace"))
def test_a_wrong_body_is_a_400(body: bytes, url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert len(answer.text) < 3000


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 5e-324}, {"top_p": 5e-324}, {"min_p": 1, "temperature": 100}, {"top_k": 2**63}, {"stop_token_ids": [10**30]},
        {"presence_penalty": -2, "frequency_penalty": 2}, {"stop": ["x" * 100_000]}, {"stop": ["\0"]}, {"cache_salt": "\0" * 100_000},
        {"seed": 2**63 - 1, "n": 3}, {"seed": -(2**63)}, {"logprobs": 20}, {"user": {"a": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_odd_but_right_is_served(fields: dict[str, Any], url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hi", "max_tokens": 2} | fields, timeout=60)
    assert answer.status_code == 200, answer.text


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMAS: list[dict[str, Any]] = [
    *({"type": "string", "pattern": pattern} for pattern in ("(a+)+$", "^(([a-z])+.)+[A-Z]([a-z])+$", "(" * 5000, ".*a.{500}", "(a|b|ab){99}{99}")),
    {"type": "string", "allOf": [{"pattern": f"(.*{letter}.*){{30}}"} for letter in "abc"]},
    nested(60), nested(190), {"$ref": "http://127.0.0.1:9/x"}, {"$ref": "#"}, {"enum": list(range(20_000))}, {"anyOf": []}, {"enum": []},
    {"type": "string", "minLength": 10**6, "maxLength": 10**7}, {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    {"type": "integer", "minimum": 10**300}, {"type": "number", "multipleOf": 0}, {"type": "object", "patternProperties": {"(a+)+": {}}},
    {"x-guidance": 5}, {"x-guidance": {"lenient": True}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:50])
def test_a_schema_is_enforced_or_refused_and_keeps_nobody_waiting(schema: dict[str, Any], url: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"messages": MESSAGES, "max_tokens": 6, "response_format": wanted},
        timeout=60,
    )
    assert answer.status_code in (200, 400), answer.text
