"""The one table from a cluster failure to what the client is told."""

import json

import pytest

from protocol.messages import Failure, FailureCode
from router.openai.errors import of_failure

TOLD = {
    FailureCode.INVALID: (400, "invalid_request_error", None),
    FailureCode.TOO_LONG: (400, "invalid_request_error", "context_length_exceeded"),
    FailureCode.OVERLOADED: (503, "server_error", "overloaded"),
    FailureCode.NO_DECODE: (503, "server_error", "no_capacity"),
    FailureCode.NO_PREFILL: (503, "server_error", "no_prefill"),
    FailureCode.DRAINING: (503, "server_error", "draining"),
    FailureCode.INCOMPATIBLE: (503, "server_error", "no_capacity"),
    FailureCode.STALE_PEER: (502, "server_error", "node_failed"),
    FailureCode.TRANSFER_FAILED: (502, "server_error", "node_failed"),
    FailureCode.NODE_LOST: (502, "server_error", "node_lost"),
    FailureCode.UNSUPPORTED: (502, "server_error", "node_failed"),
    FailureCode.DEADLINE: (504, "server_error", "deadline_exceeded"),
    FailureCode.CAPACITY: (500, "server_error", "capacity_exceeded"),
    FailureCode.INTERNAL: (500, "server_error", "internal_error"),
}


@pytest.mark.parametrize("code", FailureCode)
def test_every_failure_has_its_status_type_and_code(code: FailureCode) -> None:
    status, kind, told = TOLD[code]
    response = of_failure(Failure(code, "the reason"), "messages").response()
    error = json.loads(bytes(response.body))["error"]
    assert (response.status_code, error["type"], error["code"]) == (status, kind, told)
    assert error["message"] == "the reason"
    assert error["param"] == ("messages" if code is FailureCode.TOO_LONG else None)


@pytest.mark.parametrize("code", FailureCode)
def test_only_what_may_pass_by_itself_says_when_to_try_again(code: FailureCode) -> None:
    assert ("Retry-After" in of_failure(Failure(code, "x"), "prompt").headers) == (TOLD[code][0] == 503)
