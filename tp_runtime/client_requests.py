"""What Client and AsyncClient share: from the arguments of a call to calls of the connection."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tp_runtime.client_address import find_server
from tp_runtime.client_arguments import (
    Messages,
    ParamsArgument,
    Prompts,
    generate_message,
    message_lists,
    params_list,
    prompt_list,
)
from tp_runtime.client_calls import GenerateCall, Question
from tp_runtime.errors import InvalidRequestError
from tp_runtime.messages import Detokenize, Generate, GetInfo, Tokenize
from tp_runtime.outputs import StreamChunk

if TYPE_CHECKING:
    from tp_runtime.client_connection import Connection

MAX_IN_FLIGHT = 1024
"""Prompts of one call that are with the server at once; longer lists follow as answers come, so
that they do not fill the server's queue."""

DEFAULT_CONNECT_TIMEOUT_S = 3.0
DEFAULT_RECONNECT_TIMEOUT_S = 20.0

Listener = Callable[[StreamChunk | None], None]


class Batch(NamedTuple):
    """The messages of one generate or chat; `single`: one prompt was given, not a list."""

    messages: list[Generate]
    single: bool


class RequestMaker:
    """Names requests and checks arguments. Thread-safe; the connection is opened at once but waits
    for nothing."""

    def __init__(
        self,
        address: str | None,
        reconnect: bool,
        timeout: float | None,
        connect_timeout: float,
        reconnect_timeout: float,
    ) -> None:
        # Here and not above: ZeroMQ is a third of what `from tp_runtime import Client` would cost.
        from tp_runtime.client_connection import Connection

        self.timeout = timeout
        self.connection: Connection = Connection(
            find_server() if address is None else address,
            connect_timeout,
            reconnect_timeout if reconnect else 0.0,
        )
        # When client and streams are all forgotten; it refers to none of them.
        self._finalizer = weakref.finalize(self, self.connection.close, wait=False)
        self._names = itertools.count(1)
        self._prefix = os.urandom(4).hex()

    def close(self) -> None:
        self._finalizer.detach()
        self.connection.close()

    def generate(
        self,
        prompts: Prompts | None,
        prompt_token_ids: Any,
        params: ParamsArgument,
        fields: Mapping[str, Any],
        options: Mapping[str, Any],
        stream: bool,
    ) -> Batch:
        """Raises InvalidRequestError."""
        listed, single = prompt_list(prompts, prompt_token_ids)
        return self._batch(listed, single, params, fields, options, is_chat=False, stream=stream)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: ParamsArgument,
        fields: Mapping[str, Any],
        options: Mapping[str, Any],
        stream: bool,
    ) -> Batch:
        """Raises InvalidRequestError."""
        chats, single = message_lists(messages)
        return self._batch(chats, single, params, fields, options, is_chat=True, stream=stream)

    def _batch(
        self,
        prompts: Sequence[Any],
        single: bool,
        params: ParamsArgument,
        fields: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        is_chat: bool,
        stream: bool,
    ) -> Batch:
        timeout = options.get("timeout_s")
        if timeout is not None and not timeout > 0:
            raise InvalidRequestError(f"timeout={timeout!r} must be greater than 0 seconds.")
        each = params_list(params, fields, len(prompts))
        messages = [
            generate_message(
                self._name(), prompt, one, is_chat=is_chat, stream=stream, options=options
            )
            for prompt, one in zip(prompts, each, strict=True)
        ]
        return Batch(messages, single)

    def begin(self, message: Generate, index: int, listener: Listener | None) -> GenerateCall:
        call = GenerateCall(message, index, listener)
        self.connection.send(call)
        return call

    def ask_info(self, timeout: float | None) -> Question:
        name = self._name()
        return self._ask(Question(name, GetInfo(name), timeout or self.timeout))

    def ask_tokenize(
        self,
        prompt: str | None,
        messages: Messages | None,
        add_special_tokens: bool,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> Question:
        name = self._name()
        chat = None if messages is None else message_lists(messages)[0][0]
        message = Tokenize(name, prompt, chat, add_special_tokens, chat_template_kwargs)
        return self._ask(Question(name, message, self.timeout))

    def ask_detokenize(self, token_ids: Sequence[int]) -> Question:
        name = self._name()
        return self._ask(Question(name, Detokenize(name, list(token_ids)), self.timeout))

    def _ask(self, question: Question) -> Question:
        self.connection.send(question)
        return question

    def _name(self) -> str:
        return f"{self._prefix}-{next(self._names)}"
