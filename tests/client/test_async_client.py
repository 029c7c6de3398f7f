"""The asyncio client: the surface of Client, iteration, cancellation with the task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.coordinator.fake_engine import (
    TOKENIZER,
    FakeServer,
    fake_server,
    story,
    story_text,
    wait_until,
)
from tp_runtime import AsyncClient, SamplingParams
from tp_runtime.errors import (
    InvalidRequestError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerUnavailableError,
)


def with_client(
    test: Callable[[AsyncClient, FakeServer], Coroutine[Any, Any, None]], step_s: float = 0.0
) -> None:
    async def main(server: FakeServer) -> None:
        async with AsyncClient(server.address) as client:
            await test(client, server)

    with fake_server(step_s=step_s) as server:
        asyncio.run(asyncio.wait_for(main(server), 30))


def test_the_surface_is_that_of_the_blocking_client() -> None:
    async def test(client: AsyncClient, server: FakeServer) -> None:
        one = await client.generate("x", max_tokens=5, seed=1)
        assert (one.text, one.token_ids) == (story_text(1, 5), story(1, 5))
        several = await client.generate(["a", "b"], [SamplingParams(max_tokens=i) for i in (1, 2)])
        assert [len(output.token_ids) for output in several] == [1, 2]
        message = {"role": "user", "content": "Hi"}
        chat = await client.chat([message], max_tokens=3, seed=1)
        assert chat.token_ids == story(1, 3)
        assert (await client.info()).model == "fake"
        assert await client.tokenize("abc") == TOKENIZER.encode("abc")
        assert await client.detokenize(TOKENIZER.encode("abc")) == "abc"
        with pytest.raises(InvalidRequestError, match="did you mean 'top_k'"):
            await client.generate("x", topk=1)

    with_client(test)


def test_a_stream_is_iterated_and_joins_to_the_output() -> None:
    async def test(client: AsyncClient, server: FakeServer) -> None:
        stream = client.generate("x", max_tokens=100, seed=2, stream=True)
        text = "".join([chunk.text async for chunk in stream])
        assert text == stream.output.text == story_text(2, 100)
        chat = client.chat([{"role": "user", "content": "x"}], max_tokens=4, seed=1, stream=True)
        assert [i async for chunk in chat for i in chunk.token_ids] == story(1, 4)

    with_client(test)


def test_hundreds_of_streams_run_at_once() -> None:
    async def test(client: AsyncClient, server: FakeServer) -> None:
        async def one(seed: int) -> str:
            stream = client.generate("x", max_tokens=20, seed=seed, stream=True)
            return "".join([chunk.text async for chunk in stream])

        texts = await asyncio.gather(*(one(i) for i in range(300)))
        assert texts == [story_text(i, 20) for i in range(300)]

    with_client(test)


def test_cancelling_the_waiting_task_cancels_at_the_server() -> None:
    async def test(client: AsyncClient, server: FakeServer) -> None:
        async def read() -> None:
            async for _ in client.generate("x", stream=True):
                pass

        async def wait() -> None:
            await client.generate(["x", "y"])

        for work in (read, wait):
            task = asyncio.create_task(work())
            await asyncio.sleep(0.1)
            assert server.engine.running
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, lambda: not server.engine.running)

    with_client(test, step_s=0.01)


def test_leaving_a_stream_early_cancels_it() -> None:
    async def test(client: AsyncClient, server: FakeServer) -> None:
        async with client.generate("x", stream=True) as stream:
            async for _ in stream:
                break
        await asyncio.to_thread(wait_until, lambda: not server.engine.running)
        second = client.generate("x", stream=True)
        await anext(second)
        await second.aclose()
        assert [chunk async for chunk in second] == []
        await asyncio.to_thread(wait_until, lambda: not server.engine.running)

    with_client(test, step_s=0.01)


def test_cancel_by_name_and_a_time_limit_are_typed_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp_runtime.client_calls.TIMEOUT_GRACE_S", 0.1)

    async def test(client: AsyncClient, server: FakeServer) -> None:
        stream = client.generate("x", stream=True)
        await anext(stream)
        client.cancel(stream.request_id)
        with pytest.raises(RequestCancelledError):
            async for _ in stream:
                pass
        with pytest.raises(RequestTimeoutError):
            await client.generate("x", timeout=0.2)

    with_client(test, step_s=0.01)


def test_nobody_listening_is_raised_by_the_first_call() -> None:
    async def main() -> None:
        client = AsyncClient("tcp://127.0.0.1:9", connect_timeout=0.3)
        with pytest.raises(ServerUnavailableError, match="Nobody answers"):
            await client.generate("x")
        with pytest.raises(ServerUnavailableError, match="Nobody answers"):
            async for _ in client.generate("x", stream=True):
                pass
        await client.close()
        await client.close()
        with pytest.raises(ServerUnavailableError, match="closed"):
            await client.info()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_loop_stays_free_while_streams_run() -> None:
    """Chunks reach the loop in batches; a timer beside 100 streams must not come late."""

    async def test(client: AsyncClient, server: FakeServer) -> None:
        async def read(seed: int) -> None:
            async for _ in client.generate("x", max_tokens=50, seed=seed, stream=True):
                pass

        readers = asyncio.gather(*(read(i) for i in range(100)))
        loop, late = asyncio.get_running_loop(), 0.0
        while not readers.done():
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            late = max(late, loop.time() - due)
        await readers
        assert late < 0.5

    with_client(test, step_s=0.002)
