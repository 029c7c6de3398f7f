"""What users may pass to generate and chat, turned into messages or refused in one sentence."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tp_runtime.errors import InvalidRequestError
from tp_runtime.messages import Generate
from tp_runtime.sampling_params import SamplingParams

BLOCKING_FLUSH_S = 0.5
"""A caller who waits for the whole answer needs no delta per token; what has come so far is kept
all the same, so that it is not computed again when the coordinator is started again."""

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Messages = Sequence[Mapping[str, Any]]
ParamsArgument = SamplingParams | Sequence[SamplingParams] | None

_FIELDS = SamplingParams.__struct_fields__


def sampling_params(params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """`params`, or new ones of the given fields, checked; raises InvalidRequestError."""
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        close = difflib.get_close_matches(unknown[0], _FIELDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_FIELDS)}."
        raise InvalidRequestError(f"There is no parameter {unknown[0]!r}; {hint}")
    if params is None:
        given = dict(fields)
    elif not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"params is a {type(params).__name__}; give a SamplingParams or keyword arguments."
        )
    elif fields:
        raise InvalidRequestError(
            f"Give either params or {', '.join(sorted(fields))} as keyword arguments, not both."
        )
    else:
        given = msgspec.structs.asdict(params)
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        checked = msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"A sampling parameter is wrong: {error}.") from None
    checked.validate()
    return checked


def params_list(
    params: ParamsArgument, fields: Mapping[str, Any], count: int
) -> list[SamplingParams]:
    """One per prompt; a sequence of them must have as many entries as there are prompts."""
    if params is None or isinstance(params, SamplingParams) or not isinstance(params, Sequence):
        return [sampling_params(params, fields)] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"There are {count} prompts and {len(params)} SamplingParams; give one for all or one "
            "for each."
        )
    return [sampling_params(each, fields) for each in params]


def prompt_list(
    prompts: Prompts | None, prompt_token_ids: Any | None
) -> tuple[list[str | list[int]], bool]:
    """The prompts one by one, and whether only one was given (so that one output is wanted)."""
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequestError("Give either a prompt (or several) or prompt_token_ids.")
    given: Any = prompts if prompt_token_ids is None else prompt_token_ids
    if isinstance(given, str):
        return [given], True
    if not isinstance(given, Sequence) and not hasattr(given, "__iter__"):
        raise InvalidRequestError(
            f"A prompt is a string or a list of token ids, not a {type(given).__name__}."
        )
    items = list(given)
    if not items or _is_id(items[0]):
        return [_ids(items)], True
    return [item if isinstance(item, str) else _ids(item) for item in items], False


def message_lists(messages: Any) -> tuple[list[list[dict[str, Any]]], bool]:
    """The chats one by one, and whether only one was given."""
    if isinstance(messages, Sequence) and messages and not isinstance(messages, str):
        if all(isinstance(message, Mapping) for message in messages):
            return [[dict(message) for message in messages]], True
        if all(isinstance(chat, Sequence) and not isinstance(chat, str) for chat in messages):
            return [message_lists(chat)[0][0] for chat in messages], False
    raise InvalidRequestError(
        'messages is a list of {"role": ..., "content": ...}, or a list of such lists, not empty.'
    )


def generate_message(
    request_id: str,
    prompt: str | list[int] | list[dict[str, Any]],
    params: SamplingParams,
    *,
    is_chat: bool,
    stream: bool,
    options: Mapping[str, Any],
) -> Generate:
    """The message for one prompt; `options` are further fields of Generate."""
    field = "messages" if is_chat else "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return Generate(
        request_id=request_id,
        params=params,
        flush_s=0.0 if stream else BLOCKING_FLUSH_S,
        **{field: prompt, **options},
    )


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__")


def _ids(values: Any) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise InvalidRequestError(
            "A prompt is a string or a list of integer token ids; this one holds something else."
        ) from None
