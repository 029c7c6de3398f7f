"""Tensor-parallel runtime for language models: one coordinator, one worker process per GPU.

    from tp_runtime import LLM, Client, SamplingParams

Names are imported when they are first used, so that `import tp_runtime` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_runtime.async_client import AsyncClient, AsyncTokenStream
    from tp_runtime.client import Client, PendingOutput, TokenStream
    from tp_runtime.errors import (
        ConfigError,
        InvalidRequestError,
        OverloadedError,
        ProtocolError,
        RequestCancelledError,
        RequestFailedError,
        RequestTimeoutError,
        ServerUnavailableError,
        TPRuntimeError,
        WeightsError,
        WorkerFailedError,
    )
    from tp_runtime.llm import LLM
    from tp_runtime.outputs import CompletionOutput, RequestOutput, StreamChunk, Timings
    from tp_runtime.sampling_params import SamplingParams, StructuredOutputsParams

_HOME = {
    "tp_runtime.async_client": ("AsyncClient", "AsyncTokenStream"),
    "tp_runtime.client": ("Client", "PendingOutput", "TokenStream"),
    "tp_runtime.errors": (
        "ConfigError",
        "InvalidRequestError",
        "OverloadedError",
        "ProtocolError",
        "RequestCancelledError",
        "RequestFailedError",
        "RequestTimeoutError",
        "ServerUnavailableError",
        "TPRuntimeError",
        "WeightsError",
        "WorkerFailedError",
    ),
    "tp_runtime.llm": ("LLM",),
    "tp_runtime.outputs": ("CompletionOutput", "RequestOutput", "StreamChunk", "Timings"),
    "tp_runtime.sampling_params": ("SamplingParams", "StructuredOutputsParams"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "LLM",
    "Client",
    "AsyncClient",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "CompletionOutput",
    "StreamChunk",
    "Timings",
    "TokenStream",
    "AsyncTokenStream",
    "PendingOutput",
    "TPRuntimeError",
    "ConfigError",
    "WeightsError",
    "InvalidRequestError",
    "OverloadedError",
    "RequestTimeoutError",
    "RequestCancelledError",
    "RequestFailedError",
    "ServerUnavailableError",
    "ProtocolError",
    "WorkerFailedError",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'tp_runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
