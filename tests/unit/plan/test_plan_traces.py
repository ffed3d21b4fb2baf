"""Traces of every kind, and the replay against a cache that is played through block by block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarto.errors import UsageError
from kvarto.plan.replay import replay
from kvarto.plan.trace import Cut, Prompt, Trace, read_trace

_SMALL = Cut(hash_tokens=4, text_tokens=4, chars_per_token=1.0)


def read(tmp_path: Path, *lines: Any, cut: Cut = _SMALL) -> Trace:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_trace(path, cut)


def lru_saved_tokens(prompts: Sequence[Prompt], block_tokens: int, capacity_blocks: int) -> int:
    """The same for one size, slow and plain."""
    held: dict[int, None] = {}
    saved = 0
    for prompt in prompts:
        for block in prompt.blocks[: (prompt.tokens - 1) // block_tokens]:
            if block not in held:
                break
            saved += block_tokens
        for block in reversed(prompt.blocks):
            held.pop(block, None)
            held[block] = None
        while len(held) > capacity_blocks:
            held.pop(next(iter(held)))
    return saved


# A prompt is a path in a tree: equal ids stand behind equal ids.
_PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


@given(_PATHS, st.integers(1, 4), st.data())
def test_one_pass_answers_for_every_size(paths: list[list[int]], block_tokens: int, data: st.DataObject) -> None:
    ids: dict[tuple[int, ...], int] = {}
    prompts = []
    for path in paths:
        blocks = tuple(ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path)))
        tokens = data.draw(st.integers((len(blocks) - 1) * block_tokens + 1, len(blocks) * block_tokens))
        prompts.append(Prompt(blocks, tokens))
    replayed = replay(Trace("made", "hash ids", block_tokens, tuple(prompts), False))
    for capacity_blocks in range(len(ids) + 2):
        expected = lru_saved_tokens(prompts, block_tokens, capacity_blocks)
        assert replayed.saved_tokens(capacity_blocks * block_tokens + block_tokens - 1) == expected
    assert replayed.saved_tokens(replayed.most_tokens) == replayed.saved_tokens(1 << 40)


def test_mooncake_lines(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        {"timestamp": 20, "input_length": 10, "output_length": 3, "hash_ids": [1, 2, 9]},
        {"timestamp": 10, "input_length": 12, "output_length": 3, "hash_ids": [1, 2, 3]},
    )
    assert [prompt.blocks for prompt in trace.prompts] == [(1, 2, 3), (1, 2, 9)]
    assert (trace.tokens, trace.block_tokens, trace.estimated) == (22, 4, False)
    assert replay(trace).saved_tokens(1000) == 8


def test_the_last_token_is_always_computed(tmp_path: Path) -> None:
    same = {"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]}
    assert replay(read(tmp_path, same, same)).saved_tokens(1000) == 4


@pytest.mark.parametrize("key", ["text_input", "messages", "payload"])
def test_aiperf_lines_with_text(key: str, tmp_path: Path) -> None:
    def line(text: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {
            key: {"text_input": text, "messages": messages, "payload": {"messages": messages}}[key],
            "output_length": 5,
        }

    trace = read(tmp_path, line("a" * 20 + "b" * 20), line("a" * 20 + "c" * 20))
    assert trace.estimated
    assert 12 <= replay(trace).saved_tokens(1000) <= 28


def test_sharegpt_turns_extend_each_other(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "x" * 40},
        {"from": "gpt", "value": "y" * 8},
        {"from": "human", "value": "z" * 8},
        {"from": "gpt", "value": "w"},
    ]
    trace = read(tmp_path, json.dumps([{"id": 1, "conversations": turns}], indent=1))
    first, second = trace.prompts
    assert first.output_tokens == 8
    assert second.blocks[: len(first.blocks) - 1] == first.blocks[:-1]
    assert replay(trace).saved_tokens(1000) == 4 * (len(first.blocks) - 1)


def test_spans_of_opentelemetry(tmp_path: Path) -> None:
    messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "q" * 40}]}])
    plain = {
        "name": "chat",
        "start_time_unix_nano": 5,
        "attributes": {"gen_ai.input.messages": messages, "gen_ai.usage.output_tokens": 7},
    }
    attributes = [
        {"key": "gen_ai.input.messages", "value": {"stringValue": messages}},
        {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "7"}},
    ]
    otlp = {
        "resourceSpans": [
            {
                "scopeSpans": [
                    {
                        "spans": [
                            {"name": "chat", "startTimeUnixNano": "9", "attributes": attributes},
                            {"name": "db", "attributes": []},
                        ]
                    }
                ]
            }
        ]
    }
    for text in (json.dumps(otlp), json.dumps(otlp, indent=2), json.dumps(otlp).replace('Spans": [', 'Spans": [\n', 1)):
        assert [prompt.output_tokens for prompt in read(tmp_path, text).prompts] == [7]
    trace = read(tmp_path, plain, otlp)
    assert [prompt.output_tokens for prompt in trace.prompts] == [7, 7]
    assert trace.prompts[0].blocks == trace.prompts[1].blocks
    assert trace.kind == "GenAI spans"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 1 byte to .*, got an empty file"),
        ("<html>", "got HTML or XML"),
        ("nonsense", "expected JSON"),
        ("[]", "expected requests, got none"),
        ('{"input_length": 3}', "expected hash_ids or text"),
        ('{"a": 1}\n{"a": 2}', ":1: expected a request"),
        ("[1]", "entry 1: expected an object"),
        ('{"input_length": -1, "hash_ids": [1]}\n{}', ":1: input_length: expected a whole number"),
        (
            '{"input_length": 100, "hash_ids": [1]}\n{}',
            ":1: expected 1 to 4 tokens for 1 hash_ids of 4, got input_length 100; say --trace-block",
        ),
        ('{"input_length": 3, "hash_ids": ["x"]}\n{}', ":1: hash_ids: expected a list of whole numbers"),
        ('{"input_length": 3, "hash_ids": [1]}\n{oops', ":2: expected JSON"),
        ('{"timestamp": "now", "text_input": "a"}', "timestamp: expected milliseconds"),
        ('{"input_length": 3, "hash_ids": [1]}\n{"text_input": "a"}', "hash_ids in each request, or in none"),
        ('[{"conversations": 3}]', "conversations: expected a list of turns"),
    ],
)
def test_what_is_no_trace_gets_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text)


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a file|expected 1 byte"):
        read_trace(tmp_path, Cut())
