"""The routes of the HTTP server, and what holds for all of them: key, errors, counting.

Knows nothing of sockets and processes; `build_app` is given what it serves.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tp_runtime.errors import TPRuntimeError
from tp_runtime.http.chat import Chat
from tp_runtime.http.completions import Completion
from tp_runtime.http.engine_access import READY, EngineAccess
from tp_runtime.http.errors import ApiError, error_response, to_api_error
from tp_runtime.http.event_stream import Disconnected, EventStream, unless_disconnected
from tp_runtime.http.metrics import CONTENT_TYPE, HttpMetrics
from tp_runtime.http.openapi import document
from tp_runtime.http.request_body import read_struct
from tp_runtime.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    check_model,
)
from tp_runtime.http.status import page_response, status_of
from tp_runtime.http.token_texts import TokenTexts

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version", "/status", "/openapi.json"})
"""Need no key: they tell how the server is and take no work."""
GONE = 499
"""Counted, never sent: the client was gone before the answer (the number is nginx's)."""


class Api:
    """The handlers; each returns a response or raises."""

    def __init__(self, engine: EngineAccess, metrics: HttpMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._token_texts: TokenTexts | None = None

    @property
    def _texts(self) -> TokenTexts:
        if self._token_texts is None:
            self._engine.client  # noqa: B018 - raises while there is none; texts follow the model
            self._token_texts = TokenTexts(self._engine.tokenizer)
        return self._token_texts

    async def completions(self, request: Request) -> Response:
        body = await read_struct(request, CompletionRequest)
        return await self._answer(request, body.stream, Completion(body, self._engine, self._texts))

    async def chat_completions(self, request: Request) -> Response:
        body = await read_struct(request, ChatCompletionRequest)
        return await self._answer(request, body.stream, Chat(body, self._engine, self._texts))

    async def _answer(
        self, request: Request, stream: bool | None, work: Completion | Chat
    ) -> Response:
        if stream:
            return EventStream(work.events())
        return json_response(await unless_disconnected(request, work.whole()))

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._model()["id"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        engine = self._engine
        engine.client  # noqa: B018 - raises while the server starts
        return {
            "id": engine.model,
            "object": "model",
            "created": engine.started,
            "owned_by": "tp_runtime",
            "root": engine.model,
            "max_model_len": engine.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        body = await read_struct(request, TokenizeRequest)
        client = self._engine.client
        check_model(body.model, self._engine.model)
        if isinstance(body.messages, list):
            arguments = {"add_generation_prompt": body.add_generation_prompt}
            arguments.update(body.chat_template_kwargs or {})
            prompt = body.prompt if isinstance(body.prompt, str) else None
            ids = await client.tokenize(
                prompt, messages=body.messages, chat_template_kwargs=arguments
            )
        else:
            if not isinstance(body.prompt, str):
                raise ApiError(400, "Give exactly one of prompt and messages.", param="prompt")
            ids = await client.tokenize(body.prompt, add_special_tokens=body.add_special_tokens)
        texts = [self._texts.text(i) for i in ids] if body.return_token_strs else None
        return json_response(
            {
                "count": len(ids),
                "max_model_len": self._engine.max_model_len,
                "tokens": ids,
                "token_strs": texts,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await read_struct(request, DetokenizeRequest)
        client = self._engine.client
        check_model(body.model, self._engine.model)
        return json_response({"prompt": await client.detokenize(body.tokens)})

    async def health(self, request: Request) -> Response:
        state, text = await self._engine.state()
        body = {"status": state, "message": text}
        return json_response(body, 200 if state == READY else 503)

    async def metrics(self, request: Request) -> Response:
        try:
            info = await self._engine.info()
        except TPRuntimeError:
            info = None
        return Response(self._metrics.exposition(info), 200, {"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        return json_response(await status_of(self._engine))

    async def page(self, request: Request) -> Response:
        return page_response()

    async def openapi(self, request: Request) -> Response:
        return json_response(document())

    async def version(self, request: Request) -> Response:
        try:
            number = version("tp_runtime")
        except PackageNotFoundError:
            number = "unknown (not installed)"
        return json_response({"version": number})


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def build_app(engine: EngineAccess, api_key: str = "") -> ASGIApp:
    """The ASGI application. `api_key` empty: none is asked for."""
    metrics = HttpMetrics()
    api = Api(engine, metrics)
    routes = [
        Route("/v1/completions", _guarded(api.completions), methods=["POST"]),
        Route("/v1/chat/completions", _guarded(api.chat_completions), methods=["POST"]),
        Route("/v1/models", _guarded(api.models), methods=["GET"]),
        Route("/v1/models/{name:path}", _guarded(api.model), methods=["GET"]),
        Route("/tokenize", _guarded(api.tokenize), methods=["POST"]),
        Route("/detokenize", _guarded(api.detokenize), methods=["POST"]),
        Route("/health", _guarded(api.health), methods=["GET"]),
        Route("/metrics", _guarded(api.metrics), methods=["GET"]),
        Route("/", _guarded(api.page), methods=["GET"]),
        Route("/status", _guarded(api.status), methods=["GET"]),
        Route("/openapi.json", _guarded(api.openapi), methods=["GET"]),
        Route("/version", _guarded(api.version), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
    direct = {
        "/v1/completions": _guarded(api.completions),
        "/v1/chat/completions": _guarded(api.chat_completions),
    }
    return _Entrance(app, direct, metrics, api_key, frozenset(r.path for r in routes))


def _guarded(handler: Handler) -> Handler:
    """Every error becomes an answer in OpenAI's shape."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except (ApiError, TPRuntimeError) as error:
            return error_response(to_api_error(error))
        except Disconnected:
            return Response(status_code=GONE)
        except Exception as error:
            logger.exception("%s %s failed.", request.method, request.url.path)
            return error_response(to_api_error(error))

    return guarded


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        text = (
            f"There is no {request.url.path} here; the API lies under /v1, for example "
            "/v1/chat/completions."
        )
    elif error.status_code == 405:
        text = f"{request.url.path} does not take {request.method}."
    else:
        text = str(error.detail)
    return error_response(ApiError(error.status_code, text), error.headers)


class _Entrance:
    """Around all routes: asks for the key, and counts what was answered. POSTs to the paths in
    `direct` go straight to their handlers, as the way through Starlette's layers costs a third of
    what the rest does."""

    def __init__(
        self,
        app: ASGIApp,
        direct: dict[str, Handler],
        metrics: HttpMetrics,
        api_key: str,
        paths: frozenset[str],
    ) -> None:
        self._app = app
        self._direct = direct
        self._metrics = metrics
        self._key = f"Bearer {api_key}".encode() if api_key else b""
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"]
        try:
            handler = self._direct.get(path) if scope["method"] == "POST" else None
            if not self._allowed(scope):
                await _no_key(scope, receive, counted)
            elif handler is not None:
                response = await handler(Request(scope, receive, counted))
                await response(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            # A path that does not exist must not become a label of its own.
            name = path if path in self._paths else "other"
            seconds = time.perf_counter() - started
            self._metrics.answered(name, scope["method"], status, seconds)

    def _allowed(self, scope: Scope) -> bool:
        if not self._key or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._key)


async def _no_key(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        401,
        "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
    )
    await error_response(error)(scope, receive, send)
