"""Bodies are understood or refused, and a refusal names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvarto.errors import UsageError
from kvarto.serve.protocol import ChatRequest, CompletionRequest, Model, TokenizeRequest, read

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> ChatRequest:
    return read(ChatRequest, json.dumps({"messages": [USER], **fields}).encode())


def refused(kind: type[Model], body: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"best": 1}, "best"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "usr"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [USER | {"weight": 0}]}, "messages[0].weight"),
        ({"temperature": "1"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream_options": {"include_usage": True, "more": 1}, "stream": True}, "stream_options.more"),
        ({"tools": [TOOL | {"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], name: str) -> None:
    assert refused(ChatRequest, {"messages": [USER], **fields}).name == name


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"messages": NaN}', b'"\\ud800"', b"[" * 100_000, b"\xff"]
)
def test_what_is_no_object(body: bytes) -> None:
    assert refused(ChatRequest, body).name == "body"


def test_a_missing_field() -> None:
    assert str(refused(CompletionRequest, {})) == "prompt: expected a value, got nothing"


def test_what_says_nothing_is_accepted() -> None:
    wanted = chat(
        user="me", metadata={"a": "b"}, store=True, service_tier="auto", logit_bias={}, best_of=1, stop=None, seed=None,
        tools=None, audio=None, messages=[USER | {"refusal": None, "annotations": []}],
    )  # fmt: skip
    assert wanted == chat()


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts(given: Any, understood: list[Any]) -> None:
    assert read(CompletionRequest, json.dumps({"prompt": given}).encode()).prompt == understood


@pytest.mark.parametrize("given", [[], [[]], 1, [1, "a"], [True], [[1.5]], {"a": 1}, [None]])
def test_what_is_no_prompt(given: Any) -> None:
    assert refused(CompletionRequest, {"prompt": given}).name == "prompt"


def test_content_in_parts_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"
    assert chat(messages=[{"role": "assistant", "content": None}]).messages[0].content == ""


@pytest.mark.parametrize("arguments", ["{", "[1]", "1"])
def test_arguments_of_an_earlier_call_are_an_object(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    error = refused(ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert error.name == "messages[0].tool_calls[0].function"


def test_tools_that_must_be_called() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    assert chat(tools=[TOOL]).required_tools == []
    assert chat(tools=[TOOL], tool_choice="none").offered_tools == []
    assert [f.name for f in chat(tools=[TOOL, other], tool_choice="required").required_tools] == ["f", "g"]
    named = {"type": "function", "function": {"name": "g"}}
    assert [f.name for f in chat(tools=[TOOL, other], tool_choice=named).required_tools] == ["g"]
    for wanted in (chat(tool_choice="required"), chat(tools=[TOOL], tool_choice=named)):
        with pytest.raises(UsageError, match="tool_choice: "):
            _ = wanted.required_tools


def test_how_many_tokens() -> None:
    assert chat().limit is None
    assert (chat(max_tokens=3).limit, chat(max_tokens=3).limit_field) == (3, "max_tokens")
    both = chat(max_tokens=3, max_completion_tokens=4)
    assert (both.limit, both.limit_field) == (4, "max_completion_tokens")
    assert read(CompletionRequest, b'{"prompt": "a"}').max_tokens == 16


def test_log_probabilities() -> None:
    assert chat().most_logprobs is None
    assert chat(logprobs=True).most_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).most_logprobs == 5
    with pytest.raises(UsageError, match="top_logprobs: "):
        _ = chat(top_logprobs=5).most_logprobs


def test_each_choice_has_a_seed_of_its_own() -> None:
    seeds = [sampling.seed for sampling in chat(n=3, seed=2**63 - 2).sampling(1, None)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    with pytest.raises(UsageError, match="seed: "):
        chat(n=2, seed=2**63).sampling(1, None)
    assert [sampling.seed for sampling in chat(n=2).sampling(1, None)] == [None, None]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [USER]}])
def test_tokenize_wants_one_of_two(body: dict[str, Any]) -> None:
    refused(TokenizeRequest, body)
