"""Parts of a stream have OpenAI's shapes, and together they are the whole answer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from bytes_tokenizer import EOS, tokenizer
from kvarto.engine.loop import Delta
from kvarto.engine.request import Finish
from kvarto.engine.sampling import Choice
from kvarto.serve.protocol import Function
from kvarto.serve.shapes import ChatShape, CompletionShape, Names, Prompt, Shape, usage


def token(text: str) -> int:
    (number,) = tokenizer()(text)["input_ids"]
    return int(number)


def letter(text: str, finish: Finish | None = None) -> Delta:
    choice = Choice(token(text), -0.5, ((token(text), -0.5), (token("z"), -2.0)))
    return Delta(text, (choice,), finish)


END = Delta("", (Choice(EOS, -0.1, ((EOS, -0.1),)),), Finish.STOP)
NAMES = Names(tokenizer(), {EOS})


def parts(shape: Shape, *deltas: Delta) -> list[dict[str, Any]]:
    return [*shape.begin(), *(part for delta in deltas for part in shape.feed(delta))]


def test_a_completion() -> None:
    shape = CompletionShape(2, NAMES)
    shown = parts(shape, letter("a"), letter("b"), END)
    assert [part["text"] for part in shown] == ["a", "b", ""]
    assert [part["finish_reason"] for part in shown] == [None, None, "stop"]
    assert shape.whole(shown) == {
        "index": 2,
        "text": "ab",
        "finish_reason": "stop",
        "logprobs": {
            "tokens": ["a", "b"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"a": -0.5, "z": -2.0}, {"b": -0.5, "z": -2.0}],
            "text_offset": [0, 1],
        },
    }


SCORED = (
    Choice(token("b"), -1.0, ((token("z"), -0.4), (token("b"), -1.0), (token("y"), -3.0)), rank=2),
    Choice(token("c"), -9.0, ((token("z"), -0.1), (token("y"), -2.0), (token("x"), -4.0)), rank=40),
)


def test_a_prompt_that_is_repeated() -> None:
    """One entry for each token, the end's too if names know of none; the second of two that look alike is not shown."""
    shape = CompletionShape(0, Names(tokenizer(), ()), Prompt([token(letter) for letter in "abc"], "abc", logprobs=2))
    end = Delta("", (Choice(EOS, -0.1, ((EOS, -0.1),)),), Finish.STOP, scored=SCORED)
    shown = parts(shape, end)
    assert [(part["text"], part["finish_reason"]) for part in shown] == [("abc", "stop")]
    assert shape.whole(shown)["logprobs"] == {
        "tokens": ["a", "b", "c", "<end>"],
        "token_logprobs": [None, -1.0, -9.0, -0.1],
        "top_logprobs": [None, {"z": -0.4, "b": -1.0}, {"z": -0.1, "y": -2.0}, {"<end>": -0.1}],
        "text_offset": [0, 1, 2, 3],
    }
    halves = [tokenizer()(letter)["input_ids"][0] for letter in "éж"]
    (part,) = CompletionShape(0, NAMES).feed(
        Delta("a", (Choice(token("a"), -2.0, ((halves[0], -0.5), (halves[1], -0.7))),))
    )
    assert part["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]


def test_what_a_tokenizer_adds_to_a_prompt_is_no_part_of_its_text() -> None:
    prompt = Prompt([EOS, token("b"), token("c")], "bc", offsets=[0, 0, 1], logprobs=0)
    shape = CompletionShape(0, NAMES, prompt)
    shown = parts(shape, Delta("d", (Choice(token("d"), -0.5),), scored=SCORED), letter("e"), END)
    assert (shown[0]["text"], shown[0]["logprobs"]["tokens"]) == ("bcd", ["<end>", "b", "c", "d"])
    assert shape.whole(shown)["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]


def test_a_prompt_that_is_repeated_without_log_probabilities_in_a_stream() -> None:
    shape = CompletionShape(0, NAMES, Prompt([1, 2], "abc"))
    shown = parts(shape, letter("d"), END)
    assert [part["text"] for part in shown] == ["abcd", ""]
    assert shown[0]["logprobs"]["tokens"] == ["d"]


def test_log_probabilities_of_a_prompt_as_vllm_shows_them() -> None:
    b, c, y, z = (str(token(letter)) for letter in "bcyz")
    expected = [
        None,
        {
            b: {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            z: {"logprob": -0.4, "rank": 1, "decoded_token": "z"},
        },
        {
            c: {"logprob": -9.0, "rank": 40, "decoded_token": "c"},
            z: {"logprob": -0.1, "rank": 1, "decoded_token": "z"},
            y: {"logprob": -2.0, "rank": 2, "decoded_token": "y"},
        },
    ]
    prompt, delta = Prompt([1, 2, 3], scores=2), Delta("", (), Finish.LENGTH, scored=SCORED)
    completion = CompletionShape(0, NAMES, prompt)
    whole = completion.whole(parts(completion, delta))
    assert whole == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "prompt_logprobs": expected}
    assert completion.beside() == {}
    chat = ChatShape(0, NAMES, (), prompt)
    assert "prompt_logprobs" not in chat.whole(parts(chat, delta))
    assert chat.beside() == {"prompt_logprobs": expected}


def test_a_chat() -> None:
    shape = ChatShape(0, NAMES, ())
    shown = parts(shape, letter("a"), letter("b", Finish.LENGTH))
    assert shown[0]["delta"] == {"role": "assistant", "content": ""}
    assert [part["delta"] for part in shown[1:]] == [{"content": "a"}, {"content": "b"}, {}]
    assert [part["finish_reason"] for part in shown] == [None, None, None, "length"]
    whole = shape.whole(shown)
    assert whole["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    entries = whole["logprobs"]["content"]
    assert entries[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": t, "logprob": v, "bytes": list(t.encode())} for t, v in (("a", -0.5), ("z", -2.0))],
    }
    assert len(entries) == 2


def test_log_probabilities_of_text_that_is_held_back_are_not_lost() -> None:
    shape = ChatShape(0, NAMES, ())
    shown = parts(shape, Delta("", (Choice(token("a"), -1.0),)), END)
    assert [part["delta"] for part in shown[1:]] == [{"content": ""}, {}]
    assert len(shape.whole(shown)["logprobs"]["content"]) == 1


def test_half_a_character_has_no_bytes() -> None:
    first_half = tokenizer()("é")["input_ids"][0]
    (part,) = ChatShape(0, NAMES, ()).feed(Delta("", (Choice(first_half, -1.0),)))
    assert part["logprobs"]["content"][0] | {"top_logprobs": []} == {
        "token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": [],
    }  # fmt: skip


def test_without_log_probabilities() -> None:
    shape = ChatShape(0, NAMES, ())
    shown = parts(shape, Delta("", (Choice(token("a")),)), Delta("ab", (Choice(token("b")),)), END)
    assert len(shown) == 3
    assert shape.whole(shown)["logprobs"] is None


def test_calls() -> None:
    shape = ChatShape(0, NAMES, [Function(name="f")])
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    shown = parts(shape, Delta(call[:20]), Delta(call[20:]), Delta(call), END)
    assert [part["delta"]["tool_calls"][0]["index"] for part in shown if "tool_calls" in part["delta"]] == [0, 1]
    whole = shape.whole(shown)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    first, second = whole["message"]["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert first["id"] != second["id"]
    assert first["type"] == "function"
    assert "index" not in first


def test_usage() -> None:
    assert usage(10, 4, 3) == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
