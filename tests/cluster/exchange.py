"""One HTTP request that was sent and not yet answered: the test acts in between, then reads, or leaves."""

import http.client
import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

DONE = "[DONE]"
DEADLINE_S = 60.0


class Exchange:
    """Sent by the constructor. Closing it early is what a client does that goes away."""

    def __init__(self, address: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
        self._connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """Waits for the head of the answer."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    @property
    def status(self) -> int:
        return self.response.status

    def json(self) -> Any:
        """The whole body."""
        return json.loads(self.response.read())

    def text(self) -> str:
        """Of a whole completion, which must have succeeded."""
        body = self.json()
        assert self.status == 200, body
        return str(body["choices"][0]["text"])

    def events(self) -> Iterator[str]:
        """The data of each event of a stream, to its end."""
        assert self.status == 200, self.response.read()
        for line in self.response:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode().strip()

    def leave(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


def text_of(events: list[str]) -> str:
    """Of a streamed completion."""
    chunks = [json.loads(data) for data in events if data != DONE]
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", []))


def key_of(event: str) -> str:
    """The request's key in the cluster, from one of its chunks."""
    return str(json.loads(event)["id"]).removeprefix("cmpl-")
