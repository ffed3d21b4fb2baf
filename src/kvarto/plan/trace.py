"""Traces of requests, as blocks of prompts that can be told apart: what a prefix cache sees of them. No torch.

    Mooncake JSONL       {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one for each block of the prompt]}
    AIPerf's superset    the same, or text_input, messages or payload in place of lengths and ids
    ShareGPT             [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]
    OTel GenAI spans     JSON lines of spans, or OTLP's resourceSpans, with gen_ai.input.messages or gen_ai.prompt

Equal ids stand for equal tokens behind equal tokens. Text has no tokens here: `chars_per_token` characters count as one, so lengths are estimates,
and what two prompts share is found by their characters. A trace without times keeps its order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarto.errors import UsageError

_MOST_BYTES = 2 << 30
_MOST_LINE_BYTES = 64 << 20
_MOST_BLOCKS = 1 << 22


@dataclass(frozen=True)
class Prompt:
    """`blocks`: an id for each block of the prompt, the last one perhaps cut short; `tokens` of the prompt, `output_tokens` of the answer."""

    blocks: tuple[int, ...]
    tokens: int
    output_tokens: int = 0
    timestamp: float = 0.0


@dataclass(frozen=True)
class Trace:
    """Prompts by time. `estimated`: token counts come from characters."""

    name: str
    kind: str
    block_tokens: int
    prompts: tuple[Prompt, ...]
    estimated: bool

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(prompt.tokens for prompt in self.prompts)


@dataclass(frozen=True)
class Cut:
    """How prompts become blocks: `hash_tokens` in a block of hash ids, `text_tokens` in one of text of `chars_per_token`."""

    hash_tokens: int = 512
    text_tokens: int = 64
    chars_per_token: float = 4.0

    def __post_init__(self) -> None:
        if not 1 <= self.hash_tokens <= 1 << 20:
            raise UsageError("--trace-block-tokens", "1 to 1048576", self.hash_tokens)
        if not 0.1 <= self.chars_per_token <= 100:
            raise UsageError("--chars-per-token", "0.1 to 100", self.chars_per_token)


def read_trace(path: Path, cut: Cut) -> Trace:
    """The prompts of a file. Raises UsageError with the number of the line or entry that is wrong."""
    prompts: list[Prompt] = []
    kinds: set[str] = set()
    blocks = 0
    for where, data in _records(path):
        for kind, prompt in _prompts(where, data, cut):
            kinds.add(kind)
            prompts.append(prompt)
            blocks += len(prompt.blocks)
            if blocks > _MOST_BLOCKS:
                raise UsageError(f"trace {path}", f"at most {_MOST_BLOCKS} blocks", "more", "cut the trace")
    if not prompts:
        raise UsageError(f"trace {path}", "requests", "none")
    text = any(kind != "hash ids" for kind in kinds)
    if text and "hash ids" in kinds:
        raise UsageError(f"trace {path}", "hash_ids in each request, or in none", "both")
    prompts.sort(key=lambda prompt: prompt.timestamp)
    block_tokens = cut.text_tokens if text else cut.hash_tokens
    return Trace(str(path), ", ".join(sorted(kinds)), block_tokens, tuple(prompts), text)


# ---- files -------------------------------------------------------------------------------------------------------------


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(Where, object) of each line of JSON lines, or of each entry of one JSON document."""
    name = f"trace {path}"
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UsageError(name, "a file", "a folder or a device")
        if not 0 < size <= _MOST_BYTES:
            raise UsageError(
                name, f"1 byte to {_MOST_BYTES >> 30} GiB", "an empty file" if not size else f"{size} bytes"
            )
        with path.open("rb") as file:
            first = file.read(1 << 16).lstrip()
            file.seek(0)
            if first[:1] == b"<":
                raise UsageError(name, "JSON or JSON lines", "HTML or XML")
            if first[:1] == b"[" or not _is_lines(first):
                yield from _document(name, file.read(_MOST_LINE_BYTES * 8 + 1))
                return
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b""), 1):
                if len(line) > _MOST_LINE_BYTES:
                    raise UsageError(
                        f"{name}:{number}", f"lines of at most {_MOST_LINE_BYTES >> 20} MiB", "a longer one"
                    )
                if line.strip():
                    yield f"{name}:{number}", _parsed(f"{name}:{number}", line)
    except OSError as error:
        raise UsageError(name, "a file that can be read", error.strerror or "an error") from error


def _is_lines(first: bytes) -> bool:
    """The first line is a whole object by itself."""
    line = first.split(b"\n", 1)[0]
    if len(line) == len(first):
        return True
    try:
        json.loads(line)
    except ValueError:
        return not line.rstrip().endswith((b"{", b"[", b","))
    return True


def _document(name: str, raw: bytes) -> Iterator[tuple[str, Any]]:
    if len(raw) > _MOST_LINE_BYTES * 8:
        raise UsageError(
            name, f"a JSON document of at most {_MOST_LINE_BYTES * 8 >> 20} MiB", "more", "make it JSON lines"
        )
    data = _parsed(name, raw)
    for number, entry in enumerate(data if isinstance(data, list) else [data], 1):
        yield f"{name}: entry {number}", entry


