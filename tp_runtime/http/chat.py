"""`POST /v1/chat/completions`: one chat, and its outputs as OpenAI shapes them."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from tp_runtime.http.engine_access import EngineAccess
from tp_runtime.http.event_stream import event_of
from tp_runtime.http.requests import ChatCompletionRequest, check_model
from tp_runtime.http.token_texts import TokenTexts, chat_logprobs
from tp_runtime.http.usage import usage, usage_of
from tp_runtime.messages import TokenLogprobs
from tp_runtime.outputs import RequestOutput
from tp_runtime.sampling_params import SamplingParams


class Chat:
    """One request. Raises ApiError or InvalidRequestError when it is made or begun."""

    def __init__(
        self, request: ChatCompletionRequest, engine: EngineAccess, texts: TokenTexts
    ) -> None:
        check_model(request.model, engine.model)
        request.check()
        self._request = request
        self._engine = engine
        self._texts = texts
        self._top = request.top_logprobs or 0
        self._params = self._sampling_params()
        self._options = request.options
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def _sampling_params(self) -> SamplingParams:
        request = self._request
        return request.sampling_params(
            max_tokens=request.token_limit(), logprobs=self._top if request.logprobs else None
        )

    def _arguments(self) -> dict[str, Any]:
        request = self._request
        tools = None if request.tool_choice == "none" else request.tools
        return {
            "timeout": request.check_timeout(),
            "tools": tools or None,
            "chat_template_kwargs": request.template_arguments(),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._engine.model,
            "system_fingerprint": None,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        client = self._engine.client
        output: RequestOutput = await client.chat(
            self._request.messages, self._params, **self._arguments()
        )
        choices = [
            {
                "index": sample.index,
                "message": {"role": "assistant", "content": sample.text, "refusal": None},
                "logprobs": self._logprobs(sample.logprobs),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in output.outputs
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage_of([output])}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, without the closing `[DONE]`: first the role, then text."""
        client = self._engine.client
        head = self._head("chat.completion.chunk")
        if self._options.include_usage:
            head["usage"] = None
        stream = client.chat(self._request.messages, self._params, stream=True, **self._arguments())
        count, begun = 0, set[int]()
        async with stream:
            async for chunk in stream:
                if not chunk.token_ids and not chunk.text and chunk.finish_reason is None:
                    continue
                count += len(chunk.token_ids)
                if self._options.continuous_usage_stats:
                    head["usage"] = usage(stream.num_prompt_tokens(0), count)
                first = b""
                if chunk.index not in begun:
                    begun.add(chunk.index)
                    role = {"role": "assistant", "content": ""}
                    first = event_of({**head, "choices": [_delta(chunk.index, role)]})
                choice = _delta(chunk.index, {"content": chunk.text} if chunk.text else {})
                choice["logprobs"] = self._logprobs(chunk.logprobs)
                choice["finish_reason"] = chunk.finish_reason
                choice["stop_reason"] = chunk.stop_reason
                yield first + event_of({**head, "choices": [choice]})
            if self._options.include_usage:
                yield event_of({**head, "choices": [], "usage": usage_of(stream.outputs)})

    def _logprobs(self, logprobs: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._texts, logprobs, self._top)


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
