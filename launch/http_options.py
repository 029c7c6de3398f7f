"""The flags that describe the HTTP server, the same for `tp-runtime serve` and under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tp_runtime.http.settings import HttpSettings

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = HttpSettings()
_OPTIONS = (
    click.option(
        "--http/--no-http",
        default=True,
        envvar="TP_RUNTIME_HTTP",
        help="Serve the OpenAI-compatible HTTP API.",
        show_default=True,
    ),
    click.option(
        "--host", default=_DEFAULTS.host, help="Address of the HTTP API.", show_default=True
    ),
    click.option(
        "--port",
        type=int,
        default=_DEFAULTS.port,
        help="Port of the HTTP API; 0 takes any free one.",
        show_default=True,
    ),
    click.option(
        "--api-key",
        default="",
        envvar="TP_RUNTIME_API_KEY",
        help="Key that HTTP clients must send; or in the environment, as TP_RUNTIME_API_KEY.",
    ),
)


def http_options(function: F) -> F:
    """Decorator: --http/--no-http, --host, --port, --api-key."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def take_http_options(options: dict[str, Any]) -> HttpSettings | None:
    """Move the HTTP server's options out of a command's keyword arguments; None: no HTTP."""
    wanted = options.pop("http")
    fields = {name: options.pop(name) for name in HttpSettings.__struct_fields__}
    return HttpSettings(**fields) if wanted else None
