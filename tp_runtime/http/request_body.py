"""The body of a request: read within bounds, decoded into a struct, or refused by name."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from tp_runtime.http.errors import ApiError
from tp_runtime.messages import MAX_MESSAGE_BYTES

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
READ_TIMEOUT_S = 30.0
"""A body that takes longer than this to arrive is given up."""

S = TypeVar("S", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?(?:\[\.\.\.\]\.?)?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


async def read_struct(request: Request, kind: type[S]) -> S:
    """Raises ApiError 400, 408 or 413 with one sentence."""
    body = await _read(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


async def _read(request: Request) -> bytes:
    too_large = ApiError(
        413, f"The body has more than {MAX_BODY_BYTES} bytes; shorten the prompt.", code="too_large"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "The connection was closed before the body was complete.")
                parts.append(message["body"])
                size += len(parts[-1])
                if size > MAX_BODY_BYTES:
                    raise too_large
                if not message["more_body"]:
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {READ_TIMEOUT_S:g} s.") from None


def _refusal(message: str) -> ApiError:
    unknown, missing = _UNKNOWN.search(message), _MISSING.search(message)
    path = _PATH.search(message)
    inside = path.group(1) if path else ""
    if unknown:
        name = ".".join(filter(None, [inside, unknown.group(1)]))
        return ApiError(
            400,
            f"This server does not know the field {name!r}; leave it out.",
            param=name,
            code="unknown_parameter",
        )
    if missing:
        name = ".".join(filter(None, [inside, missing.group(1)]))
        return ApiError(
            400, f"The field {name!r} is missing.", param=name, code="missing_parameter"
        )
    what = message[: path.start()] if path else message
    where = f"The field {inside!r}" if inside else "The body"
    return ApiError(
        400, f"{where} is wrong: {what}.", param=inside or None, code="invalid_parameter"
    )
