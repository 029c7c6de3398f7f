"""Event streams without a server: what is sent when, who is cut off, what an error becomes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tp_runtime.errors import InvalidRequestError
from tp_runtime.http import event_stream
from tp_runtime.http.event_stream import EventStream

Events = AsyncGenerator[bytes, None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "TICK_S", 0.01)
    monkeypatch.setattr(event_stream, "HEADERS_AFTER_S", 0.1)
    monkeypatch.setattr(event_stream, "PING_S", 0.3)
    monkeypatch.setattr(event_stream, "SEND_TIMEOUT_S", 0.2)


class Peer:
    """The other side. `gone` ends it; `reads` False: a send never returns."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.reads = True

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if not self.reads:
            await asyncio.Event().wait()

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def serve(events: Callable[[], Events], act: Callable[[Peer], Any] | None = None) -> Peer:
    """Runs the stream to its end, `act` beside it."""

    async def main() -> Peer:
        peer = Peer()
        stream = EventStream(events())
        beside = asyncio.ensure_future(act(peer)) if act is not None else None
        async with asyncio.timeout(5):
            await stream({"type": "http"}, peer.receive, peer.send)
            if beside is not None:
                await beside
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(0)  # what was cancelled ends
        assert all(task.done() for task in left)
        return peer

    return asyncio.run(main())


def test_events_go_out_as_they_are_and_the_end_is_told() -> None:
    async def events() -> Events:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    peer = serve(events)
    assert peer.status == 200
    assert peer.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert peer.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_an_error_before_the_first_event_has_a_status_of_its_own() -> None:
    async def events() -> Events:
        raise InvalidRequestError("no such thing")
        yield b""

    peer = serve(events)
    assert peer.status == 400
    assert "no such thing" in json.loads(peer.body)["error"]["message"]


def test_an_error_later_is_an_event() -> None:
    async def events() -> Events:
        yield b"data: 1\n\n"
        raise InvalidRequestError("too late")

    peer = serve(events)
    assert peer.status == 200
    assert b"too late" in peer.body
    assert peer.body.endswith(b"data: [DONE]\n\n")


def test_a_slow_first_event_does_not_hold_up_the_headers_and_silence_is_broken() -> None:
    async def events() -> Events:
        await asyncio.sleep(0.8)
        yield b"data: 1\n\n"

    peer = serve(events)
    assert peer.status == 200
    assert 2 <= peer.body.count(b": waiting") <= 4
    assert peer.body.endswith(b"data: 1\n\ndata: [DONE]\n\n")


def _endless(closed: list[bool]) -> Callable[[], Events]:
    async def events() -> Events:
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0.01)
        finally:
            closed.append(True)

    return events


def test_a_client_that_goes_ends_the_stream() -> None:
    async def leave(peer: Peer) -> None:
        await asyncio.sleep(0.05)
        peer.gone.set()

    closed: list[bool] = []
    peer = serve(_endless(closed), leave)
    assert closed == [True]
    assert b"[DONE]" not in peer.body


def test_a_client_that_goes_before_the_first_event_is_sent_nothing() -> None:
    async def events() -> Events:
        await asyncio.sleep(10)
        yield b""

    async def leave(peer: Peer) -> None:
        peer.gone.set()

    assert serve(events, leave).messages == []


def test_a_client_that_does_not_read_is_cut_off() -> None:
    async def stop_reading(peer: Peer) -> None:
        await asyncio.sleep(0.05)
        peer.reads = False

    closed: list[bool] = []
    serve(_endless(closed), stop_reading)
    assert closed == [True]


def test_a_cancel_from_outside_stays_one() -> None:
    async def main() -> None:
        peer, closed = Peer(), list[bool]()
        stream = EventStream(_endless(closed)())
        task = asyncio.ensure_future(stream({"type": "http"}, peer.receive, peer.send))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]

    asyncio.run(main())
