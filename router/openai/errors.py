"""Errors in OpenAI's shape, and the one table from a cluster failure to an HTTP status.

ApiError            the reply is this status and body; before the first byte an HTTP reply, after it one SSE event
"""

from typing import Any

import msgspec
from starlette.responses import Response

from protocol.messages import Failure, FailureCode

RETRY_AFTER_S = 2
INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """What the client is told. `param` names the field at fault; `headers` go with an HTTP reply."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, self.headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def missing(param: str) -> ApiError:
    return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def unsupported(param: str, message: str) -> ApiError:
    return invalid(message, param, "unsupported_value")


def wrong_type(param: str, wanted: str, value: object) -> ApiError:
    name = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
    return invalid(f"Invalid type for '{param}': expected {wanted}, but got {name} instead.", param, "invalid_type")


def too_long(message: str, param: str) -> ApiError:
    return invalid(message, param, "context_length_exceeded")


def unknown_model(model: str) -> ApiError:
    return ApiError(404, f"The model '{model}' does not exist.", param="model", code="model_not_found")


def not_found(path: str) -> ApiError:
    return ApiError(404, f"Unknown request URL: {path}.")


def wrong_method(method: str, path: str, headers: dict[str, str]) -> ApiError:
    return ApiError(405, f"Not allowed to {method} on {path}.", code="method_not_supported", headers=headers)


def wrong_media_type(media_type: str) -> ApiError:
    return ApiError(415, f"Unsupported Content-Type '{media_type}': send application/json.")


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def body_too_slow(seconds: float) -> ApiError:
    return ApiError(408, f"The request body did not arrive within {seconds:g} seconds.", code="request_timeout")


def no_key() -> ApiError:
    return ApiError(401, "You didn't provide an API key: send it as 'Authorization: Bearer KEY'.")


def wrong_key() -> ApiError:
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key")


def our_bug() -> ApiError:
    return ApiError(500, "The server had an error while processing your request.", kind=SERVER, code="internal_error")


_OF_FAILURE: dict[FailureCode, tuple[int, str, str | None]] = {
    FailureCode.INVALID: (400, INVALID, None),
    FailureCode.TOO_LONG: (400, INVALID, "context_length_exceeded"),
    FailureCode.OVERLOADED: (503, SERVER, "overloaded"),
    FailureCode.NO_DECODE: (503, SERVER, "no_capacity"),
    FailureCode.NO_PREFILL: (503, SERVER, "no_prefill"),
    FailureCode.DRAINING: (503, SERVER, "draining"),
    FailureCode.INCOMPATIBLE: (503, SERVER, "no_capacity"),
    FailureCode.STALE_PEER: (502, SERVER, "node_failed"),
    FailureCode.TRANSFER_FAILED: (502, SERVER, "node_failed"),
    FailureCode.NODE_LOST: (502, SERVER, "node_lost"),
    FailureCode.UNSUPPORTED: (502, SERVER, "node_failed"),
    FailureCode.DEADLINE: (504, SERVER, "deadline_exceeded"),
    FailureCode.CAPACITY: (500, SERVER, "capacity_exceeded"),
    FailureCode.INTERNAL: (500, SERVER, "internal_error"),
}


def of_failure(failure: Failure, prompt_param: str) -> ApiError:
    """`prompt_param`: the field that carries the prompt on this endpoint ("messages" or "prompt")."""
    status, kind, code = _OF_FAILURE[failure.code]
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    param = prompt_param if failure.code is FailureCode.TOO_LONG else None
    return ApiError(status, failure.message, kind=kind, param=param, code=code, headers=headers)
