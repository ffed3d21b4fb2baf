"""Routes: a body becomes a plan, what comes of it becomes JSON or server-sent events, and an error becomes OpenAI's error object.

Nothing here computes for long on the event loop: bodies are read, templates rendered, texts tokenized and schemas compiled in a thread of the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import current_default_thread_limiter, run_sync
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvarto import __version__
from kvarto.engine.engine import Engine
from kvarto.engine.loop import Delta
from kvarto.errors import EngineClosed, KvartoError, Overloaded, Unsupported, UsageError
from kvarto.serve.connection import BodyTooLarge, TooSlow, read_body
from kvarto.serve.job import Job
from kvarto.serve.metrics import CONTENT_TYPE
from kvarto.serve.rules import Caller, Config, UnknownKey
from kvarto.serve.service import FORMAT_HEADER, Plan, Service, TooLong, UnknownModel
from kvarto.serve.shapes import Json, Shape

_MOST_BODY_BYTES = 64 * 2**20
_SHOWN_CHARACTERS = 1000
_RETRY_AFTER_SECONDS = 1
_THREADS = 8
_CLIENT_GONE = 499  # nginx's; nobody is there to read it
_log = logging.getLogger("kvarto.serve")
T = TypeVar("T")


def make_app(engine: Engine, config: Config | None = None) -> Starlette:
    """The ASGI application. It does not close the engine."""
    service = Service(engine, config)
    scrapes = CapacityLimiter(1)  # a scrape may wait for the GPU, and needs no key: it must not keep requests waiting

    async def completions(request: Request) -> Response:
        return await _generate(service, request, service.completion)

    async def chat(request: Request) -> Response:
        return await _generate(service, request, service.chat)

    async def tokenize(request: Request) -> Response:
        _caller(service, request)
        return JSONResponse(await run_in_threadpool(service.tokenize, await read_body(request, _MOST_BODY_BYTES)))

    async def models(request: Request) -> Response:
        caller = _caller(service, request)
        return JSONResponse({"object": "list", "data": [service.model(name, caller) for name in service.names]})

    async def model(request: Request) -> Response:
        return JSONResponse(service.model(request.path_params["name"], _caller(service, request)))

    async def health(_: Request) -> Response:
        if engine.why_closed:
            raise EngineClosed(engine.why_closed)
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        text = await run_sync(service.metrics.text, limiter=scrapes)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    handlers = {
        KvartoError: _on_error, HTTPException: _on_http_error, ClientDisconnect: _on_gone, Exception: _on_fault,
    }  # fmt: skip
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=_with_few_threads)


@contextlib.asynccontextmanager
async def _with_few_threads(_: Starlette) -> AsyncIterator[None]:
    """Of the pool's 40 threads each would keep memory of its own for what it once did, and no more than a few could work at once anyway."""
    current_default_thread_limiter().total_tokens = _THREADS
    yield


def _caller(service: Service, request: Request) -> Caller:
    """Raises UnknownKey."""
    tenant = service.config.tenant_of(request.headers.get("authorization"))
    return Caller(request.url.path, request.headers, tenant)


async def _generate(service: Service, request: Request, understand: Callable[[bytes, Caller], Plan]) -> Response:
    """Both kinds of generation, streamed or whole."""
    arrived, kv_format = time.monotonic(), ""
    try:
        caller = _caller(service, request)  # before anything is read
        plan = await run_in_threadpool(understand, await read_body(request, _MOST_BODY_BYTES), caller)
        kv_format = str(plan.asks[0][0].kv)
        job = Job(service.engine, service.metrics, plan.asks, name=plan.id, arrived=arrived)
        await run_in_threadpool(job.submit)
    except KvartoError as error:
        service.metrics.refused(_outcome(error), kv_format)
        _log.info("refused, %s", _shown(error))
        raise
    headers = {FORMAT_HEADER: job.kv_format}
    if plan.stream:
        return _EventStream(_events(plan, job), job, headers)
    try:
        answer = await _unless_gone(request.receive, _whole(plan, job))
    finally:
        job.close()
    if answer is None:
        return Response(status_code=_CLIENT_GONE)
    return await run_in_threadpool(JSONResponse, answer, headers=headers)  # which writes the JSON


