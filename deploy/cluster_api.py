"""What the router tells an operator about its cluster."""

from types import TracebackType
from typing import Self

import httpx
import msgspec

TIMEOUT_S = 5.0


class NodeView(msgspec.Struct, frozen=True):
    """One node as the router sees it. Fields that we do not read are ignored."""

    role: str
    name: str
    ready: bool
    provider: str
    pages_total: int
    pages_free: int
    pages_quarantined: int

    @property
    def all_pages_back(self) -> bool:
        return self.pages_free == self.pages_total and self.pages_quarantined == 0


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class ClusterApi:
    """A client of one router at `endpoint`, e.g. "http://127.0.0.1:8000"."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._http = httpx.Client(base_url=endpoint, timeout=TIMEOUT_S, trust_env=False)

    def nodes(self) -> list[NodeView]:
        """Raises httpx.HTTPError when the router does not answer, msgspec.DecodeError on an answer of another shape."""
        answer = self._http.get("/v1/cluster").raise_for_status()
        return msgspec.json.decode(answer.content, type=list[NodeView])

    def ready(self) -> bool:
        """Whether the router would serve a request now."""
        return self._http.get("/ready").status_code == httpx.codes.OK

    def model(self) -> str:
        """The name by which clients ask for the served model."""
        answer = self._http.get("/v1/models").raise_for_status()
        return msgspec.json.decode(answer.content, type=_Models).data[0].id

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
