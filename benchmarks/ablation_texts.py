"""What an ablation reads, as tokens in one .npz: then the machine that runs it needs neither texts nor a tokenizer.

documents    int64 [documents, T]      scored
calibration  int64 [documents, T]      of other documents, for moments
needles      prompts with their answers, answer_tokens of each; of one haystack each in a row
extractions  JSON prompts; sentence and expected object of each; tokens that end a line, all tokens as text
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvarto.errors import UsageError
from kvarto.files import write_whole

Row = tuple[int, ...]
_ROWS = ("documents", "calibration", "needles", "extractions", "drafts")


@dataclass(frozen=True)
class Inputs:
    """See the module. `about`: sources and names, for the record."""

    documents: tuple[Row, ...]
    calibration: tuple[Row, ...]
    about: dict[str, Any]
    needles: tuple[Row, ...] = ()
    answer_tokens: tuple[int, ...] = ()
    extractions: tuple[Row, ...] = ()
    drafts: tuple[Row, ...] = ()
    orders: tuple[dict[str, Any], ...] = ()
    line_ends: frozenset[int] = frozenset()
    vocabulary: tuple[str, ...] = field(default=(), repr=False)

    def text(self, tokens: Sequence[int]) -> str:
        """The first line of what a model wrote. One token may hold its last characters and its end; an end without a newline is that of the text."""
        words = ((token, self.vocabulary[token]) for token in tokens)
        return "".join(word for token, word in words if "\n" in word or token not in self.line_ends).partition("\n")[0]


@dataclass(frozen=True)
class Wanted:
    """How much of what: `text` and `calibration_text` as `kvarto study --text` takes them."""

    text: str = "builtin"
    calibration_text: str = "builtin"
    documents: int = 6
    document_tokens: int = 1536
    calibration_documents: int = 6
    haystacks: int = 4
    needles: int = 6
    haystack_tokens: int = 1024
    extractions: int = 24
    seed: int = 0


def build(tokenizer: Any, wanted: Wanted) -> Inputs:
    """From texts of this machine. Needs all of `kvarto[engine]`. Raises a KvartoError for texts that are too short."""
    from kvarto.models.texts import texts
    from kvarto.study.json_check import build_extractions
    from kvarto.study.needles import build_haystack
    from kvarto.study.passages import cut_passages, paragraphs, token_ids

    sizes = {"tokens": wanted.document_tokens - 1, "seed": wanted.seed}
    read = texts(wanted.text)
    scored = cut_passages(read, tokenizer, count=wanted.documents, **sizes)
    taken = {passage.name.partition("[")[0] for passage in scored.passages}
    others = [document for document in texts(wanted.calibration_text) if document.name not in taken]
    held_out = cut_passages(others, tokenizer, count=wanted.calibration_documents, **sizes)
    haystacks = [
        build_haystack(tokenizer, paragraphs(read), length_tokens=wanted.haystack_tokens, needles=wanted.needles, seed=wanted.seed + i)
        for i in range(wanted.haystacks)
    ]  # fmt: skip
    extractions = build_extractions(tokenizer, count=wanted.extractions, seed=wanted.seed)
    vocabulary = tuple(tokenizer.batch_decode([[token] for token in range(len(tokenizer))]))
    return Inputs(
        documents=tuple(passage.tokens for passage in scored.passages),
        calibration=tuple(passage.tokens for passage in held_out.passages),
        about={
            "text": wanted.text, "calibration_text": wanted.calibration_text, "independent_documents": scored.whole_documents,
            "documents": [passage.name for passage in scored.passages], "calibration": [passage.name for passage in held_out.passages],
        },
        needles=tuple((*each.prefix, *ending) for each in haystacks for ending in each.endings),
        answer_tokens=tuple(tail for each in haystacks for tail in each.answer_tokens),
        extractions=tuple(each.tokens for each in extractions),
        drafts=tuple(tuple(token_ids(tokenizer, f" {json.dumps(each.expected)}\n", special=False)) for each in extractions),
        orders=tuple({"sentence": each.sentence, "expected": each.expected} for each in extractions),
        line_ends=frozenset(i for i, text in enumerate(vocabulary) if "\n" in text or i == tokenizer.eos_token_id),
        vocabulary=vocabulary,
    )  # fmt: skip


def save(inputs: Inputs, path: Path) -> None:
    """Whole or not at all; no pickles."""
    rows = {name: getattr(inputs, name) for name in _ROWS}
    arrays: dict[str, Any] = {}
    for name, of_name in rows.items():
        arrays[name] = np.array([token for row in of_name for token in row], np.int32)
        arrays[f"{name}_lengths"] = np.array([len(row) for row in of_name], np.int32)
    rest = {
        "about": inputs.about, "answer_tokens": inputs.answer_tokens, "orders": inputs.orders,
        "line_ends": sorted(inputs.line_ends), "vocabulary": inputs.vocabulary,
    }  # fmt: skip
    arrays["rest"] = np.frombuffer(json.dumps(rest).encode(), np.uint8)
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    write_whole(path, out.getvalue())


def open_inputs(path: Path) -> Inputs:
    """What `save` wrote. Raises UsageError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            rest = json.loads(bytes(file["rest"]))
            rows = {name: _rows(file[name], file[f"{name}_lengths"]) for name in _ROWS}
    except (OSError, ValueError, KeyError) as error:
        raise UsageError("--inputs", "a file that --tokenize wrote", f"{path} ({error})") from None
    return Inputs(
        about=rest["about"], answer_tokens=tuple(rest["answer_tokens"]), orders=tuple(rest["orders"]),
        line_ends=frozenset(rest["line_ends"]), vocabulary=tuple(rest["vocabulary"]), **rows,
    )  # fmt: skip


def _rows(tokens: Any, lengths: Any) -> tuple[Row, ...]:
    ends = np.cumsum(lengths)
    return tuple(tuple(map(int, tokens[end - length : end])) for end, length in zip(ends, lengths, strict=True))
