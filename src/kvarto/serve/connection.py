"""Connections whose clients send too slowly are closed: uvicorn waits for the rest of a header or a body for ever, and each waits with a socket.

A header has READ_SECONDS in all, from its first byte or that of the connection. A body has as much, and a second more for each
LEAST_BYTES_PER_SECOND that came. What the server takes to answer is not limited, nor what a client takes to read it.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvarto.errors import KvartoError

READ_SECONDS = 20.0
LEAST_BYTES_PER_SECOND = 16_384


class TooSlow(KvartoError):
    """A body did not come in time."""


class BodyTooLarge(KvartoError):
    """A body of more bytes than any request needs."""


class TimedProtocol(H11Protocol):
    """uvicorn's, with a limit for headers."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first header is awaited."""
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        """Of a header, until a request is there; of a body, which is its reader's to time, until its response is complete."""
        before = self.cycle
        if self._due is None and before is not None and before.response_complete:
            self._await_header()
        super().data_received(data)
        if self.cycle is not before:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._forget()
        super().connection_lost(exc)

    def _await_header(self) -> None:
        self._due = self.loop.call_later(READ_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


async def read_body(request: Request, most_bytes: int) -> bytes:
    """All of it. Raises BodyTooLarge or TooSlow."""
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS) as limit:
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise BodyTooLarge(f"the body has more than {most_bytes} bytes")
                limit.reschedule((limit.when() or 0.0) + len(piece) / LEAST_BYTES_PER_SECOND)
    except TimeoutError as error:
        expected = f"within {READ_SECONDS:g} seconds, and one more for each {LEAST_BYTES_PER_SECOND} bytes"
        raise TooSlow(f"the body did not come {expected}; {len(body)} bytes did") from error
    return bytes(body)
