"""Tokens to text as they come: only whole characters leave, and nothing that may turn out to begin a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"
# A character has at most so many tokens, one for each byte; what still has no text then has none, or is no character.
_MOST_WAITING = 8


class TextStream:
    """The text of one request. `tokenizer` is one of transformers'; special tokens have no text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        # Text up to `_read` has left; decoding begins at `_begin`, since a token's text may depend on the one before.
        self._begin = self._read = 0
        self._kept = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is sure after one more token. After a stop string `stopped` is true and nothing comes any more."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        known, text = self._decode(self._tokens[self._begin : self._read]), self._decode(self._tokens[self._begin :])
        waiting = len(self._tokens) - self._read
        is_unsure = len(text) <= len(known) or text.endswith(_INCOMPLETE)
        if is_unsure and (waiting < _MOST_WAITING or not text.startswith(known)):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return self._without_stop(text[len(known) :])

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        known, text = self._decode(self._tokens[self._begin : self._read]), self._decode(self._tokens[self._begin :])
        text, self._kept = self._without_stop(text[len(known) :]) + self._kept, ""
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _without_stop(self, text: str) -> str:
        text = self._kept + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._kept = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._kept = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
