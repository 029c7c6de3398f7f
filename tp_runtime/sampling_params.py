"""How one request is sampled and when it stops. Field names are those of vLLM and OpenAI."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tp_runtime.errors import InvalidRequestError

MAX_LOGPROBS = 64
"""Most top alternatives a request may ask for; bounds the size of an answer message."""
MAX_N = 64
MAX_STOPS = 16
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_BYTES = 1 << 20
"""Longest schema or expression that is compiled."""


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What the generated text must be; exactly one is given. Named as in vLLM.

    `json`: a JSON text that is valid under this JSON schema (a dict, or the schema as text);
    `json_object`: any JSON object; `regex`: a text that the expression matches as a whole (syntax
    of Rust's regex crate: no look-around, no back references); `choice`: one of these texts."""

    json: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None

    def validate(self) -> None:
        """Raises InvalidRequestError. Whether a schema can be used is known when it is compiled."""
        given = (self.json is not None, self.json_object, self.regex is not None)
        if sum(given) + (self.choice is not None) != 1:
            raise InvalidRequestError(
                "structured_outputs takes exactly one of json, json_object, regex and choice."
            )
        if self.choice is not None and (not self.choice or not all(self.choice)):
            raise InvalidRequestError("structured_outputs.choice is a list of texts, none empty.")
        try:
            size = len(msgspec.json.encode([self.json, self.regex, self.choice]))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"structured_outputs.json is not a JSON schema ({error})."
            ) from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"structured_outputs has {size} bytes; it may have {MAX_GRAMMAR_BYTES}."
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one request.

    `temperature=0` is greedy. `seed=None`: the server draws one on admission and returns it.
    `max_tokens=None`: as many as the model's context still holds. `top_k` 0 or -1: off.
    `logprobs=k`: the log-probability (base e, of the distribution before temperature, penalties
    and truncation) of each generated token and of the k most likely ones; `prompt_logprobs`
    likewise for the prompt. Penalties as in OpenAI's API (presence, frequency: over generated
    tokens) and CTRL (repetition: over prompt and generated tokens). `structured_outputs`: only
    tokens that its grammar allows are drawn, an end id exactly where the text may end; the sample
    ends with "stop" when nothing may follow, also before `min_tokens`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def validate(self) -> None:
        """Raises InvalidRequestError, one sentence that names the field, its value and range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (low <= value <= high):  # NaN fails too
                raise InvalidRequestError(
                    f"{name}={value!r} is out of range; it must be between {low} and {high}."
                )
        if not 0.0 < self.top_p:
            raise InvalidRequestError(f"top_p={self.top_p!r} must be greater than 0, up to 1.")
        if not 0.0 < self.repetition_penalty:
            raise InvalidRequestError(
                f"repetition_penalty={self.repetition_penalty!r} must be greater than 0."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}."
            )
        if len(self.stop) > MAX_STOPS or any(not s for s in self.stop):
            raise InvalidRequestError(f"stop takes up to {MAX_STOPS} strings, none of them empty.")
        if len(self.logit_bias) > MAX_LOGIT_BIAS or any(
            not math.isfinite(v) for v in self.logit_bias.values()
        ):
            raise InvalidRequestError(
                f"logit_bias takes up to {MAX_LOGIT_BIAS} token ids with finite values."
            )
        if self.structured_outputs is not None:
            self.structured_outputs.validate()


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_N),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("seed", -(2**63), 2**63 - 1),
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
