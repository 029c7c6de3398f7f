"""What went wrong, in the shape of OpenAI's API: a status and {"error": {...}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from tp_runtime.errors import (
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerUnavailableError,
    TPRuntimeError,
    WorkerFailedError,
)

_STATUS: tuple[tuple[type[TPRuntimeError], int], ...] = (
    (InvalidRequestError, 400),
    (RequestTimeoutError, 408),
    (OverloadedError, 429),
    (ServerUnavailableError, 503),
    (WorkerFailedError, 503),
    (RequestCancelledError, 503),  # by the server: a client that cancels does not read the answer
    (ConfigError, 503),  # the server could not start
)
_TYPE = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_AFTER_S = "1"


class ApiError(Exception):
    """An error that only HTTP knows. `param` is the field it is about, `code` for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def to_api_error(error: BaseException) -> ApiError:
    """Any error as the one that a client is told of."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TPRuntimeError):
        for kind, status in _STATUS:
            if isinstance(error, kind):
                return ApiError(status, str(error), code=error.code)
        return ApiError(500, str(error), code=error.code)
    return ApiError(500, "The HTTP server failed on this request; its log has more.")


def error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": _TYPE.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    more = dict(headers or {})
    if error.status == 401:
        more["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        more["Retry-After"] = RETRY_AFTER_S
    body = msgspec.json.encode(error_body(error))
    return Response(body, error.status, more, media_type="application/json")
