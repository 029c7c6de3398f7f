"""Answers that the other side may stop wanting: server-sent events, and work until a disconnect.

An event stream waits a moment for its first event before it sends headers, so that most errors
still get a status of their own. What goes wrong later is told as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tp_runtime.errors import TPRuntimeError
from tp_runtime.http.errors import ApiError, error_body, error_response, to_api_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEADERS_AFTER_S = 5.0
"""A stream whose first event takes longer begins with a comment: proxies wait for headers."""
PING_S = 15.0
"""A comment is sent after so much silence, for proxies that close idle connections."""
SEND_TIMEOUT_S = 30.0
"""A client that reads nothing for so long is cut off."""
DONE = b"data: [DONE]\n\n"
TICK_S = 1.0
"""How often these three are looked at."""
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
    """Sends each of `events` (JSON, one or several complete `data:` blocks) as it comes.

    What the first event raises is the answer, with its own status, when it comes before the headers
    had to be sent. All is done by the task that serves the request: an event costs no task and no
    timer. Beside it there are one task, which waits for the client to go, and one timer."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.background = None
        self._events = events
        self._started = False
        self._cut = False
        self._sent = 0.0
        """When something was last sent, or began to be."""
        self._busy = 0
        """Sends under way: an event, a ping."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._sent = self._loop.time()
        gone = asyncio.ensure_future(_until_disconnected(receive))
        gone.add_done_callback(self._cut_off)
        self._timer = self._loop.call_later(TICK_S, self._tick)
        try:
            await self._run(scope, receive)
        except asyncio.CancelledError:
            if not self._cut or self._task is None or self._task.uncancel():
                raise
        except OSError:
            pass  # it does not read any more
        finally:
            self._cut = True  # from here on nobody needs to cancel anything
            self._timer.cancel()
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._events.aclose()

    async def _run(self, scope: Scope, receive: Receive) -> None:
        try:
            async for event in self._events:
                await self._write(event)
        except OSError:
            raise
        except Exception as error:
            if not isinstance(error, ApiError | TPRuntimeError):
                logger.exception("A stream failed.")
            told = to_api_error(error)
            if not self._started:
                await error_response(told)(scope, receive, self._send)
                return
            await self._write(event_of(error_body(told)))
        await self._write(DONE)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, body: bytes) -> None:
        self._busy += 1
        self._sent = self._loop.time()
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._busy -= 1
        self._sent = self._loop.time()

    def _tick(self) -> None:
        """Cuts off who does not read; says something where nothing has come for long."""
        now = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        if self._busy:
            if now - self._sent > SEND_TIMEOUT_S:
                self._cut_off(None)
        elif now - self._sent > (PING_S if self._started else HEADERS_AFTER_S):
            self._pinging = asyncio.ensure_future(self._ping())

    async def _ping(self) -> None:
        with contextlib.suppress(OSError):
            await self._write(_PING)

    def _cut_off(self, _: object) -> None:
        if self._task is not None and not self._cut:
            self._cut = True
            self._task.cancel()


def event_of(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


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
