"""Text as it comes: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarto.engine.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def feed(text: str, *stop: str) -> tuple[str, list[str], bool]:
    stream = TextStream(Bytes(), stop)
    parts = [stream.feed(byte) for byte in text.encode()]
    stopped = stream.stopped
    return "".join(parts) + stream.finish(), parts, stopped


@given(text=st.text())
def test_all_of_a_text_leaves_in_whole_characters(text: str) -> None:
    whole, parts, stopped = feed(text)
    assert whole == text
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text
    assert not stopped


@given(text=st.text("abc"), stop=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    whole, parts, stopped = feed(text, *stop)
    ends = [at for end in range(len(text) + 1) for s in stop if (at := text[:end].find(s)) >= 0]
    first_end = next((end for end in range(len(text) + 1) if any(s in text[:end] for s in stop)), None)
    if first_end is None:
        assert not stopped
        assert whole == text
        return
    expected = text[: min(at for s in stop if (at := text[:first_end].find(s)) >= 0)]
    assert ends
    assert (whole, stopped) == (expected, True)
    assert "".join(parts) == expected, "something left before it was sure"


@pytest.mark.parametrize(("text", "held"), [("abcST", "ST"), ("abcS", "S"), ("abcSTOX", "")])
def test_what_may_begin_a_stop_string_is_held_back(text: str, held: str) -> None:
    stream = TextStream(Bytes(), ["STOP"])
    assert "".join(stream.feed(byte) for byte in text.encode()) == text[: len(text) - len(held)]
    assert stream.finish() == held


def test_an_unfinished_character_leaves_at_the_end() -> None:
    stream = TextStream(Bytes())
    assert [stream.feed(byte) for byte in "é".encode()[:1]] == [""]
    assert stream.finish() == "\ufffd"
