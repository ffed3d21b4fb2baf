"""Between messages and text: the model's chat template on the way in, tool calls found in what it wrote on the way out. No torch.

Some templates say nothing of tools. Then we put them into the system message ourselves, and calls of earlier turns into their messages, in the form
that Hermes and Qwen were trained on: <tool_call>{"name": ..., "arguments": {...}}</tool_call>. `ChatTemplate.tools_by` says who does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jsonschema import Draft202012Validator, validators
from pydantic_core import from_json

from kvarto.errors import Unsupported, UsageError
from kvarto.serve.protocol import Function, Message
from kvarto.serve.tokens import Tokens

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# How models wrap a call: Hermes and Qwen; Qwen-Coder, which often answers with a fenced block in spite of its template, or with nothing but the JSON.
_WRAPPINGS = {OPEN: CLOSE, "```json": "```"}
_BARE = '{"name":'
_SPACED_CHARACTERS = 64  # with white space in it it may be so long
# Longer ones are text: each of their closing marks may be the last one, and trying them takes time.
_MOST_CALL_CHARACTERS = 1 << 16
_OPENING = re.compile("|".join(map(re.escape, _WRAPPINGS)))
_PROBE = "kvarto_probe"

_SYSTEM = """\
You may call functions. Their signatures, one a line:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and its arguments, and nothing else:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens, self._tokenizer = tokens, tokens.tokenizer
        self.exists = bool(getattr(self._tokenizer, "chat_template", None))
        self.tools_by = "template" if self.exists and self._knows_tools() else "kvarto"

    def text(self, messages: Sequence[Message], tools: Sequence[Function]) -> str:
        """The prompt up to the assistant's answer, for `Tokens.of_chat`. Raises UsageError if the template refuses, Unsupported if there is none."""
        if not self.exists:
            raise Unsupported("this model has no chat template; send its prompt to /v1/completions")
        turns, described = [_turn(message) for message in messages], [_describe(tool) for tool in tools]
        if self.tools_by == "kvarto":
            turns, described = _with_tools([_spelled_out(turn) for turn in turns], described), []
        try:
            return self._render(self._tokens.marked(turns), self._tokens.marked(described))
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError("messages", "messages that the model's chat template takes", str(error)) from error

    def _render(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        text = self._tokenizer.apply_chat_template(
            turns, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    def _knows_tools(self) -> bool:
        try:
            return _PROBE in self._render([{"role": "user", "content": "?"}], [_describe(Function(name=_PROBE))])
        except (TemplateError, TypeError, ValueError):
            return False


def _turn(message: Message) -> dict[str, Any]:
    """A message as templates expect it: arguments are objects, not text."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "developer":
        turn["role"] = "system"
    if message.name:
        turn["name"] = message.name
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.values}}
            for call in message.tool_calls
        ]  # fmt: skip
    return turn


def _describe(function: Function) -> dict[str, Any]:
    about: dict[str, Any] = {"name": function.name, "description": function.description}
    return {"type": "function", "function": about | {"parameters": function.parameters}}


def _spelled_out(turn: dict[str, Any]) -> dict[str, Any]:
    """With its calls in its text."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", [])]
    return turn | {
        "content": "\n".join(filter(None, [turn["content"], *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)]))
    }


