"""Typed errors. Every message is a sentence for the person who reads it: what was given, what is
possible, what to do. `code` is the stable word that travels on the wire."""

from __future__ import annotations


class TPRuntimeError(Exception):
    """Base of all errors raised by tp_runtime on purpose."""

    code = "error"


class ConfigError(TPRuntimeError, ValueError):
    """A setting, flag or model folder that cannot work; nothing was started."""

    code = "config"


class WeightsError(ConfigError):
    """A checkpoint that does not fit the model: missing, unexpected or wrongly shaped tensors."""

    code = "weights"


class InvalidRequestError(TPRuntimeError, ValueError):
    """A request that can never run as asked; other requests are not disturbed."""

    code = "invalid_request"


class OverloadedError(TPRuntimeError):
    """The server's queue is full; try again later."""

    code = "overloaded"


class RequestTimeoutError(TPRuntimeError, TimeoutError):
    """The request did not finish within its own time limit."""

    code = "timeout"


class RequestCancelledError(TPRuntimeError):
    """The request was cancelled before it finished."""

    code = "cancelled"


class RequestFailedError(TPRuntimeError):
    """The server accepted the request and could not finish it (for example NaN logits)."""

    code = "failed"


class ServerUnavailableError(TPRuntimeError, ConnectionError):
    """Nobody listens at the address, or the server went away and did not come back."""

    code = "unavailable"


class ProtocolError(TPRuntimeError):
    """A message that cannot be understood: garbage, another protocol version, too large."""

    code = "protocol"


class WorkerFailedError(TPRuntimeError):
    """A worker process died, hung or raised; the message names rank, phase and first cause."""

    code = "worker_failed"


_BY_CODE: dict[str, type[TPRuntimeError]] = {
    cls.code: cls
    for cls in (
        TPRuntimeError,
        ConfigError,
        WeightsError,
        InvalidRequestError,
        OverloadedError,
        RequestTimeoutError,
        RequestCancelledError,
        RequestFailedError,
        ServerUnavailableError,
        ProtocolError,
        WorkerFailedError,
    )
}


def error_from_code(code: str, message: str) -> TPRuntimeError:
    """The typed exception for a code that came over the wire; unknown codes give the base class."""
    return _BY_CODE.get(code, TPRuntimeError)(message)
