"""The asyncio client of a running server; the surface is that of Client.

The connection is the same one, on a thread of its own, so that recovery is the same too. Its events
reach the event loop in batches: one wake-up per message of the server, however many streams it
feeds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, TypeVar, cast, overload

from tp_runtime.client_arguments import Messages, ParamsArgument, Prompts
from tp_runtime.client_calls import GenerateCall
from tp_runtime.client_requests import (
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_RECONNECT_TIMEOUT_S,
    MAX_IN_FLIGHT,
    Batch,
    RequestMaker,
)
from tp_runtime.messages import Info, Tokenized, unpack_ids
from tp_runtime.outputs import RequestOutput, StreamChunk

T = TypeVar("T")


class _LoopEvents:
    """Runs callbacks on an event loop in the order they were given, from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def put(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False  # before looking: an event put from now on schedules anew
        while self._events:
            self._events.popleft()()


class AsyncTokenStream(AsyncIterator[StreamChunk]):
    """As TokenStream, for `async for`; `aclose`, leaving `async with`, or cancelling the task that
    waits for a chunk cancels what still runs."""

    def __init__(self, requests: RequestMaker, events: _LoopEvents, batch: Batch) -> None:
        self._chunks: asyncio.Queue[StreamChunk | int] = asyncio.Queue()
        self._requests = requests
        self._events = events
        self._left = iter(enumerate(batch.messages))
        self._calls: list[GenerateCall] = []
        self._running = 0
        self._closed = False
        for _ in range(MAX_IN_FLIGHT):
            if not self._begin_next():
                break

    def _begin_next(self) -> bool:
        index, message = next(self._left, (0, None))
        if message is None:
            return False
        events, put = self._events, self._chunks.put_nowait

        def listener(chunk: StreamChunk | None) -> None:
            item = index if chunk is None else chunk
            events.put(lambda: put(item))

        self._calls.append(self._requests.begin(message, index, listener))
        self._running += 1
        return True

    @property
    def request_id(self) -> str:
        """Of the first request, for `AsyncClient.cancel`."""
        return self._calls[0].request_id

    @property
    def output(self) -> RequestOutput:
        """Of the first request, once the stream has ended."""
        return self._calls[0].future.result(0)

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of all requests, once the stream has ended."""
        return [call.future.result(0) for call in self._calls]

    def num_prompt_tokens(self, prompt_index: int) -> int:
        """Of one prompt of the call; 0 for a text before the server has taken it."""
        return self._calls[prompt_index].num_prompt_tokens

    async def __anext__(self) -> StreamChunk:
        while self._running and not self._closed:
            try:
                item = await self._chunks.get()
            except asyncio.CancelledError:
                self.close()
                raise
            if not isinstance(item, int):
                return item
            self._running -= 1
            self._begin_next()
            error = self._calls[item].future.exception()
            if error is not None:
                self.close()
                raise error
        raise StopAsyncIteration

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for call in self._calls:
                if not call.future.done():
                    self._requests.connection.cancel(call.request_id)

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> AsyncTokenStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


class AsyncClient:
    """As Client; to be made and used on one event loop. The connection opens with the first call,
    which raises ServerUnavailableError when nobody answers.

        async with AsyncClient() as client:
            output = await client.generate("The capital of France is", max_tokens=8)
            async for chunk in client.generate("Once upon a time", stream=True):
                print(chunk.text, end="", flush=True)
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        reconnect: bool = True,
        timeout: float | None = None,
        connect_timeout: float = DEFAULT_CONNECT_TIMEOUT_S,
        reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT_S,
    ) -> None:
        self._requests = RequestMaker(
            address, reconnect, timeout, connect_timeout, reconnect_timeout
        )
        self._loop_events: _LoopEvents | None = None

    @property
    def address(self) -> str:
        return self._requests.connection.address

    async def connect(self) -> None:
        """Waits for the connection; raises ServerUnavailableError when nobody answers."""
        await self._result(self._requests.connection.ping())

    @overload
    def generate(
        self,
        prompts: Prompts | None = ...,
        params: ParamsArgument = ...,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncTokenStream: ...

    @overload
    def generate(
        self,
        prompts: str | Sequence[int] | None = ...,
        params: ParamsArgument = ...,
        *,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> Coroutine[Any, Any, RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: ParamsArgument = ...,
        *,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> Coroutine[Any, Any, list[RequestOutput]]: ...

    def generate(
        self,
        prompts: Prompts | None = None,
        params: ParamsArgument = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        timeout: float | None = None,
        add_special_tokens: bool = True,
        detokenize: bool = True,
        **fields: Any,
    ) -> Coroutine[Any, Any, RequestOutput | list[RequestOutput]] | AsyncTokenStream:
        """As `Client.generate`: to be awaited, or with `stream=True` an async iterator. Cancelling
        the task that waits cancels the requests."""
        options = {
            "timeout_s": self._requests.timeout if timeout is None else timeout,
            "add_special_tokens": add_special_tokens,
            "detokenize": detokenize,
        }
        batch = self._requests.generate(prompts, prompt_token_ids, params, fields, options, stream)
        return self._stream(batch) if stream else self._wait(batch)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: ParamsArgument = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        stream: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> Any:
        """As `Client.chat`: to be awaited, or with `stream=True` an async iterator."""
        options = {
            "timeout_s": self._requests.timeout if timeout is None else timeout,
            "tools": None if tools is None else list(tools),
            "chat_template_kwargs": chat_template_kwargs,
        }
        batch = self._requests.chat(messages, params, fields, options, stream)
        return self._stream(batch) if stream else self._wait(batch)

    async def info(self, timeout: float | None = None) -> Info:
        return cast(Info, await self._result(self._requests.ask_info(timeout).future))

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        question = self._requests.ask_tokenize(
            prompt, messages, add_special_tokens, chat_template_kwargs
        )
        return unpack_ids(cast(Tokenized, await self._result(question.future)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        question = self._requests.ask_detokenize(token_ids)
        return cast(Tokenized, await self._result(question.future)).text

    def cancel(self, request_id: str) -> None:
        self._requests.connection.cancel(request_id)

    async def close(self) -> None:
        """Cancels what runs and closes the connection. May be called twice."""
        await asyncio.to_thread(self._requests.close)

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def _events(self) -> _LoopEvents:
        if self._loop_events is None:
            self._loop_events = _LoopEvents(asyncio.get_running_loop())
        return self._loop_events

    def _stream(self, batch: Batch) -> AsyncTokenStream:
        return AsyncTokenStream(self._requests, self._events, batch)

    async def _wait(self, batch: Batch) -> RequestOutput | list[RequestOutput]:
        """All outputs in order; the first error of any request ends the others."""
        ended: asyncio.Queue[int] = asyncio.Queue()
        calls: list[GenerateCall] = []
        try:
            for number in range(len(batch.messages)):
                while len(calls) < min(len(batch.messages), number + MAX_IN_FLIGHT):
                    self._begin_and_tell(batch, calls, ended)
                calls[await ended.get()].future.result()
        except BaseException:  # the task was cancelled, or one request failed
            for call in calls:
                if not call.future.done():
                    self._requests.connection.cancel(call.request_id)
            raise
        outputs = [call.future.result() for call in calls]
        return outputs[0] if batch.single else outputs

    def _begin_and_tell(
        self, batch: Batch, calls: list[GenerateCall], ended: asyncio.Queue[int]
    ) -> None:
        index, events = len(calls), self._events
        calls.append(self._requests.begin(batch.messages[index], index, None))
        calls[index].future.add_done_callback(lambda _: events.put(lambda: ended.put_nowait(index)))

    async def _result(self, future: Future[T]) -> T:
        """The result of a future of the connection, which itself is never cancelled."""
        if not future.done():
            done = asyncio.get_running_loop().create_future()
            events = self._events

            def wake() -> None:
                if not done.done():
                    done.set_result(None)

            future.add_done_callback(lambda _: events.put(wake))
            await done
        return future.result()