async def _whole(plan: Plan, job: Job) -> Json:
    parts = [list(shape.begin()) for shape in plan.shapes]
    async for index, delta in job.news():
        parts[index] += await _feed(plan.shapes[index], delta)
    choices = [shape.whole(own) for shape, own in zip(plan.shapes, parts, strict=True)]
    answer = _about(plan, job, plan.kinds[0]) | {"choices": choices, "usage": job.usage}
    return answer | plan.shapes[0].beside()


async def _events(plan: Plan, job: Job) -> AsyncIterator[str]:
    about = _about(plan, job, plan.kinds[1])
    tail = {"usage": None} if plan.include_usage else {}
    for shape in plan.shapes:
        for part in shape.begin():
            yield _event(about | {"choices": [part]} | tail)
    try:
        async for index, delta in job.news():
            for part in await _feed(plan.shapes[index], delta):
                yield _event(about | {"choices": [part]} | tail)
        if plan.include_usage:
            yield _event(about | {"choices": [], "usage": job.usage})
    except KvartoError as error:
        yield _event(_explain(error)[1])
    yield "data: [DONE]\n\n"


async def _feed(shape: Shape, delta: Delta) -> list[Json]:
    """The parts; a whole prompt's take a while."""
    return await run_in_threadpool(list, shape.feed(delta)) if delta.scored else list(shape.feed(delta))


def _about(plan: Plan, job: Job, kind: str) -> Json:
    return {
        "id": plan.id,
        "object": kind,
        "created": int(time.time()),
        "model": plan.model,
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


# ---- errors ----------------------------------------------------------------------------------------------------------------


def _outcome(error: KvartoError) -> str:
    """As metrics count it."""
    return {Overloaded: "overloaded", EngineClosed: "closing", UnknownKey: "unauthorized"}.get(type(error), "invalid")


def _explain(error: KvartoError) -> tuple[int, Json, dict[str, str]]:
    """Status, OpenAI's error object, headers."""
    status, kind, code, headers = 500, "server_error", None, {}
    retry = {"Retry-After": str(_RETRY_AFTER_SECONDS)}
    match error:
        case TooLong():
            status, kind, code = 400, "invalid_request_error", "context_length_exceeded"
        case UnknownModel():
            status, kind, code = 404, "invalid_request_error", "model_not_found"
        case UnknownKey():
            status, kind, code, headers = (
                401,
                "invalid_request_error",
                "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )
        case UsageError() | Unsupported():
            status, kind = 400, "invalid_request_error"
        # The rest of such a body is not waited for.
        case BodyTooLarge():
            status, kind, headers = 413, "invalid_request_error", {"Connection": "close"}
        case TooSlow():
            status, kind, headers = 408, "invalid_request_error", {"Connection": "close"}
        case Overloaded():
            status, kind, code, headers = 429, "rate_limit_error", "overloaded", retry
        case EngineClosed():
            status, kind, code, headers = 503, "server_error", "closing", retry
    param = error.name[:_SHOWN_CHARACTERS] if isinstance(error, UsageError) else None
    return status, {"error": {"message": _shown(error), "type": kind, "param": param, "code": code}}, headers


def _shown(error: KvartoError) -> str:
    """What it says, but not all of a body that it may quote."""
    text = str(error)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, KvartoError)
    status, body, headers = _explain(error)
    return JSONResponse(body, status, headers)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, error.status_code, error.headers)


async def _on_gone(_: Request, __: Exception) -> Response:
    """The client left before all of its body was here."""
    return Response(status_code=_CLIENT_GONE)


async def _on_fault(_: Request, error: Exception) -> Response:
    """A fault of ours; the server logs the traceback."""
    message = f"internal error: {type(error).__name__}"
    return JSONResponse(
        {"error": {"message": message, "type": "server_error", "param": None, "code": None}}, status_code=500
    )
