"""The bodies that the API takes, one struct each: OpenAI's fields, and vLLM's beyond them.

A field that is not here is refused by name. A field whose value would ask for something this server
does not do is here, so that it may be given with the value that asks for nothing (`suffix: null`),
and is refused by name with any other one. Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from tp_runtime.http.errors import ApiError
from tp_runtime.http.response_format import structured_outputs_of
from tp_runtime.sampling_params import SamplingParams, StructuredOutputsParams


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    """One more chunk before the end, without choices, with the usage."""
    continuous_usage_stats: bool = False
    """The usage so far in every chunk."""
    include_obfuscation: bool = False


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats have in common. None means the default, as in OpenAI's API."""

    model: str = ""
    """Empty: the model that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool | None = None
    response_format: Any = None
    """As in OpenAI's API: text, json_object or json_schema. See `http.response_format`."""
    structured_outputs: StructuredOutputsParams | None = None
    """vLLM's field, which can do more."""
    timeout: float | None = None
    """Seconds after which the request ends with status 408."""
    user: str | None = None
    """Taken and not used, as it changes no answer."""

    @property
    def options(self) -> StreamOptions:
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options needs stream=true; leave it out.", param="stream_options"
            )
        return self.stream_options or StreamOptions()

    def sampling_params(self, **more: Any) -> SamplingParams:
        """`more` wins over the fields of this struct. Raises InvalidRequestError."""
        names = SamplingParams.__struct_fields__
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        given["structured_outputs"] = structured_outputs_of(
            self.response_format, self.structured_outputs
        )
        given.update(more)
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        params = SamplingParams(**given)
        params.validate()
        return params

    def check_timeout(self) -> float | None:
        if self.timeout is not None and not self.timeout > 0:
            raise ApiError(400, "timeout must be greater than 0 seconds.", param="timeout")
        return self.timeout


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `prompt`: a text, a list of texts, token ids, or a list of those."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
    suffix: Any = None
    best_of: int | None = None
    prompt_logprobs: Any = None

    def prompts(self) -> list[str | list[int]]:
        """One by one. Raises ApiError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is empty; give at least one.", param="prompt")
        ids = [item for item in prompt if isinstance(item, int)]
        if len(ids) == len(prompt):
            return [ids]
        several = [item for item in prompt if not isinstance(item, int)]
        if ids or len({type(item) for item in several}) > 1:
            raise ApiError(
                400,
                "prompt mixes texts and token ids; give a text, a list of texts, a list of token "
                "ids, or a list of such lists.",
                param="prompt",
            )
        return several

    def check(self) -> None:
        """Raises ApiError naming the first field that asks for what this server does not do."""
        _refuse("suffix", self.suffix not in (None, ""))
        _refuse("best_of", (self.best_of or 1) > 1)
        _refuse("prompt_logprobs", self.prompt_logprobs is not None, "use echo with logprobs")
        if self.echo and self.stream and self.logprobs is not None:
            raise ApiError(
                400, "echo with logprobs cannot be streamed; leave stream out.", param="stream"
            )


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    web_search_options: Any = None
    store: bool | None = None

    def check(self) -> None:
        """Raises ApiError naming the first field that asks for what this server does not do."""
        if self.tool_choice not in (None, "auto", "none"):
            _refuse("tool_choice", True, 'use "auto" or "none"')
        _refuse("functions", bool(self.functions), "use tools")
        _refuse("function_call", self.function_call not in (None, "none", "auto"))
        _refuse("modalities", self.modalities not in (None, ["text"]))
        _refuse("store", bool(self.store))
        for name in ("audio", "prediction", "web_search_options"):
            _refuse(name, getattr(self, name) is not None)
        if self.reasoning_effort is not None:
            _refuse("reasoning_effort", True, "use chat_template_kwargs of the model")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true.", param="top_logprobs")

    def token_limit(self) -> int | None:
        """Raises ApiError when two different limits are given."""
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ApiError(
                400,
                "max_tokens and max_completion_tokens differ; give one of them.",
                param="max_completion_tokens",
            )
        return both[0] if both[1] is None else both[1]

    def template_arguments(self) -> dict[str, Any] | None:
        arguments = dict(self.chat_template_kwargs or {})
        for name in ("add_generation_prompt", "continue_final_message"):
            value = getattr(self, name)
            if value is not None:
                arguments[name] = value
        return arguments or None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: str = ""
    prompt: str | UnsetType = UNSET
    messages: list[dict[str, Any]] | UnsetType = UNSET
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str = ""
    tokens: list[int]


def _refuse(name: str, given: bool, instead: str = "leave it out") -> None:
    if given:
        raise ApiError(
            400,
            f"This server does not support {name!r} with that value; {instead}.",
            param=name,
            code="unsupported_parameter",
        )


def check_model(asked: str, served: str) -> None:
    """Raises ApiError 404 for another model than the one that is served."""
    if asked and asked != served:
        raise ApiError(
            404,
            f"The model {asked!r} does not exist; this server has {served!r}.",
            param="model",
            code="model_not_found",
        )
