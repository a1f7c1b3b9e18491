"""The HTTP application: routes, and every error in OpenAI's shape, the framework's own included."""

import logging
import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from protocol.logs import event
from router.api_keys import ApiKeys
from router.disconnect import ClientGone
from router.metrics import Metrics
from router.openai import errors
from router.openai.errors import ApiError
from router.operations import Operations
from router.request_id import STATE, RequestIds
from router.serving import Serving

CLIENT_GONE = 499
"""For the server's log alone: nobody reads it."""
_CREATED = int(time.time())

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(serving: Serving, operations: Operations, keys: ApiKeys, metrics: Metrics, served_model: str) -> FastAPI:
    app = FastAPI(title="kvferry router", openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestIds)
    _add_error_handlers(app, metrics)

    def behind_key(endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            keys.check(request.headers.get("authorization"))
            return await endpoint(request)

        return checked

    models = _Models(served_model)
    app.add_route("/v1/chat/completions", behind_key(serving.chat), methods=["POST"])
    app.add_route("/v1/completions", behind_key(serving.complete), methods=["POST"])
    app.add_route("/v1/models", behind_key(models.all), methods=["GET"])
    app.add_route("/v1/models/{model:path}", behind_key(models.one), methods=["GET"])
    app.add_route("/v1/cluster", behind_key(operations.cluster), methods=["GET"])
    app.add_route("/health", operations.health, methods=["GET"])
    app.add_route("/ready", operations.ready, methods=["GET"])
    app.add_route("/metrics", operations.metrics, methods=["GET"])
    return app


class _Models:
    """GET /v1/models and /v1/models/NAME."""

    def __init__(self, served_model: str) -> None:
        self._model = {"id": served_model, "object": "model", "created": _CREATED, "owned_by": "kvferry"}

    async def all(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def one(self, request: Request) -> Response:
        if request.path_params["model"] != self._model["id"]:
            raise errors.unknown_model(request.path_params["model"][:200])
        return JSONResponse(self._model)


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        answer = error if isinstance(error, ApiError) else _of_framework(request, error)
        metrics.refused(answer.status)
        level = logging.INFO if answer.status < 500 else logging.WARNING
        public_id = getattr(request.state, STATE)
        event(log, "request refused", level, status=answer.status, reason=answer.message, public_id=public_id)
        return answer.response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    for kind in (ClientGone, ClientDisconnect):
        app.add_exception_handler(kind, gone)


def _of_framework(request: Request, error: Exception) -> ApiError:
    if not isinstance(error, HTTPException):
        return errors.our_bug()
    if error.status_code == 404:
        return errors.not_found(request.url.path)
    if error.status_code == 405:
        return errors.wrong_method(request.method, request.url.path, dict(error.headers or {}))
    return ApiError(error.status_code, str(error.detail))
