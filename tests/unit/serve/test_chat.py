"""Messages become the template's text, and calls are found in what a model writes, however it is cut."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from bytes_tokenizer import PLAIN, WITH_CALLS, WITH_TOOLS, tokenizer
from kvarto.errors import Unsupported, UsageError
from kvarto.serve.chat import Call, ChatTemplate, ToolCallReader
from kvarto.serve.protocol import CalledFunction, Function, Message, ToolCall

CALL = '{"name": "f", "arguments": {"x": 1}}'
STRICT = Function(name="g", strict=True)
F1 = Call("f", '{"x": 1}')


def written(text: str, size: int) -> list[str | Call]:
    """What is found in text that comes in pieces of `size` characters; neighbouring texts joined."""
    reader, events = ToolCallReader([Function(name="f"), STRICT]), list[str | Call]()
    for begin in range(0, len(text), size):
        events += reader.feed(text[begin : begin + size])
    events += reader.finish()
    joined: list[str | Call] = []
    for event in events:
        if isinstance(event, str) and joined and isinstance(joined[-1], str):
            joined[-1] += event
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("just text", ["just text"]),
        (f"<tool_call>\n{CALL}\n</tool_call>", [F1]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", [F1, F1]),
        (f"<tool_call>[{CALL}, {CALL}]</tool_call>", [F1, F1]),
        (f"Let me see. <tool_call>{CALL}</tool_call> Done.", ["Let me see. ", F1, "Done."]),
        (f"```json\n{CALL}\n```", [F1]),
        ('<tool_call>{"name": "g", "parameters": {}}</tool_call>', [Call("g", "{}")]),
        # The end of the text is as good as the closing mark.
        (f"<tool_call>\n{CALL}", [F1]),
        (f"<tool_call>\n{CALL[:-1]}", [f"<tool_call>\n{CALL[:-1]}"]),
        # Closing marks within arguments.
        ('```json\n{"name": "f", "arguments": {"x": "a ``` b"}}\n```', [Call("f", '{"x": "a ``` b"}')]),
        ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', [Call("f", '{"x": "</tool_call>"}')]),
        # Nothing but the JSON.
        (CALL, [F1]),
        ('\n{ "name" : "f", "arguments": {"x": 1}}\n', [F1]),
        (f"{CALL}\n\n{CALL}\n", [F1, F1]),
        (f"{CALL}\n{CALL[:-1]}", [f"{CALL}\n{CALL[:-1]}"]),
        ('{"name": "Ada"}', ['{"name": "Ada"}']),
        ('{"name": ["f"]}', ['{"name": ["f"]}']),
        (f'{{"names": []}} <tool_call>{CALL}</tool_call>', ['{"names": []} ', F1]),
        (f'{{"name": 1}} <tool_call>{CALL}</tool_call>', ['{"name": 1} ', F1]),
        (f"{CALL} and more", [f"{CALL} and more"]),
        # A strict function takes no arguments that its schema forbids.
        ('{"name": "g", "arguments": {"x": 1}}', ['{"name": "g", "arguments": {"x": 1}}']),
        ('{"name": "g", "arguments": {}}', [Call("g", "{}")]),
        # What is no call of ours stays as it was written.
        ('```json\n{"a": 1}\n``` and more', ['```json\n{"a": 1}\n``` and more']),
        ('<tool_call>{"name": "h", "arguments": {}}</tool_call>', ['<tool_call>{"name": "h", "arguments": {}}</tool_call>']),
        ('<tool_call>{"name": "f", "arguments": 1}</tool_call>', ['<tool_call>{"name": "f", "arguments": 1}</tool_call>']),
        ("<tool_call>{oops}</tool_call> sorry", ["<tool_call>{oops}</tool_call> sorry"]),
        (f"<tool_call>oops <tool_call>{CALL}</tool_call>", ["<tool_call>oops ", F1]),
        ("a < b, ``code``, <tool", ["a < b, ``code``, <tool"]),
    ],
)  # fmt: skip
def test_calls_are_found(text: str, found: list[str | Call], size: int) -> None:
    assert written(text, size) == found


def test_a_model_that_only_opens_brackets() -> None:
    text = "<tool_call>" + "[" * 50_000 + "</tool_call>"
    assert written(text, 1000) == [text]


def test_text_is_not_held_back_for_nothing() -> None:
    reader = ToolCallReader([Function(name="f")])
    assert list(reader.feed("Hello <b")) == ["Hello <b"]
    assert list(reader.feed(" <tool")) == [" "]
    assert list(reader.feed("s>")) == ["<tools>"]


def turn(role: str, content: str = "", **more: object) -> Message:
    return Message.model_validate({"role": role, "content": content, **more})


def text(template: str, messages: list[Message], tools: list[Function] | None = None) -> str:
    known = tokenizer(template)
    return ChatTemplate(known).text(messages, tools or [])


def test_a_template_that_knows_tools_is_told_of_them() -> None:
    assert ChatTemplate(tokenizer(WITH_TOOLS)).tools_by == "template"
    assert text(WITH_TOOLS, [turn("user", "hi")], [Function(name="f")]) == "[f]<user>hi<assistant>"
    assert text(WITH_TOOLS, [turn("developer", "be kind"), turn("user", "hi")]) == "<system>be kind<user>hi<assistant>"


def test_templates_get_arguments_as_objects() -> None:
    call = ToolCall(id="1", function=CalledFunction(name="f", arguments='{"x": 7}'))
    messages = [turn("user", "?"), Message(role="assistant", tool_calls=[call]), turn("tool", "ok", tool_call_id="1")]
    assert text(WITH_CALLS, messages) == "<user>?<assistant>7<tool>ok<assistant>"


def test_for_a_template_that_knows_no_tools_they_are_spelled_out() -> None:
    assert ChatTemplate(tokenizer(PLAIN)).tools_by == "kvarto"
    call = ToolCall(id="1", function=CalledFunction(name="f", arguments='{"x": 7}'))
    messages = [
        turn("system", "be kind"),
        turn("user", "?"),
        Message(role="assistant", content="so", tool_calls=[call]),
    ]
    shown = text(PLAIN, messages, [Function(name="f", description="does it")])
    assert shown.startswith("<system>be kind\n\nYou may call functions.")
    assert '"description": "does it"' in shown
    assert '<assistant>so\n<tool_call>\n{"name": "f", "arguments": {"x": 7}}\n</tool_call><assistant>' in shown
    assert text(PLAIN, [turn("user", "?")], [Function(name="f")]).startswith("<system>You may call functions.")
    assert text(PLAIN, [turn("user", "?")]) == "<user>?<assistant>"


def test_a_template_may_refuse() -> None:
    with pytest.raises(UsageError, match="messages: .* roles must alternate"):
        text("{{ raise_exception('roles must alternate') }}", [turn("user", "?")])
    with pytest.raises(Unsupported, match="no chat template"):
        ChatTemplate(tokenizer(None)).text([turn("user", "?")], [])


def test_a_default_parameter_is_none_at_all() -> None:
    assert json.dumps(Function(name="f").parameters["properties"]) == "{}"


def test_patterns_of_clients_are_not_run_here() -> None:
    """They could run for ever, and be of a kind that Python does not know; the grammar keeps them."""
    for pattern in (r"^(?:(?:a+)+b|a{40}c)$", r"^\\p{L}+$"):
        parameters = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
        reader = ToolCallReader([Function(name="f", parameters=parameters, strict=True)])
        call = '<tool_call>{"name": "f", "arguments": {"x": "' + "a" * 40 + 'c"}}</tool_call>'
        assert [type(part) for part in reader.feed(call)] == [Call]


def test_closing_marks_that_close_nothing_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ToolCallReader([Function(name="f")])
    parse, tried = reader._parse, list[str]()
    monkeypatch.setattr(reader, "_parse", lambda text: tried.append(text) or parse(text))
    parts = list(reader.feed('<tool_call>{"name": "f", "arguments": {"x": "'))
    parts += [part for _ in range(8000) for part in reader.feed("</tool_call>")]
    whole = "".join(map(str, [*parts, *reader.finish()]))
    assert whole == '<tool_call>{"name": "f", "arguments": {"x": "' + "</tool_call>" * 8000
    assert len(tried) < 8000


def test_white_space_alone_is_not_held_back_for_ever() -> None:
    reader = ToolCallReader([Function(name="f")])
    assert "".join(map(str, reader.feed(" " * 80 + "hello"))).strip() == "hello"
