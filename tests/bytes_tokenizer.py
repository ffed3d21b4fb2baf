"""A tokenizer whose tokens are bytes, so that tests of texts need no model."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + PLAIN
_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
WITH_CALLS = WITH_TOOLS.replace("{{ m.content }}", "{{ m.content }}" + _CALLS)


@cache
def tokenizer(template: str | None = None, added: tuple[str, ...] = ()) -> Any:
    """`added`: marks that are one token, as in Qwen's."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)} | {"<end>": len(alphabet)}
    built = Tokenizer(BPE(vocabulary, []))
    # Split into words, although every byte is a token: the library remembers 10,000 words, and whole prompts would be 80 MB.
    built.pre_tokenizer, built.decoder = ByteLevel(add_prefix_space=False, use_regex=True), ByteDecoder()
    built.add_tokens([AddedToken(mark, normalized=False) for mark in added])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<end>", chat_template=template)


EOS = 256
