"""Answers that must be JSON of a schema, or calls of given functions: grammars for llguidance, and its matcher as the engine's Guide."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from kvarto.errors import Unsupported, UsageError
from kvarto.serve.chat import CLOSE, OPEN
from kvarto.serve.protocol import Function

if TYPE_CHECKING:
    from torch import Tensor

# llguidance's own key: `lenient` and separators of a client's would break the promise that what is written is valid.
_OPTIONS = "x-guidance"
# As json.dumps writes and models were trained; with free white space a small model may write nothing else.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# llguidance looks at 2,000 items at once, and each property that need not be there has four until it is written. More would be slow:
# with 2,000 properties a step takes 0.7 s, in which everybody waits.
_MOST_OPTIONAL = 400
_DATA = ("const", "default", "enum", "examples")  # what stands there is no schema
_TEXT = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{OPEN}(.|\n)*/"
_LISTING = re.compile(r"^( *\d+ \| |<)", re.MULTILINE)  # llguidance adds the grammar, which is ours, to what it says


class Structure:
    """What a tokenizer can be held to.

    tokenizer    one of transformers'
    vocabulary   width of the model's logits
    eos_tokens   what ends a text
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos_tokens: Collection[int]) -> None:
        self._eos, self.reason = sorted(eos_tokens), ""
        if not self._eos:
            self.reason = "its generation config names no token that ends a text"
            return
        try:
            self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=self._eos)
        except ValueError as error:
            self.reason = str(error)
            return
        self._marks = [self._written(mark) for mark in (OPEN, CLOSE)]

    def guide(
        self, field: str, *, answer: dict[str, Any] | None, tools: Sequence[Function], required: bool, several: bool
    ) -> GrammarGuide:
        """One for one request. Raises UsageError about `field` if a schema cannot be enforced, Unsupported if the model cannot be guided.

        answer     the schema of an answer that calls nothing, None: any text
        tools      what may be called
        required   something must be called
        several    more than one call may be made
        """
        if self.reason:
            raise Unsupported(f"this model's answers cannot be held to a schema: {self.reason}")
        rules, begins = list[str](), list[str]()
        if tools:
            begins.append("calls")
            rules += self._call_rules(tools, talk=not required and answer is None, several=several)
        if not required:
            begins.append("TEXT" if answer is None else "answer")
            rules.append(_TEXT if answer is None else f"answer: {_json(answer)}")
        if any(_OPTIONS in schema for schema in (answer or {}, *(tool.parameters for tool in tools))):
            raise UsageError(
                field, f"a JSON schema without {_OPTIONS}: how JSON is written is not the client's to say", _OPTIONS
            )
        if (most := max(map(_most_optional, (answer, *(tool.parameters for tool in tools))))) > _MOST_OPTIONAL:
            got = f"an object with {most} of them"
            raise UsageError(field, f"at most {_MOST_OPTIONAL} properties that are not required", got, "require some")
        matcher = llguidance.LLMatcher(self._tokens, "\n".join([f"start: {' | '.join(begins)}", *rules]), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a schema that refers to nothing but itself fails here
        if matcher.is_error():
            reason = _LISTING.split(matcher.get_error(), 1)[0]
            raise UsageError(field, "a JSON schema that can be enforced", " ".join(reason.split()))
        return GrammarGuide(matcher, self._eos, field)

    def _call_rules(self, tools: Sequence[Function], *, talk: bool, several: bool) -> Iterator[str]:
        """`calls`: one or several, perhaps with text before the first. Each function has a rule of its own, so that references in its schema hold."""
        opening, closing = self._marks
        more = f' ("\\n" {opening} call)*' if several else ""
        yield f"calls: {'talk' if talk else opening} call{more}"
        if talk and self._is_token(OPEN):
            yield f"talk: TEXT {opening}"
        elif talk:  # lazy, to notice the mark where it ends
            yield f"talk[lazy]: /(.|\\n)*/ {opening}"
        yield "call: " + " | ".join(f"call{i}" for i in range(len(tools)))
        for i, tool in enumerate(tools):
            begin = json.dumps(f'\n{{"name": "{tool.name}", "arguments": ')
            yield f'call{i}: {begin} {_json(tool.parameters)} "}}\\n" {closing}'

    def _is_token(self, mark: str) -> bool:
        """The tokenizer has a token for it, which llguidance takes for a special one: no text matches it."""
        tokens = self._tokens.tokenize_str(mark, parse_special=True)
        return len(tokens) == 1 and self._tokens.is_special_token(tokens[0])

    def _written(self, mark: str) -> str:
        """A mark in a grammar."""
        return mark if self._is_token(mark) else json.dumps(mark)


class GrammarGuide:
    """A grammar and how far a text is in it. `failure` says why it was given up, which ends the text; `field` is where the client wanted it."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_tokens: Sequence[int], field: str) -> None:
        self._matcher, self._eos, self.field, self.failure = matcher, list(eos_tokens), field, ""

    def copy(self) -> GrammarGuide:
        """Another one that is as far in the text; the grammar is compiled once."""
        return GrammarGuide(self._matcher.deep_copy(), self._eos, self.field)

    def apply(self, logits: Tensor) -> Tensor:
        """logits float32 [V], with -inf for what the grammar forbids."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, bitorder="little", count=len(logits)).astype(bool)
        if self._matcher.is_error():  # the grammar grew beyond llguidance's limits
            self.failure = self._matcher.get_error().split("\n")[0]
            allowed[:] = False
            allowed[self._eos] = True
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """This token came next."""
        self._matcher.consume_token(token)


def _most_optional(schema: Any) -> int:
    """Properties of one object that are not required, the most that an object has anywhere in it."""
    most, left = 0, [schema]
    while left:  # a client's schema may be deep
        part = left.pop()
        if isinstance(part, dict):
            properties, required = part.get("properties"), part.get("required")
            if isinstance(properties, dict):
                kept = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
                most = max(most, len(properties.keys() - kept))
            left += [value for key, value in part.items() if key not in _DATA]
        elif isinstance(part, list):
            left += part
    return most


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {_OPTIONS: _WRITING})