def _with_tools(turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not tools:
        return turns
    system = _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if turns[0]["role"] == "system":
        return [turns[0] | {"content": f"{turns[0]['content']}\n\n{system}"}, *turns[1:]]
    return [{"role": "system", "content": system}, *turns]


# ---- calls in what the model writes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The model calls a function; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCallReader:
    """Text as it comes in, text and calls out. Text that may become a call is held back.

    What looks like a call but is no JSON, of no offered function, or with arguments that a strict one forbids, is text, as the model wrote it.
    """

    def __init__(self, functions: Sequence[Function]) -> None:
        self._validators = {each.name: _validator(each) for each in functions}
        self._held, self._at_start, self._after_call = "", True, False
        self._tried = 0  # closing marks that begin before this place of `_held` are none

    def feed(self, text: str) -> Iterator[str | Call]:
        """What is sure after some more text."""
        self._held += text
        if self._at_start:
            first = "".join(self._held[:_SPACED_CHARACTERS].split())[: len(_BARE)]
            if _BARE.startswith(first) and (first or len(self._held) < _SPACED_CHARACTERS):
                return
            self._at_start = False
        while self._held:
            opening = _OPENING.search(self._held)
            begin = opening.start() if opening else len(self._held) - _may_begin_a_wrapping(self._held)
            yield from self._let_go(begin)
            if opening is None:
                return
            calls, end = self._calls(opening[0])
            if calls is None:
                return
            if not calls:
                yield from self._let_go(end)
                continue
            self._held, self._after_call, self._tried = self._held[end:], True, 0
            yield from calls

    def finish(self) -> Iterator[str | Call]:
        """What was held back. A call that only lacks its closing mark, since the text ended there, is a call."""
        if self._at_start:
            lines = ",".join(filter(str.strip, self._held.splitlines()))  # several calls stand in as many lines
            if calls := self._parse(self._held) or self._parse(f"[{lines}]"):
                self._held = ""
                yield from calls
            self._at_start = False
            yield from self.feed("")
        while opening := _OPENING.match(self._held):
            if calls := self._parse(self._held[opening.end() :]):
                self._held = ""
                yield from calls
            else:
                yield from self._let_go(opening.end())
                yield from self.feed("")
        yield from self._let_go(len(self._held))

    def _let_go(self, end: int) -> Iterator[str]:
        text, self._held = self._held[:end], self._held[end:]
        if end:
            self._tried = 0
        if self._after_call:  # white space behind a call is nobody's text
            text = text.lstrip()
        if text:
            self._after_call = False
            yield text

    def _calls(self, opening: str) -> tuple[list[Call] | None, int]:
        """Calls of the wrapping that `_held` begins with, and where it ends; None if that is not known yet.

        A closing mark may stand inside of an argument, so the first one behind whole JSON is it.
        """
        closing, begin = _WRAPPINGS[opening], len(opening)
        at = self._held.find(closing, max(begin, self._tried))
        while at >= 0:
            end = at + len(closing)
            if at - begin <= _MOST_CALL_CHARACTERS and (calls := self._parse(self._held[begin:at])) is not None:
                return calls, end
            self._tried = end
            at = self._held.find(closing, end)
        return ([], begin) if len(self._held) > _MOST_CALL_CHARACTERS else (None, 0)

    def _parse(self, text: str) -> list[Call] | None:
        """Calls in JSON: empty if it says something else, None if it is no JSON."""
        try:
            data = from_json(text, allow_inf_nan=False)
        except ValueError:
            return None
        found = [self._call(item) for item in (data if isinstance(data, list) else [data])]
        calls = [call for call in found if call is not None]
        return calls if len(calls) == len(found) else []

    def _call(self, data: Any) -> Call | None:
        name = data.get("name") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in self._validators:
            return None
        arguments = data.get("arguments", data.get("parameters"))  # the latter: Llama
        if not isinstance(arguments, dict) or not self._validators[name].is_valid(arguments):
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))


def _nothing(*_: Any) -> None:
    """No error."""


# A client's patterns could run for ever, and know more than Python's do; the grammar that strict calls are written by keeps them already.
_Validator: Any = validators.extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, {"pattern": _nothing, "patternProperties": _nothing}
)


def _validator(function: Function) -> Any:
    """Of arguments; any will do unless the function is strict."""
    return _Validator(function.parameters if function.strict else True)


def _may_begin_a_wrapping(text: str) -> int:
    """How many characters at its end."""
    longest = min(max(map(len, _WRAPPINGS)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in _WRAPPINGS)), 0)
