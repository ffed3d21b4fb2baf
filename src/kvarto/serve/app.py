"""Routes: a body becomes asks, what comes of them becomes JSON or server-sent events, and an error becomes OpenAI's error object.

Nothing here computes for long on the event loop: bodies are read, templates rendered, texts tokenized and schemas compiled in a thread of the pool.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvarto import __version__
from kvarto.engine.engine import Ask, Engine, Offered
from kvarto.errors import EngineClosed, KvartoError, Overloaded, UnknownName, Unsupported, UsageError
from kvarto.serve.chat import ChatTemplate
from kvarto.serve.job import Job
from kvarto.serve.metrics import CONTENT_TYPE, Metrics
from kvarto.serve.protocol import ChatRequest, CompletionRequest, Generation, Message, TokenizeRequest, Tool, read
from kvarto.serve.shapes import ChatShape, CompletionShape, Json, Names, Shape, new_id
from kvarto.serve.structured import GrammarGuide, Structure, grammar

FORMAT_HEADER = "X-KV-Format"
_MOST_BODY_BYTES = 64 * 2**20
_RETRY_AFTER_SECONDS = 1
_CLIENT_GONE = 499  # nginx's; nobody is there to read it
_log = logging.getLogger("kvarto.serve")
T = TypeVar("T")


class TooLong(UsageError):
    """There is no room for the prompt, or for what it wants generated."""


class UnknownModel(UnknownName):
    """Another model is served here."""


class BodyTooLarge(KvartoError):
    """A body of more bytes than any request needs."""


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
        self._structure = Structure(engine.tokenizer, engine.core.forward.vocabulary, engine.core.eos_tokens)

    # ---- what clients want -----------------------------------------------------------------------------------------

    def completion(self, body: bytes, header: str | None) -> Plan:
        """POST /v1/completions. Raises UsageError or Unsupported."""
        wanted = read(CompletionRequest, body)
        offered = self._offered(wanted, header)
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
        tokens = self._chat_tokens(wanted.messages, wanted.tools if wanted.offered_tools else [])
        max_tokens = _fitting(offered, len(tokens), wanted.limit, ("messages", wanted.limit_field))
        asks = [
            Ask(tokens, sampling, offered.name, wanted.cache_salt, guide=self._guide(wanted))
            for sampling in wanted.sampling(max_tokens, wanted.most_logprobs)
        ]
        names, tools = self._names(wanted), [function.name for function in wanted.offered_tools]
        return Plan(
            asks=[asks],
            shapes=[ChatShape(index, names, tools) for index in range(wanted.n)],
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

    def _tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.engine.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _chat_tokens(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self.template.tokens(messages, [tool.function for tool in tools])

    def _names(self, wanted: Generation) -> Names:
        eos = () if wanted.ignore_eos else self.engine.core.eos_tokens
        return Names(self.engine.tokenizer, {*eos, *wanted.stop_token_ids})

    def _guide(self, wanted: ChatRequest) -> GrammarGuide | None:
        """For one choice; None if it may say anything."""
        answer, tools = wanted.response_format.schema_to_follow, wanted.offered_tools
        required = wanted.required_tools
        if answer is None and not required and not any(tool.strict for tool in tools):
            return None
        if wanted.ignore_eos:
            raise UsageError("ignore_eos", "false, where the answer's form is given", True)
        # A model that must call something rarely knows when it has called enough, so only who asks for more than one call gets more.
        several = wanted.parallel_tool_calls is True if required else wanted.parallel_tool_calls is not False
        text = grammar(answer=answer, tools=required or tools, required=bool(required), several=several)
        return self._structure.guide(text, "response_format" if answer is not None and not tools else "tools")


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


# ---- HTTP ------------------------------------------------------------------------------------------------------------------


def make_app(engine: Engine) -> Starlette:
    """The ASGI application. It does not close the engine."""
    service = Service(engine)

    async def completions(request: Request) -> Response:
        return await _generate(service, request, service.completion)

    async def chat(request: Request) -> Response:
        return await _generate(service, request, service.chat)

    async def tokenize(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(service.tokenize, await _body(request), None))

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [service.model()]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != service.name:
            raise UnknownModel("model", request.path_params["name"], [service.name])
        return JSONResponse(service.model())

    async def health(_: Request) -> Response:
        if engine.why_closed:
            raise EngineClosed(engine.why_closed)
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    handlers = {KvartoError: _on_error, HTTPException: _on_http_error, Exception: _on_fault}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _generate(service: Service, request: Request, understand: Any) -> Response:
    """Both kinds of generation, streamed or whole."""
    arrived, header, kv_format = time.monotonic(), request.headers.get(FORMAT_HEADER), ""
    try:
        plan: Plan = await run_in_threadpool(understand, await _body(request), header)
        kv_format = str(plan.asks[0][0].kv)
        job = Job(service.engine, service.metrics, plan.asks, name=plan.id, arrived=arrived)
        await run_in_threadpool(job.submit)
    except KvartoError as error:
        service.metrics.refused(_outcome(error), kv_format)
        _log.info("refused, %s", error)
        raise
    headers = {FORMAT_HEADER: job.kv_format}
    if plan.stream:
        return _EventStream(_events(service, plan, job), job, headers)
    try:
        answer = await _unless_gone(request.receive, _whole(service, plan, job))
    finally:
        job.close()
    return Response(status_code=_CLIENT_GONE) if answer is None else JSONResponse(answer, headers=headers)


async def _whole(service: Service, plan: Plan, job: Job) -> Json:
    parts = [list(shape.begin()) for shape in plan.shapes]
    async for index, delta in job.news():
        parts[index] += plan.shapes[index].feed(delta)
    choices = [shape.whole(own) for shape, own in zip(plan.shapes, parts, strict=True)]
    return _about(service, plan, job, plan.kinds[0]) | {"choices": choices, "usage": job.usage}


async def _events(service: Service, plan: Plan, job: Job) -> AsyncIterator[str]:
    about = _about(service, plan, job, plan.kinds[1])
    tail = {"usage": None} if plan.include_usage else {}
    for shape in plan.shapes:
        for part in shape.begin():
            yield _event(about | {"choices": [part]} | tail)
    try:
        async for index, delta in job.news():
            for part in plan.shapes[index].feed(delta):
                yield _event(about | {"choices": [part]} | tail)
        if plan.include_usage:
            yield _event(about | {"choices": [], "usage": job.usage})
    except KvartoError as error:
        yield _event(_explain(error)[1])
    yield "data: [DONE]\n\n"


def _about(service: Service, plan: Plan, job: Job, kind: str) -> Json:
    return {
        "id": plan.id,
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": f"kvarto-{__version__}-{job.kv_format}",
    }


def _event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _EventStream(StreamingResponse):
    """Server-sent events of a job, which ends with them, also when the client leaves before."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], job: Job, headers: Mapping[str, str]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._job = job

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self.stream_response(send))
        finally:
            self._job.close()


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives, or None, and it is given up, if the client leaves before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """All of it. Raises BodyTooLarge."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BODY_BYTES:
            raise BodyTooLarge(f"the body has more than {_MOST_BODY_BYTES} bytes")
    return bytes(body)


# ---- errors ----------------------------------------------------------------------------------------------------------------


def _outcome(error: KvartoError) -> str:
    """As metrics count it."""
    return {Overloaded: "overloaded", EngineClosed: "closing"}.get(type(error), "invalid")


def _explain(error: KvartoError) -> tuple[int, Json, dict[str, str]]:
    """Status, OpenAI's error object, headers."""
    status, kind, code, headers = 500, "server_error", None, {}
    retry = {"Retry-After": str(_RETRY_AFTER_SECONDS)}
    match error:
        case TooLong():
            status, kind, code = 400, "invalid_request_error", "context_length_exceeded"
        case UnknownModel():
            status, kind, code = 404, "invalid_request_error", "model_not_found"
        case UsageError() | Unsupported():
            status, kind = 400, "invalid_request_error"
        case BodyTooLarge():
            status, kind = 413, "invalid_request_error"
        case Overloaded():
            status, kind, code, headers = 429, "rate_limit_error", "overloaded", retry
        case EngineClosed():
            status, kind, code, headers = 503, "server_error", "closing", retry
    param = error.name if isinstance(error, UsageError) else None
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}, headers


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, KvartoError)
    status, body, headers = _explain(error)
    return JSONResponse(body, status, headers)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, error.status_code, error.headers)


async def _on_fault(_: Request, error: Exception) -> Response:
    """A fault of ours; the server logs the traceback."""
    message = f"internal error: {type(error).__name__}"
    return JSONResponse(
        {"error": {"message": message, "type": "server_error", "param": None, "code": None}}, status_code=500
    )
