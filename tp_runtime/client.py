"""The blocking Python client of a running server."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, cast, overload

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


class PendingOutput:
    """A request that runs: `result` waits for it, `num_tokens` tells how far it is."""

    def __init__(self, requests: RequestMaker, call: GenerateCall) -> None:
        self._requests = requests
        self._call = call

    @property
    def request_id(self) -> str:
        return self._call.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, as of the last half second."""
        return self._call.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """0 until the server has tokenized the prompt."""
        return self._call.num_prompt_tokens

    def done(self) -> bool:
        return self._call.future.done()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """The output, or the error that ended the request; TimeoutError when it still runs after
        `timeout` seconds."""
        return self._call.future.result(timeout)

    def cancel(self) -> None:
        """Ends it with RequestCancelledError; harmless when it is done."""
        self._requests.connection.cancel(self.request_id)


class TokenStream(Iterator[StreamChunk]):
    """The chunks of one or more requests as they come; an error of a request is raised where its
    next chunk would have been. Closing it, or leaving its `with` block, cancels what still runs.
    Not to be used by several threads at once."""

    def __init__(self, requests: RequestMaker, batch: Batch) -> None:
        chunks: queue.SimpleQueue[StreamChunk | int] = queue.SimpleQueue()
        self._chunks = chunks
        self._requests = requests
        self._single = batch.single
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
        chunks = self._chunks

        def listener(chunk: StreamChunk | None) -> None:
            chunks.put(index if chunk is None else chunk)

        self._calls.append(self._requests.begin(message, index, listener))
        self._running += 1
        return True

    @property
    def request_id(self) -> str:
        """Of the first request, for `Client.cancel`."""
        return self._calls[0].request_id

    @property
    def output(self) -> RequestOutput:
        """Of the first request, once the stream has ended."""
        return self._calls[0].future.result(0)

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of all requests, once the stream has ended."""
        return [call.future.result(0) for call in self._calls]

    def __next__(self) -> StreamChunk:
        while self._running and not self._closed:
            item = self._chunks.get()
            if not isinstance(item, int):
                return item
            self._running -= 1
            self._begin_next()
            error = self._calls[item].future.exception()
            if error is not None:
                self.close()
                raise error
        raise StopIteration

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for call in self._calls:
                if not call.future.done():
                    self._requests.connection.cancel(call.request_id)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor may have failed
            self.close()


class Client:
    """A connection to a server, for any number of requests at once, from any threads.

    `address=None` takes the only server of this user on this machine. `timeout`: seconds that a
    call may take unless it says otherwise (None: as long as it takes). With `reconnect`, requests
    survive a restart of the coordinator: they go on where they stood, within `reconnect_timeout`
    seconds; without it they fail at once.

    Raises ServerUnavailableError when nobody answers within `connect_timeout` seconds, or within
    `reconnect_timeout` where a server of this machine is being started again. Errors of
    single requests are those of `tp_runtime.errors`: InvalidRequestError, OverloadedError,
    RequestTimeoutError, RequestCancelledError, RequestFailedError, ServerUnavailableError.

        with Client("tcp://127.0.0.1:5555") as client:
            print(client.generate("The capital of France is", max_tokens=8).text)
            for chunk in client.generate("Once upon a time", stream=True):
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
        try:
            self._requests.connection.ping().result()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return self._requests.connection.address

    @property
    def requests(self) -> RequestMaker:
        """The layer below: requests one by one, for code that follows many of them itself."""
        return self._requests

    @overload
    def generate(
        self,
        prompts: Prompts | None = ...,
        params: ParamsArgument = ...,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> TokenStream: ...

    @overload
    def generate(
        self,
        prompts: str | Sequence[int] | None = ...,
        params: ParamsArgument = ...,
        *,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: ParamsArgument = ...,
        *,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> list[RequestOutput]: ...

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
    ) -> RequestOutput | list[RequestOutput] | TokenStream:
        """Continues a prompt (a string or a list of token ids), or several in one go.

        One prompt gives one RequestOutput, a list of prompts a list in the same order. `params` is
        a SamplingParams for all or a list with one for each; its fields may be given as keyword
        arguments instead. `stream=True`: an iterator of StreamChunk. `timeout` in seconds is for
        each request. Raises InvalidRequestError for anything that cannot work, and the errors of
        the class; when one request of a list fails, the others are cancelled."""
        options = {
            "timeout_s": self._requests.timeout if timeout is None else timeout,
            "add_special_tokens": add_special_tokens,
            "detokenize": detokenize,
        }
        batch = self._requests.generate(prompts, prompt_token_ids, params, fields, options, stream)
        return TokenStream(self._requests, batch) if stream else self._wait(batch)

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
        """Answers a chat, a list of `{"role": ..., "content": ...}`, or several, through the
        model's chat template. Results, `params`, `stream` and errors as in `generate`; a base
        model without template is an InvalidRequestError."""
        options = {
            "timeout_s": self._requests.timeout if timeout is None else timeout,
            "tools": None if tools is None else list(tools),
            "chat_template_kwargs": chat_template_kwargs,
        }
        batch = self._requests.chat(messages, params, fields, options, stream)
        return TokenStream(self._requests, batch) if stream else self._wait(batch)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: ParamsArgument = None,
        *,
        timeout: float | None = None,
        add_special_tokens: bool = True,
        detokenize: bool = True,
        **fields: Any,
    ) -> PendingOutput:
        """As `generate` with one prompt, but does not wait."""
        options = {
            "timeout_s": self._requests.timeout if timeout is None else timeout,
            "add_special_tokens": add_special_tokens,
            "detokenize": detokenize,
        }
        batch = self._requests.generate(prompt, None, params, fields, options, stream=False)
        if not batch.single:
            raise TypeError("submit takes one prompt; call it once for each.")
        return PendingOutput(self._requests, self._requests.begin(batch.messages[0], 0, None))

    def info(self, timeout: float | None = None) -> Info:
        """What the server says about itself: model, sizes, state, counters."""
        return cast(Info, self._requests.ask_info(timeout).future.result())

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a text, or of messages through the chat template."""
        question = self._requests.ask_tokenize(
            prompt, messages, add_special_tokens, chat_template_kwargs
        )
        return unpack_ids(cast(Tokenized, question.future.result()).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        question = self._requests.ask_detokenize(token_ids)
        return cast(Tokenized, question.future.result()).text

    def cancel(self, request_id: str) -> None:
        """Ends a request with RequestCancelledError; harmless when it has ended."""
        self._requests.connection.cancel(request_id)

    def close(self) -> None:
        """Cancels what runs and closes the connection. May be called twice."""
        self._requests.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, batch: Batch) -> RequestOutput | list[RequestOutput]:
        """All outputs in order; the first error of any request ends the others."""
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        calls: list[GenerateCall] = []
        try:
            for number in range(len(batch.messages)):
                while len(calls) < min(len(batch.messages), number + MAX_IN_FLIGHT):
                    self._begin_and_tell(batch, calls, ended)
                calls[ended.get()].future.result()
        except BaseException:  # Ctrl-C too
            for call in calls:
                if not call.future.done():
                    self._requests.connection.cancel(call.request_id)
            raise
        outputs = [call.future.result() for call in calls]
        return outputs[0] if batch.single else outputs

    def _begin_and_tell(
        self, batch: Batch, calls: list[GenerateCall], ended: queue.SimpleQueue[int]
    ) -> None:
        index = len(calls)
        calls.append(self._requests.begin(batch.messages[index], index, None))
        calls[index].future.add_done_callback(lambda _: ended.put(index))
