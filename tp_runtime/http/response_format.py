"""`response_format` of OpenAI's API, as the grammar it asks for. Knows nothing of HTTP."""

from __future__ import annotations

from typing import Any

from tp_runtime.http.errors import ApiError
from tp_runtime.sampling_params import StructuredOutputsParams

_EXAMPLE = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
_SCHEMA_FIELDS = frozenset({"name", "schema", "strict", "description"})


def structured_outputs_of(
    response_format: Any, structured_outputs: StructuredOutputsParams | None
) -> StructuredOutputsParams | None:
    """What the two fields ask for together. Raises ApiError 400."""
    wanted = _of_format(response_format)
    if wanted is None:
        return structured_outputs
    if structured_outputs is not None:
        raise _refusal("response_format and structured_outputs are both given; leave one out.")
    return wanted


def _of_format(given: Any) -> StructuredOutputsParams | None:
    kind = given.get("type") if isinstance(given, dict) else given
    if kind in (None, "text"):
        return None
    if not isinstance(given, dict) or kind not in ("json_object", "json_schema"):
        raise _refusal(
            f'response_format {kind!r} is not known; give {{"type": "text"}}, '
            f'{{"type": "json_object"}} or {_EXAMPLE}.'
        )
    unknown = set(given) - {"type", *(["json_schema"] if kind == "json_schema" else [])}
    if unknown:
        raise _refusal(f"response_format has an unknown field {min(unknown)!r}; leave it out.")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=_schema(given.get("json_schema")))


def _schema(given: Any) -> dict[str, Any]:
    """`strict` changes nothing: a schema is always kept to, or refused."""
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        raise _refusal(f"response_format.json_schema.schema is missing; give {_EXAMPLE}.")
    unknown = set(given) - _SCHEMA_FIELDS
    if unknown:
        raise _refusal(
            f"response_format.json_schema has an unknown field {min(unknown)!r}; leave it out."
        )
    schema: dict[str, Any] = given["schema"]
    return schema


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, param="response_format", code="invalid_parameter")
