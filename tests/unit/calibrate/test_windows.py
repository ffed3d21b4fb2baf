from __future__ import annotations

from typing import Any

import pytest

from kvarto.calibrate.windows import cut_windows, gather, split
from kvarto.errors import UsageError
from kvarto.models.texts import Document


class Letters:
    """A token a letter, and 1 before every text."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}


DOCUMENTS = [Document("a", "a" * 1000), Document("short", "s" * 40), Document("b", "b" * 300)]


def test_windows_begin_as_texts_do_and_keep_documents_apart() -> None:
    windows = cut_windows(DOCUMENTS, Letters(), tokens=10_000, window_tokens=201, least_tokens=1)
    assert [(window.document, len(window.tokens)) for window in windows] == [
        ("a", 201), ("b", 201), ("a", 201), ("b", 101), ("a", 201), ("a", 201), ("a", 201),
    ]  # fmt: skip
    assert all(window.tokens[0] == 1 and set(window.tokens[1:]) == {ord(window.document)} for window in windows)
    assert sum(len(window.tokens) - 1 for window in windows) == 1300


def test_as_many_tokens_are_counted_as_asked_for() -> None:
    windows = cut_windows(DOCUMENTS, Letters(), tokens=300, window_tokens=201, least_tokens=1)
    assert [window.counted for window in windows] == [137, 137, 26]


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(
        UsageError, match=r"at least 2,048 tokens behind first pages, got 859; give more text .*--little-text"
    ):
        cut_windows(DOCUMENTS, Letters(), tokens=10_000, window_tokens=201)
    with pytest.raises(
        UsageError, match=r"tokens: expected at least 2,048, got 600; ask for more, or for --little-text"
    ):
        cut_windows(DOCUMENTS, Letters(), tokens=600, window_tokens=201)
    with pytest.raises(UsageError, match="a document of more than 64 tokens"):
        cut_windows(DOCUMENTS[1:2], Letters(), tokens=10, window_tokens=201, least_tokens=0)
    with pytest.raises(UsageError, match="window_tokens: expected at least 128"):
        cut_windows(DOCUMENTS, Letters(), tokens=10, window_tokens=100)


def test_what_is_held_out_is_not_calibrated_on() -> None:
    many = [Document(str(i), "x") for i in range(9)]
    kept, held = split(many)
    assert [document.name for document in held] == ["3", "7"]
    assert sorted([*kept, *held], key=lambda document: document.name) == many
    kept, held = split(DOCUMENTS[:1])
    assert (len(kept[0].text), len(held[0].text)) == (750, 250)


def test_documents_of_several_sources_have_names_of_their_own(tmp_path: Any) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text(folder)
    found = gather([str(tmp_path / "x"), str(tmp_path / "y")])
    assert len({document.name for document in found}) == 2
