"""Answers that the other side may stop wanting: server-sent events, and work until a disconnect.

An event stream waits a moment for its first event before it sends headers, so that most errors
still get a status of their own. What goes wrong later is told as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tp_runtime.http.errors import error_body, to_api_error

T = TypeVar("T")

HEADERS_AFTER_S = 5.0
"""A stream whose first event takes longer begins without it: proxies wait for headers."""
PING_S = 15.0
"""A comment is sent after so much silence, for proxies that close idle connections."""
SEND_TIMEOUT_S = 30.0
"""A client that reads nothing for so long is cut off."""
DONE = b"data: [DONE]\n\n"
_PING = b": waiting\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Disconnected(Exception):
    """The client closed its connection; nobody reads an answer."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes (then raises Disconnected).

    The body of the request must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        await _end(task, gone)


class EventStream(Response):
    """Sends each of `events` (JSON, one or several complete `data:` blocks); made by `begin`."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        first: asyncio.Task[bytes | None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._next = first

    @classmethod
    async def begin(cls, request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
        """Raises what the first event raised, if that was soon; Disconnected likewise."""
        first = asyncio.ensure_future(_next_event(events))
        gone = asyncio.ensure_future(_until_disconnected(request.receive))
        try:
            await asyncio.wait(
                {first, gone}, timeout=HEADERS_AFTER_S, return_when=asyncio.FIRST_COMPLETED
            )
            if first.done():
                first.result()
            elif gone.done():
                raise Disconnected
        except BaseException:
            await _end(first)
            await events.aclose()
            raise
        finally:
            await _end(gone)
        return cls(events, first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_until_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        except (TimeoutError, OSError):
            pass  # it does not read any more
        finally:
            await _end(pump, gone, self._next)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            while (event := await self._next_or_ping(send)) is not None:
                await _send(send, event)
                self._next = asyncio.ensure_future(_next_event(self._events))
        except (asyncio.CancelledError, TimeoutError, OSError):
            raise
        except Exception as error:
            await _send(send, event_of(error_body(to_api_error(error))))
        await _send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next_or_ping(self, send: Send) -> bytes | None:
        while True:
            if not self._next.done():
                await asyncio.wait({self._next}, timeout=PING_S)
            if self._next.done():
                return self._next.result()
            await _send(send, _PING)


def event_of(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _send(send: Send, body: bytes) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _next_event(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what still runs and waits for its end."""
    for task in tasks:
        if not task.done():
            task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
