"""Replaying a trace against an OpenAI-compatible server: what its clients see, and what was taken of the cores meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

QUANTILES = {"quartile_low": 0.25, "p50": 0.5, "quartile_high": 0.75, "p95": 0.95}


@dataclass
class Ask:
    """A request with its tokens. `due_seconds` counts in an open loop only."""

    due_seconds: float
    prompt: list[int]
    output_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {"due_seconds": self.due_seconds, "prompt": self.prompt, "output_tokens": self.output_tokens}


@dataclass
class Answer:
    """What came of a request: seconds from when it was due to its first token, and between one piece of text and the next."""

    first_seconds: float | None = None  # no text came: all tokens were special ones, say
    gaps_seconds: list[float] = field(default_factory=list)
    end_seconds: float = 0.0  # after the replay's beginning
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


Send = Callable[
    [Ask, Answer, float], Awaitable[None]
]  # fills the answer; the last argument is when it was due, by time.perf_counter


async def replay(asks: Sequence[Ask], send: Send, concurrency: int | None) -> list[Answer]:
    """All of them: each when it is due (open loop), or `concurrency` at a time, each as soon as another one ends (closed loop)."""
    answers, begin = [Answer() for _ in asks], time.perf_counter()
    gate = asyncio.Semaphore(concurrency or len(asks))

    async def one(ask: Ask, answer: Answer) -> None:
        if concurrency is None:
            await asyncio.sleep(begin + ask.due_seconds - time.perf_counter())
        async with gate:
            due = begin + ask.due_seconds if concurrency is None else time.perf_counter()
            try:
                await send(ask, answer, due)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                answer.error = f"{type(error).__name__}: {error}"
            answer.end_seconds = time.perf_counter() - begin

    await asyncio.gather(*(one(ask, answer) for ask, answer in zip(asks, answers, strict=True)))
    return answers


def over_http(session: aiohttp.ClientSession, base: str) -> Send:
    """Streamed completions of /v1/completions."""

    async def send(ask: Ask, answer: Answer, due: float) -> None:
        body = {
            "prompt": ask.prompt, "max_tokens": ask.output_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        last = due
        async with session.post(f"{base}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now, event = time.perf_counter(), json.loads(line[6:])
                if "error" in event:
                    answer.error = str(event["error"])[:200]
                if usage := event.get("usage"):
                    answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                if any(choice.get("text") for choice in event.get("choices", ())):
                    if last is due:
                        answer.first_seconds = now - due
                    else:
                        answer.gaps_seconds.append(now - last)
                    last = now

    return send


async def replay_http(asks: Sequence[Ask], base: str, concurrency: int | None) -> list[Answer]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=1800)) as session:
        return await replay(asks, over_http(session, base), concurrency)


async def healthy(base: str, patience_seconds: float) -> None:
    """Wait until the server says that it serves. Raises TimeoutError."""
    async with asyncio.timeout(patience_seconds), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{base}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def counters(base: str, names: Sequence[str]) -> dict[str, float]:
    """What a Prometheus page says of these names, without labels; what it lacks is left out."""
    async with aiohttp.ClientSession() as session, session.get(f"{base}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = (line.split(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value, *_ in found if name in names}


# ---- summary ---------------------------------------------------------------------------------------------------------


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Quartiles, median and 95th percentile; a value that was seen, no mean of two."""
    ordered = sorted(values)
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) for name, share in QUANTILES.items()
    }


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of one replay. Times in seconds; requests that failed count in `failed` alone."""
    good = [answer for answer in answers if not answer.error and answer.output_tokens]
    result: dict[str, Any] = {"requests": len(answers), "failed": len(answers) - len(good)}
    if errors := sorted({answer.error for answer in answers if answer.error}):
        result["errors"] = errors[:3]
    if not good:
        return result
    seconds = max(answer.end_seconds for answer in good)
    prompt, cached, output = (
        sum(getattr(answer, name) for answer in good) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    return result | {
        "seconds": round(seconds, 2), "prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output,
        "hit_rate": round(cached / prompt, 4), "output_tokens_per_second": round(output / seconds, 2),
        "tokens_per_second": round((prompt + output) / seconds, 1),
        "ttft_seconds": quantiles([each.first_seconds for each in good if each.first_seconds is not None] or [0.0]),
        "itl_seconds": quantiles([gap for answer in good for gap in answer.gaps_seconds] or [0.0]),
    }  # fmt: skip


def typical(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run in the middle, by throughput: medians of several quantities would be of no run that was."""
    whole = [run for run in runs if "seconds" in run]
    return statistics.median_low([_ByThroughput(run) for run in whole]).run if whole else runs[0]


@dataclass(frozen=True)
class _ByThroughput:
    run: dict[str, Any]

    def __lt__(self, other: _ByThroughput) -> bool:
        return bool(self.run["output_tokens_per_second"] < other.run["output_tokens_per_second"])
