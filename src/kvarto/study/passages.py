"""Real text, cut to equal lengths: passages for fidelity, paragraphs for haystacks."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvarto.errors import UsageError
from kvarto.models.texts import Document

_PARAGRAPH_CHARS = (60, 600)
_NOT_PROSE = re.compile(r"::=|>>>|[{}|]")


@dataclass(frozen=True)
class Passage:
    """`tokens` of one document, the last of which is only a target."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Passages:
    """What fidelity reads. `whole_documents`: each from a document of its own, so that they are independent."""

    passages: tuple[Passage, ...]
    whole_documents: bool


def cut_passages(documents: Sequence[Document], tokenizer: Any, *, count: int, tokens: int, seed: int) -> Passages:
    """`count` passages of `tokens` + 1 tokens, from as many documents if so many are long enough, else several from one document.

    Raises UsageError if the text yields fewer than two.
    """
    whole, further = [], []
    for document in documents:
        ids = token_ids(tokenizer, document.text)
        pieces = [tuple(ids[first : first + tokens + 1]) for first in range(0, len(ids) - tokens, tokens + 1)]
        whole += [Passage(document.name, piece) for piece in pieces[:1]]
        further += [Passage(f"{document.name}[{i}]", piece) for i, piece in enumerate(pieces[1:], start=1)]
    chosen = random.Random(seed).sample(whole, min(count, len(whole)))
    independent = len(chosen) == count
    if not independent:
        chosen += random.Random(seed).sample(further, min(count - len(chosen), len(further)))
    if len(chosen) < 2:
        expected = f"documents with at least two passages of {tokens + 1} tokens"
        raise UsageError("text", expected, f"{len(chosen)}", "give more or longer text with --text")
    return Passages(tuple(chosen), independent)


def paragraphs(documents: Sequence[Document]) -> list[str]:
    """The prose paragraphs of the documents, each on one line: what haystacks are made of. Raises UsageError if there are none."""
    shortest, longest = _PARAGRAPH_CHARS
    lines = (" ".join(block.split()) for document in documents for block in document.text.split("\n\n"))
    prose = [line for line in lines if shortest <= len(line) <= longest and not _NOT_PROSE.search(line)]
    if len(prose) < 2:
        expected = f"at least two paragraphs of {shortest} to {longest} characters"
        raise UsageError("text", expected, len(prose), "give more text with --text")
    return prose


def token_ids(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text of any length; `special`: with the tokens that the model expects at the beginning."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids
