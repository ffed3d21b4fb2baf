"""What clients get: the parts of a choice as they come, and the same parts put together.

A shape turns each Delta of one choice into parts as a stream shows them. A whole answer is made of the same parts, so both always say the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from kvarto.engine.engine import Delta
from kvarto.engine.request import Finish
from kvarto.engine.sampling import Choice
from kvarto.serve.chat import Call, ToolCallReader
from kvarto.serve.protocol import Function

Json = dict[str, Any]
_INCOMPLETE = "\ufffd"


class Shape(Protocol):
    """One choice of an answer."""

    def begin(self) -> Iterator[Json]:
        """Parts that come before anything is generated."""

    def feed(self, delta: Delta) -> Iterator[Json]:
        """Parts that a Delta brings; the last one of the choice has its finish_reason."""

    def whole(self, parts: Sequence[Json]) -> Json:
        """The choice, of all its parts."""


class Names:
    """The text of single tokens. `ends`: tokens that end a text and are not part of it."""

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, frozenset(ends)

    def of(self, token: int) -> str:
        """Its text; a part of a character is U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def shown(self, delta: Delta) -> list[Choice]:
        """Tokens whose log probabilities are reported: those of the text."""
        ended = delta.finish == Finish.STOP
        return [
            choice
            for choice in delta.choices
            if choice.logprob is not None and not (ended and choice.token in self._ends)
        ]


class CompletionShape:
    """A choice of /v1/completions."""

    def __init__(self, index: int, names: Names) -> None:
        self._index, self._names, self._offset = index, names, 0

    def begin(self) -> Iterator[Json]:
        """Nothing."""
        yield from ()

    def feed(self, delta: Delta) -> Iterator[Json]:
        """A part if there is text, log probabilities or an end."""
        logprobs = self._logprobs(delta)
        if delta.text or logprobs or delta.finish:
            yield {
                "index": self._index,
                "text": delta.text,
                "logprobs": logprobs,
                "finish_reason": delta.finish and str(delta.finish),
            }

    def whole(self, parts: Sequence[Json]) -> Json:
        """All text and log probabilities."""
        shown = [part["logprobs"] for part in parts if part["logprobs"]]
        logprobs = {key: [item for each in shown for item in each[key]] for key in shown[0]} if shown else None
        return parts[-1] | {"text": "".join(part["text"] for part in parts), "logprobs": logprobs}

    def _logprobs(self, delta: Delta) -> Json | None:
        choices = self._names.shown(delta)
        if not choices:
            return None
        tokens, offsets = [self._names.of(choice.token) for choice in choices], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [choice.logprob for choice in choices],
            "top_logprobs": [{self._names.of(token): value for token, value in choice.top} for choice in choices],
            "text_offset": offsets,
        }


class ChatShape:
    """A choice of /v1/chat/completions. `tools`: functions whose calls are looked for."""

    def __init__(self, index: int, names: Names, tools: Sequence[Function]) -> None:
        self._index, self._names, self._calls = index, names, 0
        self._reader = ToolCallReader(tools) if tools else None

    def begin(self) -> Iterator[Json]:
        """Who speaks."""
        yield self._part({"role": "assistant", "content": ""})

    def feed(self, delta: Delta) -> Iterator[Json]:
        """Text, calls, each whole, and the end."""
        logprobs = self._logprobs(delta)
        for event in self._read(delta):
            yield self._part({"content": event} if isinstance(event, str) else self._tool_call(event), logprobs)
            logprobs = None
        if delta.finish:
            called = self._calls and delta.finish == Finish.STOP
            yield self._part({}, logprobs, "tool_calls" if called else str(delta.finish))
        elif logprobs:  # of a token whose text is held back
            yield self._part({"content": ""}, logprobs)

    def whole(self, parts: Sequence[Json]) -> Json:
        """The message."""
        deltas = [part["delta"] for part in parts]
        text = "".join(delta.get("content", "") for delta in deltas)
        calls = [
            {key: value for key, value in call.items() if key != "index"}
            for delta in deltas
            for call in delta.get("tool_calls", [])
        ]
        message: Json = {"role": "assistant", "content": text if text.strip() or not calls else None, "refusal": None}
        shown = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        return {
            "index": self._index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": {"content": shown, "refusal": None} if shown else None,
            "finish_reason": parts[-1]["finish_reason"],
        }

    def _part(self, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _read(self, delta: Delta) -> Iterator[str | Call]:
        if self._reader is None:
            yield from [delta.text] if delta.text else []
            return
        yield from self._reader.feed(delta.text)
        if delta.finish:
            yield from self._reader.finish()

    def _tool_call(self, call: Call) -> Json:
        number, self._calls = self._calls, self._calls + 1
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "tool_calls": [{"index": number, "id": new_id("call_"), "type": "function", "function": function}],
        }

    def _logprobs(self, delta: Delta) -> Json | None:
        entries = [
            self._entry(choice.token, choice.logprob)
            | {"top_logprobs": [self._entry(token, value) for token, value in choice.top]}
            for choice in self._names.shown(delta)
        ]
        return {"content": entries, "refusal": None} if entries else None

    def _entry(self, token: int, logprob: float | None) -> Json:
        text = self._names.of(token)
        return {"token": text, "logprob": logprob, "bytes": None if _INCOMPLETE in text else list(text.encode())}


def new_id(prefix: str) -> str:
    """One that nobody else has."""
    return prefix + secrets.token_hex(12)


def usage(prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> Json:
    """OpenAI's usage. A prompt counts once, however many choices there are."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
