"""Texts of other people to tokens: none of a chat becomes a control token, and what is far too long is seen before it is read. No torch.

A chat template puts control tokens (<|im_start|> and the like) around what clients send, and they say who speaks. The tokenizer would read them in a
client's text as well. So those there are *marked* before the template is filled in: a character that is none is put into each. What then still
reads as a control token is the template's. It gets another name, which no client can write, and all is read by a second tokenizer that knows control
tokens by these names only: so they take the white space around them, or not, as ever, and a client's are text, in whatever way they are
written (some tokenizers look for them after normalization too). A text without control tokens is read as ever.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from kvarto.errors import UsageError

_MARK, _OURS = "\ufdd0", "\ufdd1"  # Unicode keeps them free for what programs do among themselves
_NEVER = re.compile(r"(?!)")


class Tokens:
    """`tokenizer` is one of transformers'. If it is none of the tokenizers library's, nothing is marked and nothing seen beforehand."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._backend = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
        added = [] if self._backend is None else list(self._backend.get_added_tokens_decoder().items())
        # One character has no place for a mark.
        self._control = {each.content: token for token, each in added if each.special and len(each.content) > 1}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first))) if longest_first else _NEVER
        alone = {each.content for _, each in added if each.single_word}
        patterns = [rf"(?<!\w){re.escape(text)}(?!\w)" if text in alone else re.escape(text) for text in longest_first]
        self._read = (
            re.compile("|".join(patterns)) if patterns else _NEVER
        )  # those that the tokenizer would read as such
        # It looks for these in what is left of a text after normalization, where more may look like them.
        self._normalizes = bool(self._backend is not None and self._backend.normalizer) and any(
            each.normalized for _, each in added if each.content in self._control
        )
        self._strips = any(each.lstrip or each.rstrip for _, each in added)
        vocabulary = {} if self._backend is None else self._backend.get_vocab(with_added_tokens=True)
        self._of_bytes = self._backend is not None and isinstance(self._backend.decoder, ByteLevel)
        # Vocabularies of bytes may lack some that texts rarely have; those have no token.
        self._dropped = bytes(byte for byte, symbol in enumerate(_symbols()) if symbol not in vocabulary)
        # Of a token, in characters or bytes; 0: there are some for texts of any length.
        sizes = [*map(len, vocabulary), *(len(each.content.encode()) for _, each in added)]
        self._longest = max(sizes) if self._reads_all() else 0

    def of(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Control tokens included."""
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def offsets(self, text: str) -> list[int] | None:
        """Where each token of `of` begins in the text: one that the tokenizer adds where the next one does. None if the tokenizer does not say."""
        if self._backend is None:
            return None
        read = self.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        at, begins = len(text), list[int]()
        for (begin, _), is_added in zip(
            reversed(read["offset_mapping"]), reversed(read["special_tokens_mask"]), strict=True
        ):
            at = at if is_added else begin
            begins.append(at)
        return begins[::-1]

    def at_least(self, text: str) -> int:
        """So many tokens it has, or more: a bound that takes no time."""
        if not self._longest:
            return 0
        assert self._backend is not None, "nothing is known of other tokenizers"
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        if self._strips:  # some tokens take the white space around them
            text = "".join(text.split())
        size = len(text.encode("utf-8", "replace").translate(None, self._dropped)) if self._of_bytes else len(text)
        return -(-size // self._longest)

    # ---- chats -----------------------------------------------------------------------------------------------------

    def marked(self, value: Any) -> Any:
        """Texts, and what they are in, with their control tokens marked."""
        if isinstance(value, str):
            value = value.replace(_MARK, "").replace(_OURS, "")
            while self._found.search(value):  # one may begin within another
                value = self._found.sub(lambda match: match[0][0] + _MARK + match[0][1:], value)
            return value
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list) else value

    def of_chat(self, text: str) -> list[int]:
        """Of a template that is filled in with what is `marked`. Raises UsageError."""
        if _MARK not in text and not self._normalizes:
            return self.of(text, add_special_tokens=False)
        ours, numbers, unknown = self._renamed
        named = self._read.sub(lambda match: _rename(match[0]), text).replace(_MARK, "")
        tokens = ours.encode(named, add_special_tokens=False).ids
        wrong = set(self._control.values()) - {unknown}  # what has no token is no control token
        if any(token in wrong and token not in numbers for token in tokens):
            raise UsageError(
                "messages", "texts without control tokens of the model", "one that this tokenizer reads as such"
            )
        return [numbers.get(token, token) for token in tokens]

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int], int | None]:
        """The second tokenizer, the number of each added token by the one that it has there, and that of the unknown token."""
        assert self._backend is not None, "nothing is marked for other tokenizers"
        written = json.loads(self._backend.to_str())
        written["post_processor"] = written["truncation"] = written["padding"] = None
        names = dict[str, int]()
        for each in written["added_tokens"]:
            if each["content"] in self._control:
                each["content"], each["normalized"] = _rename(each["content"]), False
            names[each["content"]] = each["id"]
        ours, unknown = Tokenizer.from_str(json.dumps(written)), getattr(self._backend.model, "unk_token", None)
        numbers = {token: names[each.content] for token, each in ours.get_added_tokens_decoder().items()}
        return ours, numbers, None if unknown is None else self._backend.token_to_id(unknown)

    def _reads_all(self) -> bool:
        """There is a token for every character, or for each byte that is not dropped."""
        model = None if self._backend is None else self._backend.model
        if not isinstance(model, BPE):
            return False
        return bool(self._of_bytes or model.byte_fallback or (model.unk_token is not None and not model.fuse_unk))


def _rename(control: str) -> str:
    return f"{_OURS}{control}{_OURS}"


def _symbols() -> list[str]:
    """How vocabularies of bytes write each byte (GPT-2): as its own Latin-1 character if that can be seen, else as one of those from 256 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]
