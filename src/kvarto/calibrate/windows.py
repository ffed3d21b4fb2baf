"""Real text as windows of tokens, each a sequence of its own. No torch.

A window is cut from one document, so no token sees another document. Documents come in their order; those for calibration and those held out have
none in common (`split`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvarto.errors import UsageError
from kvarto.layout import PAGE_TOKENS
from kvarto.models.texts import Document, texts

LEAST_TOKENS = 2048


@dataclass(frozen=True)
class Window:
    """Tokens of a document, from its beginning or from where the window before ended."""

    document: str
    tokens: tuple[int, ...]

    @property
    def counted(self) -> int:
        """Tokens behind the first page."""
        return len(self.tokens) - PAGE_TOKENS


def cut_windows(
    documents: Sequence[Document], tokenizer: Any, *, tokens: int, window_tokens: int, least_tokens: int = LEAST_TOKENS
) -> list[Window]:
    """Windows of at most `window_tokens` with `tokens` counted tokens together, or as many as there are.

    All begin as a text does, with the tokens that the tokenizer puts first. Rounds over the documents: the first window of each, then the second,
    so that a short record has seen many of them. Raises UsageError for fewer than `least_tokens`: statistics of so little would be noise.
    """
    if window_tokens < 2 * PAGE_TOKENS:
        raise UsageError(
            "window_tokens", f"at least {2 * PAGE_TOKENS}, of which the first page is not counted", window_tokens
        )
    if tokens < max(least_tokens, 1):
        raise UsageError("tokens", f"at least {max(least_tokens, 1):,}", tokens, "ask for more, or for --little-text")
    windows: list[Window] = []
    counted = 0
    for window in _rounds(documents, tokenizer, window_tokens):
        over = counted + window.counted - tokens
        if over > 0:
            window = Window(window.document, window.tokens[: len(window.tokens) - over])
        windows.append(window)
        counted += window.counted
        if counted >= tokens:
            break
    if counted < least_tokens:
        remedy = "give more text with --text, or --little-text to calibrate on it all the same"
        raise UsageError("text", f"at least {least_tokens:,} tokens behind first pages", f"{counted:,}", remedy)
    if not windows:
        raise UsageError("text", f"a document of more than {PAGE_TOKENS} tokens", "none", "give more text with --text")
    return windows


def _rounds(documents: Sequence[Document], tokenizer: Any, window_tokens: int) -> Iterator[Window]:
    """Documents are tokenized once, when their turn comes."""
    first = tokenizer("", verbose=False)["input_ids"]
    left: list[tuple[str, list[int]]] = []
    for document in documents:
        ids = list(tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"])
        window, rest = _window(document.name, first, ids, window_tokens)
        if window:
            yield window
            left.append((document.name, rest))
    while left:
        again: list[tuple[str, list[int]]] = []
        for name, ids in left:
            window, rest = _window(name, first, ids, window_tokens)
            if window:
                yield window
                again.append((name, rest))
        left = again


def _window(name: str, first: list[int], ids: list[int], window_tokens: int) -> tuple[Window | None, list[int]]:
    """The next window of a document, if it has any counted token, and what is left."""
    taken = ids[: window_tokens - len(first)]
    tokens = (*first, *taken)
    return (Window(name, tokens) if len(tokens) > PAGE_TOKENS else None), ids[len(taken) :]


def split(documents: Sequence[Document], *, held_out: int = 4) -> tuple[list[Document], list[Document]]:
    """(What to calibrate on, what is held out): every `held_out`-th document, or, of fewer documents, the last part of each in characters."""
    if len(documents) >= held_out:
        kept = [document for i, document in enumerate(documents) if i % held_out != held_out - 1]
        return kept, [document for i, document in enumerate(documents) if i % held_out == held_out - 1]
    cuts = [len(document.text) * (held_out - 1) // held_out for document in documents]
    begun = [Document(document.name, document.text[:cut]) for document, cut in zip(documents, cuts, strict=True)]
    return begun, [
        Document(f"{document.name} (end)", document.text[cut:]) for document, cut in zip(documents, cuts, strict=True)
    ]


def gather(sources: Sequence[str]) -> list[Document]:
    """The documents of several sources (`models.texts`), with names of their own."""
    found = [(source, document) for source in sources for document in texts(source)]
    if len(sources) == 1:
        return [document for _, document in found]
    return [Document(f"{source}: {document.name}", document.text) for source, document in found]
