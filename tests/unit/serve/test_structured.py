"""A guide lets through what the schema allows, and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")

import torch
from bytes_tokenizer import EOS, tokenizer

from kvarto.errors import Unsupported, UsageError
from kvarto.serve.chat import Call, ToolCallReader
from kvarto.serve.protocol import Function
from kvarto.serve.structured import GrammarGuide, Structure, grammar

VOCABULARY = 300  # wider than the tokenizer, as in many models
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NODE = {
    "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}}, "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip


def structure() -> Structure:
    return Structure(tokenizer(), VOCABULARY, {EOS})


def guide(**options: Any) -> GrammarGuide:
    chosen: dict[str, Any] = {"answer": None, "tools": [], "required": False, "several": False} | options
    return structure().guide(grammar(**chosen), "response_format")


def allows(guide: GrammarGuide, text: str) -> bool:
    """The whole text, and then an end."""
    for token in [*tokenizer()(text)["input_ids"], EOS]:
        if guide.apply(torch.zeros(VOCABULARY))[token] == -torch.inf:
            return False
        guide.accept(token)
    return True


def babble(guide: GrammarGuide, seed: int, most: int = 400) -> str:
    """What a model that knows nothing writes."""
    tokens: list[int] = []
    generator = random.Random(seed)
    while len(tokens) < most:
        allowed = torch.isfinite(guide.apply(torch.zeros(VOCABULARY))).nonzero().flatten().tolist()
        token = EOS if EOS in allowed else generator.choice(allowed)
        if token == EOS:
            break
        guide.accept(token)
        tokens.append(token)
    return str(tokenizer().decode(tokens))


@pytest.mark.parametrize("seed", range(5))
def test_any_text_under_a_schema_is_valid(seed: int) -> None:
    data = json.loads(babble(guide(answer=PERSON), seed))
    jsonschema.validate(data, PERSON)


def test_what_a_schema_allows() -> None:
    assert allows(guide(answer=PERSON), '{"name": "Ada", "age": 36}')
    assert not allows(guide(answer=PERSON), '{"name": "Ada"}')
    assert not allows(guide(answer=PERSON), 'Sure! {"name": "Ada", "age": 36}')
    assert allows(guide(answer={"type": "object"}), '{"anything": [1, null]}')
    assert not allows(guide(answer={"type": "object"}), "[1]")


def test_tokens_beyond_the_tokenizer_are_forbidden() -> None:
    assert torch.isinf(guide(answer=PERSON).apply(torch.zeros(VOCABULARY))[EOS + 1 :]).all()


def test_references_within_a_tool_s_parameters_hold() -> None:
    tools = [Function(name="f", parameters=PERSON), Function(name="tree", parameters=NODE)]
    text = '<tool_call>\n{"name": "tree", "arguments": {"left": {"left": {}}}}\n</tool_call>'
    assert allows(guide(tools=tools, required=True), text)
    assert not allows(guide(tools=tools, required=True), text.replace("left", "right"))
    assert not allows(guide(tools=tools, required=True), "no call")
    assert not allows(guide(tools=tools, required=True), f"{text}\n{text}")
    assert allows(guide(tools=tools, required=True, several=True), f"{text}\n{text}")


@pytest.mark.parametrize("seed", range(5))
def test_what_must_be_a_call_reads_as_one(seed: int) -> None:
    tool = Function(name="f", parameters=PERSON)
    reader = ToolCallReader(["f"])
    events = [*reader.feed(babble(guide(tools=[tool], required=True), seed)), *reader.finish()]
    assert [event.name for event in events if isinstance(event, Call)] == ["f"]
    assert len(events) == 1


def test_text_or_strict_calls() -> None:
    tools = [Function(name="f", parameters=PERSON, strict=True)]
    call = '<tool_call>\n{"name": "f", "arguments": {"name": "A", "age": 1}}\n</tool_call>'
    for text in ("Hello <b>, no call", call, f"Well. {call}"):
        assert allows(guide(tools=tools), text), text
    for text in (call.replace("age", "ag"), f"{call} and more", "Well. <tool_call>x"):
        assert not allows(guide(tools=tools), text), text


def test_a_json_answer_or_a_call() -> None:
    tools = [Function(name="f", parameters={"type": "object"})]
    for text in ('{"name": "A", "age": 1}', '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'):
        assert allows(guide(answer=PERSON, tools=tools), text)
    assert not allows(guide(answer=PERSON, tools=tools), "text")


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"type": "string", "pattern": "(?=a)b"}, {"$ref": "#/nowhere"}, {"not": {"type": "string"}}],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="response_format: ") as caught:
        guide(answer=schema)
    assert "x-guidance" not in str(caught.value)


def test_a_model_without_an_end_cannot_be_guided() -> None:
    with pytest.raises(Unsupported, match="no token that ends a text"):
        Structure(tokenizer(), VOCABULARY, ()).guide("start: /a/", "response_format")


def test_a_guide_that_gives_up_ends_the_text_and_says_so() -> None:
    broken = guide(answer=PERSON)
    broken.accept(tokenizer()("x")["input_ids"][0])  # what it had forbidden
    allowed = torch.isfinite(broken.apply(torch.zeros(VOCABULARY))).nonzero().flatten().tolist()
    assert allowed == [EOS]
    assert broken.failure
