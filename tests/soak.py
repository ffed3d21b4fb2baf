"""Thousands of short requests against a real server whose memory is full all the time; many are given up. Nothing is lost, and no answer is wrong.

    python tests/soak.py                                             10,000 requests, a tiny random model
    python tests/soak.py --model smollm2-135m-instruct --requests 400 --memory 24MiB --host-memory 16MiB --disk-memory 64MiB

Prints what happened as JSON, and exits with 1 if anything was not as it must be. `make soak` is the first of these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil

from kvarto.engine.engine import Ask, Engine
from kvarto.engine.request import Sampling
from kvarto.engine.sampling import Choice
from kvarto.models.load import load
from served import Server, save_tiny, soon

FORMATS = ("int4", "fp32")
CONCURRENT = 32
# Log probabilities differ that much by the order of sums, and in int4 where a number lies between two codes (tests/e2e/test_engine.py); where the
# two likeliest tokens are closer than twice that, either may come.
CLOSE = {"fp32": 2e-4, "int4": 3e-2}
# Of sampled texts so many may differ: a random number may lie just where sums in another order move a token's share.
MOST_SAMPLED_APART = 0.01
MOST_GROWTH_BYTES = 1_000_000  # for each 1,000 requests, after the first fifth
WARM_UP_SHARE = 0.2
MOST_THREADS = (
    20  # eight of the pool, one for scrapes, the engine's, the loop's, the disk tier's, and a few of libraries
)
TENANTS = (None, None, "a", "b")
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"stop": [""]}, "stop"),
    ({"seed": "seven"}, "seed"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"kv_format": "int5"}, "kv_format"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "body"),
)


@dataclass(frozen=True)
class Reference:
    """A request and what it gives alone, with all memory for itself."""

    body: dict[str, Any]
    kv: str
    texts: list[str]
    choices: tuple[Choice, ...]
    tokens: list[str]

    @property
    def is_greedy(self) -> bool:
        return bool(self.body["temperature"] == 0)


@dataclass
class Soak:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rss_bytes: list[tuple[int, int]] = field(default_factory=list)  # (requests so far, bytes)
    handles: list[tuple[int, int, int]] = field(default_factory=list)  # (requests so far, file descriptors, threads)

    def expect(self, truth: bool, otherwise: str) -> None:
        if not truth:
            self.failures.append(otherwise)


# ---- what is asked -----------------------------------------------------------------------------------------------------


def references(model: str, count: int, longest: int, rng: random.Random) -> list[Reference]:
    """Requests whose answers are known. They share beginnings, so that pages are found again in every tier."""
    made = []
    with Engine(load(model), kv=FORMATS[0], also=FORMATS[1:], memory="64MiB") as engine:
        letters = "abcdefghijklmnopqrstuvwxyz     "
        stems = ["".join(rng.choice(letters) for _ in range(longest)) for _ in range(6)]
        for number in range(count):
            kv, sampled = FORMATS[number % 2], number % 5 == 0
            prompt = rng.choice(stems)[: rng.randrange(1, longest)] + f" {number % 40}"
            most, seed = rng.choice([1, 3, 8, 20]), rng.randrange(1000)
            n = rng.randrange(1, 4) if sampled else 1
            samplings = [
                Sampling(max_tokens=most, temperature=float(sampled), seed=seed + i, logprobs=2) for i in range(n)
            ]
            done = [engine.generate([Ask(prompt, sampling, kv)])[0] for sampling in samplings]
            body = {"prompt": prompt, "max_tokens": most, "temperature": int(sampled), "seed": seed, "n": n}
            shown = [choice for choice in done[0].choices if choice.token not in engine.core.eos_tokens]
            tokens = [str(engine.tokenizer.decode([choice.token])) for choice in shown]
            made.append(Reference(body, kv, [each.text for each in done], tuple(shown), tokens))
    return made


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Small: every answer ends."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randrange(1, 6)},
        {"type": "integer", "minimum": 0, "maximum": rng.randrange(1, 1000)},
        {"type": "boolean"},
        {"enum": ["tea", "rain", None, rng.randrange(100)]},
        {"const": {"a": [rng.randrange(10)]}},
    ]
    if depth < 2:
        items = {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": 2}
        kinds += [items, {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}]
    if depth == 0 or rng.random() < 0.3:
        names = [f"{letter}{depth}" for letter in "abc"[: rng.randrange(1, 4)]]
        properties = {name: random_schema(rng, depth + 1) if depth < 2 else rng.choice(kinds) for name in names}
        required = names[: rng.randrange(1, len(names) + 1)]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return rng.choice(kinds)


# ---- asking ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Status, the error if there is one, and for each choice its texts, calls and how it ended."""

    status: int
    error: dict[str, Any] | None = None
    texts: Sequence[str] = ()
    calls: Sequence[list[dict[str, Any]]] = ()
    ends: Sequence[str | None] = ()
    raw: dict[str, Any] = field(default_factory=dict)


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Whole or streamed, as the body says."""
    if not body.get("stream"):
        answer = await client.post(path, json=body)
        data = answer.json()
        if answer.status_code != 200:
            return Answer(answer.status_code, data["error"])
        choices = sorted(data["choices"], key=lambda choice: choice["index"])
        said = [choice.get("message", {"content": choice.get("text")}) for choice in choices]
        return Answer(
            200, None, [each["content"] or "" for each in said], [each.get("tool_calls", []) for each in said],
            [choice["finish_reason"] for choice in choices], data,
        )  # fmt: skip
    async with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            return Answer(answer.status_code, json.loads(await answer.aread())["error"])
        texts, calls = [""] * body.get("n", 1), [list[dict[str, Any]]() for _ in range(body.get("n", 1))]
        ends: list[str | None] = [None] * body.get("n", 1)
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return Answer(500, event["error"])
            for choice in event["choices"]:
                delta = choice.get("delta", {"content": choice.get("text")})
                texts[choice["index"]] += delta.get("content") or ""
                calls[choice["index"]] += delta.get("tool_calls", [])
                ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
        return Answer(200, None, texts, calls, ends)


class Client:
    """Asks one random request after another, and looks at what comes."""

    def __init__(
        self, soak: Soak, http: httpx.AsyncClient, known: Sequence[Reference], context: int, seed: int
    ) -> None:
        self._soak, self._http, self._known, self._context = soak, http, known, context
        self._rng = random.Random(seed)
        self._kinds = {
            self.reference: 40, self.sampled_freely: 12, self.chat: 12, self.structured: 16, self.tools: 8,
            self.wrong: 6, self.too_long: 3, self.look: 3,
        }  # fmt: skip

    async def one(self) -> None:
        """A request of some kind; a sixth of them is given up at some moment."""
        rng, soak = self._rng, self._soak
        kind = rng.choices(list(self._kinds), list(self._kinds.values()))[0]
        soak.counts["requests"] += 1
        try:
            async with asyncio.timeout(rng.choice([0.0, 0.02, 0.1, 0.4, 1.0]) if rng.random() < 1 / 6 else None):
                await kind()
        except TimeoutError:  # httpx has closed the connection
            soak.counts["cancelled"] += 1
        except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
            soak.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
        else:
            soak.counts[kind.__name__] += 1

    def _body(self, **fields: Any) -> dict[str, Any]:
        rng = self._rng
        return {
            "stream": rng.random() < 0.5,
            "kv_format": rng.choice(FORMATS),
            "cache_salt": rng.choice(TENANTS),
        } | fields

    async def reference(self) -> None:
        """Gives what it gives alone."""
        rng, soak = self._rng, self._soak
        known = rng.choice(self._known)
        body = self._body(kv_format=known.kv, **known.body)
        if known.is_greedy and rng.random() < 0.5:
            body |= {"logprobs": 2, "stream": False}
        answer = await ask(self._http, "/v1/completions", body)
        if answer.status != 200:
            soak.failures.append(f"a sound request was refused: {answer.error}")
        elif not known.is_greedy:
            soak.counts["sampled texts"] += len(known.texts)
            soak.counts["sampled texts apart"] += sum(a != b for a, b in zip(known.texts, answer.texts, strict=True))
        elif "logprobs" in body:
            soak.counts["greedy compared by token"] += 1
            shown = answer.raw["choices"][0]["logprobs"] or {"tokens": [], "token_logprobs": []}
            self._compare(known, shown["tokens"], shown["token_logprobs"])
        elif list(answer.texts) == known.texts:
            soak.counts["greedy texts equal"] += 1
        elif self._closest(known.choices) < 2 * CLOSE[known.kv]:
            soak.counts["greedy texts apart after a tie"] += 1
        else:
            soak.failures.append(f"{body}: {answer.texts} is not {known.texts}")

    def _compare(self, known: Reference, tokens: Sequence[str], logprobs: Sequence[float]) -> None:
        close = CLOSE[known.kv]
        for i, (choice, text) in enumerate(zip(known.choices, known.tokens, strict=True)):
            if i < len(tokens) and tokens[i] == text and abs(logprobs[i] - (choice.logprob or 0)) <= close:
                continue
            if self._closest([choice]) < 2 * close:
                self._soak.counts["greedy texts apart after a tie"] += 1
                return
            got = (tokens[i], logprobs[i]) if i < len(tokens) else "nothing"
            self._soak.failures.append(f"{known.body} in {known.kv}: token {i} is {got}, alone {text!r}, {choice}")
            return
        self._soak.counts["greedy texts equal"] += 1

    @staticmethod
    def _closest(choices: Sequence[Choice]) -> float:
        """How near the second likeliest token ever came."""
        return min((choice.top[0][1] - choice.top[1][1] for choice in choices), default=0.0)

    async def sampled_freely(self) -> None:
        """Several choices of a prompt that nobody had."""
        rng = self._rng
        prompt = "".join(rng.choice("abcdef ") for _ in range(rng.randrange(1, 200)))
        body = self._body(prompt=prompt, n=rng.randrange(1, 5), max_tokens=rng.choice([1, 8, 24]), min_p=0.05)
        answer = await ask(self._http, "/v1/completions", body)
        self._soak.expect(
            answer.status == 200 and len(answer.texts) == body["n"] and None not in answer.ends, f"{body}: {answer}"
        )

    async def chat(self) -> None:
        """Stop strings are never part of what comes."""
        rng = self._rng
        messages = [{"role": "user", "content": "".join(rng.choice("xyz ") for _ in range(rng.randrange(100)))}]
        stop = [rng.choice("abcdefgh "), "the "]
        answer = await ask(
            self._http, "/v1/chat/completions", self._body(messages=messages, stop=stop, max_tokens=12, n=rng.randrange(1, 3))
        )  # fmt: skip
        is_right = answer.status == 200 and not any(each in text for text in answer.texts for each in stop)
        self._soak.expect(is_right, f"stop {stop}: {answer}")

    async def structured(self) -> None:
        """What ends by itself is valid."""
        rng, soak = self._rng, self._soak
        schema = random_schema(rng)
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
        messages = [{"role": "user", "content": "go " * rng.randrange(1, 20)}]
        body = self._body(messages=messages, response_format=wanted, max_tokens=200)
        answer = await ask(self._http, "/v1/chat/completions", body)
        if answer.status != 200:
            soak.failures.append(f"{schema}: {answer}")
            return
        for text, end in zip(answer.texts, answer.ends, strict=True):
            soak.counts[f"JSON {end}"] += 1
            if end != "stop":
                continue
            try:
                jsonschema.validate(json.loads(text), schema)
                soak.counts["JSON valid"] += 1
            except (ValueError, jsonschema.ValidationError) as error:
                soak.failures.append(f"{schema}: {text!r}: {error}")

    async def tools(self) -> None:
        """A call that is required is made, with arguments that follow the schema."""
        rng, soak = self._rng, self._soak
        # One level: the tiny model reads bytes, and has no room for much.
        parameters = {
            "type": "object", "properties": {"a": random_schema(rng, depth=2)}, "required": ["a"], "additionalProperties": False,
        }  # fmt: skip
        tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
        messages = [{"role": "user", "content": "call"}]
        body = self._body(messages=messages, tools=tools, tool_choice="required", max_tokens=120)
        answer = await ask(self._http, "/v1/chat/completions", body)
        soak.expect(answer.status == 200, f"{parameters}: {answer}")
        for calls, end in zip(answer.calls, answer.ends, strict=True):
            soak.counts[f"call {end}"] += 1
            if end == "length":
                continue
            try:
                (call,) = calls
                jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
            except (ValueError, jsonschema.ValidationError) as error:
                soak.failures.append(f"{parameters}: {answer}: {error}")

    async def wrong(self) -> None:
        """A 400 that names the field."""
        fields, name = self._rng.choice(WRONG)
        answer = await ask(self._http, "/v1/completions", self._body(prompt="x") | fields)
        self._soak.expect(
            answer.status == 400 and (answer.error or {})["param"] == name, f"{fields} is answered by {answer}"
        )

    async def too_long(self) -> None:
        """A 400 with OpenAI's code."""
        body = self._body(prompt=[1] * self._context, max_tokens=1)
        answer = await ask(self._http, "/v1/completions", body)
        code = (answer.error or {}).get("code")
        self._soak.expect((answer.status, code) == (400, "context_length_exceeded"), f"too long: {answer}")

    async def look(self) -> None:
        """What tells of the server."""
        for path in ("/health", "/metrics", "/v1/models"):
            self._soak.expect((await self._http.get(path)).status_code == 200, path)


