"""Calls that wait for answers of the server: generate, and single questions.

A call knows what it has received so far, so the connection can ask for it again, from where it
stood, when the coordinator was started again. The connection's thread drives it; others wait for
its `future`. Knows nothing of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import msgspec

from tp_runtime.errors import (
    RequestCancelledError,
    RequestTimeoutError,
    TPRuntimeError,
    error_from_code,
)
from tp_runtime.messages import (
    Accepted,
    ClientMessage,
    Failed,
    Generate,
    Info,
    Resume,
    SampleDelta,
    ServerMessage,
    Tokenized,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from tp_runtime.outputs import CompletionOutput, RequestOutput, StreamChunk

TIMEOUT_GRACE_S = 2.0
"""The server ends a request at its time limit; the client does so itself this much later."""


class Call(Protocol):
    """What the connection needs of a call. All methods run on its thread."""

    request_id: str

    def message(self) -> ClientMessage:
        """To be sent now: the request as it was made, or what is left of it."""
        ...

    def take(self, message: ServerMessage) -> bool:
        """An answer; True when it was the last one."""
        ...

    def take_delta(self, delta: SampleDelta) -> bool:
        """As `take`, for the part of an Outputs message that belongs to this call."""
        ...

    def fail(self, error: TPRuntimeError) -> None:
        """The end without an answer."""
        ...

    def expired(self, now: float) -> bool:
        """Whether its time is over (`time.monotonic()`)."""
        ...


class Question:
    """A message with exactly one answer: GetInfo, Tokenize, Detokenize."""

    def __init__(self, request_id: str, message: ClientMessage, timeout_s: float | None) -> None:
        self.request_id = request_id
        self.future: Future[Info | Tokenized] = Future()
        self._message = message
        self._deadline = _deadline(timeout_s)

    def message(self) -> ClientMessage:
        return self._message

    def take(self, message: ServerMessage) -> bool:
        if isinstance(message, Failed):
            self.fail(error_from_code(message.code, message.message))
        elif isinstance(message, Info | Tokenized):
            _resolve(self.future, message)
        return self.future.done()

    def take_delta(self, delta: SampleDelta) -> bool:
        return False

    def fail(self, error: TPRuntimeError) -> None:
        _reject(self.future, error)

    def expired(self, now: float) -> bool:
        return self._deadline is not None and now > self._deadline


class GenerateCall:
    """One request. `future` gives its RequestOutput, or the error that ended it.

    `listener`, if any, is called on the connection's thread with every chunk and with None at the
    end (after `future` is done); it must return at once."""

    def __init__(
        self,
        message: Generate,
        prompt_index: int = 0,
        listener: Callable[[StreamChunk | None], None] | None = None,
    ) -> None:
        self.request_id = message.request_id
        self.prompt_index = prompt_index
        self.future: Future[RequestOutput] = Future()
        self.num_tokens = 0
        """Tokens received so far, of all samples."""
        self.num_prompt_tokens = len(message.prompt_token_ids or ())
        self._original = message
        self._listener = listener
        self._started = time.monotonic()
        self._deadline = _deadline(message.timeout_s)
        self._accepted: Accepted | None = None
        samples = [CompletionOutput(i) for i in range(message.params.n)]
        self._output = RequestOutput(message.request_id, message.prompt, outputs=samples)
        self._text: list[list[str]] = [[] for _ in samples]
        self._text_len = [0] * len(samples)
        self._running = len(samples)

    # ------------------------------------------------------------ for the connection

    def message(self) -> ClientMessage:
        """The request; once accepted, in the form that goes on where it stands."""
        message, accepted = self._original, self._accepted
        if message.timeout_s is not None and self._deadline is not None:
            left = self._deadline - TIMEOUT_GRACE_S - time.monotonic()
            message = msgspec.structs.replace(message, timeout_s=max(left, 0.001))
        if accepted is None:
            return message
        if accepted.prompt_token_ids:  # not rendered again: a template may tell the time
            message = msgspec.structs.replace(
                message,
                prompt=None,
                messages=None,
                tools=None,
                chat_template_kwargs=None,
                prompt_token_ids=unpack_ids(accepted.prompt_token_ids),
                own_text=message.own_text or message.messages is not None,
            )
        params = msgspec.structs.replace(message.params, seed=accepted.seed)
        resume = [
            Resume(sample.index, pack_ids(sample.token_ids), self._text_len[sample.index])
            for sample in self._output.outputs
            if sample.finish_reason is None
        ]
        return msgspec.structs.replace(message, params=params, resume=resume)

    def take(self, message: ServerMessage) -> bool:
        if isinstance(message, Accepted):
            if self._accepted is None:
                self._accepted = message
                self.num_prompt_tokens = message.num_prompt_tokens
        elif isinstance(message, Failed):
            self.fail(error_from_code(message.code, message.message))
        return self.future.done()

    def take_delta(self, delta: SampleDelta) -> bool:
        index = delta.index
        sample = self._output.outputs[index]
        ids = unpack_ids(delta.token_ids)
        sample.token_ids += ids
        self.num_tokens += len(ids)
        self._text[index].append(delta.text)
        self._text_len[index] += len(delta.text)
        if delta.logprobs is not None:
            sample.logprobs = (sample.logprobs or []) + delta.logprobs
        if delta.first_token_s or delta.prompt_logprobs is not None:
            self._take_details(delta)
        if self._listener is not None:
            self._listener(_chunk(self.prompt_index, delta, ids))
        if delta.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
            self._running -= 1
            if not self._running:
                self._complete()
                return True
        return False

    def fail(self, error: TPRuntimeError) -> None:
        _reject(self.future, error)
        if self._listener is not None:
            self._listener(None)

    def expired(self, now: float) -> bool:
        return self._deadline is not None and now > self._deadline

    # ------------------------------------------------------------ what has come so far

    def _take_details(self, delta: SampleDelta) -> None:
        """What comes once and not again after a restart."""
        output = self._output
        if delta.prompt_logprobs is not None and output.prompt_logprobs is None:
            output.prompt_logprobs = delta.prompt_logprobs
        if delta.first_token_s and not output.timings.first_token_s:
            output.num_cached_tokens = delta.num_cached_tokens
            output.timings.queue_s = delta.queue_s
            output.timings.first_token_s = delta.first_token_s

    def _complete(self) -> None:
        output, accepted = self._output, self._accepted
        for sample, pieces in zip(output.outputs, self._text, strict=True):
            sample.text = "".join(pieces)
            if self._original.params.logprobs is not None and sample.logprobs is None:
                sample.logprobs = []
        output.prompt_token_ids = list(self._original.prompt_token_ids or ())
        if accepted is not None:
            output.seed = accepted.seed
            if accepted.prompt_token_ids:
                output.prompt_token_ids = unpack_ids(accepted.prompt_token_ids)
        output.timings.total_s = time.monotonic() - self._started
        _resolve(self.future, output)
        if self._listener is not None:
            self._listener(None)


def _chunk(prompt_index: int, delta: SampleDelta, ids: list[int]) -> StreamChunk:
    logprobs: list[TokenLogprobs] | None = delta.logprobs
    return StreamChunk(
        delta.request_id,
        prompt_index,
        delta.index,
        delta.text,
        ids,
        delta.finish_reason,
        delta.stop_reason,
        logprobs,
    )


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s + TIMEOUT_GRACE_S


def _resolve(future: Future[RequestOutput] | Future[Info | Tokenized], value: object) -> None:
    if not future.done():
        future.set_result(value)  # type: ignore[arg-type]


def _reject(
    future: Future[RequestOutput] | Future[Info | Tokenized], error: TPRuntimeError
) -> None:
    if not future.done():
        future.set_exception(error)


def timeout_error() -> RequestTimeoutError:
    return RequestTimeoutError("The server did not answer within the time limit of the request.")


def cancelled_error() -> RequestCancelledError:
    return RequestCancelledError("The request was cancelled.")
