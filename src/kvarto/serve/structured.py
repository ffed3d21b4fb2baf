"""Answers that must be JSON of a schema, or calls of given functions: grammars for llguidance, and its matcher as the engine's Guide."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
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

# As json.dumps writes and models were trained; with free white space a small model may write nothing else.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LISTING = re.compile(r"^ *\d+ \| ", re.MULTILINE)  # llguidance adds the grammar, which is ours, to what it says
# Text without a call; and text that ends where its first call begins, which has to be lazy to notice that.
_TEXT = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{OPEN}(.|\n)*/"
_TALK = rf'talk[lazy]: /(.|\n)*/ "{OPEN}"'


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

    def guide(self, grammar: str, field: str) -> GrammarGuide:
        """One for one request. Raises UsageError about `field` if the grammar is none, Unsupported if the model cannot be guided."""
        if self.reason:
            raise Unsupported(f"this model's answers cannot be held to a schema: {self.reason}")
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            reason = _LISTING.split(matcher.get_error())[0]
            raise UsageError(field, "a JSON schema that can be enforced", " ".join(reason.split()))
        return GrammarGuide(matcher, self._eos)


class GrammarGuide:
    """A grammar and how far a text is in it. `failure` says why it was given up, which ends the text."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_tokens: Sequence[int]) -> None:
        self._matcher, self._eos, self.failure = matcher, list(eos_tokens), ""

    def apply(self, logits: Tensor) -> Tensor:
        """logits float32 [V], with -inf for what the grammar forbids."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, bitorder="little", count=len(logits)).astype(bool)
        if self._matcher.is_error():  # the grammar grew beyond llguidance's limits
            self.failure = self._matcher.get_error()
            allowed[:] = False
            allowed[self._eos] = True
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """This token came next."""
        self._matcher.consume_token(token)


def grammar(
    *, answer: dict[str, Any] | None, tools: Sequence[Function], required: bool, several: bool
) -> str:  # fmt: skip
    """The grammar of an answer, in llguidance's kind of Lark.

    answer     the schema of an answer that calls nothing, None: any text
    tools      what may be called
    required   something must be called
    several    more than one call may be made
    """
    rules, begins = [], []
    if tools:
        talk_first = not required and answer is None
        more = f' ("\\n{OPEN}" call)*' if several else ""
        begins.append("calls")
        rules.append(f"calls: {'talk' if talk_first else json.dumps(OPEN)} call{more}")
        rules += [_TALK] * talk_first
        rules.append("call: " + " | ".join(f"call{i}" for i in range(len(tools))))
        rules += [_call_rule(i, tool) for i, tool in enumerate(tools)]
    if not required:
        begins.append("TEXT" if answer is None else "answer")
        rules.append(_TEXT if answer is None else f"answer: {_json(answer)}")
    return "\n".join([f"start: {' | '.join(begins)}", *rules])


def _call_rule(number: int, tool: Function) -> str:
    """A call from behind its opening mark on. Each has a schema of its own, so that references within it hold."""
    begin = json.dumps(f'\n{{"name": "{tool.name}", "arguments": ')
    end = json.dumps(f"}}\n{CLOSE}")
    return f"call{number}: {begin} {_json(tool.parameters)} {end}"


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": _WRITING | schema.get("x-guidance", {})})
