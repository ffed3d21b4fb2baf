from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

import serve
from replay import Answer, Ask, quantiles, replay_http, summary, typical


def completions(seen: list[int]) -> web.Application:
    """A server that streams `max_tokens` pieces, a few milliseconds apart; `seen` gets how many requests were there at once."""
    running = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal running
        body = await request.json()
        if body["prompt"] == [0]:
            return web.json_response({"error": {"message": "no"}}, status=400)
        running += 1
        seen.append(running)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0.005)
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        running -= 1
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    return app


def against(asks: list[Ask], concurrency: int | None, seen: list[int]) -> list[Answer]:
    async def both() -> list[Answer]:
        runner = web.AppRunner(completions(seen))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await replay_http(asks, f"http://127.0.0.1:{port}", concurrency)
        finally:
            await runner.cleanup()

    return asyncio.run(both())


def test_a_stream_is_timed() -> None:
    first, second = against([Ask(0.0, [1, 2, 3, 4], 5), Ask(0.05, [0], 5)], None, [])
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens, first.error) == (4, 2, 5, "")
    assert first.first_seconds is not None
    assert first.first_seconds >= 0.005
    assert len(first.gaps_seconds) == 4
    assert first.end_seconds >= first.first_seconds + sum(first.gaps_seconds)
    assert second.error.startswith("400")
    told = summary([first, second])
    assert (told["requests"], told["failed"], told["hit_rate"], told["output_tokens"]) == (2, 1, 0.5, 5)


def test_a_closed_loop_is_closed() -> None:
    seen: list[int] = []
    answers = against([Ask(9.0, [1, 2, 3], 3) for _ in range(6)], 2, seen)
    assert max(seen) == 2
    assert not any(answer.error for answer in answers)
    assert summary(answers)["seconds"] < 9


def test_numbers_of_a_summary() -> None:
    assert quantiles([4, 1, 3, 2]) == {"quartile_low": 2, "p50": 3, "quartile_high": 4, "p95": 4}
    assert summary([Answer(error="no")]) == {"requests": 1, "failed": 1, "errors": ["no"]}
    runs = [{"seconds": 1, "output_tokens_per_second": speed} for speed in (3, 1, 2)]
    assert typical(runs)["output_tokens_per_second"] == 2


def test_ratios_are_of_the_same_repeat() -> None:
    """An arm whose first run answered nothing, and one that failed in its second: no run is compared with one of another time."""
    ours = [{"repeat": 0, "failed": 9}, {"repeat": 1, "x": 4.0}, {"repeat": 2, "x": 6.0}]
    b = [{"repeat": 0, "x": 2.0}, {"repeat": 1, "x": 1.0}, {"repeat": 2, "x": 2.0}]
    assert serve.against({"kvarto int4": ours, "b": b, "c": [{"repeat": 0, "x": 2.0}]}, "x") == {
        "kvarto int4": {"b": [4.0, 3.0], "c": []}
    }


def test_a_table_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    run = {
        "failed": 0,
        "seconds": 2.0,
        "hit_rate": 0.5,
        "output_tokens_per_second": 3.25,
        "ttft_seconds": {"p50": 0.125, "p95": 7.0},
    }
    serve.show("trace", {"kvarto int4": [run], "peer": [{"failed": 3}]}, Console(width=160))
    lines = capsys.readouterr().out.splitlines()
    assert any("kvarto int4" in line and "3.25" in line and "0.125" in line for line in lines)
    assert any("peer" in line and "3" in line for line in lines)


def test_dry_run_says_what_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "missing", lambda peer: "not installed" if peer == "llama.cpp" else None)
    serve.main(["--dry-run", "--write-trace", str(tmp_path / "trace.jsonl")])
    said = " ".join(capsys.readouterr().out.split())
    assert "would run: kvarto bf16, kvarto int8, kvarto int4, transformers" in said
    assert "skipped: llama.cpp: not installed" in said
    serve.main(["--dry-run", "--quick", "--trace", str(tmp_path / "trace.jsonl"), "--block-tokens", "64"])
    assert "would run: kvarto bf16, kvarto int4" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_an_error() -> None:
    with (
        pytest.raises(RuntimeError, match="did not start: no luck"),
        serve.serving(["sh", "-c", "echo no luck >&2"], 1),
    ):
        pass
