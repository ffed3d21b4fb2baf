"""Addresses and files that give something else than a page: one clear line, in bounded time and memory."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest

import engine_pages as pages
from engine_pages import answering, by_path, reply
from kvarto.diagnose import scrape
from kvarto.diagnose.scrape import Live, base_of, get, get_json, is_url, read_pages
from kvarto.diagnose.window import slim
from kvarto.errors import Unreachable, UsageError


def line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_a_page_is_found_at_metrics():
    with answering(by_path({"/metrics": (200, pages.vllm_0_8(requests=3))})) as url:
        for address in (url, f"{url}/", f"{url}/v1", f"{url}/metrics", url.removeprefix("http://")):
            page = Live(address).page()
            assert page.origin == f"{url}/metrics"
            assert "vllm:num_requests_running" in page.samples


def test_tensorrts_json_is_passed_over_for_its_page():
    found = {"/metrics": (200, '[{"iter": 1}]'), "/prometheus/metrics": (200, pages.tensorrt_llm(requests=1))}
    with answering(by_path(found)) as url:
        assert Live(url).page().origin.endswith("/prometheus/metrics")


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match="connection refused") as error:
        Live(f"http://127.0.0.1:{port}").page()
    assert "is the engine running" in line(error)


def test_no_such_host():
    with pytest.raises(Unreachable) as error:
        Live("http://no-such-host.invalid:1").page()
    line(error)


def test_an_engine_that_hangs_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with pytest.raises(Unreachable, match="no answer within 0.3 s") as error:
            Live(f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.3).page()
        assert time.monotonic() - begin < 5
        line(error)


def served_raw(answer: bytes):
    """The error of one request to a server that answers so, whatever it is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        with pytest.raises(Unreachable) as error:
            get(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", seconds=5)
        thread.join()
    return line(error)


def test_an_answer_that_breaks_off_is_no_page():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    assert "broke off 995 bytes before the end" in served_raw(head + b"a 1\n\n")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"\x00\x1b[2J no HTTP at all\r\n", "something that is no HTTP"),
        (
            b"HTTP/1.1 500 Bad\x1b[2J\r\n\r\n\x1b]0;title\x07<b>gone</b>",
            "answered 500 Bad [2J ( ]0;title gone)".replace("( ", "("),
        ),
        (b"", "closed connection without response"),
    ],
)
def test_what_a_server_says_is_shown_without_control_characters(answer, says):
    text = served_raw(answer)
    assert text.isprintable()
    assert says in text


def test_an_engine_that_drips_is_given_up():
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(100):
                handler.wfile.write(b"a 1\n")
                handler.wfile.flush()
                time.sleep(0.1)
        except OSError:
            pass

    with answering(drip) as url, pytest.raises(Unreachable, match="no answer within 0.5 s"):
        get(f"{url}/metrics", seconds=0.5)


def test_a_huge_answer_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(scrape, "MOST_BYTES", 2**20)
    with answering(reply(200, b"a 1\n" * 2**19)) as url, pytest.raises(Unreachable, match="more than 1 MiB") as error:
        get(f"{url}/metrics")
    line(error)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, "Not Found", "--enable-metrics"),
        (401, '{"error": "no key"}', "--header"),
        (501, "This server does not support metrics endpoint.", "--metrics"),
        (500, "<html><body><h1>Oops</h1>\n\nlong</body></html>", "answered 500"),
        (200, "<html><body>Welcome to nginx</body></html>", "HTML"),
        (200, "", "empty page"),
        (200, b"\xff\xfe\x00", "no text"),
    ],
)
def test_other_answers(status, body, says):
    with answering(reply(status, body)) as url, pytest.raises((Unreachable, UsageError)) as error:
        Live(f"{url}/metrics").page()
    assert says in line(error)


