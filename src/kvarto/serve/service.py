"""What a model is served as: bodies of requests become plans for the engine, and the model tells of itself. No HTTP here.

Everything may take a moment (templates, tokens, grammars), so it is not for the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvarto import __version__
from kvarto.engine.engine import Ask, Engine, Offered
from kvarto.errors import UnknownName, Unsupported, UsageError
from kvarto.serve.chat import ChatTemplate
from kvarto.serve.metrics import Metrics
from kvarto.serve.protocol import ChatRequest, CompletionRequest, Generation, Message, TokenizeRequest, Tool, read
from kvarto.serve.shapes import ChatShape, CompletionShape, Json, Names, Shape, new_id
from kvarto.serve.structured import GrammarGuide, Structure

FORMAT_HEADER = "X-KV-Format"


class TooLong(UsageError):
    """There is no room for the prompt, or for what it wants generated."""


class UnknownModel(UnknownName):
    """Another model is served here."""


@dataclass(frozen=True)
class Plan:
    """A request that was understood. `asks`: for each prompt one ask for each choice; `shapes`: of all choices, numbered through."""

    asks: list[list[Ask]]
    shapes: Sequence[Shape]
    stream: bool
    include_usage: bool
    kinds: tuple[str, str]  # of a whole answer, of a chunk
    id: str


class Service:
    """An engine behind HTTP. Raises Unsupported if its model has no tokenizer."""

    def __init__(self, engine: Engine) -> None:
        if engine.tokenizer is None:
            raise Unsupported("a model without a tokenizer cannot be served")
        self.engine, self.name, self.created = engine, engine.loaded.name, int(time.time())
        self.template = ChatTemplate(engine.tokenizer)
        self.metrics = Metrics(engine)
        # No token stands for more characters than its own name has, so what is longer than this has no room, whatever its tokens are.
        self._most_characters = engine.core.context_tokens * max(map(len, engine.tokenizer.get_vocab()))
        self._structure = Structure(engine.tokenizer, engine.core.forward.vocabulary, engine.core.eos_tokens)

    # ---- what clients want -----------------------------------------------------------------------------------------

    def completion(self, body: bytes, header: str | None) -> Plan:
        """POST /v1/completions. Raises UsageError or Unsupported."""
        wanted = read(CompletionRequest, body)
        offered = self._offered(wanted, header)
        self._check_number("prompt", len(wanted.prompt) * wanted.n)
        asks = []
        for prompt in wanted.prompt:
            tokens = self._tokens(prompt) if isinstance(prompt, str) else prompt
            max_tokens = _fitting(offered, len(tokens), wanted.max_tokens, ("prompt", "max_tokens"))
            asks.append(
                [
                    Ask(tokens, sampling, offered.name, wanted.cache_salt)
                    for sampling in wanted.sampling(max_tokens, wanted.logprobs)
                ]
            )
        names = self._names(wanted)
        return Plan(
            asks=asks,
            shapes=[CompletionShape(index, names) for index in range(len(asks) * wanted.n)],
            stream=wanted.stream,
            include_usage=wanted.stream_options.include_usage,
            kinds=("text_completion", "text_completion"),
            id=new_id("cmpl-"),
        )

    def chat(self, body: bytes, header: str | None) -> Plan:
        """POST /v1/chat/completions. Raises UsageError or Unsupported."""
        wanted = read(ChatRequest, body)
        offered = self._offered(wanted, header)
        self._check_number("n", wanted.n)
        tokens = self._chat_tokens(wanted.messages, wanted.tools if wanted.offered_tools else [])
        max_tokens = _fitting(offered, len(tokens), wanted.limit, ("messages", wanted.limit_field))
        guide = self._guide(wanted)
        asks = [
            Ask(tokens, sampling, offered.name, wanted.cache_salt, guide=None if guide is None else guide.copy())
            for sampling in wanted.sampling(max_tokens, wanted.most_logprobs)
        ]
        names = self._names(wanted)
        return Plan(
            asks=[asks],
            shapes=[ChatShape(index, names, wanted.offered_tools) for index in range(wanted.n)],
            stream=wanted.stream,
            include_usage=wanted.stream_options.include_usage,
            kinds=("chat.completion", "chat.completion.chunk"),
            id=new_id("chatcmpl-"),
        )

    def tokenize(self, body: bytes, _header: str | None) -> Json:
        """POST /tokenize. Raises UsageError or Unsupported."""
        wanted = read(TokenizeRequest, body)
        self._check_model(wanted.model)
        if wanted.prompt is None:
            tokens = self._chat_tokens(wanted.messages, wanted.tools)
        else:
            tokens = self._tokens(wanted.prompt, add_special_tokens=wanted.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.core.context_tokens}

    def model(self) -> Json:
        """The model as clients see it in /v1/models, and what it is really served with."""
        core, loaded = self.engine.core, self.engine.loaded
        formats = [
            {
                "kv_format": offer.name,
                "kernel": offer.kernel_names,
                "bits_per_number": round(offer.bits_per_number, 4),
                "most_tokens": offer.most_tokens,
                "capacity_tokens": offer.capacity_tokens,
            }
            for offer in self.engine.offers
        ]
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvarto",
            "max_model_len": core.context_tokens,
            "kvarto": {
                "version": __version__,
                "identity": loaded.identity,
                "device": str(core.device),
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "kv_format": self.engine.offers[0].name,
                "formats": formats,
                "memory_bytes": core.memory.arena.nbytes,
                "tools_by": self.template.tools_by if self.template.exists else None,
            },
        }

    # ---- parts of it -----------------------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise UnknownModel("model", str(name), [self.name])

    def _check_number(self, field: str, count: int) -> None:
        """Refuse what could never be let in before anything is made of it. Raises UsageError."""
        if count > self.engine.most_waiting:
            raise UsageError(field, f"at most {self.engine.most_waiting} answers to one request", count)

    def _offered(self, wanted: Generation, header: str | None) -> Offered:
        """The format that a request is served in. Raises UsageError."""
        self._check_model(wanted.model)
        if wanted.kv_format is not None and header is not None and wanted.kv_format != header:
            raise UsageError("kv_format", f"the same as in the header {FORMAT_HEADER}, {header}", wanted.kv_format)
        name = wanted.kv_format if wanted.kv_format is not None else header
        try:
            return self.engine.offers[self.engine.policy_of(name)]
        except UsageError as error:
            raise UnknownName("kv_format", str(name), self.engine.formats) from error

    def _tokens(self, text: str, *, field: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """Raises TooLong before a text that could never be served takes minutes and gigabytes."""
        if len(text) > self._most_characters:
            raise TooLong(field, f"at most {self._most_characters} characters", len(text), "shorten it")
        return list(self.engine.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _chat_tokens(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        text = self.template.text(messages, [tool.function for tool in tools])
        return self._tokens(text, field="messages", add_special_tokens=False)

    def _names(self, wanted: Generation) -> Names:
        eos = () if wanted.ignore_eos else self.engine.core.eos_tokens
        return Names(self.engine.tokenizer, {*eos, *wanted.stop_token_ids})

    def _guide(self, wanted: ChatRequest) -> GrammarGuide | None:
        """For one choice, and to be copied for others; None if it may say anything."""
        answer, tools = wanted.response_format.schema_to_follow, wanted.offered_tools
        required = wanted.required_tools
        if answer is None and not required and not any(tool.strict for tool in tools):
            return None
        if wanted.ignore_eos:
            raise UsageError("ignore_eos", "false, where the answer's form is given", True)
        # A model that must call something rarely knows when it has called enough, so only who asks for more than one call gets more.
        several = wanted.parallel_tool_calls is True if required else wanted.parallel_tool_calls is not False
        field = "response_format" if answer is not None and not tools else "tools"
        return self._structure.guide(
            field, answer=answer, tools=required or tools, required=bool(required), several=several
        )


def _fitting(offered: Offered, prompt_tokens: int, wanted: int | None, fields: tuple[str, str]) -> int:
    """How many tokens to generate: `wanted`, or all that there is room for. Raises TooLong or UsageError.

    `fields`: what the prompt and the number of tokens are called.
    """
    room = offered.most_tokens - prompt_tokens
    if room < 1:
        by_memory = offered.most_tokens == offered.capacity_tokens
        remedy = "shorten it" + (", or start the server with more memory" if by_memory else "")
        raise TooLong(fields[0], f"at most {offered.most_tokens - 1} tokens", prompt_tokens, remedy)
    if wanted is not None and wanted < 1:
        raise UsageError(fields[1], "1 or more", wanted)
    if wanted is not None and wanted > room:
        raise TooLong(fields[1], f"at most {room} behind a prompt of {prompt_tokens} tokens", wanted)
    return room if wanted is None else wanted
