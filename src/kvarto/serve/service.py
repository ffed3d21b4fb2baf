"""What a model is served as: bodies of requests become plans for the engine, and the model tells of itself. No HTTP here.

Everything may take a moment (templates, tokens, grammars), so it is not for the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvarto import __version__
from kvarto.engine.engine import Ask, Engine, Offered
from kvarto.engine.request import Sampling
from kvarto.errors import UnknownName, Unsupported, UsageError
from kvarto.serve.chat import ChatTemplate
from kvarto.serve.metrics import Metrics
from kvarto.serve.protocol import ChatRequest, CompletionRequest, Generation, Message, TokenizeRequest, Tool, read
from kvarto.serve.rules import Caller, Config
from kvarto.serve.shapes import ChatShape, CompletionShape, Json, Names, Prompt, Shape, new_id
from kvarto.serve.structured import GrammarGuide, Structure
from kvarto.serve.tokens import Tokens

_MOST_SCORES = 1 << 18
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
    model: str  # as the client calls it
    id: str


class Service:
    """An engine behind HTTP. Raises Unsupported if its model has no tokenizer."""

    def __init__(self, engine: Engine, config: Config | None = None) -> None:
        if engine.tokenizer is None:
            raise Unsupported("a model without a tokenizer cannot be served")
        self.engine, self.name, self.created = engine, engine.loaded.name, int(time.time())
        self.config = config or Config()
        self.names = list(dict.fromkeys([self.name, *self.config.aliases]))
        self.tokens = Tokens(engine.tokenizer)
        self.template = ChatTemplate(self.tokens)
        self.metrics = Metrics(engine)
        self._structure = Structure(engine.tokenizer, engine.core.forward.vocabulary, engine.core.eos_tokens)

    # ---- what clients want -----------------------------------------------------------------------------------------

    def completion(self, body: bytes, caller: Caller) -> Plan:
        """POST /v1/completions. Raises UsageError or Unsupported."""
        wanted = read(CompletionRequest, body)
        wanted.check_stream()
        offered = self._offered(wanted, caller)
        self._check_number("prompt", len(wanted.prompt) * wanted.n)
        names, asks, shapes, scores = self._names(wanted), list[list[Ask]](), list[Shape](), 0
        prompts = [self._prompt_tokens(prompt, offered) for prompt in wanted.prompt]
        offered = self._routed(offered, wanted, caller, max(map(len, prompts), default=0), wanted.max_tokens)
        for prompt, tokens in zip(wanted.prompt, prompts, strict=True):
            max_tokens = _fitting(offered, len(tokens), wanted, (wanted.max_tokens, "prompt", "max_tokens"))
            scores += wanted.n * len(tokens)
            asks.append(
                [
                    self._ask(tokens, sampling, offered, wanted, caller)
                    for sampling in wanted.sampling(max_tokens, wanted.logprobs, wanted.scored)
                ]
            )
            repeats_scores = wanted.echo and wanted.logprobs is not None
            shown = Prompt(
                tokens,
                text=(prompt if isinstance(prompt, str) else names.text(tokens)) if wanted.echo else "",
                offsets=self.tokens.offsets(prompt) if repeats_scores and isinstance(prompt, str) else None,
                logprobs=wanted.logprobs if wanted.echo else None,
                scores=wanted.prompt_logprobs,
            )
            shapes += [CompletionShape(len(shapes) + i, names, shown) for i in range(wanted.n)]
        _check_scores("logprobs" if wanted.prompt_logprobs is None else "prompt_logprobs", wanted.scored, scores)
        return Plan(
            asks=asks,
            shapes=shapes,
            stream=wanted.stream,
            include_usage=wanted.stream_options.include_usage,
            kinds=("text_completion", "text_completion"),
            model=wanted.model or self.name,
            id=new_id("cmpl-"),
        )

    def chat(self, body: bytes, caller: Caller) -> Plan:
        """POST /v1/chat/completions. Raises UsageError or Unsupported."""
        wanted = read(ChatRequest, body)
        wanted.check_stream()
        offered = self._offered(wanted, caller)
        self._check_number("n", wanted.n)
        text = self._chat_text(wanted.messages, wanted.tools if wanted.offered_tools else [])
        _check_length(offered, self.tokens.at_least(text), "messages", note=" or more")
        tokens = self.tokens.of_chat(text)
        offered = self._routed(offered, wanted, caller, len(tokens), wanted.limit)
        max_tokens = _fitting(offered, len(tokens), wanted, (wanted.limit, "messages", wanted.limit_field))
        _check_scores("prompt_logprobs", wanted.prompt_logprobs, wanted.n * len(tokens))
        guide = self._guide(wanted)
        asks = [
            replace(self._ask(tokens, sampling, offered, wanted, caller), guide=None if guide is None else guide.copy())
            for sampling in wanted.sampling(max_tokens, wanted.most_logprobs, wanted.prompt_logprobs)
        ]
        names, shown = self._names(wanted), Prompt(tokens, scores=wanted.prompt_logprobs)
        return Plan(
            asks=[asks],
            shapes=[ChatShape(index, names, wanted.offered_tools, shown) for index in range(wanted.n)],
            stream=wanted.stream,
            include_usage=wanted.stream_options.include_usage,
            kinds=("chat.completion", "chat.completion.chunk"),
            model=wanted.model or self.name,
            id=new_id("chatcmpl-"),
        )

    def tokenize(self, body: bytes) -> Json:
        """POST /tokenize. Raises UsageError or Unsupported; TooLong for what would take long and never be served."""
        wanted = read(TokenizeRequest, body)
        self._check_model(wanted.model)
        context, field = self.engine.core.context_tokens, "messages" if wanted.prompt is None else "prompt"
        text = self._chat_text(wanted.messages, wanted.tools) if wanted.prompt is None else wanted.prompt
        if (least := self.tokens.at_least(text)) > context:
            raise TooLong(field, f"at most the context's {context} tokens", f"{least} or more", "shorten it")
        special = wanted.add_special_tokens
        tokens = (
            self.tokens.of_chat(text) if wanted.prompt is None else self.tokens.of(text, add_special_tokens=special)
        )
        return {"tokens": tokens, "count": len(tokens), "max_model_len": context}

    def model(self, name: str, caller: Caller) -> Json:
        """The model as a client sees it under a name in /v1/models, and what it is really served with. Raises UnknownModel."""
        self._check_model(name)
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
            "id": name,
            "object": "model",
            "root": self.name,
            "created": self.created,
            "owned_by": "kvarto",
            "max_model_len": core.context_tokens,
            "kvarto": {
                "version": __version__,
                "identity": loaded.identity,
                "device": str(core.device),
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "kv_format": self._unnamed(caller, name).name,
                "formats": formats,
                "memory_bytes": core.memory.arena.nbytes,
                "tools_by": self.template.tools_by if self.template.exists else None,
            },
        }

    # ---- parts of it -----------------------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise UnknownModel("model", name, self.names)

    def _check_number(self, field: str, count: int) -> None:
        """Refuse what could never be let in before anything is made of it. Raises UsageError."""
        if count > self.engine.most_waiting:
            raise UsageError(field, f"at most {self.engine.most_waiting} answers to one request", count)

    def _offered(self, wanted: Generation, caller: Caller) -> Offered:
        """The format that a request is served in. Raises UsageError."""
        self._check_model(wanted.model)
        header = caller.headers.get(FORMAT_HEADER)
        if wanted.kv_format is not None and header is not None and wanted.kv_format != header:
            raise UsageError("kv_format", f"the same as in the header {FORMAT_HEADER}, {header}", wanted.kv_format)
        name = wanted.kv_format if wanted.kv_format is not None else header
        if name is None:
            return self._unnamed(caller, wanted.model or self.name)
        try:
            return self.engine.offers[self.engine.policy_of(name)]
        except UsageError as error:
            raise UnknownName("kv_format", name, self.engine.formats) from error

    def _unnamed(self, caller: Caller, model: str) -> Offered:
        """The format of a request that names none."""
        return self.engine.offers[self.engine.policy_of(self.config.format_for(caller, model))]

    def _ask(self, tokens: list[int], sampling: Sampling, offered: Offered, wanted: Generation, caller: Caller) -> Ask:
        identity = self.config.identity(caller.tenant, wanted.cache_salt)
        return Ask(tokens, sampling, offered.name, identity, self.config.priority(caller.tenant))

    def _routed(
        self, offered: Offered, wanted: Generation, caller: Caller, prompt_tokens: int, max_tokens: int | None
    ) -> Offered:
        """The format after the quality probe had its say, which it has only where none was named; `prompt_tokens`: of the longest prompt."""
        if wanted.kv_format is not None or FORMAT_HEADER in caller.headers:
            return offered
        policy = self.engine.policy_of(offered.name)
        return self.engine.offers[self.engine.route(policy, prompt_tokens, max_tokens or 1)]

    def _prompt_tokens(self, prompt: str | list[int], offered: Offered) -> list[int]:
        if not isinstance(prompt, str):
            if error := self.engine.core.why_no_prompt(prompt):
                raise error
            return prompt
        _check_length(offered, self.tokens.at_least(prompt), "prompt", note=" or more")
        return self.tokens.of(prompt)

    def _chat_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self.template.text(messages, [tool.function for tool in tools])

    def _names(self, wanted: Generation) -> Names:
        # Whoever has the prompt repeated with its log probabilities counts on one entry for each token, the last one too (lm-eval does).
        if isinstance(wanted, CompletionRequest) and wanted.echo:
            return Names(self.engine.tokenizer, ())
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


def _check_scores(field: str, top: int | None, tokens: int) -> None:
    """Raises UsageError for log probabilities of prompts that would take gigabytes: those of `tokens` places, `top` likeliest tokens each."""
    if top is not None and tokens * (top + 1) > _MOST_SCORES:
        got = f"{top} for {tokens} tokens of prompts and choices"
        raise UsageError(
            field, f"at most {_MOST_SCORES} log probabilities of prompts in an answer", got, "ask for less"
        )


def _check_length(offered: Offered, prompt_tokens: int, field: str, *, least: int = 0, note: str = "") -> None:
    """Raises TooLong if there is no room for a prompt and the `least` tokens behind it."""
    if prompt_tokens + least <= offered.most_tokens:
        return
    by_memory = offered.most_tokens == offered.capacity_tokens
    remedy = "shorten it" + (", or start the server with more memory" if by_memory else "")
    raise TooLong(field, f"at most {offered.most_tokens - least} tokens", f"{prompt_tokens}{note}", remedy)


def _fitting(offered: Offered, prompt_tokens: int, wanted: Generation, limit: tuple[int | None, str, str]) -> int:
    """How many tokens to generate: as many as the client says, or all that there is room for. Raises TooLong or UsageError.

    `limit`: the number, or None, and what the prompt and the number are called.
    """
    number, prompt_field, field = limit
    least = min(wanted.least_tokens, 1 if number is None else max(number, 0))
    room = offered.most_tokens - prompt_tokens
    _check_length(offered, prompt_tokens, prompt_field, least=least)
    if number is not None and number < wanted.least_tokens:
        raise UsageError(field, f"{wanted.least_tokens} or more", number)
    if number is not None and number > room:
        raise TooLong(field, f"at most {room} behind a prompt of {prompt_tokens} tokens", number)
    return room if number is None else number