def test_an_answer_that_is_no_http():
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with pytest.raises(Unreachable) as error:
            get(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", seconds=2)
        thread.join()
    line(error)


def test_headers_are_sent_and_never_shown():
    seen = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Authorization"])
        reply(403, "no")(handler)

    with answering(answer) as url, pytest.raises(Unreachable) as error:
        Live(url, {"Authorization": "Bearer secret"}).page()
    assert seen == ["Bearer secret"]
    assert "secret" not in line(error)


def test_a_window_is_watched_and_saved_and_read_again(tmp_path):
    count = iter(range(1, 100))
    with answering(lambda handler: reply(200, pages.vllm_0_8(requests=next(count)))(handler)) as url:
        watched = Live(url).watch(0.25, 0.1, save=tmp_path).pages
    assert 3 <= len(watched) <= 4
    again = read_pages([tmp_path])
    assert [slim(page).samples for page in again] == [page.samples for page in watched]
    assert [page.at_seconds for page in again] == pytest.approx([page.at_seconds for page in watched], abs=0.001)


def test_one_scrape_is_no_wait():
    with answering(reply(200, pages.vllm_0_8(requests=1))) as url:
        begin = time.monotonic()
        assert len(Live(url).watch(0, 2).pages) == 1
        assert time.monotonic() - begin < 2


def test_a_busy_engine_may_miss_a_scrape_and_it_is_noted():
    count = iter(range(1, 100))

    def answer(handler):
        number = next(count)
        reply(503 if number == 3 else 200, pages.vllm_0_8(requests=number))(handler)

    with answering(answer) as url:
        watched = Live(url).watch(0.4, 0.1)
    assert len(watched.pages) >= 3
    (note,) = watched.notes
    assert note.startswith(f"1 of {len(watched.pages) + 1} scrapes were not answered (answered 503")


def test_an_engine_that_dies_ends_the_watch():
    count = iter(range(1, 100))
    with (
        answering(lambda handler: reply(200 if next(count) < 3 else 503, pages.vllm_0_8(requests=1))(handler)) as url,
        pytest.raises(Unreachable, match="503"),
    ):
        Live(url).watch(30, 0.02)


def test_who_interrupts_gets_what_was_seen():
    def told(count: int, _left: float) -> None:
        if count == 3:
            raise KeyboardInterrupt

    with answering(reply(200, pages.vllm_0_8(requests=1))) as url:
        watched = Live(url).watch(60, 0.05, told=told)
    assert len(watched.pages) == 3
    assert "interrupted after 0 of 60 s" in watched.notes


def test_a_redirect_is_not_followed_with_a_key():
    asked = []

    def elsewhere(handler):
        asked.append(handler.headers["Authorization"])
        reply(200, "a 1")(handler)

    with answering(elsewhere) as other:

        def answer(handler):
            handler.send_response(302)
            handler.send_header("Location", f"{other}/metrics")
            handler.end_headers()

        with answering(answer) as url, pytest.raises(Unreachable, match="answered 302") as error:
            Live(url, {"Authorization": "Bearer secret"}).page()
    assert asked == []
    assert f"to {other}/metrics" in line(error)


def test_json_of_an_address():
    with answering(reply(200, json.dumps({"version": "1"}))) as url:
        assert get_json(f"{url}/version") == {"version": "1"}
    with answering(reply(200, "no json")) as url, pytest.raises(Unreachable, match="no JSON"):
        get_json(f"{url}/version")


@pytest.mark.parametrize("url", ["ftp://x:1", "http://", "http://:80", "http://a:notaport", "http://a:99999"])
def test_what_is_no_address(url):
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        base_of(url)


def test_files_and_addresses_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page:1").write_text("a 1")
    assert is_url("http://a")
    assert is_url("localhost:8000/metrics")
    assert not is_url("page:1")
    assert not is_url("pages/1.prom")


def test_files_that_are_no_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(scrape, "MOST_BYTES", 1000)
    for name, data, says in [
        ("empty", b"", "an empty page"),
        ("binary", b"\x80\x81\x00", "no text"),
        ("html", b"<html></html>", "HTML"),
        ("huge", b"a 1\n" * 1000, "a file of more than"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError) as error:
            read_pages([tmp_path / name])
        assert says in line(error)
        assert name in line(error)
    with pytest.raises(UsageError, match="No such file") as error:
        read_pages([tmp_path / "absent"])
    line(error)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="an empty one"):
        read_pages([tmp_path / "folder"])
