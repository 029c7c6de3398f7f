"""`GET /openapi.json`: the API for programs, made from the structs that bodies are decoded into."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from tp_runtime.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_BODIES = {
    "/v1/completions": (CompletionRequest, "Continue a text."),
    "/v1/chat/completions": (ChatCompletionRequest, "Answer a chat."),
    "/tokenize": (TokenizeRequest, "Text or a chat to token ids."),
    "/detokenize": (DetokenizeRequest, "Token ids to text."),
}
_GETS = {
    "/v1/models": "The model that is served.",
    "/health": "200 when steps can be made, 503 and the reason otherwise.",
    "/version": "The version of tp_runtime.",
    "/status": "What the status page shows.",
}
_PLAIN = {"/metrics": "Metrics in Prometheus' text format.", "/": "The status page."}
_ERRORS = ("400", "401", "404", "408", "413", "429", "503")


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = [kind for kind, _ in _BODIES.values()]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas["Error"] = _ERROR
    paths: dict[str, Any] = {}
    for (path, (_, text)), kind in zip(_BODIES.items(), kinds, strict=True):
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {**_operation(text), "requestBody": body}}
    for path, text in _GETS.items():
        paths[path] = {"get": _operation(text)}
    paths["/health"]["get"]["responses"]["503"] = {"description": "No step can be made now."}
    for path, text in _PLAIN.items():
        paths[path] = {"get": {"summary": text, "responses": {"200": {"description": "The page."}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tp_runtime", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(summary: str) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    responses: dict[str, Any] = {
        status: {"description": "See the message.", "content": {"application/json": error}}
        for status in _ERRORS
    }
    found: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    responses["200"] = {"description": "The answer.", "content": found}
    return {"summary": summary, "responses": responses}


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