# ---- all of it ---------------------------------------------------------------------------------------------------------


async def send(soak: Soak, server: Server, known: Sequence[Reference], requests: int, seed: int) -> None:
    """All requests, CONCURRENT at once; every now and then a look at the server's process."""
    process, every = psutil.Process(server.process.pid), max(20, requests // 100)
    limits = httpx.Limits(max_connections=2 * CONCURRENT, max_keepalive_connections=CONCURRENT)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        context = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
        left = iter(range(requests))

        async def work(number: int) -> None:
            client = Client(soak, http, known, context, seed * 1000 + number)
            for i in left:
                if i % every == 0:
                    soak.rss_bytes.append((i, process.memory_info().rss))
                    soak.handles.append((i, process.num_fds(), process.num_threads()))
                    print(f"{i:6} requests, {soak.rss_bytes[-1][1] / 1e6:.1f} MB", file=sys.stderr)
                await client.one()

        await asyncio.gather(*(work(number) for number in range(CONCURRENT)))


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Bytes for each 1,000 requests, least squares."""
    if len(points) < 3:
        return 0.0
    return 1000 * statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def check_end(soak: Soak, server: Server, requests: int) -> dict[str, Any]:
    """The books balance, nothing grew, everything was put to the test, and the server leaves politely."""
    books = server.metrics()

    def at_rest() -> bool:
        books.update(server.metrics())
        return not (books["num_requests_running"] or books["num_requests_waiting"] or books["pool_held_bytes"])

    soak.expect(soon(at_rest, 60), f"something is still held: {books}")
    for name in ("preemptions_total", "dropped_pieces_total", "offloaded_bytes_total"):
        soak.expect(books[name] > 0, f"{name}: the memory was never full")
    soak.expect(books["tier_refused_total"] == 0, "a block was not what it should be")
    warm = [point for point in soak.rss_bytes if point[0] >= WARM_UP_SHARE * requests]
    growth = slope(warm)
    soak.expect(
        growth < MOST_GROWTH_BYTES or requests < 5000,  # fewer are all warm-up
        f"the server grew by {growth:.0f} bytes per 1,000 requests",
    )
    (_, fds, threads), (_, last_fds, last_threads) = soak.handles[len(soak.handles) // 5], soak.handles[-1]
    soak.expect(last_fds <= fds + 2 * CONCURRENT, f"file descriptors: {fds}, then {last_fds}")
    soak.expect(max(count for _, _, count in soak.handles) <= MOST_THREADS, f"threads: {threads}, then {last_threads}")
    apart, of = soak.counts["sampled texts apart"], soak.counts["sampled texts"]
    soak.expect(apart <= max(1, MOST_SAMPLED_APART * of), f"{apart} of {of} sampled texts differ")
    idle_fds = psutil.Process(server.process.pid).num_fds()
    code = server.terminate(120)
    soak.expect(code == 0, f"exit code {code}")
    for sign in ("Traceback", " ERROR ", "the engine stopped"):
        soak.expect(sign not in server.said, f"the log says {sign!r}")
    return {
        "requests": dict(sorted(soak.counts.items())),
        "server": {name: int(books[name]) for name in sorted(books) if name.endswith("_total")},
        "rss_mb": {
            "first": soak.rss_bytes[0][1] / 1e6, "after warm-up": warm[0][1] / 1e6, "last": soak.rss_bytes[-1][1] / 1e6,
            "per 1,000 requests": growth / 1e6,
        },
        "file descriptors": {"after warm-up": fds, "last": last_fds, "without clients": idle_fds},
        "threads": {"after warm-up": threads, "last": last_threads},
    }  # fmt: skip


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Exit code."""
    model = arguments.model or str(save_tiny(folder / "tiny"))
    known = references(model, arguments.references, arguments.longest, random.Random(arguments.seed))
    words = [
        model, "--kv", FORMATS[0], "--also", FORMATS[1], "--memory", arguments.memory, "--host-memory", arguments.host_memory,
        "--disk", str(folder / "pages"), "--disk-memory", arguments.disk_memory, "--step-tokens", "128", "--max-running", "8",
    ]  # fmt: skip
    soak = Soak()
    with Server(folder / "log", *words) as server:
        began = time.monotonic()
        asyncio.run(send(soak, server, known, arguments.requests, arguments.seed))
        seconds = time.monotonic() - began
        report = check_end(soak, server, arguments.requests)
    report |= {"seconds": round(seconds, 1), "failed": len(soak.failures), "failures": soak.failures[:20]}
    print(json.dumps(report, indent=2, default=str))
    return 1 if soak.failures else 0


def main(words: Sequence[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a name or folder; default: a tiny random one")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--references", type=int, default=200, help="requests whose answers are known beforehand")
    parser.add_argument("--longest", type=int, default=300, help="characters of their prompts")
    parser.add_argument("--memory", default="512KiB")
    parser.add_argument("--host-memory", default="256KiB")
    parser.add_argument("--disk-memory", default="2MiB")
    parser.add_argument("--seed", type=int, default=0)
    with tempfile.TemporaryDirectory() as folder:
        return run(parser.parse_args(words), Path(folder))


if __name__ == "__main__":
    sys.exit(main())
