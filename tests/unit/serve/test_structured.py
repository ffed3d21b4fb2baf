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
from kvarto.serve.chat import CLOSE, OPEN, Call, ToolCallReader
from kvarto.serve.protocol import Function
from kvarto.serve.structured import GrammarGuide, Structure, _most_optional

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


# Of a tokenizer that writes the marks of a call byte by byte, and of one that has a token for each.
MARKS = [(), (OPEN, CLOSE)]


def structure(*marks: str) -> Structure:
    return Structure(tokenizer(None, marks), VOCABULARY, {EOS})


def guide(marks: tuple[str, ...] = (), **options: Any) -> GrammarGuide:
    chosen: dict[str, Any] = {"answer": None, "tools": [], "required": False, "several": False} | options
    return structure(*marks).guide("response_format", **chosen)


def allows(guide: GrammarGuide, text: str, marks: tuple[str, ...] = ()) -> bool:
    """The whole text, and then an end."""
    for token in [*tokenizer(None, marks)(text)["input_ids"], EOS]:
        if guide.apply(torch.zeros(VOCABULARY))[token] == -torch.inf:
            return False
        guide.accept(token)
    return True


def babble(guide: GrammarGuide, seed: int, marks: tuple[str, ...] = (), most: int = 400) -> str:
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
    return str(tokenizer(None, marks).decode(tokens, skip_special_tokens=True))


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


@pytest.mark.parametrize("marks", MARKS)
def test_references_within_a_tool_s_parameters_hold(marks: tuple[str, ...]) -> None:
    tools = [Function(name="f", parameters=PERSON), Function(name="tree", parameters=NODE)]
    text = '<tool_call>\n{"name": "tree", "arguments": {"left": {"left": {}}}}\n</tool_call>'
    one = {"marks": marks, "tools": tools, "required": True}
    assert allows(guide(**one), text, marks)
    assert not allows(guide(**one), text.replace("left", "right"), marks)
    assert not allows(guide(**one), "no call", marks)
    assert not allows(guide(**one), f"{text}\n{text}", marks)
    assert allows(guide(**one, several=True), f"{text}\n{text}", marks)


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("seed", range(5))
def test_what_must_be_a_call_reads_as_one(seed: int, marks: tuple[str, ...]) -> None:
    tool = Function(name="f", parameters=PERSON)
    reader = ToolCallReader([tool])
    text = babble(guide(marks=marks, tools=[tool], required=True), seed, marks)
    events = [*reader.feed(text), *reader.finish()]
    assert [event.name for event in events if isinstance(event, Call)] == ["f"]
    assert len(events) == 1


@pytest.mark.parametrize("marks", MARKS)
def test_text_or_strict_calls(marks: tuple[str, ...]) -> None:
    tools = [Function(name="f", parameters=PERSON, strict=True)]
    call = '<tool_call>\n{"name": "f", "arguments": {"name": "A", "age": 1}}\n</tool_call>'
    for text in ("", "Hello <b>, no call", call, f"Well. {call}"):
        assert allows(guide(marks=marks, tools=tools), text, marks), text
    for text in (call.replace("age", "ag"), f"{call} and more", "Well. <tool_call>x"):
        assert not allows(guide(marks=marks, tools=tools), text, marks), text


def test_a_json_answer_or_a_call() -> None:
    tools = [Function(name="f", parameters={"type": "object"})]
    for text in ('{"name": "A", "age": 1}', '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'):
        assert allows(guide(answer=PERSON, tools=tools), text)
    assert not allows(guide(answer=PERSON, tools=tools), "text")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"}, {"type": "string", "pattern": "(?=a)b"}, {"$ref": "#/nowhere"}, {"not": {"type": "string"}},
        {"$ref": "#"}, {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_enforced_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="response_format: ") as caught:
        guide(answer=schema)
    assert "x-guidance" not in str(caught.value)


def many(count: int, required: int = 0) -> dict[str, Any]:
    names = [f"p{number}" for number in range(count)]
    properties = {name: {"type": "boolean"} for name in names}
    return {"type": "object", "properties": properties, "required": names[:required], "additionalProperties": False}


def test_objects_with_very_many_optional_properties() -> None:
    assert allows(guide(answer=many(400)), '{"p7": true, "p399": false}')
    guide(answer=many(2000, 1600))
    nested = {"type": "array", "items": {"anyOf": [{"type": "null"}, many(2000)]}}
    for schema in (many(2000), many(2000, 1599), nested, {"$defs": {"x": many(401)}, "$ref": "#/$defs/x"}):
        with pytest.raises(UsageError, match="^response_format: expected at most 400 properties that are not required"):
            guide(answer=schema)
    with pytest.raises(UsageError, match="^tools: expected at most 400 properties"):
        structure().guide(
            "tools", answer=None, tools=[Function(name="f", parameters=many(401))], required=True, several=False
        )
    data = {"properties": dict.fromkeys(map(str, range(2000)), 1)}
    assert allows(guide(answer={"enum": [data, 7]}), "7")
    deep: dict[str, Any] = {"const": 1}
    for _ in range(5000):
        deep = {"not": deep}
    assert _most_optional(deep) == 0


@pytest.mark.parametrize("options", [5, {}, {"lenient": True}, {"item_separator": " and "}])
def test_how_json_is_written_is_not_for_clients_to_say(options: Any) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": options}
    with pytest.raises(UsageError, match="response_format: expected a JSON schema without x-guidance"):
        guide(answer=schema)
    with pytest.raises(UsageError, match="without x-guidance"):
        guide(tools=[Function(name="f", parameters=schema)])


def test_a_model_without_an_end_cannot_be_guided() -> None:
    with pytest.raises(Unsupported, match="no token that ends a text"):
        Structure(tokenizer(), VOCABULARY, ()).guide(
            "response_format", answer=PERSON, tools=[], required=False, several=False
        )


def test_a_guide_that_gives_up_ends_the_text_and_says_so() -> None:
    broken = guide(answer=PERSON)
    broken.accept(tokenizer()("x")["input_ids"][0])  # what it had forbidden
    allowed = torch.isfinite(broken.apply(torch.zeros(VOCABULARY))).nonzero().flatten().tolist()
    assert allowed == [EOS]
    assert broken.failure
