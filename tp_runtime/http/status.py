"""The status page and the numbers it polls."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from starlette.responses import Response

from tp_runtime.errors import TPRuntimeError
from tp_runtime.http.engine_access import EngineAccess

_FACTS = (
    *("architecture", "tensor_parallel_size", "device", "dtype", "max_model_len"),
    *("num_kv_blocks", "block_size"),
)
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:"
)


@cache
def _page() -> bytes:
    return (files("tp_runtime.http") / "status_page.html").read_bytes()


def page_response() -> Response:
    """One page that loads nothing else."""
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
    return Response(_page(), 200, headers, media_type="text/html")


async def status_of(engine: EngineAccess) -> dict[str, Any]:
    """`facts`, `stats` and `activity` are missing while the coordinator does not answer."""
    state, message = await engine.state()
    found: dict[str, Any] = {"model": engine.model, "state": state, "message": message, "stats": {}}
    try:
        info = await engine.info()
    except TPRuntimeError:
        return found
    return {
        **found,
        "facts": {name: getattr(info, name) for name in _FACTS},
        "stats": {k: v for k, v in info.stats.items() if "{" not in k},
        "activity": msgspec.to_builtins(info.activity),
    }