def _parsed(name: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(name, "JSON", " ".join(str(error).split())[:80]) from None


# ---- records -----------------------------------------------------------------------------------------------------------


def _prompts(where: str, data: Any, cut: Cut) -> Iterator[tuple[str, Prompt]]:
    if not isinstance(data, dict):
        raise UsageError(where, "an object", type(data).__name__)
    if "conversations" in data or "conversation" in data:
        yield from _sharegpt(where, data, cut)
    elif "resourceSpans" in data:
        for span in _otlp_spans(data):
            yield from _span(where, span, cut)
    elif "attributes" in data and ("name" in data or "trace_id" in data or "traceId" in data or "context" in data):
        yield from _span(where, data, cut)
    else:
        yield _mooncake(where, data, cut)


def _mooncake(where: str, data: Mapping[str, Any], cut: Cut) -> tuple[str, Prompt]:
    output, at = _number(where, data, "output_length", 0), _timestamp(where, data)
    if data.get("hash_ids") is not None:
        ids, tokens = data["hash_ids"], _number(where, data, "input_length", None)
        if not isinstance(ids, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise UsageError(f"{where}: hash_ids", "a list of whole numbers", repr(ids)[:60])
        if not 0 < tokens <= len(ids) * cut.hash_tokens:
            got = f"input_length {tokens}"
            raise UsageError(
                where,
                f"1 to {len(ids) * cut.hash_tokens} tokens for {len(ids)} hash_ids of {cut.hash_tokens}",
                got,
                "say --trace-block-tokens",
            )
        used = -(-tokens // cut.hash_tokens)
        return "hash ids", Prompt(tuple(ids[:used]), tokens, output, at)
    for key in ("text_input", "text", "messages", "payload"):
        if data.get(key) is not None:
            return "text", _of_text(_text(data[key]), cut, output, at)
    if "input_length" in data:
        raise UsageError(where, "hash_ids or text beside input_length: without either nothing is shared", "none")
    raise UsageError(
        where,
        "a request (hash_ids, text_input, messages, payload, conversations or a GenAI span)",
        f"keys {', '.join(map(str, list(data)[:6]))}"[:80],
    )


def _sharegpt(where: str, data: Mapping[str, Any], cut: Cut) -> Iterator[tuple[str, Prompt]]:
    """A request for each answer of the model: what was said before it is its prompt."""
    turns = data.get("conversations", data.get("conversation"))
    if not isinstance(turns, list):
        raise UsageError(f"{where}: conversations", "a list of turns", type(turns).__name__)
    said = ""
    for turn in turns:
        if not isinstance(turn, dict):
            raise UsageError(f"{where}: conversations", "turns that are objects", type(turn).__name__)
        who, text = str(turn.get("from", turn.get("role", ""))), _text(turn.get("value", turn.get("content", "")))
        if who.lower() in ("gpt", "assistant", "model", "chatgpt", "bard", "bing") and said:
            yield "ShareGPT", _of_text(said, cut, _tokens(text, cut), 0.0)
        said += f"\x1e{who}\x1f{text}"


def _otlp_spans(data: Mapping[str, Any]) -> Iterator[Any]:
    for resource in data.get("resourceSpans") or []:
        for scope in resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans") or []:
            yield from scope.get("spans") or []


def _span(where: str, span: Mapping[str, Any], cut: Cut) -> Iterator[tuple[str, Prompt]]:
    """A GenAI span that holds its input; others are passed over."""
    attributes = span.get("attributes")
    if isinstance(attributes, list):  # OTLP
        attributes = {each.get("key"): _otlp_value(each.get("value")) for each in attributes if isinstance(each, dict)}
    if not isinstance(attributes, dict):
        raise UsageError(f"{where}: attributes", "a table or OTLP's list", type(attributes).__name__)
    messages = attributes.get("gen_ai.input.messages", attributes.get("gen_ai.prompt"))
    if messages is None:
        return
    if isinstance(messages, str):
        with contextlib.suppress(ValueError):  # plain text
            messages = json.loads(messages)
    system = attributes.get("gen_ai.system_instructions", "")
    output = attributes.get("gen_ai.usage.output_tokens") or 0
    counted = int(output) if str(output).isdigit() else 0
    prompt = _of_text(_text(system) + "\x1e" + _text(messages), cut, counted, _span_time(span))
    yield "GenAI spans", prompt


def _otlp_value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for key in ("stringValue", "intValue", "doubleValue", "boolValue"):
        if key in value:
            return value[key]
    return None


def _span_time(span: Mapping[str, Any]) -> float:
    for key in ("startTimeUnixNano", "start_time_unix_nano", "start_time"):
        try:
            return float(span[key])
        except (KeyError, TypeError, ValueError):
            continue
    return 0.0


def _number(where: str, data: Mapping[str, Any], key: str, default: int | None) -> int:
    value = data.get(key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{where}: {key}", "a whole number", repr(value)[:60])
    return value


def _timestamp(where: str, data: Mapping[str, Any]) -> float:
    value = data.get("timestamp", 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where}: timestamp", "milliseconds", repr(value)[:60])
    return float(value)


def _text(value: Any) -> str:
    """Text, messages or a payload as one string in which equal beginnings stay equal beginnings."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        for key in ("messages", "prompt", "text", "content", "parts"):
            if key in value:
                return f"\x1e{value.get('role', '')}\x1f{_text(value[key])}"
        return json.dumps(value, sort_keys=True)
    if isinstance(value, Sequence):
        return "".join(_text(each) for each in value)
    return "" if value is None else str(value)


def _tokens(text: str, cut: Cut) -> int:
    return max(1, round(len(text) / cut.chars_per_token))


def _of_text(text: str, cut: Cut, output: int, at: float) -> Prompt:
    """Blocks of characters, each known by all that stands before it too."""
    width = max(1, round(cut.text_tokens * cut.chars_per_token))
    return Prompt(
        tuple(_chain(text[i : i + width] for i in range(0, max(1, len(text)), width))), _tokens(text, cut), output, at
    )


def _chain(pieces: Iterable[str]) -> Iterator[int]:
    digest = b""
    for piece in pieces:
        digest = hashlib.blake2b(digest + piece.encode("utf-8", "surrogatepass"), digest_size=12).digest()
        yield int.from_bytes(digest)
