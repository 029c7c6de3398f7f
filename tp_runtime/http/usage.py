"""How many tokens a request took, in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tp_runtime.outputs import RequestOutput


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    return found


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Of finished requests; a prompt counts once, however many samples it has."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )
