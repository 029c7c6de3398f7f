"""`POST /v1/completions`: one call of the client, and its outputs as OpenAI shapes them."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from tp_runtime.async_client import AsyncTokenStream
from tp_runtime.http.engine_access import EngineAccess
from tp_runtime.http.event_stream import event_of
from tp_runtime.http.requests import CompletionRequest, check_model
from tp_runtime.http.token_texts import CompletionLogprobs, TokenTexts
from tp_runtime.http.usage import usage, usage_of
from tp_runtime.messages import TokenLogprobs
from tp_runtime.outputs import CompletionOutput, RequestOutput, StreamChunk
from tp_runtime.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class Completion:
    """One request. Raises ApiError or InvalidRequestError when it is made or begun."""

    def __init__(self, request: CompletionRequest, engine: EngineAccess, texts: TokenTexts) -> None:
        check_model(request.model, engine.model)
        request.check()
        self._request = request
        self._engine = engine
        self._texts = texts
        self._prompts: Any = request.prompts()
        self._params = self._sampling_params()
        self._options = request.options
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.model,
        }

    def _sampling_params(self) -> SamplingParams:
        request = self._request
        limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        prompt_logprobs = request.logprobs if request.echo else None
        return request.sampling_params(max_tokens=limit, prompt_logprobs=prompt_logprobs)

    def _arguments(self) -> dict[str, Any]:
        return {
            "timeout": self._request.check_timeout(),
            "add_special_tokens": self._request.add_special_tokens,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        client = self._engine.client
        work: Any = client.generate(self._prompts, self._params, **self._arguments())
        outputs: list[RequestOutput] = await work
        choices = []
        for number, output in enumerate(outputs):
            prompt = await self._echoed(number)
            choices += [self._choice(output, sample, prompt) for sample in output.outputs]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return {**self._head, "choices": choices, "usage": usage_of(outputs)}

    async def _echoed(self, number: int) -> str:
        if not self._request.echo:
            return ""
        prompt: str | list[int] = self._prompts[number]
        return prompt if isinstance(prompt, str) else await self._engine.client.detokenize(prompt)

    def _choice(
        self, output: RequestOutput, sample: CompletionOutput, prompt: str
    ) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs is not None:
            ids: list[int] = []
            found: list[TokenLogprobs | None] = []
            if self._request.echo:
                ids += output.prompt_token_ids
                found += output.prompt_logprobs or []
            ids += sample.token_ids
            found += sample.logprobs or []
            logprobs = CompletionLogprobs(self._texts, self._request.logprobs).lists(ids, found)
        return {
            "index": 0,
            "text": prompt + sample.text,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }

    # ------------------------------------------------------------ streaming

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, without the closing `[DONE]`."""
        client = self._engine.client
        count = [0] * len(self._prompts)
        lists: dict[int, CompletionLogprobs] = {}
        echoed: set[int] = set()
        stream = client.generate(self._prompts, self._params, stream=True, **self._arguments())
        async with stream:
            async for chunk in stream:
                if not chunk.token_ids and not chunk.text and chunk.finish_reason is None:
                    continue
                index = chunk.prompt_index * self._params.n + chunk.index
                count[chunk.prompt_index] += len(chunk.token_ids)
                text = chunk.text
                if self._request.echo and index not in echoed:
                    echoed.add(index)
                    text = await self._echoed(chunk.prompt_index) + text
                yield self._event(stream, chunk, index, text, lists, sum(count))
            if self._options.include_usage:
                end = {**self._head, "choices": [], "usage": usage_of(stream.outputs)}
                yield event_of(end)

    def _event(
        self,
        stream: AsyncTokenStream,
        chunk: StreamChunk,
        index: int,
        text: str,
        lists: dict[int, CompletionLogprobs],
        num_tokens: int,
    ) -> bytes:
        logprobs = None
        if self._request.logprobs is not None:
            mine = lists.get(index)
            if mine is None:
                mine = lists[index] = CompletionLogprobs(self._texts, self._request.logprobs)
            logprobs = mine.lists(chunk.token_ids, chunk.logprobs or ())
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        event: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._options.continuous_usage_stats:
            prompts = sum(stream.num_prompt_tokens(i) for i in range(len(self._prompts)))
            event["usage"] = usage(prompts, num_tokens)
        elif self._options.include_usage:
            event["usage"] = None
        return event_of(event)
