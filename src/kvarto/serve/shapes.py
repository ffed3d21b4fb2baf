"""What clients get: the parts of a choice as they come, and the same parts put together.

A shape turns each Delta of one choice into parts as a stream shows them. A whole answer is made of the same parts, so both always say the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvarto.engine.loop import Delta
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

    def beside(self) -> Json:
        """Fields of a whole answer that stand beside its choices."""


@dataclass(frozen=True)
class Prompt:
    """What an answer shows of its prompt, whose tokens these are.

    text       to be repeated, or ""
    offsets    where each token begins in it; None: one behind the other
    logprobs   repeated with log probabilities, and so many likely tokens of each place; None: without
    scores     `prompt_logprobs`: the same, as vLLM shows it
    """

    tokens: Sequence[int]
    text: str = ""
    offsets: Sequence[int] | None = None
    logprobs: int | None = None
    scores: int | None = None

    def echoed(self, scored: Sequence[Choice]) -> list[Choice]:
        """The prompt's tokens as if they had been generated. Of the first one there is no log probability."""
        if self.logprobs is None:
            return []
        return [Choice(self.tokens[0]), *(replace(choice, top=choice.top[: self.logprobs]) for choice in scored)]

    def scores_of(self, scored: Sequence[Choice], names: Names) -> Json:
        """The field `prompt_logprobs`, if it is wanted: each token first, then those that were likely, by their number."""
        if self.scores is None:
            return {}
        return {"prompt_logprobs": [None, *(_scores(choice, self.scores, names) for choice in scored)]}


def _scores(choice: Choice, most: int, names: Names) -> Json:
    ranked = [(choice.token, choice.logprob, choice.rank)]
    ranked += [(token, value, i) for i, (token, value) in enumerate(choice.top[:most], 1) if token != choice.token]
    return {
        str(token): {"logprob": value, "rank": rank, "decoded_token": names.of(token)} for token, value, rank in ranked
    }


class Names:
    """The text of single tokens. `ends`: tokens that end a text and are not part of it."""

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """Its text; a part of a character is U+FFFD."""
        if token not in self._known:
            self._known[token] = self.text([token])
        return self._known[token]

    def text(self, tokens: Sequence[int]) -> str:
        """Of all of them together, special ones included."""
        return str(self._tokenizer.decode(tokens))

    def shown(self, delta: Delta) -> list[Choice]:
        """Tokens whose log probabilities are reported: those of the text."""
        ended = delta.finish == Finish.STOP
        return [
            choice
            for choice in delta.choices
            if choice.logprob is not None and not (ended and choice.token in self._ends)
        ]


class CompletionShape:
    """A choice of /v1/completions. What it shows of its prompt comes with its first part."""

    def __init__(self, index: int, names: Names, prompt: Prompt | None = None) -> None:
        self._index, self._names, self._offset, self._prompt = index, names, 0, prompt

    def begin(self) -> Iterator[Json]:
        """Nothing."""
        yield from ()

    def feed(self, delta: Delta) -> Iterator[Json]:
        """A part if there is text, log probabilities or an end."""
        text, choices, scores, offsets = delta.text, self._names.shown(delta), Json(), list[int]()
        if self._prompt is not None:
            text, echoed = self._prompt.text + text, self._prompt.echoed(delta.scored)
            offsets, choices = self._offsets(echoed, self._prompt), echoed + choices
            scores, self._prompt = self._prompt.scores_of(delta.scored, self._names), None
        if text or choices or scores or delta.finish:
            yield {
                "index": self._index,
                "text": text,
                "logprobs": self._logprobs(choices, offsets),
                "finish_reason": delta.finish and str(delta.finish),
            } | scores

    def whole(self, parts: Sequence[Json]) -> Json:
        """All text and log probabilities."""
        shown = [part["logprobs"] for part in parts if part["logprobs"]]
        logprobs = {key: [item for each in shown for item in each[key]] for key in shown[0]} if shown else None
        return parts[0] | parts[-1] | {"text": "".join(part["text"] for part in parts), "logprobs": logprobs}

    def beside(self) -> Json:
        """Nothing."""
        return {}

    def _offsets(self, echoed: Sequence[Choice], prompt: Prompt) -> list[int]:
        """Of the prompt's tokens; what follows begins where its text ends."""
        if prompt.offsets is None:
            return self._next_offsets([self._names.of(choice.token) for choice in echoed])
        self._offset = len(prompt.text)
        return list(prompt.offsets[: len(echoed)])

    def _next_offsets(self, tokens: Sequence[str]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return offsets

    def _logprobs(self, choices: Sequence[Choice], offsets: list[int]) -> Json | None:
        """`offsets`: of the first ones, if they are known."""
        if not choices:
            return None
        tokens = [self._names.of(choice.token) for choice in choices]
        offsets = offsets + self._next_offsets(tokens[len(offsets) :])
        return {
            "tokens": tokens,
            "token_logprobs": [choice.logprob for choice in choices],
            "top_logprobs": [self._top(choice) for choice in choices],
            "text_offset": offsets,
        }

    def _top(self, choice: Choice) -> Json | None:
        """By their texts; of several with the same one, such as parts of characters, the likeliest."""
        if choice.logprob is None:
            return None
        top: Json = {}
        for token, value in choice.top:
            top.setdefault(self._names.of(token), value)
        return top


class ChatShape:
    """A choice of /v1/chat/completions. `tools`: functions whose calls are looked for."""

    def __init__(self, index: int, names: Names, tools: Sequence[Function], prompt: Prompt | None = None) -> None:
        self._index, self._names, self._calls, self._prompt, self._beside = index, names, 0, prompt, Json()
        self._reader = ToolCallReader(tools) if tools else None

    def begin(self) -> Iterator[Json]:
        """Who speaks."""
        yield self._part({"role": "assistant", "content": ""})

    def feed(self, delta: Delta) -> Iterator[Json]:
        """Text, calls, each whole, and the end."""
        if self._prompt is not None:
            self._beside, self._prompt = self._prompt.scores_of(delta.scored, self._names), None
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

    def beside(self) -> Json:
        """The prompt's log probabilities."""
        return self._beside

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
