"""The pages for operators: /health, /ready, /metrics, /v1/cluster."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from protocol.messages import Role
from router.dispatch import Dispatcher
from router.membership import Member, Membership
from router.policy import why_unfed


class Operations:
    """`alive`: whether the node channel is being read. `clock`: the one that membership is kept on."""

    def __init__(
        self,
        membership: Membership,
        dispatcher: Dispatcher,
        alive: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._dispatcher = dispatcher
        self._alive = alive
        self._clock = clock

    async def health(self, request: Request) -> Response:
        """Whether this process works, whatever the nodes do."""
        return _json({"status": "ok"}) if self._alive() else _json({"status": "node channel is not read"}, 500)

    async def ready(self, request: Request) -> Response:
        """Whether a request would be served now."""
        if self._alive() and self._dispatcher.capacity() > 0:
            return _json({"ready": True})
        return _json({"ready": False, "reason": "no ready decode node with a compatible prefill node"}, 503)

    async def metrics(self, request: Request) -> Response:
        metrics = self._dispatcher.metrics
        metrics.waiting.set(self._dispatcher.queue.waiting)
        for role in Role:
            usable = sum(member.usable for member in self._membership.of_role(role))
            metrics.nodes.labels(role.value).set(usable)
        return Response(metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def cluster(self, request: Request) -> Response:
        """The nodes as the router sees them."""
        now = self._clock()
        prefills = self._membership.of_role(Role.PREFILL)
        return _json([_describe(member, now, _refusal(member, prefills)) for member in self._membership])


def _refusal(member: Member, prefills: Sequence[Member]) -> str | None:
    """Why it is not used whatever it says of itself."""
    if member.refusal is None and member.status.role is Role.DECODE:
        return why_unfed(member, prefills)
    return member.refusal


def _describe(member: Member, now: float, refusal: str | None) -> dict[str, Any]:
    status: dict[str, Any] = msgspec.to_builtins(member.status)
    del status["type"]
    own = {"ready": member.usable and refusal is None, "refusal": refusal, "in_flight": member.in_flight}
    return status | own | {"heartbeat_age_s": round(now - member.seen_at, 3)}


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
